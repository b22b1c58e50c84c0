// The fields of an allocator that belong to one subject: structures without functions.
#pragma once

#include <cstdint>
#include <vector>

#include "lock.hpp"

namespace bfc {

// What an allocator knows of streams.
struct StreamRules {
    uint64_t home = 0;                 // HOST_STREAM where memory is not reused in a stream's order
    uint64_t default_alias = 0;        // another handle of the default stream
    std::vector<uint64_t> of_threads;  // handles that name another stream in each thread
    int by_stream = 0;                 // free chunks are kept apart by stream, and no stream is the home stream
    Shown<int> has_lanes;              // a hit looks for the lane of its request: under BFC, if not all use the same
    int may_be_unordered = 0;          // whether some stream may run its work in any order: the sub-allocator knows
};

// Whether an allocator is still there, and for whom.
struct Lifetime {
    int is_closed = 0;
    int is_abandoned = 0;  // garbage-collected, but views of its memory remain
    int64_t live_buffers = 0;
};

// Regions that the pool has given up, and whose free() has failed.
template <class Region>
struct Unreturned {
    std::vector<Region> regions;
    uint64_t nbytes = 0;
    std::vector<Region> closing;  // empty; has room for all regions, as `regions` has
};

}  // namespace bfc
