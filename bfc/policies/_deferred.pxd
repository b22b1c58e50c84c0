"""Frees in a scope with `strict`: a part of `CachingAllocator`."""

cimport cython
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle
from bfc.allocators._fences cimport Fences


@cython.final
cdef class DeferredFree:
    cdef ChunkHandle handle
    cdef dict streams               # what `record_stream` named -> what the user passed for it
    cdef list fences                # (stream, fence), of streams that were marked before the free


@cython.final
cdef class Deferred:
    cdef object waiting             # deque of DeferredFree: removing an item needs no memory
    cdef object stuck               # of those, the ones that the device failed for

    cdef int put(self, ChunkHandle handle, allocation_id, Fences fences) except -1
    cdef int record(self, Fences fences, bint again, vector[ChunkHandle]& done, list faults) except -1
    cdef int clear(self) except -1
    cdef int put_aside(self, DeferredFree entry, bint is_stuck) except -1


cdef inline bint some_deferred(Deferred deferred) noexcept:
    return len(deferred.waiting) > 0
