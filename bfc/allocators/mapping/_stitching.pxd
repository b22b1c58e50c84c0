"""Stitching: pages that may have several addresses, a part of allocators that map page by page."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, PlanServer
from bfc.allocators._pages cimport Pages, Run, Slot
from bfc.allocators.mapping._address_ranges cimport (
    AddressRange, AddressRanges, Faults, MappedRun, PageRef, Place, Retired, RetiredRef, TagTransition,
)


cdef struct Wanted:                 # a request that nothing fits
    uint64_t rounded
    uint64_t requested
    uint64_t stream
    cbool indexed
    ChunkHandle handle              # what it was served with, or NO_CHUNK


@cython.final
cdef class Stitching(AddressRanges):
    cdef Pages pages
    cdef uint64_t page_size
    cdef uint64_t highest_limit         # that the limit may be raised to: there are addresses for it
    cdef double headroom
    cdef vector[PageRef] made           # by number; NULL: no page has this number
    cdef vector[RetiredRef] retired
    cdef list left                      # of MappedRun: what is mapped where tags sleep, since it could not be unmapped
    cdef size_t left_count              # of these
    cdef vector[Run] held               # what the thread that maps has taken
    cdef vector[uint64_t] orderable     # the plan's streams that may be waited for
    cdef bint are_planned               # some of it are pages of a plan
    cdef bint is_unmapping              # whether what is held is being unmapped

    cdef int set_up(self, uint64_t limit, uint64_t page_size, double headroom) except -1
    cdef int page_shift(self) noexcept
    cdef uint64_t count_calls(self) noexcept nogil
    cdef void note_request(self, uint64_t calls_before) noexcept nogil
    cdef cbool unmap_slot(self, uint32_t page, Slot slot, Faults faults) noexcept nogil
    cdef int provide(self, uint32_t bin_set, Wanted* wanted) noexcept nogil
    cdef cbool has_failed(self) noexcept nogil
    cdef int try_again(self) noexcept nogil
    cdef uint64_t missing_at_end(self, AddressRange* addresses, uint64_t rounded) noexcept nogil
    cdef uint64_t room(self) noexcept nogil
    cdef int64_t grow(self, AddressRange* addresses, uint64_t wanted, ChunkHandle at) noexcept nogil
    cdef ChunkHandle begin(self, AddressRange* addresses, uint64_t wanted, ChunkHandle at) noexcept nogil
    cdef int ask_captures(self) noexcept nogil
    cdef int is_captured(self, uint64_t stream) noexcept nogil
    cdef int give_held_to(self, AddressRange* addresses, uint64_t stream, ChunkHandle at, cbool from_others,
                          cbool for_good) noexcept nogil
    cdef int order(self, uint64_t first, uint64_t then) noexcept with gil
    cdef void let_held_go(self) noexcept nogil
    cdef uint64_t room_in_plan(self) noexcept nogil
    cdef ChunkHandle chunk_around(self, AddressRange* addresses, uint64_t ptr) noexcept nogil
    cdef int stitch(self, AddressRange* addresses, uint64_t pages, Wanted* wanted) noexcept nogil
    cdef int retire(self, uint32_t number) noexcept nogil
    cdef int sweep(self, Faults faults, cbool wait, cbool again) noexcept nogil
    cdef uint64_t trim(self, uint64_t keep, bint wait, Faults faults) except? 0xFFFFFFFFFFFFFFFF
    cdef int retire_all(self) noexcept nogil
    cdef bint is_idle(self, uint64_t stream, bint wait, dict idle, Faults faults) noexcept
    cdef int unmap_held(self, AddressRange* addresses, Faults faults) except -1
    cdef int add_view(self, TagTransition transition, uint32_t number, bint is_mapped, set seen) except -1
