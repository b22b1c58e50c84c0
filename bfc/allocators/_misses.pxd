"""A request, from its size to its chunk, where a hit is not enough."""

from libc.stdint cimport uint64_t

from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request


cdef int allocate_placement(ChunkAllocator allocator, uint64_t size, uint64_t on, object stream, object freed_before,
                            int how, uint64_t alignment, Placement* placed) except -1
cdef int set_scopes_of(ChunkAllocator allocator, Request* request) except -1
cdef int attempt(ChunkAllocator allocator, Request* request, Placement* placed) except -1
cdef int try_harder(ChunkAllocator allocator, Request* request, object freed_before, uint64_t seen,
                    Placement* placed) except -1
cdef object refusal_of(ChunkAllocator allocator, Request* request)
cdef int leave_home(ChunkAllocator allocator, Placement* placed, uint64_t on, object stream) except -1
cdef int announce(ChunkAllocator allocator, Placement* placed, uint64_t changes_before) except -1
cdef int take_back(ChunkAllocator allocator, Placement* placed) except -1
