"""A snapshot's columns: rows of plain numbers, copied under the lock."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport HistoryRecord, Pool

cdef extern from "columns.hpp" namespace "bfc" nogil:
    cdef struct ChunkRow:
        uint64_t ptr
        uint64_t size
        uint64_t requested_size
        uint64_t last_requested_size
        uint64_t stream
        uint64_t freed_at_count
        int64_t allocation_id
        uint32_t state
        uint32_t owner

    cdef struct RegionRow:
        uint64_t ptr
        uint64_t size
        uint64_t stream
        uint64_t pool[2]
        uint64_t home
        uint64_t home_size
        uint32_t chunks_end
        uint32_t pages_end
        uint32_t kind
        uint32_t flags

    const uint32_t ROW_FREE "bfc::kRowFree"
    const uint32_t ROW_IN_USE "bfc::kRowInUse"
    const uint32_t ROW_WAITING "bfc::kRowWaiting"
    const uint32_t ROW_LEAVING "bfc::kRowLeaving"
    const uint32_t IN_RANGE "bfc::kInRange"
    const uint32_t ASLEEP "bfc::kAsleep"
    const uint32_t IS_VIEW "bfc::kIsView"

cdef cbool copy_columns(Pool pool, vector[RegionRow]& regions, vector[ChunkRow]& chunks,
                        vector[uint32_t]& pages) noexcept nogil
cdef bytes bytes_of_records(vector[HistoryRecord]& records)
cdef bytes bytes_of_regions(vector[RegionRow]& rows)
cdef bytes bytes_of_chunks(vector[ChunkRow]& rows)
cdef bytes bytes_of_pages(vector[uint32_t]& rows)
