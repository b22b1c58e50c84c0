"""Python's tracemalloc, which counts an allocator's memory under a domain of its own."""

from libc.stdint cimport uint32_t

from bfc._core cimport ChunkHandle, Pool

cdef uint32_t domain_from(domain) except? 0xFFFFFFFF
cdef void set_domain(Pool pool, uint32_t domain) noexcept
cdef void tell_tracemalloc(Pool pool, ChunkHandle handle) noexcept
