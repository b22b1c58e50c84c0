"""Which regions PyTorch's policy gives back: all that are free, the oldest, those that make room. The functions need
the lock.

`Emptying` gives back what is cached where there are expandable segments: pool by pool, first the regions of each and
then what lies in ranges, as PyTorch does (PyTorch's behaviour, 2.13).
"""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back
from bfc._core cimport LARGE, NO_CHUNK, NO_LANE, NO_PAIR, SMALL, BinSet, Chunk, ChunkHandle, Pool, Region
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._private_pools cimport PoolId, PrivatePool, PrivatePools, default_pool, is_same_pool, pool_of
from bfc.allocators._source cimport Source, total_size
from bfc.allocators.mapping._address_ranges cimport Faults, FreePart, raise_faults
from bfc.allocators.mapping._expandable cimport ExpandableSegments

cdef extern from "sort.hpp" namespace "bfc" nogil:
    void sort_by_stream(vector[BinSet]& sets, vector[uint32_t]& numbers) noexcept
    void sort_by_falling_size(const Chunk* chunks, vector[ChunkHandle]& handles) noexcept


cdef cbool is_whole(Pool pool, ChunkHandle handle) noexcept nogil:
    """Whether a chunk is all of its region."""
    return pool.chunks[handle].prev == NO_CHUNK and pool.chunks[handle].next == NO_CHUNK


cdef Region region_of(Pool pool, ChunkHandle handle) noexcept nogil:
    """The region of a chunk that is all of it."""
    return pool.regions[pool.chunks[handle].ptr + pool.chunks[handle].size]


cdef cbool list_sets(Pool pool, PoolId id, uint32_t kind, cbool in_ranges, vector[uint32_t]& out) noexcept nogil:
    """A pool's sets of bins of one kind, by stream; those of its ranges, or the others."""
    cdef uint64_t[2] name = [id.first, id.second]
    cdef uint32_t pair = pool.lanes.pool_sets.first(name)
    cdef BinSet* owner
    while pair != NO_PAIR:
        owner = &pool.bin_sets[2 * pair + kind]
        # The list of a pool's pairs is found by a hash, so other pools may stand in it.
        if (is_same_pool(pool_of(&owner.lane), id) and owner.is_range == in_ranges
                and not try_push_back(out, <uint32_t>(2 * pair + kind))):
            return False
        pair = pool.lanes.pool_sets.next(pair)
    sort_by_stream(pool.bin_sets, out)
    return True


cdef cbool list_whole(Pool pool, PoolId id, uint32_t kind, vector[ChunkHandle]& out) noexcept nogil:
    """A pool's wholly free regions of one kind by (stream, size, address), as their one chunk."""
    cdef vector[uint32_t] sets
    cdef vector[ChunkHandle] free
    cdef uint32_t bin_set
    cdef ChunkHandle handle
    if not list_sets(pool, id, kind, False, sets):
        return False
    for bin_set in sets:
        if pool.bin_sets[bin_set].asleep:       # its bytes are not counted now, and whoever sleeps or wakes it has it
            continue
        free.clear()
        if not pool.list_free(bin_set, free):
            return False
        for handle in free:
            if is_whole(pool, handle) and not try_push_back(out, handle):
                return False
    return True


cdef cbool list_in_ranges(Pool pool, PoolId id, uint32_t kind, vector[ChunkHandle]& out) noexcept nogil:
    """A pool's free chunks of one kind in ranges, by (stream, size, address)."""
    cdef vector[uint32_t] sets
    cdef uint32_t bin_set
    if not list_sets(pool, id, kind, True, sets):
        return False
    for bin_set in sets:
        if not pool.bin_sets[bin_set].asleep and not pool.list_free(bin_set, out):
            return False
    return True


cdef cbool is_in_range(Pool pool, ChunkHandle handle) noexcept nogil:
    return pool.bin_sets[pool.chunks[handle].bin_set].is_range


cdef cbool list_collectable(Pool pool, cbool strict, vector[ChunkHandle]& out) noexcept nogil:
    """The large chunks of the default pool that fill their region, or under `strict` their range, which cannot be
    collected (PyTorch's behaviour, EX-25b)."""
    cdef vector[ChunkHandle] in_ranges
    cdef ChunkHandle handle
    if not list_whole(pool, default_pool(), LARGE, out):
        return False
    if strict and not list_in_ranges(pool, default_pool(), LARGE, in_ranges):
        return False
    for handle in in_ranges:
        if is_whole(pool, handle) and not try_push_back(out, handle):
            return False
    return True


cdef cbool list_releasable(Pool pool, PrivatePools private_pools, cbool with_default,
                           vector[ChunkHandle]& out) noexcept nogil:
    """What `empty_cache` gives back, in upstream's order; `with_default`: of the default pool too. If the host has no
    memory, only the first part."""
    cdef PrivatePool private = PrivatePool(default_pool(), 0, 0, 0)
    # Large before small in the default pool, and the other way round in private ones: so upstream calls the driver.
    if with_default and not (list_whole(pool, default_pool(), LARGE, out)
                             and list_whole(pool, default_pool(), SMALL, out)):
        return False
    while private_pools.next_released(private.id, &private):
        if not (list_whole(pool, private.id, SMALL, out) and list_whole(pool, private.id, LARGE, out)):
            return False
    return True


cdef void collect_oldest(Pool pool, vector[ChunkHandle]& candidates, uint64_t target,
                         vector[Region]& out) noexcept nogil:
    """Collects the oldest regions in passes: each takes all that are at least as old as the average of what is left. A
    range that one free chunk fills counts in the average, and stays (PyTorch's behaviour, EX-25b)."""
    cdef uint64_t reclaimed = 0, age
    cdef double total_age = 0, oldest_allowed
    cdef size_t left = candidates.size(), before = 0, kept, i
    for i in range(candidates.size()):
        total_age += <double>(pool.times.clock - pool.chunks[candidates[i]].freed_at_count)
    # A pass that has freed nothing ends it: its average would be the same again. A range that cannot go may hold the
    # average above all that can (V-10g), which upstream gives up on, too.
    while reclaimed < target and left > 0 and left != before:
        before = left
        oldest_allowed = total_age / <double>left
        kept = 0
        for i in range(before):
            age = pool.times.clock - pool.chunks[candidates[i]].freed_at_count
            if (<double>age >= oldest_allowed and not is_in_range(pool, candidates[i])
                    and try_push_back(out, region_of(pool, candidates[i]))):
                reclaimed += pool.chunks[candidates[i]].size
                total_age -= <double>age
            else:
                candidates[kept] = candidates[i]
                kept += 1
        left = kept


cdef cbool choose_oversize(Pool pool, uint32_t bin_set, uint64_t rounded, uint64_t oversize,
                           vector[Region]& out) noexcept nogil:
    """The free oversize regions of a stream that go, so that a new one of `rounded` bytes fits (PyTorch's behaviour,
    2.13). Whether they are enough."""
    cdef vector[ChunkHandle] free
    cdef Chunk* chunk
    cdef uint64_t wanted = max(rounded, oversize), released = 0
    cdef size_t i, first = 0
    if bin_set == NO_LANE or not pool.list_free(bin_set, free):
        return False
    # The list rises by size, so what is not smaller than wanted stands at its end.
    while first < free.size() and pool.chunks[free[first]].size < wanted:
        first += 1
    for i in range(first, free.size()):
        # upstream takes the first. If the setting was lowered, that may be part of a region, and the driver fails
        if is_whole(pool, free[i]):
            return try_push_back(out, region_of(pool, free[i]))
    i = first
    # From the largest down, as upstream goes: fewer calls, and the small ones stay.
    while i > 0 and released < wanted:
        i -= 1
        chunk = &pool.chunks[free[i]]
        if chunk.size < oversize:
            break
        if is_whole(pool, free[i]) and try_push_back(out, region_of(pool, free[i])):
            released += chunk.size
    return released >= wanted


cdef void choose_enough(Pool pool, vector[ChunkHandle]& chunks, uint64_t needed,
                        vector[ChunkHandle]& chosen) noexcept nogil:
    """The smallest chunk that is enough; while none is, the largest."""
    cdef size_t i = 0
    sort_by_falling_size(pool.chunks, chunks)
    while i < chunks.size() and pool.chunks[chunks[i]].size < needed:
        try_push_back(chosen, <ChunkHandle>chunks[i])
        needed -= pool.chunks[chunks[i]].size
        i += 1
    while i + 1 < chunks.size() and pool.chunks[chunks[i + 1]].size >= needed:
        i += 1
    if needed > 0 and i < chunks.size():
        try_push_back(chosen, <ChunkHandle>chunks[i])


cdef uint64_t take_out(Pool pool, Source source, vector[ChunkHandle]& chunks, vector[Region]& out) noexcept nogil:
    """Takes the regions that these chunks fill out of the pool, to be given back. Returns their bytes."""
    cdef ChunkHandle handle
    for handle in chunks:
        # One that the list has no room for stays in the pool, and in the cache.
        try_push_back(out, region_of(pool, handle))
    return source.forget(out)


cdef void list_parts(Pool pool, PoolId id, uint32_t kind, vector[FreePart]& out) noexcept nogil:
    """A pool's free chunks of one kind in ranges, by (stream, size, address). Needs the lock."""
    cdef vector[ChunkHandle] free
    cdef ChunkHandle handle
    list_in_ranges(pool, id, kind, free)
    for handle in free:
        if not try_push_back(out, FreePart(handle, pool.chunks[handle].ptr, pool.chunks[handle].size)):
            return


@cython.final
@cython.no_gc_clear
cdef class Emptying:
    """Gives back what an allocator caches. It needs no lock, and never calls the allocator."""

    cdef int attach(self, Lock* lock, Pool pool, Source source, PrivatePools private_pools,
                    ExpandableSegments segments) except -1:
        """Takes the allocator's lock, which must live as long, and its parts."""
        self.lock = lock
        self.pool = pool
        self.source = source
        self.private_pools = private_pools
        self.segments = segments
        return 0

    cdef uint64_t empty_all(self, bint with_default, bint strict, uint64_t* changes) except? 0xFFFFFFFFFFFFFFFF:
        """Gives back what is cached, that of the default pool only if `with_default`, and also what the source failed
        to take back before. Returns the bytes, and counts the regions and pieces that went in `changes`. While another
        thread maps or unmaps, the ranges stay as they are."""
        cdef PrivatePool pool = PrivatePool(default_pool(), 0, 0, 0)
        cdef uint64_t released
        cdef uint32_t kind
        cdef Faults faults = Faults()
        cdef bint maps = self.segments.enter(0)
        cdef uint64_t before = self.segments.changes
        try:
            # What could not be unmapped before is tried whenever the cache is emptied: until then it counts as
            # reserved.
            released = self.segments.try_stuck_again(faults) if maps else 0
            for kind in (LARGE, SMALL) if with_default else ():
                released += self.empty_one(default_pool(), kind, maps, changes, faults)
            while self.get_next(&pool):
                for kind in (SMALL, LARGE):
                    released += self.empty_one(pool.id, kind, maps, changes, faults)
            # Upstream keeps ranges that never held memory (EX-19).
            if maps and not strict:
                self.segments.drop_unused(faults)
        finally:
            if maps:
                changes[0] += self.segments.changes - before
                self.segments.leave()
        try:
            released += self.give_unreturned_back(changes)
        except BaseException as error:
            faults.add(error)
        # Only now: one region that the device does not take back must not stop the others.
        raise_faults(self.source.sub_allocator, faults)
        return released

    cdef bint get_next(self, PrivatePool* pool) noexcept:
        """Reads the private pool without references that comes after this one. False: there is none."""
        # Other threads make pools and release them, so the next one is looked for anew.
        acquire_lock(self.lock[0])
        cdef bint found = self.private_pools.next_released(pool.id, pool)
        self.lock.release()
        return found

    cdef uint64_t empty_one(self, PoolId id, uint32_t kind, bint maps, uint64_t* changes,
                            Faults faults) except? 0xFFFFFFFFFFFFFFFF:
        cdef vector[ChunkHandle] chunks
        cdef vector[Region] regions
        cdef vector[FreePart] parts
        cdef uint64_t released
        # Listed and taken out at once, so that nobody is handed one of them. They go back without the lock.
        acquire_lock(self.lock[0])
        list_whole(self.pool, id, kind, chunks)
        released = take_out(self.pool, self.source, chunks, regions)
        list_parts(self.pool, id, kind, parts)
        self.lock.release()
        changes[0] += regions.size()
        try:
            self.source.give_back(regions, False)
        except BaseException as error:
            faults.add(error)
        if maps:
            released += self.segments.give_back(parts, faults)
        return released

    cdef uint64_t give_unreturned_back(self, uint64_t* changes) except? 0xFFFFFFFFFFFFFFFF:
        cdef vector[Region] regions
        # Nobody else offers them again from here on. They go back without the lock.
        acquire_lock(self.lock[0])
        self.private_pools.drop_empty(self.pool, default_pool())
        self.source.take_unreturned(regions)
        self.lock.release()
        changes[0] += regions.size()
        self.source.give_back(regions, False)
        return total_size(regions)

    cdef uint64_t empty_pool(self, PoolId id) except? 0xFFFFFFFFFFFFFFFF:
        cdef Faults faults = Faults()
        cdef uint64_t released, changes = 0
        cdef bint maps = self.segments.enter(0)
        try:
            released = self.empty_one(id, SMALL, maps, &changes, faults)
            released += self.empty_one(id, LARGE, maps, &changes, faults)
        finally:
            if maps:
                self.segments.leave()
        # A pool that another thread has begun to use again meanwhile stays.
        acquire_lock(self.lock[0])
        self.private_pools.drop_empty(self.pool, id)
        self.lock.release()
        raise_faults(self.source.sub_allocator, faults)
        return released
