// Assertions at three prices. 0: what users pass is checked at the public door. 1: also O(1) assertions inside.
// 2: also a whole check() after each change. `make check` runs the suite with 2.
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
