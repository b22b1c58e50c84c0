// Why an allocation or a free has more to do than ask the pool, as bits: one load decides for the fast path.
#pragma once

#include <atomic>
#include <cstdint>

namespace bfc {

class Reasons {
public:
    // Without the GIL, and without the lock that guards a reason, the answer may be slightly out of date.
    bool none() const noexcept { return bits_.load(std::memory_order_relaxed) == 0; }
    bool has(uint32_t any) const noexcept { return (bits_.load(std::memory_order_relaxed) & any) != 0; }

    void put(uint32_t bit, bool is_set) noexcept {
        if (is_set)
            bits_.fetch_or(bit);
        else
            bits_.fetch_and(~bit);
    }

private:
    std::atomic<uint32_t> bits_{0};
};

}  // namespace bfc
