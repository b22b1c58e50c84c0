// What PyTorch's allocator counts: nine quantities, of the small and of the large chunks.
//
// This is the hot path, so it stores few numbers and derives the others. For each level of a kind it stores how far the
// level may rise before anything has to be looked at: a negative value may mean a new peak. What both kinds together may
// rise is divided among the two, so that there is one number to watch, not two. "Freed" is "allocated" minus "current".
// The chunks with an owner are the active chunks minus those that wait for a stream, of which there are few.
#pragma once

#include <algorithm>
#include <cstdint>

namespace bfc {

enum UsageGroup {
    kAllocation,            // counts a chunk until its owner frees it
    kSegment,
    kActive,                // counts a chunk until no stream uses it
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

    // A chunk of `size` has been handed out; `left` bytes were cut off it. `was_piece`: its region had others.
    // Without `counts_pieces` (expandable segments) nothing is a piece.
    void handed_out(int kind, int64_t size, int64_t requested, int64_t left, bool was_piece, bool counts_pieces) {
        Counts& counts = counts_[kind];
        counts.risen[kChunks] += 1;
        counts.risen[kBytes] += size;
        counts.risen[kRequested] += requested;
        rise<kChunks>(kind, 1);
        rise<kBytes>(kind, size);
        rise<kRequested>(kind, requested);
        if (__builtin_expect(was_piece, 1)) {
            fall<kPieceBytes>(kind, size);
        } else if (left > 0 && counts_pieces) {
            pieces_risen_[kind] += 1;
            more_piece_bytes_risen_[kind] += left;
            rise<kPieces>(kind, 1);
            rise<kPieceBytes>(kind, left);
        }
    }

    // The same chunk was a piece, and nothing was cut off it.
    void piece_used_up(int kind) { fall<kPieces>(kind, 1); }

    // Its owner has freed it, but a stream may still use it.
    void given_up(int kind, int64_t size) { change_waiting(kind, 1, size); }

    // Undoes given_up.
    void owned_again(int kind, int64_t size) { change_waiting(kind, -1, -size); }

    // It is free, and merged with `neighbours` free chunks to one of `merged_size`. `is_piece`: its region has others.
    void came_back(int kind, int64_t size, int64_t requested, int neighbours, int64_t merged_size, bool is_piece,
                   bool was_waiting, bool counts_pieces) {
        fall<kChunks>(kind, 1);
        fall<kBytes>(kind, size);
        fall<kRequested>(kind, requested);
        if (__builtin_expect(is_piece, 1)) {
            pieces_risen_[kind] += neighbours == 0;
            rise<kPieces>(kind, 1 - neighbours);
            rise<kPieceBytes>(kind, size);
        } else {
            more_piece_bytes_risen_[kind] -= size;
            if (!counts_pieces) neighbours = 0, merged_size = size;
            fall<kPieces>(kind, neighbours);
            fall<kPieceBytes>(kind, merged_size - size);
        }
        if (__builtin_expect(was_waiting, 0)) change_waiting(kind, -1, -size);
    }

    // A free piece is removed together with its whole region, including chunks in use: the allocator is being closed.
    void piece_went(int kind, int64_t size) {
        fall<kPieces>(kind, 1);
        fall<kPieceBytes>(kind, size);
    }

    // A free chunk is cut in two that are both free. `was_piece`: its region has others.
    void came_apart(int kind, int64_t size, bool was_piece) {
        pieces_risen_[kind] += was_piece ? 1 : 2;
        rise<kPieces>(kind, was_piece ? 1 : 2);
        if (was_piece) return;
        more_piece_bytes_risen_[kind] += size;
        rise<kPieceBytes>(kind, size);
    }

    void region_came(int kind, int64_t size, bool oversize) {
        memory_came(kind, size);
        for (int k : {kind, kKinds}) segments_[k].raise(1);
        if (oversize) oversize_segments.raise(1);
    }

    void region_went(int kind, int64_t size, bool oversize) {
        memory_went(kind, size);
        for (int k : {kind, kKinds}) segments_[k].lower(1);
        if (oversize) oversize_segments.lower(1);
    }

    // Memory has been mapped into a range, or unmapped: a range counts as no segment.
    void memory_came(int kind, int64_t size) {
        ++num_device_alloc;
        for (int k : {kind, kKinds}) reserved_[k].raise(size);
    }

    void memory_went(int kind, int64_t size) {
        ++num_device_free;
        for (int k : {kind, kKinds}) reserved_[k].lower(size);
    }

    // Mapped memory is used for chunks of the other kind from now on.
    void memory_moved(int kind, int to, int64_t size) {
        reserved_[kind].lower(size);
        reserved_[to].raise(size);
    }

    // The counts of one kind, or of both together (kKinds).
    Gauge read(int group, int kind) const {
        if (group == kSegment) return segments_[kind];
        if (group == kReservedBytes) return reserved_[kind];
        const bool owned = group == kAllocation || group == kAllocatedBytes;
        const int what = measured(group);
        Gauge gauge;
        for (int k = 0; k < kKinds; ++k) {
            if (kind != k && kind != kKinds) continue;
            const int64_t current = level(k, what) - (owned ? waiting_[k][what] : 0);
            gauge.current += current;
            gauge.allocated += risen(k, what) - start_[k].risen[what];
            gauge.freed += risen(k, what) - current - (owned ? start_[k].let_go : start_[k].fallen)[what];
        }
        gauge.peak = (owned ? owned_peak_ : active_peak_)[kind][what];
        return gauge;
    }

    int64_t active_bytes() const { return level(kKinds, kBytes); }

    // To measure the peak of the active bytes over some time: read it, restart it, and merge the old one at the end.
    void restart_bytes_peak() {
        active_peak_[kKinds][kBytes] = level(kKinds, kBytes);
        set_limits(kBytes);
    }
    void merge_bytes_peak(int64_t before) {
        active_peak_[kKinds][kBytes] = std::max(active_peak_[kKinds][kBytes], before);
        set_limits(kBytes);
    }

    void restart_peaks() {
        for (int what = 0; what < kMeasured; ++what) {  // each level is at its ceiling then, and has no room
            for (int kind = 0; kind <= kKinds; ++kind) {
                active_peak_[kind][what] = level(kind, what);
                owned_peak_[kind][what] = active_peak_[kind][what] - waiting_[kind][what];
            }
            for (int kind = 0; kind < kKinds; ++kind) {
                limit_[kind][what] = active_peak_[kind][what];
                counts_[kind].room[what] = 0;
            }
        }
        for (int kind = 0; kind <= kKinds; ++kind) {
            segments_[kind].restart_peak();
            reserved_[kind].restart_peak();
        }
        oversize_allocations.restart_peak();
        oversize_segments.restart_peak();
    }

    void restart_totals() {
        for (int kind = 0; kind < kKinds; ++kind) {
            for (int what = 0; what < kMeasured; ++what) {
                start_[kind].risen[what] = risen(kind, what);
                start_[kind].fallen[what] = risen(kind, what) - level(kind, what);
                start_[kind].let_go[what] = start_[kind].fallen[what] + waiting_[kind][what];
            }
        }
        for (int kind = 0; kind <= kKinds; ++kind) {
            segments_[kind].restart_totals();
            reserved_[kind].restart_totals();
        }
        oversize_allocations.restart_totals();
        oversize_segments.restart_totals();
        num_device_alloc = num_device_free = 0;
    }

private:
    enum Measured { kChunks, kBytes, kRequested, kPieces, kPieceBytes, kMeasured };

    struct alignas(64) Counts {         // one cache line
        int64_t room[kMeasured] = {};   // how far each level is below its limit
        int64_t risen[kPieces] = {};    // the sum of all increases
    };
    struct Start {                      // the sums when the totals were last set to 0; let_go: freed by owners
        int64_t risen[kMeasured] = {}, fallen[kMeasured] = {}, let_go[kMeasured] = {};
    };

    Counts counts_[kKinds];
    int64_t limit_[kKinds][kMeasured] = {};         // see set_limits
    int64_t pieces_risen_[kKinds] = {};
    int64_t more_piece_bytes_risen_[kKinds] = {};   // than the active bytes have fallen
    int64_t active_peak_[kKinds + 1][kMeasured] = {};
    int64_t owned_peak_[kKinds + 1][kMeasured] = {};
    int64_t waiting_[kKinds + 1][kMeasured] = {};   // only chunks and bytes; the other entries stay 0
    Gauge segments_[kKinds + 1], reserved_[kKinds + 1];
    Start start_[kKinds];

    static int measured(int group) {
        switch (group) {
            case kAllocation: case kActive: return kChunks;
            case kAllocatedBytes: case kActiveBytes: return kBytes;
            case kInactiveSplit: return kPieces;
            case kInactiveSplitBytes: return kPieceBytes;
            default: return kRequested;
        }
    }

    int64_t level(int kind, int what) const {
        if (kind == kKinds) return level(0, what) + level(1, what);
        return limit_[kind][what] - counts_[kind].room[what];
    }

    int64_t risen(int kind, int what) const {
        if (what < kPieces) return counts_[kind].risen[what];
        if (what == kPieces) return pieces_risen_[kind];
        return counts_[kind].risen[kBytes] - level(kind, kBytes) + more_piece_bytes_risen_[kind];
    }

    template <Measured kWhat>
    void fall(int kind, int64_t amount) { counts_[kind].room[kWhat] += amount; }

    template <Measured kWhat>
    void rise(int kind, int64_t amount) {
        if (__builtin_expect((counts_[kind].room[kWhat] -= amount) < 0, 0)) note_rise(kind, kWhat);
    }

    // The level of a kind is above its limit, or what is waiting has changed.
    __attribute__((noinline)) void note_rise(int kind, int what) {
        const int64_t now = level(kind, what);
        note_level(kind, what, now);
        note_level(kKinds, what, now + level(1 - kind, what));
        set_limits(what);
    }

    void note_level(int kind, int what, int64_t now) {
        active_peak_[kind][what] = std::max(active_peak_[kind][what], now);
        owned_peak_[kind][what] = std::max(owned_peak_[kind][what], now - waiting_[kind][what]);
    }

    // The ceiling is the highest level that is a new peak neither of active chunks nor of owned ones.
    int64_t ceiling(int kind, int what) const {
        return std::min(active_peak_[kind][what], owned_peak_[kind][what] + waiting_[kind][what]);
    }

    // The limit of a kind is its ceiling; or, if that is lower, its level and half of what is left below the ceiling of
    // both together: as long as neither is above its limit, both together are not above theirs.
    void set_limits(int what) {
        const int64_t levels[kKinds] = {level(0, what), level(1, what)};
        const int64_t left = ceiling(kKinds, what) - levels[0] - levels[1], half = left / 2;
        const int64_t shares[kKinds] = {half, left - half};
        for (int kind = 0; kind < kKinds; ++kind) {
            limit_[kind][what] = std::min(ceiling(kind, what), levels[kind] + shares[kind]);
            counts_[kind].room[what] = limit_[kind][what] - levels[kind];
        }
    }

    __attribute__((noinline)) void change_waiting(int kind, int64_t chunks, int64_t bytes) {
        for (int k : {kind, kKinds}) {
            waiting_[k][kChunks] += chunks;
            waiting_[k][kBytes] += bytes;
        }
        note_rise(kind, kChunks);
        note_rise(kind, kBytes);
    }
};

}  // namespace bfc
