"""Plans in use, as requests and users meet them."""

from libcpp cimport bool as cbool

from bfc._core cimport ChunkHandle
from bfc.allocators._plans cimport Planned
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request


cdef Planned planned_part(ChunkAllocator allocator)
cdef int put_plan(ChunkAllocator allocator, object plan, object watch, object declined, bint strict,
                  bint resumed) except -1
cdef int stop_watch(ChunkAllocator allocator) except -1
cdef cbool asks_plan(ChunkAllocator allocator, Request* request) noexcept nogil
cdef ChunkHandle ask_plan(ChunkAllocator allocator, Request* request) noexcept nogil
cdef cbool asks_for_length(ChunkAllocator allocator) noexcept
cdef cbool ends_waiting(ChunkAllocator allocator) noexcept
cdef int keep_within_bounds(ChunkAllocator allocator, Request* request, Placement* placed) except -1
cdef int make_room_in_plan(ChunkAllocator allocator, Request* request, Placement* placed) except -1
