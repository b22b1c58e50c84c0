"""Mapping: one thread at a time calls a sub-allocator's functions for virtual memory."""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc.interpreter._signals cimport Deferral
from bfc._core cimport Pool
from bfc.allocators._lock cimport Lock
from bfc.allocators._source cimport Source


@cython.final
cdef class Faults:
    cdef object first
    cdef object interrupt               # the first error that is not an Exception, such as a Ctrl-C
    cdef size_t count

    cdef Faults restart(self)
    cdef void add(self, error) noexcept


@cython.final
cdef class Page:
    cdef object number                  # as `create` returned it; None: it is still to be made
    cdef uint64_t nbytes
    cdef bint is_mapped
    cdef Page next                      # in the list of those that the sub-allocator did not take back


cdef struct Place:                  # addresses
    uint64_t ptr
    uint64_t nbytes                     # 0: none


cdef class Mapper:
    cdef Lock* lock                     # the allocator's
    cdef Pool pool
    cdef Source source
    cdef Page unreleased                # the first page that the sub-allocator did not take back
    cdef Faults closing                 # made beforehand, for the close() of an allocator that is dropped
    cdef Deferral deferral              # of the mapper
    cdef unsigned long mapper           # the thread that maps or unmaps now; 0: none. Guarded by the lock
    cdef size_t count                   # of what must be unmapped, unreserved or released in the end
    cdef uint64_t changes               # counts what was mapped and unmapped
    cdef bint must_close                # as soon as the mapper leaves

    # What the mapper's call is about. A child that is forked meanwhile cannot know whether it was done. Nothing else
    # uses any of it.
    cdef Place touched                  # where it maps or unmaps, from before the call until the books say what came
    cdef Place going                    # the reservation that goes back
    cdef Page leaving                   # the page that is released; None: none
    cdef Page offered                   # the first of those that are to be released again after it

    cdef int stand_behind(self, Lock* lock, Pool pool, Source source) except -1
    cdef bint enter(self, uint64_t set_aside) except -1
    cdef int give_all_back(self) except -1
    cdef cbool are_some(self) noexcept nogil
    cdef void leave(self) noexcept
    cdef void close_late(self) noexcept
    cdef void end_calls_of_other(self, uint64_t step) noexcept
    cdef void add_calls(self, uint64_t count) noexcept nogil
    cdef void note_change(self) noexcept nogil
    cdef int call_unreserve(self, uint64_t ptr, uint64_t nbytes) except -1
    cdef size_t count_what_is_mapped(self) noexcept
    cdef void take_over(self) noexcept
    cdef void close(self, Faults faults) noexcept
    cdef void release_page(self, Page page, Faults faults) noexcept
    cdef uint64_t unreleased_bytes(self) noexcept
    cdef void try_unreleased_again(self, Faults faults) noexcept


cdef inline uint64_t round_up_to(uint64_t size, uint64_t step) noexcept nogil:
    return (size + step - 1) // step * step

cdef uint64_t call_reserve(sub_allocator, uint64_t nbytes) except 0
cdef object call_create(sub_allocator, uint64_t nbytes)
cdef bint lies_in(uint64_t address, runs) noexcept
cdef int raise_faults(sub_allocator, Faults faults) except -1
