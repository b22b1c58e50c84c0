"""What each kind of memory behind chunks does."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport ChunkHandle
from bfc.allocators._allocator cimport Allocator, Placement, Request


cdef class Backing:
    cdef cbool serves(self, Allocator allocator, Request* request) noexcept nogil
    cdef ChunkHandle find(self, Allocator allocator, Request* request) noexcept nogil
    cdef int grow(self, Allocator allocator, Request* request, Placement* placed) except -1 nogil
    cdef int make_room(self, Allocator allocator, Request* request, uint64_t nbytes) except -1 nogil
    cdef uint64_t release(self, Allocator allocator) except? 0xFFFFFFFFFFFFFFFF


cdef ChunkHandle find_in_backings(Allocator allocator, Request* request) noexcept nogil
cdef int grow_backing(Allocator allocator, Request* request, Placement* placed) except -1 nogil
cdef uint64_t release_from_backings(Allocator allocator) except? 0xFFFFFFFFFFFFFFFF
cdef int make_room(Allocator allocator, Request* request, uint64_t nbytes) except -1 nogil
