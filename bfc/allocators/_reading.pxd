"""What can be read from a pool."""

from libc.stdint cimport int64_t, uint64_t
from libcpp.vector cimport vector

from bfc._core cimport Chunk, ChunkHandle, Counters, Pool
from bfc.allocators._lock cimport Lock


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
