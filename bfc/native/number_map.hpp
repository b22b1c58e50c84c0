// A map from 64-bit words to numbers, for a few million entries that come from a file.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace bfc {

// Open addressing. The multiplier differs from table to table, so that no file can be made whose keys collide.
class NumberMap {
public:
    static constexpr int64_t kNone = -2;    // returned by `find` for a missing key; values are -1 to 2**31 - 1

    NumberMap() : multiplier_(seed() | 1), slots_(64) {}

    int64_t find(uint64_t key) const noexcept {
        return slots_[place(slots_, key)].value;
    }

    // May throw std::bad_alloc; then nothing has changed.
    void put(uint64_t key, int64_t value) {
        if (4 * (count_ + 1) > 3 * slots_.size()) grow();
        Slot& slot = slots_[place(slots_, key)];
        count_ += slot.value == kNone;
        slot = {key, static_cast<int32_t>(value)};
    }

private:
    struct Slot {
        uint64_t key = 0;
        int32_t value = kNone;
    };

    uint64_t multiplier_;
    std::vector<Slot> slots_;
    size_t count_ = 0;

    uint64_t seed() const {
        const uint64_t now = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
        uint64_t mixed = (now ^ reinterpret_cast<uintptr_t>(this)) + 0x9e3779b97f4a7c15u;
        mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9u;
        mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111ebu;
        return mixed ^ (mixed >> 31);
    }

    size_t place(const std::vector<Slot>& slots, uint64_t key) const noexcept {
        const size_t mask = slots.size() - 1;
        uint64_t hash = (key ^ (key >> 32)) * multiplier_;
        size_t at = (hash ^ (hash >> 29)) & mask;
        while (slots[at].value != kNone && slots[at].key != key) at = (at + 1) & mask;
        return at;
    }

    void grow() {
        std::vector<Slot> larger(2 * slots_.size());
        for (const Slot& slot : slots_)
            if (slot.value != kNone) larger[place(larger, slot.key)] = slot;
        slots_.swap(larger);
    }
};

}  // namespace bfc
