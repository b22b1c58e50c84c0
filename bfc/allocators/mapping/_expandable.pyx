"""PyTorch's expandable segments: which addresses of a range get memory, and which memory goes back.

The transactions are those of _address_ranges.pyx. Numbers after "PyTorch's behaviour" are sections of
docs/behaviour/pytorch.md.
"""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_make_room, try_push_back
from bfc._core cimport FREE, LEAVING, NO_CHUNK, NO_HOST_MEMORY, SMALL, UNMAPPED, Chunk, ChunkHandle, Pool
from bfc.allocators._changes cimport begin_mapping, begin_unmapping, cancel_unmapping, remove_range
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators.mapping._address_ranges cimport (
    RESERVE, AddressRange, AddressRanges, Faults, FreePart, MappedRun, Page, PageRef, TagTransition, belongs_to,
    is_set_asleep, list_ranges, new_page, raise_faults, round_up_to,
)
from bfc.allocators.mapping._sleep cimport take_over_transitions

from bfc.errors import SettingsError, out_of_host_memory
from bfc.suballocators.base import check_mapping_members, checked_memory_info

cdef enum:
    SMALL_SLOT = 2 << 20


cdef cbool is_start(Pool pool, const Growing* growing, uint32_t state) noexcept nogil:
    """Whether the chosen chunk is there still, in this state. Its record may be another chunk's by now."""
    cdef Chunk* chunk = &pool.chunks[growing.start]
    return chunk.state == state and chunk.ptr == growing.ptr and chunk.bin_set == growing.bin_set


cdef cbool is_run_of(Pool pool, ChunkHandle first, uint64_t size) noexcept nogil:
    """Whether free and unmapped chunks, from this one on, have so many bytes together."""
    cdef ChunkHandle handle = first
    cdef uint64_t found = 0
    while found < size and handle != NO_CHUNK and pool.chunks[handle].state in (FREE, UNMAPPED):
        found += pool.chunks[handle].size
        handle = pool.chunks[handle].next
    return found >= size


cdef int check_mapping(sub_allocator) except -1:
    """Refuses a sub-allocator that maps no memory."""
    possible = sub_allocator.supports_virtual_memory
    if not possible:
        raise SettingsError(f"expandable segments need a sub-allocator that maps memory: {possible}",
                            key="expandable_segments", given="True", allowed="False with this sub-allocator",
                            hint="max_split_size_mb or garbage_collection_threshold, against fragmentation")
    check_mapping_members(sub_allocator)
    return 0


@cython.final
@cython.no_gc_clear
cdef class ExpandableSegments(AddressRanges):
    """Which ranges grow and shrink, as PyTorch does. It never calls the allocator."""

    # -- which page is in which slot ----------------------------------------------------------------------------------

    cdef Page* page_at(self, AddressRange* range, uint64_t ptr) noexcept nogil:
        cdef size_t slot = (ptr - range.ptr) // range.slot
        return range.pages[slot].get() if slot < range.pages.size() else NULL

    cdef cbool has_page(self, AddressRange* range, uint64_t ptr) noexcept nogil:
        return self.page_at(range, ptr) != NULL

    cdef int enter_pages(self, AddressRange* range, uint64_t ptr, vector[PageRef]& pages) noexcept nogil:
        cdef size_t i = 0, first = (ptr - range.ptr) // range.slot, count = first + pages.size()
        # A row of slots that grows with what is mapped: a range has 9/8 of the device's addresses, and mostly few
        # pages.
        if not try_make_room(range.pages, count):
            return self.device.fail_for_memory()
        if range.pages.size() < count:
            range.pages.resize(count)
        while i < pages.size():     # there is room: nothing can fail any more
            range.pages[first + i] = pages[i]
            i += 1
        return 0

    cdef void drop_slot(self, AddressRange* range, uint64_t ptr, Faults faults) noexcept nogil:
        cdef PageRef page
        if self.page_at(range, ptr) == NULL:
            return
        page = range.pages[(ptr - range.ptr) // range.slot]
        page.get().is_mapped = False
        range.pages[(ptr - range.ptr) // range.slot].reset()
        # Where its tag sleeps, the page was released when the tag fell asleep.
        if page.get().is_made:
            self.device.counts.releases += 1
            self.release_page(page, faults)

    cdef void note_unmapped(self, AddressRange* range, ChunkHandle added) noexcept nogil:
        """Needs room in the list of holes."""
        cdef size_t kept = 0, i
        cdef ChunkHandle handle
        cdef bint is_new = added != NO_CHUNK and self.pool.chunks[added].state == UNMAPPED
        for handle in range.holes:
            if self.pool.chunks[handle].state == UNMAPPED:
                range.holes[kept] = handle
                kept += 1
                is_new = is_new and handle != added
        range.holes.resize(kept)
        if is_new and try_push_back(range.holes, added):
            # In the order of addresses, since the lowest start that suffices is taken (PyTorch's behaviour, 11.5).
            i = kept
            while i > 0 and self.pool.chunks[range.holes[i - 1]].ptr > self.pool.chunks[added].ptr:
                range.holes[i] = range.holes[i - 1]
                i -= 1
            range.holes[i] = added

    cdef cbool make_room(self, AddressRange* range) noexcept nogil:
        """Makes room in the list of holes. False: the host has no memory."""
        return try_make_room(range.holes, range.holes.size() + 2)

    cdef uint64_t page_bytes_at(self, uint64_t ptr) noexcept:
        return self.range_of(ptr).slot

    cdef void take_over(self) noexcept:
        AddressRanges.take_over(self)
        take_over_transitions(self)

    cdef uint64_t slot_of(self, Growing* growing) noexcept nogil:
        """The bytes of a page in a range of that kind."""
        cdef uint64_t slot = SMALL_SLOT
        # The sizes are settings, which change under the lock.
        acquire_lock(self.lock[0])
        if self.pool.bin_sets[growing.bin_set].kind != SMALL:
            slot = self.pool.sizes.large_segment
        self.lock.release()
        return slot     # of a new range: one that is there keeps its size, whatever the settings become

    # -- growing ------------------------------------------------------------------------------------------------------

    cdef ChunkHandle ready(self, Growing* growing) noexcept nogil:
        """The chunk that has become large enough, or NO_CHUNK. Needs the lock."""
        cdef ChunkHandle handle = growing.start
        if handle != NO_CHUNK and is_start(self.pool, growing, FREE) and self.pool.chunks[handle].size >= growing.size:
            return handle
        return NO_CHUNK

    cdef int map_more(self, Growing* growing) noexcept nogil:
        """Reserves addresses or maps memory, so that a chunk comes nearer to the size that is wanted. 0: there is no
        memory. -1: that failed."""
        cdef uint64_t nbytes = 0
        cdef ChunkHandle handle
        cdef cbool is_ready
        cdef int reserved
        acquire_lock(self.lock[0])
        handle = self.next_to_map(growing, &nbytes)
        is_ready = self.ready(growing) != NO_CHUNK
        self.lock.release()     # the free chunk before `handle` may be taken now; `handle` stays unmapped
        if is_ready:
            return 1            # cached memory that a search passes over, for max_split_size (EX-24)
        if handle != NO_CHUNK:
            return self.map_front(handle, nbytes)
        if growing.has_reserved:
            return 0        # the device says that it has less memory than it has given
        reserved = self.reserve_for(growing)
        growing.has_reserved = reserved > 0
        return reserved

    cdef ChunkHandle next_to_map(self, Growing* growing, uint64_t* nbytes) noexcept nogil:
        """The unmapped chunk whose first `nbytes` come next, or NO_CHUNK. Needs the lock."""
        cdef ChunkHandle handle
        cdef Chunk* chunk
        if not self.is_on_its_way(growing):
            self.choose_start(growing)
        if growing.start == NO_CHUNK:
            return NO_CHUNK
        handle = growing.start
        chunk = &self.pool.chunks[handle]
        nbytes[0] = growing.size
        if chunk.state == FREE and chunk.size >= growing.size:
            return NO_CHUNK
        if chunk.state == FREE:
            nbytes[0] -= chunk.size
            handle = chunk.next
        # Block by block, as upstream maps: each step counts, and has an entry in the history.
        nbytes[0] = min(nbytes[0], self.pool.chunks[handle].size)
        return handle

    cdef cbool is_on_its_way(self, Growing* growing) noexcept nogil:
        """Whether the chosen chunk is there still and large enough, or has unmapped memory behind it. Needs the lock.
        """
        cdef Chunk* chunk
        if growing.start == NO_CHUNK or is_start(self.pool, growing, UNMAPPED):
            return growing.start != NO_CHUNK
        if not is_start(self.pool, growing, FREE):
            return False
        chunk = &self.pool.chunks[growing.start]
        return chunk.size >= growing.size or (chunk.next != NO_CHUNK
                                              and self.pool.chunks[chunk.next].state == UNMAPPED)

    cdef void choose_start(self, Growing* growing) noexcept nogil:
        """Chooses the first run of free and unmapped chunks, by address, that is large enough (PyTorch's behaviour,
        11.5). Needs the lock."""
        cdef AddressRange* addresses
        cdef ChunkHandle hole, start
        cdef size_t i, k
        growing.start = NO_CHUNK
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if addresses.bin_set != growing.bin_set or not addresses.is_known:
                continue
            for k in range(addresses.holes.size()):
                hole = addresses.holes[k]
                start = self.pool.chunks[hole].prev
                # Only the block right before: upstream does not look further back (EX-13b).
                if start == NO_CHUNK or self.pool.chunks[start].state != FREE:
                    start = hole
                if is_run_of(self.pool, start, growing.size):
                    growing.start = start
                    growing.ptr = self.pool.chunks[start].ptr
                    return

    cdef int reserve_for(self, Growing* growing) noexcept nogil:
        """Reserves addresses for a range (PyTorch's behaviour, 11.2). 0: they would be too few for the request. -1:
        that failed."""
        cdef uint64_t slot = self.slot_of(growing), nbytes = 0
        cdef AddressRange* range
        cdef int result
        self.device.guard.pause()
        result = self.size_range(&slot, &nbytes)
        self.device.guard.go_on()
        if result < 0:
            return -1
        # 2.15 gives such a range back at once (V-5); up to 2.14 it is mapped, found too small, and stays.
        if self.checks_range and nbytes < growing.size and not (self.strict and nbytes):
            return 0
        range = self.ranges.open()
        if range == NULL:
            return self.device.fail_for_memory()
        range.slot, range.nbytes, range.bin_set = slot, nbytes, growing.bin_set
        # Before the device is asked: a range that comes must have its hole on the list.
        if not self.make_room(range):
            self.remove(range)
            return self.device.fail_for_memory()
        acquire_lock(self.lock[0])
        range.stream = range.asked_of = self.pool.bin_sets[growing.bin_set].lane.stream
        self.lock.release()     # the lane stays: `lanes.kept` keeps its record from others
        if self.checks_range and nbytes < growing.size:
            self.device.guard.pause()
            result = self.reserve_in_vain(range)    # as PyTorch does; but not nothing, which no driver takes
            self.device.guard.go_on()
            return result
        if self.reserve(range) < 0:
            return -1
        growing.start = range.holes[0]      # unmapped: only this thread touches it
        growing.ptr = range.ptr
        return 1

    cdef int size_range(self, uint64_t* slot, uint64_t* nbytes) noexcept with gil:
        """The bytes of a new range, and of its slots, for a device that may ask for larger ones."""
        cdef object sub_allocator = self.source.sub_allocator
        try:
            # Read for each reservation, as upstream reads it: the total may have changed (EX-21b).
            _free, total = checked_memory_info(sub_allocator.memory_info(), sub_allocator)
            # PyTorch's chunks are 2 and 20 MiB whatever the driver's granularity is.
            slot[0] = round_up_to(slot[0], 1 if self.strict else sub_allocator.mapping_granularity)
            nbytes[0] = round_up_to(self.bytes_to_reserve(total), slot[0])
        except BaseException as error:
            return self.device.fail(error)
        return 0

    cdef uint64_t bytes_to_reserve(self, uint64_t total):
        """As the setting wants it, at most the device's memory and an eighth more."""
        cdef uint64_t most = total + total // 8
        if self.wanted_reserve is None:
            return most
        wanted = self.wanted_reserve
        return int(min(wanted * total if isinstance(wanted, float) else wanted, most))

    cdef int reserve_in_vain(self, AddressRange* range) noexcept with gil:
        """Reserves a range and gives it back, as PyTorch does where it is too small. It never gets into the pool."""
        cdef Faults faults
        try:
            faults = Faults()
        except MemoryError as error:
            self.remove(range)
            return self.device.fail(error)
        self.device.add_calls(1)
        if self.device.call(RESERVE, 0, range.nbytes, &range.ptr) < 0:
            self.remove(range)
            return -1
        self.ranges.sort_last()
        self.unreserve(range, faults)
        try:
            return raise_faults(self.source.sub_allocator, faults)
        except BaseException as error:
            return self.device.fail(error)

    cdef int take_in(self, AddressRange* range) noexcept nogil:
        self.ranges.sort_last()
        return AddressRanges.take_in(self, range)

    cdef AddressRange* range_of(self, uint64_t ptr) noexcept nogil:
        """The range that an address lies in."""
        cdef size_t low = 0, high = self.ranges.size(), middle
        while high - low > 1:
            middle = (low + high) // 2
            if self.ranges.at(middle).ptr <= ptr:
                low = middle
            else:
                high = middle
        return self.ranges.at(low)

    cdef int map_front(self, ChunkHandle handle, uint64_t nbytes) noexcept nogil:
        """Maps memory to the first bytes of an unmapped chunk, rounded up to whole slots. 0: there is none. -1: that
        failed."""
        cdef AddressRange* range = self.range_of(self.part_of(handle).ptr)
        cdef int64_t slots, made
        cdef int result
        nbytes = round_up_to(nbytes, range.slot)
        slots = nbytes // range.slot
        if not self.make_room(range):
            return self.device.fail_for_memory()
        made = self.create(slots, range.slot)       # meanwhile `handle` stays as it is: UNMAPPED, and as large
        # What was made goes back below: a request that cannot have all of a step gets none of it (case 66d).
        result = -1 if made < 0 else 0 if made < slots else self.map_made(range, handle, nbytes)
        # What is in a slot by now is no longer among the fresh pages, so this takes back only what failed.
        self.release_fresh()
        return result

    cdef int map_made(self, AddressRange* range, ChunkHandle handle, uint64_t nbytes) noexcept nogil:
        cdef cbool begun
        acquire_lock(self.lock[0])
        begun = begin_mapping(self.pool, handle, nbytes)    # unmapped still: nobody else maps
        if begun:
            self.note_unmapped(range, self.pool.chunks[handle].next)
        self.lock.release()
        if not begun:
            return self.device.fail_for_memory()
        return -1 if self.map_fresh(range, handle) < 0 else 1

    # -- giving back --------------------------------------------------------------------------------------------------

    cdef uint64_t give_back(self, vector[FreePart]& parts, Faults faults) noexcept:
        """Unmaps the whole slots inside of free chunks (PyTorch's behaviour, 11.7). Returns the bytes; what the
        sub-allocator fails with goes to `faults`."""
        cdef uint64_t released = 0
        cdef FreePart part
        for part in parts:
            released += self.unmap_part(self.range_of(part.ptr), &part, faults)
        return released

    cdef uint64_t unmap_part(self, AddressRange* range, FreePart* part, Faults faults) noexcept:
        cdef uint64_t gone
        cdef ChunkHandle handle = self.begin_to_unmap(range, part)
        if handle >= NO_HOST_MEMORY:
            return 0
        # It is LEAVING while the stream is waited for: so other threads queue no new work that uses it.
        if not self.wait_for(range, faults):
            # From here on the chunk is free again, and other threads may take it.
            acquire_lock(self.lock[0])
            # Its bin may need memory of the host. Without that the chunk stays LEAVING, and is waited for another time.
            range.must_wait = not cancel_unmapping(self.pool, handle)
            range.some_stuck = range.some_stuck or range.must_wait
            self.lock.release()
            return 0
        gone = self.unmap_leaving(range, handle, self.strict, faults)
        self.drop_if_unused(range, faults)
        return gone

    cdef ChunkHandle begin_to_unmap(self, AddressRange* range, FreePart* part) noexcept:
        """Lets the whole slots inside of a free chunk leave. NO_CHUNK: there are none, or another thread has taken it.
        NO_HOST_MEMORY: there is none for the records."""
        cdef uint64_t start = range.ptr + round_up_to(part.ptr - range.ptr, range.slot)
        cdef uint64_t end = range.ptr + (part.ptr + part.size - range.ptr) // range.slot * range.slot
        cdef Chunk* chunk
        cdef ChunkHandle handle = NO_CHUNK
        # Without a whole slot inside upstream makes no call, and does not even wait (EX-11).
        if start >= end or not self.make_room(range):
            return NO_CHUNK
        acquire_lock(self.lock[0])
        chunk = &self.pool.chunks[part.handle]      # free when it was listed, under an earlier lock
        if chunk.state == FREE and chunk.ptr == part.ptr and chunk.size == part.size:
            handle = begin_unmapping(self.pool, part.handle, start, end)
        self.lock.release()
        return handle

    cdef uint64_t try_stuck_again(self, Faults faults) noexcept:
        """Tries again to unmap, to release and to unreserve what the sub-allocator failed with. Returns the bytes that
        went."""
        cdef AddressRange* range
        cdef size_t i = self.ranges.size()
        cdef uint64_t released = 0
        cdef bint was_stuck
        self.try_unreleased_again(faults)
        while i > 0:
            i -= 1
            range = self.ranges.at(i)
            was_stuck = range.some_stuck
            if was_stuck and range.is_known and self.make_room(range):
                # A stream that could not be waited for may still use it.
                if not range.must_wait or self.wait_for(range, faults):
                    range.must_wait = False
                    released += self.unmap_again(range, self.strict, faults)
            if was_stuck or not range.is_known:
                self.drop_if_unused(range, faults)
        return released

    cdef void drop_unused(self, Faults faults) noexcept:
        """Gives the addresses of ranges back that have never held memory, which PyTorch keeps."""
        cdef size_t i = self.ranges.size()
        while i > 0:
            i -= 1
            self.drop_if_unused(self.ranges.at(i), faults)

    cdef void drop_if_unused(self, AddressRange* range, Faults faults) noexcept:
        """Gives the addresses of a range back if it is one unmapped chunk, or the pool has forgotten it."""
        acquire_lock(self.lock[0])      # the pool forgets it under the lock: nobody finds it when its addresses go
        if range.is_known and range.holes.size() == 1 and self.pool.chunks[range.holes[0]].size == range.nbytes:
            remove_range(self.pool, range.ptr, range.nbytes)
            range.is_known = False
        self.lock.release()
        if not range.is_known:
            self.unreserve(range, faults)

    cdef void close(self, Faults faults) noexcept:
        cdef AddressRange* range
        cdef size_t i = 0, before
        acquire_lock(self.lock[0])
        self.forget_ranges()
        self.lock.release()     # from here on nobody is handed any of it, and a free finds no chunk
        self.try_unreleased_again(faults)
        while i < self.ranges.size():
            before = self.ranges.size()
            range = self.ranges.at(i)
            if self.count_mapped(range):
                self.wait_for(range, faults)    # even if the device fails, its memory is given back
                self.empty(range, faults)
            self.unreserve(range, faults)
            # One whose addresses went is taken off the list, and another one is in its place.
            i += self.ranges.size() == before

    # -- sleep --------------------------------------------------------------------------------------------------------

    cdef cbool is_asleep(self, AddressRange* range) noexcept nogil:
        return range.is_known and is_set_asleep(self, range.bin_set)

    cdef int list_mapped(self, TagTransition transition) except -1:
        cdef vector[AddressRange*] found
        cdef AddressRange* addresses
        cdef MappedRun run
        cdef size_t slot
        list_ranges(self, transition.tag.number, found)
        for addresses in found:
            slot = 0
            while slot < addresses.pages.size():
                run = MappedRun()
                run.ptr = addresses.ptr + slot * addresses.slot
                run.is_mapped = True
                while slot < addresses.pages.size() and addresses.pages[slot].get() != NULL:
                    run.pages.push_back(addresses.pages[slot])
                    slot += 1
                run.nbytes = run.pages.size() * addresses.slot
                if run.nbytes:
                    transition.add(run)
                slot += 1
        return 0

    cdef int list_needed(self, TagTransition transition) except -1:
        cdef vector[AddressRange*] found
        cdef AddressRange* addresses
        cdef MappedRun run
        cdef Span span
        cdef vector[Span] spans
        cdef cbool listed
        list_ranges(self, transition.tag.number, found)
        for addresses in found:
            spans.clear()
            # The slots are listed at one moment.
            acquire_lock(self.lock[0])
            listed = self.list_slots(addresses, False, spans)
            self.lock.release()
            if not listed:
                raise out_of_host_memory()
            # What is freed after the lock gets memory all the same: it is free memory when the tag is awake.
            for span in spans:
                run = MappedRun()
                run.ptr, run.nbytes = span.ptr, span.nbytes
                while run.pages.size() * addresses.slot < span.nbytes:
                    run.pages.push_back(new_page(addresses.slot))
                    if run.pages.back().get() == NULL:
                        raise out_of_host_memory()
                transition.add(run)
        return 0

    cdef cbool list_slots(self, AddressRange* range, cbool live_only, vector[Span]& out) noexcept nogil:
        """The slots of a range that chunks lie in, or live ones, where they lie end to end together. False: the host
        has no memory for the list. Needs the lock."""
        cdef ChunkHandle handle = self.pool.regions[range.ptr + range.nbytes].first
        cdef Chunk* chunk
        cdef uint64_t start, end
        while handle != NO_CHUNK:
            chunk = &self.pool.chunks[handle]
            handle = chunk.next
            # What could not be unmapped before the tag fell asleep is not mapped anew: nothing lives in it.
            if chunk.state in (UNMAPPED, LEAVING) or (live_only and chunk.state == FREE):
                continue
            start = range.ptr + (chunk.ptr - range.ptr) // range.slot * range.slot
            end = range.ptr + round_up_to(chunk.ptr + chunk.size - range.ptr, range.slot)
            # Two chunks may share a slot, which is mapped once.
            if out.size() and out.back().ptr + out.back().nbytes >= start:
                out.back().nbytes = max(out.back().ptr + out.back().nbytes, end) - out.back().ptr
            elif not try_push_back(out, Span(start, end - start)):
                return False
        return True

    cdef void note_runs(self, TagTransition transition) noexcept:
        cdef MappedRun run
        cdef AddressRange* addresses
        cdef size_t i, first
        for run in transition.runs:
            if run.is_block:
                continue
            addresses = self.range_of(run.ptr)
            first = (run.ptr - addresses.ptr) // addresses.slot
            for i in range(run.pages.size()):
                addresses.pages[first + i] = run.pages[i] if run.pages[i].get().is_mapped else PageRef()

    cdef void shrink(self, uint64_t tag) noexcept:
        cdef AddressRange* addresses
        cdef ChunkHandle handle
        cdef FreePart part
        cdef vector[FreePart] parts
        cdef size_t i
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if not belongs_to(self, addresses, tag):
                continue
            parts.clear()
            acquire_lock(self.lock[0])
            handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
            while handle != NO_CHUNK:
                part = FreePart(handle, self.pool.chunks[handle].ptr, self.pool.chunks[handle].size)
                if self.pool.chunks[handle].state == FREE and not try_push_back(parts, part):
                    break
                handle = self.pool.chunks[handle].next
            self.lock.release()     # a free may join one meanwhile: `begin_to_unmap` looks again
            for part in parts:
                handle = self.begin_to_unmap(addresses, &part)
                if handle < NO_HOST_MEMORY:
                    self.settle(addresses, handle)      # its slots have no pages any more
            handle = self.leaving_from(addresses, addresses.ptr)
            while handle != NO_CHUNK and self.make_room(addresses):
                part = self.part_of(handle)
                self.settle(addresses, handle)
                handle = self.leaving_from(addresses, part.ptr + part.size)

    cdef uint64_t bytes_held(self) noexcept:
        cdef uint64_t held = 0
        cdef size_t i
        for i in range(self.ranges.size()):
            if self.is_asleep(self.ranges.at(i)):
                held += self.count_mapped(self.ranges.at(i)) * self.ranges.at(i).slot
        return held

    cdef uint64_t bytes_asleep(self) noexcept:
        cdef AddressRange* addresses
        cdef Span span
        cdef vector[Span] spans
        cdef uint64_t found = 0
        cdef size_t i
        self.device.guard.begin_reading(self.lock[0])      # another thread may map
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            spans.clear()
            if addresses.is_known and self.pool.bin_sets[addresses.bin_set].asleep:
                self.list_slots(addresses, True, spans)
            for span in spans:
                found += span.nbytes
        self.device.guard.end_reading(self.lock[0])
        return found

    # -- what can be seen ---------------------------------------------------------------------------------------------

    cdef str against_pieces(self):
        return "stitch=True" if self.is_on else "settings='expandable_segments:True'"

    cdef int check_settings(self, settings) except -1:
        return check_mapping(self.source.sub_allocator) if settings.expandable_segments else 0

    cdef bint refuses(self, uint64_t rounded, uint64_t total):
        """Whether a range has too few addresses for a request that the device could hold."""
        return self.is_on and self.checks_range and self.bytes_to_reserve(total) < rounded <= total

    cdef dict stats(self):
        cdef AddressRange* addresses
        cdef Page* page
        cdef uint64_t reservations = 0, reserved = 0, bytes = 0, pages = 0, lost = 0, lost_bytes = 0, leaving
        cdef size_t i
        self.device.guard.begin_reading(self.lock[0])      # another thread may map
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            reservations += not addresses.is_gone
            reserved += 0 if addresses.is_gone else addresses.nbytes
            pages += self.count_mapped(addresses)
            bytes += self.count_mapped(addresses) * addresses.slot
            leaving = self.lost_in(addresses)
            lost += leaving
            lost_bytes += leaving * addresses.slot
        page = self.unreleased.get()
        while page != NULL:
            pages += 1
            bytes += page.nbytes
            lost_bytes += page.nbytes
            page = page.next.get()
        self.device.guard.end_reading(self.lock[0])
        return {"reservations": reservations, "reserved_address_bytes": reserved, "pages": pages,
                "page_bytes": bytes, "lost_slots": lost, "lost_bytes": lost_bytes}

    cdef uint64_t lost_in(self, AddressRange* range) noexcept nogil:
        """The slots of a range that could not be unmapped; while a thread maps or unmaps, 0. Needs the lock."""
        cdef uint64_t lost = 0
        cdef ChunkHandle handle
        if self.mapper:
            return 0
        if not range.is_known or self.pool.bin_sets[range.bin_set].asleep:
            return self.count_mapped(range)
        handle = self.pool.regions[range.ptr + range.nbytes].first
        while handle != NO_CHUNK:
            if self.pool.chunks[handle].state == LEAVING:
                lost += self.pool.chunks[handle].size // range.slot
            handle = self.pool.chunks[handle].next
        return lost
