// Sort orders of chunks, and of sets of bins.
#pragma once

#include <algorithm>
#include <cstdint>

namespace bfc {

// Sorts sets of bins by their streams. A program has few.
template <class Sets, class Numbers>
inline void sort_by_stream(const Sets& sets, Numbers& numbers) noexcept {
    std::sort(numbers.begin(), numbers.end(), [&](uint32_t a, uint32_t b) {
        if (sets[a].lane.stream != sets[b].lane.stream) return sets[a].lane.stream < sets[b].lane.stream;
        return sets[a].lane.thread < sets[b].lane.thread;
    });
}

template <class Chunk, class Handles>
inline void sort_by_falling_size(const Chunk* chunks, Handles& handles) noexcept {
    std::sort(handles.begin(), handles.end(), [=](uint32_t a, uint32_t b) {
        return chunks[a].size != chunks[b].size ? chunks[a].size > chunks[b].size : chunks[a].ptr < chunks[b].ptr;
    });
}

template <class Chunk, class Handles>
inline void sort_by_address(const Chunk* chunks, Handles& handles) noexcept {
    std::sort(handles.begin(), handles.end(), [=](uint32_t a, uint32_t b) { return chunks[a].ptr < chunks[b].ptr; });
}

}  // namespace bfc
