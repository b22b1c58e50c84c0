"""What each kind of memory behind chunks does."""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport NO_CHUNK, ChunkHandle
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request
from bfc.allocators._plan_use cimport ask_plan

cdef extern from "Python.h":    # an allocator keeps its tuple, which never changes: so neither needs the GIL
    PyObject* PyTuple_GET_ITEM(PyObject* items, Py_ssize_t i) noexcept nogil
    Py_ssize_t PyTuple_GET_SIZE(PyObject* items) noexcept nogil


cdef class Backing:
    cdef cbool serves(self, ChunkAllocator allocator, Request* request) noexcept nogil
    cdef ChunkHandle find(self, ChunkAllocator allocator, Request* request) noexcept nogil
    cdef int grow(self, ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil
    cdef int make_room(self, ChunkAllocator allocator, Request* request, uint64_t nbytes) except -1 nogil
    cdef uint64_t release(self, ChunkAllocator allocator) except? 0xFFFFFFFFFFFFFFFF


cdef uint64_t release_from_backings(ChunkAllocator allocator) except? 0xFFFFFFFFFFFFFFFF
cdef int make_room(ChunkAllocator allocator, Request* request, uint64_t nbytes) except -1 nogil


cdef inline PyObject* backing_at(ChunkAllocator allocator, Py_ssize_t i) noexcept nogil:
    """The backing that is asked in this turn; NULL: there are no more."""
    cdef PyObject* backings = <PyObject*>allocator.backings
    return PyTuple_GET_ITEM(backings, i) if i < PyTuple_GET_SIZE(backings) else NULL


cdef inline ChunkHandle find_in_backings(ChunkAllocator allocator, Request* request) noexcept nogil:
    """Places a request in its plan, or in free memory of the first backing that has some. Needs the lock."""
    cdef ChunkHandle handle = ask_plan(allocator, request)
    cdef Py_ssize_t i = 0
    cdef PyObject* backing = backing_at(allocator, i)
    while handle == NO_CHUNK and backing != NULL:
        handle = (<Backing>backing).find(allocator, request)
        i += 1
        backing = backing_at(allocator, i)
    return handle


cdef inline int grow_backing(ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil:
    """Has the backing grow that serves the request."""
    cdef Py_ssize_t i = 0
    cdef PyObject* backing = backing_at(allocator, i)
    while backing != NULL and not (<Backing>backing).serves(allocator, request):
        i += 1
        backing = backing_at(allocator, i)
    return (<Backing>backing).grow(allocator, request, placed) if backing != NULL else 0
