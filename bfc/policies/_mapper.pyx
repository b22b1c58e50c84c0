"""Mapping: one thread at a time calls a sub-allocator's functions for virtual memory.

The sub-allocator is called with the GIL and without the lock, between `enter` and `leave`; other threads allocate and
free meanwhile.
"""

import time

cimport cython
from cpython.number cimport PyNumber_Index
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool

from bfc.interpreter._signals cimport defer_handlers, resume_handlers
from bfc._core cimport Pool
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._source cimport Source, add_up
from bfc.allocators._frees cimport report_unraisable

from bfc.errors import SubAllocatorError, out_of_host_memory
from bfc.units import format_bytes

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

_POLL_SECONDS = 0.001


cdef uint64_t call_reserve(sub_allocator, uint64_t nbytes) except 0:
    cdef uint64_t place = 0, granularity = sub_allocator.mapping_granularity
    answer = sub_allocator.reserve(nbytes)
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
            sub_allocator.unreserve(place, nbytes)
        except Exception:
            pass    # it was no reservation
    raise SubAllocatorError(f"{sub_allocator!r}.reserve returned {answer!r}: an address is an int above 0, and a "
                            f"multiple of mapping_granularity")


cdef object call_create(sub_allocator, uint64_t nbytes):
    """The number of a new page; None: there is no memory for it."""
    try:
        number = sub_allocator.create(nbytes)
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
cdef class Page:
    """A page, made before the sub-allocator is asked for one: what goes wrong later needs no memory of the host."""


cdef uint64_t bytes_from(Page page) noexcept:
    """The bytes of a page and of those that are listed after it."""
    cdef uint64_t nbytes = 0
    while page is not None:
        nbytes += page.nbytes
        page = page.next
    return nbytes


@cython.no_gc_clear
cdef class Mapper:
    """What every part that maps memory for an allocator needs. It never calls the allocator."""

    def __cinit__(self):
        self.closing = Faults()

    cdef int stand_behind(self, Lock* lock, Pool pool, Source source) except -1:
        """Takes the allocator's lock, which must live as long, its pool and its source."""
        self.lock = lock
        self.pool = pool
        self.source = source
        return 0

    cdef bint enter(self, uint64_t set_aside) except -1:
        """Lets this thread map and unmap, with Python's signal handlers deferred. False: another thread does, or this
        one in a call further up. `set_aside`: the bytes that it has set aside from the limit, which a fork in one of
        its calls must not forget."""
        cdef cbool entered, others = False
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

    cdef int give_all_back(self) except -1:
        """Gives everything back, for an allocator that closes."""
        cdef Faults faults = self.closing
        if not self.are_some():
            return 0
        while not self.enter(0):
            if self.source.is_called_here():
                self.must_close = True      # the thread that maps does it: another one, or this one further up
                if self.enter(0):
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

    cdef void close_late(self) noexcept:
        self.must_close = False
        self.close(self.closing.restart())
        if self.closing.first is not None:
            report_unraisable(self.closing.first, self.source.sub_allocator)

    cdef void end_calls_of_other(self, uint64_t step) noexcept:
        """Does again what a stopped thread was in the middle of, so that it is known: nothing is mapped where it mapped
        or unmapped, in pages of `step` bytes, and what it released or unreserved has gone. What was done already fails
        here, and that is no error. `touched` and `going` are left to those who keep the books of it."""
        cdef Page page = self.offered, following
        cdef uint64_t done = 0
        while done < self.touched.nbytes:
            try:
                self.source.sub_allocator.unmap(self.touched.ptr + done, step)
            except BaseException:
                pass
            done += step
        try:
            if self.leaving is not None:
                self.source.sub_allocator.release(self.leaving.number)
        except BaseException:
            pass
        self.leaving = self.offered = None
        try:
            if self.going.nbytes:
                self.source.sub_allocator.unreserve(self.going.ptr, self.going.nbytes)
        except BaseException:
            pass
        while page is not None:     # these it had not come to
            following, page.next = page.next, self.unreleased
            self.unreleased = page
            page = following

    cdef int call_unreserve(self, uint64_t ptr, uint64_t nbytes) except -1:
        """Gives a reservation back. Whoever keeps it in a list must take it off at once, before any other call."""
        self.add_calls(1)
        self.going = Place(ptr, nbytes)
        try:
            self.source.sub_allocator.unreserve(ptr, nbytes)
        finally:
            self.going.nbytes = 0
        return 0

    cdef void add_calls(self, uint64_t count) noexcept nogil:
        """Counts calls of the sub-allocator that are about to be made; of `map`, one for each page."""
        add_up(&self.source.driver_calls, count)

    cdef void note_change(self) noexcept nogil:
        self.changes += 1
        self.source.changes.add(1)

    # -- what a policy overrides --------------------------------------------------------------------------------------

    cdef size_t count_what_is_mapped(self) noexcept:
        return 0

    cdef void take_over(self) noexcept:
        """Tidies up behind a thread that stopped for ever while it mapped or unmapped."""

    cdef void close(self, Faults faults) noexcept:
        """Gives all memory and all addresses back. The next call tries what the sub-allocator fails with again."""

    # -- pages that the sub-allocator did not take back ---------------------------------------------------------------

    cdef void release_page(self, Page page, Faults faults) noexcept:
        """Releases a page. If that fails, it is kept for another try, and goes on counting against the limit."""
        self.add_calls(1)
        self.leaving = page
        try:
            self.source.sub_allocator.release(page.number)
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
            page = self.offered
            self.source.keep_bytes(-<int64_t>page.nbytes)
            self.offered, page.next = page.next, None
            self.release_page(page, faults)
