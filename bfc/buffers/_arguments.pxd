"""Converts arguments to C numbers: a fast path for plain ints, and clear errors for the rest."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

cdef extern from "py_int.hpp" namespace "bfc" nogil:
    cbool small_int(object number, uint64_t* found)

cdef uint64_t size_from(object nbytes) except? 0xFFFFFFFFFFFFFFFF
cdef uint64_t alignment_from(object alignment) except? 0xFFFFFFFFFFFFFFFF
cdef uint64_t count_from(object freed_before) except? 0xFFFFFFFFFFFFFFFF
cdef uint64_t stream_from(object stream) except? 0xFFFFFFFFFFFFFFFF
cdef uint64_t address_from(object ptr) except? 0xFFFFFFFFFFFFFFFF
cpdef uint64_t array_address(object array) except? 0
cdef int sizes_from(object sizes, vector[uint64_t]* found) except -1
cdef int addresses_from(object ptrs, vector[uint64_t]* found) except -1
cdef tuple shape_from(object shape, items)
