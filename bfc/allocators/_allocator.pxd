"""What a user holds. How requests become chunks stands in _chunk_allocator.pxd."""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from bfc._core cimport ChunkHandle
from bfc.allocators._chunk_allocator cimport ChunkAllocator

cdef extern from "py_int.hpp" namespace "bfc":
    cdef cppclass RecentInts:
        PyObject* get(uint64_t number)


cdef class Allocator(ChunkAllocator):
    cdef RecentInts addresses           # what allocate_raw returned


cdef int hand_over_chunk(Allocator allocator, ChunkHandle handle) except -1
cdef uint64_t trim_pages(ChunkAllocator allocator, uint64_t keep, bint wait) except? 0xFFFFFFFFFFFFFFFF
