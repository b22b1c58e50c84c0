"""What each kind of memory behind chunks does, and how a request goes through the kinds that its allocator has."""

from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport NO_CHUNK, ChunkHandle
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators.mapping._address_ranges cimport AddressRanges
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request

from bfc.errors import ClosedError


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
        the GIL only to call what is written in Python, as `make_room` does."""
        return 0

    cdef int map_for(self, ChunkAllocator allocator, Request* request, Placement* placed) noexcept nogil:
        """Maps memory until the request fits, and places it, or until nothing more can be done (`grow_mapped`). -1:
        that failed, and the device keeps the error."""
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


# -- memory that is mapped ---------------------------------------------------------------------------------------------

cdef int raise_kept(PyObject* kept) except -1 with gil:
    """Raises an error that is held, and lets it go."""
    error = <object>kept
    Py_DECREF(error)
    raise error


cdef int check_awake(AddressRanges memory, ChunkAllocator allocator, Request* request) noexcept nogil:
    """Refuses a request for a tag that fell asleep since the request came."""
    cdef cbool asleep
    acquire_lock(allocator.lock)    # other threads put tags to sleep
    asleep = request.tag and allocator.tags.is_asleep(request.tag)
    allocator.lock.release()
    if not asleep:
        return 0
    memory.device.guard.pause()
    keep_asleep(memory, allocator, request.tag)
    memory.device.guard.go_on()
    return -1


cdef int keep_asleep(AddressRanges memory, ChunkAllocator allocator, uint64_t tag) noexcept with gil:
    try:
        return allocator.tags.refuse_if_asleep(tag)
    except BaseException as error:
        return memory.device.fail(error)


cdef int refuse_closed(AddressRanges memory) noexcept nogil:
    """For an allocator that another thread closed: what was mapped since goes when the mapper leaves, as `close` could
    not enter."""
    memory.must_close = True
    memory.device.guard.pause()
    keep_closed(memory)
    memory.device.guard.go_on()
    return -1


cdef int keep_closed(AddressRanges memory) noexcept with gil:
    return memory.device.fail(ClosedError("this allocator was closed while it asked for memory"))
