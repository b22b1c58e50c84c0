// The reserved bytes of each private pool, as PyTorch counts them: reserved_bytes_by_private_pools.
#pragma once

#include <cstdint>
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
            entries_.push_back(PoolReserved{pool[0], pool[1], false, {}});
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
        for (PoolReserved& entry : entries_)
            for (Gauge& gauge : entry.reserved) gauge.restart_peak();
    }
    void restart_totals() noexcept {
        for (PoolReserved& entry : entries_)
            for (Gauge& gauge : entry.reserved) gauge.restart_totals();
    }

    // False: the host is out of memory.
    bool copy(std::vector<PoolReserved>& out) const noexcept {
        try {
            out = entries_;
            return true;
        } catch (...) {
            return false;
        }
    }

private:
    std::vector<PoolReserved> entries_;     // a program has few pools

    static bool is_default(const uint64_t* pool) { return pool[0] == 0 && pool[1] == 0; }

    PoolReserved* find(const uint64_t* pool) {
        for (PoolReserved& entry : entries_)
            if (entry.first == pool[0] && entry.second == pool[1]) return &entry;
        return nullptr;
    }
};

}  // namespace bfc
