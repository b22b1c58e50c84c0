"""Frees of many addresses in one call."""

from libc.stdint cimport uint64_t
from libcpp.vector cimport vector

from bfc.allocators._frees cimport Frees

cdef enum:
    BETWEEN_OTHERS = 256        # how many of a list are dealt with before others get the lock: some 10 us

cdef int free_many(Frees allocator, const vector[uint64_t]& addresses) except -1
