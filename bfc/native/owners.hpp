// The bytes in use of each owner, by its number, and the numbers in the chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace bfc {

constexpr uint32_t kOwnerShift = 16;    // the bits of Chunk.state from here on: the owner's number; 0: nobody

class OwnedBytes {
public:
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

    // A chunk in use belongs to an owner that is known.
    template <class Chunk>
    void give(Chunk* chunk, uint32_t owner) noexcept {
        chunk->state |= owner << kOwnerShift;
        bytes_[owner] += chunk->size;
    }
    // A chunk goes out of use. The caller overwrites its state.
    template <class Chunk>
    void take_back(const Chunk* chunk) noexcept {
        if (chunk->state >> kOwnerShift) bytes_[chunk->state >> kOwnerShift] -= chunk->size;
    }
    // A chunk in use has grown.
    template <class Chunk>
    void grew(const Chunk* chunk, uint64_t by) noexcept {
        if (chunk->state >> kOwnerShift) bytes_[chunk->state >> kOwnerShift] += by;
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
    static constexpr uint32_t kFirst = 64;

    uint64_t* bytes_ = nullptr;
    uint32_t known_ = 0;
};

}  // namespace bfc
