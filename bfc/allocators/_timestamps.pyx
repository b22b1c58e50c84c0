"""Frees that carry a count of the timing counter, and are merged once the safe frontier has passed it (TensorFlow's
behaviour, 2.9). All functions need the lock."""

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_reserve
from bfc._core cimport DELETED, FREE, Bins, Chunk, ChunkHandle, Pool

cdef extern from "bins.hpp":
    pass


cdef void merge_timestamped(Pool pool, uint64_t required, cbool* satisfied) noexcept nogil:
    """Coalesces what was freed before the safe frontier; with `required` > 0 also what was freed after it, until a
    chunk of that size exists (TensorFlow's behaviour, 2.9, which says which chunks stay queued)."""
    cdef vector[ChunkHandle] queued, to_merge
    cdef ChunkHandle handle
    cdef Chunk* chunk
    satisfied[0] = required == 0
    queued.swap(pool.timestamped)
    if not try_reserve(pool.timestamped, queued.size()) or not try_reserve(to_merge, queued.size()):
        queued.swap(pool.timestamped)
        return
    for handle in queued:
        chunk = &pool.chunks[handle]
        if chunk.state != FREE:
            continue
        if chunk.freed_at_count < pool.safe_frontier:
            chunk.freed_at_count = 0
        if chunk.freed_at_count == 0 or required > 0:
            to_merge.push_back(handle)
        else:
            pool.timestamped.push_back(handle)
    for handle in to_merge:
        if pool.chunks[handle].state != FREE:
            continue  # merged into another of the list
        if (satisfied[0] and required > 0) or not pool.bins_of(handle).reserve():
            pool.timestamped.push_back(handle)
        elif merge_one(pool, handle, required):
            satisfied[0] = True


cdef cbool merge_one(Pool pool, ChunkHandle handle, uint64_t required) noexcept nogil:
    cdef Bins* bins = pool.bins_of(handle)
    pool.remove_free_chunk_from_bin(bins, handle)
    cdef ChunkHandle merged = pool.try_to_coalesce(bins, handle, required > 0)
    pool.insert_free_chunk_into_bin(bins, merged)
    if required > 0 and merged != handle and pool.chunks[merged].freed_at_count > 0:
        pool.timestamped.push_back(merged)
    return required > 0 and pool.chunks[merged].size >= required


cdef void forget_queued(Pool pool) noexcept nogil:
    """Takes the chunks of removed regions out of the queue of timestamped frees. Upstream leaves them there, and reads
    freed memory later. Call it after remove_region, before any record is used again."""
    cdef size_t kept = 0, i
    for i in range(pool.timestamped.size()):
        if pool.chunks[pool.timestamped[i]].state != DELETED:
            pool.timestamped[kept] = pool.timestamped[i]
            kept += 1
    pool.timestamped.resize(kept)
