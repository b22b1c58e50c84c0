// A differential test: bfc/native/usage.hpp against counts that are kept one by one. Run by test_usage.py.
//
// Usage: test_usage SEED STEPS. Levels and peaks are compared after each step.

#include <algorithm>
#include <array>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "usage.hpp"

namespace {

using Random = std::mt19937_64;

constexpr int kBoth = bfc::Usage::kKinds;

struct Block {
    int kind;
    int64_t size, requested;
    bool waits;
};

// Each quantity of each kind and of both, with its peak.
class Slow {
public:
    void add(int group, int kind, int64_t amount) {
        for (int k : {kind, kBoth}) {
            Level& level = levels_[group][k];
            level.now += amount;
            level.peak = std::max(level.peak, level.now);
        }
    }
    void restart() {
        for (auto& kinds : levels_)
            for (Level& level : kinds) level.peak = level.now;
    }
    bool is_told_by(const bfc::Usage& usage, uint64_t seed, int step) const {
        for (int group = 0; group < bfc::kUsageGroups; ++group)
            for (int kind = 0; kind <= kBoth; ++kind) {
                const bfc::Gauge found = usage.read(group, kind);
                const Level& level = levels_[group][kind];
                if (found.current == level.now && found.peak == level.peak) continue;
                std::printf("FAILED seed %" PRIu64 " step %d group %d kind %d: %" PRId64 " of %" PRId64 ", peak %" PRId64
                            " of %" PRId64 "\n",
                            seed, step, group, kind, found.current, level.now, found.peak, level.peak);
                return false;
            }
        return true;
    }

private:
    struct Level {
        int64_t now = 0, peak = 0;
    };
    std::array<std::array<Level, kBoth + 1>, bfc::kUsageGroups> levels_{};
};

// Usage and its slow twin, kept in step.
class Twins {
public:
    bfc::Usage usage;
    Slow slow;

    // A whole region is handed out, or a piece of one, of which the rest may stay.
    void hand_out(const Block& block, int64_t left, bool was_piece) {
        usage.handed_out(block.kind, block.size, block.requested, left, was_piece, true);
        slow.add(bfc::kRequestedBytes, block.kind, block.requested);
        own(block, 1);
        if (was_piece) {
            slow.add(bfc::kInactiveSplitBytes, block.kind, -block.size);
            if (left == 0) usage.piece_used_up(block.kind), slow.add(bfc::kInactiveSplit, block.kind, -1);
        } else if (left > 0) {
            slow.add(bfc::kInactiveSplit, block.kind, 1);
            slow.add(bfc::kInactiveSplitBytes, block.kind, left);
        }
        use(block, 1);
    }
    // It stays a piece beside others.
    void come_back(const Block& block, int neighbours) {
        usage.came_back(block.kind, block.size, block.requested, neighbours, block.size, true, block.waits, true);
        use(block, -1);
        slow.add(bfc::kRequestedBytes, block.kind, -block.requested);
        slow.add(bfc::kInactiveSplit, block.kind, 1 - neighbours);
        slow.add(bfc::kInactiveSplitBytes, block.kind, block.size);
        if (!block.waits) own(block, -1);
    }
    void wait(Block& block) {
        block.waits ? usage.owned_again(block.kind, block.size) : usage.given_up(block.kind, block.size);
        own(block, block.waits ? 1 : -1);
        block.waits = !block.waits;
    }
    void restart_peaks() {
        usage.restart_peaks();
        slow.restart();
    }
    // Nothing is to have changed.
    void measure_bytes() {
        const int64_t before = usage.read(bfc::kActiveBytes, kBoth).peak;
        usage.restart_bytes_peak();
        usage.merge_bytes_peak(before);
    }

private:
    void own(const Block& block, int sign) {
        slow.add(bfc::kAllocation, block.kind, sign);
        slow.add(bfc::kAllocatedBytes, block.kind, sign * block.size);
    }
    void use(const Block& block, int sign) {
        slow.add(bfc::kActive, block.kind, sign);
        slow.add(bfc::kActiveBytes, block.kind, sign * block.size);
    }
};

void step(Twins& twins, std::vector<Block>& live, Random& random) {
    const uint64_t action = random() % 100;
    if (action < 48 || live.empty()) {
        const int64_t size = 512 * static_cast<int64_t>(1 + random() % 200);
        const Block block{random() % 10 < 7, size, size - static_cast<int64_t>(random() % 512), false};
        twins.hand_out(block, random() % 2 ? 0 : 512 * static_cast<int64_t>(random() % 50), random() % 2);
        live.push_back(block);
    } else if (action < 88) {
        std::swap(live[random() % live.size()], live.back());
        twins.come_back(live.back(), static_cast<int>(random() % 3));
        live.pop_back();
    } else if (action < 94) {
        twins.wait(live[random() % live.size()]);
    } else if (action < 97) {
        twins.restart_peaks();
    } else {
        twins.measure_bytes();
    }
}

}  // namespace

int main(int, char** arguments) {
    const uint64_t seed = std::strtoull(arguments[1], nullptr, 10);
    const int steps = std::atoi(arguments[2]);
    Random random(seed);
    Twins twins;
    std::vector<Block> live;
    for (int at = 0; at < steps; ++at) {
        step(twins, live, random);
        if (!twins.slow.is_told_by(twins.usage, seed, at)) return 1;
    }
    std::puts("sound");
}
