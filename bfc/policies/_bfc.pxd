"""TensorFlow's policy over the common allocator."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport ChunkHandle, Lane, Region
from bfc.allocators._chunk_allocator cimport Placement, Request
from bfc.allocators._allocator cimport Allocator


cdef class BFCAllocator(Allocator):
    cdef uint64_t first_region          # bytes
    cdef uint64_t next_size             # of the next region
    cdef uint64_t slack_cap             # a chunk with as much left over is always split
    cdef readonly bint allow_growth
    cdef readonly bint garbage_collection
    cdef readonly double fragmentation_fraction
    cdef readonly str tensorflow        # the version whose rules it follows
    cdef bint honours_alignment
    cdef bint rounds_down
    cdef readonly bint enable_spatial_partitioning
    cdef readonly uint64_t initial_region_bytes     # 0: the limit
    cdef readonly object lower_end_policy
    cdef readonly object upper_end_policy
    cdef int set_up_ends(self, object initial_region_bytes) except -1
    cdef int extend_by(self, Request* request, Placement* placed, uint64_t least, uint64_t wanted) except -1 nogil
    cdef int extend_at_ends(self, Request* request, Placement* placed) except -1 nogil
    cdef uint64_t lacking_anywhere(self, Request* request) noexcept nogil
    cdef uint64_t lacking_behind(self, Request* request, Region* region) noexcept nogil
    cdef cbool lies_well(self, Request* request, Region* block) noexcept nogil
    cdef int give_back_block(self, Request* request, Region* block) except -1 nogil
    cdef cbool has_lost(self, Request* request) noexcept nogil
    cdef uint64_t available(self) noexcept nogil
    cdef void merge_and_find(self, Request* request, Placement* placed) noexcept nogil
    cdef int extend(self, Request* request, Placement* placed) except -1 nogil
    cdef int release_for(self, Request* request) except -1 nogil
    cdef uint64_t* next_size_of(self, Request* request) noexcept nogil
    cdef cbool hit_in_lane(self, uint64_t nbytes, uint64_t stream, Placement* placed) noexcept nogil
    cdef void tell_apart(self, Lane* lane, uint64_t stream) noexcept nogil
    cdef int add_like_pages(self, Request* request, Placement* placed) except -1 nogil
    cdef cbool takes_pages(self, Request* request) noexcept nogil
