// The structures that lie inside a pool as values, declared. Every module that knows a pool needs their fields. What they
// do stands in headers of their own (starts.hpp, ...), which the modules that call them name: see forward.hpp.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "reasons.hpp"

namespace bfc {

// Finds the chunk in use that starts at an address: a hash table of handles, whose size follows the number of chunks in
// use. (TensorFlow keeps one handle for each 256 bytes of every region: 2.5 GiB of host memory for an 80 GiB pool.)
//
// Chunks start at multiples of 256, so a slot keeps the 32 bits of the address above the lowest 8: within 1 TiB that is
// the whole address. Beyond that the caller compares the chunk's own address.
class Starts {
public:
    static constexpr uint32_t kNone = 0xFFFFFFFF;

    Starts() = default;
    Starts(const Starts&) = delete;
    Starts& operator=(const Starts&) = delete;
    ~Starts();

    // Makes room for one more. False: the host is out of memory, and nothing has changed.
    bool reserve();
    // Like reserve, for a caller that cannot fail: if the table cannot grow, it is filled until two slots are empty.
    bool reserve_at_all_costs();
    // Prefetches the slot of this address. Needs a reserve() before it.
    void prefetch_slot(uint64_t address) const;
    // Needs a reserve() before it.
    void insert(uint64_t address, uint32_t handle);
    // `same(handle)` says whether that chunk starts at exactly this address.
    template <class Same>
    uint32_t find(uint64_t address, Same same) const;
    // The same, and takes it out.
    template <class Same>
    uint32_t take(uint64_t address, Same same);
    void erase(uint64_t address, uint32_t handle);
    size_t count() const;
    size_t bytes() const;

private:
    struct Slot {
        uint32_t key;
        uint32_t handle;
    };
    static constexpr size_t kNowhere = ~size_t{0};
    static constexpr int kFirstBits = 8;

    Slot* slots_ = nullptr;
    int bits_ = 0;
    size_t count_ = 0;

    size_t size() const;
    size_t mask() const;
    static uint32_t key_of(uint64_t address);
    size_t home(uint32_t key) const;
    template <class Same>
    size_t position(uint64_t address, Same same) const;
    void erase_at(size_t hole);
    bool grow();
};

enum PendingReason : uint32_t {
    kLockTaken,      // a finaliser, which must not wait, found the lock taken; or the free failed and is to be repeated
    kNotIdle,        // a caller without the GIL could not wait for the device, or could not read who uses the memory
    kNoHostMemory,   // the chunk waits for nothing any more, but the bookkeeping could not grow
    kDeviceFailed,   // the device failed for it: it is tried again only where a user asks for that
};

struct PendingFree {
    uint32_t handle;
    uint32_t reason;
    int64_t allocation_id;  // -1: the chunk has no owner any more, and waits
};

// Frees that were left to a later call, each with the reason. Who adds an entry holds the GIL, or else the lock of the
// allocator. A fork takes both, so that no thread is inside of these sections when the process is copied. They call
// nothing, so who waits for one does not wait long.
class PendingFrees {
public:
    // The bit of `reasons` is set as long as any entry is due.
    void attach(Reasons* reasons, uint32_t bit) noexcept;
    // Makes room for one entry a chunk, so that adding one needs no memory.
    bool reserve(size_t chunks) noexcept;
    void add(uint32_t handle, int64_t allocation_id, uint32_t reason) noexcept;
    // Moves the oldest entries that are due to `out`. Returns how many.
    size_t take(PendingFree* out, size_t room) noexcept;
    size_t due() noexcept;
    // From now on those are due, too, for which the device failed.
    void try_failed_again() noexcept;
    void clear() noexcept;

private:
    class Section;

    void tell() noexcept;
    void drop_outdated() noexcept;

    std::vector<PendingFree> items_;
    size_t due_ = 0;
    Reasons* reasons_ = nullptr;
    uint32_t bit_ = 0;
    std::atomic<bool> inside_{false};
};

// How Python's tracemalloc is told of a chunk (with the GIL held), and of its end (with or without the GIL).
struct Tracing {
    unsigned domain;        // 0: it is told of no chunk
    int (*tell)(unsigned domain, uintptr_t ptr, size_t size);
    int (*forget)(unsigned domain, uintptr_t ptr);
};

// The bytes in use of each owner, by its number, and the owners' numbers in the chunks.
class OwnedBytes {
public:
    Tracing tracing{};

    OwnedBytes() = default;
    ~OwnedBytes();
    OwnedBytes(const OwnedBytes&) = delete;
    OwnedBytes& operator=(const OwnedBytes&) = delete;

    bool knows(uint32_t owner) const noexcept;
    // Makes room to count an owner's bytes. False: the host has no memory for it.
    bool know(uint32_t owner) noexcept;
    // Gives a chunk in use to an owner, for which know() has returned true.
    template <class Chunk>
    void give(Chunk* chunk, uint32_t owner) noexcept;
    // For a chunk that goes out of use. The caller overwrites its state.
    template <class Chunk>
    void take_back(const Chunk* chunk) noexcept;
    // For a chunk in use that has grown. The caller holds the GIL.
    template <class Chunk>
    void grew(const Chunk* chunk, uint64_t by) noexcept;
    bool copy(std::vector<uint64_t>& out) const noexcept;

private:
    template <class Chunk>
    void take_back_marked(const Chunk* chunk) noexcept;

    static constexpr uint32_t kFirst = 64;

    uint64_t* bytes_ = nullptr;
    uint32_t known_ = 0;
};

// PyTorch's size arithmetic: what a request is rounded to, and how much is requested from the driver for it.
struct TorchSizes {
    static constexpr uint64_t kMinimum = 512;
    static constexpr uint64_t kSmall = uint64_t{1} << 20;               // up to here a request is small
    static constexpr uint64_t kSmallSegment = uint64_t{2} << 20;
    static constexpr uint64_t kOwnSegment = uint64_t{10} << 20;         // from here on a request gets a segment its size
    static constexpr uint64_t kSegmentStep = uint64_t{2} << 20;
    static constexpr int kIntervals = 16;                               // each is a doubling; the first is from 1 MiB

    uint64_t large_segment = uint64_t{20} << 20;
    uint64_t granularity = kMinimum;                                    // a power of two; larger if the device needs it
    uint64_t largest_segment = ~uint64_t{0};                            // the most that the device gives in one call
    bool divides = false;
    uint8_t division_bits[kIntervals] = {};                             // 0: rounded to 512

    uint64_t round(uint64_t size) const;
    static bool is_large(uint64_t rounded) { return rounded > kSmall; }
    uint64_t segment_for(uint64_t rounded) const;

private:
    static uint64_t up_to(uint64_t size, uint64_t step);
};

}  // namespace bfc
