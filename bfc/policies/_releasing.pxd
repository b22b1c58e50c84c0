"""Which regions PyTorch's policy gives back."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, Pool, Region
from bfc.allocators._lock cimport Lock
from bfc.allocators._private_pools cimport PoolId, PrivatePool, PrivatePools
from bfc.allocators._source cimport Source
from bfc.allocators.mapping._address_ranges cimport Faults
from bfc.allocators.mapping._expandable cimport ExpandableSegments

cdef uint64_t take_out(Pool pool, Source source, vector[ChunkHandle]& chunks, vector[Region]& out) noexcept nogil
cdef cbool list_whole(Pool pool, PoolId id, uint32_t kind, vector[ChunkHandle]& out) noexcept nogil
cdef cbool list_collectable(Pool pool, cbool strict, vector[ChunkHandle]& out) noexcept nogil
cdef cbool list_releasable(Pool pool, PrivatePools private_pools, cbool with_default,
                           vector[ChunkHandle]& out) noexcept nogil
cdef void collect_oldest(Pool pool, vector[ChunkHandle]& candidates, uint64_t target,
                         vector[Region]& out) noexcept nogil
cdef cbool choose_oversize(Pool pool, uint32_t bin_set, uint64_t rounded, uint64_t oversize,
                           vector[Region]& out) noexcept nogil
cdef void choose_enough(Pool pool, vector[ChunkHandle]& chunks, uint64_t needed,
                        vector[ChunkHandle]& chosen) noexcept nogil


@cython.final
cdef class Emptying:
    cdef Lock* lock                     # the allocator's
    cdef Pool pool
    cdef Source source
    cdef PrivatePools private_pools
    cdef ExpandableSegments segments

    cdef int attach(self, Lock* lock, Pool pool, Source source, PrivatePools private_pools,
                    ExpandableSegments segments) except -1
    cdef uint64_t empty_all(self, bint with_default, bint strict, uint64_t* changes) except? 0xFFFFFFFFFFFFFFFF
    cdef uint64_t empty_pool(self, PoolId id) except? 0xFFFFFFFFFFFFFFFF
    cdef bint get_next(self, PrivatePool* pool) noexcept
    cdef uint64_t empty_one(self, PoolId id, uint32_t kind, bint maps, uint64_t* changes,
                            Faults faults) except? 0xFFFFFFFFFFFFFFFF
    cdef uint64_t give_unreturned_back(self, uint64_t* changes) except? 0xFFFFFFFFFFFFFFFF
