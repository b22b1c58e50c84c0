"""What a user sees of an allocator."""

from bfc.allocators._chunk_allocator cimport ChunkAllocator


cdef object stats_now(ChunkAllocator allocator)
cdef object look(ChunkAllocator allocator, bint with_history, bint noted)
