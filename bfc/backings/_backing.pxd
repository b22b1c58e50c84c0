"""What each kind of memory behind chunks does."""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport NO_CHUNK, ChunkHandle
from bfc.allocators.mapping._address_ranges cimport (
    AddressRanges, PyThreadState, is_native, let_gil_go, take_gil_back,
)
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request
from bfc.allocators._plan_use cimport ask_plan

cdef extern from "Python.h":    # an allocator keeps its tuple, which never changes: so neither needs the GIL
    PyObject* PyTuple_GET_ITEM(PyObject* items, Py_ssize_t i) noexcept nogil
    Py_ssize_t PyTuple_GET_SIZE(PyObject* items) noexcept nogil


cdef class Backing:
    cdef cbool serves(self, ChunkAllocator allocator, Request* request) noexcept nogil
    cdef ChunkHandle find(self, ChunkAllocator allocator, Request* request) noexcept nogil
    cdef int grow(self, ChunkAllocator allocator, Request* request, Placement* placed) except -1 nogil
    cdef int map_for(self, ChunkAllocator allocator, Request* request, Placement* placed) noexcept nogil
    cdef int make_room(self, ChunkAllocator allocator, Request* request, uint64_t nbytes) except -1 nogil
    cdef uint64_t release(self, ChunkAllocator allocator) except? 0xFFFFFFFFFFFFFFFF


cdef int raise_kept(PyObject* kept) except -1 with gil
cdef int check_awake(AddressRanges memory, ChunkAllocator allocator, Request* request) noexcept nogil
cdef int refuse_closed(AddressRanges memory) noexcept nogil
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


cdef inline int grow_mapped(Backing backing, AddressRanges memory, ChunkAllocator allocator, Request* request,
                            Placement* placed, uint64_t set_aside) except -1 nogil:
    """Has a backing map memory for a request, by `map_for` on the thread that maps: without the GIL where the
    sub-allocator has C functions for all of it. `set_aside`: the bytes that are set aside from the limit meanwhile."""
    cdef PyThreadState* state
    cdef PyObject* error = NULL
    if not is_native(memory):
        return grow_with_gil(backing, memory, allocator, request, placed, set_aside)
    state = let_gil_go()
    # Another thread maps, or a child has to take over what one had begun. Both are sorted out with the GIL.
    if not memory.enter_natively(set_aside):
        take_gil_back(state)
        return grow_with_gil(backing, memory, allocator, request, placed, set_aside)
    if map_as_mapper(backing, memory, allocator, request, placed) < 0:
        memory.device.guard.pause()
        error = memory.device.take_error()
        memory.device.guard.go_on()
    memory.leave_natively()
    take_gil_back(state)
    return raise_kept(error) if error != NULL else 0


cdef inline int grow_with_gil(Backing backing, AddressRanges memory, ChunkAllocator allocator, Request* request,
                              Placement* placed, uint64_t set_aside) except -1 with gil:
    cdef int result
    # What another thread maps may be enough for this request, too, which looks again when that has ended.
    request.blocked = not memory.enter(set_aside)
    if request.blocked:
        return 0
    result = map_as_mapper(backing, memory, allocator, request, placed)
    try:
        memory.device.check(result)
    finally:
        memory.leave()
    return 0


cdef inline int map_as_mapper(Backing backing, AddressRanges memory, ChunkAllocator allocator, Request* request,
                              Placement* placed) noexcept nogil:
    cdef uint64_t changes = memory.changes
    cdef int result
    request.blocked = False
    memory.device.is_refused = False
    result = check_awake(memory, allocator, request)
    if result == 0:
        result = backing.map_for(allocator, request, placed)
    # Changes of its own are no reason for a request to try again.
    request.asking.changes += memory.changes - changes
    return result
