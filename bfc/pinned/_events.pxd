"""Which streams use pinned memory, and the one queue of marks that freed blocks wait behind."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef enum:
    NO_BLOCK = 0xFFFFFFFF


@cython.final
cdef class Waiting:
    """A mark in a stream's queue, and the block that waits for it."""

    cdef object fence
    cdef uint32_t handle


@cython.final
cdef class Events:
    """Guarded by the GIL. It asks sub-allocators for fences, and never calls an allocator."""

    cdef object source              # the allocator's sub-allocator
    cdef dict users                 # allocation id -> {(source, stream): what the user passed, kept alive}
    cdef dict marked                # allocation id -> [(stream, fence)], asked for before the free
    cdef object queue               # deque of Waiting, the oldest first
    cdef object stuck               # deque of Waiting: entries whose fence failed
    cdef unsigned long polled_by     # the thread that is querying the queue's fences; 0: none
    cdef uint64_t era_seen          # the era at which that was last checked

    cdef object source_of(self, stream)
    cdef object number_of(self, stream, source)

    cdef int uses(self, int64_t allocation_id, source, number, passed) except -1
    cdef int mark_user(self, int64_t allocation_id, uint64_t stream) except -1
    cdef int forget(self, key) except -1
    cdef int clear(self) except -1

    cdef list waiting_for(self, key, uint32_t handle)
    cdef int enqueue(self, list entries) except -1
    cdef bint take_turn(self) noexcept
    cdef uint32_t next_done(self) except? 0xFFFFFFFE
    cdef bint is_asked(self) noexcept
    cdef int try_stuck_again(self) except -1
    cdef object wait_for_queue(self)
    cdef object wait_elsewhere(self)


cdef extern from "Python.h":
    Py_ssize_t PyDict_GET_SIZE(dict items)

cdef inline bint some_use(Events events) noexcept:
    """Whether a free may have to wait for a stream."""
    return PyDict_GET_SIZE(events.users) > 0 or PyDict_GET_SIZE(events.marked) > 0
