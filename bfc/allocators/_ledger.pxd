"""A pool behind a lock, and what can be read from it."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport Chunk, ChunkHandle, Counters, HistoryRecord, Pool
from bfc.buffers._buffer cimport Owner
from bfc.allocators._columns cimport ChunkRow, RegionRow
from bfc.allocators._lock cimport Lock
from bfc.allocators._source cimport Source


cdef class Ledger(Owner):
    cdef Lock lock
    cdef Pool pool
    cdef Source source                  # where its regions come from
    cdef uint64_t home_stream           # HOST_STREAM where memory is not reused in a stream's order
    cdef uint64_t default_stream_alias
    cdef vector[uint64_t] thread_streams    # handles that name another stream in each thread
    cdef uint64_t limit
    cdef bint is_closed
    cdef object __weakref__

    cdef void acquire(self) noexcept nogil
    cdef int catch_up(self) except -1
    cdef void give_way(self) noexcept nogil
    cdef object settings_now(self)
    cdef list frames_of_chunks(self, vector[ChunkRow]& chunks)
    cdef list steps_of_chunks(self, vector[ChunkRow]& chunks)
    cdef list frames_of_regions(self, vector[RegionRow]& regions)
    cdef object columns_of(self, vector[HistoryRecord]& records)
    cdef object page_use(self)
    cdef object look(self, bint with_history, bint noted)

    @cython.final
    cdef inline bint is_live_locked(self, ChunkHandle handle, int64_t allocation_id) noexcept nogil:
        return handle < self.pool.chunk_count and self.pool.chunks[handle].allocation_id == allocation_id

    cdef bint is_asleep_locked(self, ChunkHandle handle) noexcept nogil
    cdef object tag_of_pool(self, uint64_t first, uint64_t second)
    cdef uint64_t bytes_not_released(self) noexcept
    cdef uint64_t bytes_asleep(self) noexcept
    cdef cbool is_of_thread(self, uint64_t stream) noexcept nogil
    cdef uint64_t stream_of(self, object stream) except? 0xFFFFFFFFFFFFFFFF
    cdef Counters start_peaks(self) noexcept
    cdef Counters end_peaks(self, Counters before) noexcept
    cdef object stats_of(self, Counters counters, uint64_t largest_free, vector[uint64_t]& owned)
    cdef Chunk chunk_at(self, object ptr) except *
    cdef int raise_invalid_pointer(self, uint64_t address) except -1
    cdef int check_books(self) except -1
