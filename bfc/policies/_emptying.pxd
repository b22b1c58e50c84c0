"""Gives back what is cached where there are expandable segments: a part of `CachingAllocator`."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from bfc._core cimport Pool
from bfc.allocators._lock cimport Lock
from bfc.allocators._source cimport Source
from bfc.mapping._calls cimport Faults
from bfc.mapping._expandable cimport ExpandableSegments
from bfc.policies._private_pools cimport PoolId, PrivatePool, PrivatePools


@cython.final
cdef class Emptying:
    cdef Lock* lock                     # the allocator's
    cdef Pool pool
    cdef Source source
    cdef PrivatePools private_pools
    cdef ExpandableSegments segments

    cdef int stand_behind(self, Lock* lock, Pool pool, Source source, PrivatePools private_pools,
                          ExpandableSegments segments) except -1
    cdef uint64_t empty_all(self, bint with_default, bint strict, uint64_t* changes) except? 0xFFFFFFFFFFFFFFFF
    cdef uint64_t empty_pool(self, PoolId id) except? 0xFFFFFFFFFFFFFFFF
    cdef bint get_pool(self, size_t i, PrivatePool* pool) noexcept
    cdef uint64_t empty_one(self, PoolId id, uint32_t kind, bint maps, uint64_t* changes,
                            Faults faults) except? 0xFFFFFFFFFFFFFFFF
    cdef uint64_t give_unreturned_back(self, uint64_t* changes) except? 0xFFFFFFFFFFFFFFFF
