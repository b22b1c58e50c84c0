// The bytes in use of each owner, by its number, and the owners' numbers in the chunks. Code that only chunks with
// owners need is kept out of line, away from the loops that handle all chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace bfc {

constexpr uint32_t kOwnerShift = 16;    // the bits of Chunk.state from here on: the owner's number; 0: nobody
constexpr uint32_t kTraced = 0x2000;    // a bit of Chunk.state: Python's tracemalloc knows of the chunk
constexpr uint32_t kMarks = kTraced | ~uint32_t{0} << kOwnerShift;

// How Python's tracemalloc is told of a chunk (with the GIL held), and of its end (with or without the GIL).
struct Tracing {
    unsigned domain;        // 0: it is told of no chunk
    int (*tell)(unsigned domain, uintptr_t ptr, size_t size);
    int (*forget)(unsigned domain, uintptr_t ptr);
};

class OwnedBytes {
public:
    Tracing tracing{};

    OwnedBytes() = default;
    ~OwnedBytes() { std::free(bytes_); }
    OwnedBytes(const OwnedBytes&) = delete;
    OwnedBytes& operator=(const OwnedBytes&) = delete;

    bool knows(uint32_t owner) const noexcept { return owner == 0 || owner < known_; }

    // Makes room to count an owner's bytes. False: the host has no memory for it.
    bool know(uint32_t owner) noexcept {
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

    // Gives a chunk in use to an owner, for which know() has returned true.
    template <class Chunk>
    __attribute__((noinline)) void give(Chunk* chunk, uint32_t owner) noexcept {
        chunk->state |= owner << kOwnerShift;
        bytes_[owner] += chunk->size;
    }
    // For a chunk that goes out of use. The caller overwrites its state.
    template <class Chunk>
    void take_back(const Chunk* chunk) noexcept {
        if (__builtin_expect(chunk->state & kMarks, 0)) take_back_marked(chunk);
    }
    // For a chunk in use that has grown. The caller holds the GIL.
    template <class Chunk>
    void grew(const Chunk* chunk, uint64_t by) noexcept {
        if (chunk->state >> kOwnerShift) bytes_[chunk->state >> kOwnerShift] += by;
        if (chunk->state & kTraced) tracing.tell(tracing.domain, chunk->ptr, chunk->size);
    }

    bool copy(std::vector<uint64_t>& out) const noexcept {
        try {
            out.assign(bytes_, bytes_ + known_);
        } catch (...) {
            return false;
        }
        return true;
    }

private:
    template <class Chunk>
    __attribute__((noinline)) void take_back_marked(const Chunk* chunk) noexcept {
        if (chunk->state >> kOwnerShift) bytes_[chunk->state >> kOwnerShift] -= chunk->size;
        if (chunk->state & kTraced) tracing.forget(tracing.domain, chunk->ptr);
    }

    static constexpr uint32_t kFirst = 64;

    uint64_t* bytes_ = nullptr;
    uint32_t known_ = 0;
};

}  // namespace bfc
