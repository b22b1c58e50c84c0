"""Changes of a pool that few requests need: frees that carry a count of the timing counter, allocations that grow in
place, and ranges, which are regions of reserved addresses that partly have no memory. All functions need the lock.

A range is one region of the pool. Its chunks tile it like those of any other. A chunk whose addresses have no memory is
UNMAPPED: it stands in no bin, and no free chunk merges with it, so allocations and frees need not know of it.

The source is called without the lock. Memory that is to be unmapped is LEAVING meanwhile: nobody takes it, but it still
counts. A chunk that memory is being mapped for is UNMAPPED still, and not joined with what is unmapped behind it. Only
the one thread that maps or unmaps touches chunks that are UNMAPPED or LEAVING.
"""

from cython.operator cimport dereference as deref, preincrement as incremented
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_reserve
from bfc._core cimport (
    DELETED, DIVIDED, ENDS, FREE, GAP, HISTORY_ALLOC, HISTORY_SEGMENT_MAP, HISTORY_SEGMENT_UNMAP, LEAVING,
    MAPPED_ELSEWHERE, NO_CHUNK, NO_HOST_MEMORY, STATE, UNMAPPED, WAITING, Bins, BinSet, Chunk, ChunkHandle, PlanServer,
    Pool, Region, carve, coalesce_at_ends, cut, forget_blocks, has_records, list_at_ends, return_to_gap, unlist_at_ends,
)
from bfc.allocators._places cimport plan_in

cdef extern from "bins.hpp":
    pass
cdef extern from "history.hpp":
    pass
cdef extern from "owners.hpp":
    pass
cdef extern from "page_bitmap.hpp":
    pass
cdef extern from "usage.hpp":
    pass
cdef extern from "pool_usage.hpp":
    pass
cdef extern from "plan_server.hpp":
    pass


cdef void merge_timestamped(Pool pool, uint64_t required, cbool* satisfied) noexcept nogil:
    """Coalesces what was freed before the safe frontier; with `required` > 0 also what was freed after it, until a
    chunk of that size exists (TensorFlow's behaviour, 2.9, which says which chunks stay queued)."""
    cdef vector[ChunkHandle] queued, to_merge
    cdef ChunkHandle handle
    cdef Chunk* chunk
    satisfied[0] = required == 0
    queued.swap(pool.times.timestamped)
    if not try_reserve(pool.times.timestamped, queued.size()) or not try_reserve(to_merge, queued.size()):
        queued.swap(pool.times.timestamped)
        return
    for handle in queued:
        chunk = &pool.chunks[handle]
        if chunk.state != FREE or (pool.features & ENDS and chunk.bin_set == GAP):
            continue
        if chunk.freed_at_count < pool.times.safe_frontier:
            chunk.freed_at_count = 0
        if chunk.freed_at_count == 0 or required > 0:
            to_merge.push_back(handle)
        else:
            pool.times.timestamped.push_back(handle)
    for handle in to_merge:
        if pool.chunks[handle].state != FREE:
            continue  # merged into another of the list
        if (satisfied[0] and required > 0) or not pool.bins_of(handle).reserve():
            pool.times.timestamped.push_back(handle)
        elif merge_one(pool, handle, required):
            satisfied[0] = True


cdef cbool merge_one(Pool pool, ChunkHandle handle, uint64_t required) noexcept nogil:
    cdef Bins* bins = pool.bins_of(handle)
    cdef ChunkHandle merged
    if pool.features & ENDS and pool.chunks[handle].bin_set <= GAP:
        unlist_at_ends(pool, handle)
        if pool.chunks[handle].freed_at_count == 0 or required > 0:
            return_to_gap(pool, handle)
        merged = coalesce_at_ends(pool, handle, required > 0)
        list_at_ends(pool, merged)
    else:
        pool.remove_free_chunk_from_bin(bins, handle, False)
        merged = pool.try_to_coalesce(bins, handle, required > 0, False)
        pool.insert_free_chunk_into_bin(bins, merged, False)
    if required > 0 and merged != handle and pool.chunks[merged].freed_at_count > 0:
        pool.times.timestamped.push_back(merged)
    return required > 0 and pool.chunks[merged].size >= required


cdef void forget_queued(Pool pool) noexcept nogil:
    """Takes the chunks of removed regions out of the queue of timestamped frees. Upstream leaves them there, and reads
    freed memory later. Call it after remove_region, before any record is used again."""
    cdef size_t kept = 0, i
    for i in range(pool.times.timestamped.size()):
        if pool.chunks[pool.times.timestamped[i]].state != DELETED:
            pool.times.timestamped[kept] = pool.times.timestamped[i]
            kept += 1
    pool.times.timestamped.resize(kept)


cdef uint64_t bytes_behind(Pool pool, ChunkHandle handle) noexcept nogil:
    """The free bytes right behind a chunk, unless a stream may still use them (TensorFlow's behaviour, 2.9)."""
    cdef ChunkHandle right = pool.chunks[handle].next
    if right == NO_CHUNK or pool.chunks[right].state != FREE or pool.features & ENDS:
        return 0            # what is free between two ends is for both
    if pool.times.counter != NULL and pool.chunks[right].freed_at_count > 0:
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
        pool.books.owned.grew(chunk, chunk.size - before)
        if pool.books.usage == NULL:
            pool.counters.bytes_in_use += chunk.size - before
            pool.counters.peak_bytes_in_use = max(pool.counters.peak_bytes_in_use, pool.counters.bytes_in_use)
        else:
            count_growth(pool, owner, chunk, before, merged, requested)
        pool.counters.largest_alloc_size = max(pool.counters.largest_alloc_size, chunk.size)
    elif pool.books.usage != NULL:
        count_growth(pool, owner, chunk, before, before, requested)
    if pool.books.history != NULL:
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
    pool.books.usage.came_back(owner.kind, before, chunk.requested_size, neighbours, merged, is_piece, False,
                               owner.counts_pieces)
    if is_piece and merged == chunk.size:
        pool.books.usage.piece_used_up(owner.kind)
    if before < owner.oversize <= chunk.size:
        pool.books.usage.oversize_allocations.raise_by(1)
    pool.books.usage.handed_out(owner.kind, chunk.size, requested, merged - chunk.size, is_piece, owner.counts_pieces)


cdef void split_off(Pool pool, BinSet* owner, ChunkHandle handle, uint64_t size) noexcept nogil:
    """Splits the tail off a chunk in use, and frees it."""
    if pool.chunks[handle].size == size:
        return
    pool.split_chunk(owner.bins, handle, size, 0, True)
    cdef ChunkHandle rest = pool.chunks[handle].next
    if owner.bitmap != NULL:
        owner.bitmap.add(pool.chunks[rest].ptr, pool.chunks[rest].size, rest)


cdef ChunkHandle add_range(Pool pool, uint64_t ptr, uint64_t size, uint32_t bin_set) noexcept nogil:
    """Takes reserved addresses in as one unmapped chunk. NO_HOST_MEMORY: nothing has changed."""
    if pool.books.usage != NULL and not pool.books.pool_usage.know(pool.bin_sets[bin_set].lane.pool):
        return NO_HOST_MEMORY
    if not has_records(pool, 1) or not pool.enter_region(Region(ptr, ptr + size, NO_CHUNK, 0)):
        return NO_HOST_MEMORY
    cdef ChunkHandle handle = pool.take_slot()
    pool.regions[ptr + size].first = handle
    pool.fill_in(handle, ptr, size, bin_set, UNMAPPED)
    pool.bin_sets[bin_set].regions += 1
    return handle


cdef void remove_range(Pool pool, uint64_t ptr, uint64_t size) noexcept nogil:
    """Forgets a range and whatever chunks it holds."""
    cdef ChunkHandle handle = pool.regions[ptr + size].first, following
    cdef BinSet* owner = &pool.bin_sets[pool.chunks[handle].bin_set]
    cdef Chunk* chunk
    owner.regions -= 1
    if owner.is_plan:
        forget_blocks(pool, &pool.regions[ptr + size])
    while handle != NO_CHUNK:
        chunk = &pool.chunks[handle]
        following = chunk.next
        if chunk.state not in (UNMAPPED, MAPPED_ELSEWHERE):
            if chunk.state == FREE:
                pool.unlist_free_chunk(owner, handle)
            elif chunk.state not in (LEAVING, DIVIDED):
                pool.books.owned.take_back(chunk)
                pool.unindex_chunk(handle)
                if pool.books.usage != NULL:
                    pool.count_removed(owner, chunk, False)
                else:
                    pool.counters.bytes_in_use -= chunk.size
                if chunk.state & STATE == WAITING:
                    pool.counters.bytes_waiting -= chunk.size
            count_out(pool, owner, chunk)
        pool.delete_chunk(handle)
        handle = following
    pool.regions.erase(ptr + size)


cdef uint64_t count_asleep(Pool pool, uint32_t bin_set, cbool asleep) noexcept nogil:
    """Counts what the ranges of a set hold as without memory from now on (`asleep`), or as having it again. Returns the
    bytes."""
    cdef BinSet* owner = &pool.bin_sets[bin_set]
    if asleep == (owner.asleep != 0):
        return 0
    owner.asleep = asleep
    if not owner.is_range and asleep:
        owner.mapped_bytes = bytes_of_regions(pool, bin_set)    # none comes or goes until it wakes
    if owner.mapped_bytes == 0:
        return 0    # perhaps it never had memory: then the usage of pools does not know its pool
    if asleep:
        pool.counters.pool_bytes -= owner.mapped_bytes
        if pool.books.usage != NULL:
            pool.books.usage.memory_went(owner.kind, owner.mapped_bytes)
            pool.books.pool_usage.went(owner.lane.pool, owner.kind, owner.mapped_bytes)
    else:
        pool.counters.pool_bytes += owner.mapped_bytes
        if pool.books.usage != NULL:
            pool.books.usage.memory_came(owner.kind, owner.mapped_bytes)
            pool.books.pool_usage.came(owner.lane.pool, owner.kind, owner.mapped_bytes)
    cdef uint64_t nbytes = owner.mapped_bytes
    if not owner.is_range and not asleep:
        owner.mapped_bytes = 0
    return nbytes


cdef uint64_t bytes_of_regions(Pool pool, uint32_t bin_set) noexcept nogil:
    cdef cmap[uint64_t, Region].iterator at = pool.regions.begin()
    cdef uint64_t nbytes = 0
    while at != pool.regions.end():
        if pool.chunks[deref(at).second.first].bin_set == bin_set:
            nbytes += deref(at).second.end - deref(at).second.ptr
        incremented(at)
    return nbytes


cdef void count_in(Pool pool, BinSet* owner, Chunk* chunk) noexcept nogil:
    owner.mapped_bytes += chunk.size
    if owner.asleep:
        return
    pool.counters.pool_bytes += chunk.size
    pool.counters.peak_pool_bytes = max(pool.counters.peak_pool_bytes, pool.counters.pool_bytes)
    if pool.books.usage != NULL:
        pool.books.usage.memory_came(owner.kind, chunk.size)
        pool.books.pool_usage.came(owner.lane.pool, owner.kind, chunk.size)
    if pool.books.history != NULL:
        pool.note(HISTORY_SEGMENT_MAP, chunk, chunk.size)


cdef void count_out(Pool pool, BinSet* owner, Chunk* chunk) noexcept nogil:
    owner.mapped_bytes -= chunk.size
    if owner.asleep:
        return
    pool.counters.pool_bytes -= chunk.size
    if pool.books.usage != NULL:
        pool.books.usage.memory_went(owner.kind, chunk.size)
        pool.books.pool_usage.went(owner.lane.pool, owner.kind, chunk.size)
    if pool.books.history != NULL:
        pool.note(HISTORY_SEGMENT_UNMAP, chunk, chunk.size)


cdef cbool begin_mapping(Pool pool, ChunkHandle handle, uint64_t size) noexcept nogil:
    """Makes the first `size` bytes of an unmapped chunk a chunk of their own. False: the host is out of memory, and
    nothing has changed."""
    if size < pool.chunks[handle].size:
        if not has_records(pool, 1):
            return False
        cut(pool, handle, size)
    pool.chunks[handle].freed_at_count = IS_GROWING
    return True


cdef cbool end_mapping(Pool pool, ChunkHandle handle) noexcept nogil:
    """Makes an unmapped chunk that has memory now free. False: the host is out of memory, and nothing has changed."""
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef BinSet* owner = &pool.bin_sets[chunk.bin_set]
    if not owner.bins.reserve():
        return False
    count_in(pool, owner, chunk)
    make_free(pool, owner, handle)
    return True


cdef void make_free(Pool pool, BinSet* owner, ChunkHandle handle) noexcept nogil:
    """Makes a chunk free. The bins' reserve() must have been called before."""
    if owner.is_plan:
        come_back(pool, owner, handle)
        return
    pool.chunks[handle].state = FREE
    pool.chunks[handle].freed_at_count = pool.times.clock
    pool.list_free_chunk(owner, pool.try_to_coalesce(owner.bins, handle, True, True))


cdef void come_back(Pool pool, BinSet* owner, ChunkHandle handle) noexcept nogil:
    """Lets a plan use pages of its region again."""
    cdef int region = 0
    cdef PlanServer* plan = plan_in(pool, pool.chunks[handle].bin_set, &region)
    cdef ChunkHandle right = pool.chunks[handle].next, left = pool.chunks[handle].prev
    plan.bring_back(region, <uint32_t>owner.bitmap.slot_at(pool.chunks[handle].ptr),
                    <uint32_t>(pool.chunks[handle].size // owner.bitmap.page_size()))
    pool.chunks[handle].state = DIVIDED
    pool.chunks[handle].freed_at_count = 0
    if right != NO_CHUNK and pool.chunks[right].state == DIVIDED:
        pool.join(handle, right)
    if left != NO_CHUNK and pool.chunks[left].state == DIVIDED:
        pool.join(left, handle)
        handle = left
    owner.bitmap.note_chunk(owner.bitmap.slot_at(pool.chunks[handle].ptr), handle)


cdef void cancel_mapping(Pool pool, ChunkHandle handle, cbool is_mapped) noexcept nogil:
    """Undoes begin_mapping. `is_mapped`: some of the chunk has memory all the same; then it is LEAVING, and counts as
    reserved."""
    cdef Chunk* chunk = &pool.chunks[handle]
    if is_mapped:
        chunk.state = LEAVING
        count_in(pool, &pool.bin_sets[chunk.bin_set], chunk)
    else:
        chunk.freed_at_count = 0
        merge_unmapped(pool, handle)


cdef ChunkHandle begin_unmapping(Pool pool, ChunkHandle handle, uint64_t start, uint64_t end) noexcept nogil:
    """Lets a part of a free chunk leave; what lies before and behind it stays free. The part's handle, or
    NO_HOST_MEMORY, and then nothing has changed."""
    return carve(pool, handle, start, end, LEAVING)


cdef cbool cancel_unmapping(Pool pool, ChunkHandle handle) noexcept nogil:
    """Makes a chunk that was to leave free again. False: the host is out of memory, and it stays LEAVING."""
    cdef BinSet* owner = &pool.bin_sets[pool.chunks[handle].bin_set]
    if not owner.bins.reserve():
        return False
    make_free(pool, owner, handle)
    return True


cdef ChunkHandle end_unmapping(Pool pool, ChunkHandle handle, uint64_t size, cbool has_gone) noexcept nogil:
    """Settles the first `size` bytes of a LEAVING chunk: they were unmapped (`has_gone`), or could not be and stay
    LEAVING. Returns the handle of the rest of the chunk, or NO_CHUNK if there is no rest. NO_HOST_MEMORY: the host has
    no memory for the record of the rest, and all of the chunk stays LEAVING."""
    cdef Chunk* chunk = &pool.chunks[handle]
    cdef ChunkHandle rest = NO_CHUNK
    if size < chunk.size:
        if not has_records(pool, 1):
            return NO_HOST_MEMORY
        rest = cut(pool, handle, size)
        chunk = &pool.chunks[handle]
    if has_gone:
        count_out(pool, &pool.bin_sets[chunk.bin_set], chunk)
        chunk.state = UNMAPPED
        chunk.freed_at_count = 0
        merge_unmapped(pool, handle)
    return rest


cdef void merge_unmapped(Pool pool, ChunkHandle handle) noexcept nogil:
    cdef ChunkHandle right = pool.chunks[handle].next, left = pool.chunks[handle].prev
    if right != NO_CHUNK and pool.chunks[right].state == UNMAPPED:
        pool.join(handle, right)
    if left != NO_CHUNK and pool.chunks[left].state == UNMAPPED:
        pool.chunks[left].requested_size = pool.chunks[handle].requested_size
        pool.join(left, handle)


cdef void forget_absent(Pool pool, ChunkHandle handle) noexcept nogil:
    """Makes an absent chunk unmapped: its addresses have no pages any more."""
    pool.chunks[handle].state = UNMAPPED
    pool.chunks[handle].freed_at_count = 0
    merge_unmapped(pool, handle)


cdef cbool cut_absent(Pool pool, ChunkHandle handle, uint64_t step) noexcept nogil:
    """Makes a chunk that memory was mapped for absent, cut in pieces of `step` bytes. False: the host is out of memory,
    and nothing has changed."""
    cdef uint64_t pieces = pool.chunks[handle].size // step
    if not has_records(pool, <int>(pieces - 1)):
        return False
    while pieces > 1:
        pool.chunks[handle].state = MAPPED_ELSEWHERE
        pool.chunks[handle].freed_at_count = 0
        handle = cut(pool, handle, step)
        pieces -= 1
    pool.chunks[handle].state = MAPPED_ELSEWHERE
    pool.chunks[handle].freed_at_count = 0
    return True


cdef void join_absent(Pool pool, ChunkHandle handle, uint64_t size) noexcept nogil:
    """Undoes cut_absent."""
    while pool.chunks[handle].size < size:
        pool.join(handle, pool.chunks[handle].next)
    pool.chunks[handle].state = UNMAPPED
    pool.chunks[handle].freed_at_count = IS_GROWING
