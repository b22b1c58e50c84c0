// Pages straight from the operating system, for memory that is registered with a driver.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <thread>
#include <vector>

namespace bfc {

constexpr size_t TOUCHED_PAGE = 4096;

// Returns nullptr if there is no room.
inline void* map_pages(size_t nbytes) noexcept {
    void* start = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return start == MAP_FAILED ? nullptr : start;
}

inline void unmap_pages(void* start, size_t nbytes) noexcept { munmap(start, nbytes); }

inline void touch_range(char* start, char* end) noexcept {
    for (char* page = start; page < end; page += TOUCHED_PAGE) *static_cast<volatile char*>(page) = 0;
}

// Writes to every page, so that all of them are resident when the driver pins them. If a thread cannot be started, the
// calling thread does that part.
inline void touch_pages(void* memory, size_t nbytes, unsigned threads) noexcept {
    char* start = static_cast<char*>(memory);
    char* end = start + nbytes;
    if (threads < 1 || nbytes / TOUCHED_PAGE < threads) threads = 1;
    const size_t share = (nbytes / TOUCHED_PAGE / threads + 1) * TOUCHED_PAGE;
    std::vector<std::thread> helpers;
    try {
        while (--threads > 0 && static_cast<size_t>(end - start) > share) {
            helpers.emplace_back(touch_range, start, start + share);
            start += share;
        }
    } catch (...) {
    }
    touch_range(start, end);
    for (std::thread& helper : helpers) helper.join();
}

}  // namespace bfc
