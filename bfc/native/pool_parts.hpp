// The fields of a pool, by subject: structures without functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "forward.hpp"
#include "parts.hpp"
#include "pool_sets.hpp"

namespace bfc {

// A block from a sub-allocator.
struct Region {
    uint64_t ptr;
    uint64_t end;
    uint32_t first;   // the chunk at ptr; merges keep the left handle, so it never changes
    uint32_t number;  // rises from each region to the next one that comes; see RegionOrder
};

// Where there are two ends: one of them, or the gap.
struct End {
    Bins* bins;
    uint64_t turns;      // with all bits set, the best of free chunks of one size is at the highest address
    uint64_t slack;      // a hole is kept whole if less is left over
    uint64_t gap_slack;  // and so is the gap
};

// The memory that a pool's chunks lie in.
struct ChunkRecords {
    void* block = nullptr;  // from realloc; the chunks begin at the first cache line in it
    size_t skipped = 0;     // the bytes of the block before them
    size_t capacity = 0;
    uint32_t free_slot = 0xFFFFFFFF;
    int64_t next_allocation_id = 1;
    uint64_t unchecked = 0;  // changes since a debug build's last check
};

// Which of free chunks of one size is the best fit.
struct RegionOrder {
    static constexpr size_t kRecent = 64;  // copies, 2 KiB

    uint32_t next_number = 0;     // of a region
    bool prefers_older = false;   // that of the oldest region
    bool by_number = false;       // and the regions' addresses do not tell their ages
    Region recent[kRecent] = {};  // copies of regions that were looked up by address, by that address
};

// The lanes of PyTorch's policy, and of private pools.
struct Lanes {
    static constexpr uint32_t kNone = 0xFFFFFFFF;

    PoolSets pool_sets;  // the lanes of each private pool, and of the default one: half of their indices
    uint32_t last = 0;
    uint32_t next_reopened = 0;  // the pair at which the search for one that may be reopened goes on
    uint32_t kept = kNone;       // memory is being mapped for it: meanwhile no other lane may reuse its record
};

// When chunks were freed.
struct Times {
    void* counter = nullptr;  // TensorFlow's timing counter; null: frees have no timestamp
    uint64_t safe_frontier = 0;
    std::vector<uint32_t> timestamped;
    bool notes_frees = false;  // whether there is a timing counter or a history: for the policy without counts
    uint64_t clock = 0;        // counts searches, where a policy needs the age of free chunks
};

// What is counted and written down.
struct PoolBooks {
    Usage* usage = nullptr;           // with lanes: PyTorch's counts. Null: all chunks are in one set of bins
    PoolUsage* pool_usage = nullptr;  // with lanes: what private pools hold
    History* history = nullptr;       // null: nothing is recorded
    OwnedBytes owned;                 // the bytes in use by the owner's number
};

// The chunks that were handed out or freed, and whose range's bitmap does not know it.
struct ChangedChunks {
    std::vector<uint64_t> bits;  // by handle
    bool any = false;
};

struct PoolPlans {
    PlanServer* current = nullptr;  // serves requests that come as planned; null: there is none
    bool rest = false;              // a hit takes no place: a graph that is captured would write there later
    std::vector<PlanServer*> all;   // that one, and earlier ones that blocks still lie in
};

struct TwoEnds {
    End ends[3] = {};           // by the set of bins
    uint64_t shared_begin = 0;  // the region that both ends share, as it came; 0: there is none
    uint64_t shared_end = 0;    // no request from the lower end reaches beyond it
};

}  // namespace bfc
