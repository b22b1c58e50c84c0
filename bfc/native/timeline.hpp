// The figures of a replay over time. For each interval it keeps those after the last event, and those at the events
// with the most and the fewest bytes. A row holds the figures after one event.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bfc {

struct TimelineRow {
    uint64_t event;
    uint64_t live;              // bytes asked for, and not freed
    uint64_t in_use;            // bytes of whole chunks
    uint64_t reserved;
    uint64_t largest_free;
    uint64_t refused;           // so far; driver_calls likewise
    uint64_t driver_calls;
};

class Timeline {
public:
    static constexpr size_t kCandidates = 7;    // rows of an interval, before equal ones are merged
    static constexpr size_t kUsualRows = 5;     // fewer, since several of them are mostly the same event

    uint64_t refused = 0, driver_calls = 0;     // so far; they do not change in the loop

    // Of the events from `first` up to `end`. False: the host is out of memory. No later function allocates.
    bool begin(size_t first, size_t end, size_t samples) noexcept {
        first_ = first;
        events_ = end - first;
        samples_ = std::max<size_t>(samples, 1);
        intervals_ = events_ <= samples_ ? std::max<size_t>(events_, 1) : std::max<size_t>(samples_ / kUsualRows, 1);
        try {
            rows_.resize(intervals_ * kCandidates);
        } catch (...) {
            return false;
        }
        return true;
    }

    // The end of the current interval. The caller plays the first event of an interval by itself.
    size_t end() const noexcept {
        return first_ + static_cast<size_t>(static_cast<unsigned __int128>(events_) * (interval_ + 1) / intervals_);
    }
    bool is_fresh() const noexcept { return fresh_; }

    // To be called after an event that was played by itself, and after the last event of a batch.
    void note(const TimelineRow& now, uint64_t peak_in_use, uint64_t peak_reserved) noexcept {
        if (fresh_) {
            fresh_ = false;
            most_live_ = least_live_ = most_used_ = least_used_ = most_reserved_ = least_reserved_ = now;
        }
        note_extreme(now, true);
        note_extreme(now, false);
        if (now.reserved > most_reserved_.reserved) most_reserved_ = now;
        if (now.reserved < least_reserved_.reserved) least_reserved_ = now;
        note_peaks(now, peak_in_use, peak_reserved);
        if (now.event + 1 == end()) close(now);
    }

    // Whether bytes are at a new minimum, if the next event allocates (`rises`), or at a new maximum, if it frees.
    bool is_extreme(uint64_t live, uint64_t in_use, bool rises) const noexcept {
        if (rises) return live < least_live_.live || in_use < least_used_.in_use;
        return live > most_live_.live || in_use > most_used_.in_use;
    }
    void note_extreme(const TimelineRow& now, bool rises) noexcept {
        if (rises) {
            if (now.live < least_live_.live) least_live_ = now;
            if (now.in_use < least_used_.in_use) least_used_ = now;
        } else {
            if (now.live > most_live_.live) most_live_ = now;
            if (now.in_use > most_used_.in_use) most_used_ = now;
        }
    }

    // The rows in the order of their events: at most as many as there are samples, or kCandidates if these are fewer.
    const std::vector<TimelineRow>& finish() noexcept {
        size_t together = 1;
        while (together < interval_ && thinned(together, nullptr) > samples_) ++together;
        rows_.resize(thinned(together, rows_.data()));
        return rows_;
    }

private:
    size_t first_ = 0, events_ = 0, samples_ = 1, intervals_ = 1;
    size_t interval_ = 0;           // the index of the current one
    bool fresh_ = true;
    uint64_t known_in_use_ = 0, known_reserved_ = 0;
    // Of the current interval.
    TimelineRow most_live_, least_live_, most_used_, least_used_, most_reserved_, least_reserved_;
    std::vector<TimelineRow> rows_;

    // Within an event, or before the first one, more may have been in use or reserved than after any event.
    void note_peaks(const TimelineRow& now, uint64_t in_use, uint64_t reserved) noexcept {
        known_in_use_ = std::max(known_in_use_, most_used_.in_use);
        if (in_use > known_in_use_) {
            most_used_ = now;
            most_used_.in_use = known_in_use_ = in_use;
        }
        known_reserved_ = std::max(known_reserved_, most_reserved_.reserved);
        if (reserved > known_reserved_) {
            most_reserved_ = now;
            most_reserved_.reserved = known_reserved_ = reserved;
        }
    }

    void close(const TimelineRow& last) noexcept {
        const TimelineRow found[kCandidates] = {most_live_,      least_live_,      most_used_, least_used_,
                                                most_reserved_, least_reserved_, last};
        std::copy(found, found + kCandidates, rows_.begin() + interval_ * kCandidates);
        ++interval_;
        fresh_ = true;
    }

    // How many rows there are if every `together` intervals are merged. Writes them to `out`, which may be `rows_`.
    size_t thinned(size_t together, TimelineRow* out) const noexcept {
        size_t count = 0;
        for (size_t i = 0; i < interval_; i += together) {
            TimelineRow found[kCandidates];
            choose(&rows_[i * kCandidates], &rows_[0] + std::min(i + together, interval_) * kCandidates, found);
            const size_t kept = std::unique(found, found + kCandidates, same) - found;
            if (out) std::copy(found, found + kept, out + count);
            count += kept;
        }
        return count;
    }

    static void choose(const TimelineRow* first, const TimelineRow* end, TimelineRow* found) noexcept {
        const auto live = [](const TimelineRow& a, const TimelineRow& b) { return a.live < b.live; };
        const auto in_use = [](const TimelineRow& a, const TimelineRow& b) { return a.in_use < b.in_use; };
        const auto reserved = [](const TimelineRow& a, const TimelineRow& b) { return a.reserved < b.reserved; };
        found[0] = *std::max_element(first, end, live);
        found[1] = *std::min_element(first, end, live);
        found[2] = *std::max_element(first, end, in_use);
        found[3] = *std::min_element(first, end, in_use);
        found[4] = *std::max_element(first, end, reserved);
        found[5] = *std::min_element(first, end, reserved);
        found[6] = end[-1];
        std::sort(found, found + kCandidates, before);
    }

    // The state within an event comes before the state after it.
    static bool before(const TimelineRow& a, const TimelineRow& b) noexcept {
        if (a.event != b.event) return a.event < b.event;
        return a.in_use != b.in_use ? a.in_use > b.in_use : a.reserved > b.reserved;
    }
    static bool same(const TimelineRow& a, const TimelineRow& b) noexcept {
        return a.event == b.event && a.in_use == b.in_use && a.reserved == b.reserved;
    }
};

}  // namespace bfc
