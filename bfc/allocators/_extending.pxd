"""Allocations that grow in place."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport ChunkHandle, Pool

cdef uint64_t bytes_behind(Pool pool, ChunkHandle handle) noexcept nogil
cdef cbool extend_chunk(Pool pool, ChunkHandle handle, uint64_t rounded, uint64_t requested) noexcept nogil
