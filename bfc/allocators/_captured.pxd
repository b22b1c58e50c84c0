"""Captures of graphs, and scopes of private pools."""

from bfc.allocators._chunk_allocator cimport ChunkAllocator, Request


cdef int look_at_captures(ChunkAllocator allocator, Request* request) except -1
cdef int note_captured_streams(ChunkAllocator allocator) except -1
cdef int end_scope(ChunkAllocator allocator, pool, str said) except -1
