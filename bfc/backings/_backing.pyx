"""What each kind of memory behind chunks does, and how a request goes through the kinds that its allocator has."""

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
    """How memory of one kind is found, added and given back. By default there is none."""

    cdef cbool serves(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        """Whether a request that fits nowhere gets new memory here."""
        return False

    cdef ChunkHandle find(self, ChunkAllocator allocator, Request* request) noexcept nogil:
        """Places a request in what is free here. Needs the lock."""
        return NO_CHUNK

    cdef int grow(self, ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil:
        """Adds memory, if the limit and the device let it, and places the request there. Takes the lock itself, and
        the GIL only to call what is written in Python, as the next one does."""
        return 0

    cdef int make_room(self, ChunkAllocator allocator, Request* request, uint64_t nbytes) except -1 nogil:
        """Gives back free memory of so many bytes, or as much as there is, for a request that another backing serves.
        Returns whether it tried."""
        return False

    cdef uint64_t release(self, ChunkAllocator allocator) except? 0xFFFFFFFFFFFFFFFF:
        """Gives back all memory that is free and lies in no region. Returns the bytes."""
        return 0


cdef inline PyObject* backing_at(ChunkAllocator allocator, Py_ssize_t i) noexcept nogil:
    """The backing that is asked in this turn; NULL: there are no more."""
    cdef PyObject* backings = <PyObject*>allocator.backings
    return PyTuple_GET_ITEM(backings, i) if i < PyTuple_GET_SIZE(backings) else NULL


cdef ChunkHandle find_in_backings(ChunkAllocator allocator, Request* request) noexcept nogil:
    """Places a request in its plan, or in free memory of the first backing that has some. Needs the lock."""
    cdef ChunkHandle handle = ask_plan(allocator, request)
    cdef Py_ssize_t i = 0
    cdef PyObject* backing = backing_at(allocator, i)
    while handle == NO_CHUNK and backing != NULL:
        handle = (<Backing>backing).find(allocator, request)
        i += 1
        backing = backing_at(allocator, i)
    return handle


cdef int grow_backing(ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil:
    """Has the backing grow that serves the request."""
    cdef Py_ssize_t i = 0
    cdef PyObject* backing = backing_at(allocator, i)
    while backing != NULL and not (<Backing>backing).serves(allocator, request):
        i += 1
        backing = backing_at(allocator, i)
    return (<Backing>backing).grow(allocator, request, placed) if backing != NULL else 0


cdef int make_room(ChunkAllocator allocator, Request* request, uint64_t nbytes) except -1 nogil:
    """Has the other backings give back free memory. Returns whether one of them tried."""
    cdef int tried = False
    cdef Py_ssize_t i = 0
    cdef PyObject* backing = backing_at(allocator, i)
    while backing != NULL:
        tried |= (<Backing>backing).make_room(allocator, request, nbytes)
        i += 1
        backing = backing_at(allocator, i)
    return tried


cdef uint64_t release_from_backings(ChunkAllocator allocator) except? 0xFFFFFFFFFFFFFFFF:
    """Has each backing give back all memory that is free and lies in no region. Returns the bytes."""
    cdef uint64_t released = 0
    cdef Backing backing
    for backing in allocator.backings:
        released += backing.release(allocator)
    return released
