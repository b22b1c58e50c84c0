"""What can be read from a pool: totals, a snapshot's rows of plain numbers, and which pages are used."""

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport Chunk, ChunkHandle, Counters, HistoryRecord, PageBitmap, Pool
from bfc.allocators._pages cimport Pages
from bfc.allocators._lock cimport Lock

cdef extern from "columns.hpp" namespace "bfc" nogil:
    cdef struct ChunkRow:
        uint64_t ptr
        uint64_t size
        uint64_t requested_size
        uint64_t last_requested_size
        uint64_t stream
        uint64_t freed_at_count
        int64_t allocation_id
        uint16_t state
        uint16_t tag
        uint32_t owner

    cdef struct RegionRow:
        uint64_t ptr
        uint64_t size
        uint64_t stream
        uint64_t pool[2]
        uint64_t home
        uint64_t home_size
        uint64_t number
        uint32_t chunks_end
        uint32_t pages_end
        uint32_t kind
        uint32_t flags

    const uint16_t ROW_FREE "bfc::kRowFree"
    const uint16_t ROW_IN_USE "bfc::kRowInUse"
    const uint16_t ROW_WAITING "bfc::kRowWaiting"
    const uint16_t ROW_LEAVING "bfc::kRowLeaving"
    const uint16_t ROW_LOWER "bfc::kRowLower"
    const uint32_t IN_RANGE "bfc::kInRange"
    const uint32_t ASLEEP "bfc::kAsleep"
    const uint32_t IS_VIEW "bfc::kIsView"

cdef cbool copy_columns(Pool pool, vector[RegionRow]& regions, vector[ChunkRow]& chunks,
                        vector[uint32_t]& pages) noexcept nogil
cdef bytes bytes_of_records(vector[HistoryRecord]& records)
cdef bytes bytes_of_regions(vector[RegionRow]& rows)
cdef bytes bytes_of_chunks(vector[ChunkRow]& rows)
cdef bytes bytes_of_pages(vector[uint32_t]& rows)


cdef struct PageUse:
    uint64_t page_size
    uint64_t pages
    uint64_t in_use
    uint64_t sparse                     # of the pages in use, those with less than a tenth of their bytes in use

cdef cbool list_pages(Pages pages, ChunkHandle first, vector[uint32_t]& numbers) noexcept nogil
cdef PageBitmap* bitmap_of(Pages pages, ChunkHandle handle) noexcept nogil


# These two need the lock.

cdef inline bint is_live_in(Pool pool, ChunkHandle handle, int64_t allocation_id) noexcept nogil:
    return handle < pool.chunk_count and pool.chunks[handle].allocation_id == allocation_id


cdef inline bint is_asleep_in(Pool pool, ChunkHandle handle) noexcept nogil:
    """Whether the memory of a chunk sleeps."""
    return pool.bin_sets[pool.chunks[handle].bin_set].asleep != 0


cdef Counters start_peaks(Pool pool, Lock& lock) noexcept
cdef Counters end_peaks(Pool pool, Lock& lock, Counters before) noexcept
cdef Chunk chunk_at(Pool pool, Lock& lock, uint64_t address) except *
cdef int raise_invalid_pointer(Pool pool, Lock& lock, uint64_t address) except -1
cdef object pages_in_use(Pool pool, Lock& lock)
cdef object bytes_by_name(uint64_t in_use, vector[uint64_t]& owned)
cdef uint64_t count_bookkeeping(Pool pool) noexcept nogil

cdef const char* first_fault(Pool pool) noexcept nogil
cdef const char* fault_in_pages(Pages pages) noexcept nogil
