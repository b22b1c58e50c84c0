// What PyTorch's allocator counts: nine quantities, of the small and of the large chunks.
//
// It is on the path of every allocation, so it keeps less than it can tell. What was allocated is what is current and
// what was freed; a peak can only stand before something falls, or now, and is looked at there; and what has an owner
// is what is active, but for the chunks that wait for a stream, of which there are seldom any.
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
    void handed_out(int kind, int64_t size, int64_t requested, int64_t left, bool was_piece) {
        Levels& levels = levels_[kind];
        levels.current[kChunks] += 1;
        levels.current[kBytes] += size;
        levels.current[kRequested] += requested;
        if (__builtin_expect(was_piece, 1)) {
            levels.fall(kPieces, left == 0);    // no peak: came_back has seen what rose since
            levels.fall(kPieceBytes, size);
        } else if (left > 0) {
            levels.current[kPieces] += 1;
            levels.current[kPieceBytes] += left;
            note_peaks<kPieces, kRegions>(kind);
        }
    }

    // Its owner has freed it, and a stream may still use it.
    void given_up(int kind, int64_t size) {
        note_peaks<kChunks, kOwned>(kind);
        waiting_[kind].chunks += 1;
        waiting_[kind].bytes += size;
        ++waiting_chunks_;
    }

    // Takes given_up back.
    void owned_again(int kind, int64_t size) {
        note_peaks<kChunks, kOwned>(kind);
        stops_waiting(kind, size);
    }

    // It is free, and has become a chunk of `merged_size` with `neighbours` that were free; `is_piece`: one of several.
    void came_back(int kind, int64_t size, int64_t requested, int neighbours, int64_t merged_size, bool is_piece,
                   bool was_waiting) {
        Levels& levels = levels_[kind];
        levels.change(kPieces, int(is_piece) - neighbours);
        levels.change(kPieceBytes, (is_piece ? merged_size : 0) - (merged_size - size));
        note_peaks<kChunks, kRegions>(kind);    // of the pieces after they rose, of the others before they fall
        levels.fall(kChunks, 1);
        levels.fall(kBytes, size);
        levels.fall(kRequested, requested);
        if (was_waiting) stops_waiting(kind, size);
    }

    // A free piece goes with its whole region, whatever else is in there: the allocator closes.
    void piece_went(int kind, int64_t size) {
        note_peaks<kPieces, kRegions>(kind);
        levels_[kind].fall(kPieces, 1);
        levels_[kind].fall(kPieceBytes, size);
    }

    void region_came(int kind, int64_t size, bool oversize) {
        ++num_device_alloc;
        levels_[kind].current[kRegions] += 1;
        levels_[kind].current[kReserved] += size;
        if (oversize) oversize_segments.raise(1);
    }

    void region_went(int kind, int64_t size, bool oversize) {
        ++num_device_free;
        note_peaks<kRegions, kMeasured>(kind);
        levels_[kind].fall(kRegions, 1);
        levels_[kind].fall(kReserved, size);
        if (oversize) oversize_segments.lower(1);
    }

    // Of a kind, or (kKinds) of both together.
    Gauge read(int group, int kind) const {
        Gauge gauge;
        const bool owned = is_owned(group);
        const int what = measured(group);
        for (int k = 0; k < kKinds; ++k) {
            if (kind != k && kind != kKinds) continue;
            const int64_t waiting = owned ? waiting_at(k, what) : 0;
            gauge.current += levels_[k].current[what] - waiting;
            gauge.freed += levels_[k].freed[what] + waiting - (owned ? owned_start_ : start_)[k].freed[what];
            gauge.allocated += levels_[k].current[what] + levels_[k].freed[what] - start_[k].total(what);
        }
        gauge.peak = std::max({gauge.current, peak_[kind][what], (owned ? owned_peak_ : active_peak_)[kind][what]});
        return gauge;
    }

    // The peak of the active bytes over a while: read the two peaks of bytes, restart, and put them back at the end.
    void restart_bytes_peak() { peak_[kKinds][kBytes] = active_peak_[kKinds][kBytes] = 0; }
    void merge_bytes_peak(int64_t active, int64_t owned) {
        active_peak_[kKinds][kBytes] = std::max(active_peak_[kKinds][kBytes], active);
        owned_peak_[kKinds][kBytes] = std::max(owned_peak_[kKinds][kBytes], owned);
    }

    void restart_peaks() {
        for (int kind = 0; kind <= kKinds; ++kind) {
            for (int what = 0; what < kMeasured; ++what) {
                peak_[kind][what] = what < kOwned ? 0 : at(kind, what);
                active_peak_[kind][what] = at(kind, what);
                owned_peak_[kind][what] = at(kind, what) - waiting_at(kind, what);
            }
        }
        oversize_allocations.restart_peak();
        oversize_segments.restart_peak();
    }

    void restart_totals() {
        for (int k = 0; k < kKinds; ++k) {
            start_[k] = owned_start_[k] = levels_[k];
            for (int what = 0; what < kOwned; ++what) owned_start_[k].freed[what] += waiting_at(k, what);
        }
        oversize_allocations.restart_totals();
        oversize_segments.restart_totals();
        num_device_alloc = num_device_free = 0;
    }

private:
    enum Measured { kChunks, kBytes, kOwned, kRequested = kOwned, kPieces, kPieceBytes, kRegions, kReserved, kMeasured };

    struct Levels {
        int64_t current[kMeasured] = {};
        int64_t freed[kMeasured] = {};

        int64_t total(int what) const { return current[what] + freed[what]; }
        void fall(int what, int64_t amount) {
            current[what] -= amount;
            freed[what] += amount;
        }
        void change(int what, int64_t amount) {
            current[what] += amount;
            freed[what] += std::max<int64_t>(-amount, 0);
        }
    };
    struct Waiting {
        int64_t chunks = 0, bytes = 0;
    };

    Levels levels_[kKinds];
    Levels start_[kKinds], owned_start_[kKinds];  // what they were when the totals were last set to 0
    Waiting waiting_[kKinds];
    int64_t waiting_chunks_ = 0;
    // Of each kind, and of both. What stood while nothing waited is a peak of both what is active and what is owned.
    int64_t peak_[kKinds + 1][kMeasured] = {};
    int64_t active_peak_[kKinds + 1][kMeasured] = {};
    int64_t owned_peak_[kKinds + 1][kMeasured] = {};

    static bool is_owned(int group) { return group == kAllocation || group == kAllocatedBytes; }

    static int measured(int group) {
        static constexpr int table[kUsageGroups] = {kChunks,   kRegions, kChunks,     kPieces,   kBytes,
                                                    kReserved, kBytes,   kPieceBytes, kRequested};
        return table[group];
    }

    int64_t at(int kind, int what) const {
        return kind < kKinds ? levels_[kind].current[what] : levels_[0].current[what] + levels_[1].current[what];
    }

    int64_t waiting_at(int kind, int what) const {
        if (what >= kOwned) return 0;
        if (kind == kKinds) return waiting_at(0, what) + waiting_at(1, what);
        return what == kChunks ? waiting_[kind].chunks : waiting_[kind].bytes;
    }

    void stops_waiting(int kind, int64_t size) {
        waiting_[kind].chunks -= 1;
        waiting_[kind].bytes -= size;
        --waiting_chunks_;
    }

    // New peaks are rare, so one branch looks for any of them: in what has a sign where a level stands above its peak.
    template <int kFirst, int kEnd>
    void note_peaks(int kind) {
        const int64_t *here = levels_[kind].current, *there = levels_[1 - kind].current;
        const int64_t *peak = peak_[kind], *peak_of_both = peak_[kKinds];
        int64_t above = -waiting_chunks_;   // what waits has peaks of its own
        for (int what = kFirst; what < kEnd; ++what) {
            above |= (peak[what] - here[what]) | (peak_of_both[what] - here[what] - there[what]);
        }
        if (__builtin_expect(above < 0, 0)) set_peaks(kind, kFirst, kEnd);
    }

    __attribute__((noinline)) void set_peaks(int kind, int first, int end) {
        for (int k : {kind, kKinds}) {
            for (int what = first; what < end; ++what) {
                if (what >= kOwned || waiting_chunks_ == 0) {
                    peak_[k][what] = std::max(peak_[k][what], at(k, what));
                    continue;
                }
                active_peak_[k][what] = std::max(active_peak_[k][what], at(k, what));
                owned_peak_[k][what] = std::max(owned_peak_[k][what], at(k, what) - waiting_at(k, what));
            }
        }
    }
};

}  // namespace bfc
