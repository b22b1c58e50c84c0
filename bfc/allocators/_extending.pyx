"""Allocations that grow in place. All functions need the lock."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport FREE, HISTORY_ALLOC, NO_CHUNK, BinSet, Chunk, ChunkHandle, Pool

cdef extern from "history.hpp":
    pass
cdef extern from "usage.hpp":
    pass
cdef extern from "page_bitmap.hpp":
    pass


cdef uint64_t bytes_behind(Pool pool, ChunkHandle handle) noexcept nogil:
    """The free bytes right behind a chunk, unless a stream may still use them (TensorFlow's behaviour, 2.9)."""
    cdef ChunkHandle right = pool.chunks[handle].next
    if right == NO_CHUNK or pool.chunks[right].state != FREE:
        return 0
    if pool.timing != NULL and pool.chunks[right].freed_at_count > 0:
        return 0
    return pool.chunks[right].size


cdef cbool extend_chunk(Pool pool, ChunkHandle handle, uint64_t rounded, uint64_t requested) noexcept nogil:
    """Makes a chunk in use as large as `rounded`, with what is free behind it. False: that is too little, or the host
    is out of memory, and nothing has changed."""
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef BinSet* owner = &pool.bin_sets[chunk.bin_set]
    cdef uint64_t before = chunk.size, merged
    cdef ChunkHandle right = chunk.next
    if rounded > chunk.size:
        if rounded - chunk.size > bytes_behind(pool, handle) or not pool.reserve(owner.bins):
            return False
        chunk = &pool.chunks[handle]    # the records may have moved
        pool.unlist_free_chunk(owner, right)
        pool.join(handle, right)
        merged = chunk.size
        split_off(pool, owner, handle, rounded)
        pool.owned.grew(chunk, chunk.size - before)
        if pool.usage == NULL:
            pool.counters.bytes_in_use += chunk.size - before
            pool.counters.peak_bytes_in_use = max(pool.counters.peak_bytes_in_use, pool.counters.bytes_in_use)
        else:
            count_growth(pool, owner, chunk, before, merged, requested)
        pool.counters.largest_alloc_size = max(pool.counters.largest_alloc_size, chunk.size)
    elif pool.usage != NULL:
        count_growth(pool, owner, chunk, before, before, requested)
    if pool.history != NULL:
        pool.note_free(chunk)
        pool.note(HISTORY_ALLOC, chunk, requested)
    chunk.requested_size = requested
    return True


cdef void count_growth(Pool pool, BinSet* owner, Chunk* chunk, uint64_t before, uint64_t merged,
                       uint64_t requested) noexcept nogil:
    """Counts the growth as PyTorch would see it: the chunk was freed, merged with what was free behind it,
    and handed out again."""
    cdef ChunkHandle behind = chunk.next if merged == chunk.size else pool.chunks[chunk.next].next
    cdef cbool is_piece = owner.counts_pieces and (chunk.prev != NO_CHUNK or behind != NO_CHUNK)
    cdef int neighbours = merged > before
    pool.usage.came_back(owner.kind, before, chunk.requested_size, neighbours, merged, is_piece, False,
                         owner.counts_pieces)
    if is_piece and merged == chunk.size:
        pool.usage.piece_used_up(owner.kind)
    if before < owner.oversize <= chunk.size:
        pool.usage.oversize_allocations.raise_by(1)
    pool.usage.handed_out(owner.kind, chunk.size, requested, merged - chunk.size, is_piece, owner.counts_pieces)


cdef void split_off(Pool pool, BinSet* owner, ChunkHandle handle, uint64_t size) noexcept nogil:
    """Splits the tail off a chunk in use, and frees it."""
    if pool.chunks[handle].size == size:
        return
    pool.split_chunk(owner.bins, handle, size, 0)
    cdef ChunkHandle rest = pool.chunks[handle].next
    if owner.bitmap != NULL:
        owner.bitmap.add(pool.chunks[rest].ptr, pool.chunks[rest].size, rest, False)
