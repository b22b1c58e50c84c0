// What `Starts` does: the chunks in use by address. parts.hpp declares it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "debug.h"
#include "memory.hpp"
#include "parts.hpp"

namespace bfc {

inline Starts::~Starts() { std::free(slots_); }

inline size_t Starts::size() const { return slots_ ? size_t{1} << bits_ : 0; }

inline size_t Starts::mask() const { return (size_t{1} << bits_) - 1; }

inline uint32_t Starts::key_of(uint64_t address) { return static_cast<uint32_t>(address >> 8); }

inline size_t Starts::home(uint32_t key) const { return (key * uint32_t{0x9E3779B1}) >> (32 - bits_); }

inline size_t Starts::count() const { return count_; }

inline size_t Starts::bytes() const { return size() * sizeof(Slot); }

template <class Same>
inline size_t Starts::position(uint64_t address, Same same) const {
    if (!slots_) return kNowhere;
    const uint32_t key = key_of(address);
    for (size_t i = home(key); slots_[i].handle != kNone; i = (i + 1) & mask())
        if (slots_[i].key == key && same(slots_[i].handle)) return i;
    return kNowhere;
}

inline bool Starts::grow() {
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

inline bool Starts::reserve() { return 3 * (count_ + 1) <= 2 * size() || grow(); }

inline bool Starts::reserve_at_all_costs() { return reserve() || (slots_ && count_ + 2 < size()); }

inline void Starts::prefetch_slot(uint64_t address) const { prefetch(&slots_[home(key_of(address))]); }

inline void Starts::insert(uint64_t address, uint32_t handle) {
    const uint32_t key = key_of(address);
    size_t i = home(key);
    while (slots_[i].handle != kNone) i = (i + 1) & mask();
    slots_[i] = Slot{key, handle};
    ++count_;
}

template <class Same>
inline uint32_t Starts::find(uint64_t address, Same same) const {
    const size_t i = position(address, same);
    return i == kNowhere ? kNone : slots_[i].handle;
}

template <class Same>
inline uint32_t Starts::take(uint64_t address, Same same) {
    const size_t i = position(address, same);
    if (i == kNowhere) return kNone;
    const uint32_t handle = slots_[i].handle;
    erase_at(i);
    return handle;
}

inline void Starts::erase(uint64_t address, uint32_t handle) {
    const size_t i = position(address, [handle](uint32_t other) { return other == handle; });
    BFC_ASSERT(i != kNowhere, "an address is taken out of the table that does not hold it");
    erase_at(i);
}

inline void Starts::erase_at(size_t hole) {
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

}  // namespace bfc
