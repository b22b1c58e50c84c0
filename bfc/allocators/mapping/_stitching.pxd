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
    cdef bint without_calls             # no calls: what is unmapped and released now went when its tag fell asleep

    cdef int set_up(self, uint64_t limit, uint64_t page_size, double headroom) except -1
    cdef int page_shift(self) noexcept
    cdef uint64_t count_calls(self) noexcept nogil
    cdef void note_request(self, uint64_t calls_before) noexcept nogil
    cdef uint32_t page_in(self, AddressRange* addresses, uint64_t ptr) noexcept nogil
    cdef cbool pages_of(self, vector[uint32_t]& numbers, vector[PageRef]& found) noexcept nogil
    cdef void drop_page(self, uint32_t number, Faults faults) noexcept nogil
    cdef cbool unmap_further_slots(self, uint32_t bin_set, uint32_t page, Faults faults) noexcept nogil
    cdef cbool unmap_slot(self, uint32_t page, Slot slot, Faults faults) noexcept nogil
    cdef uint64_t page_ptr(self, uint32_t bin_set, uint64_t slot) noexcept nogil
    cdef int provide(self, uint32_t bin_set, Wanted* wanted) noexcept nogil
    cdef cbool has_failed(self) noexcept nogil
    cdef int try_again(self) noexcept nogil
    cdef int try_again_with_gil(self) noexcept with gil
    cdef void unreserve_again(self, Faults faults) noexcept
    cdef int provide_small(self, AddressRange* addresses) noexcept nogil
    cdef int provide_large(self, AddressRange* addresses, Wanted* wanted) noexcept nogil
    cdef bint grow_behind(self, uint64_t address, uint64_t rounded) except -1
    cdef uint64_t missing_at_end(self, AddressRange* addresses, uint64_t rounded) noexcept nogil
    cdef uint64_t room(self) noexcept nogil
    cdef uint64_t room_before_others(self, AddressRange* addresses) noexcept nogil
    cdef uint64_t free_of_others(self, AddressRange* addresses) noexcept nogil
    cdef cbool has_same_tag(self, AddressRange* other, AddressRange* addresses) noexcept nogil
    cdef cbool has_other_tag(self, AddressRange* other, AddressRange* addresses) noexcept nogil
    cdef int trim_other_tags(self, AddressRange* addresses, uint64_t wanted) noexcept nogil
    cdef int trim_with_gil(self, AddressRange* addresses, uint64_t wanted) noexcept with gil
    cdef cbool is_within_headroom(self, uint64_t pages, uint64_t rounded) noexcept nogil
    cdef AddressRange* range_for(self, uint32_t bin_set) noexcept nogil
    cdef AddressRange* open_range(self, uint32_t bin_set) noexcept nogil
    cdef int64_t grow(self, AddressRange* addresses, uint64_t wanted, ChunkHandle at) noexcept nogil
    cdef int map_all_fresh(self, AddressRange* addresses, int64_t missing, ChunkHandle at) noexcept nogil
    cdef ChunkHandle begin(self, AddressRange* addresses, uint64_t wanted, ChunkHandle at) noexcept nogil
    cdef int keep_no_addresses(self, AddressRange* addresses) noexcept with gil
    cdef ChunkHandle first_hole(self, AddressRange* addresses) noexcept nogil
    cdef int64_t move_pages_to(self, AddressRange* addresses, uint64_t wanted, cbool from_others) noexcept nogil
    cdef int ask_captures(self) noexcept nogil
    cdef int is_captured(self, uint64_t stream) noexcept nogil
    cdef int ask_capture(self, uint64_t stream) noexcept with gil
    cdef int give_held_to(self, AddressRange* addresses, uint64_t stream, ChunkHandle at, cbool from_others,
                          cbool for_good) noexcept nogil
    cdef uint64_t hold_free(self, AddressRange* addresses, uint64_t wanted, cbool from_others) noexcept nogil
    cdef cbool may_give(self, AddressRange* other, AddressRange* addresses) noexcept nogil
    cdef uint32_t best_lender(self, AddressRange* addresses) noexcept nogil
    cdef int order_after(self, uint64_t stream) noexcept nogil
    cdef int order(self, uint64_t first, uint64_t then) noexcept with gil
    cdef uint64_t user_of(self, AddressRange* addresses, uint32_t slot) noexcept nogil
    cdef int map_held(self, AddressRange* addresses, ChunkHandle at) noexcept nogil
    cdef int map_again(self, AddressRange* addresses, vector[uint32_t]& pages, ChunkHandle at) noexcept nogil
    cdef int list_first(self, vector[uint32_t]& pages, size_t count, vector[uint32_t]& found) noexcept nogil
    cdef int put_again(self, AddressRange* addresses, ChunkHandle handle, Place place,
                       vector[uint32_t]& numbers) noexcept nogil
    cdef cbool add_slots(self, AddressRange* addresses, ChunkHandle handle, vector[uint32_t]& pages) noexcept nogil
    cdef int activate_held(self, AddressRange* addresses, cbool for_good) noexcept nogil
    cdef void let_held_go(self) noexcept nogil
    cdef uint64_t room_in_plan(self) noexcept nogil
    cdef ChunkHandle chunk_around(self, AddressRange* addresses, uint64_t ptr) noexcept nogil
    cdef int stitch(self, AddressRange* addresses, uint64_t pages, Wanted* wanted) noexcept nogil
    cdef int hold_for_view(self, AddressRange* addresses, uint64_t pages, uint32_t* number) noexcept nogil
    cdef int map_view(self, uint32_t number, Wanted* wanted) noexcept nogil
    cdef int put_view(self, uint32_t number, Retired* begun, uint64_t ptr, uint64_t nbytes, vector[PageRef]& pages,
                      Wanted* wanted) noexcept nogil
    cdef int enter_view(self, uint32_t number, uint64_t ptr, Wanted* wanted) noexcept nogil
    cdef int retire_for(self, uint64_t pages) noexcept nogil
    cdef void keep_stuck(self, vector[uint32_t]& pages, uint64_t ptr, uint64_t nbytes) noexcept nogil
    cdef void keep_addresses(self, uint64_t ptr, uint64_t nbytes) noexcept nogil
    cdef void give_addresses_up(self, uint64_t ptr, uint64_t nbytes, Faults faults) noexcept nogil
    cdef int retire(self, uint32_t number) noexcept nogil
    cdef int mark_stream(self, Retired* retired) noexcept nogil
    cdef int make_fence(self, Retired* retired) noexcept with gil
    cdef int has_finished(self, Retired* retired, cbool wait) noexcept nogil
    cdef int keep_event_error(self, int result, cbool wait) noexcept with gil
    cdef int ask_fence(self, Retired* retired, cbool wait) noexcept with gil
    cdef void drop_fence(self, Retired* retired) noexcept nogil
    cdef void drop_fences(self) noexcept
    cdef cbool list_pages(self, uint32_t number, vector[uint32_t]& pages) noexcept nogil
    cdef int sweep(self, Faults faults, cbool wait, cbool again) noexcept nogil
    cdef int unmap_retired(self, Retired* retired) noexcept nogil
    cdef void free_addresses(self, uint64_t ptr) noexcept nogil
    cdef uint64_t trim(self, uint64_t keep, bint wait, Faults faults) except? 0xFFFFFFFFFFFFFFFF
    cdef int retire_all(self) noexcept nogil
    cdef bint is_idle(self, uint64_t stream, bint wait, dict idle, Faults faults) noexcept
    cdef bint is_idle_now(self, uint64_t stream, bint wait) except -1
    cdef int trim_range(self, AddressRange* addresses, uint64_t most, bint views_too, bint wait,
                        Faults faults) except -1
    cdef void hold_to_trim(self, AddressRange* addresses, uint64_t most, bint views_too) noexcept
    cdef int unmap_held(self, AddressRange* addresses, Faults faults) except -1
    cdef void forget_chunks(self) noexcept
    cdef void close_views(self, Faults faults) noexcept
    cdef int retire_views_of(self, uint64_t tag) except -1
    cdef cbool is_kept_of(self, uint32_t number, uint64_t tag) noexcept
    cdef int list_runs(self, TagTransition transition, bint is_mapped) except -1
    cdef int add_view(self, TagTransition transition, uint32_t number, bint is_mapped, set seen) except -1
    cdef void keep_left(self, TagTransition transition, MappedRun run) noexcept
    cdef void give_up_left(self, Faults faults) noexcept
    cdef void forget_views_of(self, uint64_t tag) noexcept
    cdef void shrink_range(self, AddressRange* addresses, Faults faults) noexcept
    cdef void forget_retired(self, Place touched, Place gone) noexcept
