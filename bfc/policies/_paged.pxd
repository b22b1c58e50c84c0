"""What both policies do where memory is mapped page by page."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport ChunkHandle, Lane
from bfc.allocators._tags cimport TAG_POOLS
from bfc.allocators._allocator cimport Allocator, Placement, Request


cdef enum:
    SMALLEST_PAGE = 2 << 20


cdef inline cbool may_be_mapped(const Lane* lane) noexcept nogil:
    """Whether the pool of a lane is the default one or a tag's: private pools have regions, since what was captured in
    a graph needs its addresses."""
    return lane.pool[0] == TAG_POOLS or (lane.pool[0] == 0 and lane.pool[1] == 0)


cdef inline cbool may_be_planned(Request* request) noexcept nogil:
    """Whether a request may lie in a plan's pages."""
    return not (request.tag or request.contiguous or request.lane.thread)


cdef int check_mapping_wanted(sub_allocator, str option, wanted, strict, str upstream) except -1
cdef uint64_t page_size_for(uint64_t limit, sub_allocator) except 0

cdef int set_up_pages(Allocator allocator, page_size, headroom) except -1
cdef ChunkHandle place_in_pages(Allocator allocator, Request* request) noexcept nogil
cdef int map_for(Allocator allocator, Request* request, Placement* placed) except -1 with gil
cdef int add_region_for(Allocator allocator, Request* request, Placement* placed, uint64_t nbytes) except -1 nogil
cdef int trim_for(Allocator allocator, uint64_t nbytes) except -1 with gil
