"""TensorFlow's policy over the common allocator."""

from libc.stdint cimport uint32_t, uint64_t

from bfc._core cimport ChunkHandle
from bfc.allocators._allocator cimport Allocator, Placement, Request
from bfc.policies._growth cimport Growth
from bfc.policies._stitching cimport Stitching


cdef class BFCAllocator(Allocator):
    cdef Growth growth
    cdef Stitching stitching            # None: memory is not mapped
    cdef bint stitches
    cdef readonly bint allow_growth
    cdef readonly bint garbage_collection
    cdef readonly double fragmentation_fraction
    cdef uint64_t available(self) noexcept nogil
    cdef void merge_and_find(self, Request* request, Placement* placed) noexcept nogil
    cdef int extend(self, Request* request, Placement* placed) except -1 nogil
    cdef int release_for(self, Request* request) except -1 nogil
    cdef int set_up_stitching(self, page_size, headroom) except -1
    cdef ChunkHandle find_mapped(self, uint32_t bin_set, Request* request) noexcept nogil
    cdef int map_for(self, Request* request, Placement* placed) except -1 with gil
    cdef bint place_mapped(self, Request* request, Placement* placed, ChunkHandle served) except -1
    cdef uint32_t bin_set_now(self, Request* request) except? 0xFFFFFFFF
    cdef int require_mapping(self, str method) except -1
    cdef bint extend_now(self, uint64_t address, uint64_t rounded, uint64_t nbytes) except -1
    cdef bint map_behind(self, uint64_t address, uint64_t rounded) except -1
