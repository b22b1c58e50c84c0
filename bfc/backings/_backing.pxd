"""What each kind of memory behind chunks does."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport ChunkHandle
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request


cdef class Backing:
    cdef cbool serves(self, ChunkAllocator allocator, Request* request) noexcept nogil
    cdef ChunkHandle find(self, ChunkAllocator allocator, Request* request) noexcept nogil
    cdef int grow(self, ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil
    cdef int make_room(self, ChunkAllocator allocator, Request* request, uint64_t nbytes) except -1 nogil
    cdef uint64_t release(self, ChunkAllocator allocator) except? 0xFFFFFFFFFFFFFFFF


cdef ChunkHandle find_in_backings(ChunkAllocator allocator, Request* request) noexcept nogil
cdef int grow_backing(ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil
cdef uint64_t release_from_backings(ChunkAllocator allocator) except? 0xFFFFFFFFFFFFFFFF
cdef int make_room(ChunkAllocator allocator, Request* request, uint64_t nbytes) except -1 nogil
