"""The C functions of a sub-allocator that map memory, for Python, and for callers without the GIL."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.mapping cimport bfc_mapping_fault, bfc_native_mapping


ctypedef int (*Takes)(void*, uint64_t nbytes, uint64_t* taken, bfc_mapping_fault*) noexcept nogil
ctypedef int (*AsksAt)(void*, uint64_t address, uint64_t nbytes, bfc_mapping_fault*) noexcept nogil


cdef class NativeMapping:
    cdef bfc_native_mapping* table
    cdef object capsule             # of the table, which it keeps alive
    cdef str name

    cdef int check(self, int result, str call, bfc_mapping_fault* fault) except -1
    cdef bint take(self, Takes function, str call, uint64_t nbytes, uint64_t* taken) except -1
    cdef int ask_at(self, AsksAt function, str call, address, nbytes) except -1
    cdef int put(self, uint64_t address, vector[uint64_t]& pages, uint64_t nbytes, cbool* is_mapped,
                 bfc_mapping_fault* fault) noexcept nogil
