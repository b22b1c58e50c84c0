"""PyTorch's policy over the shared engine."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.allocators._allocator cimport Placement, Request
from bfc._core cimport ChunkHandle, Lane, Region
from bfc.allocators._ledger cimport Shown
from bfc.policies._recorded cimport Recorded

cdef struct PoolId:
    uint64_t first
    uint64_t second

cdef struct PrivatePool:
    PoolId id
    int64_t uses            # 0: what it holds goes back with the next emptying

cdef enum ScopeKind:
    EVERY_STREAM
    NO_STREAM
    ONE_STREAM
    ONE_THREAD

cdef struct Scope:          # diverts allocations into a private pool
    PoolId pool
    ScopeKind kind
    uint64_t of             # the stream, or the thread's number


cdef class CachingAllocator(Recorded):
    cdef object applied                 # the settings in force
    cdef readonly bint search_again
    cdef readonly bint collect_without_limit
    cdef readonly bint release_only_what_is_needed
    cdef object deferred                # frees in a scope of strict: deque of (handle, streams, fences)
    cdef object stuck_deferred            # of those, the ones that the device failed for

    # Guarded by the lock.
    cdef uint64_t allowed               # bytes; UNLIMITED: only the sub-allocator says no
    cdef uint64_t collects_above        # reserved bytes; UNLIMITED: nothing is collected
    cdef uint64_t total_bytes
    cdef double threshold
    cdef uint64_t oversize
    cdef uint64_t oversize_slack
    cdef vector[PrivatePool] private_pools
    cdef vector[Scope] scopes           # the newest last
    cdef Shown[size_t] open_scopes      # how many these are; may be read without the lock
    cdef vector[PoolId] lenders         # pools that serve requests which would be refused
    cdef vector[PoolId] unsplit         # pools whose chunks are handed out whole

    cdef int apply(self, settings) except -1
    cdef int set_allowed(self, uint64_t allowed) except -1
    cdef void answer(self, uint32_t bin_set) noexcept nogil
    cdef void answer_all(self) noexcept nogil
    cdef void resolve_collection(self) noexcept nogil
    cdef cbool is_gated(self) noexcept nogil

    cdef int collect(self, Request* request) except -1 nogil
    cdef void collect_oldest(self, vector[ChunkHandle]& candidates, uint64_t target, vector[Region]& out) noexcept nogil
    cdef int grow(self, Request* request, Placement* placed, cbool retry) except -1 nogil
    cdef void borrow(self, Request* request, Placement* placed) noexcept nogil
    cdef int release_oversize(self, Request* request) except -1 nogil
    cdef cbool choose_oversize(self, Request* request, vector[Region]& out) noexcept nogil
    cdef int release_and_retry(self, Request* request, Placement* placed) except -1 nogil
    cdef int release_some(self, Request* request) except -1 nogil
    cdef void choose_enough(self, vector[ChunkHandle]& chunks, uint64_t needed,
                            vector[ChunkHandle]& chosen) noexcept nogil
    cdef int release_all(self, Request* request) except -1 nogil
    cdef int release(self, Request* request, vector[Region]& regions) except -1 nogil
    cdef void search(self, Request* request, Placement* placed) noexcept nogil
    cdef int wait_for_all(self) except -1 with gil
    cdef int put_aside(self, entry, bint is_stuck) except -1
    cdef int wait_for_deferred(self, entry) except -1
    cdef int record_deferred(self, bint again=*) except -1

    cdef cbool list_sets(self, PoolId pool, uint32_t kind, vector[uint32_t]& out) noexcept nogil
    cdef cbool list_whole(self, PoolId pool, uint32_t kind, vector[ChunkHandle]& out) noexcept nogil
    cdef cbool list_releasable(self, vector[ChunkHandle]& out) noexcept nogil
    cdef void take_out(self, vector[ChunkHandle]& chunks, vector[Region]& out) noexcept nogil
    cdef void drop_empty_pools(self, PoolId only=*) noexcept nogil

    cdef int set_among(self, vector[PoolId]* ids, PoolId id, bint wanted) except -1
    cdef PoolId id_of(self, pool) except *
    cdef size_t find_pool(self, PoolId id) noexcept nogil
    cdef cbool knows(self, PoolId id) noexcept nogil
    cdef cbool add_pool(self, PoolId id, int64_t uses) noexcept nogil
    cdef int wait_for_pool(self, PoolId id) except -1
    cdef cbool is_of_pool(self, ChunkHandle handle, PoolId id) noexcept
