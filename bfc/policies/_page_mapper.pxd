"""The pages of an allocator, and where they are mapped."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle
from bfc.allocators._pages cimport Pages, Run, Slot, View
from bfc.policies._mapper cimport Faults
from bfc.policies._sleep cimport Sleeper


@cython.final
cdef class Stretch:
    cdef uint64_t ptr
    cdef uint64_t nbytes
    cdef uint32_t bin_set
    cdef uint64_t stream
    cdef uint64_t asked_of              # the stream that says when earlier work is done
    cdef ChunkHandle tail               # the unmapped chunk at its end; NO_CHUNK: there is none
    cdef bint is_known                  # whether the pool knows it: until the allocator closes
    cdef bint some_stuck                # memory that could not be unmapped


@cython.final
cdef class Retired:
    cdef uint64_t ptr
    cdef uint64_t nbytes                # 0: addresses of a range, which are not given back
    cdef uint64_t stream
    cdef list pages                     # by number
    cdef list mapped                    # what of it is still mapped: (address, bytes)
    cdef object fence                   # of the stream that used it; None: nothing was queued
    cdef bint is_stuck                  # the sub-allocator failed to unmap it


cdef struct Calls:
    uint64_t creates
    uint64_t maps                       # of pages
    uint64_t set_accesses
    uint64_t unmaps
    uint64_t releases
    uint64_t stream_waits
    uint64_t stitches
    uint64_t most                       # calls that one request made
    double seconds                      # spent in the sub-allocator


cdef class PageMapper(Sleeper):
    cdef Pages pages
    cdef uint64_t page_size
    cdef uint64_t limit
    cdef uint64_t highest_limit         # that `limit` may be raised to: there are addresses for it
    cdef double headroom
    cdef list stretches                 # of Stretch
    cdef list made                      # of Page, by number; None: no page has this number
    cdef list fresh                     # of Page: made, or about to be, and not entered yet
    cdef list retired                   # of Retired
    cdef vector[Run] held               # what the thread that maps has taken
    cdef bint is_unmapping              # whether what is held is being unmapped
    cdef bint is_refused                # the sub-allocator has no memory for another page
    cdef Calls calls

    cdef int set_up(self, uint64_t limit, uint64_t page_size, double headroom) except -1
    cdef uint64_t count_calls(self) noexcept
    cdef void note_request(self, uint64_t calls_before) noexcept
    cdef Stretch stretch_of(self, uint32_t bin_set)
    cdef Stretch reserve(self, uint32_t bin_set)
    cdef int take_in(self, Stretch stretch) except -1
    cdef void give_addresses_up(self, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept
    cdef uint64_t page_ptr(self, uint32_t bin_set, uint64_t slot) noexcept
    cdef uint64_t grow(self, Stretch stretch, uint64_t wanted, ChunkHandle at) except? 0xFFFFFFFFFFFFFFFF
    cdef int create(self, uint64_t wanted) except -1
    cdef void release_fresh(self) noexcept
    cdef uint64_t map_new(self, Stretch stretch, ChunkHandle at) except? 0xFFFFFFFFFFFFFFFF
    cdef ChunkHandle begin(self, Stretch stretch, uint64_t wanted, ChunkHandle at, uint64_t* ptr,
                           uint64_t* count) except? 0xFFFFFFFE
    cdef ChunkHandle first_hole(self, Stretch stretch) noexcept
    cdef int enter_pages(self, Stretch stretch, uint64_t ptr, list pages) except -1
    cdef list numbers_of(self, list pages)
    cdef int put(self, uint64_t ptr, list numbers) except -1
    cdef void give_up(self, Stretch stretch, ChunkHandle handle, uint64_t ptr, uint64_t count, lost) noexcept
    cdef void drop_page(self, uint32_t number, Faults faults) noexcept
    cdef void settle(self, Stretch stretch, ChunkHandle handle) noexcept
    cdef void find_tail(self, Stretch stretch) noexcept
    cdef void let_held_go(self) noexcept
    cdef void keep_stuck(self, lost, list pages, uint64_t ptr, uint64_t nbytes) noexcept
    cdef bint retire(self, uint32_t number) except -1
    cdef int list_pages(self, uint32_t number, list pages) except -1
    cdef int sweep(self, Faults faults, bint wait, bint again) except -1
    cdef int unmap_retired(self, Retired retired) except -1
    cdef int call_unmap(self, uint64_t ptr, uint64_t nbytes) except -1
    cdef uint64_t trim(self, uint64_t keep, bint wait, Faults faults) except? 0xFFFFFFFFFFFFFFFF
    cdef int retire_all(self) except -1
    cdef bint is_idle(self, uint64_t stream, bint wait, dict idle, Faults faults) noexcept
    cdef int trim_stretch(self, Stretch stretch, uint64_t most, bint views_too, Faults faults) except -1
    cdef int unmap_further_slots(self, Run* run, Faults faults) except -1
    cdef bint unmap_slot(self, uint32_t page, Slot slot, Faults faults) noexcept
    cdef int unmap_run(self, Stretch stretch, Run* run, Faults faults) except -1
    cdef int unmap_stuck(self, Stretch stretch, Faults faults) except -1
    cdef bint has_gone_in_part(self, Run* run) noexcept
    cdef void forget_chunks(self) noexcept
    cdef void close_views(self, Faults faults) noexcept
    cdef void empty(self, Stretch stretch, Faults faults) noexcept
    cdef bint may_be_unmapped(self, uint32_t page) noexcept
    cdef void drop_slot(self, uint32_t bin_set, uint64_t slot, Faults faults) noexcept
    cdef bint give_addresses_back(self, Stretch stretch, Faults faults) noexcept
    cdef uint64_t count_mapped(self, Stretch stretch) noexcept
    cdef dict stats(self)
