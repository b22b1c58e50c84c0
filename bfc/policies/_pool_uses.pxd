"""Who uses the private pools, for threads that do not hold the lock: a part of `CachingAllocator`."""

cimport cython
from libc.stdint cimport int64_t
from libcpp.vector cimport vector

from bfc.allocators._lock cimport Lock
from bfc.policies._private_pools cimport PoolId, PrivatePools, Scope


@cython.final
cdef class PoolUses:
    cdef Lock* lock
    cdef PrivatePools private_pools

    cdef int stand_behind(self, Lock* lock, PrivatePools private_pools) except -1
    cdef int add_reference(self, PoolId id) except -1
    cdef int release_reference(self, PoolId id) except -1
    cdef int64_t count_references(self, PoolId id) except -1
    cdef int begin(self, Scope scope, bint strict) except -1
    cdef int end(self, PoolId id) except -1
    cdef int set_among(self, vector[PoolId]* ids, PoolId id, bint wanted) except -1
