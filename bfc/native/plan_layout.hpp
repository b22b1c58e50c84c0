// Places for blocks whose lives are known in advance, one block after the other, each at the lowest address that is free
// during its whole life. Every function may throw std::bad_alloc.
//
// A segment tree over time. Each node keeps the addresses that its blocks take as disjoint extents, and extents that
// touch are one: a stack of four thousand weights is a single extent, so that a search meets few of them however many
// blocks there are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bfc {

struct Extent {
    uint32_t low, high;
};

// Disjoint extents in rising order.
class Extents {
public:
    bool empty() const { return extents_.empty(); }
    size_t size() const { return extents_.size(); }
    const Extent& operator[](size_t i) const { return extents_[i]; }

    void add(uint32_t low, uint32_t high) {
        const auto first = std::lower_bound(extents_.begin(), extents_.end(), low,
                                            [](const Extent& extent, uint32_t at) { return extent.high < at; });
        if (first == extents_.end() || first->low > high) {
            extents_.insert(first, Extent{low, high});
            return;
        }
        auto last = first;
        for (; last != extents_.end() && last->low <= high; ++last) high = std::max(high, last->high);
        *first = {std::min(first->low, low), high};
        extents_.erase(first + 1, last);
    }

    // The first extent from `i` on that ends above `at`. The steps double: mostly it is near.
    size_t first_above(size_t i, uint32_t at) const {
        if (i >= size() || extents_[i].high > at) return i;
        size_t step = 1;
        while (i + step < size() && extents_[i + step].high <= at) step *= 2;
        const auto end = extents_.begin() + std::min(i + step, size());
        return std::upper_bound(extents_.begin() + i + step / 2, end, at,
                                [](uint32_t value, const Extent& extent) { return value < extent.high; }) -
               extents_.begin();
    }

private:
    std::vector<Extent> extents_;
};

// The addresses that are taken, by section of time. Addresses and sizes are in units of the caller's choice.
class PlanLayout {
public:
    static constexpr uint32_t kNowhere = ~uint32_t{0};  // also the end of the addresses

    // No block may lie across `wall`, the end of one region and the start of another.
    PlanLayout(size_t sections, uint32_t wall) : wall_(wall) {
        while (leaves_ < sections) leaves_ *= 2;
        full_.resize(2 * leaves_);
        any_.resize(2 * leaves_);
    }

    // From section `begin` up to `end`.
    void take(size_t begin, size_t end, uint32_t low, uint32_t high) { put(1, 0, leaves_, begin, end, low, high); }

    // A search is made of the pieces of a block's life, and then of its size.
    void begin_search() { met_.clear(); }
    void meet(size_t begin, size_t end) { collect(1, 0, leaves_, begin, end); }
    uint32_t lowest(uint32_t size) {
        uint64_t at = past_wall(0, size);
        cursors_.assign(met_.size(), 0);
        size_t agreed = 0;      // how many nodes in a row have nothing there
        for (size_t i = 0; agreed < met_.size() && at + size < kNowhere; i = i + 1 < met_.size() ? i + 1 : 0) {
            ++steps_;
            const Extents& extents = *met_[i];
            const size_t above = cursors_[i] = extents.first_above(cursors_[i], static_cast<uint32_t>(at));
            if (above == extents.size() || extents[above].low >= at + size) {
                ++agreed;
                continue;
            }
            at = past_wall(extents[above].high, size);
            agreed = 0;
        }
        return at + size < kNowhere ? static_cast<uint32_t>(at) : kNowhere;
    }

    // How many extents all searches looked at: most of the work.
    uint64_t steps() const { return steps_; }

private:
    uint64_t steps_ = 0;
    size_t leaves_ = 1;
    uint32_t wall_;
    std::vector<Extents> full_;         // of the blocks that live during the whole of a node's time
    std::vector<Extents> any_;          // of the blocks that live during some of it
    std::vector<const Extents*> met_;
    std::vector<size_t> cursors_;

    uint64_t past_wall(uint64_t at, uint32_t size) const { return at < wall_ && at + size > wall_ ? wall_ : at; }

    void put(size_t node, size_t from, size_t to, size_t begin, size_t end, uint32_t low, uint32_t high) {
        any_[node].add(low, high);
        if (begin <= from && to <= end) {
            full_[node].add(low, high);
            return;
        }
        const size_t middle = (from + to) / 2;
        if (begin < middle) put(2 * node, from, middle, begin, end, low, high);
        if (end > middle) put(2 * node + 1, middle, to, begin, end, low, high);
    }

    void collect(size_t node, size_t from, size_t to, size_t begin, size_t end) {
        const bool whole = begin <= from && to <= end;
        const Extents& extents = whole ? any_[node] : full_[node];
        if (!extents.empty()) met_.push_back(&extents);
        if (whole || any_[node].empty()) return;
        const size_t middle = (from + to) / 2;
        if (begin < middle) collect(2 * node, from, middle, begin, end);
        if (end > middle) collect(2 * node + 1, middle, to, begin, end);
    }
};

// The blocks of a layout. Block i lives in the pieces first[i] up to first[i + 1], and its offset is negative until it has
// a place.
struct PlanBlocks {
    const int32_t* first;
    const int32_t* begin;       // sections
    const int32_t* end;
    const uint32_t* size;
    int64_t* offset;
};

// Takes the place that a block has.
inline void take_place(PlanLayout& layout, const PlanBlocks& blocks, size_t block) {
    const uint32_t low = static_cast<uint32_t>(blocks.offset[block]);
    for (int32_t piece = blocks.first[block]; piece < blocks.first[block + 1]; ++piece)
        layout.take(blocks.begin[piece], blocks.end[piece], low, low + blocks.size[block]);
}

// Places those of the blocks that have no place, in the given order. False: one has no place below 2^32 units.
inline bool place_in_order(PlanLayout& layout, const PlanBlocks& blocks, const int32_t* order, size_t count) {
    for (size_t i = 0; i < count; ++i) {
        const size_t block = order[i];
        if (blocks.offset[block] >= 0) continue;
        layout.begin_search();
        for (int32_t piece = blocks.first[block]; piece < blocks.first[block + 1]; ++piece)
            layout.meet(blocks.begin[piece], blocks.end[piece]);
        const uint32_t place = layout.lowest(blocks.size[block]);
        if (place == PlanLayout::kNowhere) return false;
        blocks.offset[block] = place;
        take_place(layout, blocks, block);
    }
    return true;
}

}  // namespace bfc
