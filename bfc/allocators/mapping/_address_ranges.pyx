"""Ranges of addresses, and the transactions in which memory is mapped into them and given back.

All mapped memory goes through `AddressRanges`; its subclasses choose what is mapped where. The sub-allocator is called
with the GIL and without the lock, between `enter` and `leave`, by one thread at a time; other threads allocate and free
meanwhile. So each transaction takes the lock more than once. That is safe between two locks for these reasons:

- Chunks that are UNMAPPED, LEAVING or MAPPED_ELSEWHERE are in no bin, and nothing merges with them. Only the mapper
  changes them, and it alone changes which page is in which slot.
- Memory becomes a free chunk only after the device may use it, and stops being one before the device is asked to unmap
  it. So no other thread is ever handed addresses that are not mapped.
- Each page is in a list or a slot at any time: it is entered in the next one before it leaves the last one, and what
  leaves a list needs no memory of the host. A call whose undoing fails leaves its pages where `settle`, `unmap_again`
  or `try_unreleased_again` finds them.
- A child may be forked whenever the GIL is free: in each call, and while a lock is waited for. What a call is about
  stands in `touched`, `leaving`, `offered` or `going` from before it until the records say what came of it.
"""

import time

cimport cython
from cpython.number cimport PyNumber_Index
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.mapping cimport bfc_mapping_fault
from bfc.interpreter._process cimport defer_handlers, resume_handlers
from bfc._core cimport LEAVING, NO_CHUNK, NO_HOST_MEMORY, UNMAPPED, ChunkHandle, Pool
from bfc.allocators._changes cimport IS_GROWING, add_range, cancel_mapping, end_mapping, end_unmapping, remove_range
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._source cimport Source, add_up
from bfc.allocators._fences cimport Fences
from bfc.allocators._frees cimport report_unraisable
from bfc.allocators._tags cimport NO_TAG, Tags

cdef extern from "plan_server.hpp":
    pass

from bfc.errors import SubAllocatorError, out_of_host_memory
from bfc.suballocators.base import native_calls
from bfc.units import format_bytes

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from *:     # time.perf_counter() needs memory of the host
    """
    #include <chrono>
    static inline double bfc_seconds_now() noexcept {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    """
    double seconds_now "bfc_seconds_now"() noexcept nogil

cdef enum:
    NOWHERE = 0xFFFFFFFFFFFFFFFF        # the start of a range whose addresses are being asked for

_POLL_SECONDS = 0.001


# -- what is asked of a sub-allocator, and what it fails with ----------------------------------------------------------

cdef uint64_t call_reserve(sub_allocator, device, uint64_t nbytes) except 0:
    """Addresses of a sub-allocator, or of its C functions, which are the `device` then."""
    cdef uint64_t place = 0, granularity = sub_allocator.mapping_granularity
    answer = device.reserve(nbytes)
    if answer is None:
        raise SubAllocatorError(
            f"{sub_allocator!r} has no {format_bytes(nbytes)} of addresses left to reserve. Memory is not short: "
            f"each stream and private pool reserves that much. Use fewer of them, or expandable_segments:False")
    try:
        place = PyNumber_Index(answer)      # nothing here needs memory of the host: the addresses would be lost
    except (TypeError, OverflowError):
        pass
    if 0 < place <= (<uint64_t>1 << 63) - nbytes and place % granularity == 0:
        return place
    if place:
        try:
            device.unreserve(place, nbytes)
        except Exception:
            pass    # it was no reservation
    raise SubAllocatorError(f"{sub_allocator!r}.reserve returned {answer!r}: an address is an int above 0, and a "
                            f"multiple of mapping_granularity")


cdef object call_create(sub_allocator, device, uint64_t nbytes):
    """The number of a new page; None: there is no memory for it."""
    try:
        number = device.create(nbytes)
    except MemoryError:
        return None
    if number is None or isinstance(number, int):
        return number
    raise SubAllocatorError(f"{sub_allocator!r}.create returned {number!r}: a page is an int, or None")


cdef bint lies_in(uint64_t address, runs) noexcept:
    """Whether an address lies in one of these (address, bytes). What cannot be read as such may contain it."""
    try:
        for start, size in runs:
            if start <= address < start + size:
                return True
    except Exception:
        return True
    return False


cdef int raise_faults(sub_allocator, Faults faults) except -1:
    """Raises what the sub-allocator failed with while memory went back: a Ctrl-C as it is."""
    if faults.interrupt is not None:
        raise faults.interrupt
    if faults.first is not None:
        raise SubAllocatorError(f"{sub_allocator!r} failed {faults.count} time(s) to take memory back, first with "
                                f"{faults.first!r}; release_free_regions() and close() try again") from faults.first
    return 0


@cython.final
cdef class Faults:
    """What a sub-allocator fails with while memory goes back. Noting it needs no memory of the host."""

    cdef Faults restart(self):
        self.first = self.interrupt = None
        self.count = 0
        return self

    cdef void add(self, error) noexcept:
        self.count += 1
        if self.first is None:
            self.first = error
        if self.interrupt is None and not isinstance(error, Exception):
            self.interrupt = error


@cython.final
@cython.no_gc_clear
@cython.trashcan(True)      # a list of them that is dropped is as deep as it is long
cdef class Page:
    """A page, made before the sub-allocator is asked for one: what goes wrong later needs no memory of the host."""


cdef uint64_t bytes_from(Page page) noexcept:
    """The bytes of a page and of those that are listed after it."""
    cdef uint64_t nbytes = 0
    while page is not None:
        nbytes += page.nbytes
        page = page.next
    return nbytes


cdef list driver_numbers(list pages):
    cdef list numbers = []
    cdef Page page
    for page in pages:
        numbers.append(page.number)
    return numbers


# -- ranges and what is in them ----------------------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear
cdef class AddressRange:
    """Reserved addresses for one stream, one pool, and small or large chunks: slots of one size, each with a page of
    memory or with none."""

    def __cinit__(self):
        self.ptr = NOWHERE
        self.tail = NO_CHUNK
        self.pages = []


@cython.final
cdef class MappedRun:
    """Mapped memory that lies end to end, or the addresses for it."""

    cdef void note_unmapped(self) noexcept:
        cdef Page page
        self.is_mapped = False
        for page in self.pages:
            page.is_mapped = False


@cython.final
cdef class TagTransition:
    """A tag that is falling asleep, or waking."""

    cdef bint misses_pages(self) noexcept:
        cdef Page page
        for page in self.pages:
            if page.number is None:
                return True
        return False

    cdef void settle_pages(self) noexcept:
        """Notes which pages are mapped anywhere, after something has failed."""
        cdef MappedRun run
        cdef Page page
        for run in self.runs:
            if run.is_mapped:
                for page in run.pages:
                    page.is_mapped = True


@cython.no_gc_clear
cdef class AddressRanges:
    """The ranges of an allocator, and the memory in them. It never calls the allocator."""

    def __cinit__(self):
        self.ranges = []
        self.closing = Faults()
        self.lost = ()

    cdef int attach(self, Lock* lock, Pool pool, Source source, Fences fences, Tags tags) except -1:
        """Takes the allocator's lock and its list of tags that sleep, which must live as long, and its parts."""
        self.lock = lock
        self.pool = pool
        self.source = source
        self.fences = fences
        self.tags = tags
        return 0

    # -- one thread at a time -----------------------------------------------------------------------------------------

    cdef bint enter(self, uint64_t set_aside) except -1:
        """Lets this thread map and unmap, with Python's signal handlers deferred. False: another thread does, or this
        one in a call further up. `set_aside`: the bytes that it has set aside from the limit, which a fork in one of
        its calls must not forget."""
        cdef cbool entered, others = False
        if self.device is None:
            self.native = native_calls(self.source.sub_allocator)
            self.device = self.source.sub_allocator if self.native is None else self.native
        # The call begins before this thread is the mapper, and ends after that: a mapper in no call has been stopped.
        if not self.source.begin_call(set_aside, 0):
            raise out_of_host_memory()
        acquire_lock(self.lock[0])
        # a mapper that is in no call is gone: it did not survive a fork, or the interpreter's shutdown stopped it
        entered = self.mapper == 0 or not self.source.is_listed(self.mapper)
        if entered:
            others = self.mapper != 0
            self.mapper = PyThread_get_thread_ident()
        self.lock.release()
        if not entered:
            self.source.end_call(True, 0)
            return False
        self.source.refused_bytes.set(0)
        defer_handlers(&self.deferral)
        if others:
            self.take_over()
        return True

    cdef void leave(self) noexcept:
        """Ends what `enter` began. Also closes, if the allocator was closed in one of the calls meanwhile."""
        cdef uint64_t refused
        if self.must_close:
            self.close_late()
        resume_handlers(&self.deferral)
        acquire_lock(self.lock[0])
        self.mapper = 0
        self.count = self.count_what_is_mapped()
        self.touched.nbytes = 0
        self.lock.release()
        refused = self.source.refused_bytes.get()
        self.source.end_call(True, 0)
        self.source.refused_bytes.set(refused)      # a page, and that is the answer
        if self.must_close:     # somebody wanted that after it was looked at above, and could not enter yet
            self.close_after_all()

    cdef int give_all_back(self) except -1:
        """Gives everything back, for an allocator that closes."""
        cdef Faults faults = self.closing
        if not self.are_some():
            return 0
        while not self.enter(0):
            if self.source.is_called_here():
                self.must_close = True      # the thread that maps does it: another one, or this one further up
                if self.enter(0):           # it may have left before it could see that
                    break
                return 0
            time.sleep(_POLL_SECONDS)
        try:
            self.close(faults.restart())
            if isinstance(faults.first, MemoryError):   # the host may have memory now, and there may be no later call
                self.close(faults.restart())
        finally:
            self.leave()
        return raise_faults(self.source.sub_allocator, faults)

    cdef void close_after_all(self) noexcept:
        """Closes now, unless another thread maps by now: then that one does, when it leaves."""
        try:
            if self.enter(0):
                self.leave()
        except BaseException as error:      # the host is out of memory
            report_unraisable(error, self.source.sub_allocator)

    cdef cbool are_some(self) noexcept nogil:
        """Whether there is anything to be given back."""
        return self.count > 0 or self.mapper != 0

    cdef set streams_asked(self):
        """The streams that say when earlier work on the ranges is done."""
        cdef AddressRange range
        cdef set streams = set()
        for range in list(self.ranges):     # a copy: where another thread maps, it may change the list
            streams |= self.streams_of(range)
        return streams

    cdef set streams_of(self, AddressRange range):
        """The streams that say when earlier work on a range is done: of a plan's region, all that the plan serves."""
        cdef set streams = {range.asked_of}
        cdef vector[uint64_t] handles
        cdef uint64_t handle
        acquire_lock(self.lock[0])
        try:
            if range.plan != NULL:
                handles = range.plan.bound()
        finally:
            self.lock.release()
        for handle in handles:
            streams.add(handle)
        return streams

    cdef void close_late(self) noexcept:
        self.must_close = False
        self.close(self.closing.restart())
        if self.closing.first is not None:
            report_unraisable(self.closing.first, self.source.sub_allocator)

    # -- what a subclass keeps ----------------------------------------------------------------------------------------

    cdef cbool open_table(self, AddressRange range) noexcept nogil:
        """Makes the table of a range's slots. False: the host is out of memory. Needs the lock."""
        return True

    cdef void close_table(self, AddressRange range) noexcept:
        """Drops it; no slot has a page. Needs the lock."""

    cdef uint64_t slots_of(self, AddressRange range) noexcept:
        """How many slots the table has, from the start of the range on: no slot behind them has a page."""
        return len(range.pages)

    cdef bint has_page(self, AddressRange range, uint64_t ptr) noexcept:
        return False

    cdef bint may_be_unmapped(self, AddressRange range, uint64_t ptr) noexcept:
        """Whether a slot has a page, and it goes once it is unmapped there, as far as is known."""
        return self.has_page(range, ptr)

    cdef int enter_pages(self, AddressRange range, uint64_t ptr, list pages) except -1:
        """Enters pages in the slots that they are to be mapped into: all, or none."""
        return 0

    cdef void drop_slot(self, AddressRange range, uint64_t ptr, Faults faults) noexcept:
        """Takes a page that is not mapped there any more out of its slot, if that has one, and releases the page if
        it is mapped nowhere else."""

    cdef bint unmap_elsewhere(self, AddressRange range, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept:
        """Unmaps the pages of some slots wherever else they are mapped. False: that failed, and they must stay."""
        return True

    cdef void note_unmapped(self, AddressRange range, ChunkHandle added) noexcept nogil:
        """Lists what is unmapped in a range, after some of it has changed and this chunk may be new. Needs the lock
        under which it has changed."""

    cdef size_t count_what_is_mapped(self) noexcept:
        return len(self.ranges) + (self.unreleased is not None)

    cdef uint64_t page_bytes_at(self, uint64_t ptr) noexcept:
        """The bytes of a page at an address that is mapped or unmapped."""
        return 1

    cdef void close(self, Faults faults) noexcept:
        """Gives all memory and all addresses back. The next call tries what the sub-allocator fails with again."""

    cdef int list_mapped(self, TagTransition transition) except -1:
        return 0

    cdef int list_needed(self, TagTransition transition) except -1:
        return 0

    cdef void note_runs(self, TagTransition transition) noexcept:
        pass

    cdef void shrink(self, uint64_t tag) noexcept:
        pass

    cdef uint64_t bytes_held(self) noexcept:
        """The bytes that are mapped where tags sleep, since they could not be unmapped."""
        return 0

    cdef uint64_t bytes_asleep(self) noexcept:
        """The bytes that must be mapped to wake everything that sleeps."""
        return 0

    cdef dict stats(self):
        """How much there is of everything, for `page_stats`."""
        return {}

    cdef str in_words(self):
        """What is said of it where the allocator is printed."""
        return ""

    cdef str against_pieces(self):
        """The option that would let a request use free memory in pieces; "" if there is none beyond what is on."""
        return "virtual_memory=True"

    cdef uint64_t bytes_beside_regions(self) noexcept:
        """What is reserved, and does not count as the pool's."""
        return 0

    cdef const char* first_fault(self) noexcept nogil:
        """The first thing that is wrong with its records, or NULL. Needs the lock."""
        return NULL

    cdef void set_limit(self, uint64_t limit, uint64_t allowed) noexcept nogil:
        """Takes a new limit: `allowed` is the user's, or UNLIMITED, and `limit` also what the device has. Needs the
        lock."""
        self.limit = allowed

    cdef int check_settings(self, settings) except -1:
        """Refuses settings of PyTorch's that do not go with it."""
        return 0

    cdef bint extend(self, uint64_t address, uint64_t rounded) except -1:
        """Maps the memory that an allocation lacks for its new size, if its range is unmapped behind it. Returns
        whether it did."""
        return False

    # -- reserving ----------------------------------------------------------------------------------------------------

    cdef int reserve(self, AddressRange range) except -1:
        """Reserves the addresses of a new range, and enters it in the pool."""
        # It makes room in the list before there are addresses. While these are reserved the range is not known to the
        # pool, so others pass over it, and a child that is forked takes it off the list (NOWHERE).
        self.ranges.append(range)
        try:
            self.add_calls(1)
            range.ptr = call_reserve(self.source.sub_allocator, self.device, range.nbytes)
        except BaseException:
            self.remove(range)
            raise
        return self.take_in(range)

    cdef int take_in(self, AddressRange range) except -1:
        cdef ChunkHandle handle = NO_HOST_MEMORY
        cdef cbool overlaps
        acquire_lock(self.lock[0])
        overlaps = self.pool.overlaps_region(range.ptr, range.nbytes)
        if not overlaps:
            range.has_table = self.open_table(range)
        if range.has_table:
            handle = add_range(self.pool, range.ptr, range.nbytes, range.bin_set)
        range.is_known = handle != NO_HOST_MEMORY
        if range.is_known:
            self.note_unmapped(range, handle)
        if range.is_known and range.plan != NULL:
            self.pool.give_to_plan(range.plan, range.region, range.ptr)
        self.lock.release()
        if overlaps:
            self.remove(range)      # and it is not ours to give back
            raise SubAllocatorError(f"{self.source.sub_allocator!r}.reserve returned {range.ptr:#x}, which is in use")
        if not range.is_known:
            range.plan = NULL       # which may be gone by the time that the addresses are
            self.unreserve(range, None)
            raise out_of_host_memory()
        return 0

    # -- making and mapping -------------------------------------------------------------------------------------------

    cdef uint64_t create(self, uint64_t wanted, uint64_t nbytes) except? 0xFFFFFFFFFFFFFFFF:
        """Makes pages, as many as are wanted or as there is memory for, and lists them in `fresh`, which must be empty.
        Returns how many. An interrupt leaves those that were made there."""
        cdef Page page, last = None
        cdef uint64_t made = 0
        cdef double begun = seconds_now()
        try:
            while made < wanted:    # a child that is forked in a call releases those of `fresh` that have numbers
                page = Page()       # its record first: what goes wrong later needs no memory of the host
                page.nbytes = nbytes
                if last is None:
                    self.fresh = page
                else:
                    last.next = page
                self.add_calls(1)
                page.number = call_create(self.source.sub_allocator, self.device, nbytes)
                if page.number is None:
                    self.is_refused = True
                    self.source.refused_bytes.set(nbytes)
                    break
                made += 1
                last = page
        finally:
            self.calls.creates += made
            self.calls.seconds += seconds_now() - begun
            if last is None:
                self.fresh = None
            else:
                last.next = None
        return made

    cdef void release_fresh(self) noexcept:
        """Releases the pages that were made and could not be mapped, the first first."""
        cdef Page page
        while self.fresh is not None:
            page = self.fresh
            self.fresh, page.next = page.next, None
            if page.number is not None:
                self.calls.releases += 1
                self.release_page(page, None)

    cdef uint64_t map_fresh(self, AddressRange range, ChunkHandle handle) except 0:
        """Maps as many new pages to a chunk as it has slots, after which it is free. Returns how many. The chunk is one
        that `begin_mapping` has cut, so nobody else touches it."""
        cdef FreePart part = self.part_of(handle)
        cdef Py_ssize_t count = part.size // range.slot, listed = 0
        cdef list mapped = []
        cdef Page page = self.fresh
        cdef cbool done
        self.forget_lost()
        try:
            while listed < count:
                mapped.append(page)
                page = page.next
                listed += 1
            self.enter_pages(range, part.ptr, mapped)
            self.fresh = page           # from here on `give_up` releases them
            for page in mapped:
                page.next = None
            self.put(part.ptr, mapped, part.size)
            acquire_lock(self.lock[0])      # `handle` is what it was: nobody finds it, or joins it, until it is free
            done = end_mapping(self.pool, handle)
            self.note_unmapped(range, NO_CHUNK)
            self.touched.nbytes = 0 if done else self.touched.nbytes    # under the lock: no fork comes in between
            self.lock.release()
            if not done:
                self.undo_mapping(part.ptr, part.size)
                raise out_of_host_memory()
        except BaseException:
            self.give_up(range, handle)
            self.touched.nbytes = 0
            raise
        self.note_change()
        return count

    cdef int put(self, uint64_t ptr, list pages, uint64_t nbytes) except -1:
        """Maps pages and lets the device use them: all, or none. If that fails, `is_lost` says what stayed mapped.
        Whoever enters what came of it in the records sets `touched` back."""
        cdef list numbers
        cdef Page page
        cdef double begun = seconds_now()
        self.forget_lost()
        numbers = driver_numbers(pages)
        self.touched = Place(ptr, nbytes)
        try:
            self.add_calls(len(numbers))
            if self.native is None:
                self.put_by_methods(ptr, numbers, nbytes)
            else:
                self.put_natively(ptr, numbers, nbytes)
        finally:
            self.calls.seconds += seconds_now() - begun
        for page in pages:
            page.is_mapped = True
        return 0

    cdef int put_by_methods(self, uint64_t ptr, list numbers, uint64_t nbytes) except -1:
        try:
            self.device.map(ptr, numbers)
        except BaseException as error:
            self.lost = getattr(error, "lost", ())
            raise
        self.calls.maps += len(numbers)
        try:
            self.calls.set_accesses += 1
            self.add_calls(1)
            self.device.set_access(ptr, nbytes)
        except BaseException:
            self.undo_mapping(ptr, nbytes)
            raise
        return 0

    cdef int put_natively(self, uint64_t ptr, list numbers, uint64_t nbytes) except -1:
        """The same with both calls behind each other, and the GIL let go once for them: beside threads that run Python
        it may take five milliseconds to get it back."""
        cdef bfc_mapping_fault fault
        cdef vector[uint64_t] pages = numbers
        cdef cbool is_mapped = False
        cdef int result
        with nogil:
            result = self.native.put(ptr, pages, nbytes, &is_mapped, &fault)
        if is_mapped:
            self.calls.maps += pages.size()
            self.calls.set_accesses += 1
            self.add_calls(1)
        try:
            self.native.check(result, "set_access" if is_mapped else "map", &fault)
        except BaseException as error:
            if is_mapped:
                self.undo_mapping(ptr, nbytes)
            else:
                self.lost = getattr(error, "lost", ())
            raise
        return 0

    cdef void undo_mapping(self, uint64_t ptr, uint64_t nbytes) noexcept:
        """Unmaps what was mapped just now. If that fails, all of it is lost."""
        try:
            self.call_unmap(ptr, nbytes)
        except BaseException:
            self.lost_row = Place(ptr, nbytes)

    cdef void forget_lost(self) noexcept:
        self.lost = ()
        self.lost_row.nbytes = 0

    cdef bint has_lost(self) noexcept:
        return self.lost_row.nbytes != 0 or bool(self.lost)

    cdef bint is_lost(self, uint64_t ptr) noexcept:
        """Whether a page stayed mapped there after a `put` that failed."""
        if self.lost_row.nbytes and self.lost_row.ptr <= ptr < self.lost_row.ptr + self.lost_row.nbytes:
            return True
        return lies_in(ptr, self.lost)

    cdef void give_up(self, AddressRange range, ChunkHandle handle) noexcept:
        """Takes a mapping that failed out of the records. What is lost stays, and is to be unmapped later."""
        cdef FreePart part = self.part_of(handle)
        cdef uint64_t ptr = part.ptr
        cdef bint some = False
        while ptr < part.ptr + part.size:
            if self.is_lost(ptr):
                some = True
            else:
                self.drop_slot(range, ptr, None)
            ptr += range.slot
        acquire_lock(self.lock[0])
        cancel_mapping(self.pool, handle, some)
        self.note_unmapped(range, NO_CHUNK)
        self.lock.release()
        if some:        # the chunk is LEAVING now: only this thread knows it
            self.settle(range, handle)

    # -- unmapping ----------------------------------------------------------------------------------------------------

    cdef uint64_t unmap_leaving(self, AddressRange range, ChunkHandle handle, bint one_by_one, Faults faults) noexcept:
        """Unmaps what a LEAVING chunk has, in rows as long as they can be or `one_by_one`, and releases the pages.
        What cannot be unmapped stays LEAVING. Returns the bytes that went."""
        cdef FreePart part = self.part_of(handle)
        # Other threads allocate and free beside it. Nothing joins a LEAVING chunk, so `handle` and its size last.
        cdef uint64_t end = part.ptr + part.size, start = part.ptr, stop
        while start < end:
            stop = start
            while stop < end and self.has_page(range, stop):
                stop += range.slot
            if stop > start and self.unmap_elsewhere(range, start, stop - start, faults):
                self.unmap_slots(range, start, stop - start, range.slot if one_by_one else stop - start, faults)
            start = max(stop, start + range.slot)
        return self.settle(range, handle)

    cdef void unmap_slots(self, AddressRange range, uint64_t ptr, uint64_t nbytes, uint64_t step,
                          Faults faults) noexcept:
        """Unmaps slots, `step` bytes in each call, and drops their pages. Those that cannot be unmapped keep theirs."""
        cdef uint64_t at = ptr, slot
        while at < ptr + nbytes:
            try:
                self.call_unmap(at, step)
            except BaseException as error:
                if faults is not None:
                    faults.add(error)
            else:
                slot = at
                while slot < at + step:
                    self.drop_slot(range, slot, faults)
                    slot += range.slot
                self.touched.nbytes = 0     # only now: a child that is forked in a release drops the other slots, too
            at += step

    cdef uint64_t settle(self, AddressRange range, ChunkHandle handle) noexcept:
        """Tells the pool which slots of a leaving chunk have gone. Returns the bytes that have."""
        cdef uint64_t gone = 0, size, end
        cdef FreePart part
        cdef ChunkHandle rest
        cdef bint has_gone
        while handle < NO_HOST_MEMORY:
            part = self.part_of(handle)     # holds after the lock, since only the mapper cuts a chunk that is leaving
            end = part.ptr + part.size
            has_gone = not self.has_page(range, part.ptr)
            size = range.slot
            while part.ptr + size < end and self.has_page(range, part.ptr + size) != has_gone:
                size += range.slot
            acquire_lock(self.lock[0])
            rest = end_unmapping(self.pool, handle, size, has_gone)
            self.note_unmapped(range, handle)
            self.lock.release()
            gone += size if has_gone and rest != NO_HOST_MEMORY else 0
            handle = rest       # LEAVING still, so it is there still
            range.some_stuck = range.some_stuck or not has_gone or rest == NO_HOST_MEMORY
        self.note_change()
        return gone

    cdef uint64_t unmap_again(self, AddressRange range, bint one_by_one, Faults faults) noexcept:
        """Tries again to unmap what should have left a range. Returns the bytes that went."""
        cdef uint64_t released = 0, end
        cdef FreePart part
        cdef ChunkHandle handle = self.leaving_from(range, range.ptr)
        range.some_stuck = False
        while handle != NO_CHUNK:
            part = self.part_of(handle)
            end = part.ptr + part.size      # a part of it that stays is not tried twice
            released += self.unmap_leaving(range, handle, one_by_one, faults)
            handle = self.leaving_from(range, end)
        return released

    cdef ChunkHandle leaving_from(self, AddressRange range, uint64_t ptr) noexcept:
        """The first chunk that is to leave a range, from this address on; or NO_CHUNK. The mapper's handle lasts."""
        cdef ChunkHandle handle = NO_CHUNK
        acquire_lock(self.lock[0])
        if range.is_known:
            handle = self.pool.regions[range.ptr + range.nbytes].first
        while handle != NO_CHUNK and (self.pool.chunks[handle].ptr < ptr or self.pool.chunks[handle].state != LEAVING):
            handle = self.pool.chunks[handle].next
        self.lock.release()
        return handle

    cdef FreePart part_of(self, ChunkHandle handle) noexcept:
        """A chunk that only the mapper changes, which the caller is: of any other it may be wrong after the lock."""
        acquire_lock(self.lock[0])
        cdef FreePart part = FreePart(handle, self.pool.chunks[handle].ptr, self.pool.chunks[handle].size)
        self.lock.release()
        return part

    cdef uint64_t count_mapped(self, AddressRange range) noexcept:
        """How many slots of a range have pages. Only the mapper changes that."""
        cdef uint64_t ptr = range.ptr, slots, count = 0
        slots = self.slots_of(range) if range.has_table else 0
        while slots > 0:
            count += self.has_page(range, ptr)
            ptr += range.slot
            slots -= 1
        return count

    cdef bint wait_for(self, AddressRange range, Faults faults) noexcept:
        """Waits for the work of a range's stream. False: that failed, or the stream captures a graph."""
        try:
            streams = self.streams_of(range)
            for stream in streams:
                if self.fences.is_captured(stream):
                    return False
            for stream in streams:
                self.source.sub_allocator.wait(stream)
            return True
        except BaseException as error:
            faults.add(error)
            return False

    # -- giving addresses back ----------------------------------------------------------------------------------------

    cdef void forget_ranges(self) noexcept:
        """Takes all ranges out of the pool, whose memory goes next. Needs the lock."""
        cdef AddressRange range
        for range in self.ranges:
            if range.is_known:
                remove_range(self.pool, range.ptr, range.nbytes)
                range.is_known = False

    cdef void empty(self, AddressRange range, Faults faults) noexcept:
        """Unmaps all that may be unmapped in a range, in rows as long as they can be."""
        cdef uint64_t start = range.ptr, end, last
        if not range.has_table:
            return
        last = range.ptr + self.slots_of(range) * range.slot
        while start < last:
            end = start
            while end < last and self.may_be_unmapped(range, end):
                end += range.slot
            if end > start:
                self.unmap_slots(range, start, end - start, end - start, faults)
            start = max(end, start + range.slot)

    cdef void unreserve(self, AddressRange range, Faults faults) noexcept:
        """Gives back the addresses of a range that the pool has forgotten, if nothing is mapped there. If that fails,
        the range stays in the list, for another try."""
        if self.count_mapped(range):
            return
        if range.has_table:
            acquire_lock(self.lock[0])      # searches of other threads read the table
            self.close_table(range)
            range.has_table = False
            self.lock.release()
        try:
            if not range.is_gone:
                self.call_unreserve(range.ptr, range.nbytes)
            self.remove(range)
        except BaseException as error:
            if faults is not None:
                faults.add(error)

    cdef void remove(self, AddressRange range) noexcept:
        """Takes a range that has no addresses off the list. If the host has no memory for that, the next release does
        it."""
        range.is_gone = True
        try:
            self.ranges.remove(range)
        except MemoryError:
            pass

    # -- pages that the sub-allocator did not take back ---------------------------------------------------------------

    cdef void release_page(self, Page page, Faults faults) noexcept:
        """Releases a page. If that fails, it is kept for another try, and goes on counting against the limit."""
        self.add_calls(1)
        self.leaving = page     # it is in no slot any more: a child that is forked in the call finds it here
        try:
            self.device.release(page.number)
        except BaseException as error:
            self.source.keep_bytes(page.nbytes)
            page.next = self.unreleased
            self.unreleased = page
            if faults is not None:
                faults.add(error)
        self.leaving = None

    cdef uint64_t unreleased_bytes(self) noexcept:
        """The bytes of the pages that the sub-allocator failed to release."""
        return bytes_from(self.unreleased) + bytes_from(self.offered)

    cdef void try_unreleased_again(self, Faults faults) noexcept:
        cdef Page page
        self.offered, self.unreleased = self.unreleased, None
        while self.offered is not None:
            page = self.offered     # not counted in the call: a child that is forked there releases it for certain
            self.source.keep_bytes(-<int64_t>page.nbytes)
            self.offered, page.next = page.next, None
            self.release_page(page, faults)

    # -- a thread that is there no more -------------------------------------------------------------------------------

    cdef void take_over(self) noexcept:
        """Tidies up behind a thread that stopped for ever while it mapped or unmapped: releases the pages that it had
        made and had not mapped, or had unmapped."""
        cdef AddressRange range
        cdef ChunkHandle handle
        cdef Py_ssize_t i = len(self.ranges)
        self.end_calls_of_other()
        while i > 0:
            i -= 1
            range = self.ranges[i]
            if range.ptr == NOWHERE:        # the thread stopped while it reserved its addresses
                del self.ranges[i]
            elif self.going.nbytes and range.ptr == self.going.ptr:
                self.remove(range)
            elif self.touched.nbytes and range.has_table and range.ptr <= self.touched.ptr < range.ptr + range.nbytes:
                self.forget_touched(range)
        self.touched.nbytes = self.going.nbytes = 0
        self.forget_lost()
        self.release_fresh()
        for range in self.ranges:
            range.some_stuck = True         # there may be chunks that are LEAVING
            handle = self.growing_in(range)
            if handle != NO_CHUNK:
                self.give_up(range, handle)

    cdef void end_calls_of_other(self) noexcept:
        """Does again what a stopped thread was in the middle of, so that it is known: nothing is mapped where it mapped
        or unmapped, page by page, and what it released or unreserved has gone. What was done already fails here, and
        that is no error. `touched` and `going` are left to those who keep the records of it."""
        cdef Page page = self.offered, following
        cdef uint64_t done = 0, step = self.page_bytes_at(self.touched.ptr) if self.touched.nbytes else 1
        while done < self.touched.nbytes:
            try:
                self.device.unmap(self.touched.ptr + done, step)
            except BaseException:
                pass
            done += step
        try:
            if self.leaving is not None:
                self.device.release(self.leaving.number)
        except BaseException:
            pass
        self.leaving = self.offered = None
        try:
            if self.going.nbytes:
                self.device.unreserve(self.going.ptr, self.going.nbytes)
        except BaseException:
            pass
        while page is not None:     # these it had not come to
            following, page.next = page.next, self.unreleased
            self.unreleased = page
            page = following

    cdef void forget_touched(self, AddressRange range) noexcept:
        """Drops the pages from the slots that `end_calls_of_other` has unmapped."""
        cdef uint64_t ptr = self.touched.ptr
        while ptr < self.touched.ptr + self.touched.nbytes:
            self.drop_slot(range, ptr, None)
            ptr += range.slot

    cdef ChunkHandle growing_in(self, AddressRange range) noexcept:
        """The chunk of a range that memory is being mapped for, or NO_CHUNK."""
        cdef ChunkHandle handle = NO_CHUNK
        acquire_lock(self.lock[0])
        if range.is_known:
            handle = self.pool.regions[range.ptr + range.nbytes].first
        while handle != NO_CHUNK and not (self.pool.chunks[handle].state == UNMAPPED
                                          and self.pool.chunks[handle].freed_at_count == IS_GROWING):
            handle = self.pool.chunks[handle].next
        self.lock.release()
        return handle

    # -- calls --------------------------------------------------------------------------------------------------------

    cdef int call_unmap(self, uint64_t ptr, uint64_t nbytes) except -1:
        """Unmaps pages. Whoever enters in the records that nothing is mapped there any more sets `touched` back."""
        cdef Place before = self.touched
        cdef double begun = seconds_now()
        self.calls.unmaps += 1
        self.touched = Place(ptr, nbytes)
        try:
            self.add_calls(1)
            self.device.unmap(ptr, nbytes)
        except BaseException:
            self.touched = before       # that of a `put` which failed
            raise
        finally:
            self.calls.seconds += seconds_now() - begun
        return 0

    cdef int call_unreserve(self, uint64_t ptr, uint64_t nbytes) except -1:
        """Gives a reservation back. Whoever keeps it in a list must take it off at once, before any other call."""
        self.add_calls(1)
        self.going = Place(ptr, nbytes)
        try:
            self.device.unreserve(ptr, nbytes)
        finally:
            self.going.nbytes = 0
        return 0

    cdef void add_calls(self, uint64_t count) noexcept nogil:
        """Counts calls of the sub-allocator that are about to be made; of `map`, one for each page."""
        add_up(&self.source.driver_calls, count)

    cdef void note_change(self) noexcept nogil:
        self.changes += 1
        self.source.changes.add(1)

    # -- tags ---------------------------------------------------------------------------------------------------------

    # Threads without the GIL may open lanes, and then the table of sets of bins moves: so it is read under the lock.

    cdef cbool is_of_tag(self, uint32_t bin_set, uint64_t number) noexcept nogil:
        """Whether a set of bins belongs to a tag. Needs the lock."""
        cdef uint64_t* pool = self.pool.bin_sets[bin_set].lane.pool
        return number != NO_TAG and self.tags.tag_of(pool) == number

    cdef bint belongs_to(self, AddressRange range, uint64_t tag) noexcept:
        acquire_lock(self.lock[0])
        cdef bint found = range.is_known and self.is_of_tag(range.bin_set, tag)
        self.lock.release()
        return found

    cdef bint is_set_asleep(self, uint32_t bin_set) noexcept:
        acquire_lock(self.lock[0])
        cdef bint found = self.pool.bin_sets[bin_set].asleep != 0
        self.lock.release()
        return found

    cdef list ranges_of(self, uint64_t tag):
        cdef AddressRange range
        cdef list found = []
        for range in self.ranges:
            if self.belongs_to(range, tag):
                found.append(range)
        return found
