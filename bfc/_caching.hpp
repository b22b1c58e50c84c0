// What PyTorch's policy asks of C++: numbers of threads, and orders of chunks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace bfc {

// A number for each thread that no other thread has or will have; the system's numbers come back.
inline uint64_t thread_number() noexcept {
    static std::atomic<uint64_t> last{0};
    static thread_local const uint64_t mine = ++last;
    return mine;
}

// Sets of bins in order of their streams. A program has few.
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

}  // namespace bfc
