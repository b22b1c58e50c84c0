"""Which regions PyTorch's policy gives back."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, Pool, Region
from bfc.allocators._source cimport Source
from bfc.policies._private_pools cimport PoolId, PrivatePools

cdef uint64_t take_out(Pool pool, Source source, vector[ChunkHandle]& chunks, vector[Region]& out) noexcept nogil
cdef cbool list_whole(Pool pool, PoolId id, uint32_t kind, vector[ChunkHandle]& out) noexcept nogil
cdef cbool list_in_ranges(Pool pool, PoolId id, uint32_t kind, vector[ChunkHandle]& out) noexcept nogil
cdef cbool list_collectable(Pool pool, vector[ChunkHandle]& out) noexcept nogil
cdef cbool list_releasable(Pool pool, PrivatePools private_pools, cbool with_default,
                           vector[ChunkHandle]& out) noexcept nogil
cdef void collect_oldest(Pool pool, vector[ChunkHandle]& candidates, uint64_t target,
                         vector[Region]& out) noexcept nogil
cdef cbool choose_oversize(Pool pool, uint32_t bin_set, uint64_t rounded, uint64_t oversize,
                           vector[Region]& out) noexcept nogil
cdef void choose_enough(Pool pool, vector[ChunkHandle]& chunks, uint64_t needed,
                        vector[ChunkHandle]& chosen) noexcept nogil
