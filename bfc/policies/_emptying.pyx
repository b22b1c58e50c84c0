"""How an allocator with expandable segments gives back what it caches: pool by pool, first the regions of each and then
what lies in ranges, as PyTorch does (PyTorch's behaviour, 2.13)."""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport LARGE, SMALL, ChunkHandle, Pool, Region
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._source cimport Source, total_size
from bfc.mapping._calls cimport Faults, raise_faults
from bfc.mapping._address_ranges cimport FreePart
from bfc.mapping._expandable cimport ExpandableSegments
from bfc.policies._private_pools cimport PoolId, PrivatePool, PrivatePools, default_pool
from bfc.policies._releasing cimport list_in_ranges, list_whole, take_out

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_push_part "bfc::try_push_back"(vector[FreePart]& items, const FreePart& item) noexcept


cdef void list_parts(Pool pool, PoolId id, uint32_t kind, vector[FreePart]& out) noexcept nogil:
    """A pool's free chunks of one kind in ranges, by (stream, size, address). Needs the lock."""
    cdef vector[ChunkHandle] free
    cdef ChunkHandle handle
    list_in_ranges(pool, id, kind, free)
    for handle in free:
        if not try_push_part(out, FreePart(handle, pool.chunks[handle].ptr, pool.chunks[handle].size)):
            return


@cython.final
@cython.no_gc_clear
cdef class Emptying:
    """Gives back what an allocator caches. It needs no lock, and never calls the allocator."""

    cdef int stand_behind(self, Lock* lock, Pool pool, Source source, PrivatePools private_pools,
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
        cdef PrivatePool pool
        cdef size_t i = 0
        cdef uint64_t released
        cdef uint32_t kind
        cdef Faults faults = Faults()
        cdef bint maps = self.segments.enter(0)
        cdef uint64_t before = self.segments.changes
        try:
            released = self.segments.try_stuck_again(faults) if maps else 0
            for kind in (LARGE, SMALL) if with_default else ():
                released += self.empty_one(default_pool(), kind, maps, changes, faults)
            while self.get_pool(i, &pool):
                for kind in (SMALL, LARGE) if pool.uses == 0 else ():
                    released += self.empty_one(pool.id, kind, maps, changes, faults)
                i += 1
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
        raise_faults(self.source.sub_allocator, faults)
        return released

    cdef bint get_pool(self, size_t i, PrivatePool* pool) noexcept:
        """Reads a private pool by its number. False: there are not so many."""
        acquire_lock(self.lock[0])
        cdef bint found = i < self.private_pools.known.size()
        if found:
            pool[0] = self.private_pools.known[i]
        self.lock.release()
        return found

    cdef uint64_t empty_one(self, PoolId id, uint32_t kind, bint maps, uint64_t* changes,
                            Faults faults) except? 0xFFFFFFFFFFFFFFFF:
        cdef vector[ChunkHandle] chunks
        cdef vector[Region] regions
        cdef vector[FreePart] parts
        cdef uint64_t released
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
        acquire_lock(self.lock[0])
        self.private_pools.drop_empty(self.pool.bin_sets, default_pool())
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
        acquire_lock(self.lock[0])
        self.private_pools.drop_empty(self.pool.bin_sets, id)
        self.lock.release()
        raise_faults(self.source.sub_allocator, faults)
        return released
