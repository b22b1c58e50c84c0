"""TensorFlow's policy over the common allocator."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport ChunkHandle
from bfc.allocators._allocator cimport Allocator, Placement, Request

cdef uint64_t backpedal(uint64_t size) noexcept nogil


cdef class Growth:
    cdef readonly uint64_t next_region_size
    cdef uint64_t grow_to(self, uint64_t rounded, uint64_t available, cbool* grew) noexcept nogil
    cdef void succeeded(self, cbool grew) noexcept nogil
    cdef void reset(self) noexcept nogil
    cdef void double(self) noexcept nogil
    cdef uint64_t first_size


cdef class BFCAllocator(Allocator):
    cdef Growth growth
    cdef readonly bint allow_growth
    cdef readonly bint garbage_collection
    cdef readonly double fragmentation_fraction
    cdef uint64_t available(self) noexcept nogil
    cdef void merge_and_find(self, Request* request, Placement* placed) noexcept nogil
    cdef int extend(self, Request* request, Placement* placed) except -1 nogil
    cdef int release_for(self, Request* request) except -1 nogil
    cdef int place_in_pages_after_miss(self, Request* request, Placement* placed) except -1 nogil
