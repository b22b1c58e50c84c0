"""Python's tracemalloc, which counts an allocator's memory under a domain of its own. It is told of allocations here,
and of frees by the pool (native/owners.hpp)."""

from libc.stdint cimport uintptr_t

from bfc._core cimport TRACED, Chunk, Tracing

cdef extern from *:
    """
    // Headers of Python up to 3.12 declare them as functions of C++. Here they have other names, and Python's symbols.
    extern "C" int bfc_track(unsigned domain, uintptr_t ptr, size_t size) __asm__("PyTraceMalloc_Track");
    extern "C" int bfc_untrack(unsigned domain, uintptr_t ptr) __asm__("PyTraceMalloc_Untrack");
    """
    int track "bfc_track"(unsigned int domain, uintptr_t ptr, size_t size) noexcept nogil   # with the GIL
    int untrack "bfc_untrack"(unsigned int domain, uintptr_t ptr) noexcept nogil


cdef uint32_t domain_from(domain) except? 0xFFFFFFFF:
    """The number of a domain; 0 for None."""
    if domain is None:
        return 0
    if not isinstance(domain, int):
        raise TypeError(f"a domain is an int or None, not {type(domain).__name__}")
    if not 0 < domain < 1 << 32:
        raise ValueError(f"a domain is a number from 1 to 2**32 - 1, not {domain}: 0 is Python's own memory")
    return domain


cdef void set_domain(Pool pool, uint32_t domain) noexcept:
    """Lets tracemalloc forget what it knows of the pool, and count from now on under a domain; 0 ends it. Needs the
    lock, and the GIL."""
    cdef size_t i
    for i in range(pool.chunk_count):
        if pool.chunks[i].state & TRACED:
            pool.owned.tracing.forget(pool.owned.tracing.domain, pool.chunks[i].ptr)
            pool.chunks[i].state &= ~<uint32_t>TRACED
    pool.owned.tracing = Tracing(domain, track, untrack)


cdef void tell_tracemalloc(Pool pool, ChunkHandle handle) noexcept:
    """Tells it of a chunk that was handed out. Needs the lock, and the GIL."""
    cdef Chunk* chunk = &pool.chunks[handle]
    chunk.state |= TRACED
    pool.owned.tracing.tell(pool.owned.tracing.domain, chunk.ptr, chunk.size)
