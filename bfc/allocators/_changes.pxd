"""Changes of a pool that few requests need."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport BinSet, ChunkHandle, Pool


cdef enum:
    IS_GROWING = 1      # the `freed_at_count` of an unmapped chunk that memory is being mapped for; of others it is 0


cdef void merge_timestamped(Pool pool, uint64_t required, cbool* satisfied) noexcept nogil
cdef void forget_queued(Pool pool) noexcept nogil

cdef uint64_t bytes_behind(Pool pool, ChunkHandle handle) noexcept nogil
cdef cbool extend_chunk(Pool pool, ChunkHandle handle, uint64_t rounded, uint64_t requested) noexcept nogil

cdef ChunkHandle add_range(Pool pool, uint64_t ptr, uint64_t size, uint32_t bin_set) noexcept nogil
cdef void remove_range(Pool pool, uint64_t ptr, uint64_t size) noexcept nogil
cdef uint64_t count_asleep(Pool pool, uint32_t bin_set, cbool asleep) noexcept nogil
cdef void merge_unmapped(Pool pool, ChunkHandle handle) noexcept nogil
cdef cbool begin_mapping(Pool pool, ChunkHandle handle, uint64_t size) noexcept nogil
cdef cbool end_mapping(Pool pool, ChunkHandle handle) noexcept nogil
cdef void cancel_mapping(Pool pool, ChunkHandle handle, cbool is_mapped) noexcept nogil
cdef ChunkHandle begin_unmapping(Pool pool, ChunkHandle handle, uint64_t start, uint64_t end) noexcept nogil
cdef void make_free(Pool pool, BinSet* owner, ChunkHandle handle) noexcept nogil
cdef cbool cancel_unmapping(Pool pool, ChunkHandle handle) noexcept nogil
cdef ChunkHandle end_unmapping(Pool pool, ChunkHandle handle, uint64_t size, cbool has_gone) noexcept nogil
cdef void forget_absent(Pool pool, ChunkHandle handle) noexcept nogil
cdef cbool cut_absent(Pool pool, ChunkHandle handle, uint64_t step) noexcept nogil
cdef void join_absent(Pool pool, ChunkHandle handle, uint64_t size) noexcept nogil
