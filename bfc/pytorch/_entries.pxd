"""A snapshot's columns in the form that PyTorch's viewer expects."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp.vector cimport vector

from bfc._core cimport HistoryRecord

cdef extern from "columns.hpp" namespace "bfc" nogil:
    cdef struct ChunkRow:
        uint64_t ptr
        uint64_t size
        uint64_t requested_size
        uint64_t last_requested_size
        uint32_t state

    cdef struct RegionRow:
        uint64_t ptr
        uint64_t size
        uint64_t stream
        uint64_t pool[2]
        uint32_t chunks_end
        uint32_t kind
        uint32_t flags

    const uint32_t ROW_IN_USE "bfc::kRowInUse"
    const uint32_t ROW_WAITING "bfc::kRowWaiting"
    const uint32_t IN_RANGE "bfc::kInRange"
    const uint32_t ASLEEP "bfc::kAsleep"

cdef struct Sums:                   # of a segment, in bytes
    uint64_t allocated
    uint64_t active
    uint64_t requested

cdef class SharedFrames:
    cdef dict made              # by the frames
    cdef dict by_id             # by the identity of their tuple, which its owner keeps alive: a faster look-up

    cdef list of(self, tuple frames)

cdef class Columns:
    cdef object regions, history    # RegionColumns and HistoryColumns, which own the rows
    cdef const RegionRow* region_rows
    cdef const ChunkRow* chunk_rows
    cdef const HistoryRecord* records
    cdef size_t region_count
    cdef size_t record_count
    cdef vector[uint32_t] kept      # the records that the viewer can follow, the newest first

    cdef uint32_t first_chunk(self, size_t region) noexcept
    cdef Sums sums_of(self, size_t region) noexcept
    cdef tuple frames_of(self, list frames, size_t i)
    cdef tuple frames_of_entry(self, size_t i)

cdef uint64_t requested_of(const ChunkRow* chunk) noexcept
