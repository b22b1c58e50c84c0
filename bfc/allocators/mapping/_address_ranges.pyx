"""Ranges of addresses, and the transactions in which memory is mapped into them and given back.

All mapped memory goes through `AddressRanges`; its subclasses choose what is mapped where. The sub-allocator is called
without the lock, between `enter` and `leave`, by one thread at a time; other threads allocate and free meanwhile. Where
the sub-allocator has C functions, a request maps without the GIL (`enter_natively`); the records are structs, and what
guards them then is a lock in the GIL's place (native/mapped_ranges.hpp). A method that is `nogil` answers -1 where it
has failed, and `MappingDevice` keeps the error, for `check`.

Each transaction takes the allocator's lock more than once. That is safe between two locks for these reasons:

- Chunks that are UNMAPPED, LEAVING or MAPPED_ELSEWHERE are in no bin, and nothing merges with them. Only the mapper
  changes them, and it alone changes which page is in which slot.
- Memory becomes a free chunk only after the device may use it, and stops being one before the device is asked to unmap
  it. So no other thread is ever handed addresses that are not mapped.
- Each page is in a list or a slot at any time: it is entered in the next one before it leaves the last one, and what
  leaves a list needs no memory of the host. A call whose undoing fails leaves its pages where `settle`, `unmap_again`
  or `try_unreleased_again` finds them.
- A child may be forked whenever the guard of the records is free: in each call, and while a lock is waited for with the
  GIL. What a call is about stands in `touched`, `leaving`, `offered` or `going` from before it until the records say
  what came of it.
"""

import time

cimport cython
from cpython.number cimport PyNumber_Index
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back, try_reserve
from bfc.native.mapping cimport BFC_NO_ROOM, bfc_mapping_fault
from bfc.interpreter._process cimport defer_handlers, resume_handlers
from bfc._core cimport LEAVING, NO_CHUNK, NO_HOST_MEMORY, UNMAPPED, ChunkHandle, Pool
from bfc.allocators._places cimport give_to_plan
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

_POLL_SECONDS = 0.001


# -- what is asked of a sub-allocator, and what it fails with ----------------------------------------------------------

cdef uint64_t call_reserve(sub_allocator, device, uint64_t nbytes) except 0:
    """Addresses of a sub-allocator, or of its C functions, which are the `device` then."""
    cdef uint64_t place = 0, granularity = sub_allocator.mapping_granularity
    answer = device.reserve(nbytes)
    if answer is None:
        raise no_addresses(sub_allocator, nbytes)
    try:
        place = PyNumber_Index(answer)      # nothing here needs memory of the host: the addresses would be lost
    except (TypeError, OverflowError):
        pass
    if is_address(place, nbytes, granularity):
        return place
    if place:
        try:
            device.unreserve(place, nbytes)
        except Exception:
            pass    # it was no reservation
    raise no_address(sub_allocator, answer)


cdef cbool is_address(uint64_t place, uint64_t nbytes, uint64_t granularity) noexcept nogil:
    """Whether a reservation may begin there."""
    return 0 < place <= (<uint64_t>1 << 63) - nbytes and place % granularity == 0


cdef object no_addresses(sub_allocator, uint64_t nbytes):
    return SubAllocatorError(
        f"{sub_allocator!r} has no {format_bytes(nbytes)} of addresses left to reserve. Memory is not short: "
        f"each stream and private pool reserves that much. Use fewer of them, or expandable_segments:False")


cdef object no_address(sub_allocator, answer):
    return SubAllocatorError(f"{sub_allocator!r}.reserve returned {answer!r}: an address is an int above 0, and a "
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


cdef dict odd_numbers = {}      # of pages, which a record has no room for; what stands for each there


cdef int note_number(Page* page, object number) except -1:
    """Enters the number of a page that was made."""
    if not 0 <= number < 1 << 63:
        number = odd_numbers.setdefault(number, (1 << 64) - 1 - len(odd_numbers))
    page.number = number
    page.is_made = True
    return 0


cdef object number_of(uint64_t kept):
    """The number of a page, as the sub-allocator gave it."""
    cdef uint64_t which = ~kept
    return list(odd_numbers)[which] if which < <uint64_t>len(odd_numbers) else kept


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


# -- the device --------------------------------------------------------------------------------------------------------

@cython.final
@cython.no_gc_clear
cdef class MappingDevice:
    """What maps: its calls, what they fail with, and what they are about."""

    # -- one thread at a time -----------------------------------------------------------------------------------------

    cdef int find(self) except -1:
        """Finds what maps, when first asked: the C functions of the sub-allocator, if it has some."""
        cdef NativeMapping native
        if self.target is None:
            native = native_calls(self.source.sub_allocator)
            if native is not None:
                self.granularity = self.source.sub_allocator.mapping_granularity
                self.native = native
                self.table = native.table
            self.target = self.source.sub_allocator if native is None else native
        return 0

    # -- what has failed ----------------------------------------------------------------------------------------------

    cdef int fail(self, object error) noexcept:
        """Keeps an error, for `check` or `drop_error`; behind one that is kept already, where this comes of cleaning
        up."""
        if self.error is None:
            self.error = error
        else:
            self.later = error
        return -1

    cdef int fail_for_memory(self) noexcept nogil:
        self.guard.pause()
        self.keep_memory_error()
        self.guard.go_on()
        return -1

    cdef int keep_memory_error(self) noexcept with gil:
        return self.fail(out_of_host_memory())

    cdef int drop_error(self, Faults faults, cbool raises_interrupts) noexcept nogil:
        """Notes the error in `faults`, or drops it (None), but for an interrupt that is to be raised: then it stays,
        and the answer is -1."""
        cdef int passed
        self.guard.pause()
        passed = self.pass_error_on(faults, raises_interrupts)
        self.guard.go_on()
        return passed

    cdef int pass_error_on(self, Faults faults, cbool raises_interrupts) noexcept with gil:
        newest = self.error if self.later is None else self.later
        if raises_interrupts and faults is None and not isinstance(newest, Exception):
            return -1
        if faults is not None:
            faults.add(newest)
        if self.later is None:
            self.error = None
        self.later = None
        return 0

    cdef PyObject* take_error(self) noexcept with gil:
        """What a step has failed with, for a caller that leaves before it raises that."""
        cdef PyObject* error = <PyObject*>self.error
        Py_INCREF(self.error)
        self.error = self.later = None
        return error

    cdef int check(self, int64_t result) except -1:
        """Raises what a step has failed with, where it has answered -1."""
        if result >= 0:
            return 0
        error, self.error, self.later = self.error, None, None
        raise error

    # -- reserving ----------------------------------------------------------------------------------------------------

    cdef int refuse_overlap(self, uint64_t ptr) noexcept nogil:
        self.guard.pause()
        self.keep_overlap(ptr)
        self.guard.go_on()
        return -1

    cdef int keep_overlap(self, uint64_t ptr) noexcept with gil:
        try:
            raise SubAllocatorError(f"{self.source.sub_allocator!r}.reserve returned {ptr:#x}, which is in use")
        except BaseException as error:      # or the host has no memory for the text
            return self.fail(error)

    # -- making and mapping -------------------------------------------------------------------------------------------

    cdef int put(self, uint64_t ptr, vector[PageRef]& pages, uint64_t nbytes) noexcept nogil:
        """Maps pages and lets the device use them: all, or none. If that fails, `is_lost` says what stayed mapped.
        Whoever enters what came of it in the records sets `touched` back."""
        cdef vector[uint64_t] numbers
        cdef size_t i
        cdef int result
        cdef double begun = seconds_now()
        self.forget_lost()
        if not try_reserve(numbers, pages.size()):
            return self.fail_for_memory()
        for i in range(pages.size()):
            numbers.push_back(pages[i].get().number)
        self.touched = Place(ptr, nbytes)
        self.add_calls(pages.size())
        result = (self.put_in_python(ptr, numbers, nbytes) if self.table == NULL else
                  self.put_natively(ptr, numbers, nbytes))
        self.counts.seconds += seconds_now() - begun
        for i in range(pages.size() if result == 0 else 0):
            pages[i].get().is_mapped = True
        return result

    cdef int put_in_python(self, uint64_t ptr, vector[uint64_t]& numbers, uint64_t nbytes) noexcept with gil:
        cdef list pages = []
        cdef size_t i
        try:
            for i in range(numbers.size()):
                pages.append(number_of(numbers[i]))
            self.target.map(ptr, pages)
        except BaseException as error:
            self.note_lost(error, ptr, nbytes)
            return self.fail(error)
        self.counts.maps += numbers.size()
        self.counts.set_accesses += 1
        self.add_calls(1)
        try:
            self.target.set_access(ptr, nbytes)
        except BaseException as error:
            self.undo_mapping(ptr, nbytes)
            return self.fail(error)
        return 0

    cdef int put_natively(self, uint64_t ptr, vector[uint64_t]& numbers, uint64_t nbytes) noexcept nogil:
        """The same with both calls behind each other, and the guard let go once for them."""
        cdef bfc_mapping_fault fault
        cdef cbool is_mapped = False
        cdef PyThreadState* state = self.guard.let_go()
        cdef int result = self.native.put(ptr, numbers, nbytes, &is_mapped, &fault)
        self.guard.take_back(state)
        if is_mapped:
            self.counts.maps += numbers.size()
            self.counts.set_accesses += 1
            self.add_calls(1)
        if result == 0:
            return 0
        if is_mapped:
            self.undo_mapping(ptr, nbytes)
        return self.fail_natively(result, "set_access" if is_mapped else "map", &fault)

    cdef void note_lost(self, object error, uint64_t ptr, uint64_t nbytes) noexcept:
        """Notes what a `map` says that has stayed mapped; where that cannot be read, all of it."""
        try:
            for start, size in getattr(error, "lost", ()):
                self.lost.push_back(Place(start, size))
        except Exception:
            self.lost.clear()
            self.lost_row = Place(ptr, nbytes)

    cdef void undo_mapping(self, uint64_t ptr, uint64_t nbytes) noexcept nogil:
        """Unmaps what was mapped just now. If that fails, all of it is lost."""
        if self.unmap(ptr, nbytes) < 0:
            self.drop_error(None, False)
            self.lost_row = Place(ptr, nbytes)

    cdef void forget_lost(self) noexcept nogil:
        self.lost.clear()
        self.lost_row.nbytes = 0

    cdef cbool has_lost(self) noexcept nogil:
        return self.lost_row.nbytes != 0 or not self.lost.empty()

    cdef cbool is_lost(self, uint64_t ptr) noexcept nogil:
        """Whether a page stayed mapped there after a `put` that failed."""
        cdef size_t i
        for i in range(self.lost.size()):
            if self.lost[i].has(ptr):
                return True
        return self.lost_row.has(ptr)

    # -- calls --------------------------------------------------------------------------------------------------------

    cdef int call(self, Verb verb, uint64_t address, uint64_t nbytes, uint64_t* taken) noexcept nogil:
        """Makes a call. 1: there is no memory for a page; -1: it has failed. `taken`: what `reserve` or `create`
        gave."""
        return (self.call_in_python(verb, address, nbytes, taken) if self.table == NULL else
                self.call_natively(verb, address, nbytes, taken))

    cdef int call_natively(self, Verb verb, uint64_t address, uint64_t nbytes, uint64_t* taken) noexcept nogil:
        cdef bfc_mapping_fault fault
        cdef uint64_t got = 0
        cdef int result = 0
        cdef const char* call = "reserve"
        cdef PyThreadState* state = self.guard.let_go()
        memset(&fault, 0, sizeof(fault))
        if verb == RESERVE:
            result = self.table.reserve(self.table.self, nbytes, &got, &fault)
        elif verb == UNRESERVE:
            call, result = "unreserve", self.table.unreserve(self.table.self, address, nbytes, &fault)
        elif verb == CREATE:
            call, result = "create", self.table.create(self.table.self, nbytes, &got, &fault)
        elif verb == RELEASE:
            call, result = "release", self.table.release(self.table.self, address, &fault)
        else:
            call, result = "unmap", self.table.unmap(self.table.self, address, nbytes, &fault)
        if verb == RESERVE and result == 0 and got and not is_address(got, nbytes, self.granularity):
            self.table.unreserve(self.table.self, got, nbytes, &fault)      # it was no reservation
        self.guard.take_back(state)
        if verb == CREATE and result == BFC_NO_ROOM:
            return 1
        if verb == RESERVE and (result == BFC_NO_ROOM
                                or (result == 0 and not is_address(got, nbytes, self.granularity))):
            return self.refuse_addresses(nbytes, got, result == BFC_NO_ROOM)
        if result != 0:
            return self.fail_natively(result, call, &fault)
        if taken != NULL:
            taken[0] = got
        return 0

    cdef int call_in_python(self, Verb verb, uint64_t address, uint64_t nbytes, uint64_t* taken) noexcept with gil:
        cdef Page page
        try:
            if verb == RESERVE:
                taken[0] = call_reserve(self.source.sub_allocator, self.target, nbytes)
            elif verb == CREATE:
                number = call_create(self.source.sub_allocator, self.target, nbytes)
                if number is None:
                    return 1
                note_number(&page, number)
                taken[0] = page.number
            elif verb == RELEASE:
                self.target.release(number_of(address))
            elif verb == UNRESERVE:
                self.target.unreserve(address, nbytes)
            else:
                self.target.unmap(address, nbytes)
        except BaseException as error:
            return self.fail(error)
        return 0

    cdef int fail_natively(self, int result, const char* call, bfc_mapping_fault* fault) noexcept nogil:
        self.guard.pause()
        self.keep_native_error(result, call, fault)
        self.guard.go_on()
        return -1

    cdef int keep_native_error(self, int result, const char* call, bfc_mapping_fault* fault) noexcept with gil:
        try:
            self.native.check(result, call.decode(), fault)
        except BaseException as error:
            self.note_lost(error, fault.address, fault.nbytes)      # what a `map` that has failed left mapped
            return self.fail(error)
        return 0

    cdef int refuse_addresses(self, uint64_t nbytes, uint64_t address, cbool none) noexcept nogil:
        self.guard.pause()
        self.keep_refusal(nbytes, address, none)
        self.guard.go_on()
        return -1

    cdef int keep_refusal(self, uint64_t nbytes, uint64_t address, cbool none) noexcept with gil:
        sub_allocator = self.source.sub_allocator
        try:
            raise no_addresses(sub_allocator, nbytes) if none else no_address(sub_allocator, address)
        except BaseException as error:      # or the host has no memory for the text
            return self.fail(error)

    cdef int unmap(self, uint64_t ptr, uint64_t nbytes) noexcept nogil:
        """Unmaps pages. Whoever enters in the records that nothing is mapped there any more sets `touched` back."""
        cdef Place before = self.touched
        cdef double begun = seconds_now()
        cdef int result
        if self.without_calls:
            return 0
        self.counts.unmaps += 1
        self.touched = Place(ptr, nbytes)
        self.add_calls(1)
        result = self.call(UNMAP, ptr, nbytes, NULL)
        if result < 0:
            self.touched = before       # that of a `put` which failed
        self.counts.seconds += seconds_now() - begun
        return result

    cdef int unreserve(self, uint64_t ptr, uint64_t nbytes) noexcept nogil:
        """Gives a reservation back. Whoever keeps it in a list must take it off at once, before any other call."""
        cdef int result
        self.add_calls(1)
        self.going = Place(ptr, nbytes)
        result = self.call(UNRESERVE, ptr, nbytes, NULL)
        self.going.nbytes = 0
        return result

    cdef void add_calls(self, uint64_t count) noexcept nogil:
        """Counts calls of the sub-allocator that are about to be made; of `map`, one for each page."""
        add_up(&self.source.driver_calls, count)


# -- what is in ranges -------------------------------------------------------------------------------------------------

@cython.final
cdef class MappedRun:
    """Mapped memory that lies end to end, or the addresses for it."""

    cdef void note_unmapped(self) noexcept:
        cdef size_t i
        self.is_mapped = False
        for i in range(self.pages.size()):
            self.pages[i].get().is_mapped = False


@cython.final
cdef class TagTransition:
    """A tag that is falling asleep, or waking."""

    cdef int add(self, MappedRun run) except -1:
        """Adds a run. Its pages must be new here."""
        cdef size_t i
        self.runs.append(run)
        for i in range(run.pages.size()):
            self.pages.push_back(run.pages[i])
        return 0

    cdef bint misses_pages(self) noexcept:
        cdef size_t i
        for i in range(self.pages.size()):
            if not self.pages[i].get().is_made:
                return True
        return False

    cdef void settle_pages(self) noexcept:
        """Notes which pages are mapped anywhere, after something has failed."""
        cdef MappedRun run
        cdef size_t i
        for run in self.runs:
            for i in range(run.pages.size() if run.is_mapped else 0):
                run.pages[i].get().is_mapped = True


@cython.no_gc_clear
cdef class AddressRanges:
    """The ranges of an allocator, and the memory in them. It never calls the allocator."""

    def __cinit__(self):
        self.closing = Faults()
        self.device = MappingDevice()

    cdef int attach(self, Lock* lock, Pool pool, Source source, Fences fences, Tags tags) except -1:
        """Takes the allocator's lock and its list of tags that sleep, which must live as long, and its parts."""
        self.lock = lock
        self.pool = pool
        self.source = self.device.source = source
        self.fences = fences
        self.tags = tags
        return 0

    # -- one thread at a time -----------------------------------------------------------------------------------------

    cdef bint enter(self, uint64_t set_aside) except -1:
        """Lets this thread map and unmap, with Python's signal handlers deferred. False: another thread does, or this
        one in a call further up. `set_aside`: the bytes that it has set aside from the limit, which a fork in one of
        its calls must not forget."""
        cdef int entered
        self.device.find()
        entered = become_mapper(self, set_aside, True)
        if entered < 0:
            raise out_of_host_memory()
        if not entered:
            return False
        defer_handlers(&self.deferral)
        if entered > 1:
            self.device.guard.reset()
            self.device.error = self.device.later = None
            self.take_over()
        self.ranges.forget_gone()
        return True

    cdef void leave(self) noexcept:
        """Ends what `enter` began. Also closes, if the allocator was closed in one of the calls meanwhile."""
        if self.must_close:
            close_late(self)
        resume_handlers(&self.deferral)
        stop_mapping(self)

    cdef cbool enter_natively(self, uint64_t set_aside) noexcept nogil:
        """Lets this thread, which has no GIL, map and unmap. False: it cannot now, or must tidy up first behind one
        that is gone. No signal handler is deferred: the only Python that runs says how much memory a source has."""
        if become_mapper(self, set_aside, False) <= 0:
            return False
        self.device.guard.begin()
        self.ranges.forget_gone()
        return True

    cdef void leave_natively(self) noexcept nogil:
        if self.must_close:
            self.device.guard.pause()
            close_late(self)
            self.device.guard.go_on()
        stop_mapping(self)

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

    cdef cbool are_some(self) noexcept nogil:
        """Whether there is anything to be given back."""
        return self.count > 0 or self.mapper != 0

    cdef set streams_asked(self):
        """The streams that say when earlier work on the ranges is done."""
        cdef set streams = set()
        cdef vector[uint64_t] handles
        cdef size_t i
        cdef cbool listed = True
        self.device.guard.begin_reading(self.lock[0])      # another thread may map
        for i in range(self.ranges.size()):
            listed = list_streams(self, self.ranges.at(i), handles) and listed
        self.device.guard.end_reading(self.lock[0])
        if not listed:
            raise out_of_host_memory()
        for i in range(handles.size()):
            streams.add(handles[i])
        return streams

    # -- what a subclass keeps ----------------------------------------------------------------------------------------

    cdef cbool open_table(self, AddressRange* range) noexcept nogil:
        """Makes the table of a range's slots. False: the host is out of memory. Needs the lock."""
        return True

    cdef void close_table(self, AddressRange* range) noexcept nogil:
        """Drops it; no slot has a page. Needs the lock."""

    cdef uint64_t slots_of(self, AddressRange* range) noexcept nogil:
        """How many slots the table has, from the start of the range on: no slot behind them has a page."""
        return range.pages.size()

    cdef cbool has_page(self, AddressRange* range, uint64_t ptr) noexcept nogil:
        return False

    cdef cbool may_be_unmapped(self, AddressRange* range, uint64_t ptr) noexcept nogil:
        """Whether a slot has a page, and it goes once it is unmapped there, as far as is known."""
        return self.has_page(range, ptr)

    cdef int enter_pages(self, AddressRange* range, uint64_t ptr, vector[PageRef]& pages) noexcept nogil:
        """Enters pages in the slots that they are to be mapped into: all, or none."""
        return 0

    cdef void drop_slot(self, AddressRange* range, uint64_t ptr, Faults faults) noexcept nogil:
        """Takes a page that is not mapped there any more out of its slot, if that has one, and releases the page if
        it is mapped nowhere else."""

    cdef cbool unmap_elsewhere(self, AddressRange* range, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept nogil:
        """Unmaps the pages of some slots wherever else they are mapped. False: that failed, and they must stay."""
        return True

    cdef void note_unmapped(self, AddressRange* range, ChunkHandle added) noexcept nogil:
        """Lists what is unmapped in a range, after some of it has changed and this chunk may be new. Needs the lock
        under which it has changed."""

    cdef size_t count_beside_ranges(self) noexcept nogil:
        """How much else must be unmapped, unreserved or released in the end."""
        return 0

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

    cdef int check_timing(self) except -1:
        """Refuses a timing counter of TensorFlow's where it does not go with it."""
        return 0

    cdef int check_pages(self, str method) except -1:
        """Refuses a method that is for pages where there are none."""
        raise ValueError(f"{method} is for BFCAllocator(virtual_memory=True) and CachingAllocator(stitch=True)")

    cdef bint extend(self, uint64_t address, uint64_t rounded) except -1:
        """Maps the memory that an allocation lacks for its new size, if its range is unmapped behind it. Returns
        whether it did."""
        return False

    # -- reserving ----------------------------------------------------------------------------------------------------

    cdef int reserve(self, AddressRange* range) noexcept nogil:
        """Reserves the addresses of a new range of the list, and enters it in the pool."""
        # While these are reserved the range is not known to the pool, so others pass over it, and a child that is
        # forked takes it off the list (NOWHERE).
        self.device.add_calls(1)
        if self.device.call(RESERVE, 0, range.nbytes, &range.ptr) < 0:
            self.remove(range)
            return -1
        return self.take_in(range)

    cdef int take_in(self, AddressRange* range) noexcept nogil:
        cdef ChunkHandle handle = NO_HOST_MEMORY
        cdef cbool overlaps
        # The pool has not this range or all of it: a snapshot sees no half of one.
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
            give_to_plan(self.pool, range.plan, range.region, range.ptr)
        self.lock.release()
        if overlaps:
            self.remove(range)      # and it is not ours to give back
            return self.device.refuse_overlap(range.ptr)
        if not range.is_known:
            range.plan = NULL       # which may be gone by the time that the addresses are
            self.unreserve(range, None)
            return self.device.fail_for_memory()
        return 0

    # -- making and mapping -------------------------------------------------------------------------------------------

    cdef int64_t create(self, uint64_t wanted, uint64_t nbytes) noexcept nogil:
        """Makes pages, as many as are wanted or as there is memory for, and lists them in `fresh`, which must be empty.
        Returns how many. What is made before an interrupt stays there."""
        cdef PageRef page, last
        cdef uint64_t made = 0
        cdef int result = 0
        cdef double begun = seconds_now()
        while made < wanted and result == 0:    # a child that is forked in a call releases what has a number
            page = new_page(nbytes)             # its record first: what goes wrong later needs no memory of the host
            if page.get() == NULL:
                result = self.device.fail_for_memory()
                break
            if last.get() == NULL:
                self.fresh = page
            else:
                last.get().next = page
            self.device.add_calls(1)
            result = self.device.call(CREATE, 0, nbytes, &page.get().number)
            if result == 0:
                page.get().is_made = True
                made += 1
                last = page
        if result > 0:
            self.device.is_refused = True
            self.source.refused_bytes.set(nbytes)
        self.device.counts.creates += made
        self.device.counts.seconds += seconds_now() - begun
        if last.get() == NULL:
            self.fresh.reset()
        else:
            last.get().next.reset()
        return -1 if result < 0 else <int64_t>made

    cdef void release_fresh(self) noexcept nogil:
        """Releases the pages that were made and could not be mapped, the first first."""
        cdef PageRef page
        while self.fresh.get() != NULL:
            page = self.fresh
            self.fresh = page.get().next
            page.get().next.reset()
            if page.get().is_made:
                self.device.counts.releases += 1
                self.release_page(page, None)

    cdef int64_t map_fresh(self, AddressRange* range, ChunkHandle handle) noexcept nogil:
        """Maps as many new pages to a chunk as it has slots, after which it is free. Returns how many. The chunk is one
        that `begin_mapping` has cut, so nobody else touches it."""
        cdef FreePart part = self.part_of(handle)
        self.device.forget_lost()
        if try_to_map_fresh(self, range, handle, part) < 0:
            self.give_up(range, handle)
            self.device.touched.nbytes = 0
            return -1
        self.note_change()
        return part.size // range.slot

    cdef void give_up(self, AddressRange* range, ChunkHandle handle) noexcept nogil:
        """Takes a mapping that failed out of the records. What is lost stays, and is to be unmapped later."""
        cdef FreePart part = self.part_of(handle)
        cdef uint64_t ptr = part.ptr
        cdef cbool some = False
        while ptr < part.ptr + part.size:
            if self.device.is_lost(ptr):
                some = True
            else:
                self.drop_slot(range, ptr, None)
            ptr += range.slot
        # The chunk becomes free addresses, or is to be unmapped: a free of a neighbour reads its state.
        acquire_lock(self.lock[0])
        cancel_mapping(self.pool, handle, some)
        self.note_unmapped(range, NO_CHUNK)
        self.lock.release()
        if some:        # the chunk is LEAVING now: only this thread knows it
            self.settle(range, handle)

    # -- unmapping ----------------------------------------------------------------------------------------------------

    cdef uint64_t unmap_leaving(self, AddressRange* range, ChunkHandle handle, cbool one_by_one,
                                Faults faults) noexcept nogil:
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
                unmap_slots(self, range, start, stop - start, range.slot if one_by_one else stop - start, faults)
            start = max(stop, start + range.slot)
        return self.settle(range, handle)

    cdef uint64_t settle(self, AddressRange* range, ChunkHandle handle) noexcept nogil:
        """Tells the pool which slots of a leaving chunk have gone. Returns the bytes that have."""
        cdef uint64_t gone = 0, size, end
        cdef FreePart part
        cdef ChunkHandle rest
        cdef cbool has_gone
        while handle < NO_HOST_MEMORY:
            part = self.part_of(handle)     # holds after the lock, since only the mapper cuts a chunk that is leaving
            end = part.ptr + part.size
            has_gone = not self.has_page(range, part.ptr)
            size = range.slot
            while part.ptr + size < end and self.has_page(range, part.ptr + size) != has_gone:
                size += range.slot
            # Each part becomes free addresses at once, as a free of a neighbour reads its state.
            acquire_lock(self.lock[0])
            rest = end_unmapping(self.pool, handle, size, has_gone)
            self.note_unmapped(range, handle)
            self.lock.release()
            gone += size if has_gone and rest != NO_HOST_MEMORY else 0
            handle = rest       # LEAVING still, so it is there still
            range.some_stuck = range.some_stuck or not has_gone or rest == NO_HOST_MEMORY
        self.note_change()
        return gone

    cdef uint64_t unmap_again(self, AddressRange* range, bint one_by_one, Faults faults) noexcept:
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

    cdef ChunkHandle leaving_from(self, AddressRange* range, uint64_t ptr) noexcept:
        """The first chunk that is to leave a range, from this address on; or NO_CHUNK. The mapper's handle lasts."""
        cdef ChunkHandle handle = NO_CHUNK
        # Other threads split and join the chunks before it.
        acquire_lock(self.lock[0])
        if range.is_known:
            handle = self.pool.regions[range.ptr + range.nbytes].first
        while handle != NO_CHUNK and (self.pool.chunks[handle].ptr < ptr or self.pool.chunks[handle].state != LEAVING):
            handle = self.pool.chunks[handle].next
        self.lock.release()
        return handle

    cdef FreePart part_of(self, ChunkHandle handle) noexcept nogil:
        """A chunk that only the mapper changes, which the caller is: of any other it may be wrong after the lock."""
        acquire_lock(self.lock[0])
        cdef FreePart part = FreePart(handle, self.pool.chunks[handle].ptr, self.pool.chunks[handle].size)
        self.lock.release()
        return part

    cdef uint64_t count_mapped(self, AddressRange* range) noexcept nogil:
        """How many slots of a range have pages. Only the mapper changes that."""
        cdef uint64_t ptr = range.ptr, slots, count = 0
        slots = self.slots_of(range) if range.has_table else 0
        while slots > 0:
            count += self.has_page(range, ptr)
            ptr += range.slot
            slots -= 1
        return count

    cdef bint wait_for(self, AddressRange* range, Faults faults) noexcept:
        """Waits for the work of a range's stream. False: that failed, or the stream captures a graph."""
        try:
            streams = streams_of(self, range)
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
        cdef AddressRange* addresses
        cdef size_t i
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            if addresses.is_known:
                remove_range(self.pool, addresses.ptr, addresses.nbytes)
                addresses.is_known = False

    cdef void empty(self, AddressRange* range, Faults faults) noexcept:
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
                unmap_slots(self, range, start, end - start, end - start, faults)
            start = max(end, start + range.slot)

    cdef void unreserve(self, AddressRange* range, Faults faults) noexcept nogil:
        """Gives back the addresses of a range that the pool has forgotten, if nothing is mapped there. If that fails,
        the range stays in the list, for another try."""
        if self.count_mapped(range):
            return
        if range.has_table:
            acquire_lock(self.lock[0])      # searches of other threads read the table
            self.close_table(range)
            range.has_table = False
            self.lock.release()
        if not range.is_gone and self.device.unreserve(range.ptr, range.nbytes) < 0:
            self.device.drop_error(faults, False)
        else:
            self.remove(range)

    cdef void remove(self, AddressRange* range) noexcept nogil:
        """Takes a range that has no addresses off the list."""
        range.is_gone = True
        self.ranges.remove(range)

    # -- pages that the sub-allocator did not take back ---------------------------------------------------------------

    cdef void release_page(self, PageRef page, Faults faults) noexcept nogil:
        """Releases a page. If that fails, it is kept for another try, and goes on counting against the limit."""
        self.device.add_calls(1)
        self.device.leaving = page     # it is in no slot any more: a child that is forked in the call finds it here
        if self.device.call(RELEASE, page.get().number, 0, NULL) < 0:
            self.source.keep_bytes(page.get().nbytes)
            page.get().next = self.unreleased
            self.unreleased = page
            self.device.drop_error(faults, False)
        self.device.leaving.reset()

    cdef uint64_t unreleased_bytes(self) noexcept:
        """The bytes of the pages that the sub-allocator failed to release."""
        cdef uint64_t nbytes = 0
        cdef Page* page
        self.device.guard.begin_reading(self.lock[0])      # another thread may map
        page = self.unreleased.get()
        while page != NULL:
            nbytes += page.nbytes
            page = page.next.get()
        page = self.offered.get()
        while page != NULL:
            nbytes += page.nbytes
            page = page.next.get()
        self.device.guard.end_reading(self.lock[0])
        return nbytes

    cdef void try_unreleased_again(self, Faults faults) noexcept nogil:
        cdef PageRef page
        self.offered = self.unreleased
        self.unreleased.reset()
        while self.offered.get() != NULL:
            page = self.offered     # not counted in the call: a child that is forked there releases it for certain
            self.source.keep_bytes(-<int64_t>page.get().nbytes)
            self.offered = page.get().next
            page.get().next.reset()
            self.release_page(page, faults)

    # -- a thread that is there no more -------------------------------------------------------------------------------

    cdef void take_over(self) noexcept:
        """Tidies up behind a thread that stopped for ever while it mapped or unmapped: releases the pages that it had
        made and had not mapped, or had unmapped."""
        cdef AddressRange* addresses
        cdef ChunkHandle handle
        cdef size_t i = self.ranges.size()
        end_calls_of_other(self)
        while i > 0:
            i -= 1
            addresses = self.ranges.at(i)
            if addresses.ptr == NOWHERE:        # the thread stopped while it reserved its addresses
                self.ranges.remove(addresses)
            elif self.device.going.nbytes and addresses.ptr == self.device.going.ptr:
                self.remove(addresses)
            elif (self.device.touched.nbytes and addresses.has_table
                  and addresses.ptr <= self.device.touched.ptr < addresses.ptr + addresses.nbytes):
                self.forget_touched(addresses)
        self.device.touched.nbytes = self.device.going.nbytes = 0
        self.device.forget_lost()
        self.release_fresh()
        for i in range(self.ranges.size()):
            addresses = self.ranges.at(i)
            addresses.some_stuck = True         # there may be chunks that are LEAVING
            handle = growing_in(self, addresses)
            if handle != NO_CHUNK:
                self.give_up(addresses, handle)

    cdef void forget_touched(self, AddressRange* range) noexcept:
        """Drops the pages from the slots that `end_calls_of_other` has unmapped."""
        cdef uint64_t ptr = self.device.touched.ptr
        while ptr < self.device.touched.ptr + self.device.touched.nbytes:
            self.drop_slot(range, ptr, None)
            ptr += range.slot

    # -- changes -------------------------------------------------------------------------------------------------------

    cdef void note_change(self) noexcept nogil:
        self.changes += 1
        self.source.changes.add(1)


# -- one thread at a time ---------------------------------------------------------------------------------------------

cdef cbool is_native(AddressRanges memory) noexcept nogil:
    """Whether a request needs no Python, neither to map nor, for pages, to learn what streams have finished with."""
    return memory.device.table != NULL and memory.fences.native != NULL and not memory.fences.capture_is_marked()


cdef int become_mapper(AddressRanges memory, uint64_t set_aside, cbool takes_over) noexcept nogil:
    """Enters this thread as the one that maps. 0: another one does, or (-1) the host has no memory. 2: one has
    that is there no more, behind which `take_over` must tidy up."""
    cdef int entered
    # The call begins before this thread is the mapper, and ends after that: a mapper in no call has been stopped.
    if not memory.source.begin_call(set_aside, 0):
        return -1
    acquire_lock(memory.lock[0])
    # a mapper that is in no call is gone: it did not survive a fork, or the interpreter's shutdown stopped it
    entered = 1 if memory.mapper == 0 else 2 if takes_over and not memory.source.is_listed(memory.mapper) else 0
    if entered:
        memory.mapper = PyThread_get_thread_ident()
    memory.lock.release()
    if entered:
        memory.source.refused_bytes.set(0)
    else:
        memory.source.end_call(True, 0)
    return entered


cdef void stop_mapping(AddressRanges memory) noexcept nogil:
    cdef uint64_t refused
    cdef size_t count = memory.ranges.size() + (memory.unreleased.get() != NULL) + memory.count_beside_ranges()
    if memory.device.guard.is_native():
        memory.device.guard.end()        # before another thread may map
    # The next mapper begins only after all of these are written.
    acquire_lock(memory.lock[0])
    memory.mapper = 0
    memory.count = count
    memory.device.touched.nbytes = 0
    memory.lock.release()
    refused = memory.source.refused_bytes.get()
    memory.source.end_call(True, 0)
    memory.source.refused_bytes.set(refused)      # a page, and that is the answer
    if memory.must_close:     # somebody wanted that after it was looked at above, and could not enter yet
        close_after_all(memory)


cdef void close_after_all(AddressRanges memory) noexcept with gil:
    """Closes now, unless another thread maps by now: then that one does, when it leaves."""
    try:
        if memory.enter(0):
            memory.leave()
    except BaseException as error:      # the host is out of memory
        report_unraisable(error, memory.source.sub_allocator)


cdef cbool list_streams(AddressRanges memory, AddressRange* addresses, vector[uint64_t]& handles) noexcept nogil:
    """Adds the streams that say when earlier work on a range is done: of a plan's region, all that the plan serves.
    False: the host has no memory for that. Needs the lock."""
    cdef uint32_t stream
    cdef cbool listed = try_push_back(handles, addresses.asked_of)
    if addresses.plan != NULL:
        for stream in range(<uint32_t>addresses.plan.streams()):
            if addresses.plan.is_bound(stream):
                listed = try_push_back(handles, addresses.plan.handle_of(stream)) and listed
    return listed


cdef void close_late(AddressRanges memory) noexcept with gil:
    memory.must_close = False
    memory.close(memory.closing.restart())
    if memory.closing.first is not None:
        report_unraisable(memory.closing.first, memory.source.sub_allocator)


# -- what has failed --------------------------------------------------------------------------------------------------

cdef set streams_of(AddressRanges memory, AddressRange* range):
    """The streams that say when earlier work on a range is done."""
    cdef set streams = set()
    cdef vector[uint64_t] handles
    cdef uint64_t handle
    cdef cbool listed
    # A lane that another thread opens moves the sets of bins.
    acquire_lock(memory.lock[0])
    listed = list_streams(memory, range, handles)
    memory.lock.release()
    if not listed:
        raise out_of_host_memory()
    for handle in handles:
        streams.add(handle)
    return streams


# -- making and mapping -----------------------------------------------------------------------------------------------

cdef int try_to_map_fresh(AddressRanges memory, AddressRange* range, ChunkHandle handle, FreePart part) noexcept nogil:
    cdef uint64_t count = part.size // range.slot
    cdef vector[PageRef] mapped
    cdef PageRef page = memory.fresh
    cdef size_t i = 0
    cdef cbool done
    if not try_reserve(mapped, count):
        return memory.device.fail_for_memory()
    while mapped.size() < count:
        mapped.push_back(page)
        page = page.get().next
    if memory.enter_pages(range, part.ptr, mapped) < 0:
        return -1
    memory.fresh = page           # from here on `give_up` releases them
    while i < count:
        mapped[i].get().next.reset()
        i += 1
    if memory.device.put(part.ptr, mapped, part.size) < 0:
        return -1
    acquire_lock(memory.lock[0])      # `handle` is what it was: nobody finds it, or joins it, until it is free
    done = end_mapping(memory.pool, handle)
    memory.note_unmapped(range, NO_CHUNK)
    if done:
        memory.device.touched.nbytes = 0    # under the lock: no fork comes in between
    memory.lock.release()
    if not done:
        memory.device.undo_mapping(part.ptr, part.size)
        return memory.device.fail_for_memory()
    return 0


# -- unmapping --------------------------------------------------------------------------------------------------------

cdef void unmap_slots(AddressRanges memory, AddressRange* range, uint64_t ptr, uint64_t nbytes, uint64_t step,
                      Faults faults) noexcept nogil:
    """Unmaps slots, `step` bytes in each call, and drops their pages. Those that cannot be unmapped keep theirs."""
    cdef uint64_t at = ptr, slot
    while at < ptr + nbytes:
        if memory.device.unmap(at, step) < 0:
            memory.device.drop_error(faults, False)
        else:
            slot = at
            while slot < at + step:
                memory.drop_slot(range, slot, faults)
                slot += range.slot
            # Only now: a child that is forked in a release drops the other slots, too.
            memory.device.touched.nbytes = 0
        at += step


# -- a thread that is there no more -----------------------------------------------------------------------------------

cdef void end_calls_of_other(AddressRanges memory) noexcept:
    """Does again what a stopped thread was in the middle of, so that it is known: nothing is mapped where it mapped
    or unmapped, page by page, and what it released or unreserved has gone. What was done already fails here, and
    that is no error. `touched` and `going` are left to those who keep the records of it."""
    cdef PageRef page = memory.offered, following
    cdef uint64_t done = 0, step = 1
    if memory.device.touched.nbytes:
        step = memory.page_bytes_at(memory.device.touched.ptr)
    while done < memory.device.touched.nbytes:
        try:
            memory.device.target.unmap(memory.device.touched.ptr + done, step)
        except BaseException:
            pass
        done += step
    try:
        if memory.device.leaving.get() != NULL:
            memory.device.target.release(number_of(memory.device.leaving.get().number))
    except BaseException:
        pass
    memory.device.leaving.reset()
    memory.offered.reset()
    try:
        if memory.device.going.nbytes:
            memory.device.target.unreserve(memory.device.going.ptr, memory.device.going.nbytes)
    except BaseException:
        pass
    while page.get() != NULL:       # these it had not come to
        following = page.get().next
        page.get().next = memory.unreleased
        memory.unreleased = page
        page = following


cdef ChunkHandle growing_in(AddressRanges memory, AddressRange* range) noexcept:
    """The chunk of a range that memory is being mapped for, or NO_CHUNK."""
    cdef ChunkHandle handle = NO_CHUNK
    # Other threads split and join the chunks before it.
    acquire_lock(memory.lock[0])
    if range.is_known:
        handle = memory.pool.regions[range.ptr + range.nbytes].first
    while handle != NO_CHUNK and not (memory.pool.chunks[handle].state == UNMAPPED
                                      and memory.pool.chunks[handle].freed_at_count == IS_GROWING):
        handle = memory.pool.chunks[handle].next
    memory.lock.release()
    return handle


# -- tags --------------------------------------------------------------------------------------------------------------

# Threads without the GIL may open lanes, and then the table of sets of bins moves: so it is read under the lock.

cdef cbool is_of_tag(AddressRanges memory, uint32_t bin_set, uint64_t number) noexcept nogil:
    """Whether a set of bins belongs to a tag. Needs the lock."""
    cdef uint64_t* pool = memory.pool.bin_sets[bin_set].lane.pool
    return number != NO_TAG and memory.tags.tag_of(pool) == number


cdef cbool belongs_to(AddressRanges memory, AddressRange* range, uint64_t tag) noexcept nogil:
    # A lane that another thread opens moves the sets of bins.
    acquire_lock(memory.lock[0])
    cdef cbool found = range.is_known and is_of_tag(memory, range.bin_set, tag)
    memory.lock.release()
    return found


cdef cbool is_set_asleep(AddressRanges memory, uint32_t bin_set) noexcept nogil:
    # A lane that another thread opens moves the sets of bins.
    acquire_lock(memory.lock[0])
    cdef cbool found = memory.pool.bin_sets[bin_set].asleep != 0
    memory.lock.release()
    return found


cdef int list_ranges(AddressRanges memory, uint64_t tag, vector[AddressRange*]& found) except -1:
    """Adds the ranges of a tag."""
    cdef size_t i
    for i in range(memory.ranges.size()):
        if belongs_to(memory, memory.ranges.at(i), tag):
            found.push_back(memory.ranges.at(i))
    return 0
