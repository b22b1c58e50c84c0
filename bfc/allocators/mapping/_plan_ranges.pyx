"""The regions of plans where memory is mapped page by page: each is a range of addresses, which begins without a page.

A place gets its pages when it is first touched. While nothing needs them, the plan lends them to its own streams.
"""

import time

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc.native.nothrow cimport try_push_back
from bfc._core cimport (
    DIVIDED, LEAVING, NO_CHUNK, NO_LANE, NO_PAGE, NO_STREAM, UNMAPPED, ChunkHandle, Lane, PageBitmap, PlanPages,
    PlanServer, cut, find_lane, has_records,
)
from bfc.allocators._places cimport set_of_region
from bfc.allocators._changes cimport IS_GROWING, merge_unmapped, remove_range
from bfc.allocators._pages cimport PageRecord, Run, Slot
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators.mapping._address_ranges cimport AddressRange, Faults, raise_faults
from bfc.allocators.mapping._stitching cimport Stitching

from bfc.errors import out_of_host_memory

cdef extern from "page_bitmap.hpp":
    pass
cdef extern from "plan_server.hpp":
    pass

_POLL_SECONDS = 0.001


cdef PlanRanges ranges_for_plans(Stitching memory, PlanServer** in_use):
    cdef PlanRanges made = PlanRanges()
    made.memory = memory
    made.lock = memory.lock
    made.pool = memory.pool
    made.pages = memory.pages
    made.in_use = in_use
    return made


# In a garbage cycle buffers may be finalised after their allocator, so the collector must leave its parts in place.
@cython.final
@cython.no_gc_clear
cdef class PlanRanges:
    """The ranges of an allocator's plans: a part of `Planned`. Who calls it maps, but for `enter` and what gives up
    all."""

    cdef AddressRange* range_of(self, PlanServer* plan, int region) noexcept nogil:
        cdef AddressRange* addresses
        cdef size_t i
        for i in range(self.memory.ranges.size()):
            addresses = self.memory.ranges.at(i)
            if addresses.plan == plan and addresses.region == region and addresses.is_known:
                return addresses
        return NULL

    cdef int open(self, PlanServer* plan, int region, uint64_t home) except -1:
        """Reserves the addresses of a region, and gives them to the plan."""
        cdef AddressRange* addresses = self.memory.ranges.open()
        if addresses == NULL:
            raise out_of_host_memory()
        addresses.nbytes = plan.pages(region) * self.memory.page_size
        addresses.slot = self.memory.page_size
        addresses.plan = plan
        addresses.region = region
        addresses.stream = addresses.asked_of = home
        # A lane that another thread opens moves the sets of bins.
        acquire_lock(self.lock[0])
        addresses.bin_set = set_of_region(self.pool, plan, region)
        self.lock.release()
        return self.memory.device.check(self.memory.reserve(addresses))

    cdef int fill_place(self, uint64_t stream, uint64_t rounded) except -1:
        """Has a place filled, unless another thread maps: then the request is served as if its pages were lent."""
        if not self.memory.enter(0):
            return 0
        try:
            self.fill_while_mapping(stream, rounded)
        finally:
            self.memory.leave()
        return 0

    cdef int fill_while_mapping(self, uint64_t stream, uint64_t rounded) except -1:
        """Brings pages to the place that a request is to have, unless they are lent, or the plan has as many as it may:
        then the request is served by what is free elsewhere."""
        cdef uint32_t index = NO_STREAM     # the stream's number in the plan
        cdef PlanServer* plan = self.pool.plans.current
        cdef AddressRange* addresses
        cdef PlanPages row = PlanPages(0, 0, 0), place = PlanPages(0, 0, 0)
        cdef uint64_t got = 1, calls = self.memory.count_calls()
        self.memory.device.is_refused = False
        self.memory.device.check(self.memory.sweep(None, False, False))
        if self.memory.has_failed():
            self.memory.device.check(self.memory.try_again())
        while got > 0:
            acquire_lock(self.lock[0])
            row.count = 0
            if plan != NULL and plan == self.pool.plans.current:     # else another thread has ended it
                index = plan.stream_of(stream)
                if index != NO_STREAM:
                    row = plan.away_for(index, rounded)
                    place = plan.pages_for(index, rounded)
            self.lock.release()
            got = 0
            addresses = NULL
            if row.count:
                addresses = self.range_of(plan, row.region)
            if addresses != NULL:
                got = self.fill_at(addresses, row.first, row.count, index, stream)
            if got == 0 and addresses != NULL and addresses.bitmap.page_at(row.first) != NO_PAGE:
                got = self.bring_back(addresses, place.first, place.count, stream)
        self.memory.note_request(calls)
        return 0

    cdef uint64_t fill_at(self, AddressRange* addresses, uint32_t first, uint32_t count, uint32_t index,
                          uint64_t stream) except? 0xFFFFFFFFFFFFFFFF:
        """Brings pages to a region, up to the first that are lent: pages that lie free beside the plan, and new ones
        while there are fewer than the plan needs. Returns how many. Only a page that no other stream shares may be one
        that the stream has used before."""
        cdef PlanServer* plan = addresses.plan
        cdef int64_t got = 0
        cdef uint64_t wanted
        cdef uint64_t ptr = addresses.ptr + first * self.memory.page_size
        cdef PlanPages row = PlanPages(addresses.region, first, count)
        cdef ChunkHandle at = self.cut_at(addresses, ptr)
        cdef cbool is_own = False
        if at == NO_CHUNK:
            return 0
        wanted = min(<uint64_t>plan.alike_from(index, row, is_own),
                     self.memory.part_of(at).size // self.memory.page_size)
        try:
            if is_own:
                got = self.move_into_plan(addresses, stream, wanted, at)
            if got == 0 and wanted <= min(self.memory.room(), self.memory.room_in_plan()):
                got = self.memory.grow(addresses, wanted, at)
            self.memory.device.check(got)
        finally:
            if got <= 0:
                self.join_at(addresses, ptr)
        return got

    cdef uint64_t bring_back(self, AddressRange* addresses, uint32_t first, uint32_t count,
                             uint64_t stream) except? 0xFFFFFFFFFFFFFFFF:
        """Lets a place of a stream have the pages again that it lacks, if all of them lie free in ranges, of other
        streams, too, or can still be made. Returns how many."""
        cdef uint64_t got, room = min(self.memory.room(), self.memory.room_in_plan())
        cdef uint32_t slot
        cdef cbool are_free = True
        self.memory.device.check(self.memory.ask_captures())
        acquire_lock(self.lock[0])      # all are found free and held under one lock, or none is
        for slot in range(first, first + count):
            if not are_free or not addresses.plan.is_away(addresses.region, slot):
                continue
            if addresses.bitmap.page_at(slot) == NO_PAGE:
                are_free = room > 0
                room -= are_free
            else:
                are_free = self.pages.has_moved(addresses.bin_set, slot) and self.hold_moved(addresses, slot)
        if not are_free:
            self.pages.let_go(self.memory.held)
        got = self.memory.held.size()
        self.lock.release()
        if got > 0:
            self.memory.device.check(self.memory.give_held_to(addresses, stream, NO_CHUNK, True, True))
        return got

    cdef bint hold_moved(self, AddressRange* addresses, uint32_t slot) noexcept:
        """Holds the page of a slot where it is used now, if it is free there. Needs the lock."""
        cdef PageRecord* record = &self.pages.records[addresses.bitmap.page_at(slot)]
        cdef Run run = Run(record.slots[record.active].set, record.slots[record.active].number, 1)
        cdef size_t i
        for i in range(self.memory.ranges.size()):
            if self.memory.ranges.at(i).bin_set == run.set and self.memory.ranges.at(i).is_captured:
                return False
        return self.pages.is_idle(&run) and self.pages.hold_run(&run, self.memory.held)

    cdef ChunkHandle cut_at(self, AddressRange* addresses, uint64_t ptr) noexcept:
        """The unmapped chunk that begins at an address, cut out there, for memory to be mapped into it. NO_CHUNK:
        something is mapped there, or the host is out of memory."""
        cdef ChunkHandle handle
        # To cut the chunk takes a record, as each split of another thread does.
        acquire_lock(self.lock[0])
        handle = self.memory.chunk_around(addresses, ptr)
        if self.pool.chunks[handle].state != UNMAPPED:
            handle = NO_CHUNK
        elif self.pool.chunks[handle].ptr < ptr:
            if has_records(self.pool, 1):
                handle = cut(self.pool, handle, ptr - self.pool.chunks[handle].ptr)
                self.pool.chunks[handle].freed_at_count = IS_GROWING
            else:
                handle = NO_CHUNK
        self.memory.note_unmapped(addresses, NO_CHUNK)
        self.lock.release()
        return handle

    cdef void join_at(self, AddressRange* addresses, uint64_t ptr) noexcept:
        """Undoes `cut_at`, where nothing was mapped."""
        cdef ChunkHandle handle
        # A free of a neighbour reads the state of this chunk.
        acquire_lock(self.lock[0])
        handle = self.memory.chunk_around(addresses, ptr)
        if self.pool.chunks[handle].state == UNMAPPED:
            self.pool.chunks[handle].freed_at_count = 0
            merge_unmapped(self.pool, handle)
        self.memory.note_unmapped(addresses, NO_CHUNK)
        self.lock.release()

    cdef uint64_t move_into_plan(self, AddressRange* addresses, uint64_t stream, uint64_t wanted,
                                 ChunkHandle at) except? 0xFFFFFFFFFFFFFFFF:
        """Lets a plan have pages of a stream that lie free beside it, for good. Returns how many."""
        cdef Lane lane = Lane([0, 0], 0, 0)
        cdef uint64_t got = 0
        cdef uint32_t bin_set
        lane.stream = stream
        acquire_lock(self.lock[0])
        bin_set = find_lane(self.pool, &lane)
        if bin_set != NO_LANE:
            self.pages.hold(bin_set | 1, wanted, 1, self.memory.held)
            self.pages.let_known_go(addresses.bin_set, self.memory.held)    # they belong elsewhere in this region
            got = self.memory.held.size()
        self.lock.release()
        if got == 0:
            return 0
        self.memory.device.check(self.memory.give_held_to(addresses, stream, at, False, True))
        return got

    cdef bint give_up(self, AddressRange* addresses, Faults faults) except -1:
        """Gives a region back: its pages, but for those that moved to other ranges, and its addresses. False: something
        lives there, or in a view of its pages, or the device failed; then it stays, and may be given back later."""
        cdef ChunkHandle first
        cdef bint is_bare
        if not self.is_vacant(addresses):       # before any view goes, and any stream is waited for
            return False
        self.memory.device.check(self.memory.retire_all())
        self.memory.sweep(faults, True, True)
        if addresses.some_stuck:
            self.memory.unmap_again(addresses, False, faults)
        if not self.hold_region(addresses):
            return False
        if not self.memory.wait_for(addresses, faults):
            self.memory.let_held_go()
            return False
        self.memory.unmap_held(addresses, faults)
        self.leave_moved(addresses, faults)
        acquire_lock(self.lock[0])
        first = self.pool.regions[addresses.ptr + addresses.nbytes].first
        # not so where the device has failed to unmap some of it
        is_bare = self.pool.chunks[first].state == UNMAPPED and self.pool.chunks[first].next == NO_CHUNK
        if is_bare:
            remove_range(self.pool, addresses.ptr, addresses.nbytes)
            addresses.is_known = False
            addresses.plan = NULL
        self.lock.release()
        if is_bare:
            self.memory.unreserve(addresses, faults)
        return is_bare

    cdef bint is_vacant(self, AddressRange* addresses) noexcept:
        """Whether nothing lives in the places of a region."""
        # Frees of other threads empty the region.
        acquire_lock(self.lock[0])
        cdef bint is_empty = addresses.plan.is_empty(addresses.region)
        self.lock.release()
        return is_empty

    cdef bint hold_region(self, AddressRange* addresses) noexcept:
        """Holds all pages of a region. False: some are in use, and nothing is held."""
        cdef ChunkHandle handle
        cdef PageBitmap* bitmap = addresses.bitmap
        cdef Run run
        cdef uint64_t slot
        cdef bint is_held
        acquire_lock(self.lock[0])      # looked at and held under one lock: nothing comes to live there in between
        is_held = addresses.plan.is_empty(addresses.region) and not self.pages.is_in_views(addresses.bin_set)
        handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
        while handle != NO_CHUNK and is_held:
            is_held = (self.pool.chunks[handle].state in (UNMAPPED, LEAVING, DIVIDED)
                       or self.pages.has_moved(addresses.bin_set, bitmap.slot_at(self.pool.chunks[handle].ptr)))
            if self.pool.chunks[handle].state == DIVIDED:
                run = Run(addresses.bin_set, <uint32_t>bitmap.slot_at(self.pool.chunks[handle].ptr),
                          <uint32_t>(self.pool.chunks[handle].size // self.memory.page_size))
                for slot in range(run.first, run.first + run.count):
                    is_held = is_held and self.pages.is_unshared(bitmap.page_at(slot), True)
                is_held = is_held and try_push_back(self.memory.held, run)
                if is_held and not self.pages.take_run(&run, LEAVING):
                    self.memory.held.pop_back()
                    is_held = False
            handle = self.pool.chunks[handle].next
        if not is_held:
            self.pages.let_go(self.memory.held)
        self.lock.release()
        return is_held

    cdef void leave_moved(self, AddressRange* addresses, Faults faults) noexcept:
        """Unmaps the pages that are used elsewhere from a region in which nothing lives."""
        cdef uint32_t slot, page
        cdef cbool has_moved
        for slot in range(<uint32_t>addresses.bitmap.slots()):
            acquire_lock(self.lock[0])
            has_moved = self.pages.has_moved(addresses.bin_set, slot)
            page = addresses.bitmap.page_at(slot)
            if has_moved:           # so that a free of another thread does not move it back
                self.pages.records[page].primary = self.pages.records[page].active
            self.lock.release()
            if has_moved:
                self.memory.unmap_slot(page, Slot(addresses.bin_set, slot), faults)

    # -- all of a plan ------------------------------------------------------------------------------------------------

    cdef bint enter(self) except -1:
        """Enters what maps memory, once no other thread does. False: this thread does, in a call further up."""
        while not self.memory.enter(0):
            if self.memory.source.is_called_here():
                return False
            time.sleep(_POLL_SECONDS)
        return True

    cdef void leave(self) noexcept:
        self.memory.leave()

    cdef bint give_up_all(self, PlanServer* plan, int which) except -1:
        """Gives back a region of a plan, or (NULL) those of all plans that are not in use, where nothing lives in it.
        Returns whether all of them went."""
        cdef Faults faults = Faults()
        cdef size_t i = 0, before
        cdef bint all_went = True
        if not self.has_any(plan, which):
            return True
        if not self.enter():
            return False
        try:
            while i < self.memory.ranges.size():
                before = self.memory.ranges.size()
                if self.is_range_of(self.memory.ranges.at(i), plan, which):
                    all_went = self.give_up(self.memory.ranges.at(i), faults) and all_went
                i += self.memory.ranges.size() == before     # else it left the list
        finally:
            self.leave()
        raise_faults(self.memory.source.sub_allocator, faults)
        return all_went

    cdef bint has_any(self, PlanServer* plan, int which) noexcept:
        cdef bint found = False
        cdef size_t i
        self.memory.device.guard.begin_reading(self.lock[0])    # another thread may map
        for i in range(self.memory.ranges.size()):
            found = found or self.is_range_of(self.memory.ranges.at(i), plan, which)
        self.memory.device.guard.end_reading(self.lock[0])
        return found

    cdef bint is_range_of(self, AddressRange* addresses, PlanServer* plan, int which) noexcept:
        """Whether a range is that region of a plan, or (NULL) one of any plan that is not in use."""
        if addresses.plan == NULL or not addresses.is_known:
            return False
        if plan == NULL:
            return addresses.plan != self.in_use[0]
        return addresses.plan == plan and addresses.region == which
