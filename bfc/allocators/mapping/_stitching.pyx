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
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back, try_reserve
from bfc._core cimport (
    DIVIDED, FREE, LARGE, LEAVING, MAPPED_ELSEWHERE, NO_CHUNK, NO_LANE, NO_PAGE, NO_STREAM, UNMAPPED, ChunkHandle, Lane,
    PageBitmap, PlanPages, PlanServer,
)
from bfc.allocators._changes cimport (
    IS_GROWING, begin_mapping, bytes_behind, cancel_mapping, cut, cut_absent, forget_absent, has_records, join_absent,
    merge_unmapped, remove_range,
)
from bfc.allocators._pages cimport KEPT, LIVE, NO_SLOT, NO_VIEW, RETIRED, PageRecord, Pages, Run, Slot, StitchedView
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._reading cimport fault_in_pages
from bfc.allocators.mapping._address_ranges cimport (
    AddressRange, AddressRanges, Calls, Faults, MappedRun, Page, Place, TagTransition, call_reserve, lies_in,
)
from bfc.allocators.mapping._sleep cimport give_page_up, take_over_transitions

from bfc.errors import SettingsError, SubAllocatorError, out_of_host_memory
from bfc.units import format_bytes

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
    cdef Page page
    transition.runs.append(run)
    for page in run.pages:
        if id(page) not in seen:
            seen.add(id(page))
            transition.pages.append(page)
    return 0


@cython.final
@cython.no_gc_clear
cdef class Retired:
    """A view that is to be unmapped once its stream has finished with it."""


@cython.final
@cython.no_gc_clear
cdef class Stitching(AddressRanges):
    """What is done for a request that no free chunk fits. It never calls the allocator."""

    def __cinit__(self):
        self.pages = Pages()
        self.made = []
        self.retired = []
        self.left = []

    def __dealloc__(self):
        # NULL where the host had no memory for what AddressRanges holds: then nothing of this class was made
        if <void*>self.pages != NULL and self.pages is not None:
            self.pages.leave()

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

    cdef uint64_t count_calls(self) noexcept:
        """The calls made so far, without waits."""
        cdef Calls* calls = &self.calls
        return calls.creates + calls.maps + calls.set_accesses + calls.unmaps + calls.releases

    cdef void note_request(self, uint64_t calls_before) noexcept:
        self.calls.most = max(self.calls.most, self.count_calls() - calls_before)

    # -- which page is in which slot ----------------------------------------------------------------------------------

    cdef cbool open_table(self, AddressRange addresses) noexcept nogil:
        cdef cbool opened = self.pages.open_bitmap(addresses.bin_set, addresses.ptr)
        addresses.bitmap = self.pool.bin_sets[addresses.bin_set].bitmap
        if opened and addresses.plan != NULL:       # whose places know no order: there is room for all of it at once
            opened = addresses.bitmap.make_room(addresses.ptr + addresses.nbytes)
            if not opened:
                self.pages.close_bitmap(addresses.bin_set)
                addresses.bitmap = NULL
        return opened

    cdef void close_table(self, AddressRange addresses) noexcept:
        self.pages.close_bitmap(addresses.bin_set)
        addresses.bitmap = NULL

    cdef uint64_t slots_of(self, AddressRange addresses) noexcept:
        return addresses.bitmap.slots()

    cdef uint32_t page_in(self, AddressRange addresses, uint64_t ptr) noexcept:
        """The page in a slot, or NO_PAGE. It needs no lock: only the mapper changes the table, and opens and closes it.
        """
        return addresses.bitmap.page_at((ptr - addresses.ptr) // self.page_size)

    cdef bint has_page(self, AddressRange addresses, uint64_t ptr) noexcept:
        return self.page_in(addresses, ptr) != NO_PAGE

    cdef bint may_be_unmapped(self, AddressRange addresses, uint64_t ptr) noexcept:
        """Pages that views still have must stay."""
        cdef uint32_t page = self.page_in(addresses, ptr)
        return page != NO_PAGE and self.pages.records[page].views == 0

    cdef void note_unmapped(self, AddressRange addresses, ChunkHandle added) noexcept nogil:
        cdef ChunkHandle last = self.pool.chunk_at_end(&self.pool.regions[addresses.ptr + addresses.nbytes])
        addresses.tail = last if self.pool.chunks[last].state == UNMAPPED else <ChunkHandle>NO_CHUNK

    cdef uint64_t page_bytes_at(self, uint64_t ptr) noexcept:
        return self.page_size

    cdef int enter_pages(self, AddressRange addresses, uint64_t ptr, list pages) except -1:
        cdef PageBitmap* bitmap
        cdef uint32_t number = NO_PAGE
        cdef uint64_t first
        cdef Py_ssize_t entered = 0, count = len(pages)
        cdef cbool done
        self.made.extend([None] * max(0, <Py_ssize_t>self.pages.count + count - len(self.made)))
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
            self.made[number] = None
        self.lock.release()
        if not done:
            raise out_of_host_memory()
        return 0

    cdef list pages_of(self, list numbers):
        cdef list pages = []
        cdef uint32_t number
        for number in numbers:
            pages.append(self.made[number])
        return pages

    cdef void drop_slot(self, AddressRange addresses, uint64_t ptr, Faults faults) noexcept:
        cdef uint64_t slot = (ptr - addresses.ptr) // self.page_size
        cdef uint32_t page = self.page_in(addresses, ptr)
        cdef cbool is_mapped
        if page == NO_PAGE:
            return
        acquire_lock(self.lock[0])
        self.pool.bin_sets[addresses.bin_set].bitmap.set_page(slot, NO_PAGE)
        self.pages.records[page].drop(self.pages.records[page].in_set(addresses.bin_set))
        is_mapped = self.pages.records[page].is_mapped()
        self.lock.release()
        if not is_mapped:       # in no slot and no view: nobody else finds it
            self.drop_page(page, faults)

    cdef void drop_page(self, uint32_t number, Faults faults) noexcept:
        """Releases a page that has been unmapped. Of a tag that sleeps it went before; if it is still mapped, it is
        released when its tag wakes."""
        cdef Page page = self.made[number]      # in `leaving` during the call, for a child that is forked there
        self.made[number] = None
        acquire_lock(self.lock[0])
        self.pages.forget_page(number)
        self.lock.release()
        if self.without_calls and (page.number is None or page.is_mapped):
            return
        self.calls.releases += 1
        self.is_refused = False
        self.release_page(page, faults)

    cdef bint unmap_elsewhere(self, AddressRange addresses, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept:
        cdef uint64_t at = ptr
        cdef bint only_here = True
        while at < ptr + nbytes:
            only_here = self.unmap_further_slots(addresses.bin_set, self.page_in(addresses, at), faults) and only_here
            at += self.page_size
        if not only_here:
            faults.add(SubAllocatorError(f"pages at {ptr:#x} are mapped elsewhere, too"))
        return only_here

    cdef bint unmap_further_slots(self, uint32_t bin_set, uint32_t page, Faults faults) noexcept:
        """Unmaps a page from the slots of other ranges. False: it is still mapped in some."""
        cdef uint32_t k = 0, count = 1
        cdef Slot slot
        while k < count:
            acquire_lock(self.lock[0])
            count = <uint32_t>self.pages.records[page].slots.size()
            if k < count:
                slot = self.pages.records[page].slots[k]
            self.lock.release()
            # the page is LEAVING, so nobody moves it between two of its slots
            if k < count and (slot.set == bin_set or not self.unmap_slot(page, slot, faults)):
                k += 1
        return count == 1

    cdef bint unmap_slot(self, uint32_t page, Slot slot, Faults faults) noexcept:
        """Takes one of its further slots from a page. False: that failed."""
        cdef Run run = Run(slot.set, slot.number, 1)
        cdef AddressRange addresses
        try:
            self.call_unmap(self.page_ptr(slot.set, slot.number), self.page_size)
        except BaseException as error:
            faults.add(error)
            return False
        # The slot is MAPPED_ELSEWHERE until here, so no thread used it in the call.
        acquire_lock(self.lock[0])
        self.pages.records[page].drop(self.pages.records[page].in_set(slot.set))
        self.pool.bin_sets[slot.set].bitmap.set_page(slot.number, NO_PAGE)
        forget_absent(self.pool, self.pages.chunk_of(&run))
        self.touched.nbytes = 0
        for addresses in self.ranges:
            if addresses.bin_set == slot.set and addresses.is_known:
                self.note_unmapped(addresses, NO_CHUNK)
        self.lock.release()
        return True

    cdef uint64_t page_ptr(self, uint32_t bin_set, uint64_t slot) noexcept:
        acquire_lock(self.lock[0])
        cdef uint64_t ptr = self.pool.bin_sets[bin_set].bitmap.address_of(slot)
        self.lock.release()
        return ptr

    cdef int call_unmap(self, uint64_t ptr, uint64_t nbytes) except -1:
        return 0 if self.without_calls else AddressRanges.call_unmap(self, ptr, nbytes)

    cdef size_t count_what_is_mapped(self) noexcept:
        return AddressRanges.count_what_is_mapped(self) + len(self.retired) + len(self.left)

    # -- a request ----------------------------------------------------------------------------------------------------

    cdef bint provide(self, uint32_t bin_set, Wanted* wanted) except -1:
        """Brings memory for a request nearer, by one step, and may serve it. False: there is no step that would."""
        cdef AddressRange addresses = self.range_for(bin_set)
        self.sweep(None, False, False)
        if self.has_failed():
            self.try_again()
        if addresses is None:
            addresses = self.open_range(bin_set)
        if addresses.bin_set & 1 == LARGE:
            return self.provide_large(addresses, wanted)
        return self.provide_small(addresses)

    cdef bint has_failed(self) noexcept:
        """Whether the sub-allocator failed to unmap or to release something that is to be tried again."""
        cdef AddressRange addresses
        cdef Retired retired
        for addresses in self.ranges:
            if not addresses.is_known or (addresses.some_stuck and not self.is_set_asleep(addresses.bin_set)):
                return True
        for retired in self.retired:
            if retired.is_stuck:
                return True
        return self.unreleased is not None

    cdef int try_again(self) except -1:
        """Unmaps and releases what the sub-allocator failed to take back before."""
        cdef Faults faults = Faults()
        cdef AddressRange addresses
        cdef dict idle = {}
        self.try_unreleased_again(faults)
        self.unreserve_again(faults)
        self.sweep(faults, False, True)
        for addresses in self.ranges:
            if not addresses.is_known or not addresses.some_stuck or self.is_set_asleep(addresses.bin_set):
                continue
            if self.is_idle(addresses.asked_of, False, idle, faults):
                self.unmap_again(addresses, False, faults)
        if faults.interrupt is not None:
            raise faults.interrupt
        return 0

    cdef void unreserve_again(self, Faults faults) noexcept:
        """Tries again to give back the addresses of ranges that the pool could not take in."""
        cdef AddressRange addresses
        cdef Py_ssize_t i = len(self.ranges)
        while i > 0:
            i -= 1
            addresses = self.ranges[i]
            if not addresses.is_known:
                self.unreserve(addresses, faults)

    cdef bint provide_small(self, AddressRange addresses) except -1:
        """One page: a free one of the stream's large chunks, a new one, or one of another stream."""
        if self.move_pages_to(addresses, 1, False):
            return True
        if self.room() and self.grow(addresses, 1, NO_CHUNK):
            return True
        return self.move_pages_to(addresses, 1, True) > 0 or self.trim_other_tags(addresses, 1)

    cdef bint provide_large(self, AddressRange addresses, Wanted* wanted) except -1:
        cdef uint64_t pages = self.pages.pages_for(wanted.rounded), room = self.room(), others, own, missing, first
        cdef uint64_t missing_at_end = self.missing_at_end(addresses, wanted.rounded)
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
            return self.grow(addresses, missing_at_end, NO_CHUNK) > 0
        if missing == 0:
            return self.stitch(addresses, pages, wanted)
        if missing > room + others:
            return self.trim_other_tags(addresses, missing - room - others)
        if room and self.grow(addresses, min(missing, room), NO_CHUNK):
            return True
        if self.move_pages_to(addresses, missing, True):
            return True
        room = self.room()      # perhaps more than what may be made before others are asked
        return room > 0 and self.grow(addresses, min(missing, room), NO_CHUNK) > 0

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
        return self.grow(self.range_for(bin_set), missing, behind) == missing

    cdef uint64_t missing_at_end(self, AddressRange addresses, uint64_t rounded) noexcept:
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

    cdef uint64_t room(self) noexcept:
        """How many pages may still be made; `grow` looks again, since other threads take regions."""
        acquire_lock(self.lock[0])
        cdef uint64_t taken = self.source.taken()
        self.lock.release()
        return 0 if self.is_refused or taken >= self.limit else (self.limit - taken) // self.page_size

    cdef uint64_t room_before_others(self, AddressRange addresses) noexcept:
        """How many pages may be made before free ones of other streams are taken. The areas that a plan gives its
        streams are not full at the same time: where they have as many pages as were ever live at once in the recording,
        they take idle ones of each other."""
        acquire_lock(self.lock[0])
        cdef cbool shares = (self.pages.stream_in_plan(addresses.bin_set) != NO_STREAM
                             and self.pool.plan.streams() > 1)
        self.lock.release()
        return self.room_in_plan() if shares else ~<uint64_t>0

    cdef uint64_t free_of_others(self, AddressRange addresses) noexcept:
        cdef AddressRange other
        cdef uint64_t count
        acquire_lock(self.lock[0])
        count = self.pages.count_of_others(addresses.bin_set)
        for other in self.ranges:
            if self.has_same_tag(other, addresses):
                count += self.pages.count_free(other.bin_set)
        self.lock.release()     # fewer may be free by the time they are held, as in `provide_large`
        return count

    cdef bint has_same_tag(self, AddressRange other, AddressRange addresses) noexcept:
        """Whether a range belongs to another stream and to the same tag: what sleeps shares no page with what is awake.
        Needs the lock."""
        cdef uint64_t* theirs = self.pool.bin_sets[other.bin_set].lane.pool
        cdef uint64_t* ours = self.pool.bin_sets[addresses.bin_set].lane.pool
        return (other.is_known and other.bin_set | 1 != addresses.bin_set | 1
                and theirs[0] == ours[0] and theirs[1] == ours[1])

    cdef bint has_other_tag(self, AddressRange other, AddressRange addresses) noexcept:
        """Whether a range belongs to another tag, and is awake. Needs the lock."""
        return (other.is_known and other.bin_set | 1 != addresses.bin_set | 1
                and not self.has_same_tag(other, addresses) and not self.pool.bin_sets[other.bin_set].asleep)

    cdef bint trim_other_tags(self, AddressRange addresses, uint64_t wanted) except -1:
        """Releases free pages of other tags, which cannot be lent. Returns whether any went."""
        cdef uint64_t before = self.pages.count, there = 0
        cdef Faults faults = Faults()
        cdef AddressRange other
        cdef bint is_other
        acquire_lock(self.lock[0])
        for other in self.ranges:
            if self.has_other_tag(other, addresses):
                there += self.pages.count_free(other.bin_set)
        self.lock.release()
        if there == 0:
            return False
        self.retire_all()
        self.sweep(faults, True, False)
        for other in self.ranges:
            acquire_lock(self.lock[0])
            is_other = self.has_other_tag(other, addresses)
            self.lock.release()     # it stays so: only the mapper puts a tag to sleep or wakes it
            if is_other and before - self.pages.count < wanted:
                self.trim_range(other, wanted - (before - self.pages.count), True, True, faults)
        return self.pages.count < before

    cdef bint is_within_headroom(self, uint64_t pages, uint64_t rounded) noexcept:
        """Whether so many more pages are less above the most that was ever in use than the user allows."""
        cdef uint64_t peak
        if self.headroom == 0:
            return False
        acquire_lock(self.lock[0])
        peak = max(self.pool.counters.peak_bytes_in_use, self.pool.counters.bytes_in_use + rounded)
        self.lock.release()     # an estimate: only how many pages are made depends on it
        return <double>((self.pages.count + pages) * self.page_size) <= (1 + self.headroom) * <double>peak

    # -- new pages ----------------------------------------------------------------------------------------------------

    cdef AddressRange range_for(self, uint32_t bin_set):
        cdef AddressRange addresses
        for addresses in self.ranges:
            if addresses.bin_set == bin_set and addresses.is_known:
                return addresses
        return None

    cdef AddressRange open_range(self, uint32_t bin_set):
        """Reserves addresses for as many pages as there can be, as each is mapped into a range once at most; and some
        more, in case that a few cannot be unmapped."""
        cdef AddressRange addresses = AddressRange()
        addresses.nbytes = (self.highest_limit // self.page_size * 17 // 16 + 16) * self.page_size
        addresses.slot = self.page_size
        addresses.bin_set = bin_set
        acquire_lock(self.lock[0])
        addresses.stream = self.pool.bin_sets[bin_set].lane.stream
        addresses.asked_of = stream_to_ask(&self.pool.bin_sets[bin_set].lane)
        self.lock.release()
        self.reserve(addresses)
        return addresses

    cdef uint64_t grow(self, AddressRange addresses, uint64_t wanted, ChunkHandle at) except? 0xFFFFFFFFFFFFFFFF:
        """Makes pages and maps them into a range: at this unmapped chunk, or else (NO_CHUNK) at its end if they fit
        there. Returns how many: fewer where the sub-allocator has no memory for more."""
        cdef uint64_t set_aside, missing, taken
        acquire_lock(self.lock[0])
        taken = self.source.taken()     # other threads may have taken regions since `room` was asked
        wanted = min(wanted, (self.limit - taken) // self.page_size if taken < self.limit else <uint64_t>0)
        set_aside = wanted * self.page_size
        self.source.set_aside += set_aside
        self.source.newest_call().nbytes += set_aside   # which a fork in one of these calls must not forget
        self.lock.release()
        try:
            wanted = self.create(wanted, self.page_size)
            missing = wanted
            while missing > 0:
                missing -= self.map_fresh(addresses, self.begin(addresses, missing, at))
        finally:
            self.release_fresh()
            acquire_lock(self.lock[0])
            self.source.set_aside -= set_aside
            self.source.newest_call().nbytes -= set_aside
            self.lock.release()
        return wanted

    cdef ChunkHandle begin(self, AddressRange addresses, uint64_t wanted, ChunkHandle at) except? 0xFFFFFFFE:
        """Takes unmapped addresses, as a chunk of their own: at the end of a range, or else where it has a hole, and
        then perhaps fewer. There are some, since each page is mapped into a range once at most."""
        cdef ChunkHandle handle
        cdef uint64_t nbytes = 0
        cdef cbool begun = False
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
        if handle == NO_CHUNK:
            raise SubAllocatorError(f"no addresses are left for stream {addresses.stream}, as some could not be "
                                    f"unmapped: release_free_regions() tries that again")
        if not begun:
            raise out_of_host_memory()
        return handle

    cdef ChunkHandle first_hole(self, AddressRange addresses) noexcept:
        """The first unmapped chunk of a range, or NO_CHUNK. Needs the lock."""
        cdef ChunkHandle handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
        while handle != NO_CHUNK and self.pool.chunks[handle].state != UNMAPPED:
            handle = self.pool.chunks[handle].next
        return handle

    # -- pages that change hands --------------------------------------------------------------------------------------

    cdef uint64_t move_pages_to(self, AddressRange addresses, uint64_t wanted,
                                bint from_others) except? 0xFFFFFFFFFFFFFFFF:
        """Lets a range use free pages of the stream's large chunks, or `from_others`. Returns how many."""
        cdef uint64_t got
        cdef bint for_good
        if from_others:
            self.ask_captures()
        got = self.hold_free(addresses, wanted, from_others)
        if got == 0:
            return 0
        # What is held is LEAVING until the calls are over: other threads can neither take it nor move it, and
        # `let_held_go` makes it free again, page by page, whatever fails.
        acquire_lock(self.lock[0])      # the first page of a range stays there: it may be taken and freed in turn
        for_good = from_others or self.pool.bin_sets[addresses.bin_set].bitmap.slots() == 0
        for_good = for_good and not self.are_planned        # a plan's places need theirs again
        self.lock.release()
        self.give_held_to(addresses, addresses.stream, NO_CHUNK, from_others, for_good)
        return got

    cdef int ask_captures(self) except -1:
        """Asks which streams are captured: nobody may wait for one of them, so their pages stay."""
        cdef vector[uint64_t] handles
        cdef uint64_t handle
        cdef AddressRange other
        cdef uint32_t stream
        for other in self.ranges:
            other.is_captured = self.fences.is_captured(other.asked_of)
        self.orderable.clear()
        acquire_lock(self.lock[0])
        if self.pool.plan != NULL:
            for stream in range(<uint32_t>self.pool.plan.streams()):
                if self.pool.plan.is_bound(stream):
                    try_push_back(handles, self.pool.plan.handle_of(stream))
        self.lock.release()
        for handle in handles:
            if not self.fences.is_captured(handle):
                self.orderable.push_back(handle)
        return 0

    cdef int give_held_to(self, AddressRange addresses, uint64_t stream, ChunkHandle at, bint from_others,
                          bint for_good) except -1:
        """Lets a stream use what is held, in a range: at a chunk of it or (NO_CHUNK) wherever there is room."""
        try:
            if from_others:
                self.order_after(stream)
            self.map_held(addresses, at)
            self.activate_held(addresses, for_good)
        except BaseException:
            self.let_held_go()
            raise
        self.note_change()
        return 0

    cdef uint64_t hold_free(self, AddressRange addresses, uint64_t wanted, bint from_others) noexcept:
        """Holds free pages one by one: of other streams, those that were here before, then those of the stream that
        has most of them."""
        cdef uint64_t got = 0, most
        cdef AddressRange other, best
        acquire_lock(self.lock[0])
        self.are_planned = False
        if not from_others:
            got = self.pages.hold(addresses.bin_set | 1, wanted, 1, self.held)
            if got == 0:
                got = self.pages.hold_from_plan(self.pages.stream_in_plan(addresses.bin_set), wanted, 1, True,
                                                self.held)
                self.are_planned = got > 0
        for other in self.ranges:
            if from_others and self.may_give(other, addresses):
                got += self.pages.hold_again(addresses.bin_set, other.bin_set, wanted - got, self.held)
        while from_others and got < wanted:
            most, best = 0, None
            for other in self.ranges:
                if self.may_give(other, addresses) and self.pages.count_free(other.bin_set) > most:
                    most, best = self.pages.count_free(other.bin_set), other
            if best is not None:
                if self.pages.hold_highest(best.bin_set, wanted - got, self.held) == 0:
                    break
            elif self.pages.hold_from_plan(self.best_lender(addresses), wanted - got, 1, True, self.held) == 0:
                break
            got = self.held.size()
        self.lock.release()
        return got

    cdef bint may_give(self, AddressRange other, AddressRange addresses) noexcept:
        """Whether a range may take the free pages of another stream's. Needs the lock."""
        return self.has_same_tag(other, addresses) and not other.is_captured

    cdef uint32_t best_lender(self, AddressRange addresses) noexcept:
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

    cdef int order_after(self, uint64_t stream) except -1:
        """Makes a stream wait for what the streams of the held pages have queued."""
        cdef AddressRange other
        cdef Run run
        cdef uint64_t passed = 0
        cdef set streams = set()
        # What is held was free before: the work that used it is queued already, and no more is added meanwhile.
        for run in self.held:
            for other in self.ranges:
                if other.bin_set == run.set:
                    user = self.user_of(other, run.first)
                    if user != stream:
                        passed += run.count * self.page_size
                        streams.add(user)
        for user in sorted(streams):
            self.calls.stream_waits += 1
            self.source.sub_allocator.order(user, stream)
        acquire_lock(self.lock[0])
        if self.pool.plan != NULL:
            self.pool.plan.passed += passed
        self.lock.release()
        return 0

    cdef uint64_t user_of(self, AddressRange addresses, uint32_t slot) noexcept:
        """The stream that has used a page in a slot."""
        cdef uint64_t user = addresses.asked_of
        cdef uint32_t stream
        acquire_lock(self.lock[0])
        if addresses.plan != NULL:      # it lends only pages that one stream alone uses
            stream = addresses.plan.owner_of(addresses.region, slot)
            user = addresses.plan.handle_of(stream) if stream != NO_STREAM else user
        self.lock.release()
        return user

    cdef int map_held(self, AddressRange addresses, ChunkHandle at) except -1:
        """Maps the held pages into a range, but for those that are mapped there already. They are absent there. `at`:
        into this unmapped chunk first, or (NO_CHUNK) wherever there is room."""
        cdef list pages = []
        cdef uint32_t page
        cdef Run run
        cdef cbool is_new
        for run in self.held:
            acquire_lock(self.lock[0])
            page = self.pool.bin_sets[run.set].bitmap.page_at(run.first)
            is_new = self.pages.records[page].in_set(addresses.bin_set) == NO_SLOT
            self.lock.release()
            if is_new:      # what needs memory of the host comes after the lock
                pages.append(page)
        while pages:
            self.map_again(addresses, pages, at)
            at = NO_CHUNK
        return 0

    cdef int map_again(self, AddressRange addresses, list pages, ChunkHandle at) except -1:
        """Maps as many of these pages as one row of addresses has room for, and takes them off the list."""
        cdef ChunkHandle handle = self.begin(addresses, len(pages), at)
        cdef uint64_t ptr, nbytes, count
        cdef list mapped
        cdef cbool done
        acquire_lock(self.lock[0])
        ptr, nbytes = self.pool.chunks[handle].ptr, self.pool.chunks[handle].size
        self.lock.release()     # `begin` has cut the chunk, so nobody else touches it
        count = nbytes // self.page_size
        self.forget_lost()
        try:
            mapped = pages[:count]
            self.put(ptr, self.pages_of(mapped), nbytes)
            acquire_lock(self.lock[0])
            # the pages have a further address, and are still used through the old one: nothing is free yet
            done = self.add_slots(addresses, handle, mapped)
            self.touched.nbytes = 0 if done else self.touched.nbytes
            self.lock.release()
            if not done:
                self.undo_mapping(ptr, nbytes)
                raise out_of_host_memory()
        except BaseException:
            acquire_lock(self.lock[0])
            if self.has_lost():
                self.pool.chunks[handle].state = MAPPED_ELSEWHERE     # until it has been unmapped
            else:
                cancel_mapping(self.pool, handle, False)
            self.note_unmapped(addresses, NO_CHUNK)
            self.lock.release()
            if self.has_lost():
                self.keep_stuck(mapped, ptr, 0)
            self.touched.nbytes = 0
            raise
        del pages[:count]
        return 0

    cdef cbool add_slots(self, AddressRange addresses, ChunkHandle handle, list pages):
        """Enters a further slot of each of these pages. False: the host has no memory for it. Needs the lock."""
        cdef PageBitmap* bitmap = self.pool.bin_sets[addresses.bin_set].bitmap
        cdef size_t slot = bitmap.slot_at(self.pool.chunks[handle].ptr)
        cdef Py_ssize_t added = 0, count = len(pages)
        cdef uint32_t page
        if not cut_absent(self.pool, handle, self.page_size):
            return False
        while added < count:
            page = pages[added]
            if not self.pages.records[page].try_add(Slot(addresses.bin_set, <uint32_t>(slot + added))):
                break
            added += 1
        if added < count:
            while added > 0:
                added -= 1
                page = pages[added]
                self.pages.records[page].slots.pop_back()
            join_absent(self.pool, handle, count * self.page_size)
            return False
        for added in range(count):
            bitmap.set_page(slot + added, pages[added])
            bitmap.note_chunk(slot + added, handle)
            handle = self.pool.chunks[handle].next
        return True

    cdef int activate_held(self, AddressRange addresses, bint for_good) except -1:
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
        if not done:
            raise out_of_host_memory()
        return 0

    cdef void let_held_go(self) noexcept:
        acquire_lock(self.lock[0])
        self.pages.let_go(self.held)
        self.lock.release()

    # -- the regions of plans -----------------------------------------------------------------------------------------

    # A plan's region is a range. Its pages are made when a place is first touched, and lent while nothing needs them.

    cdef AddressRange region_of(self, PlanServer* plan, int region):
        cdef AddressRange addresses
        for addresses in self.ranges:
            if addresses.plan == plan and addresses.region == region and addresses.is_known:
                return addresses
        return None

    cdef int open_region(self, PlanServer* plan, int region, uint64_t home) except -1:
        """Reserves the addresses of a region, and gives them to the plan."""
        cdef AddressRange addresses = AddressRange()
        addresses.nbytes = plan.pages(region) * self.page_size
        addresses.slot = self.page_size
        addresses.plan = plan
        addresses.region = region
        addresses.stream = addresses.asked_of = home
        acquire_lock(self.lock[0])
        addresses.bin_set = self.pool.set_of_region(plan, region)
        self.lock.release()
        return self.reserve(addresses)

    cdef int fill_place(self, uint64_t stream, uint64_t rounded) except -1:
        """Brings pages to the place that a request is to have, unless they are lent, or the plan has as many as it may:
        then the request is served by what is free elsewhere."""
        cdef uint32_t index = NO_STREAM     # the stream's number in the plan
        cdef PlanServer* plan = self.pool.plan
        cdef AddressRange addresses
        cdef PlanPages row = PlanPages(0, 0, 0), place = PlanPages(0, 0, 0)
        cdef uint64_t got = 1, calls = self.count_calls()
        self.is_refused = False
        self.sweep(None, False, False)
        if self.has_failed():
            self.try_again()
        while got > 0:
            acquire_lock(self.lock[0])
            row.count = 0
            if plan != NULL and plan == self.pool.plan:     # else another thread has ended it
                index = plan.stream_of(stream)
                if index != NO_STREAM:
                    row = plan.away_for(index, rounded)
                    place = plan.pages_for(index, rounded)
            self.lock.release()
            got = 0
            addresses = self.region_of(plan, row.region) if row.count else None
            if addresses is not None:
                got = self.fill_at(addresses, row.first, row.count, index, stream)
            if got == 0 and addresses is not None and addresses.bitmap.page_at(row.first) != NO_PAGE:
                got = self.bring_back(addresses, place.first, place.count, stream)
        self.note_request(calls)
        return 0

    cdef uint64_t fill_at(self, AddressRange addresses, uint32_t first, uint32_t count, uint32_t index,
                          uint64_t stream) except? 0xFFFFFFFFFFFFFFFF:
        """Brings pages to a region, up to the first that are lent: pages that lie free beside the plan, and new ones
        while there are fewer than the plan needs. Returns how many. Only a page that no other stream shares may be one
        that the stream has used before."""
        cdef PlanServer* plan = addresses.plan
        cdef uint64_t got = 0, wanted
        cdef uint64_t ptr = addresses.ptr + first * self.page_size
        cdef PlanPages row = PlanPages(addresses.region, first, count)
        cdef ChunkHandle at = self.cut_at(addresses, ptr)
        cdef cbool is_own = False
        if at == NO_CHUNK:
            return 0
        wanted = min(<uint64_t>plan.alike_from(index, row, is_own), self.part_of(at).size // self.page_size)
        try:
            if is_own:
                got = self.move_into_plan(addresses, stream, wanted, at)
            if got == 0 and wanted <= min(self.room(), self.room_in_plan()):
                got = self.grow(addresses, wanted, at)
        finally:
            if got == 0:
                self.join_at(addresses, ptr)
        return got

    cdef uint64_t room_in_plan(self) noexcept:
        """How many pages fewer than it needs the plan in use has, with those that its streams have beside it."""
        cdef uint64_t most = 0, there = 0
        acquire_lock(self.lock[0])
        if self.pool.plan != NULL:
            most, there = self.pages.most_shared(), self.pages.count_shared()
        self.lock.release()
        return most - there if there < most else 0

    cdef uint64_t bring_back(self, AddressRange addresses, uint32_t first, uint32_t count,
                             uint64_t stream) except? 0xFFFFFFFFFFFFFFFF:
        """Lets a place of a stream have the pages again that it lacks, if all of them lie free in ranges, of other
        streams, too, or can still be made. Returns how many."""
        cdef uint64_t got, room = min(self.room(), self.room_in_plan())
        cdef uint32_t slot
        cdef cbool are_free = True
        self.ask_captures()
        acquire_lock(self.lock[0])
        for slot in range(first, first + count):
            if not are_free or not addresses.plan.is_away(addresses.region, slot):
                continue
            if addresses.bitmap.page_at(slot) == NO_PAGE:
                are_free = room > 0
                room -= are_free
            else:
                are_free = self.pages.has_moved(addresses.bin_set, slot) and self.hold_moved(addresses, slot)
        if not are_free:
            self.pages.let_go(self.held)
        got = self.held.size()
        self.lock.release()
        if got > 0:
            self.give_held_to(addresses, stream, NO_CHUNK, True, True)
        return got

    cdef bint hold_moved(self, AddressRange addresses, uint32_t slot) noexcept:
        """Holds the page of a slot where it is used now, if it is free there. Needs the lock."""
        cdef PageRecord* record = &self.pages.records[addresses.bitmap.page_at(slot)]
        cdef Run run = Run(record.slots[record.active].set, record.slots[record.active].number, 1)
        cdef AddressRange other
        for other in self.ranges:
            if other.bin_set == run.set and other.is_captured:
                return False
        return self.pages.is_idle(&run) and self.pages.hold_run(&run, self.held)

    cdef ChunkHandle chunk_around(self, AddressRange addresses, uint64_t ptr) noexcept:
        """The chunk of a range that an address lies in. Needs the lock."""
        cdef ChunkHandle handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
        while self.pool.chunks[handle].ptr + self.pool.chunks[handle].size <= ptr:
            handle = self.pool.chunks[handle].next
        return handle

    cdef ChunkHandle cut_at(self, AddressRange addresses, uint64_t ptr) noexcept:
        """The unmapped chunk that begins at an address, cut out there, for memory to be mapped into it. NO_CHUNK:
        something is mapped there, or the host is out of memory."""
        cdef ChunkHandle handle
        acquire_lock(self.lock[0])
        handle = self.chunk_around(addresses, ptr)
        if self.pool.chunks[handle].state != UNMAPPED:
            handle = NO_CHUNK
        elif self.pool.chunks[handle].ptr < ptr:
            if has_records(self.pool, 1):
                handle = cut(self.pool, handle, ptr - self.pool.chunks[handle].ptr)
                self.pool.chunks[handle].freed_at_count = IS_GROWING
            else:
                handle = NO_CHUNK
        self.note_unmapped(addresses, NO_CHUNK)
        self.lock.release()
        return handle

    cdef void join_at(self, AddressRange addresses, uint64_t ptr) noexcept:
        """Undoes `cut_at`, where nothing was mapped."""
        cdef ChunkHandle handle
        acquire_lock(self.lock[0])
        handle = self.chunk_around(addresses, ptr)
        if self.pool.chunks[handle].state == UNMAPPED:
            self.pool.chunks[handle].freed_at_count = 0
            merge_unmapped(self.pool, handle)
        self.note_unmapped(addresses, NO_CHUNK)
        self.lock.release()

    cdef uint64_t move_into_plan(self, AddressRange addresses, uint64_t stream, uint64_t wanted,
                                 ChunkHandle at) except? 0xFFFFFFFFFFFFFFFF:
        """Lets a plan have pages of a stream that lie free beside it, for good. Returns how many."""
        cdef Lane lane = Lane([0, 0], 0, 0)
        cdef uint64_t got = 0
        cdef uint32_t bin_set
        lane.stream = stream
        acquire_lock(self.lock[0])
        bin_set = self.pool.find_lane(&lane)
        if bin_set != NO_LANE:
            self.pages.hold(bin_set | 1, wanted, 1, self.held)
            self.pages.let_known_go(addresses.bin_set, self.held)    # they belong elsewhere in this region
            got = self.held.size()
        self.lock.release()
        if got == 0:
            return 0
        self.give_held_to(addresses, stream, at, False, True)
        return got

    cdef bint give_region_up(self, AddressRange addresses, Faults faults) except -1:
        """Gives a region back: its pages, but for those that moved to other ranges, and its addresses. False: something
        lives there, or in a view of its pages, or the device failed; then it stays, and may be given back later."""
        cdef ChunkHandle first
        cdef bint is_bare
        if not self.is_vacant(addresses):       # before any view goes, and any stream is waited for
            return False
        self.retire_all()
        self.sweep(faults, True, True)
        if addresses.some_stuck:
            self.unmap_again(addresses, False, faults)
        if not self.hold_region(addresses):
            return False
        if not self.wait_for(addresses, faults):
            self.let_held_go()
            return False
        self.unmap_held(addresses, faults)
        self.leave_moved(addresses, faults)
        acquire_lock(self.lock[0])
        first = self.pool.regions[addresses.ptr + addresses.nbytes].first
        is_bare = self.pool.chunks[first].state == UNMAPPED and self.pool.chunks[first].next == NO_CHUNK
        if is_bare:
            remove_range(self.pool, addresses.ptr, addresses.nbytes)
            addresses.is_known = False
            addresses.plan = NULL
        self.lock.release()
        if is_bare:
            self.unreserve(addresses, faults)
        return is_bare

    cdef bint is_vacant(self, AddressRange addresses) noexcept:
        """Whether nothing lives in the places of a region."""
        acquire_lock(self.lock[0])
        cdef bint is_empty = addresses.plan.is_empty(addresses.region)
        self.lock.release()
        return is_empty

    cdef bint hold_region(self, AddressRange addresses) noexcept:
        """Holds all pages of a region. False: some are in use, and nothing is held."""
        cdef ChunkHandle handle
        cdef PageBitmap* bitmap = addresses.bitmap
        cdef Run run
        cdef uint64_t slot
        cdef bint is_held
        acquire_lock(self.lock[0])
        is_held = addresses.plan.is_empty(addresses.region) and not self.pages.is_in_views(addresses.bin_set)
        handle = self.pool.regions[addresses.ptr + addresses.nbytes].first
        while handle != NO_CHUNK and is_held:
            is_held = (self.pool.chunks[handle].state in (UNMAPPED, LEAVING, DIVIDED)
                       or self.pages.has_moved(addresses.bin_set, bitmap.slot_at(self.pool.chunks[handle].ptr)))
            if self.pool.chunks[handle].state == DIVIDED:
                run = Run(addresses.bin_set, <uint32_t>bitmap.slot_at(self.pool.chunks[handle].ptr),
                          <uint32_t>(self.pool.chunks[handle].size // self.page_size))
                for slot in range(run.first, run.first + run.count):
                    is_held = is_held and self.pages.is_unshared(bitmap.page_at(slot), True)
                is_held = is_held and try_push_back(self.held, run)
                if is_held and not self.pages.take_run(&run, LEAVING):
                    self.held.pop_back()
                    is_held = False
            handle = self.pool.chunks[handle].next
        if not is_held:
            self.pages.let_go(self.held)
        self.lock.release()
        return is_held

    cdef void leave_moved(self, AddressRange addresses, Faults faults) noexcept:
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
                self.unmap_slot(page, Slot(addresses.bin_set, slot), faults)

    # -- views --------------------------------------------------------------------------------------------------------

    cdef bint stitch(self, AddressRange addresses, uint64_t pages, Wanted* wanted) except -1:
        """Maps free pages of a stream end to end, as a view that is kept, and serves the request there. True, too, if
        another thread has taken some of them meanwhile."""
        cdef uint32_t number = NO_VIEW
        cdef list held = []
        self.retire_for(pages)
        if not self.hold_for_view(addresses, pages, &number):
            return True
        try:
            # the view is in no list of the pool, and its pages are held, until `enter_view` hands it out
            self.list_pages(number, held)
            self.map_view(number, held, wanted)
        except BaseException:
            acquire_lock(self.lock[0])
            self.pages.views.forget(number)
            self.lock.release()
            raise
        finally:
            self.let_held_go()
        self.calls.stitches += 1
        self.note_change()
        return True

    cdef bint hold_for_view(self, AddressRange addresses, uint64_t pages, uint32_t* number) except -1:
        """Holds pages for a view, and opens it. False: there are too few."""
        cdef uint64_t held
        cdef uint32_t set_of_views
        cdef StitchedView* view
        cdef Run run
        cdef cbool opened, is_short
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
            opened = try_reserve(view.runs, self.held.size())
            for run in self.held:
                opened = opened and try_push_back(view.runs, run)
            if not opened:
                self.pages.views.forget(number[0])
        if not opened:
            self.pages.let_go(self.held)
        self.lock.release()
        if not opened and not is_short:
            raise out_of_host_memory()
        return opened

    cdef int map_view(self, uint32_t number, list pages, Wanted* wanted) except -1:
        cdef uint64_t ptr = 0, nbytes = len(pages) * self.page_size
        cdef Retired begun = Retired()
        begun.pages = []
        begun.mapped = []
        self.forget_lost()
        self.retired.append(begun)      # for a child that is forked meanwhile, and has nothing else of it
        self.add_calls(1)
        try:
            ptr = call_reserve(self.source.sub_allocator, self.device, nbytes)
            begun.ptr, begun.nbytes = ptr, nbytes
            self.put(ptr, self.pages_of(pages), nbytes)
            try:
                self.enter_view(number, ptr, wanted)
            except BaseException:
                self.undo_mapping(ptr, nbytes)
                raise
        except BaseException:
            self.retired.remove(begun)
            if self.has_lost():
                self.keep_stuck(pages, ptr, nbytes)
            elif ptr:
                self.give_addresses_up(ptr, nbytes, None)
            self.touched.nbytes = 0
            raise
        self.retired.remove(begun)
        return 0

    cdef int enter_view(self, uint32_t number, uint64_t ptr, Wanted* wanted) except -1:
        """Adds a view that is mapped to the pool, and hands it out: nothing is held any more."""
        cdef uint64_t nbytes = self.pages.views.at(number).pages * self.page_size
        acquire_lock(self.lock[0])
        cdef cbool overlaps = self.pool.overlaps_region(ptr, nbytes)
        self.pages.views.at(number).address = ptr
        if not overlaps and (not wanted.indexed or self.pool.starts.reserve()) and self.pages.add_view(number):
            wanted.handle = self.pages.hand_held_out(number, wanted.requested, wanted.stream, wanted.indexed)
            self.held.clear()
            self.touched.nbytes = 0
        self.lock.release()
        if overlaps:
            raise SubAllocatorError(f"{self.source.sub_allocator!r}.reserve returned {ptr:#x}, which is in use")
        if wanted.handle == NO_CHUNK:
            raise out_of_host_memory()
        return 0

    cdef int retire_for(self, uint64_t pages) except -1:
        """Retires the views that were used longest ago, so that with one more there are no more views than pages."""
        cdef uint32_t oldest
        cdef bint some = True
        while some:
            acquire_lock(self.lock[0])
            oldest = NO_VIEW
            if self.pages.views.slots() + pages > self.pages.count:
                oldest = self.pages.oldest_kept_view()
            self.lock.release()     # it may be taken now: `retire` looks again
            some = oldest != NO_VIEW and self.retire(oldest)
        return 0

    # -- views that go ------------------------------------------------------------------------------------------------

    cdef void keep_stuck(self, list pages, uint64_t ptr, uint64_t nbytes) noexcept:
        """Notes the addresses at which pages stayed mapped after a `put` that failed. Once they are unmapped, the pages
        are released, and the reservation (0 bytes: there is none) is given back."""
        cdef Retired stuck
        cdef uint32_t page
        try:
            stuck = Retired()
            stuck.ptr = ptr
            stuck.nbytes = nbytes
            stuck.mapped = [(self.lost_row.ptr, self.lost_row.nbytes)] if self.lost_row.nbytes else list(self.lost)
            stuck.pages = list(pages)
            stuck.is_stuck = True
            self.retired.append(stuck)
        except MemoryError:
            pass        # it is not known any more where they are, and the pages below are kept for good
        acquire_lock(self.lock[0])      # the pages are held still: nobody could release one before it is counted
        for page in pages:
            self.pages.records[page].views += 1
        self.lock.release()

    cdef void keep_addresses(self, uint64_t ptr, uint64_t nbytes) noexcept:
        """Notes a reservation that is to be given back."""
        cdef Retired stuck
        try:
            stuck = Retired()
            stuck.ptr, stuck.nbytes = ptr, nbytes
            stuck.mapped, stuck.pages = [], []
            stuck.is_stuck = True
            self.retired.append(stuck)
        except MemoryError:
            pass

    cdef void give_addresses_up(self, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept:
        """Gives a reservation back. If that fails, it is tried again the next time that memory is given back."""
        try:
            self.call_unreserve(ptr, nbytes)
        except BaseException as error:
            self.keep_addresses(ptr, nbytes)
            if faults is not None:
                faults.add(error)

    cdef bint retire(self, uint32_t number) except -1:
        """Takes a kept view out of use, to be unmapped once its stream has finished with it. False: its stream is
        captured, or cannot be asked, and the view stays; or another thread has taken it."""
        cdef Retired retired = Retired()
        cdef StitchedView* view
        cdef Place place
        cdef uint64_t last_used
        cdef list pages = [], mapped
        cdef cbool is_kept
        retired.pages = []
        retired.mapped = []
        acquire_lock(self.lock[0])
        view = &self.pages.views.at(number)
        retired.stream = stream_to_ask(&self.pool.bin_sets[view.runs[0].set].lane)     # a view's own says IN_RANGES
        if self.pool.bin_sets[view.runs[0].set].is_plan:
            retired.stream = self.pool.bin_sets[view.set].lane.stream
        place = Place(view.address, view.pages * self.page_size)
        last_used = view.last_used
        is_kept = view.state == KEPT
        self.lock.release()
        if not is_kept or self.fences.is_captured(retired.stream):
            return False
        self.list_pages(number, pages)
        mapped = [(place.ptr, place.nbytes)]
        if self.source.sub_allocator.asynchronous:
            try:
                retired.fence = self.source.sub_allocator.fence(retired.stream)
            except Exception:
                return False
        self.retired.append(retired)
        acquire_lock(self.lock[0])
        view = &self.pages.views.at(number)
        # Another thread may have taken the view since it was looked at, and freed it again. Then it may have queued
        # work after the fence. Otherwise the fence is behind all work of those that had the view. Its pages have not
        # changed: only the mapper opens and retires views.
        is_kept = view.state == KEPT and view.last_used == last_used
        if is_kept:         # only now, so that a fork finds it either kept or retired
            self.pages.retire_view(number)
            retired.ptr, retired.nbytes = place.ptr, place.nbytes
            retired.pages, retired.mapped = pages, mapped
        self.lock.release()
        if not is_kept:
            self.retired.pop()
        return is_kept

    cdef int list_pages(self, uint32_t number, list pages) except -1:
        """The numbers of a view's pages. Only the thread that maps changes what is read here."""
        cdef vector[uint32_t] found
        cdef uint32_t page
        cdef StitchedView* view = &self.pages.views.at(number)
        cdef Run* run
        cdef size_t i, k
        found.reserve(view.pages)
        acquire_lock(self.lock[0])
        for k in range(view.runs.size()):   # a loop over the vector itself would copy it
            run = &view.runs[k]
            for i in range(run.count):
                found.push_back(self.pool.bin_sets[run.set].bitmap.page_at(run.first + i))
        self.lock.release()
        for page in found:
            pages.append(page)
        return 0

    cdef int sweep(self, Faults faults, bint wait, bint again) except -1:
        """Unmaps the retired views that no queued work uses any more. `wait`: waits for that work. `again`: also tries
        what the sub-allocator failed to unmap before. Its errors go to `faults`, and what it failed on is left to the
        next try."""
        cdef Retired retired
        cdef Py_ssize_t i = len(self.retired)
        while i > 0:        # only the mapper changes the list, so `i` is right after each wait and call
            i -= 1
            retired = self.retired[i]
            if retired.is_stuck and not again:
                continue
            try:
                if retired.fence is not None and wait:
                    retired.fence.wait()
                if retired.fence is not None and not retired.fence.done():
                    continue
                self.unmap_retired(retired)
            except BaseException as error:
                retired.is_stuck = True
                if faults is None and not isinstance(error, Exception):
                    raise
                if faults is not None:
                    faults.add(error)
            else:
                del self.retired[i]
        return 0

    cdef int unmap_retired(self, Retired retired) except -1:
        cdef uint32_t page
        # The view is in the pool no more, so nobody takes it. Its pages may be in use at their other addresses
        # meanwhile; `views` keeps them from being released until the view is unmapped.
        while retired.mapped:
            ptr, nbytes = retired.mapped[0]
            self.call_unmap(ptr, nbytes)
            del retired.mapped[0]
            self.touched.nbytes = 0
        acquire_lock(self.lock[0])
        for page in retired.pages:
            self.pages.records[page].views -= 1
        del retired.pages[:]
        self.lock.release()
        if retired.nbytes:
            self.call_unreserve(retired.ptr, retired.nbytes)
        else:
            self.free_addresses(retired.ptr)
        return 0

    cdef void free_addresses(self, uint64_t ptr) noexcept:
        """Lets the addresses of a range be used again at which `map_again` failed."""
        cdef AddressRange addresses
        cdef ChunkHandle handle
        for addresses in self.ranges:
            if not addresses.is_known or not addresses.ptr <= ptr < addresses.ptr + addresses.nbytes:
                continue
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
        cdef AddressRange addresses
        cdef bint views_too
        self.try_unreleased_again(faults)
        self.unreserve_again(faults)
        for views_too in (False, True):
            if views_too and self.pages.count > kept:
                self.retire_all()
            self.sweep(faults, wait, True)
            for addresses in self.ranges:
                if not addresses.is_known or self.is_set_asleep(addresses.bin_set):
                    continue
                if addresses.some_stuck and self.is_idle(addresses.asked_of, wait, idle, faults):
                    self.unmap_again(addresses, False, faults)
                if self.pages.count > kept:
                    self.trim_range(addresses, self.pages.count - kept, views_too, wait, faults)
        return (before - self.pages.count) * self.page_size

    cdef int retire_all(self) except -1:
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
            self.retire(number)
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

    cdef int trim_range(self, AddressRange addresses, uint64_t most, bint views_too, bint wait,
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

    cdef void hold_to_trim(self, AddressRange addresses, uint64_t most, bint views_too) noexcept:
        # A page that no view has gets none before it is unmapped: only the mapper stitches.
        acquire_lock(self.lock[0])
        self.pages.hold_unshared(addresses.bin_set, most, views_too, self.held)
        self.lock.release()

    cdef int unmap_held(self, AddressRange addresses, Faults faults) except -1:
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
        cdef AddressRange addresses
        cdef Py_ssize_t i
        self.give_up_left(faults)
        self.let_held_go()
        self.forget_chunks()    # from here on nobody is handed any of it, and a free finds no chunk
        self.try_unreleased_again(faults)
        for addresses in self.ranges:
            if self.count_mapped(addresses):        # else its stream may be gone
                self.wait_for(addresses, faults)    # even if the device fails, its memory is given back
            addresses.plan = NULL
        self.close_views(faults)
        i = len(self.ranges)
        while i > 0:
            i -= 1
            addresses = self.ranges[i]
            self.empty(addresses, faults)
            self.unreserve(addresses, faults)

    cdef void forget_chunks(self) noexcept:
        """Takes all ranges and views out of the pool."""
        cdef StitchedView* view
        cdef uint32_t number
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
        try:
            self.sweep(faults, True, True)
        except BaseException as error:
            faults.add(error)
        for number in range(self.pages.views.count()):
            view = &self.pages.views.at(number)     # stays where it is in the calls: only the mapper opens views
            if view.state != RETIRED:
                continue
            ptr, nbytes = view.address, view.pages * self.page_size
            try:
                if not self.is_set_asleep(view.set):
                    self.call_unmap(ptr, nbytes)
                acquire_lock(self.lock[0])
                self.pages.forget_view(number)
                self.touched.nbytes = 0
                self.lock.release()
                self.give_addresses_up(ptr, nbytes, faults)
            except BaseException as error:
                faults.add(error)

    cdef void empty(self, AddressRange addresses, Faults faults) noexcept:
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
        cdef Retired retired
        cdef cbool is_here
        for number in range(self.pages.views.count()):
            if self.is_kept_of(number, tag):
                self.retire(number)
        self.sweep(None, True, True)
        for retired in self.retired:
            for page in retired.pages:
                acquire_lock(self.lock[0])
                is_here = self.is_of_tag(self.pages.records[<uint32_t>page].slots[0].set, tag)
                self.lock.release()     # a page changes its tag never, and its slots only by the mapper
                if is_here:
                    raise SubAllocatorError(f"{self.source.sub_allocator!r} failed to unmap memory that is not in use; "
                                            f"it is tried again by the next call")
        return 0

    cdef cbool is_kept_of(self, uint32_t number, uint64_t tag) noexcept:
        """Whether a view is one of a tag that nothing lives in."""
        acquire_lock(self.lock[0])
        cdef cbool found = (self.pages.views.at(number).state == KEPT
                            and self.is_of_tag(self.pages.views.at(number).set, tag))
        self.lock.release()
        return found

    cdef int list_runs(self, TagTransition transition, bint is_mapped) except -1:
        cdef AddressRange addresses
        cdef PageBitmap* bitmap
        cdef uint64_t slot, count
        cdef uint32_t number
        cdef MappedRun run
        cdef set seen = set()
        for addresses in self.ranges_of(transition.tag.number):
            bitmap = addresses.bitmap       # needs no lock, as in `page_in`
            slot = 0
            while slot < bitmap.slots():
                run = MappedRun()
                run.pages = []
                run.ptr = bitmap.address_of(slot)
                run.is_mapped = is_mapped
                count = slot
                while slot < bitmap.slots() and bitmap.page_at(slot) != NO_PAGE:
                    run.pages.append(self.made[bitmap.page_at(slot)])
                    slot += 1
                run.nbytes = (slot - count) * self.page_size
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
        cdef list numbers = []
        cdef uint32_t page
        cdef cbool is_here
        acquire_lock(self.lock[0])
        run.ptr = self.pages.views.at(number).address
        run.nbytes = self.pages.views.at(number).pages * self.page_size
        is_here = self.is_of_tag(self.pages.views.at(number).set, transition.tag.number)
        self.lock.release()     # the view keeps its pages: only the mapper opens and retires views
        if not is_here:
            return 0
        self.list_pages(number, numbers)
        run.pages = []
        run.is_mapped = is_mapped
        for page in numbers:
            run.pages.append(self.made[page])
        return add_pages(transition, run, seen)

    cdef void note_runs(self, TagTransition transition) noexcept:
        cdef MappedRun run
        cdef Py_ssize_t i = len(self.left)
        while i > 0:
            i -= 1
            if (<MappedRun>self.left[i]).tag == transition.tag.number:
                del self.left[i]
        if transition.is_up:
            return
        for run in transition.runs:
            if not run.is_block:
                self.keep_left(transition, run)

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
                part.pages = run.pages[first:first + part.nbytes // self.page_size]
                self.left.append(part)

    cdef void give_up_left(self, Faults faults) noexcept:
        cdef MappedRun run
        cdef Page page
        cdef Py_ssize_t i = len(self.left)
        while i > 0:
            i -= 1
            run = self.left[i]
            try:
                if run.is_mapped:
                    self.call_unmap(run.ptr, run.nbytes)
                    run.note_unmapped()
                    self.touched.nbytes = 0
            except BaseException as error:
                faults.add(error)
        for run in self.left:
            for page in run.pages:
                page.is_mapped = page.is_mapped or run.is_mapped
        i = len(self.left)
        while i > 0:
            i -= 1
            run = self.left[i]
            for page in run.pages if not run.is_mapped else ():
                if page.number is not None and not page.is_mapped:
                    give_page_up(self, page)
            if not run.is_mapped:
                del self.left[i]

    cdef uint64_t bytes_held(self) noexcept:
        cdef MappedRun run
        cdef set pages = set()
        for run in self.left:
            pages.update(map(id, run.pages))
        return len(pages) * self.page_size

    cdef uint64_t bytes_asleep(self) noexcept:
        cdef uint64_t found = 0
        cdef uint32_t i
        acquire_lock(self.lock[0])
        for i in range(<uint32_t>self.pool.bin_sets.size()):
            if self.pool.bin_sets[i].asleep and self.pool.bin_sets[i].is_range:
                found += self.pool.bin_sets[i].mapped_bytes - self.pages.count_free(i) * self.page_size
        self.lock.release()
        return found

    cdef void shrink(self, uint64_t tag) noexcept:
        cdef AddressRange addresses
        cdef Faults faults = Faults()
        self.without_calls = True
        self.forget_views_of(tag)
        for addresses in self.ranges:
            if self.belongs_to(addresses, tag):
                self.shrink_range(addresses, faults)
        self.without_calls = False

    cdef void forget_views_of(self, uint64_t tag) noexcept:
        """Forgets the views of a sleeping tag that nothing lives in any more, and gives their addresses back."""
        cdef uint32_t number, page
        cdef uint64_t ptr, nbytes
        cdef list pages
        cdef Retired retired
        for number in range(self.pages.views.count()):
            if not self.is_kept_of(number, tag):
                continue
            pages = []      # nobody takes the view between these locks, as its tag is blocked
            self.list_pages(number, pages)
            ptr, nbytes = self.pages.views.at(number).address, self.pages.views.at(number).pages * self.page_size
            retired = Retired()
            retired.ptr, retired.nbytes = ptr, nbytes
            retired.pages = []
            retired.mapped = []
            acquire_lock(self.lock[0])
            self.pages.retire_view(number)
            self.lock.release()
            for page in pages:      # only the mapper reads and changes how many views a page has
                self.pages.records[page].views -= 1
            try:
                self.call_unreserve(ptr, nbytes)
            except BaseException:
                self.retired.append(retired)    # only its addresses are left: the next sweep tries again

    cdef void shrink_range(self, AddressRange addresses, Faults faults) noexcept:
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

    cdef void forget_touched(self, AddressRange addresses) noexcept:
        cdef uint64_t ptr = self.touched.ptr
        cdef ChunkHandle handle = NO_CHUNK
        if self.is_set_asleep(addresses.bin_set):       # the records of what sleeps stay
            return
        AddressRanges.forget_touched(self, addresses)
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
        cdef Retired retired
        cdef StitchedView* view
        cdef uint32_t number
        cdef Py_ssize_t i = len(self.retired), k
        while i > 0:
            i -= 1
            retired = self.retired[i]
            k = len(retired.mapped)
            while k > 0:
                k -= 1
                if lies_in(retired.mapped[k][0], ((touched.ptr, touched.nbytes),)):
                    del retired.mapped[k]
            if gone.nbytes and retired.nbytes and retired.ptr == gone.ptr:
                del self.retired[i]
        for number in range(self.pages.views.count()):
            view = &self.pages.views.at(number)
            if view.state == RETIRED and touched.nbytes and view.address == touched.ptr:
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
        cdef AddressRange addresses
        cdef Retired retired
        cdef ChunkHandle handle
        acquire_lock(self.lock[0])
        pages = used_pages = self.pages.count
        slots = self.pages.views.slots()
        for addresses in self.ranges:
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
        self.lock.release()
        for retired in list(self.retired):
            slots += len(retired.pages)
            lost += len(retired.pages) if retired.is_stuck else 0
        return {
            "page_size": self.page_size, "pages": pages + self.unreleased_bytes() // self.page_size,
            "pages_owned": used_pages, "views": views,
            "slots_mapped": slots, "stitches": self.calls.stitches, "creates": self.calls.creates,
            "maps": self.calls.maps, "set_accesses": self.calls.set_accesses, "unmaps": self.calls.unmaps,
            "releases": self.calls.releases, "stream_waits": self.calls.stream_waits,
            "most_calls_of_a_request": self.calls.most, "lost_slots": lost, "driver_seconds": self.calls.seconds,
        }
