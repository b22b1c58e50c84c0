// Hints to the machine about memory that the engine will touch.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace bfc {

// Puts large tables on 2 MiB pages, so that random access to a million chunks causes fewer TLB misses.
inline void prefer_huge_pages([[maybe_unused]] void* block, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
    const uintptr_t page = uintptr_t{2} << 20, first = (uintptr_t(block) + page - 1) & ~(page - 1);
    const uintptr_t last = (uintptr_t(block) + bytes) & ~(page - 1);
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}

// Without the empty asm GCC decides that a function which only prefetches does nothing, and drops the call.
inline void prefetch(const void* address) {
    __builtin_prefetch(address);
    __asm__ volatile("");
}

}  // namespace bfc
