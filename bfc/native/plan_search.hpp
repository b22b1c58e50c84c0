// An exact search for places below a capacity, for a few hundred blocks whose lives are known in advance. Every function
// may throw std::bad_alloc.
//
// Blocks are placed in rising order of address, each at its floor: the lowest address above all placed blocks that live
// at the same time. So each layout in which nothing can sink is met once. A branch is left
// - if the blocks that are left cannot fit into some section of time above their lowest floor;
// - at a block whose place is not below the lowest possible top of another: that one would fit under it;
// - after a block that meets none of those left: any other choice leads to the same.
// Where no block that is left crosses a moment, the times before and after it are searched apart. (The search is that of
// Moffitt's MiniMalloc, ASPLOS 2023; the code is not.)
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

namespace bfc {

struct PlannedBlock {
    int32_t begin, end;         // sections of time
    int32_t size;
    int32_t life;               // in the caller's units of time: it only orders
};

class PlanSearch {
public:
    enum Answer { kImpossible, kFits, kStopped };
    enum Order { kLongest, kFullestByArea, kFullestByLife };

    // The blocks that live at once take less than 2^31, and so does twice the capacity.
    PlanSearch(std::vector<PlannedBlock> blocks, int32_t sections, int32_t capacity)
        : offsets(blocks.size(), 0), blocks_(std::move(blocks)), sections_(sections), capacity_(capacity),
          floor_(blocks_.size()), most_(blocks_.size()), left_(sections), levels_(blocks_.size() + 2) {}

    // Looks at no more than about `steps` blocks.
    Answer solve(Order order, uint64_t steps) {
        if (blocks_.empty()) return kFits;
        order_ = order;
        steps_left_ = steps;
        std::fill(floor_.begin(), floor_.end(), 0);
        std::fill(left_.begin(), left_.end(), 0);
        for (const PlannedBlock& block : blocks_)
            for (int32_t s = block.begin; s < block.end; ++s) left_[s] += block.size;
        std::vector<int32_t> all(blocks_.size());
        for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int32_t>(i);
        if (*std::max_element(left_.begin(), left_.end()) > capacity_) return kImpossible;
        return solve_parts(all, 0, sections_, 0);
    }

    std::vector<int32_t> offsets;

private:
    struct Level {
        std::vector<std::pair<int32_t, int32_t>> choices;       // floor, and index in the blocks of this level
        std::vector<int32_t> rest, floors, lowest;
    };
    std::vector<PlannedBlock> blocks_;
    int32_t sections_, capacity_;
    Order order_ = kLongest;
    uint64_t steps_left_ = 0;
    std::vector<int32_t> floor_;        // of each block, above those that are placed
    std::vector<int32_t> most_;         // the most that a part needs in a section of the block's life
    std::vector<int32_t> left_;         // what is not placed, by section
    std::vector<Level> levels_;

    // Solves the parts between the moments that no block crosses, one after the other.
    Answer solve_parts(const std::vector<int32_t>& blocks, int32_t from, int32_t to, size_t depth) {
        const std::vector<int32_t> cuts = cuts_between(blocks, from, to);
        std::vector<int32_t> part;
        for (size_t i = 0; i + 1 < cuts.size(); ++i) {
            part.clear();
            for (int32_t block : blocks)
                if (blocks_[block].begin >= cuts[i] && blocks_[block].end <= cuts[i + 1]) part.push_back(block);
            sort(part);
            const Answer answer = search(part, cuts[i], cuts[i + 1], 0, -1, depth);
            if (answer != kFits) return answer;
        }
        return kFits;
    }

    // `from`, the moments behind it that none of the blocks crosses, and `to`.
    std::vector<int32_t> cuts_between(const std::vector<int32_t>& blocks, int32_t from, int32_t to) const {
        std::vector<int32_t> change(to - from + 1, 0), cuts(1, from);
        for (int32_t block : blocks) {          // it crosses the moments begin + 1 to end - 1
            ++change[blocks_[block].begin - from + 1];
            --change[blocks_[block].end - from];
        }
        int32_t crossing = 0;
        for (int32_t moment = 1; moment < to - from; ++moment) {
            crossing += change[moment];
            if (crossing == 0) cuts.push_back(from + moment);
        }
        cuts.push_back(to);
        return cuts;
    }

    void sort(std::vector<int32_t>& part) {
        for (int32_t block : part) {
            const auto begin = left_.begin() + blocks_[block].begin, end = left_.begin() + blocks_[block].end;
            most_[block] = *std::max_element(begin, end);
        }
        std::sort(part.begin(), part.end(), [this](int32_t a, int32_t b) {
            const Key first = key(a), second = key(b);
            return first != second ? first > second : a < b;
        });
    }

    using Key = std::tuple<int64_t, int64_t, int64_t>;
    Key key(int32_t block) const {
        const int64_t life = blocks_[block].life, area = life * blocks_[block].size;
        if (order_ == kLongest) return {life, area, most_[block]};
        if (order_ == kFullestByArea) return {most_[block], area, life};
        return {most_[block], life, area};
    }

    // Places the blocks, which are sorted. None may go below `least`, nor at `least` if its index is not above `index`:
    // these layouts have been tried in another order.
    Answer search(const std::vector<int32_t>& blocks, int32_t from, int32_t to, int32_t least, int32_t index,
                  size_t depth) {
        if (blocks.empty()) return kFits;
        Level& level = levels_[depth];
        choose(blocks, least, index, level.choices);
        for (const auto& [place, chosen] : level.choices) {
            if (steps_left_ < blocks.size()) return kStopped;
            steps_left_ -= blocks.size();
            const int32_t block = blocks[chosen];
            const bool meets = put(blocks, block, place, level);
            Answer answer = kImpossible;
            if (place + blocks_[block].size <= capacity_ && may_fit(level, from, to, place))
                answer = solve_rest(level, block, from, to, place, chosen, depth);
            take_back(block, level);    // also once it fits: the other parts begin from here
            if (answer != kImpossible || !meets) return answer;
        }
        return kImpossible;
    }

    void choose(const std::vector<int32_t>& blocks, int32_t least, int32_t index,
                std::vector<std::pair<int32_t, int32_t>>& choices) const {
        int64_t top = INT64_MAX;
        for (int32_t block : blocks) top = std::min<int64_t>(top, int64_t{floor_[block]} + blocks_[block].size);
        choices.clear();
        for (size_t i = 0; i < blocks.size(); ++i) {
            const std::pair<int32_t, int32_t> choice(floor_[blocks[i]], static_cast<int32_t>(i));
            if (choice.first < top && choice > std::make_pair(least, index)) choices.push_back(choice);
        }
        std::sort(choices.begin(), choices.end());
    }

    // Returns whether the block meets one of those that are left.
    bool put(const std::vector<int32_t>& blocks, int32_t block, int32_t place, Level& level) {
        const PlannedBlock& placed = blocks_[block];
        bool meets = false;
        offsets[block] = place;
        level.rest.clear();
        level.floors.clear();
        for (int32_t other : blocks) {
            if (other == block) continue;
            level.rest.push_back(other);
            level.floors.push_back(floor_[other]);
            if (blocks_[other].begin < placed.end && placed.begin < blocks_[other].end) {
                meets = true;
                floor_[other] = std::max(floor_[other], place + placed.size);
            }
        }
        for (int32_t s = placed.begin; s < placed.end; ++s) left_[s] -= placed.size;
        return meets;
    }

    void take_back(int32_t block, const Level& level) {
        for (int32_t s = blocks_[block].begin; s < blocks_[block].end; ++s) left_[s] += blocks_[block].size;
        for (size_t i = 0; i < level.rest.size(); ++i) floor_[level.rest[i]] = level.floors[i];
    }

    // Whether what is left fits into each section above the lowest place that it can have there.
    bool may_fit(Level& level, int32_t from, int32_t to, int32_t place) const {
        constexpr int32_t kNone = INT32_MAX;
        level.lowest.assign(to - from, kNone);
        for (int32_t block : level.rest) {
            const int32_t floor = std::max(floor_[block], place);
            int32_t* lowest = level.lowest.data() - from;
            for (int32_t s = blocks_[block].begin; s < blocks_[block].end; ++s) lowest[s] = std::min(lowest[s], floor);
        }
        bool fits = true;
        for (int32_t s = from; s < to; ++s) {
            const int32_t lowest = level.lowest[s - from];
            fits &= lowest == kNone || lowest <= capacity_ - left_[s];
        }
        return fits;
    }

    Answer solve_rest(Level& level, int32_t block, int32_t from, int32_t to, int32_t place, int32_t chosen,
                      size_t depth) {
        const std::vector<int32_t> cuts = cuts_between(level.rest, from, to);
        const bool splits = std::any_of(cuts.begin(), cuts.end(), [&](int32_t moment) {
            return moment > blocks_[block].begin && moment < blocks_[block].end;
        });
        if (splits) return solve_parts(level.rest, from, to, depth + 1);
        return search(level.rest, from, to, place, chosen - 1, depth + 1);  // those behind it have moved up by one
    }
};

}  // namespace bfc
