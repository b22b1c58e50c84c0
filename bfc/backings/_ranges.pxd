"""PyTorch's expandable segments, as an allocator has them."""

from bfc.allocators.mapping._expandable cimport ExpandableSegments, Growing
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request
from bfc.backings._backing cimport Backing


cdef class Ranges(Backing):
    cdef ExpandableSegments segments

    cdef int open_ranges(self, ChunkAllocator allocator, Request* request, Growing* growing) noexcept nogil
    cdef int place(self, ChunkAllocator allocator, Request* request, Placement* placed,
                   Growing* growing) noexcept nogil


cdef Ranges ranges_of(ExpandableSegments segments)
