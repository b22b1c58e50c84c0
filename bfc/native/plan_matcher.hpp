// Which slot of a plan a request is for. A run that repeats asks for the same sizes in the same order; one that nearly
// repeats leaves a request out, puts one in, changes a size, or swaps two. The constructor may throw std::bad_alloc.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
        : sizes_(slots + 1, 0), served_(slots + 1, 0) {
        std::copy(sizes, sizes + slots, sizes_.begin());
        served_[slots] = 1;
    }

    // From now on a slot has another size: 0 if it is not asked for. Whether it is served stays as it is.
    void resize(size_t slot, uint64_t size) noexcept { sizes_[slot] = size; }

    // Goes on where another matcher of the same slots is, at the lengths that it knows.
    void go_on_as(const PlanMatcher& other) noexcept {
        std::copy(other.served_.begin(), other.served_.end(), served_.begin());
        std::copy(other.sizes_.begin(), other.sizes_.end(), sizes_.begin());
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

    int64_t slots() const noexcept { return static_cast<int64_t>(sizes_.size()) - 1; }
    // How many slots are at or behind the next one.
    int64_t left() const noexcept { return slots() - next_; }

    // The slots up to this one, and it as well, will not be asked for: the requests have gone past them.
    void pass(int64_t slot) noexcept {
        served_[slot] = 1;
        next_ = slot + 1;
        skipped_ = kMiss;
        misses_ = 0;
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
    // Whether a request of this size is the one that is expected.
    bool comes_next(uint64_t size) noexcept { return expected() >= 0 && sizes_[next_] == size; }
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
    int64_t next_ = 0;                  // the slot that is expected
    int64_t skipped_ = kMiss;           // the slot that the request before did not match
    uint64_t previous_ = 0;             // the size of that request
    int64_t misses_ = 0;                // in a row


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
    // then the nearest. All that may be meant are looked at: they are at most a few thousand, and sizes change too often
    // for an index of them.
    int64_t nearest(uint64_t size) const noexcept {
        const int64_t misses = std::min(misses_, kMostMisses);
        const int64_t behind = misses ? kFarBehind * misses : kBehind, ahead = misses ? kFarAhead * misses : kAhead;
        const int64_t end = std::min(slots(), next_ + ahead + 1);
        int64_t best = kMiss, least = INT64_MAX;
        for (int64_t slot = std::max<int64_t>(0, next_ - behind); slot < end; ++slot) {
            if (sizes_[slot] != size || served_[slot]) continue;
            const int64_t away = slot - next_;
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
