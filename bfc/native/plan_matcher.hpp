// Which slot of a plan a request is for. A run that repeats asks for the same sizes in the same order; one that nearly
// repeats leaves a request out, puts one in, changes a size, or swaps two. The constructor may throw std::bad_alloc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

namespace bfc {

class PlanMatcher {
public:
    static constexpr int64_t kMiss = -1;
    // How far a slot may be from the one that is expected: on the evidence of its size alone, and for each miss in a
    // row if the slot before it was asked for, too.
    static constexpr int64_t kBehind = 16, kAhead = 4, kFarBehind = 64, kFarAhead = 256;
    // The misses that count for that: a request that is nowhere is not looked for among all slots.
    static constexpr int64_t kMostMisses = 8;

    // `sizes` are those of the slots, in the order in which they were asked for.
    PlanMatcher(const uint64_t* sizes, size_t slots)
        : sizes_(slots + 1, 0), served_(slots + 1, 0), by_size_(slots) {
        std::copy(sizes, sizes + slots, sizes_.begin());
        served_[slots] = 1;
        std::iota(by_size_.begin(), by_size_.end(), 0);
        sort();
    }

    // From now on those slots for which `changes(slot)` have other sizes: `size_of(slot)`, 0 for one that is not asked for. What is served stays so.
    template <class Changes, class SizeOf>
    void resize(Changes changes, SizeOf size_of) noexcept {
        for (size_t slot = 0; slot < by_size_.size(); ++slot)
            if (changes(slot)) sizes_[slot] = size_of(slot);
        is_sorted_ = false;     // most iterations come in order, and look nothing up
    }

    // Goes on where another matcher of the same slots is.
    void go_on_as(const PlanMatcher& other) noexcept {
        std::copy(other.served_.begin(), other.served_.end(), served_.begin());
        next_ = other.next_;
        skipped_ = other.skipped_;
        previous_ = other.previous_;
        misses_ = other.misses_;
    }

    // The slot for a request, or kMiss. With `smaller`, a request that is found nowhere takes the slot that was expected
    // if it fills at least half of it.
    int64_t match(uint64_t size, bool smaller) noexcept {
        const int64_t slot = find(size);
        if (slot < 0) return miss(size, smaller);
        take(slot, size);
        return slot;
    }

    // The slot that match() would find by size, or kMiss. Nothing changes but what is known to be served.
    int64_t find(uint64_t size) noexcept {
        if (__builtin_expect(sizes_[next_] == size && !served_[next_], 1)) return next_;
        return find_elsewhere(size);
    }

    // Serves a slot that find() has found for a request.
    void take(int64_t slot, uint64_t size) noexcept {
        skipped_ = kMiss;
        previous_ = size;
        serve(slot);
    }

    // The slot that is expected next, or kMiss: all are served. One without a size is not asked for.
    int64_t expected() noexcept {
        while (next_ < slots() && (served_[next_] || sizes_[next_] == 0)) {
            // many may be served: the program has gone back, and they live
            const void* open = std::memchr(&served_[next_], 0, static_cast<size_t>(slots() - next_));
            next_ = open ? static_cast<const uint8_t*>(open) - served_.data() : slots();
            if (next_ < slots() && sizes_[next_] == 0) ++next_;
        }
        return next_ < slots() ? next_ : kMiss;
    }

    // The first slot that may still be served: what is further behind is not looked for.
    size_t first_open() const noexcept {
        return static_cast<size_t>(std::max<int64_t>(0, next_ - kFarBehind * kMostMisses));
    }

    // Whether one of the slots from `first` up to `end` has this size.
    bool has(uint64_t size, int64_t first, int64_t end) const noexcept {
        return std::find(&sizes_[first], &sizes_[end], size) != &sizes_[end];
    }

    bool is_served(size_t slot) const noexcept { return served_[slot] != 0; }

    // Whether the requests have gone past a slot.
    bool is_past(int64_t slot) noexcept { return served_[slot] || (expected() != slot && next_ > slot && skipped_ != slot); }
    // Whether a slot is the next, or would be but for the request before, which was put in.
    bool comes_now(int64_t slot) noexcept { return !served_[slot] && (expected() == slot || skipped_ == slot); }
    uint64_t size_of(int64_t slot) const noexcept { return sizes_[slot]; }

    // From now on the requests are those of another iteration.
    void restart() noexcept {
        std::fill(served_.begin(), served_.end() - 1, 0);
        next_ = 0;
        skipped_ = kMiss;
        previous_ = 0;
        misses_ = 0;
    }

    // A slot that nothing will ask for in this iteration.
    void leave_out(size_t slot) noexcept { served_[slot] = 1; }

    // The requests for the slots from `first` up to `end` come again, but for those of slots that are served.
    template <class IsServed>
    void go_back(int64_t first, int64_t end, IsServed is_served) noexcept {
        for (int64_t i = first; i < end; ++i) served_[i] = is_served(static_cast<size_t>(i));
        next_ = std::min(next_, first);
        skipped_ = kMiss;
        previous_ = 0;
        misses_ = 0;
    }

private:
    std::vector<uint64_t> sizes_;       // of the slots; the last entry of these two is that of no slot
    std::vector<uint8_t> served_;
    std::vector<uint32_t> by_size_;     // slots by size, then in their order, if `is_sorted_`
    bool is_sorted_ = false;
    int64_t next_ = 0;                  // the slot that is expected
    int64_t skipped_ = kMiss;           // the slot that the request before did not match
    uint64_t previous_ = 0;             // the size of that request
    int64_t misses_ = 0;                // in a row

    void sort() noexcept {
        std::sort(by_size_.begin(), by_size_.end(), [this](uint32_t a, uint32_t b) {
            return sizes_[a] != sizes_[b] ? sizes_[a] < sizes_[b] : a < b;
        });
        is_sorted_ = true;
    }

    int64_t slots() const noexcept { return static_cast<int64_t>(by_size_.size()); }

    __attribute__((noinline)) int64_t find_elsewhere(uint64_t size) noexcept {
        expected();
        if (next_ < slots() && sizes_[next_] == size) return next_;
        if (skipped_ >= 0 && sizes_[skipped_] == size && !served_[skipped_])
            return skipped_;    // the request before this one was put in
        return nearest(size);
    }

    int64_t serve(int64_t slot) noexcept {
        served_[slot] = 1;
        next_ = slot + 1;
        misses_ = 0;
        return slot;
    }

    // The slot that was expected counts as changed: the next request is expected behind it.
    int64_t miss(uint64_t size, bool smaller) noexcept {
        skipped_ = kMiss;
        previous_ = size;
        if (smaller && next_ < slots() && size <= sizes_[next_] && sizes_[next_] - size <= size) return serve(next_);
        ++misses_;
        if (next_ < slots()) skipped_ = next_++;
        return kMiss;
    }

    // Of the slots of this size that nothing has taken: one behind a slot of the previous request's size before others,
    // then the nearest.
    int64_t nearest(uint64_t size) noexcept {
        if (!is_sorted_) sort();
        const int64_t misses = std::min(misses_, kMostMisses);
        const int64_t behind = misses ? kFarBehind * misses : kBehind, ahead = misses ? kFarAhead * misses : kAhead;
        const auto before = [this, size](uint32_t slot, int64_t at) {
            return sizes_[slot] != size ? sizes_[slot] < size : slot < at;
        };
        auto found = std::lower_bound(by_size_.begin(), by_size_.end(), next_ - behind, before);
        int64_t best = kMiss, least = INT64_MAX;
        for (; found != by_size_.end() && sizes_[*found] == size && *found <= next_ + ahead; ++found) {
            const int64_t slot = *found, away = slot - next_;
            if (served_[slot]) continue;
            const bool agrees = slot > 0 && sizes_[slot - 1] == previous_;
            if (!agrees && (away < -kBehind || away > kAhead)) continue;
            const int64_t rank = (away < 0 ? -2 * away : 2 * away + 1) + (agrees ? 0 : 64);
            if (rank < least) {
                least = rank;
                best = slot;
            }
        }
        return best;
    }
};

}  // namespace bfc
