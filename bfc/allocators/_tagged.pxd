"""Tags of an allocator, as a user puts them to sleep."""

from bfc.allocators._chunk_allocator cimport ChunkAllocator


cdef object put_tags_to_sleep(ChunkAllocator allocator, keep, drop, keep_limit)
cdef dict stats_of_tags(ChunkAllocator allocator)
cdef object tags_asleep(ChunkAllocator allocator)
