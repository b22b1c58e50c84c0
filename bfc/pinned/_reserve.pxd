"""A reserve: one large block, taken once, that smaller ones are cut from."""

cimport cython
from libc.stdint cimport uint64_t

from bfc.pinned._source cimport Range, Source


@cython.final
cdef class Reserve:
    """Guarded by the GIL. It never calls an allocator."""

    cdef Source source
    cdef Range whole            # 0 bytes: it has not been taken
    cdef uint64_t used
    cdef bint is_closed

    cdef bint is_missing(self) noexcept
    cdef bint take(self, uint64_t wanted, threads) except -1
    cdef bint cut(self, uint64_t size, Range* piece) noexcept
    cdef void close(self) noexcept
