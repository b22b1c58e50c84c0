"""Private pools, and which requests are diverted into them: a part of `Allocator`."""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc._core cimport BinSet, Lane, Pool, Region
from bfc.allocators._lock cimport Lock, Shown

cdef struct PoolId:
    uint64_t first
    uint64_t second

cdef struct PrivatePool:
    PoolId id
    int64_t uses            # 0: what it holds goes back with the next emptying
    uint64_t next_region    # under TensorFlow's policy: the bytes of its next region; 0: it had none
    uint64_t tag            # with which its memory sleeps; 0: with none

cdef enum ScopeKind:
    EVERY_STREAM
    NO_STREAM
    ONE_STREAM
    ONE_THREAD
    ONE_CAPTURE

cdef struct Scope:          # diverts allocations into a private pool
    PoolId pool
    ScopeKind kind
    uint64_t of             # the stream, or the thread's number
    uint64_t thread         # of a capture: the number of the thread that has begun it

cdef extern from "pool_ids.hpp" namespace "bfc" nogil:
    cdef cppclass ByPool:
        pass
    cbool is_same_pool(PoolId one, PoolId other) noexcept
    void put_in_pool(Lane* lane, PoolId pool) noexcept
    cbool is_among(PoolId id, vector[PoolId]& ids) noexcept
    cbool put_or_take "bfc::set_among"(vector[PoolId]& ids, PoolId id, cbool wanted) noexcept


ctypedef cmap[PoolId, PrivatePool, ByPool] KnownPools


cdef inline PoolId pool_of(Lane* lane) noexcept nogil:
    return PoolId(lane.pool[0], lane.pool[1])


cdef inline PoolId default_pool() noexcept nogil:
    return PoolId(0, 0)


cdef inline cbool is_default(PoolId id) noexcept nogil:
    return id.first == 0 and id.second == 0


cdef inline cbool is_private(const Lane* lane) noexcept nogil:
    return (lane.pool[0] | lane.pool[1]) != 0


cdef cbool holds_memory(Pool pool, PoolId id) noexcept nogil


@cython.final
cdef class PrivatePools:
    # Guarded by the allocator's lock: every method needs it. No Python object is held.

    cdef KnownPools known               # by id: they are emptied in that order
    cdef vector[Scope] scopes           # the newest last
    cdef Shown[size_t] open_scopes      # how many these are; may be read without the lock
    cdef Shown[size_t] open_captures    # how many of them are of captures; the same
    cdef vector[PoolId] lenders         # pools that serve requests which would be refused
    cdef vector[PoolId] unsplit         # pools whose chunks are handed out whole

    cdef int64_t uses(self, PoolId id) noexcept nogil
    cdef cbool know(self, PoolId id) noexcept nogil
    cdef cbool use(self, PoolId id) noexcept nogil
    cdef cbool release(self, PoolId id) noexcept nogil
    cdef void drop_empty(self, Pool pool, PoolId only) noexcept nogil
    cdef cbool next_released(self, PoolId after, PrivatePool* found) noexcept nogil
    cdef void keep_used(self, Pool pool, cbool with_default, PoolId only, vector[Region]& regions) noexcept nogil

    cdef cbool some_default(self, Pool pool, vector[Region]& regions) noexcept nogil

    cdef cbool is_in_use(self, Scope* scope, cbool in_other_threads) noexcept nogil
    cdef cbool begin(self, Scope scope) noexcept nogil
    cdef cbool end(self, PoolId id) noexcept nogil
    cdef void divert(self, Lane* lane, uint64_t stream, PoolId joined) noexcept nogil
    cdef cbool may_have_joined(self, uint64_t stream) noexcept nogil
    cdef cbool captures(self, uint64_t stream) noexcept nogil
    cdef void count_scopes(self) noexcept nogil

    cdef PrivatePool* find(self, PoolId id) noexcept nogil
    cdef cbool add(self, PoolId id) noexcept nogil


cdef PoolId id_of(pool) except *
cdef tuple name_of(PoolId id)
cdef Scope scope_of(pool, streams) except *
cdef uint64_t this_thread() noexcept nogil


@cython.final
cdef class PoolUses:
    cdef Lock* lock
    cdef PrivatePools private_pools

    cdef int attach(self, Lock* lock, PrivatePools private_pools) except -1
    cdef int add_reference(self, PoolId id) except -1
    cdef bint release_reference(self, PoolId id) except -1
    cdef int64_t count_references(self, PoolId id) except -1
    cdef int begin(self, Scope scope, bint strict) except -1
    cdef int end(self, PoolId id) except -1
    cdef list captures(self)
    cdef int set_among(self, vector[PoolId]* ids, PoolId id, bint wanted) except -1
