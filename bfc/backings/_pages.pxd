"""Memory that is mapped page by page, as both policies have it."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport ChunkHandle, Lane
from bfc.allocators._tags cimport TAG_POOLS
from bfc.allocators.mapping._stitching cimport Stitching
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request
from bfc.backings._backing cimport Backing


cdef enum:
    SMALLEST_PAGE = 2 << 20


cdef inline cbool may_be_mapped(const Lane* lane) noexcept nogil:
    """Whether the pool of a lane is the default one or a tag's: private pools have regions, since what was captured in
    a graph needs its addresses."""
    return lane.pool[0] == TAG_POOLS or (lane.pool[0] == 0 and lane.pool[1] == 0)


cdef class StitchedPages(Backing):
    cdef Stitching stitching

    cdef uint32_t bin_set_now(self, ChunkAllocator allocator, Request* request) noexcept nogil
    cdef int place(self, ChunkAllocator allocator, Request* request, Placement* placed,
                   ChunkHandle served) noexcept nogil
    cdef int trim_for(self, ChunkAllocator allocator, uint64_t nbytes) except -1 with gil


cdef int check_mapping_wanted(sub_allocator, str option, wanted, strict, str upstream) except -1
cdef uint64_t page_size_for(uint64_t limit, sub_allocator) except 0
cdef StitchedPages stitched_pages(ChunkAllocator allocator, page_size, headroom)
