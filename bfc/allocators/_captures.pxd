"""The captures of graphs that an allocator has been told of, and the pools that they take memory from."""

cimport cython
from libc.stdint cimport uint64_t

from bfc._core cimport Pool
from bfc.allocators._lock cimport Lock
from bfc.allocators._private_pools cimport PoolId, PoolUses, PrivatePools
from bfc.allocators._fences cimport Fences


@cython.final
cdef class Captures:
    cdef Lock* lock                     # the allocator's, and so are the next four
    cdef Pool pool
    cdef Fences fences
    cdef PrivatePools private_pools
    cdef PoolUses pool_uses

    cdef int attach(self, Lock* lock, Pool pool, Fences fences, PrivatePools private_pools,
                    PoolUses pool_uses) except -1
    cdef int mark(self, int more) except -1
    cdef int begin(self, PoolId id, uint64_t stream, bint strict) except -1
    cdef list streams(self)
    cdef list news_of(self, streams)
    cdef int take_as_captured(self, pool, stream, bint is_captured) except -1
    cdef int forget_streams_of(self, pool) except -1
    cdef bint is_captured(self, uint64_t stream, bint strict) except -1
    cdef PoolId pool_for(self, uint64_t stream) except *
