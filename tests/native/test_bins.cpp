// A differential test: bfc/native/bins.hpp against std::set, bfc/native/starts.hpp against std::map. Run by test_bins.py.
//
// Usage: test_bins SEED STEPS. It prints what it runs before it runs it; the last line of a failing run repeats it.

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "bins.hpp"
#include "starts.hpp"

namespace {

using Key = std::pair<uint64_t, uint64_t>;  // size, address
using Random = std::mt19937_64;

const char* running = "";

void require(bool holds, const char* what) {
    if (holds) return;
    std::printf("FAILED %s: %s\n", running, what);
    std::fflush(stdout);
    std::exit(1);
}

uint64_t below(Random& random, uint64_t limit) { return random() % limit; }

// Bins and their slow twin, kept in step.
class Twins {
public:
    void insert(uint64_t size, uint64_t address) {
        if (!addresses_.insert(address).second) return;  // no two chunks start at one address
        model_.emplace(Key{size, address}, ++handle_);
        require(bins_.reserve(), "reserve");
        bins_.insert(size, address, handle_);
    }
    void erase(std::map<Key, uint32_t>::iterator entry) {
        bins_.erase(entry->first.first, entry->first.second);
        addresses_.erase(entry->first.second);
        model_.erase(entry);
    }
    void compare_lower_bound(uint64_t size, uint64_t address) const {
        const auto expected = model_.lower_bound(Key{size, address});
        bfc::FreeChunk found{};
        require(bins_.lower_bound(size, address, found) == (expected != model_.end()),
                "lower_bound finds something or nothing");
        if (expected != model_.end()) require_same(found, *expected);
    }
    // Takes the best fit out of both.
    void pop_best_fit(uint64_t size) {
        const auto expected = model_.lower_bound(Key{size, 0});
        bfc::FreeChunk found{};
        require(bins_.pop_best_fit(size, found) == (expected != model_.end()),
                "pop_best_fit finds something or nothing");
        if (expected == model_.end()) return;
        require_same(found, *expected);
        addresses_.erase(found.order);
        model_.erase(expected);
    }
    void compare_ends() const {
        require(bins_.count() == model_.size(), "count");
        require(bins_.largest() == (model_.empty() ? 0 : model_.rbegin()->first.first), "the size of the largest");
        compare_lower_bound(0, 0);
    }
    void compare_all() const {
        std::vector<bfc::FreeChunk> listed;
        require(bins_.list(listed), "list() finds itself sound");
        require(listed.size() == model_.size(), "list() holds every entry");
        auto expected = model_.begin();
        for (const bfc::FreeChunk& entry : listed) {
            require(Key(entry.size, entry.order) == expected->first, "list() is in order");
            ++expected;
        }
    }
    // Gives each entry another order, as when a pool begins to go by something else than addresses.
    void reorder(uint64_t mask) {
        std::vector<bfc::FreeChunk> entries;
        require(bins_.collect(entries), "collect");
        for (bfc::FreeChunk& entry : entries) entry.order ^= mask;
        bins_.sort_again(entries);
        std::map<Key, uint32_t> model;
        for (const auto& [key, handle] : model_) model.emplace(Key{key.first, key.second ^ mask}, handle);
        model_.swap(model);
        std::set<uint64_t> addresses;
        for (const uint64_t address : addresses_) addresses.insert(address ^ mask);
        addresses_.swap(addresses);
    }
    std::map<Key, uint32_t>::iterator any(Random& random) {
        auto found = model_.lower_bound(Key{random_size_, below(random, 1 << 30) << 8});
        return found == model_.end() ? model_.begin() : found;
    }
    std::map<Key, uint32_t>& model() { return model_; }
    void look_near(uint64_t size) { random_size_ = size; }

private:
    static void require_same(const bfc::FreeChunk& found, const std::pair<const Key, uint32_t>& expected) {
        require(Key(found.size, found.order) == expected.first, "the best fit");
        require(found.handle == expected.second, "the right handle");
    }

    bfc::Bins bins_;
    std::map<Key, uint32_t> model_;
    std::set<uint64_t> addresses_;
    uint32_t handle_ = 0;
    uint64_t random_size_ = 0;
};

uint64_t any_size(Random& random, int kind) {
    switch (kind) {
        case 0: return 4096;                                              // all equal: one deep tree
        case 1: return (32 + below(random, 4)) << 8;                      // four sizes
        case 2: return (1 + below(random, 1 << 20)) << 8;                 // spread
        case 3: return uint64_t{256} << below(random, 55);                // powers of two, to 2**62
        default: return 1 + (random() >> (1 + below(random, 62)));        // anything, not granules only
    }
}

void mixed(uint64_t seed, int kind, int steps) {
    std::printf("mixed seed=%" PRIu64 " kind=%d\n", seed, kind);
    Random random(seed * 16 + kind);
    Twins twins;
    bool growing = true;
    for (int step = 0; step < steps; ++step) {
        if (below(random, 2000) == 0) growing = !growing;
        if (below(random, 500) == 0) twins.reorder(below(random, 1 << 22) << 8);
        const uint64_t size = any_size(random, kind);
        twins.look_near(size);
        if (twins.model().empty() || below(random, 10) < (growing ? 7u : 3u))
            twins.insert(size, below(random, 1 << 22) << 8);
        else if (below(random, 2))
            twins.erase(twins.any(random));
        else
            twins.pop_best_fit(size);
        twins.compare_lower_bound(any_size(random, kind), below(random, 1 << 22) << 8);
        twins.compare_ends();
        if (step % 512 == 0) twins.compare_all();
    }
    twins.compare_all();
}

// Fills one bin, then erases a run of neighbours, as one allocation after another does to equal sizes.
void runs(uint64_t seed, int entries, bool shuffled, bool from_below, bool pops) {
    std::printf("runs seed=%" PRIu64 " entries=%d shuffled=%d from_below=%d pops=%d\n", seed, entries, shuffled,
                from_below, pops);
    Random random(seed);
    Twins twins;
    std::vector<uint64_t> addresses;
    for (int i = 0; i < entries; ++i) addresses.push_back((uint64_t{1} << 40) + (uint64_t(i) << 10));
    if (shuffled)
        for (int i = entries - 1; i > 0; --i) std::swap(addresses[i], addresses[below(random, i + 1)]);
    for (uint64_t address : addresses) twins.insert(512, address);
    twins.compare_all();
    const int first = static_cast<int>(below(random, entries));
    while (!twins.model().empty()) {
        auto entry = from_below ? twins.model().begin() : std::prev(twins.model().end());
        if (seed % 3 == 0) {  // a run out of the middle first
            entry = twins.model().lower_bound(Key{512, (uint64_t{1} << 40) + (uint64_t(first) << 10)});
            if (entry == twins.model().end()) entry = twins.model().begin();
        }
        if (pops)
            twins.pop_best_fit(from_below ? 256 : 512);
        else
            twins.erase(entry);
        twins.compare_lower_bound(256, 0);
        twins.compare_ends();
        if (twins.model().size() % 64 == 0) twins.compare_all();
    }
}

// Starts takes two addresses 2**40 apart for the same key, so a table over such addresses is the hard case.
void starts(uint64_t seed, int steps, bool aliased) {
    std::printf("starts seed=%" PRIu64 " aliased=%d\n", seed, aliased);
    Random random(seed);
    bfc::Starts table;
    std::map<uint64_t, uint32_t> model;
    std::vector<uint64_t> address_of;
    const auto find = [&](uint64_t address) {
        return table.find(address, [&](uint32_t handle) { return address_of[handle] == address; });
    };
    for (int step = 0; step < steps; ++step) {
        const uint64_t near = (uint64_t{7} << 40) + (below(random, 4096) << 8);
        const uint64_t address = aliased ? near + (below(random, 64) << 40) : near;
        const auto known = model.find(address);
        const uint32_t found = find(address);
        require(known == model.end() ? found == bfc::Starts::kNone : found == known->second, "find");
        if (known != model.end()) {
            table.erase(address, known->second);
            model.erase(known);
        } else if (below(random, 3)) {
            address_of.push_back(address);
            require(table.reserve(), "reserve");
            table.insert(address, static_cast<uint32_t>(address_of.size() - 1));
            model.emplace(address, static_cast<uint32_t>(address_of.size() - 1));
        }
        require(table.count() == model.size(), "count");
        if (step % 1024 == 0)
            for (const auto& entry : model) require(find(entry.first) == entry.second, "find each");
    }
    require(table.bytes() <= 64 * (model.size() + 4096), "the table follows the number of entries");
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    const uint64_t seed = std::strtoull(arguments[1], nullptr, 10);
    const int steps = std::atoi(arguments[2]);
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    running = "mixed";
    for (int kind = 0; kind < 5; ++kind) mixed(seed, kind, steps);
    running = "runs";
    for (int entries : {1, 24, 25, 300, 2000})
        for (int way = 0; way < 8; ++way) runs(seed, entries, way & 1, way & 2, way & 4);
    running = "starts";
    starts(seed, steps, false);
    starts(seed, steps, true);
    std::printf("sound\n");
    return 0;
}
