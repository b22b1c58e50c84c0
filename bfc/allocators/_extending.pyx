"""Allocations that grow in place. All functions need the lock."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport FREE, NO_CHUNK, BinSet, Chunk, ChunkHandle, Pool


cdef uint64_t bytes_behind(Pool pool, ChunkHandle handle) noexcept nogil:
    """The free bytes right behind a chunk, unless a stream may still use them (TensorFlow's behaviour, 2.9)."""
    cdef ChunkHandle right = pool.chunks[handle].next
    if right == NO_CHUNK or pool.chunks[right].state != FREE or pool.chunks[right].freed_at_count > 0:
        return 0
    return pool.chunks[right].size


cdef cbool extend_chunk(Pool pool, ChunkHandle handle, uint64_t rounded, uint64_t requested) noexcept nogil:
    """Makes a chunk in use as large as `rounded`, with what is free behind it. False: that is too little, or the host
    is out of memory, and nothing has changed. Not for a pool with PyTorch's counts."""
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef BinSet* owner = &pool.bin_sets[chunk.bin_set]
    cdef uint64_t before = chunk.size
    cdef ChunkHandle right = chunk.next
    if rounded > chunk.size:
        if rounded - chunk.size > bytes_behind(pool, handle) or not pool.reserve(owner.bins):
            return False
        chunk = &pool.chunks[handle]    # the records may have moved
        pool.unlist_free_chunk(owner, right)
        pool.join(handle, right)
        split_off(pool, owner, handle, rounded)
        pool.counters.bytes_in_use += chunk.size - before
        pool.owned.grew(chunk, chunk.size - before)
        pool.counters.peak_bytes_in_use = max(pool.counters.peak_bytes_in_use, pool.counters.bytes_in_use)
        pool.counters.largest_alloc_size = max(pool.counters.largest_alloc_size, chunk.size)
    chunk.requested_size = requested
    return True


cdef void split_off(Pool pool, BinSet* owner, ChunkHandle handle, uint64_t size) noexcept nogil:
    """Frees the tail of a chunk in use, which is a chunk of its own then."""
    if pool.chunks[handle].size == size:
        return
    pool.split_chunk(owner.bins, handle, size, 0)
    cdef ChunkHandle rest = pool.chunks[handle].next
    if owner.window != NULL:
        owner.window.add(pool.chunks[rest].ptr, pool.chunks[rest].size, rest, False)
