"""PyTorch's expandable segments, as an allocator has them."""

from libc.stdint cimport uint64_t

from bfc.allocators.mapping._expandable cimport ExpandableSegments, Growing
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request
from bfc.backings._backing cimport Backing


cdef class Ranges(Backing):
    cdef ExpandableSegments segments

    cdef int map_for(self, ChunkAllocator allocator, Request* request, Placement* placed,
                     uint64_t set_aside) except -1 with gil
    cdef int open_ranges(self, ChunkAllocator allocator, Request* request, Growing* growing) except -1
    cdef bint place(self, ChunkAllocator allocator, Request* request, Placement* placed, Growing* growing) except -1


cdef Ranges ranges_of(ExpandableSegments segments)
