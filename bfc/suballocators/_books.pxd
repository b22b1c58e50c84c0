"""The books of a sub-allocator that maps memory, for Python, and what they refuse in words."""

from libc.stdint cimport uint64_t

from bfc.native.mapping_books cimport NativeBooks


cdef int refuse(int why, str call, uint64_t address, uint64_t nbytes, uint64_t where, uint64_t granularity) except -1


cdef class MappingBooks:
    cdef NativeBooks native

    cdef int check(self, int why, str call, uint64_t address, uint64_t nbytes) except -1
