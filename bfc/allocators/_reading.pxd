"""Facts about a pool, in the words of statistics and messages."""

from libc.stdint cimport uint64_t
from libcpp.vector cimport vector

from bfc._core cimport Chunk, ChunkHandle, Pool

cdef object bytes_by_name(uint64_t in_use, vector[uint64_t]& owned)
cdef uint64_t count_bookkeeping(Pool pool) noexcept nogil
cdef ChunkHandle chunk_around(Pool pool, uint64_t ptr) noexcept nogil
cdef str what_is_at(uint64_t address, const Chunk* chunk)
