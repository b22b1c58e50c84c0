// What PyTorch's allocator counts: nine quantities, of the small and of the large chunks.
//
// Each is two sums that only rise. What is current is their difference, so an allocation adds to one sum and no more: a
// peak can only stand before something falls, or now, and is brought up to date there.
#pragma once

#include <algorithm>
#include <cstdint>

namespace bfc {

enum UsageGroup {
    kAllocation,            // until the owner frees it
    kSegment,
    kActive,                // until no stream uses it
    kInactiveSplit,         // free pieces of regions that are not wholly free
    kAllocatedBytes,
    kReservedBytes,
    kActiveBytes,
    kInactiveSplitBytes,
    kRequestedBytes,
    kUsageGroups,
};

struct Gauge {
    int64_t current = 0, peak = 0, allocated = 0, freed = 0;

    void raise(int64_t amount) {
        current += amount;
        allocated += amount;
        peak = std::max(peak, current);
    }
    void lower(int64_t amount) {
        current -= amount;
        freed += amount;
    }
    void restart_peak() { peak = current; }
    void restart_totals() { allocated = freed = 0; }
};

class Usage {
public:
    static constexpr int kKinds = 2;  // small, large

    Gauge oversize_allocations, oversize_segments;
    int64_t num_device_alloc = 0, num_device_free = 0;

    // A chunk of `size` has been handed out; `left` was cut off it (0: nothing was). `was_piece`: its region had others.
    void handed_out(int kind, int64_t size, int64_t requested, int64_t left, bool was_piece, bool oversize) {
        raise(kind, kAllocation, 1);
        raise(kind, kAllocatedBytes, size);
        raise(kind, kActive, 1);
        raise(kind, kActiveBytes, size);
        raise(kind, kRequestedBytes, requested);
        if (was_piece) {
            lower(kind, kInactiveSplitBytes, size);
            if (left == 0) lower(kind, kInactiveSplit, 1);
        } else if (left > 0) {
            raise(kind, kInactiveSplit, 1);
            raise(kind, kInactiveSplitBytes, left);
        }
        if (oversize) oversize_allocations.raise(1);
    }

    void given_up(int kind, int64_t size, bool oversize) {
        lower(kind, kAllocation, 1);
        lower(kind, kAllocatedBytes, size);
        if (oversize) oversize_allocations.lower(1);
    }

    // Takes given_up back.
    void owned_again(int kind, int64_t size, bool oversize) {
        sums_[kind].down[kAllocation] -= 1;
        sums_[kind].down[kAllocatedBytes] -= size;
        if (oversize) {
            oversize_allocations.current += 1;
            oversize_allocations.freed -= 1;
        }
    }

    // It is free, and has become a chunk of `merged_size` with `neighbours` that were free; `is_piece`: one of several.
    void came_back(int kind, int64_t size, int64_t requested, int neighbours, int64_t merged_size, bool is_piece) {
        lower(kind, kActive, 1);
        lower(kind, kActiveBytes, size);
        lower(kind, kRequestedBytes, requested);
        change(kind, kInactiveSplit, int(is_piece) - neighbours);
        change(kind, kInactiveSplitBytes, (is_piece ? merged_size : 0) - (merged_size - size));
    }

    // A free piece goes with its whole region, whatever else is in there: the allocator closes.
    void piece_went(int kind, int64_t size) {
        lower(kind, kInactiveSplit, 1);
        lower(kind, kInactiveSplitBytes, size);
    }

    void region_came(int kind, int64_t size, bool oversize) {
        ++num_device_alloc;
        raise(kind, kSegment, 1);
        raise(kind, kReservedBytes, size);
        if (oversize) oversize_segments.raise(1);
    }

    void region_went(int kind, int64_t size, bool oversize) {
        ++num_device_free;
        lower(kind, kSegment, 1);
        lower(kind, kReservedBytes, size);
        if (oversize) oversize_segments.lower(1);
    }

    // Of a kind, or (kKinds) of both together.
    Gauge read(int group, int kind) const {
        Gauge gauge;
        for (int k = 0; k < kKinds; ++k) {
            if (kind != k && kind != kKinds) continue;
            gauge.current += current(k, group);
            gauge.allocated += sums_[k].up[group] - start_[k].up[group];
            gauge.freed += sums_[k].down[group] - start_[k].down[group];
        }
        const int64_t peak = kind == kKinds ? peak_of_both_[group] : peak_[kind][group];
        gauge.peak = std::max(peak, gauge.current);
        return gauge;
    }

    void restart_peaks() {
        for (int group = 0; group < kUsageGroups; ++group) {
            for (int k = 0; k < kKinds; ++k) peak_[k][group] = current(k, group);
            peak_of_both_[group] = current(0, group) + current(1, group);
        }
        oversize_allocations.restart_peak();
        oversize_segments.restart_peak();
    }

    void restart_totals() {
        for (int k = 0; k < kKinds; ++k) start_[k] = sums_[k];
        oversize_allocations.restart_totals();
        oversize_segments.restart_totals();
        num_device_alloc = num_device_free = 0;
    }

private:
    struct Sums {
        int64_t up[kUsageGroups] = {};
        int64_t down[kUsageGroups] = {};
    };
    Sums sums_[kKinds];
    Sums start_[kKinds];  // what they were when the totals were last set to 0
    int64_t peak_[kKinds][kUsageGroups] = {};
    int64_t peak_of_both_[kUsageGroups] = {};

    int64_t current(int kind, int group) const { return sums_[kind].up[group] - sums_[kind].down[group]; }

    void raise(int kind, int group, int64_t amount) { sums_[kind].up[group] += amount; }

    void lower(int kind, int group, int64_t amount) {
        const int64_t here = current(kind, group);
        peak_[kind][group] = std::max(peak_[kind][group], here);
        peak_of_both_[group] = std::max(peak_of_both_[group], here + current(1 - kind, group));
        sums_[kind].down[group] += amount;
    }

    void change(int kind, int group, int64_t amount) {
        if (amount > 0) raise(kind, group, amount);
        if (amount < 0) lower(kind, group, -amount);
    }
};

}  // namespace bfc
