// Random instances through the planner's headers, under the sanitizers: no two blocks that live at once overlap, whatever
// places them, and the sweep says so exactly when they do. Prints what was tried.
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "plan_layout.hpp"
#include "plan_matcher.hpp"
#include "plan_search.hpp"
#include "plan_sweep.hpp"

using namespace bfc;

static std::mt19937 dice(20261125);
static int below(int limit) { return static_cast<int>(dice() % static_cast<unsigned>(limit)); }

static void require(bool holds, const char* what, int round) {
    if (holds) return;
    std::fprintf(stderr, "%s, round %d\n", what, round);
    std::exit(1);
}

struct Instance {
    std::vector<int32_t> first, begin, end, order;
    std::vector<uint32_t> size;
    int32_t sections = 0;

    bool meet(size_t a, size_t b) const {
        for (int32_t i = first[a]; i < first[a + 1]; ++i)
            for (int32_t j = first[b]; j < first[b + 1]; ++j)
                if (begin[i] < end[j] && begin[j] < end[i]) return true;
        return false;
    }
};

static Instance some(int blocks, int sections, bool pieces) {
    Instance made;
    made.sections = sections;
    for (int block = 0; block < blocks; ++block) {
        made.first.push_back(static_cast<int32_t>(made.begin.size()));
        made.size.push_back(static_cast<uint32_t>(1 + below(30)));
        int at = below(sections);
        do {
            const int end = at + 1 + below(std::min(6, sections - at));
            made.begin.push_back(at);
            made.end.push_back(end);
            at = end + 1 + below(4);
        } while (pieces && at < sections && below(3) == 0);
        made.order.push_back(block);
    }
    made.first.push_back(static_cast<int32_t>(made.begin.size()));
    std::shuffle(made.order.begin(), made.order.end(), dice);
    return made;
}

// The slow way: every two blocks.
static bool overlaps(const Instance& made, const std::vector<int64_t>& offset) {
    for (size_t a = 0; a < made.size.size(); ++a)
        for (size_t b = a + 1; b < made.size.size(); ++b)
            if (offset[a] < offset[b] + made.size[b] && offset[b] < offset[a] + made.size[a] && made.meet(a, b))
                return true;
    return false;
}

static bool swept(const Instance& made, const std::vector<int64_t>& offset) {
    std::vector<uint32_t> block;
    std::vector<uint8_t> is_birth;
    for (int32_t moment = 0; moment <= made.sections; ++moment)
        for (int birth = 0; birth < 2; ++birth)
            for (size_t i = 0; i < made.size.size(); ++i)
                for (int32_t piece = made.first[i]; piece < made.first[i + 1]; ++piece)
                    if ((birth ? made.begin : made.end)[piece] == moment) {
                        block.push_back(static_cast<uint32_t>(i));
                        is_birth.push_back(static_cast<uint8_t>(birth));
                    }
    std::vector<uint64_t> size(made.size.begin(), made.size.end()), low(offset.begin(), offset.end());
    return find_overlap(block.size(), block.data(), is_birth.data(), low.data(), size.data()).first >= 0;
}

static void place(int round) {
    const Instance made = some(1 + below(60), 1 + below(40), below(2));
    const size_t blocks = made.size.size();
    std::vector<int64_t> offset(blocks, -1);
    offset[0] = below(20);      // it stands already
    const uint32_t wall = below(2) ? PlanLayout::kNowhere : 30 + below(60);
    PlanLayout layout(made.sections, wall);
    const PlanBlocks all{made.first.data(), made.begin.data(), made.end.data(), made.size.data(), offset.data()};
    take_place(layout, all, 0);
    require(place_in_order(layout, all, made.order.data(), blocks), "a block has no place", round);
    for (size_t i = 0; i < blocks; ++i) {
        require(offset[i] >= 0, "a block was left out", round);
        require(i == 0 || offset[i] >= wall || offset[i] + made.size[i] <= wall, "a block lies across the wall", round);
    }
    require(!overlaps(made, offset), "two blocks overlap", round);
    require(!swept(made, offset), "the sweep found an overlap that is not there", round);
    offset[below(static_cast<int>(blocks))] = below(40);
    require(swept(made, offset) == overlaps(made, offset), "the sweep and the slow way differ", round);
}

static void search(int round) {
    const Instance made = some(1 + below(9), 1 + below(12), false);
    std::vector<PlannedBlock> blocks;
    int32_t most = 0;
    for (size_t i = 0; i < made.size.size(); ++i) {
        const int32_t begin = made.begin[i], end = made.end[i], size = static_cast<int32_t>(made.size[i]);
        blocks.push_back({begin, end, size, end - begin});
        most += size;
    }
    int32_t least = -1;
    for (int32_t capacity = 1; capacity <= most; ++capacity) {
        PlanSearch tried(blocks, made.sections, capacity);
        const auto order = static_cast<PlanSearch::Order>(below(3));
        const PlanSearch::Answer answer = tried.solve(order, 1u << 22);
        require(answer != PlanSearch::kStopped, "a small search did not end", round);
        require(least < 0 || answer == PlanSearch::kFits, "more room, and it does not fit", round);
        if (answer != PlanSearch::kFits) continue;
        if (least < 0) least = capacity;
        const std::vector<int64_t> offset(tried.offsets.begin(), tried.offsets.end());
        require(!overlaps(made, offset), "two blocks of a search overlap", round);
        for (size_t i = 0; i < offset.size(); ++i)
            require(offset[i] + blocks[i].size <= capacity, "a block is above the capacity", round);
    }
    require(least > 0, "nothing fits", round);
    PlanSearch stopped(blocks, made.sections, most);
    require(blocks.empty() || stopped.solve(PlanSearch::kLongest, 0) == PlanSearch::kStopped, "it did not stop", round);
}

static void match(int round) {
    std::vector<uint64_t> slots(static_cast<size_t>(below(60)));
    for (uint64_t& size : slots) size = 1 + below(6);
    PlanMatcher matcher(slots.data(), slots.size());
    std::vector<bool> served(slots.size());
    for (int i = 0; i < 100; ++i) {
        const uint64_t size = 1 + below(7);
        const bool smaller = below(2);
        const int64_t slot = matcher.match(size, smaller);
        if (slot < 0) continue;
        require(!served[slot], "a slot was served twice", round);
        served[slot] = true;
        require(slots[slot] == size || (smaller && size < slots[slot] && slots[slot] <= 2 * size), "a wrong size", round);
    }
}

int main() {
    constexpr int kRounds = 100;
    for (int round = 0; round < kRounds; ++round) {
        place(round);
        search(round);
        match(round);
    }
    std::printf("%d rounds\n", kRounds);
}
