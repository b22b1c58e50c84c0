// Plays random histories through the C table of bfc_allocator.h, without the GIL, and verifies each answer.
//
// Marks: the memory itself says who owns it. Each piece of 256 bytes of a live block begins with the block's number, and
// a free piece with 0. So a block that shares a piece with another is found when it is handed out, at whatever address. What
// a graph has freed begins with the number of the graph's pool: it goes to nobody else, until the pool is released.
//
// Places: a model of the policy, written apart from the allocator, says at which address each request is served.
#include <bfc_allocator.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr uint64_t kPiece = 256, kKiB = 1024, kMiB = kKiB * kKiB;
constexpr int kStreams = 4, kSlots = 64, kPools = 4096;
constexpr uint64_t kOfPool = uint64_t{1} << 63;

struct Random {
    uint64_t state;
    explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du) {}
    uint64_t operator()() {  // splitmix64
        uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return z ^ z >> 31;
    }
    uint64_t below(uint64_t n) { return static_cast<uint64_t>(static_cast<unsigned __int128>((*this)()) * n >> 64); }
    bool once_in(uint64_t n) { return below(n) == 0; }
};

// Sizes: mostly small, some next to powers of two, few large ones. `large` is the most that is asked for.
uint64_t draw_size(Random& random, uint64_t large) {
    const uint64_t kind = random.below(100);
    if (kind < 70) return 8 + random.below(2 * kKiB);
    if (kind < 90) return std::max<uint64_t>(8, (uint64_t{1} << (4 + random.below(9))) + random.below(3) - 1);
    if (kind < 99 || large <= 32 * kKiB) return 8 + random.below(32 * kKiB);
    return 8 + random.below(large);
}

struct Fault {
    char text[512] = "";
    std::atomic<bool> is_set{false};
    bool operator()(const char* format, ...) {  // keeps the first one; always false
        if (is_set.exchange(true)) return false;
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(text, sizeof text, format, arguments);
        va_end(arguments);
        return false;
    }
};

struct Counts {
    int64_t calls = 0, refused = 0;             // calls whose outcome was verified; requests that were refused
    int64_t allocated = 0, freed = 0, live = 0, live_bytes = 0;
};

// -- marks -------------------------------------------------------------------------------------------------------------

struct Block {
    uint8_t* ptr;
    uint64_t size, id;
    int64_t stream;
    uint64_t pool;                              // of a graph; 0: none
    uint32_t users;                             // other streams that use it
    uint64_t rounds[kStreams];                  // the rounds of those at the free
};

struct Habits {
    int32_t streams, may_refuse;                // may_refuse: the source fails now and then, or the pool is narrow
    uint64_t alignment, large, most_live;
};

struct Marks {
    const bfc_allocator& table;
    const Habits habits;
    std::atomic<uint64_t> next_id{1};
    std::atomic<uint32_t> held{0};              // streams that do not finish for now
    std::atomic<uint64_t> rounds[kStreams] = {};
    std::atomic<Block*> slots[kSlots] = {};     // blocks on their way from a thread to another
    std::atomic<uint64_t> pools[kStreams] = {}; // of the graph that a stream's requests belong to
    std::atomic<bool> released[kPools] = {};    // whether a pool belongs to no graph any more
    Fault fault;
    std::atomic<bool> stops{false};

    Marks(const bfc_allocator& functions, const Habits& wanted) : table(functions), habits(wanted) {}
};

uint64_t mark_when_free(const Block& block) { return block.pool ? kOfPool | block.pool : 0; }

bool may_take(const Marks& all, const Block& block, uint64_t found) {
    if (!(found & kOfPool)) return found == 0;
    const uint64_t pool = found & ~kOfPool;
    return pool == block.pool || (pool < kPools && all.released[pool].load());
}

// Of a block that is handed out, or else freed.
bool write_marks(Marks& all, const Block& block, bool takes) {
    const uint64_t becomes = takes ? block.id : mark_when_free(block);
    for (uint64_t at = 0; at + 8 <= block.size; at += kPiece) {
        uint64_t* word = reinterpret_cast<uint64_t*>(block.ptr + at);
        const uint64_t found = __atomic_load_n(word, __ATOMIC_RELAXED);
        if (takes ? !may_take(all, block, found) : found != block.id)
            return all.fault("block %lu at %p of %lu bytes, pool %lu, %s: at %lu is %lx", block.id,
                             static_cast<void*>(block.ptr), block.size, block.pool, takes ? "handed out" : "freed", at, found);
        __atomic_store_n(word, becomes, __ATOMIC_RELAXED);
    }
    if (block.size % kPiece >= 16) {            // the end, where the last piece has room behind its beginning
        uint64_t found;
        uint8_t* end = block.ptr + block.size - 8;
        memcpy(&found, end, 8);
        if (!takes && found != block.id) return all.fault("the end of block %lu is overwritten: %lx", block.id, found);
        memcpy(end, &becomes, 8);
    }
    return true;
}

// Of a step that is played: an allocation, or a free if the size is 0.
struct Event {
    int64_t key, size, stream;
    uint64_t* address;                          // where to write it, or null
};

// One thread's part of a history.
struct Player {
    Marks& all;
    Random random;
    std::vector<Block> live, waiting;
    std::map<int64_t, std::vector<Block>> keyed{};  // blocks of `follow`, one or none for each key
    Counts counts;

    Player(Marks& marks, uint64_t seed) : all(marks), random(seed) {}

    bool is_used(const Block& block) const {
        for (int stream = 0; stream < kStreams; ++stream)
            if (block.users >> stream & 1 && all.rounds[stream].load() == block.rounds[stream]) return true;
        return false;
    }

    // The memory of blocks whose streams have finished may be handed out again.
    bool let_go() {
        for (size_t i = 0; i < waiting.size();) {
            if (is_used(waiting[i])) {
                ++i;
                continue;
            }
            if (!write_marks(all, waiting[i], false)) return false;
            waiting[i] = waiting.back();
            waiting.pop_back();
        }
        return true;
    }

    bool allocate() {
        const bool has_other = all.habits.streams > 1 && random.once_in(4);
        const uint64_t size = draw_size(random, all.habits.large);
        return allocate(size, has_other ? static_cast<int64_t>(random.below(all.habits.streams)) : 0, &live);
    }

    bool allocate(uint64_t size, int64_t stream, std::vector<Block>* into) {
        char why[512];
        void* ptr = nullptr;
        Block block{};
        block.size = size;
        block.stream = stream;
        block.pool = all.pools[stream].load(std::memory_order_relaxed);
        const bfc_result result = all.table.allocate(all.table.self, 0, block.size, block.stream, &ptr, why, sizeof why);
        if (result != BFC_OK) {
            ++counts.refused;
            if (ptr != nullptr) return all.fault("refused, and gave %p", ptr);
            if (!all.habits.may_refuse) return all.fault("refused %lu bytes: %s", block.size, why);
            return true;
        }
        block.ptr = static_cast<uint8_t*>(ptr);
        block.id = all.next_id.fetch_add(1);
        if (ptr == nullptr || reinterpret_cast<uint64_t>(ptr) % all.habits.alignment)
            return all.fault("%lu bytes at %p are not aligned to %lu", block.size, ptr, all.habits.alignment);
        if (!let_go() || !write_marks(all, block, true)) return false;
        if (random.once_in(16) && (all.table.device_of(all.table.self, block.ptr) != 0 ||
                                   all.table.device_of(all.table.self, block.ptr + block.size - 1) != 0))
            return all.fault("%p of %lu bytes lies in no region", ptr, block.size);
        into->push_back(block);
        ++counts.calls, ++counts.allocated;
        return true;
    }

    bool free(Block block) {
        const uint32_t held = all.held.load();
        block.users &= held;
        for (int stream = 0; stream < kStreams; ++stream) block.rounds[stream] = all.rounds[stream].load();
        if (block.users) {
            waiting.push_back(block);           // still marked: whoever gets it too early finds that
        } else if (!write_marks(all, block, false)) {
            return false;
        }
        if (all.table.free(all.table.self, block.ptr) != BFC_OK) return all.fault("free(%p) failed", static_cast<void*>(block.ptr));
        ++counts.calls, ++counts.freed;
        return true;
    }

    bool drop() {
        const size_t i = random.below(live.size());
        Block block = live[i];
        live[i] = live.back();
        live.pop_back();
        if (!random.once_in(8)) return free(block);
        Block* other = all.slots[random.below(kSlots)].exchange(new Block(block));
        if (other == nullptr) return true;
        block = *other;
        delete other;
        return free(block);
    }

    bool use_on_a_stream() {
        Block& block = live[random.below(live.size())];
        const int64_t stream = static_cast<int64_t>(random.below(all.habits.streams));
        char why[512];
        if (all.table.record_stream(all.table.self, block.ptr, stream, why, sizeof why) != BFC_OK)
            return all.fault("record_stream(%p, %ld): %s", static_cast<void*>(block.ptr), stream, why);
        if (stream != block.stream) block.users |= 1u << stream;
        ++counts.calls;
        return true;
    }

    bool step() {
        const size_t most = all.habits.most_live;
        if (live.size() >= most || (!live.empty() && random.below(2 * most) < most / 2 + live.size())) return drop();
        if (all.habits.streams > 1 && !live.empty() && random.once_in(32)) return use_on_a_stream();
        return allocate();
    }

    bool play(int64_t steps) {
        for (int64_t i = 0; i < steps; ++i)
            if (all.fault.is_set.load(std::memory_order_relaxed) || !step()) return false;
        return true;
    }

    // The events of a step. Of a thousand, `wrong` come otherwise: left out, put in, of another size, or freed late.
    bool follow(const Event* events, int64_t count, uint64_t wrong) {
        for (int64_t i = 0; i < count; ++i) {
            if (!live.empty() && random.once_in(8) && !drop_late()) return false;
            const Event& event = events[i];
            const bool is_wrong = random.below(1000) < wrong;
            auto& block = keyed[event.key];
            if (event.size == 0) {              // a free
                if (block.empty()) continue;
                if (is_wrong)
                    live.push_back(block[0]);
                else if (!free(block[0]))
                    return false;
                block.clear();
                continue;
            }
            const uint64_t kind = is_wrong ? random.below(3) : 3;
            if (kind == 0 || !block.empty()) continue;
            if (kind == 1 && !allocate(8 + random.below(2 * event.size), event.stream, &live)) return false;
            const uint64_t size = kind == 2 ? event.size / 2 + 8 + random.below(event.size) : event.size;
            if (!allocate(size, event.stream, &block)) return false;
            if (event.address) *event.address = reinterpret_cast<uint64_t>(block[0].ptr);
        }
        return true;
    }
    bool drop_late() {
        const Block block = live[random.below(live.size())];
        live.erase(std::find_if(live.begin(), live.end(), [&](const Block& other) { return other.id == block.id; }));
        return free(block);
    }

    bool drain() {
        for (auto& [key, block] : keyed) {
            if (!block.empty() && !free(block[0])) return false;
            block.clear();
        }
        for (; !live.empty(); live.pop_back())
            if (!free(live.back())) return false;
        for (auto& slot : all.slots) {
            Block* block = slot.exchange(nullptr);
            const bool done = block == nullptr || free(*block);
            delete block;
            if (!done) return false;
        }
        return let_go();
    }
};

struct MarksGame {
    Marks all;
    std::vector<Player> players{};
    std::vector<std::thread> threads{};

    MarksGame(const bfc_allocator& table, const Habits& habits) : all(table, habits) {}
};

// -- places ------------------------------------------------------------------------------------------------------------

constexpr uint32_t kNone = ~uint32_t{0};

enum Policy { kBfc, kCaching };

struct Piece {
    uint64_t ptr, size, requested;
    uint32_t before, after;                     // the neighbours in its region
    int pool;
    bool used;
};

struct Setting {
    int32_t policy, grows;                      // grows: BFC with regions that double; else one region as large as the limit
    uint64_t limit, slack, large, most_live;
};

// Best fit by (size, address) in pools of their own for each kind of request; pieces are split and merged.
struct Model {
    const Setting set;
    std::vector<Piece> pieces;
    std::vector<uint32_t> spare;
    std::set<std::pair<std::pair<uint64_t, uint64_t>, uint32_t>> free[2];
    std::map<uint64_t, std::pair<uint64_t, uint32_t>> regions;      // by address: the size, and the first piece
    uint64_t taken = 0, used = 0, requested = 0, peak = 0, next_region;
    int64_t live = 0, allocations = 0, refusals = 0;

    explicit Model(const Setting& setting) : set(setting) { forget_growth(); }

    static uint64_t up(uint64_t size, uint64_t step) { return (size + step - 1) / step * step; }
    uint64_t rounded(uint64_t size) const { return up(size, set.policy == kBfc ? 256 : 512); }
    int pool_of(uint64_t size) const { return set.policy == kCaching && size > kMiB; }

    uint32_t add(const Piece& piece) {
        uint32_t at = static_cast<uint32_t>(pieces.size());
        if (spare.empty()) {
            pieces.push_back(piece);
        } else {
            at = spare.back(), spare.pop_back();
            pieces[at] = piece;
        }
        return at;
    }
    void list(uint32_t at) { free[pieces[at].pool].insert({{pieces[at].size, pieces[at].ptr}, at}); }
    void unlist(uint32_t at) { free[pieces[at].pool].erase({{pieces[at].size, pieces[at].ptr}, at}); }

    uint32_t find(uint64_t size) {
        auto& places = free[pool_of(size)];
        const auto found = places.lower_bound({{size, 0}, 0});
        return found == places.end() ? kNone : found->second;
    }

    bool splits(uint64_t has, uint64_t size) const {
        if (set.policy == kBfc) return has >= 2 * size || has - size >= set.slack;
        return pool_of(size) ? has - size > kMiB : has - size >= 512;
    }

    void take(uint32_t at, uint64_t size, uint64_t wanted) {
        unlist(at);
        if (splits(pieces[at].size, size)) {
            const Piece whole = pieces[at];
            const uint32_t rest =
                add({whole.ptr + size, whole.size - size, 0, at, whole.after, whole.pool, false});
            if (whole.after != kNone) pieces[whole.after].before = rest;
            pieces[at].size = size, pieces[at].after = rest;
            list(rest);
        }
        pieces[at].used = true, pieces[at].requested = wanted;
        used += pieces[at].size, requested += wanted, ++live, ++allocations;
        peak = std::max(peak, used);
    }

    void give(uint32_t at) {
        Piece& piece = pieces[at];
        piece.used = false;
        used -= piece.size, requested -= piece.requested, --live;
        if (piece.after != kNone && !pieces[piece.after].used) merge(at, piece.after);
        const uint32_t before = pieces[at].before;
        if (before != kNone && !pieces[before].used) {
            unlist(before);
            list(at);                           // for merge, which takes the right one from its list
            merge(before, at);
            at = before;
        }
        list(at);
    }
    void merge(uint32_t left, uint32_t right) {
        unlist(right);
        pieces[left].size += pieces[right].size;
        pieces[left].after = pieces[right].after;
        if (pieces[left].after != kNone) pieces[pieces[left].after].before = left;
        spare.push_back(right);
    }

    // The size of the region that a request needs, or 0 where the limit does not allow it.
    uint64_t grow(uint64_t size) {
        if (set.policy == kCaching) {
            const uint64_t wants = size <= kMiB ? 2 * kMiB : size < 10 * kMiB ? 20 * kMiB : up(size, 2 * kMiB);
            return taken + wants <= set.limit ? wants : 0;
        }
        const uint64_t available = (set.limit - taken) / 256 * 256;
        if (size > available) return 0;
        bool grew = false;
        while (size > next_region) next_region *= 2, grew = true;
        const uint64_t got = std::min(next_region, available);
        if (!grew) next_region *= 2;
        return got;
    }

    uint64_t wholly_free() const {
        uint64_t sum = 0;
        for (const auto& [ptr, region] : regions) sum += is_whole(region) ? region.first : 0;
        return sum;
    }
    bool is_whole(const std::pair<uint64_t, uint32_t>& region) const {
        return !pieces[region.second].used && pieces[region.second].size == region.first;
    }
    void release() {
        for (auto at = regions.begin(); at != regions.end();) {
            if (!is_whole(at->second)) {
                ++at;
                continue;
            }
            unlist(at->second.second);
            spare.push_back(at->second.second);
            taken -= at->second.first;
            at = regions.erase(at);
        }
    }

    void forget_growth() { next_region = set.grows ? 2 * kMiB : set.limit; }

    // Whether a request is served, and where: `at` is the piece, or kNone for the first piece of a new region.
    bool serves(uint64_t size, uint32_t* at, uint64_t* region) {
        *region = 0;
        *at = find(size);
        if (*at != kNone || (*region = grow(size))) return true;
        const uint64_t whole = wholly_free();
        if (set.policy == kBfc ? whole == 0 || taken - whole + size > set.limit : whole == 0) return false;
        release();
        return (*region = grow(size)) != 0;
    }

    bool add_region(uint64_t ptr, uint64_t size, uint32_t* at) {
        const auto after = regions.lower_bound(ptr);
        if (after != regions.end() && ptr + size > after->first) return false;
        if (after != regions.begin() && std::prev(after)->first + std::prev(after)->second.first > ptr) return false;
        *at = add({ptr, size, 0, kNone, kNone, 0, false});
        regions[ptr] = {size, *at};
        taken += size;
        return true;
    }
};

struct PlacesGame {
    const bfc_allocator& table;
    Random random;
    Model model;
    std::vector<uint32_t> live;
    Counts counts;
    Fault fault;
    uint64_t wanted = 0;                        // how many blocks are to be live for now

    PlacesGame(const bfc_allocator& functions, const Setting& setting, uint64_t seed)
        : table(functions), random(seed), model(setting) {}

    bool allocate() {
        char why[512];
        void* ptr = nullptr;
        const uint64_t size = draw_size(random, model.set.large), rounded = model.rounded(size);
        uint32_t at;
        uint64_t region;
        const bool serves = model.serves(rounded, &at, &region);
        const bfc_result result = table.allocate(table.self, 0, size, 0, &ptr, why, sizeof why);
        const uint64_t address = reinterpret_cast<uint64_t>(ptr);
        if (result != (serves ? BFC_OK : BFC_OUT_OF_MEMORY))
            return fault("%lu bytes: %d, and the model says %d: %s", size, result, serves, result == BFC_OK ? "" : why);
        ++counts.calls;
        if (!serves) return ++model.refusals, ++counts.refused, true;
        if (region) {
            if (address % 256 || !model.add_region(address, region, &at))
                return fault("%lu bytes at %lx: a region of %lu there would overlap another", size, address, region);
            model.pieces[at].pool = model.pool_of(rounded);
            model.list(at);
        }
        if (address != model.pieces[at].ptr) return fault("%lu bytes at %lx and not at %lx", size, address, model.pieces[at].ptr);
        model.take(at, rounded, size);
        live.push_back(at);
        return true;
    }

    bool drop() {
        const size_t i = random.below(live.size());
        const uint32_t at = live[i];
        live[i] = live.back();
        live.pop_back();
        if (table.free(table.self, reinterpret_cast<void*>(model.pieces[at].ptr)) != BFC_OK) return fault("a free failed");
        model.give(at);
        ++counts.calls;
        return true;
    }

    bool agrees(const char* name, int64_t ours, uint64_t theirs) {
        return ours == static_cast<int64_t>(theirs) || fault("%s is %ld, and the model says %lu", name, ours, theirs);
    }
    bool compare() {
        char why[512];
        bfc_device_stats stats;
        if (table.stats(table.self, 0, &stats, why, sizeof why) != BFC_OK) return fault("stats: %s", why);
        if (!agrees("allocations", stats.allocation[0].allocated, model.allocations) ||
            !agrees("allocated bytes", stats.allocated_bytes[0].current, model.used) ||
            !agrees("peak of allocated bytes", stats.allocated_bytes[0].peak, model.peak) ||
            !agrees("reserved bytes", stats.reserved_bytes[0].current, model.taken))
            return false;
        if (model.set.policy == kBfc) return true;  // which counts no more than these
        return agrees("live blocks", stats.allocation[0].current, model.live) &&
               agrees("segments", stats.segment[0].current, model.regions.size()) &&
               agrees("requested bytes", stats.requested_bytes[0].current, model.requested) &&
               agrees("refusals", stats.num_ooms, model.refusals);
    }

    bool play(int64_t steps) {
        char why[512];
        for (int64_t i = 0; i < steps; ++i) {
            if (i % 4096 == 0) wanted = random.below(model.set.most_live) + 1;
            const bool is_full = live.size() >= wanted;
            const bool frees = !live.empty() && (is_full ? !random.once_in(3) : random.once_in(3));
            if (!(frees ? drop() : allocate())) return false;
            if (random.once_in(16384)) {
                if (table.empty(table.self, why, sizeof why) != BFC_OK) return fault("empty: %s", why);
                model.release();
                model.forget_growth();
            }
            if (random.once_in(2048) && !compare()) return false;
        }
        return compare();
    }
};

}  // namespace

extern "C" {

// -- marks: a game of several players, each for one thread -------------------------------------------------------------

MarksGame* marks_new(const bfc_allocator* table, uint64_t seed, int players, const Habits* habits) {
    auto* game = new MarksGame(*table, *habits);
    game->players.reserve(static_cast<size_t>(players));
    for (int i = 0; i < players; ++i) game->players.emplace_back(game->all, seed + static_cast<uint64_t>(i) * 0x1000003);
    return game;
}

// Plays on all threads at once (on this one, if there is one player), and waits.
void marks_play(MarksGame* game, int64_t steps) {
    if (game->players.size() == 1) {
        game->players[0].play(steps);
        return;
    }
    std::vector<std::thread> threads;
    for (Player& player : game->players) threads.emplace_back([&player, steps] { player.play(steps); });
    for (auto& thread : threads) thread.join();
}

// The same in the background, until marks_stop.
void marks_start(MarksGame* game) {
    game->all.stops = false;
    for (Player& player : game->players)
        game->threads.emplace_back([&player, game] { while (!game->all.stops.load() && player.play(256)) {} });
}
void marks_stop(MarksGame* game) {
    game->all.stops = true;
    for (auto& thread : game->threads) thread.join();
    game->threads.clear();
}

// The source takes memory back: no block may lie there that is live, or that an unfinished stream uses.
void marks_gone(MarksGame* game, uint64_t address, uint64_t nbytes) {
    Player& player = game->players[0];
    if (!player.let_go()) return;
    for (const auto* blocks : {&player.live, &player.waiting})
        for (const Block& block : *blocks) {
            const uint64_t at = reinterpret_cast<uint64_t>(block.ptr);
            if (at < address + nbytes && address < at + block.size)
                game->all.fault("block %lu at %lx of %lu bytes is in use, and its memory goes back", block.id, at, block.size);
        }
}
void marks_hold(MarksGame* game, int stream) { game->all.held |= 1u << stream; }
void marks_finish(MarksGame* game, int stream) {
    game->all.held &= ~(1u << stream);
    ++game->all.rounds[stream];
}

// From here on the requests of a stream belong to a graph's pool. And a pool belongs to no graph any more.
void marks_pool(MarksGame* game, int64_t stream, int64_t pool) { game->all.pools[stream] = static_cast<uint64_t>(pool); }
void marks_released(MarksGame* game, int64_t pool) { game->all.released[pool] = true; }

// Plays the events of a step.
void marks_follow(MarksGame* game, const Event* events, int64_t count, int64_t wrong) {
    game->players[0].follow(events, count, static_cast<uint64_t>(wrong));
}

// Frees everything, and verifies it.
void marks_drain(MarksGame* game) {
    for (Player& player : game->players)
        if (!player.drain()) return;
}

const char* marks_fault(MarksGame* game) { return game->all.fault.is_set ? game->all.fault.text : nullptr; }

Counts marks_counts(MarksGame* game) {
    Counts sum;
    const auto count = [&sum](const Block& block) { ++sum.live, sum.live_bytes += static_cast<int64_t>(block.size); };
    for (const Player& player : game->players) {
        sum.calls += player.counts.calls, sum.refused += player.counts.refused;
        sum.allocated += player.counts.allocated, sum.freed += player.counts.freed;
        for (const Block& block : player.live) count(block);
        for (const auto& [key, block] : player.keyed)
            if (!block.empty()) count(block[0]);
    }
    for (const auto& slot : game->all.slots)
        if (const Block* block = slot.load()) count(*block);
    return sum;
}

void marks_delete(MarksGame* game) { delete game; }

// -- places ------------------------------------------------------------------------------------------------------------

PlacesGame* places_new(const bfc_allocator* table, uint64_t seed, const Setting* setting) {
    return new PlacesGame(*table, *setting, seed);
}
void places_play(PlacesGame* game, int64_t steps) { game->play(steps); }
const char* places_fault(PlacesGame* game) { return game->fault.is_set ? game->fault.text : nullptr; }
Counts places_counts(PlacesGame* game) { return game->counts; }
void places_delete(PlacesGame* game) { delete game; }
}
