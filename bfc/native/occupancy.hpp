// Which addresses a trace used at which time, as a grid of cells: columns of events, rows of addresses. Every function
// may throw std::bad_alloc.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace bfc {

// The ranges of addresses in which blocks lie, rounded to granules, so that they are few.
class Ranges {
public:
    static constexpr int kGranuleBits = 21;     // 2 MiB: what drivers hand out

    void add(uint64_t start, uint64_t end) {
        const uint64_t first = start >> kGranuleBits, last = ((end - 1) >> kGranuleBits) + 1;
        if (last == first + 1) {                // most blocks lie in a granule that was seen lately
            uint64_t& seen = seen_[first % seen_.size()];
            if (seen == last) return;
            seen = last;
        }
        join(first, last);
    }

    // Places the ranges end to end, in the order of their addresses.
    void lay() {
        for (const auto& [first, last] : joined_) {
            starts.push_back(first << kGranuleBits);
            sizes.push_back((last - first) << kGranuleBits);
            places.push_back(total);
            total += sizes.back();
        }
    }

    // The place of an address when the ranges are laid end to end.
    uint64_t place_of(uint64_t address) {
        if (address - starts[latest_] >= sizes[latest_])
            latest_ = std::upper_bound(starts.begin(), starts.end(), address) - starts.begin() - 1;
        return places[latest_] + (address - starts[latest_]);
    }

    std::vector<uint64_t> starts, sizes, places;
    uint64_t total = 0;

private:
    std::map<uint64_t, uint64_t> joined_;       // first granule -> the one after the last
    std::array<uint64_t, 1024> seen_{};
    size_t latest_ = 0;

    void join(uint64_t first, uint64_t last) {
        auto above = joined_.upper_bound(first);
        if (above != joined_.begin()) {
            const auto before = std::prev(above);
            if (before->second >= last) return;
            if (before->second >= first) {
                first = before->first;
                above = joined_.erase(before);
            }
        }
        while (above != joined_.end() && above->first <= last) {
            last = std::max(last, above->second);
            above = joined_.erase(above);
        }
        joined_[first] = last;
    }
};

// The bytes in use of each cell, column by column. However many cells a block covers, it changes only its first and its
// last cell: whole cells from the first up to the last, minus the part of the first before the block, plus the block's
// part of the last.
class Cells {
public:
    Cells(size_t rows, uint64_t cell_bytes) : cell_bytes_(cell_bytes), rows_(rows + 1) {}

    // A block comes, or goes (`sign` is -1), `late` events after the column began.
    void add(uint64_t start, uint64_t end, uint64_t sign, uint64_t late) {
        Row& first = rows_[start / cell_bytes_];
        Row& last = rows_[end / cell_bytes_];
        const uint64_t before = sign * (start % cell_bytes_), in_last = sign * (end % cell_bytes_);
        first.whole += sign;
        first.whole_late += sign * late;
        first.part -= before;
        first.part_late -= before * late;
        last.whole -= sign;
        last.whole_late -= sign * late;
        last.part += in_last;
        last.part_late += in_last * late;
    }

    // Writes the fraction of each cell that was in use, averaged over a column's events. A block that came late counts
    // for fewer of them. The numbers are modulo 2^64, but their sum is not negative.
    void end_column(uint64_t events, float* out) {
        const double scale = 1.0 / (static_cast<double>(cell_bytes_) * static_cast<double>(events));
        uint64_t whole = 0;
        for (size_t i = 0; i + 1 < rows_.size(); ++i) {
            Row& row = rows_[i];
            whole += row.whole * events - row.whole_late;
            const uint64_t bytes = whole * cell_bytes_ + row.part * events - row.part_late;
            out[i] = static_cast<float>(static_cast<double>(static_cast<int64_t>(bytes)) * scale);
            row.whole_late = row.part_late = 0;
        }
        rows_.back().whole_late = rows_.back().part_late = 0;
    }

private:
    struct Row {
        uint64_t whole = 0, whole_late = 0, part = 0, part_late = 0;
    };
    uint64_t cell_bytes_;
    std::vector<Row> rows_;
};

}  // namespace bfc
