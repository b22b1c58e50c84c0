// The rows of a snapshot's columns. `snapshots/columns.py` has the layout with which Python reads them.
#pragma once

#include <cstdint>

namespace bfc {

struct ChunkRow {
    uint64_t ptr;
    uint64_t size;
    uint64_t requested_size;        // 0 if it is free
    uint64_t last_requested_size;   // of a free chunk, under PyTorch's policy
    uint64_t stream;
    uint64_t freed_at_count;
    int64_t allocation_id;          // -1 if nobody owns it
    uint16_t state;                 // a RowState
    uint16_t tag;                   // a RowTag
    uint32_t owner;                 // its number; 0: nobody
};

enum RowState : uint16_t { kRowFree, kRowInUse, kRowWaiting, kRowLeaving };

enum RowTag : uint16_t { kRowUntagged, kRowLower, kRowUpper, kRowGap };  // where requests come from two ends

struct RegionRow {
    uint64_t ptr;
    uint64_t size;
    uint64_t stream;
    uint64_t pool[2];
    uint64_t home;                  // the start of the pool's region; for a range, that of its reservation
    uint64_t home_size;
    uint64_t number;                // of the pool's region, which rises from each one to the next that comes
    uint32_t chunks_end;            // its chunks begin where those of the previous row end; its pages likewise
    uint32_t pages_end;
    uint32_t kind;                  // 0 small, 1 large; above that, a name that a user gave
    uint32_t flags;                 // bits of RowFlags
};

enum RowFlags : uint32_t { kInRange = 1, kAsleep = 2, kIsView = 4 };

static_assert(sizeof(ChunkRow) == 64 && sizeof(RegionRow) == 80, "snapshots/columns.py has the same sizes");

}  // namespace bfc
