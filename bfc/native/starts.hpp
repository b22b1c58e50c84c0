// Finds the chunk in use that starts at an address: a hash table of handles, whose size follows the number of chunks in
// use. (TensorFlow keeps one handle for each 256 bytes of every region: 2.5 GiB of host memory for an 80 GiB pool.)
//
// Chunks start at multiples of 256, so a slot keeps the 32 bits of the address above the lowest 8: within 1 TiB that is
// the whole address. Beyond that the caller compares the chunk's own address.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "debug.h"
#include "memory.hpp"

namespace bfc {

class Starts {
public:
    static constexpr uint32_t kNone = 0xFFFFFFFF;

    Starts() = default;
    Starts(const Starts&) = delete;
    Starts& operator=(const Starts&) = delete;
    ~Starts() { std::free(slots_); }

    // Makes room for one more. False: the host is out of memory, and nothing has changed.
    bool reserve() { return 3 * (count_ + 1) <= 2 * size() || grow(); }

    // Like reserve, for a caller that cannot fail: if the table cannot grow, it is filled until two slots are empty.
    bool reserve_at_all_costs() { return reserve() || (slots_ && count_ + 2 < size()); }

    // Prefetches the slot of this address. Needs a reserve() before it.
    void prefetch_slot(uint64_t address) const { prefetch(&slots_[home(key_of(address))]); }

    // Needs a reserve() before it.
    void insert(uint64_t address, uint32_t handle) {
        const uint32_t key = key_of(address);
        size_t i = home(key);
        while (slots_[i].handle != kNone) i = (i + 1) & mask();
        slots_[i] = Slot{key, handle};
        ++count_;
    }

    // `same(handle)` says whether that chunk starts at exactly this address.
    template <class Same>
    uint32_t find(uint64_t address, Same same) const {
        const size_t i = position(address, same);
        return i == kNowhere ? kNone : slots_[i].handle;
    }

    void erase(uint64_t address, uint32_t handle) {
        size_t hole = position(address, [handle](uint32_t other) { return other == handle; });
        BFC_ASSERT(hole != kNowhere, "an address is taken out of the table that does not hold it");
        --count_;
        // Move entries back that the hole would cut off from their home slot.
        for (size_t i = (hole + 1) & mask(); slots_[i].handle != kNone; i = (i + 1) & mask()) {
            const size_t wanted = home(slots_[i].key);
            if (((i - wanted) & mask()) < ((i - hole) & mask())) continue;
            slots_[hole] = slots_[i];
            hole = i;
        }
        slots_[hole].handle = kNone;
    }

    size_t count() const { return count_; }
    size_t bytes() const { return size() * sizeof(Slot); }

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

    size_t size() const { return slots_ ? size_t{1} << bits_ : 0; }
    size_t mask() const { return (size_t{1} << bits_) - 1; }
    static uint32_t key_of(uint64_t address) { return static_cast<uint32_t>(address >> 8); }
    size_t home(uint32_t key) const { return (key * uint32_t{0x9E3779B1}) >> (32 - bits_); }

    template <class Same>
    size_t position(uint64_t address, Same same) const {
        if (!slots_) return kNowhere;
        const uint32_t key = key_of(address);
        for (size_t i = home(key); slots_[i].handle != kNone; i = (i + 1) & mask())
            if (slots_[i].key == key && same(slots_[i].handle)) return i;
        return kNowhere;
    }

    bool grow() {
        const int bits = slots_ ? bits_ + 1 : kFirstBits;
        if (bits > 31) return false;
        Slot* fresh = static_cast<Slot*>(std::malloc((size_t{1} << bits) * sizeof(Slot)));
        if (!fresh) return false;
        prefer_huge_pages(fresh, (size_t{1} << bits) * sizeof(Slot));
        std::memset(fresh, 0xFF, (size_t{1} << bits) * sizeof(Slot));
        Slot* old = slots_;
        const size_t old_size = size();
        slots_ = fresh;
        bits_ = bits;
        count_ = 0;
        for (size_t i = 0; i < old_size; ++i) {
            if (old[i].handle == kNone) continue;
            size_t j = home(old[i].key);
            while (slots_[j].handle != kNone) j = (j + 1) & mask();
            slots_[j] = old[i];
            ++count_;
        }
        std::free(old);
        return true;
    }
};

}  // namespace bfc
