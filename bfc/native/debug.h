// Three levels of assertions. 0: only the arguments that users pass are checked. 1: also O(1) assertions inside.
// 2: also a complete check() after each change. `make check` runs the suite with 2.
#pragma once

#include <cstdio>
#include <cstdlib>

#ifndef BFC_DEBUG
#define BFC_DEBUG 0
#endif

#if BFC_DEBUG >= 1
#define BFC_ASSERT(condition, text) \
    ((condition) ? (void)0 : (std::fprintf(stderr, "bfc: %s (%s:%d)\n", text, __FILE__, __LINE__), std::abort()))
#else
#define BFC_ASSERT(condition, text) ((void)0)
#endif
