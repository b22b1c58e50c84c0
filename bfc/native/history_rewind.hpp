// Runs the segments and live blocks of a snapshot backwards, as PyTorch's viewer does, to find the entries of the
// history that it can undo one by one from the final segments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <vector>

#include "history.hpp"

namespace bfc {

// O(log n) for each entry. As in the viewer, mapped memory is joined to its neighbours on the same stream.
// Every function may throw std::bad_alloc.
class Past {
public:
    enum Answer {
        kLeftOut,       // its memory was in no segment at that time: the viewer would stop with an error
        kFits,
        kContradicts,   // contradicts later entries: neither it nor any entry before it can be undone
    };

    void add_segment(uint64_t start, uint64_t size, uint64_t stream) {
        segments_[start] = Segment{start + size, stream, 0};
    }
    // Adds a block that is in use at the end, in any of the segments that were added.
    void add_live(uint64_t address) {
        const auto segment = segment_of(address);
        if (live_.insert(address).second && segment != segments_.end()) ++segment->second.live;
    }

    // Puts the indices of the entries to keep into `kept`, the newest first.
    void follow(const HistoryRecord* records, size_t count, std::vector<uint32_t>& kept) {
        for (size_t i = count; i-- > 0;) {
            const Answer answer = undo(records[i]);
            if (answer == kContradicts) return;
            if (answer == kFits) kept.push_back(static_cast<uint32_t>(i));
        }
    }

private:
    struct Segment {
        uint64_t end;
        uint64_t stream;
        size_t live;    // how many live blocks begin in it
    };
    using Segments = std::map<uint64_t, Segment>;

    Segments segments_;
    std::set<uint64_t> live_;

    Segments::iterator segment_of(uint64_t address) {
        auto above = segments_.upper_bound(address);
        if (above == segments_.begin()) return segments_.end();
        --above;
        return address < above->second.end ? above : segments_.end();
    }

    Answer undo(const HistoryRecord& entry) {
        switch (entry.action) {
            case kAlloc:
            case kFreeRequested:
            case kFreeCompleted: return undo_block(entry);
            case kSegmentAlloc: return undo_segment_alloc(entry);
            case kSegmentMap: return undo_segment_map(entry);
            case kSegmentFree:
            case kSegmentUnmap: return undo_segment_free(entry);
            default: return kFits;
        }
    }

    Answer undo_block(const HistoryRecord& entry) {
        const auto segment = segment_of(entry.addr);
        if (segment == segments_.end()) return kLeftOut;
        const auto found = live_.find(entry.addr);
        const bool is_live = found != live_.end();
        if (entry.action == kFreeRequested) return is_live ? kFits : kLeftOut;
        if (entry.action == kAlloc) {
            if (is_live) {
                live_.erase(found);
                --segment->second.live;
            }
            return kFits;
        }
        if (is_live) return kContradicts;
        live_.insert(entry.addr);
        ++segment->second.live;
        return kFits;
    }

    Answer undo_segment_alloc(const HistoryRecord& entry) {
        const auto segment = segments_.find(entry.addr);
        if (segment == segments_.end() || segment->second.end != entry.addr + entry.size) return kLeftOut;
        if (segment->second.live) return kContradicts;
        segments_.erase(segment);
        return kFits;
    }

    Answer undo_segment_map(const HistoryRecord& entry) {
        const uint64_t start = entry.addr, end = entry.addr + entry.size;
        const auto segment = segment_of(start);
        if (segment == segments_.end() || segment->second.end < end) return kLeftOut;
        if (count_live(start, end)) return kContradicts;
        const uint64_t first = segment->first;
        const Segment whole = segment->second;
        const size_t before = count_live(first, start);
        segments_.erase(segment);
        if (first < start) segments_[first] = Segment{start, whole.stream, before};
        if (end < whole.end) segments_[end] = Segment{whole.end, whole.stream, whole.live - before};
        return kFits;
    }

    Answer undo_segment_free(const HistoryRecord& entry) {
        uint64_t start = entry.addr, end = entry.addr + entry.size;
        size_t live = 0;
        const auto above = segments_.lower_bound(end);
        if (above != segments_.begin() && std::prev(above)->second.end > start) return kContradicts;
        if (entry.action == kSegmentUnmap) {
            if (above != segments_.begin() && std::prev(above)->second.end == start &&
                std::prev(above)->second.stream == entry.stream) {
                start = std::prev(above)->first;
                live += std::prev(above)->second.live;
                segments_.erase(std::prev(above));
            }
            if (above != segments_.end() && above->first == end && above->second.stream == entry.stream) {
                end = above->second.end;
                live += above->second.live;
                segments_.erase(above);
            }
        }
        segments_[start] = Segment{end, entry.stream, live};
        return kFits;
    }

    size_t count_live(uint64_t start, uint64_t end) const {
        size_t count = 0;
        for (auto it = live_.lower_bound(start); it != live_.end() && *it < end; ++it) ++count;
        return count;
    }
};

}  // namespace bfc
