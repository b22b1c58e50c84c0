"""What a user sees of an allocator: figures and snapshots, each of one moment."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp.vector cimport vector

from bfc.native.turns cimport TurnAt
from bfc._core cimport HISTORY_SNAPSHOT, Counters, HistoryRecord
from bfc.buffers._scopes cimport owner_names
from bfc.allocators._reading cimport (
    ChunkRow, RegionRow, bytes_by_name, bytes_of_chunks, bytes_of_pages, bytes_of_regions, copy_columns,
)
from bfc.allocators.mapping._sleep cimport bytes_asleep
from bfc.allocators._chunk_allocator cimport ChunkAllocator
from bfc.allocators._tagged cimport stats_of_tags

from bfc.errors import out_of_host_memory
from bfc.snapshots import columns as _columns, snapshot as _snapshot

cdef extern from "history.hpp":
    pass
cdef extern from "owners.hpp":
    pass


cdef object stats_of(ChunkAllocator allocator, Counters counters, uint64_t largest_free, vector[uint64_t]& owned):
    return _snapshot.Stats(
        num_allocs=counters.num_allocs,
        bytes_in_use=counters.bytes_in_use,
        peak_bytes_in_use=counters.peak_bytes_in_use,
        largest_alloc_size=counters.largest_alloc_size,
        bytes_limit=allocator.limit,
        # Always 0 in TensorFlow. Pages that could not be released lie in no region, and the device still has them.
        bytes_reserved=counters.pool_bytes + allocator.mapped.bytes_beside_regions(),
        peak_bytes_reserved=counters.peak_pool_bytes,
        pool_bytes=counters.pool_bytes,
        peak_pool_bytes=counters.peak_pool_bytes,
        largest_free_block_bytes=largest_free,
        bytes_waiting_for_streams=counters.bytes_waiting,
        bytes_asleep=bytes_asleep(allocator.mapped) if allocator.tags.asleep.size() else 0,
        by_owner=bytes_by_name(counters.bytes_in_use, owned),
    )


cdef object stats_now(ChunkAllocator allocator):
    """`Allocator.stats`."""
    # What finalisers have left is not in use any more, and must not be shown so.
    allocator.frees.drain(0)
    # All figures are of one moment.
    allocator.acquire()
    cdef Counters counters = allocator.pool.totals()
    cdef uint64_t largest_free = allocator.pool.largest_free()
    cdef vector[uint64_t] owned
    cdef bint copied = allocator.pool.books.owned.copy(owned)
    allocator.lock.release()
    if not copied:
        raise out_of_host_memory()
    return stats_of(allocator, counters, largest_free, owned)


cdef object look(ChunkAllocator allocator, bint with_history, bint noted):
    """A snapshot. `noted`: whether the history says that one was taken."""
    cdef vector[RegionRow] regions
    cdef vector[ChunkRow] chunks
    cdef vector[uint32_t] pages
    cdef vector[HistoryRecord] records
    cdef vector[uint64_t] owned
    allocator.frees.drain(0)
    # All is copied at one moment, and made into objects without the lock.
    allocator.acquire()
    cdef bint copied = copy_columns(allocator.pool, regions, chunks, pages)
    copied = copied and allocator.pool.books.owned.copy(owned)
    if allocator.pool.books.history != NULL:
        copied = copied and (not with_history or allocator.pool.books.history.copy(records))
        # After the copy: PyTorch's snapshot shows itself only in the next one (case 82).
        if noted:
            allocator.pool.books.history.add(HistoryRecord(0, allocator.pool.totals().bytes_in_use, 0, [0, 0], 0, 0,
                                                           HISTORY_SNAPSHOT, 0))
    cdef Counters counters = allocator.pool.totals()
    cdef uint64_t largest_free = allocator.pool.largest_free()
    allocator.lock.release()
    if not copied:
        raise out_of_host_memory()
    kept = allocator.recorder
    packed = _columns.RegionColumns(bytes_of_regions(regions), bytes_of_chunks(chunks), bytes_of_pages(pages),
                                    kept.frames_of_regions(regions), kept.frames_of_chunks(chunks),
                                    owners=owner_names, chunk_steps=kept.steps_of_chunks(chunks))
    return _snapshot.Snapshot._of_columns(str(allocator.device), stats_of(allocator, counters, largest_free, owned),
                                          packed, kept.columns_of(records), allocator.settings_now(),
                                          allocator.torch_now(), stats_of_tags(allocator))


def snapshot_alone(ChunkAllocator allocator not None):
    """A snapshot without the history, which leaves no entry in it."""
    cdef TurnAt turn
    turn.take(allocator)
    return look(allocator, False, False)
