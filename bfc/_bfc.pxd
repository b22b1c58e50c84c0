"""TensorFlow's policy over the common allocator."""

from libc.stdint cimport uint64_t

from bfc._allocator cimport Allocator, Request
from bfc._core cimport ChunkHandle, Growth


cdef class BFCAllocator(Allocator):
    cdef Growth growth
    cdef readonly bint allow_growth
    cdef readonly bint garbage_collection
    cdef readonly double fragmentation_fraction
    cdef ChunkHandle find(self, Request* request) noexcept nogil
    cdef uint64_t available(self) noexcept nogil
    cdef bint extend(self, Request* request) except -1
    cdef bint release_for(self, Request* request) except -1
