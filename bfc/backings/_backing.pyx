"""What each kind of memory behind chunks does, and how a request goes through the kinds that its allocator has."""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport NO_CHUNK, ChunkHandle
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request

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


cdef int make_room(ChunkAllocator allocator, Request* request, uint64_t nbytes) except -1 nogil:
    """Has the other backings give back free memory. Returns whether one of them tried."""
    cdef int tried = False
    cdef Py_ssize_t i = 0
    cdef PyObject* backing = backing_at(allocator, i)
    while backing != NULL:
        # All are asked, also once one has tried: how much each gives back is not known before.
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
