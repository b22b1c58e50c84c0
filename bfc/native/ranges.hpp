// The search of a request that may use a lane's chunks in ordinary regions and in ranges (expandable segments). Kept
// out of line: inlined, it would make every replay slower.
#pragma once

#include <cstdint>

#include "bins.hpp"

namespace bfc {

inline bool comes_before(const FreeChunk& one, const FreeChunk& other) {
    return key_of(one.size, one.order) < key_of(other.size, other.order);
}

// How large a chunk of a range could grow: with the unmapped chunk right behind it, if there is one. `Chunk` is the
// struct of _core.pxd.
template <class Chunk>
uint64_t room_of(const Chunk* chunks, uint32_t no_chunk, uint32_t unmapped, const FreeChunk& found) {
    const uint32_t behind = chunks[found.handle].next;
    if (behind == no_chunk || chunks[behind].state != unmapped) return found.size;
    return found.size + chunks[behind].size;
}

// The best fit of `rounded` bytes among both. A chunk of a range with less room to grow is preferred to one with more
// (PyTorch's behaviour, 11.4). Returns 0: there is none; 1: it lies in a region; 2: it lies in a range.
template <class Chunk>
BFC_COLD int find_in_both(Bins& plain_bins, Bins& range_bins, const Chunk* chunks, uint32_t no_chunk, uint32_t unmapped,
                          uint64_t rounded, FreeChunk& found) {
    FreeChunk plain, following;
    const bool some_plain = plain_bins.lower_bound(rounded, 0, plain);
    bool some = range_bins.lower_bound(rounded, 0, found);
    while (some && !(some_plain && comes_before(plain, found))) {
        const uint64_t room = room_of(chunks, no_chunk, unmapped, found);
        some = range_bins.lower_bound(found.size, found.order + 1, following);
        if (!some || (some_plain && comes_before(plain, following))) {
            if (!some_plain || plain.size >= room) return 2;
            break;
        }
        if (room_of(chunks, no_chunk, unmapped, following) >= room) return 2;
        found = following;
    }
    found = plain;
    return some_plain ? 1 : 0;
}

}  // namespace bfc
