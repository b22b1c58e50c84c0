// Which pairs of sets of bins belong to a private pool: a hash table of chains, so that a program may have thousands of
// pools. A pair is a number; the table knows nothing of what stands behind it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace bfc {

class PoolSets {
public:
    static constexpr uint32_t kNone = 0xFFFFFFFF;

    // Puts a pair into the chain of a pool, out of the one that it was in. False: the host is out of memory, and nothing
    // has changed.
    bool enter(uint32_t pair, const uint64_t* pool) noexcept {
        if (!make_room(pair)) return false;
        leave(pair);
        links_[pair].hash = hash_of(pool);
        push(pair);
        return true;
    }

    // The first pair that may belong to a pool, and the one after it: the caller compares the pool.
    uint32_t first(const uint64_t* pool) const noexcept {
        return heads_.empty() ? kNone : heads_[hash_of(pool) & (heads_.size() - 1)];
    }
    uint32_t next(uint32_t pair) const noexcept { return links_[pair].next; }

private:
    struct Link {
        uint64_t hash;
        uint32_t next;
        bool is_in;
    };
    std::vector<uint32_t> heads_;  // a power of two
    std::vector<Link> links_;      // by pair

    static uint64_t hash_of(const uint64_t* pool) noexcept {
        uint64_t mixed = (pool[0] + 0x9E3779B97F4A7C15ull * pool[1]) * 0xBF58476D1CE4E5B9ull;
        return mixed ^ mixed >> 31;
    }

    bool make_room(uint32_t pair) noexcept {
        try {
            if (pair >= links_.size()) links_.resize(pair + 1, Link{0, kNone, false});
            if (links_.size() <= heads_.size()) return true;
            size_t size = 16;
            while (size < 2 * links_.size()) size *= 2;
            std::vector<uint32_t>(size, kNone).swap(heads_);
        } catch (...) {
            return false;
        }
        for (uint32_t i = 0; i < links_.size(); ++i)
            if (links_[i].is_in) push(i);
        return true;
    }

    void push(uint32_t pair) noexcept {
        uint32_t& head = heads_[links_[pair].hash & (heads_.size() - 1)];
        links_[pair].next = head;
        links_[pair].is_in = true;
        head = pair;
    }

    void leave(uint32_t pair) noexcept {
        if (!links_[pair].is_in) return;
        uint32_t* link = &heads_[links_[pair].hash & (heads_.size() - 1)];
        while (*link != pair) link = &links_[*link].next;
        *link = links_[pair].next;
        links_[pair].is_in = false;
    }
};

}  // namespace bfc
