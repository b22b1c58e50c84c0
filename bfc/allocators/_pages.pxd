"""Pages that have several addresses. All methods need the allocator's lock, and call no device."""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport BinSet, ChunkHandle, PageBitmap, PlanServer, Pool, PoolPages

cdef extern from "stitched_views.hpp" namespace "bfc" nogil:
    const uint32_t NO_SLOT "bfc::PageRecord::kNone"
    const uint32_t NO_VIEW "bfc::StitchedViews::kNone"

    cdef struct Slot:
        uint32_t set
        uint32_t number

    cdef struct Run:
        uint32_t set
        uint32_t first
        uint32_t count

    cdef cppclass PageRecord:
        PageRecord()
        vector[Slot] slots
        uint32_t active
        uint32_t primary
        uint32_t views
        cbool is_known
        cbool is_mapped()
        cbool try_add(Slot slot)
        void drop(uint32_t i)
        uint32_t in_set(uint32_t set)

    cdef enum:
        UNUSED "bfc::kUnused"
        KEPT "bfc::kKept"
        LIVE "bfc::kLive"
        RETIRED "bfc::kRetired"

    cdef cppclass StitchedView:
        vector[Run] runs
        uint64_t address
        uint64_t made_at
        uint64_t last_used
        uint32_t pages
        uint32_t set
        uint32_t chunk
        uint32_t state

    cdef cppclass StitchedViews:
        uint32_t count()
        StitchedView& at(uint32_t number)
        uint64_t slots()
        uint32_t open()
        cbool enter(uint32_t number)
        uint32_t of_chunk(uint32_t chunk)
        vector[uint32_t]* of_size(uint32_t set, uint32_t pages)
        void retire(uint32_t number)
        void forget(uint32_t number)


@cython.final
cdef class Pages(PoolPages):
    cdef Pool pool
    cdef uint64_t page_size
    cdef vector[PageRecord] records     # by the number of the page
    cdef StitchedViews views
    cdef uint64_t count                 # of pages
    cdef uint32_t all_known_below       # every record before this number is that of a page
    cdef uint64_t uses                  # how often views were used so far

    cdef void watch(self, Pool pool, uint64_t page_size) noexcept
    cdef void leave(self) noexcept
    cdef cbool open_bitmap(self, uint32_t bin_set, uint64_t start) noexcept nogil
    cdef void close_bitmap(self, uint32_t bin_set) noexcept nogil
    cdef PageBitmap* bitmap_of(self, uint32_t bin_set) noexcept nogil
    cdef void note_changes(self) noexcept nogil
    cdef void note_change_of(self, ChunkHandle handle) noexcept nogil
    cdef void note_large_chunks(self, BinSet* owner) noexcept nogil
    cdef uint64_t pages_for(self, uint64_t nbytes) noexcept nogil
    cdef uint64_t count_free(self, uint32_t bin_set) noexcept nogil
    cdef uint64_t count_lendable(self, uint32_t bin_set) noexcept nogil
    cdef uint64_t count_idle(self) noexcept nogil
    cdef PlanServer* plan_for(self, uint32_t bin_set) noexcept nogil
    cdef uint32_t stream_in_plan(self, uint32_t bin_set) noexcept nogil
    cdef uint64_t count_of_others(self, uint32_t bin_set) noexcept nogil
    cdef uint64_t count_shared(self) noexcept nogil
    cdef uint64_t most_shared(self) noexcept nogil
    cdef void let_known_go(self, uint32_t bin_set, vector[Run]& runs) noexcept nogil
    cdef cbool is_in_views(self, uint32_t bin_set) noexcept nogil
    cdef cbool has_moved(self, uint32_t bin_set, size_t slot) noexcept nogil
    cdef uint64_t hold_from_plan(self, uint32_t stream, uint64_t wanted, uint32_t longest, cbool for_long,
                                 vector[Run]& runs) noexcept nogil
    cdef cbool is_idle(self, Run* run) noexcept nogil

    cdef uint32_t enter_page(self, uint32_t bin_set, uint32_t slot) noexcept nogil
    cdef void forget_page(self, uint32_t page) noexcept nogil

    cdef cbool move_again(self, uint32_t small) noexcept nogil
    cdef size_t next_lent(self, uint32_t bin_set, uint32_t user, size_t slot) noexcept nogil
    cdef cbool move(self, uint32_t page, uint32_t to) noexcept nogil
    cdef void count_moved(self, uint32_t here, uint32_t there) noexcept nogil

    cdef uint64_t hold(self, uint32_t bin_set, uint64_t wanted, uint32_t longest, vector[Run]& runs) noexcept nogil
    cdef uint64_t hold_part(self, uint32_t bin_set, ChunkHandle handle, uint64_t wanted, uint32_t longest,
                            vector[Run]& runs) noexcept nogil
    cdef uint64_t hold_from_list(self, uint32_t bin_set, uint64_t wanted, uint32_t longest,
                                 vector[Run]& runs) noexcept nogil
    cdef uint64_t hold_again(self, uint32_t bin_set, uint32_t user, uint64_t wanted,
                             vector[Run]& runs) noexcept nogil
    cdef uint64_t hold_highest(self, uint32_t bin_set, uint64_t wanted, vector[Run]& runs) noexcept nogil
    cdef uint64_t hold_unshared(self, uint32_t bin_set, uint64_t wanted, cbool in_ranges_too,
                                vector[Run]& runs) noexcept nogil
    cdef cbool is_unshared(self, uint32_t page, cbool in_ranges_too) noexcept nogil
    cdef void let_go(self, vector[Run]& runs) noexcept nogil
    cdef cbool free_run(self, Run* run) noexcept nogil
    cdef cbool hold_run(self, Run* run, vector[Run]& runs) noexcept nogil
    cdef cbool take_run(self, Run* run, uint32_t state) noexcept nogil
    cdef ChunkHandle chunk_of(self, Run* run) noexcept nogil

    cdef ChunkHandle use_kept_view(self, uint32_t bin_set, uint64_t pages, uint64_t requested, uint64_t stream,
                                   cbool indexed) noexcept nogil
    cdef cbool is_usable(self, StitchedView* view) noexcept nogil
    cdef cbool take_view(self, StitchedView* view) noexcept nogil
    cdef cbool add_view(self, uint32_t number) noexcept nogil
    cdef ChunkHandle hand_out_new(self, uint32_t number, uint64_t requested, uint64_t stream,
                                  cbool indexed) noexcept nogil
    cdef ChunkHandle hand_out(self, StitchedView* view, uint64_t requested, uint64_t stream,
                              cbool indexed) noexcept nogil
    cdef void count_mappings(self, StitchedView* view, int change) noexcept nogil
    cdef cbool is_kept(self, uint32_t number) noexcept nogil
    cdef uint32_t oldest_kept_view(self) noexcept nogil
    cdef void retire_view(self, uint32_t number) noexcept nogil
    cdef void forget_view(self, uint32_t number) noexcept nogil
