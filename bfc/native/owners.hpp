// What `OwnedBytes` does: the bytes in use by owner. parts.hpp declares it. Code that only chunks with owners need is kept
// out of line, away from the loops that handle all chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "parts.hpp"

namespace bfc {

constexpr uint32_t kOwnerShift = 16;    // the bits of Chunk.state from here on: the owner's number; 0: nobody
constexpr uint32_t kTraced = 0x2000;    // a bit of Chunk.state: Python's tracemalloc knows of the chunk
constexpr uint32_t kMarks = kTraced | ~uint32_t{0} << kOwnerShift;

inline OwnedBytes::~OwnedBytes() { std::free(bytes_); }

inline bool OwnedBytes::knows(uint32_t owner) const noexcept { return owner == 0 || owner < known_; }

inline bool OwnedBytes::know(uint32_t owner) noexcept {
    if (knows(owner)) return true;
    uint32_t known = std::max(kFirst, known_);
    while (known <= owner) known *= 2;
    void* block = std::realloc(bytes_, known * sizeof(uint64_t));
    if (block == nullptr) return false;
    bytes_ = static_cast<uint64_t*>(block);
    std::memset(bytes_ + known_, 0, (known - known_) * sizeof(uint64_t));
    known_ = known;
    return true;
}

template <class Chunk>
__attribute__((noinline)) void OwnedBytes::give(Chunk* chunk, uint32_t owner) noexcept {
    chunk->state |= owner << kOwnerShift;
    bytes_[owner] += chunk->size;
}

template <class Chunk>
__attribute__((noinline)) void OwnedBytes::take_back_marked(const Chunk* chunk) noexcept {
    if (chunk->state >> kOwnerShift) bytes_[chunk->state >> kOwnerShift] -= chunk->size;
    if (chunk->state & kTraced) tracing.forget(tracing.domain, chunk->ptr);
}

template <class Chunk>
inline void OwnedBytes::take_back(const Chunk* chunk) noexcept {
    if (__builtin_expect(chunk->state & kMarks, 0)) take_back_marked(chunk);
}

template <class Chunk>
inline void OwnedBytes::grew(const Chunk* chunk, uint64_t by) noexcept {
    if (chunk->state >> kOwnerShift) bytes_[chunk->state >> kOwnerShift] += by;
    if (chunk->state & kTraced) tracing.tell(tracing.domain, chunk->ptr, chunk->size);
}

inline bool OwnedBytes::copy(std::vector<uint64_t>& out) const noexcept {
    try {
        out.assign(bytes_, bytes_ + known_);
    } catch (...) {
        return false;
    }
    return true;
}

}  // namespace bfc
