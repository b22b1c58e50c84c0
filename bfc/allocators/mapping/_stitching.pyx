"""Stitching: where no free chunk is large enough, free pages that lie apart get a row of addresses of their own.

Each stream has two ranges of addresses, one for small chunks and one for large ones, which are filled with pages from
the front. A large request that no chunk fits takes pages of its stream that are free, and more of the device where they
are too few: it is served at the end of the range if that needs no more of them, or else through a *view* (_pages.pyx).
At the limit it takes free pages of other streams, and waits for what these have queued.

The transactions are those of _address_ranges.pyx. What the mapper has taken is `held`, as chunks that are LEAVING:
nobody else uses it meanwhile. While a tag sleeps, the records of its pages stay: which slots and views name which page.
Only the device's memory for them is gone. Views that nothing lives in are forgotten beforehand; pages that become free
meanwhile are forgotten before their tag wakes.
"""

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF, Py_XDECREF
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.algorithm cimport sort
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_assign, try_make_room, try_push_back, try_reserve
from bfc._core cimport (
    FREE, LARGE, LEAVING, MAPPED_ELSEWHERE, NO_CHUNK, NO_LANE, NO_PAGE, NO_STREAM, UNMAPPED, ChunkHandle, Lane,
    PageBitmap, PlanServer,
)
from bfc.drivers.cuda._driver cimport CUresult, failure
from bfc.drivers.cuda._device cimport bfc_native_source
from bfc.allocators._changes cimport (
    begin_mapping, bytes_behind, cancel_mapping, cut_absent, forget_absent, join_absent, remove_range,
)
from bfc.allocators._pages cimport KEPT, LIVE, NO_SLOT, NO_VIEW, RETIRED, PageRecord, Pages, Run, Slot, StitchedView
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._reading cimport fault_in_pages
from bfc.allocators.mapping._address_ranges cimport (
    RESERVE, AddressRange, AddressRanges, Calls, Faults, MappedRun, Page, PageRef, Place, Retired, RetiredRef,
    PyThreadState, TagTransition, new_retired,
)
from bfc.allocators.mapping._sleep cimport give_page_up, take_over_transitions

from bfc.errors import SettingsError, SubAllocatorError, out_of_host_memory
from bfc.units import format_bytes

cdef extern from "source.h":
    int BFC_NOT_REACHED
cdef extern from "page_bitmap.hpp":
    pass
cdef extern from "starts.hpp":
    pass
cdef extern from "plan_server.hpp":
    pass

cdef enum:
    ANY_LENGTH = 0xFFFFFFFF             # of a run


cdef uint64_t stream_to_ask(const Lane* lane) noexcept nogil:
    """The stream to ask whether work in a lane is done. A handle that names another stream in each thread cannot be
    asked from other threads; then it is stream 0, which runs after all of these streams."""
    return 0 if lane.thread else lane.stream


cdef int add_pages(TagTransition transition, MappedRun run, set seen) except -1:
    """Adds a run to a transition, and those of its pages that are new to it."""
    cdef size_t i
    transition.runs.append(run)
    for i in range(run.pages.size()):
        if <size_t>run.pages[i].get() not in seen:
            seen.add(<size_t>run.pages[i].get())
            transition.pages.push_back(run.pages[i])
    return 0


@cython.final
@cython.no_gc_clear
cdef class Stitching(AddressRanges):
    """What is done for a request that no free chunk fits. It never calls the allocator."""

    def __cinit__(self):
        self.pages = Pages()
        self.left = []

    def __dealloc__(self):
        # NULL where the host had no memory for what AddressRanges holds: then nothing of this class was made
        if <void*>self.pages != NULL and self.pages is not None:
            self.pages.leave()
        self.drop_fences()

    cdef int set_up(self, uint64_t limit, uint64_t page_size, double headroom) except -1:
        self.limit = self.highest_limit = limit
        self.is_on = True
        self.page_size = page_size
        self.headroom = headroom
        self.pages.watch(self.pool, page_size)
        return 0

    cdef int page_shift(self) noexcept:
        """The exponent of two that the page size is."""
        cdef int shift = 0
        while <uint64_t>1 << shift < self.page_size:
            shift += 1
        return shift

    cdef uint64_t count_calls(self) noexcept nogil:
        """The calls made so far, without waits."""
        cdef Calls* calls = &self.calls
        return calls.creates + calls.maps + calls.set_accesses + calls.unmaps + calls.releases

    cdef void note_request(self, uint64_t calls_before) noexcept nogil:
        self.calls.most = max(self.calls.most, self.count_calls() - calls_before)

    # -- which page is in which slot ----------------------------------------------------------------------------------

    cdef cbool open_table(self, AddressRange* addresses) noexcept nogil:
        cdef cbool opened = self.pages.open_bitmap(addresses.bin_set, addresses.ptr)
        addresses.bitmap = self.pool.bin_sets[addresses.bin_set].bitmap
        if opened and addresses.plan != NULL:       # whose places know no order: there is room for all of it at once
            opened = addresses.bitmap.make_room(addresses.ptr + addresses.nbytes)
            if not opened:
                self.pages.close_bitmap(addresses.bin_set)
                addresses.bitmap = NULL
        return opened

    cdef void close_table(self, AddressRange* addresses) noexcept nogil:
        self.pages.close_bitmap(addresses.bin_set)
        addresses.bitmap = NULL

    cdef uint64_t slots_of(self, AddressRange* addresses) noexcept nogil:
        return addresses.bitmap.slots()

    cdef uint32_t page_in(self, AddressRange* addresses, uint64_t ptr) noexcept nogil:
        """The page in a slot, or NO_PAGE. It needs no lock: only the mapper changes the table, and opens and closes it.
        """
        return addresses.bitmap.page_at((ptr - addresses.ptr) // self.page_size)

    cdef cbool has_page(self, AddressRange* addresses, uint64_t ptr) noexcept nogil:
        return self.page_in(addresses, ptr) != NO_PAGE

    cdef cbool may_be_unmapped(self, AddressRange* addresses, uint64_t ptr) noexcept nogil:
        """Pages that views still have must stay."""
        cdef uint32_t page = self.page_in(addresses, ptr)
        return page != NO_PAGE and self.pages.records[page].views == 0

    cdef void note_unmapped(self, AddressRange* addresses, ChunkHandle added) noexcept nogil:
        cdef ChunkHandle last = self.pool.chunk_at_end(&self.pool.regions[addresses.ptr + addresses.nbytes])
        addresses.tail = last if self.pool.chunks[last].state == UNMAPPED else <ChunkHandle>NO_CHUNK

    cdef uint64_t page_bytes_at(self, uint64_t ptr) noexcept:
        return self.page_size

    cdef int enter_pages(self, AddressRange* addresses, uint64_t ptr, vector[PageRef]& pages) noexcept nogil:
        cdef PageBitmap* bitmap
        cdef uint32_t number = NO_PAGE
        cdef uint64_t first
        cdef size_t entered = 0, count = pages.size(), known = max(self.made.size(), self.pages.count + count)
        cdef cbool done
        if not try_make_room(self.made, known):
            return self.fail_for_memory()
        self.made.resize(known)
        # All of them are entered, or none: a snapshot of another thread counts what it finds.
        acquire_lock(self.lock[0])
        bitmap = self.pool.bin_sets[addresses.bin_set].bitmap
        first = bitmap.slot_at(ptr)
        while entered < count:
            number = self.pages.enter_page(addresses.bin_set, <uint32_t>(first + entered))
            if number == NO_PAGE:
                break
            self.made[number] = pages[entered]
            entered += 1
        done = entered == count
        while entered > 0 and not done:
            entered -= 1
            number = bitmap.page_at(first + entered)
            self.pages.forget_page(number)
            self.made[number].reset()
        self.lock.release()
        return 0 if done else self.fail_for_memory()

    cdef cbool pages_of(self, vector[uint32_t]& numbers, vector[PageRef]& found) noexcept nogil:
        """The pages of these numbers. False: the host has no memory for that."""
        cdef size_t i
        if not try_reserve(found, numbers.size()):
            return False
        for i in range(numbers.size()):
            found.push_back(self.made[numbers[i]])
        return True

    cdef void drop_slot(self, AddressRange* addresses, uint64_t ptr, Faults faults) noexcept nogil:
        cdef uint64_t slot = (ptr - addresses.ptr) // self.page_size
        cdef uint32_t page = self.page_in(addresses, ptr)
        cdef cbool is_mapped
        if page == NO_PAGE:
            return
        # The slot and the page's record change together, since `check` compares the two.
        acquire_lock(self.lock[0])
        self.pool.bin_sets[addresses.bin_set].bitmap.set_page(slot, NO_PAGE)
        self.pages.records[page].drop(self.pages.records[page].in_set(addresses.bin_set))
        is_mapped = self.pages.records[page].is_mapped()
        self.lock.release()
        if not is_mapped:       # in no slot and no view: nobody else finds it
            self.drop_page(page, faults)

    cdef void drop_page(self, uint32_t number, Faults faults) noexcept nogil:
        """Releases a page that has been unmapped. Of a tag that sleeps it went before; if it is still mapped, it is
        released when its tag wakes."""
        cdef PageRef page = self.made[number]   # in `leaving` during the call, for a child that is forked there
        self.made[number].reset()
        # From here on the number may be given to another page.
        acquire_lock(self.lock[0])
        self.pages.forget_page(number)
        self.lock.release()
        if self.without_calls and (not page.get().is_made or page.get().is_mapped):
            return
        self.calls.releases += 1
        self.is_refused = False
        self.release_page(page, faults)

    cdef cbool unmap_elsewhere(self, AddressRange* addresses, uint64_t ptr, uint64_t nbytes,
                               Faults faults) noexcept nogil:
        cdef uint64_t at = ptr
        cdef cbool only_here = True
        while at < ptr + nbytes:
            only_here = self.unmap_further_slots(addresses.bin_set, self.page_in(addresses, at), faults) and only_here
            at += self.page_size
        if not only_here and faults is not None:
            with gil:
                faults.add(SubAllocatorError(f"pages at {ptr:#x} are mapped elsewhere, too"))
        return only_here

    cdef cbool unmap_further_slots(self, uint32_t bin_set, uint32_t page, Faults faults) noexcept nogil:
        """Unmaps a page from the slots of other ranges. False: it is still mapped in some."""
        cdef uint32_t k = 0, count = 1
        cdef Slot slot
        while k < count:
            acquire_lock(self.lock[0])
            count = <uint32_t>self.pages.records[page].slots.size()
            if k < count:
                slot = self.pages.records[page].slots[k]
            self.lock.release()     # the page is LEAVING, so nobody moves it between two of its slots
            if k < count and (slot.set == bin_set or not self.unmap_slot(page, slot, faults)):
                k += 1
        return count == 1

    cdef cbool unmap_slot(self, uint32_t page, Slot slot, Faults faults) noexcept nogil:
        """Takes one of its further slots from a page. False: that failed."""
        cdef Run run = Run(slot.set, slot.number, 1)
        cdef AddressRange* addresses
        cdef size_t i
        if self.call_unmap(self.page_ptr(slot.set, slot.number), self.page_size) < 0:
            self.drop_error(faults, False)
            return False
        # The slot is MAPPED_ELSEWHERE until here, so no thread used it in the call.
        acquire_lock(self.lock[0])
        self.pages.records[page].drop(self.pages.records[page].in_set(slot.set))
        self.pool.bin_sets[slot.set].bitmap.set_page(slot.number, NO_PAGE)
        forget_absent(self.pool, self.pages.chunk_of(&run))
        self.touched.nbytes = 0
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if addresses.bin_set == slot.set and addresses.is_known:
                self.note_unmapped(addresses, NO_CHUNK)
        self.lock.release()
        return True

    cdef uint64_t page_ptr(self, uint32_t bin_set, uint64_t slot) noexcept nogil:
        # A lane that another thread opens moves the sets of bins.
        acquire_lock(self.lock[0])
        cdef uint64_t ptr = self.pool.bin_sets[bin_set].bitmap.address_of(slot)
        self.lock.release()
        return ptr

    cdef int call_unmap(self, uint64_t ptr, uint64_t nbytes) noexcept nogil:
        return 0 if self.without_calls else AddressRanges.call_unmap(self, ptr, nbytes)

    cdef size_t count_what_is_mapped(self) noexcept nogil:
        return AddressRanges.count_what_is_mapped(self) + self.retired.size() + self.left_count

    # -- a request ----------------------------------------------------------------------------------------------------

    cdef int provide(self, uint32_t bin_set, Wanted* wanted) noexcept nogil:
        """Brings memory for a request nearer, by one step, and may serve it. 0: there is no step that would."""
        cdef AddressRange* addresses = self.range_for(bin_set)
        if self.sweep(None, False, False) < 0 or (self.has_failed() and self.try_again() < 0):
            return -1
        if addresses == NULL:
            addresses = self.open_range(bin_set)
        if addresses == NULL:
            return -1
        if addresses.bin_set & 1 == LARGE:
            return self.provide_large(addresses, wanted)
        return self.provide_small(addresses)

    cdef cbool has_failed(self) noexcept nogil:
        """Whether the sub-allocator failed to unmap or to release something that is to be tried again."""
        cdef AddressRange* addresses
        cdef size_t i
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if not addresses.is_known or (addresses.some_stuck and not self.is_set_asleep(addresses.bin_set)):
                return True
        for i in range(self.retired.size()):
            if self.retired[i].get().is_stuck:
                return True
        return self.unreleased.get() != NULL

    cdef int try_again(self) noexcept nogil:
        cdef int result
        self.guard.pause()
        result = self.try_again_with_gil()
        self.guard.go_on()
        return result

    cdef int try_again_with_gil(self) noexcept with gil:
        """Unmaps and releases what the sub-allocator failed to take back before."""
        cdef Faults faults
        cdef AddressRange* addresses
        cdef dict idle
        cdef size_t i
        try:
            faults, idle = Faults(), {}
        except MemoryError as error:
            return self.fail(error)
        self.try_unreleased_again(faults)
        self.unreserve_again(faults)
        self.sweep(faults, False, True)
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if not addresses.is_known or not addresses.some_stuck or self.is_set_asleep(addresses.bin_set):
                continue
            if self.is_idle(addresses.asked_of, False, idle, faults):
                self.unmap_again(addresses, False, faults)
        return 0 if faults.interrupt is None else self.fail(faults.interrupt)

    cdef void unreserve_again(self, Faults faults) noexcept:
        """Tries again to give back the addresses of ranges that the pool could not take in."""
        cdef AddressRange* addresses
        cdef size_t i = self.ranges.size()
        while i > 0:
            i -= 1
            addresses = self.ranges.at(i)
            if not addresses.is_known:
                self.unreserve(addresses, faults)

    cdef int provide_small(self, AddressRange* addresses) noexcept nogil:
        """One page: a free one of the stream's large chunks, a new one, or one of another stream."""
        cdef int64_t got = self.move_pages_to(addresses, 1, False)
        if got == 0 and self.room():
            got = self.grow(addresses, 1, NO_CHUNK)
        if got == 0:
            got = self.move_pages_to(addresses, 1, True)
        return self.trim_other_tags(addresses, 1) if got == 0 else -1 if got < 0 else 1

    cdef int provide_large(self, AddressRange* addresses, Wanted* wanted) noexcept nogil:
        cdef uint64_t pages = self.pages.pages_for(wanted.rounded), room = self.room(), others, own, missing, first
        cdef uint64_t missing_at_end = self.missing_at_end(addresses, wanted.rounded)
        cdef int64_t got = 0
        acquire_lock(self.lock[0])
        own = self.pages.count_free(addresses.bin_set) + self.pages.count_free(addresses.bin_set - 1)
        own += self.pages.count_lendable(addresses.bin_set)
        self.lock.release()     # fewer may be free by the time they are held: then the request is looked at again
        missing = pages - own if own < pages else 0
        first = min(room, self.room_before_others(addresses))
        others = self.free_of_others(addresses) if missing > first else 0
        room = min(room, max(first, missing - min(missing, others)))
        if missing_at_end <= room and (missing_at_end <= missing
                                       or self.is_within_headroom(missing_at_end, wanted.rounded)):
            got = self.grow(addresses, missing_at_end, NO_CHUNK)
            return -1 if got < 0 else got > 0
        if missing == 0:
            return self.stitch(addresses, pages, wanted)
        if missing > room + others:
            return self.trim_other_tags(addresses, missing - room - others)
        if room:
            got = self.grow(addresses, min(missing, room), NO_CHUNK)
        if got == 0:
            got = self.move_pages_to(addresses, missing, True)
        if got == 0:
            room = self.room()      # perhaps more than what may be made before others are asked
            got = self.grow(addresses, min(missing, room), NO_CHUNK) if room else 0
        return -1 if got < 0 else got > 0

    cdef bint extend(self, uint64_t address, uint64_t rounded) except -1:
        cdef uint64_t calls
        if not self.enter(0):
            return False
        calls = self.count_calls()
        try:
            return self.grow_behind(address, rounded)
        finally:
            self.note_request(calls)
            self.leave()

    cdef bint grow_behind(self, uint64_t address, uint64_t rounded) except -1:
        """Makes pages for a chunk that is to be as large as `rounded`, and maps them behind it. Whether it has them."""
        cdef ChunkHandle handle, behind = NO_CHUNK
        cdef uint32_t bin_set = 0
        cdef uint64_t missing = 0
        # Chunks are split and joined by other threads, so one look has to see all of its neighbours.
        acquire_lock(self.lock[0])
        handle = self.pool.handle_of(address)
        if handle != NO_CHUNK and self.pool.bin_sets[self.pool.chunks[handle].bin_set].asleep:
            handle = NO_CHUNK
        if handle != NO_CHUNK:
            bin_set = self.pool.chunks[handle].bin_set
            behind = self.pool.chunks[handle].next
            missing = rounded - self.pool.chunks[handle].size - bytes_behind(self.pool, handle)
            if bytes_behind(self.pool, handle):
                behind = self.pool.chunks[behind].next
        if behind != NO_CHUNK and (self.pool.chunks[behind].state != UNMAPPED
                                   or self.pool.chunks[behind].size < missing):
            behind = NO_CHUNK
        self.lock.release()
        missing = self.pages.pages_for(missing)
        if behind == NO_CHUNK or missing > self.room():
            return False
        # `behind` stays UNMAPPED, since only the mapper changes that. What is free in between may be taken, or the
        # allocation be freed: then the new pages are free memory like any other, and `try_extend` looks again.
        cdef int64_t got = self.grow(self.range_for(bin_set), missing, behind)
        self.check(got)
        return got == <int64_t>missing

    cdef uint64_t missing_at_end(self, AddressRange* addresses, uint64_t rounded) noexcept nogil:
        """The pages that a chunk for the request would need at the end of a range, beside what is free there. Another
        thread may take that after the lock. Then the new pages are free memory, and the request is looked at again."""
        cdef uint64_t size = 0, missing
        cdef ChunkHandle last
        acquire_lock(self.lock[0])
        if addresses.tail == NO_CHUNK:
            missing = ~<uint64_t>0
        else:
            last = self.pool.chunks[addresses.tail].prev
            if last != NO_CHUNK and self.pool.chunks[last].state == FREE:
                size = self.pool.chunks[last].size
            missing = self.pages.pages_for(rounded - size) if rounded > size else 1
            if missing * self.page_size > self.pool.chunks[addresses.tail].size:
                missing = ~<uint64_t>0
        self.lock.release()
        return missing

    cdef uint64_t room(self) noexcept nogil:
        """How many pages may still be made; `grow` looks again, since other threads take regions."""
        acquire_lock(self.lock[0])
        cdef uint64_t taken = self.source.taken()
        self.lock.release()     # other threads may take regions meanwhile: `grow` looks again
        return 0 if self.is_refused or taken >= self.limit else (self.limit - taken) // self.page_size

    cdef uint64_t room_before_others(self, AddressRange* addresses) noexcept nogil:
        """How many pages may be made before free ones of other streams are taken. The areas that a plan gives its
        streams are not full at the same time: where they have as many pages as were ever live at once in the recording,
        they take idle ones of each other."""
        # Another thread may end the plan.
        acquire_lock(self.lock[0])
        cdef cbool shares = (self.pages.stream_in_plan(addresses.bin_set) != NO_STREAM
                             and self.pool.plan.streams() > 1)
        self.lock.release()
        return self.room_in_plan() if shares else ~<uint64_t>0

    cdef uint64_t room_in_plan(self) noexcept nogil:
        """How many pages fewer than it needs the plan in use has, with those that its streams have beside it."""
        cdef uint64_t most = 0, there = 0
        # The plan may have ended since it was looked at before, so it is looked for again.
        acquire_lock(self.lock[0])
        if self.pool.plan != NULL:
            most, there = self.pages.most_shared(), self.pages.count_shared()
        self.lock.release()
        return most - there if there < most else 0

    cdef uint64_t free_of_others(self, AddressRange* addresses) noexcept nogil:
        cdef AddressRange* other
        cdef uint64_t count
        cdef size_t i
        acquire_lock(self.lock[0])
        count = self.pages.count_of_others(addresses.bin_set)
        for i in range(self.ranges.size()):
            other = self.ranges.at(i)
            if self.has_same_tag(other, addresses):
                count += self.pages.count_free(other.bin_set)
        self.lock.release()     # fewer may be free by the time they are held, as in `provide_large`
        return count

    cdef cbool has_same_tag(self, AddressRange* other, AddressRange* addresses) noexcept nogil:
        """Whether a range belongs to another stream and to the same tag: what sleeps shares no page with what is awake.
        Needs the lock."""
        cdef uint64_t* theirs = self.pool.bin_sets[other.bin_set].lane.pool
        cdef uint64_t* ours = self.pool.bin_sets[addresses.bin_set].lane.pool
        return (other.is_known and other.bin_set | 1 != addresses.bin_set | 1
                and theirs[0] == ours[0] and theirs[1] == ours[1])

    cdef cbool has_other_tag(self, AddressRange* other, AddressRange* addresses) noexcept nogil:
        """Whether a range belongs to another tag, and is awake. Needs the lock."""
        return (other.is_known and other.bin_set | 1 != addresses.bin_set | 1
                and not self.has_same_tag(other, addresses) and not self.pool.bin_sets[other.bin_set].asleep)

    cdef int trim_other_tags(self, AddressRange* addresses, uint64_t wanted) noexcept nogil:
        """Releases free pages of other tags, which cannot be lent. Returns whether any went."""
        cdef uint64_t there = 0
        cdef AddressRange* other
        cdef size_t i
        cdef int result
        acquire_lock(self.lock[0])
        for i in range(self.ranges.size()):
            other = self.ranges.at(i)
            if self.has_other_tag(other, addresses):
                there += self.pages.count_free(other.bin_set)
        self.lock.release()     # fewer may be free by the time they are held: each range is looked at again
        if there == 0:
            return 0
        self.guard.pause()
        result = self.trim_with_gil(addresses, wanted)
        self.guard.go_on()
        return result

    cdef int trim_with_gil(self, AddressRange* addresses, uint64_t wanted) noexcept with gil:
        cdef uint64_t before = self.pages.count
        cdef Faults faults
        cdef AddressRange* other
        cdef cbool is_other
        cdef size_t i
        try:
            faults = Faults()
            self.check(self.retire_all())
            self.check(self.sweep(faults, True, False))
            for i in range(self.ranges.size()):
                other = self.ranges.at(i)
                acquire_lock(self.lock[0])
                is_other = self.has_other_tag(other, addresses)
                self.lock.release()     # it stays so: only the mapper puts a tag to sleep or wakes it
                if is_other and before - self.pages.count < wanted:
                    self.trim_range(other, wanted - (before - self.pages.count), True, True, faults)
        except BaseException as error:
            return self.fail(error)
        return self.pages.count < before

    cdef cbool is_within_headroom(self, uint64_t pages, uint64_t rounded) noexcept nogil:
        """Whether so many more pages are less above the most that was ever in use than the user allows."""
        cdef uint64_t peak
        if self.headroom == 0:
            return False
        acquire_lock(self.lock[0])
        peak = max(self.pool.counters.peak_bytes_in_use, self.pool.counters.bytes_in_use + rounded)
        self.lock.release()     # an estimate: only how many pages are made depends on it
        return <double>((self.pages.count + pages) * self.page_size) <= (1 + self.headroom) * <double>peak

    # -- new pages ----------------------------------------------------------------------------------------------------

    cdef AddressRange* range_for(self, uint32_t bin_set) noexcept nogil:
        cdef size_t i
        for i in range(self.ranges.size()):
            if self.ranges.at(i).bin_set == bin_set and self.ranges.at(i).is_known:
                return self.ranges.at(i)
        return NULL

    cdef AddressRange* open_range(self, uint32_t bin_set) noexcept nogil:
        """Reserves addresses for as many pages as there can be, as each is mapped into a range once at most; and some
        more, in case that a few cannot be unmapped. NULL: that failed."""
        cdef AddressRange* addresses = self.ranges.open()
        if addresses == NULL:
            self.fail_for_memory()
            return NULL
        addresses.nbytes = (self.highest_limit // self.page_size * 17 // 16 + 16) * self.page_size
        addresses.slot = self.page_size
        addresses.bin_set = bin_set
        # A lane that another thread opens moves the sets of bins.
        acquire_lock(self.lock[0])
        addresses.stream = self.pool.bin_sets[bin_set].lane.stream
        addresses.asked_of = stream_to_ask(&self.pool.bin_sets[bin_set].lane)
        self.lock.release()
        if self.reserve(addresses) < 0:
            return NULL
        return addresses

    cdef int64_t grow(self, AddressRange* addresses, uint64_t wanted, ChunkHandle at) noexcept nogil:
        """Makes pages and maps them into a range: at this unmapped chunk, or else (NO_CHUNK) at its end if they fit
        there. Returns how many: fewer where the sub-allocator has no memory for more."""
        cdef uint64_t set_aside, taken
        cdef int64_t made
        acquire_lock(self.lock[0])
        taken = self.source.taken()     # other threads may have taken regions since `room` was asked
        wanted = min(wanted, (self.limit - taken) // self.page_size if taken < self.limit else <uint64_t>0)
        set_aside = wanted * self.page_size
        self.source.set_aside += set_aside
        self.source.newest_call().nbytes += set_aside   # which a fork in one of these calls must not forget
        self.lock.release()
        made = self.create(wanted, self.page_size)
        if made > 0 and self.map_all_fresh(addresses, made, at) < 0:
            made = -1
        self.release_fresh()
        # From here on other threads may ask for what could not be made.
        acquire_lock(self.lock[0])
        self.source.set_aside -= set_aside
        self.source.newest_call().nbytes -= set_aside
        self.lock.release()
        return made

    cdef int map_all_fresh(self, AddressRange* addresses, int64_t missing, ChunkHandle at) noexcept nogil:
        cdef ChunkHandle handle
        cdef int64_t mapped
        while missing > 0:
            handle = self.begin(addresses, missing, at)
            mapped = -1 if handle == NO_CHUNK else self.map_fresh(addresses, handle)
            if mapped < 0:
                return -1
            missing -= mapped
        return 0

    cdef ChunkHandle begin(self, AddressRange* addresses, uint64_t wanted, ChunkHandle at) noexcept nogil:
        """Takes unmapped addresses, as a chunk of their own: at the end of a range, or else where it has a hole, and
        then perhaps fewer. There are some, since each page is mapped into a range once at most. NO_CHUNK: that failed.
        """
        cdef ChunkHandle handle
        cdef uint64_t nbytes = 0
        cdef cbool begun = False
        # To cut the chunk takes a record, as each split of another thread does.
        acquire_lock(self.lock[0])
        handle = at if at != NO_CHUNK else addresses.tail
        if handle == NO_CHUNK or self.pool.chunks[handle].size < wanted * self.page_size:
            handle = self.first_hole(addresses)
        if handle != NO_CHUNK:
            nbytes = min(wanted * self.page_size, self.pool.chunks[handle].size)
            begun = self.pool.bin_sets[addresses.bin_set].bitmap.make_room(self.pool.chunks[handle].ptr + nbytes)
            begun = begun and begin_mapping(self.pool, handle, nbytes)
            if begun and handle == addresses.tail:
                addresses.tail = self.pool.chunks[handle].next
        self.lock.release()
        if begun:
            return handle
        if handle != NO_CHUNK:
            self.fail_for_memory()
        else:
            self.guard.pause()
            self.keep_no_addresses(addresses)
            self.guard.go_on()
        return NO_CHUNK

    cdef int keep_no_addresses(self, AddressRange* addresses) noexcept with gil:
        try:
            raise SubAllocatorError(f"no addresses are left for stream {addresses.stream}, as some could not be "
                                    f"unmapped: release_free_regions() tries that again")
        except BaseException as error:      # or the host has no memory for the text
            return self.fail(error)

    cdef ChunkHandle first_hole(self, AddressRange* addresses) noexcept nogil:
        """The first unmapped chunk of a range, or NO_CHUNK. Needs the lock."""
        cdef ChunkHandle handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
        while handle != NO_CHUNK and self.pool.chunks[handle].state != UNMAPPED:
            handle = self.pool.chunks[handle].next
        return handle

    # -- pages that change hands --------------------------------------------------------------------------------------

    cdef int64_t move_pages_to(self, AddressRange* addresses, uint64_t wanted, cbool from_others) noexcept nogil:
        """Lets a range use free pages of the stream's large chunks, or `from_others`. Returns how many."""
        cdef uint64_t got
        cdef cbool for_good
        if from_others and self.ask_captures() < 0:
            return -1
        got = self.hold_free(addresses, wanted, from_others)
        if got == 0:
            return 0
        # What is held is LEAVING until the calls are over: other threads can neither take it nor move it, and
        # `let_held_go` makes it free again, page by page, whatever fails.
        acquire_lock(self.lock[0])      # the first page of a range stays there: it may be taken and freed in turn
        for_good = from_others or self.pool.bin_sets[addresses.bin_set].bitmap.slots() == 0
        for_good = for_good and not self.are_planned        # a plan's places need theirs again
        self.lock.release()
        if self.give_held_to(addresses, addresses.stream, NO_CHUNK, from_others, for_good) < 0:
            return -1
        return got

    cdef int ask_captures(self) noexcept nogil:
        """Asks which streams are captured: nobody may wait for one of them, so their pages stay."""
        cdef vector[uint64_t] handles
        cdef uint64_t handle
        cdef AddressRange* other
        cdef uint32_t stream
        cdef size_t i
        cdef int captured
        for i in range(self.ranges.size()):
            other = self.ranges.at(i)
            captured = self.is_captured(other.asked_of)
            if captured < 0:
                return -1
            other.is_captured = captured
        self.orderable.clear()
        acquire_lock(self.lock[0])      # another thread may end the plan
        if self.pool.plan != NULL:
            for stream in range(<uint32_t>self.pool.plan.streams()):
                if self.pool.plan.is_bound(stream):
                    try_push_back(handles, self.pool.plan.handle_of(stream))
        self.lock.release()
        for i in range(handles.size()):
            handle = handles[i]
            captured = self.is_captured(handle)
            if captured < 0 or (not captured and not try_push_back(self.orderable, handle)):
                return -1 if captured < 0 else self.fail_for_memory()
        return 0

    cdef int is_captured(self, uint64_t stream) noexcept nogil:
        """Whether a stream captures a graph, and can be neither waited for nor marked."""
        cdef int captured
        if self.fences.strict or not self.fences.capture_is_marked():
            return 0
        self.guard.pause()
        captured = self.ask_capture(stream)
        self.guard.go_on()
        return captured

    cdef int ask_capture(self, uint64_t stream) noexcept with gil:
        try:
            return self.fences.is_captured(stream)
        except BaseException as error:
            return self.fail(error)

    cdef int give_held_to(self, AddressRange* addresses, uint64_t stream, ChunkHandle at, cbool from_others,
                          cbool for_good) noexcept nogil:
        """Lets a stream use what is held, in a range: at a chunk of it or (NO_CHUNK) wherever there is room."""
        if ((from_others and self.order_after(stream) < 0) or self.map_held(addresses, at) < 0
                or self.activate_held(addresses, for_good) < 0):
            self.let_held_go()
            return -1
        self.note_change()
        return 0

    cdef uint64_t hold_free(self, AddressRange* addresses, uint64_t wanted, cbool from_others) noexcept nogil:
        """Holds free pages one by one: of other streams, those that were here before, then those of the stream that
        has most of them."""
        cdef uint64_t got = 0, most
        cdef AddressRange* other
        cdef AddressRange* best
        cdef size_t i
        acquire_lock(self.lock[0])      # what is found free is held under the same lock: nobody else takes it first
        self.are_planned = False
        if not from_others:
            got = self.pages.hold(addresses.bin_set | 1, wanted, 1, self.held)
            if got == 0:
                got = self.pages.hold_from_plan(self.pages.stream_in_plan(addresses.bin_set), wanted, 1, True,
                                                self.held)
                self.are_planned = got > 0
        for i in range(self.ranges.size()):
            other = self.ranges.at(i)
            if from_others and self.may_give(other, addresses):
                got += self.pages.hold_again(addresses.bin_set, other.bin_set, wanted - got, self.held)
        while from_others and got < wanted:
            most = 0
            best = NULL
            for i in range(self.ranges.size()):
                other = self.ranges.at(i)
                if self.may_give(other, addresses) and self.pages.count_free(other.bin_set) > most:
                    most, best = self.pages.count_free(other.bin_set), other
            if best != NULL:
                if self.pages.hold_highest(best.bin_set, wanted - got, self.held) == 0:
                    break
            elif self.pages.hold_from_plan(self.best_lender(addresses), wanted - got, 1, True, self.held) == 0:
                break
            got = self.held.size()
        self.lock.release()
        return got

    cdef cbool may_give(self, AddressRange* other, AddressRange* addresses) noexcept nogil:
        """Whether a range may take the free pages of another stream's. Needs the lock."""
        return self.has_same_tag(other, addresses) and not other.is_captured

    cdef uint32_t best_lender(self, AddressRange* addresses) noexcept nogil:
        """The plan's stream that has most idle pages for another one, or NO_STREAM. Needs the lock."""
        cdef PlanServer* plan = self.pages.plan_for(addresses.bin_set)
        cdef uint32_t own = self.pages.stream_in_plan(addresses.bin_set), best = NO_STREAM, stream
        cdef uint64_t most = 0, count
        cdef size_t i
        if plan == NULL:
            return NO_STREAM
        for stream in range(<uint32_t>plan.streams()):
            if stream == own or not plan.is_bound(stream):
                continue
            for i in range(self.orderable.size()):
                if self.orderable[i] == plan.handle_of(stream):
                    count = plan.count_lendable(stream)
                    if count > most:
                        most, best = count, stream
        return best

    cdef int order_after(self, uint64_t stream) noexcept nogil:
        """Makes a stream wait for what the streams of the held pages have queued."""
        cdef AddressRange* other
        cdef uint64_t passed = 0, user
        cdef vector[uint64_t] users
        cdef size_t i, k
        cdef int result = 0
        # What is held was free before: the work that used it is queued already, and no more is added meanwhile.
        for k in range(self.held.size()):
            for i in range(self.ranges.size()):
                other = self.ranges.at(i)
                if other.bin_set == self.held[k].set:
                    user = self.user_of(other, self.held[k].first)
                    if user != stream:
                        passed += self.held[k].count * self.page_size
                        if not try_push_back(users, user):
                            return self.fail_for_memory()
        sort(users.begin(), users.end())
        for i in range(users.size()):
            if result == 0 and (i == 0 or users[i] != users[i - 1]):
                self.calls.stream_waits += 1
                self.guard.pause()
                result = self.order(users[i], stream)
                self.guard.go_on()
        if result < 0:
            return -1
        acquire_lock(self.lock[0])      # another thread may have ended the plan
        if self.pool.plan != NULL:
            self.pool.plan.passed += passed
        self.lock.release()
        return 0

    cdef int order(self, uint64_t first, uint64_t then) noexcept with gil:
        try:
            self.source.sub_allocator.order(first, then)
        except BaseException as error:
            return self.fail(error)
        return 0

    cdef uint64_t user_of(self, AddressRange* addresses, uint32_t slot) noexcept nogil:
        """The stream that has used a page in a slot."""
        cdef uint64_t user = addresses.asked_of
        cdef uint32_t stream
        acquire_lock(self.lock[0])
        if addresses.plan != NULL:      # it lends only pages that one stream alone uses
            stream = addresses.plan.owner_of(addresses.region, slot)
            user = addresses.plan.handle_of(stream) if stream != NO_STREAM else user
        self.lock.release()
        return user

    cdef int map_held(self, AddressRange* addresses, ChunkHandle at) noexcept nogil:
        """Maps the held pages into a range, but for those that are mapped there already. They are absent there. `at`:
        into this unmapped chunk first, or (NO_CHUNK) wherever there is room."""
        cdef vector[uint32_t] pages
        cdef uint32_t page
        cdef size_t k
        if not try_reserve(pages, self.held.size()):
            return self.fail_for_memory()
        # What is held stays, but a lane that another thread opens moves the sets of bins.
        acquire_lock(self.lock[0])
        for k in range(self.held.size()):
            page = self.pool.bin_sets[self.held[k].set].bitmap.page_at(self.held[k].first)
            if self.pages.records[page].in_set(addresses.bin_set) == NO_SLOT:
                pages.push_back(page)
        self.lock.release()
        while not pages.empty():
            if self.map_again(addresses, pages, at) < 0:
                return -1
            at = NO_CHUNK
        return 0

    cdef int map_again(self, AddressRange* addresses, vector[uint32_t]& pages, ChunkHandle at) noexcept nogil:
        """Maps as many of these pages as one row of addresses has room for, and takes them off the list."""
        cdef ChunkHandle handle = self.begin(addresses, pages.size(), at)
        cdef Place place
        cdef vector[uint32_t] mapped
        if handle == NO_CHUNK:
            return -1
        acquire_lock(self.lock[0])
        place = Place(self.pool.chunks[handle].ptr, self.pool.chunks[handle].size)
        self.lock.release()     # `begin` has cut the chunk, so nobody else touches it
        self.forget_lost()
        if self.list_first(pages, place.nbytes // self.page_size, mapped) < 0 or self.put_again(
                addresses, handle, place, mapped) < 0:
            acquire_lock(self.lock[0])
            if self.has_lost():
                self.pool.chunks[handle].state = MAPPED_ELSEWHERE     # until it has been unmapped
            else:
                cancel_mapping(self.pool, handle, False)
            self.note_unmapped(addresses, NO_CHUNK)
            self.lock.release()
            if self.has_lost():
                self.keep_stuck(mapped, place.ptr, 0)
            self.touched.nbytes = 0
            return -1
        pages.erase(pages.begin(), pages.begin() + mapped.size())
        return 0

    cdef int list_first(self, vector[uint32_t]& pages, size_t count, vector[uint32_t]& found) noexcept nogil:
        if not try_reserve(found, count):
            return self.fail_for_memory()
        while found.size() < count:
            found.push_back(pages[found.size()])
        return 0

    cdef int put_again(self, AddressRange* addresses, ChunkHandle handle, Place place,
                       vector[uint32_t]& numbers) noexcept nogil:
        cdef vector[PageRef] pages
        cdef cbool done
        if not self.pages_of(numbers, pages):
            return self.fail_for_memory()
        if self.put(place.ptr, pages, place.nbytes) < 0:
            return -1
        acquire_lock(self.lock[0])
        # the pages have a further address, and are still used through the old one: nothing is free yet
        done = self.add_slots(addresses, handle, numbers)
        self.touched.nbytes = 0 if done else self.touched.nbytes
        self.lock.release()
        if not done:
            self.undo_mapping(place.ptr, place.nbytes)
            return self.fail_for_memory()
        return 0

    cdef cbool add_slots(self, AddressRange* addresses, ChunkHandle handle, vector[uint32_t]& pages) noexcept nogil:
        """Enters a further slot of each of these pages. False: the host has no memory for it. Needs the lock."""
        cdef PageBitmap* bitmap = self.pool.bin_sets[addresses.bin_set].bitmap
        cdef size_t slot = bitmap.slot_at(self.pool.chunks[handle].ptr), added = 0
        if not cut_absent(self.pool, handle, self.page_size):
            return False
        while added < pages.size():
            if not self.pages.records[pages[added]].try_add(Slot(addresses.bin_set, <uint32_t>(slot + added))):
                break
            added += 1
        if added < pages.size():
            while added > 0:
                added -= 1
                self.pages.records[pages[added]].slots.pop_back()
            join_absent(self.pool, handle, pages.size() * self.page_size)
            return False
        for added in range(pages.size()):
            bitmap.set_page(slot + added, pages[added])
            bitmap.note_chunk(slot + added, handle)
            handle = self.pool.chunks[handle].next
        return True

    cdef int activate_held(self, AddressRange* addresses, cbool for_good) noexcept nogil:
        """Lets the held pages be used through their slots in a range from now on. `for_good`: views rely on it."""
        cdef Run here, there
        cdef PageRecord* record
        cdef uint32_t to
        cdef cbool done = True
        acquire_lock(self.lock[0])
        # each page is made free at its new address and MAPPED_ELSEWHERE at its old one under one lock: never both
        while self.held.size() and done:
            here = self.held.back()
            record = &self.pages.records[self.pool.bin_sets[here.set].bitmap.page_at(here.first)]
            to = record.in_set(addresses.bin_set)
            there = Run(addresses.bin_set, record.slots[to].number, 1)
            done = self.pages.free_run(&there)
            if done:
                self.pool.chunks[self.pages.chunk_of(&here)].state = MAPPED_ELSEWHERE
                record.active = to
                self.pages.count_moved(here.set, addresses.bin_set)
                record.primary = to if for_good else record.primary
                self.held.pop_back()
        self.lock.release()
        return 0 if done else self.fail_for_memory()

    cdef void let_held_go(self) noexcept nogil:
        # From here on whoever needs memory may take these pages.
        acquire_lock(self.lock[0])
        self.pages.let_go(self.held)
        self.lock.release()

    # -- views --------------------------------------------------------------------------------------------------------

    cdef int stitch(self, AddressRange* addresses, uint64_t pages, Wanted* wanted) noexcept nogil:
        """Maps free pages of a stream end to end, as a view that is kept, and serves the request there. 1, too, if
        another thread has taken some of them meanwhile."""
        cdef uint32_t number = NO_VIEW
        cdef int result = self.retire_for(pages)
        if result == 0:
            result = self.hold_for_view(addresses, pages, &number)
        if result <= 0:
            return -1 if result < 0 else 1
        # the view is in no list of the pool, and its pages are held, until `enter_view` hands it out
        if self.map_view(number, wanted) < 0:
            # The view goes before its pages can be taken: a snapshot looks at both.
            acquire_lock(self.lock[0])
            self.pages.views.forget(number)
            self.lock.release()
            self.let_held_go()
            return -1
        self.calls.stitches += 1
        self.note_change()
        return 1

    cdef int hold_for_view(self, AddressRange* addresses, uint64_t pages, uint32_t* number) noexcept nogil:
        """Holds pages for a view, and opens it. 0: there are too few."""
        cdef uint64_t held
        cdef uint32_t set_of_views
        cdef StitchedView* view
        cdef cbool opened, is_short
        # Free pages are counted and held at once, so that nobody else takes one in between.
        acquire_lock(self.lock[0])
        held = self.pages.hold(addresses.bin_set, pages, ANY_LENGTH, self.held)
        if held < pages:
            held += self.pages.hold(addresses.bin_set - 1, pages - held, ANY_LENGTH, self.held)
        if held < pages:
            held += self.pages.hold_from_plan(self.pages.stream_in_plan(addresses.bin_set), pages - held, ANY_LENGTH,
                                              False, self.held)
        is_short = held < pages and (self.pages.count_free(addresses.bin_set)
                                     + self.pages.count_free(addresses.bin_set - 1)
                                     + self.pages.count_lendable(addresses.bin_set) + held < pages)
        set_of_views = self.pool.open_ranges(addresses.bin_set)
        number[0] = self.pages.views.open() if held == pages else <uint32_t>NO_VIEW
        opened = set_of_views != NO_LANE and number[0] != NO_VIEW
        if opened:
            view = &self.pages.views.at(number[0])
            view.pages = <uint32_t>pages
            view.set = set_of_views
            opened = try_assign(view.runs, self.held)
            if not opened:
                self.pages.views.forget(number[0])
        if not opened:
            self.pages.let_go(self.held)
        self.lock.release()
        return opened if opened or is_short else self.fail_for_memory()

    cdef int map_view(self, uint32_t number, Wanted* wanted) noexcept nogil:
        cdef vector[uint32_t] numbers
        cdef vector[PageRef] pages
        cdef uint64_t ptr = 0, nbytes = self.pages.views.at(number).pages * self.page_size
        cdef RetiredRef begun = new_retired(0, 0)
        self.forget_lost()
        if (begun.get() == NULL or not self.list_pages(number, numbers) or not self.pages_of(numbers, pages)
                or not try_push_back(self.retired, begun)):     # for a child that is forked meanwhile
            return self.fail_for_memory()
        self.add_calls(1)
        if (self.call_device(RESERVE, 0, nbytes, &ptr) < 0 or self.put_view(number, begun.get(), ptr, nbytes, pages,
                                                                            wanted) < 0):
            self.retired.pop_back()
            if self.has_lost():
                self.keep_stuck(numbers, ptr, nbytes)
            elif ptr:
                self.give_addresses_up(ptr, nbytes, None)
            self.touched.nbytes = 0
            return -1
        self.retired.pop_back()
        return 0

    cdef int put_view(self, uint32_t number, Retired* begun, uint64_t ptr, uint64_t nbytes, vector[PageRef]& pages,
                      Wanted* wanted) noexcept nogil:
        begun.ptr, begun.nbytes = ptr, nbytes
        if self.put(ptr, pages, nbytes) < 0:
            return -1
        if self.enter_view(number, ptr, wanted) < 0:
            self.undo_mapping(ptr, nbytes)
            return -1
        return 0

    cdef int enter_view(self, uint32_t number, uint64_t ptr, Wanted* wanted) noexcept nogil:
        """Adds a view that is mapped to the pool, and hands it out: nothing is held any more."""
        cdef uint64_t nbytes = self.pages.views.at(number).pages * self.page_size
        acquire_lock(self.lock[0])      # the view becomes a chunk that is in use: no other request finds it free
        cdef cbool overlaps = self.pool.overlaps_region(ptr, nbytes)
        self.pages.views.at(number).address = ptr
        if not overlaps and (not wanted.indexed or self.pool.starts.reserve()) and self.pages.add_view(number):
            wanted.handle = self.pages.hand_held_out(number, wanted.requested, wanted.stream, wanted.indexed)
            self.held.clear()
            self.touched.nbytes = 0
        self.lock.release()
        if overlaps:
            return self.refuse_overlap(ptr)
        return self.fail_for_memory() if wanted.handle == NO_CHUNK else 0

    cdef int retire_for(self, uint64_t pages) noexcept nogil:
        """Retires the views that were used longest ago, so that with one more there are no more views than pages."""
        cdef uint32_t oldest
        cdef int some = True
        while some > 0:
            acquire_lock(self.lock[0])
            oldest = NO_VIEW
            if self.pages.views.slots() + pages > self.pages.count:
                oldest = self.pages.oldest_kept_view()
            self.lock.release()     # it may be taken now: `retire` looks again
            some = self.retire(oldest) if oldest != NO_VIEW else 0
        return some

    # -- views that go ------------------------------------------------------------------------------------------------

    cdef void keep_stuck(self, vector[uint32_t]& pages, uint64_t ptr, uint64_t nbytes) noexcept nogil:
        """Notes the addresses at which pages stayed mapped after a `put` that failed. Once they are unmapped, the pages
        are released, and the reservation (0 bytes: there is none) is given back. Where the host has no memory for
        that, it is not known any more where they are, and the pages are kept for good."""
        cdef RetiredRef stuck = new_retired(ptr, nbytes)
        cdef PageRecord* record
        cdef size_t i
        if stuck.get() != NULL and try_assign(stuck.get().pages, pages) and (
                try_push_back(stuck.get().mapped, self.lost_row) if self.lost_row.nbytes else
                try_assign(stuck.get().mapped, self.lost)):
            stuck.get().is_stuck = True
            try_push_back(self.retired, stuck)
        acquire_lock(self.lock[0])      # the pages are held still: nobody could release one before it is counted
        for i in range(pages.size()):
            record = &self.pages.records[pages[i]]
            record.views += 1
        self.lock.release()

    cdef void keep_addresses(self, uint64_t ptr, uint64_t nbytes) noexcept nogil:
        """Notes a reservation that is to be given back."""
        cdef RetiredRef stuck = new_retired(ptr, nbytes)
        if stuck.get() != NULL:
            stuck.get().is_stuck = True
            try_push_back(self.retired, stuck)

    cdef void give_addresses_up(self, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept nogil:
        """Gives a reservation back. If that fails, it is tried again the next time that memory is given back."""
        if self.call_unreserve(ptr, nbytes) < 0:
            self.keep_addresses(ptr, nbytes)
            self.drop_error(faults, False)

    cdef int retire(self, uint32_t number) noexcept nogil:
        """Takes a kept view out of use, to be unmapped once its stream has finished with it. 0: its stream is captured,
        or cannot be asked, and the view stays; or another thread has taken it."""
        cdef RetiredRef made = new_retired(0, 0)
        cdef Retired* retired = made.get()
        cdef StitchedView* view
        cdef Place place
        cdef uint64_t last_used
        cdef vector[uint32_t] pages
        cdef vector[Place] mapped
        cdef int captured, marked
        cdef cbool is_kept
        if retired == NULL:
            return self.fail_for_memory()
        acquire_lock(self.lock[0])
        view = &self.pages.views.at(number)
        retired.stream = stream_to_ask(&self.pool.bin_sets[view.runs[0].set].lane)     # a view's own says IN_RANGES
        if self.pool.bin_sets[view.runs[0].set].is_plan:
            retired.stream = self.pool.bin_sets[view.set].lane.stream
        place = Place(view.address, view.pages * self.page_size)
        last_used = view.last_used
        is_kept = view.state == KEPT
        self.lock.release()
        captured = self.is_captured(retired.stream) if is_kept else 0
        if not is_kept or captured:
            return -1 if captured < 0 else 0
        if not self.list_pages(number, pages) or not try_push_back(mapped, place):
            return self.fail_for_memory()
        marked = self.mark_stream(retired)
        if marked <= 0:
            return marked
        if not try_push_back(self.retired, made):
            self.drop_fence(retired)
            return self.fail_for_memory()
        acquire_lock(self.lock[0])
        view = &self.pages.views.at(number)
        # Another thread may have taken the view since it was looked at, and freed it again. Then it may have queued
        # work after the fence. Otherwise the fence is behind all work of those that had the view. Its pages have not
        # changed: only the mapper opens and retires views.
        is_kept = view.state == KEPT and view.last_used == last_used
        if is_kept:         # only now, so that a fork finds it either kept or retired
            self.pages.retire_view(number)
            retired.ptr, retired.nbytes = place.ptr, place.nbytes
            retired.pages.swap(pages)
            retired.mapped.swap(mapped)
        self.lock.release()
        if not is_kept:
            self.drop_fence(retired)
            self.retired.pop_back()
        return is_kept

    # What a view that goes waits for: an event, where the source has such for callers without the GIL, or a fence.

    cdef int mark_stream(self, Retired* retired) noexcept nogil:
        """Marks what its stream has queued. 0: the device has failed."""
        cdef bfc_native_source* source = self.fences.native
        cdef PyThreadState* state
        cdef int result
        if source == NULL:
            return self.make_fence(retired)
        state = self.guard.let_go()
        result = source.mark(source.self, retired.stream, &retired.event)
        self.guard.take_back(state)
        return result == 0

    cdef int make_fence(self, Retired* retired) noexcept with gil:
        try:
            fence = (self.source.sub_allocator.fence(retired.stream) if self.source.sub_allocator.asynchronous
                     else None)
        except Exception:
            return 0
        except BaseException as error:
            return self.fail(error)
        if fence is not None:
            Py_INCREF(fence)
            retired.fence = <PyObject*>fence
        return 1

    cdef int has_finished(self, Retired* retired, cbool wait) noexcept nogil:
        """Whether the stream of a view has finished with it; `wait`: waits until it has. -1: the device has failed."""
        cdef bfc_native_source* source = self.fences.native
        cdef PyThreadState* state
        cdef int result
        if retired.fence != NULL:
            return self.ask_fence(retired, wait)
        if retired.event == NULL:
            return 1
        state = self.guard.let_go()
        result = source.reached(source.self, &retired.event, wait)
        if result == 0:
            source.drop(source.self, retired.event)
            retired.event = NULL
        self.guard.take_back(state)
        if result == BFC_NOT_REACHED:
            return 0
        if result == 0:
            return 1
        self.guard.pause()
        self.keep_event_error(result, wait)
        self.guard.go_on()
        return -1

    cdef int keep_event_error(self, int result, cbool wait) noexcept with gil:
        try:
            raise failure(<CUresult>result, "cuEventSynchronize" if wait else "cuEventQuery")
        except BaseException as error:      # or the host has no memory for the text
            return self.fail(error)

    cdef int ask_fence(self, Retired* retired, cbool wait) noexcept with gil:
        try:
            fence = <object>retired.fence
            if wait:
                fence.wait()
            return bool(fence.done())
        except BaseException as error:
            return self.fail(error)

    cdef void drop_fence(self, Retired* retired) noexcept nogil:
        if retired.event != NULL:
            self.fences.native.drop(self.fences.native.self, retired.event)
            retired.event = NULL
        if retired.fence != NULL:
            with gil:
                Py_XDECREF(retired.fence)
            retired.fence = NULL

    cdef void drop_fences(self) noexcept:
        cdef size_t i
        for i in range(self.retired.size()):
            self.drop_fence(self.retired[i].get())

    cdef cbool list_pages(self, uint32_t number, vector[uint32_t]& pages) noexcept nogil:
        """Adds the numbers of a view's pages. False: the host has no memory for that. Only the thread that maps changes
        what is read here."""
        cdef StitchedView* view = &self.pages.views.at(number)
        cdef Run* run
        cdef size_t i, k
        if not try_reserve(pages, view.pages):
            return False
        # A lane that another thread opens moves the sets of bins.
        acquire_lock(self.lock[0])
        for k in range(view.runs.size()):
            run = &view.runs[k]
            for i in range(run.count):
                pages.push_back(self.pool.bin_sets[run.set].bitmap.page_at(run.first + i))
        self.lock.release()
        return True

    cdef int sweep(self, Faults faults, cbool wait, cbool again) noexcept nogil:
        """Unmaps the retired views that no queued work uses any more. `wait`: waits for that work. `again`: also tries
        what the sub-allocator failed to unmap before. Its errors go to `faults`, and what it failed on is left to the
        next try."""
        cdef RetiredRef retired
        cdef size_t i = self.retired.size()
        cdef int done
        while i > 0:        # only the mapper changes the list, so `i` is right after each wait and call
            i -= 1
            retired = self.retired[i]
            if retired.get().is_stuck and not again:
                continue
            done = self.has_finished(retired.get(), wait)
            if done > 0 and self.unmap_retired(retired.get()) < 0:
                done = -1
            if done > 0:
                self.drop_fence(retired.get())
                self.retired.erase(self.retired.begin() + i)
            elif done < 0:
                retired.get().is_stuck = True
                if self.drop_error(faults, True) < 0:
                    return -1
        return 0

    cdef int unmap_retired(self, Retired* retired) noexcept nogil:
        cdef PageRecord* record
        cdef size_t i
        # The view is in the pool no more, so nobody takes it. Its pages may be in use at their other addresses
        # meanwhile; `views` keeps them from being released until the view is unmapped.
        while retired.mapped.size():
            if self.call_unmap(retired.mapped[0].ptr, retired.mapped[0].nbytes) < 0:
                return -1
            retired.mapped.erase(retired.mapped.begin())
            self.touched.nbytes = 0
        acquire_lock(self.lock[0])      # from here on the pages may be released
        for i in range(retired.pages.size()):
            record = &self.pages.records[retired.pages[i]]
            record.views -= 1
        retired.pages.clear()
        self.lock.release()
        if retired.nbytes:
            return self.call_unreserve(retired.ptr, retired.nbytes)
        self.free_addresses(retired.ptr)
        return 0

    cdef ChunkHandle chunk_around(self, AddressRange* addresses, uint64_t ptr) noexcept nogil:
        """The chunk of a range that an address lies in. Needs the lock."""
        cdef ChunkHandle handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
        while self.pool.chunks[handle].ptr + self.pool.chunks[handle].size <= ptr:
            handle = self.pool.chunks[handle].next
        return handle

    cdef void free_addresses(self, uint64_t ptr) noexcept nogil:
        """Lets the addresses of a range be used again at which `map_again` failed."""
        cdef AddressRange* addresses
        cdef ChunkHandle handle
        cdef size_t i
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if not addresses.is_known or not addresses.ptr <= ptr < addresses.ptr + addresses.nbytes:
                continue
            # A free of a neighbour reads the state of this chunk, and may join the two.
            acquire_lock(self.lock[0])
            handle = self.chunk_around(addresses, ptr)
            if self.pool.chunks[handle].state == MAPPED_ELSEWHERE and not self.has_page(addresses, ptr):
                forget_absent(self.pool, handle)
            self.note_unmapped(addresses, NO_CHUNK)
            self.lock.release()

    # -- giving back --------------------------------------------------------------------------------------------------

    cdef uint64_t trim(self, uint64_t keep, bint wait, Faults faults) except? 0xFFFFFFFFFFFFFFFF:
        """Releases free pages until no more than so many bytes are left: first those that have one address. Returns
        the bytes."""
        cdef uint64_t before = self.pages.count, kept = self.pages.pages_for(keep)
        cdef dict idle = {}
        cdef AddressRange* addresses
        cdef size_t i
        cdef bint views_too
        self.try_unreleased_again(faults)
        self.unreserve_again(faults)
        for views_too in (False, True):
            if views_too and self.pages.count > kept:
                self.check(self.retire_all())
            self.sweep(faults, wait, True)
            for i in range(self.ranges.size()):
                addresses = self.ranges.at(i)
                if not addresses.is_known or self.is_set_asleep(addresses.bin_set):
                    continue
                if addresses.some_stuck and self.is_idle(addresses.asked_of, wait, idle, faults):
                    self.unmap_again(addresses, False, faults)
                if self.pages.count > kept:
                    self.trim_range(addresses, self.pages.count - kept, views_too, wait, faults)
        return (before - self.pages.count) * self.page_size

    cdef int retire_all(self) noexcept nogil:
        cdef uint32_t number = 0
        cdef cbool is_kept
        while True:
            acquire_lock(self.lock[0])
            is_kept = False
            while number < self.pages.views.count() and not is_kept:
                is_kept = self.pages.is_kept(number)
                number += not is_kept
            self.lock.release()     # it may be taken now: `retire` looks again
            if not is_kept:
                return 0
            if self.retire(number) < 0:
                return -1
            number += 1

    cdef bint is_idle(self, uint64_t stream, bint wait, dict idle, Faults faults) noexcept:
        """Whether a stream has finished with what was queued until it was first asked for `idle`. That says nothing of
        memory that other threads have freed since."""
        try:
            if stream not in idle:
                idle[stream] = self.is_idle_now(stream, wait)
            return idle[stream]
        except BaseException as error:
            faults.add(error)
            return False

    cdef bint is_idle_now(self, uint64_t stream, bint wait) except -1:
        """Whether a stream has finished with what was queued until now. Of one that captures a graph, nobody knows."""
        if self.fences.is_captured(stream):
            return False
        if wait:
            self.source.sub_allocator.wait(stream)
            return True
        fence = self.source.sub_allocator.fence(stream) if self.source.sub_allocator.asynchronous else None
        return fence is None or fence.done()

    cdef int trim_range(self, AddressRange* addresses, uint64_t most, bint views_too, bint wait,
                        Faults faults) except -1:
        """Releases free pages of a range, if its stream has finished with them."""
        cdef bint is_idle = False
        # Held first, and then the stream is asked: a page that another thread frees later is not among them, though
        # work that it has queued may still use that page.
        self.hold_to_trim(addresses, most, views_too)
        if self.held.empty():
            return 0
        try:
            is_idle = self.is_idle_now(addresses.asked_of, wait)
        except BaseException as error:
            faults.add(error)
        if is_idle:
            self.unmap_held(addresses, faults)
        else:
            self.let_held_go()
        return 0

    cdef void hold_to_trim(self, AddressRange* addresses, uint64_t most, bint views_too) noexcept:
        # A page that no view has gets none before it is unmapped: only the mapper stitches.
        acquire_lock(self.lock[0])
        self.pages.hold_unshared(addresses.bin_set, most, views_too, self.held)
        self.lock.release()

    cdef int unmap_held(self, AddressRange* addresses, Faults faults) except -1:
        """Unmaps and releases the pages of a range that are held."""
        cdef Run run
        cdef ChunkHandle handle
        self.is_unmapping = True
        try:
            while self.held.size():
                run = self.held.back()
                acquire_lock(self.lock[0])
                handle = self.pages.chunk_of(&run)      # LEAVING, so it stays
                self.lock.release()
                self.unmap_leaving(addresses, handle, False, faults)
                self.held.pop_back()
        finally:
            self.is_unmapping = False
        return 0

    # -- the end ------------------------------------------------------------------------------------------------------

    cdef void close(self, Faults faults) noexcept:
        cdef AddressRange* addresses
        cdef size_t i
        self.give_up_left(faults)
        self.let_held_go()
        self.forget_chunks()    # from here on nobody is handed any of it, and a free finds no chunk
        self.try_unreleased_again(faults)
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if self.count_mapped(addresses):        # else its stream may be gone
                self.wait_for(addresses, faults)    # even if the device fails, its memory is given back
            addresses.plan = NULL
        self.close_views(faults)
        i = self.ranges.size()
        while i > 0:
            i -= 1
            addresses = self.ranges.at(i)
            self.empty(addresses, faults)
            self.unreserve(addresses, faults)

    cdef void forget_chunks(self) noexcept:
        """Takes all ranges and views out of the pool."""
        cdef StitchedView* view
        cdef uint32_t number
        # All goes at once: a free in another thread finds its chunk with all its neighbours, or none.
        acquire_lock(self.lock[0])
        for number in range(self.pages.views.count()):
            view = &self.pages.views.at(number)
            if view.state in (KEPT, LIVE):
                remove_range(self.pool, view.address, view.pages * self.page_size)
                self.pages.views.retire(number)
        self.forget_ranges()
        self.lock.release()

    cdef void close_views(self, Faults faults) noexcept:
        cdef StitchedView* view
        cdef uint32_t number
        cdef uint64_t ptr, nbytes
        self.sweep(faults, True, True)
        for number in range(self.pages.views.count()):
            view = &self.pages.views.at(number)     # stays where it is in the calls: only the mapper opens views
            if view.state != RETIRED:
                continue
            ptr, nbytes = view.address, view.pages * self.page_size
            if not self.is_set_asleep(view.set) and self.call_unmap(ptr, nbytes) < 0:
                self.drop_error(faults, False)
                continue
            # Only now that it is unmapped: a child that was forked before still finds what to unmap.
            acquire_lock(self.lock[0])
            self.pages.forget_view(number)
            self.touched.nbytes = 0
            self.lock.release()
            self.give_addresses_up(ptr, nbytes, faults)

    cdef void empty(self, AddressRange* addresses, Faults faults) noexcept:
        self.without_calls = self.is_set_asleep(addresses.bin_set)
        AddressRanges.empty(self, addresses, faults)
        self.without_calls = False

    # -- sleep --------------------------------------------------------------------------------------------------------

    cdef int list_mapped(self, TagTransition transition) except -1:
        cdef MappedRun run
        cdef set seen = set()
        if transition.tag.is_asleep:
            for run in self.left:
                if run.tag == transition.tag.number:
                    add_pages(transition, run, seen)
            return 0
        self.retire_views_of(transition.tag.number)
        return self.list_runs(transition, True)

    cdef int list_needed(self, TagTransition transition) except -1:
        return self.list_runs(transition, False)

    cdef int retire_views_of(self, uint64_t tag) except -1:
        """Unmaps the views of a tag that nothing lives in."""
        cdef uint32_t number
        cdef Retired* retired
        cdef size_t i, k
        cdef cbool is_here = False
        for number in range(self.pages.views.count()):
            if self.is_kept_of(number, tag):
                self.check(self.retire(number))
        self.check(self.sweep(None, True, True))
        acquire_lock(self.lock[0])
        for i in range(self.retired.size()):
            retired = self.retired[i].get()
            for k in range(retired.pages.size()):
                is_here = is_here or self.is_of_tag(self.pages.records[retired.pages[k]].slots[0].set, tag)
        self.lock.release()     # a page changes its tag never, and its slots only by the mapper
        if is_here:
            raise SubAllocatorError(f"{self.source.sub_allocator!r} failed to unmap memory that is not in use; "
                                    f"it is tried again by the next call")
        return 0

    cdef cbool is_kept_of(self, uint32_t number, uint64_t tag) noexcept:
        """Whether a view is one of a tag that nothing lives in."""
        # Other threads take views that are kept, and free them.
        acquire_lock(self.lock[0])
        cdef cbool found = (self.pages.views.at(number).state == KEPT
                            and self.is_of_tag(self.pages.views.at(number).set, tag))
        self.lock.release()
        return found

    cdef int list_runs(self, TagTransition transition, bint is_mapped) except -1:
        cdef vector[AddressRange*] found
        cdef AddressRange* addresses
        cdef PageBitmap* bitmap
        cdef uint64_t slot
        cdef uint32_t number
        cdef MappedRun run
        cdef set seen = set()
        self.list_ranges(transition.tag.number, found)
        for addresses in found:
            bitmap = addresses.bitmap       # needs no lock, as in `page_in`
            slot = 0
            while slot < bitmap.slots():
                run = MappedRun()
                run.ptr = bitmap.address_of(slot)
                run.is_mapped = is_mapped
                while slot < bitmap.slots() and bitmap.page_at(slot) != NO_PAGE:
                    run.pages.push_back(self.made[bitmap.page_at(slot)])
                    slot += 1
                run.nbytes = run.pages.size() * self.page_size
                if run.nbytes:
                    add_pages(transition, run, seen)
                slot += 1
        # Kept ones, too: what lived there may have been freed since the views that nothing lives in were unmapped.
        for number in range(self.pages.views.count()):
            if self.pages.views.at(number).state in (KEPT, LIVE):     # others only change one into the other
                self.add_view(transition, number, is_mapped, seen)
        return 0

    cdef int add_view(self, TagTransition transition, uint32_t number, bint is_mapped, set seen) except -1:
        cdef MappedRun run = MappedRun()
        cdef vector[uint32_t] numbers
        cdef cbool is_here
        acquire_lock(self.lock[0])
        run.ptr = self.pages.views.at(number).address
        run.nbytes = self.pages.views.at(number).pages * self.page_size
        is_here = self.is_of_tag(self.pages.views.at(number).set, transition.tag.number)
        self.lock.release()     # the view keeps its pages: only the mapper opens and retires views
        if not is_here:
            return 0
        run.is_mapped = is_mapped
        if not self.list_pages(number, numbers) or not self.pages_of(numbers, run.pages):
            raise out_of_host_memory()
        return add_pages(transition, run, seen)

    cdef void note_runs(self, TagTransition transition) noexcept:
        cdef MappedRun run
        cdef Py_ssize_t i = len(self.left)
        while i > 0:
            i -= 1
            if (<MappedRun>self.left[i]).tag == transition.tag.number:
                del self.left[i]
        for run in () if transition.is_up else transition.runs:
            if not run.is_block:
                self.keep_left(transition, run)
        self.left_count = len(self.left)

    cdef void keep_left(self, TagTransition transition, MappedRun run) noexcept:
        """Keeps the part of a run that stayed mapped, to be unmapped later."""
        cdef MappedRun part
        cdef uint64_t first
        run.tag = transition.tag.number
        if run.is_mapped:
            self.left.append(run)
        elif run.lost is not None:
            for ptr, nbytes in run.lost:
                part = MappedRun()
                part.ptr = ptr
                part.nbytes = nbytes
                part.tag = transition.tag.number
                part.is_mapped = True
                first = (part.ptr - run.ptr) // self.page_size
                part.pages.assign(run.pages.begin() + first,
                                  run.pages.begin() + first + part.nbytes // self.page_size)
                self.left.append(part)

    cdef void give_up_left(self, Faults faults) noexcept:
        cdef MappedRun run
        cdef Page* page
        cdef size_t k
        cdef Py_ssize_t i = len(self.left)
        while i > 0:
            i -= 1
            run = self.left[i]
            if run.is_mapped and self.call_unmap(run.ptr, run.nbytes) < 0:
                self.drop_error(faults, False)
            elif run.is_mapped:
                run.note_unmapped()
                self.touched.nbytes = 0
        for run in self.left:
            for k in range(run.pages.size()):
                page = run.pages[k].get()
                page.is_mapped = page.is_mapped or run.is_mapped
        i = len(self.left)
        while i > 0:
            i -= 1
            run = self.left[i]
            for k in range(run.pages.size() if not run.is_mapped else 0):
                page = run.pages[k].get()
                if page.is_made and not page.is_mapped:
                    give_page_up(self, page)
            if not run.is_mapped:
                del self.left[i]
        self.left_count = len(self.left)

    cdef uint64_t bytes_held(self) noexcept:
        cdef MappedRun run
        cdef set pages = set()
        cdef size_t k
        for run in self.left:
            for k in range(run.pages.size()):
                pages.add(<size_t>run.pages[k].get())
        return len(pages) * self.page_size

    cdef uint64_t bytes_asleep(self) noexcept:
        cdef uint64_t found = 0
        cdef uint32_t i
        # What is mapped and what of it is free belong together, and frees go on while a tag sleeps.
        acquire_lock(self.lock[0])
        for i in range(<uint32_t>self.pool.bin_sets.size()):
            if self.pool.bin_sets[i].asleep and self.pool.bin_sets[i].is_range:
                found += self.pool.bin_sets[i].mapped_bytes - self.pages.count_free(i) * self.page_size
        self.lock.release()
        return found

    cdef void shrink(self, uint64_t tag) noexcept:
        cdef AddressRange* addresses
        cdef Faults faults = Faults()
        cdef size_t i
        self.without_calls = True
        self.forget_views_of(tag)
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if self.belongs_to(addresses, tag):
                self.shrink_range(addresses, faults)
        self.without_calls = False

    cdef void forget_views_of(self, uint64_t tag) noexcept:
        """Forgets the views of a sleeping tag that nothing lives in any more, and gives their addresses back."""
        cdef uint32_t number
        cdef size_t i
        cdef uint64_t ptr, nbytes
        cdef vector[uint32_t] pages
        for number in range(self.pages.views.count()):
            pages.clear()       # nobody takes the view between these locks, as its tag is blocked
            if not self.is_kept_of(number, tag) or not self.list_pages(number, pages):
                continue
            ptr, nbytes = self.pages.views.at(number).address, self.pages.views.at(number).pages * self.page_size
            # Its record is all that changes here: a snapshot in another thread may read it.
            acquire_lock(self.lock[0])
            self.pages.retire_view(number)
            self.lock.release()
            for i in range(pages.size()):       # only the mapper reads and changes how many views a page has
                self.pages.records[pages[i]].views -= 1
            self.give_addresses_up(ptr, nbytes, None)   # if that fails, the next sweep tries again

    cdef void shrink_range(self, AddressRange* addresses, Faults faults) noexcept:
        try:
            if addresses.some_stuck:
                self.unmap_again(addresses, False, faults)
            self.hold_to_trim(addresses, self.pages.count, True)
            self.unmap_held(addresses, faults)      # no stream is asked: their memory went when the tag fell asleep
        except BaseException:
            pass    # the host is out of memory: then these pages wake with the rest

    # -- a thread that is there no more -------------------------------------------------------------------------------

    cdef void take_over(self) noexcept:
        """Also frees the pages that the stopped thread held, except those that it unmapped."""
        cdef Place touched = self.touched, gone = self.going
        cdef MappedRun run
        self.without_calls = False
        AddressRanges.take_over(self)
        for run in self.left:
            if touched.nbytes and run.ptr == touched.ptr:
                run.note_unmapped()
        self.forget_retired(touched, gone)
        if self.is_unmapping:       # what is held may be unmapped already: it stays LEAVING
            self.is_unmapping = False
            self.held.clear()
        self.let_held_go()
        take_over_transitions(self)

    cdef void forget_touched(self, AddressRange* addresses) noexcept:
        cdef uint64_t ptr = self.touched.ptr
        cdef ChunkHandle handle = NO_CHUNK
        if self.is_set_asleep(addresses.bin_set):       # the records of what sleeps stay
            return
        AddressRanges.forget_touched(self, addresses)
        # The pool's records are changed under the lock, also where no other thread is left.
        acquire_lock(self.lock[0])
        if addresses.is_known:
            handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
        while handle != NO_CHUNK and self.pool.chunks[handle].ptr != ptr:
            handle = self.pool.chunks[handle].next
        if handle != NO_CHUNK and self.pool.chunks[handle].state == MAPPED_ELSEWHERE:
            forget_absent(self.pool, handle)
            self.note_unmapped(addresses, NO_CHUNK)
        self.lock.release()

    cdef void forget_retired(self, Place touched, Place gone) noexcept:
        """Enters in the records what `end_calls_of_other` has unmapped and unreserved of views."""
        cdef Retired* retired
        cdef StitchedView* view
        cdef uint32_t number
        cdef size_t i = self.retired.size(), k
        while i > 0:
            i -= 1
            retired = self.retired[i].get()
            k = retired.mapped.size()
            while k > 0:
                k -= 1
                if touched.has(retired.mapped[k].ptr):
                    retired.mapped.erase(retired.mapped.begin() + k)
            if gone.nbytes and retired.nbytes and retired.ptr == gone.ptr:
                self.drop_fence(retired)
                self.retired.erase(self.retired.begin() + i)
        for number in range(self.pages.views.count()):
            view = &self.pages.views.at(number)
            if view.state == RETIRED and touched.nbytes and view.address == touched.ptr:
                # The pool's records are changed under the lock, also where no other thread is left.
                acquire_lock(self.lock[0])
                self.pages.forget_view(number)
                self.lock.release()
                self.keep_addresses(touched.ptr, touched.nbytes)  # its addresses are left

    # -- what can be seen ---------------------------------------------------------------------------------------------

    cdef str in_words(self):
        return f", in pages of {format_bytes(self.page_size)}"

    cdef str against_pieces(self):
        return ""

    cdef uint64_t bytes_beside_regions(self) noexcept:
        return self.unreleased_bytes()

    cdef const char* first_fault(self) noexcept nogil:
        return fault_in_pages(self.pages)

    cdef void set_limit(self, uint64_t limit, uint64_t allowed) noexcept nogil:
        self.limit = limit

    cdef int check_settings(self, settings) except -1:
        if settings.expandable_segments:
            raise SettingsError("expandable_segments and stitch=True cannot be combined: leave one out")
        return 0

    cdef dict stats(self):
        """How much there is of everything, and what was called so far: for `page_stats`."""
        cdef uint64_t pages, used_pages, asleep, views = 0, slots, lost = 0
        cdef uint32_t number
        cdef AddressRange* addresses
        cdef ChunkHandle handle
        cdef size_t i, kept
        self.guard.begin_reading(self.lock[0])      # another thread may map
        pages = used_pages = self.pages.count
        slots = self.pages.views.slots()
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if not addresses.is_known:    # what is still mapped after close()
                lost += self.count_mapped(addresses)
                continue
            used_pages -= self.pages.count_free(addresses.bin_set)
            if self.pool.bin_sets[addresses.bin_set].asleep:
                asleep = self.pool.bin_sets[addresses.bin_set].mapped_bytes // self.page_size
                pages -= asleep
                used_pages -= asleep - self.pages.count_free(addresses.bin_set)
            handle = self.pool.regions[addresses.ptr + addresses.nbytes].first if addresses.some_stuck else NO_CHUNK
            while handle != NO_CHUNK:
                if self.pool.chunks[handle].state == LEAVING:
                    lost += self.pool.chunks[handle].size // self.page_size
                handle = self.pool.chunks[handle].next
        for number in range(self.pages.views.count()):
            views += self.pages.views.at(number).state in (KEPT, LIVE)
        for number in range(<uint32_t>self.pages.records.size()):
            slots += self.pages.records[number].slots.size()
        used_pages -= self.pages.count_idle()
        for i in range(self.retired.size()):
            kept = self.retired[i].get().pages.size()
            slots += kept
            lost += kept if self.retired[i].get().is_stuck else 0
        self.guard.end_reading(self.lock[0])
        return {
            "page_size": self.page_size, "pages": pages + self.unreleased_bytes() // self.page_size,
            "pages_owned": used_pages, "views": views,
            "slots_mapped": slots, "stitches": self.calls.stitches, "creates": self.calls.creates,
            "maps": self.calls.maps, "set_accesses": self.calls.set_accesses, "unmaps": self.calls.unmaps,
            "releases": self.calls.releases, "stream_waits": self.calls.stream_waits,
            "most_calls_of_a_request": self.calls.most, "lost_slots": lost, "driver_seconds": self.calls.seconds,
        }
