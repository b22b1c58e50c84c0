// Whether two blocks of a layout have an address in common while both live. It shares nothing with the planner: it goes
// through time once, and keeps what lives in the order of the addresses. It may throw std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace bfc {

struct Overlap {
    int64_t first = -1, second = -1;    // -1: there is none
};

// Births and deaths in the order of time, deaths first where both come at once. Blocks are not empty.
inline Overlap find_overlap(size_t changes, const uint32_t* block, const uint8_t* is_birth, const uint64_t* offset,
                            const uint64_t* size) {
    std::map<uint64_t, uint32_t> live;      // by offset
    for (size_t i = 0; i < changes; ++i) {
        const uint32_t changed = block[i];
        const uint64_t low = offset[changed];
        if (!is_birth[i]) {
            live.erase(low);
            continue;
        }
        const auto above = live.lower_bound(low);
        if (above != live.end() && above->first < low + size[changed]) return {above->second, changed};
        if (above != live.begin()) {
            const auto below = std::prev(above);
            if (below->first + size[below->second] > low) return {below->second, changed};
        }
        live.emplace_hint(above, low, changed);
    }
    return {};
}

}  // namespace bfc
