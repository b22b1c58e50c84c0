// The reserved bytes of each private pool, as PyTorch counts them: reserved_bytes_by_private_pools.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "usage.hpp"

namespace bfc {

// What a private pool has had. An entry stays when its pool has gone.
struct PoolReserved {
    uint64_t first, second;                 // the pool's id
    bool has_had;                           // any memory
    Gauge reserved[Usage::kKinds + 1];      // small, large, and both together
};

class PoolUsage {
public:
    // Makes an entry for a pool that is not the default one. False: the host is out of memory.
    bool know(const uint64_t* pool) noexcept {
        if (is_default(pool) || find(pool)) return true;
        try {
            entries_.emplace(std::make_pair(pool[0], pool[1]), PoolReserved{pool[0], pool[1], false, {}});
            return true;
        } catch (...) {
            return false;
        }
    }

    // Both need a know() before them.
    void came(const uint64_t* pool, int kind, int64_t size) noexcept {
        if (is_default(pool)) return;
        PoolReserved* found = find(pool);
        found->has_had = true;
        for (int k : {kind, Usage::kKinds}) found->reserved[k].raise(size);
    }
    void went(const uint64_t* pool, int kind, int64_t size) noexcept {
        if (is_default(pool)) return;
        PoolReserved* found = find(pool);
        for (int k : {kind, Usage::kKinds}) found->reserved[k].lower(size);
    }

    void restart_peaks() noexcept {
        for (auto& entry : entries_)
            for (Gauge& gauge : entry.second.reserved) gauge.restart_peak();
    }
    void restart_totals() noexcept {
        for (auto& entry : entries_)
            for (Gauge& gauge : entry.second.reserved) gauge.restart_totals();
    }

    // False: the host is out of memory.
    bool copy(std::vector<PoolReserved>& out) const noexcept {
        try {
            out.clear();
            out.reserve(entries_.size());
            for (const auto& entry : entries_) out.push_back(entry.second);
            return true;
        } catch (...) {
            return false;
        }
    }

private:
    std::map<std::pair<uint64_t, uint64_t>, PoolReserved> entries_;

    static bool is_default(const uint64_t* pool) { return pool[0] == 0 && pool[1] == 0; }

    PoolReserved* find(const uint64_t* pool) {
        const auto found = entries_.find({pool[0], pool[1]});
        return found == entries_.end() ? nullptr : &found->second;
    }
};

}  // namespace bfc
