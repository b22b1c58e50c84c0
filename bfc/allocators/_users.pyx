"""Which streams use memory, and the fences that were asked for before the memory's free."""

cimport cython
from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable


class _Over:
    """The fence of a stream that had nothing queued."""

    def done(self):
        return True

    def wait(self):
        pass


OVER = _Over()


cdef int drop_done(list fences) except -1:
    """Drops the first ones that are done: memory that is handed out again and again must not collect them. Another
    thread may do the same meanwhile."""
    while fences:
        oldest = fences[0]
        if not oldest[1].done():
            return 0
        if fences and fences[0] is oldest:
            del fences[0]
    return 0


cdef void report_unraisable(object error, object doing) noexcept:
    """Reports an error that cannot be raised to a caller, as Python does for errors in finalisers."""
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable(doing)


# In a garbage cycle a buffer may be finalised after its allocator: the collector must leave the dictionaries in place.
@cython.no_gc_clear
cdef class Users:
    """Which streams use memory: a part of device memory's fences and of pinned memory's events."""

    def __cinit__(self):
        self.users = {}
        self.marked = {}

    cdef int mark_user(self, int64_t allocation_id, uint64_t stream) except -1:
        """Asks for a fence on a stream that has let go of the memory now, since the stream may be destroyed before the
        memory's free."""
        raise NotImplementedError

    cdef int keep_user(self, int64_t allocation_id, uint64_t stream) except -1:
        """Lets the memory's free ask for a fence on a stream."""
        raise NotImplementedError

    cdef object try_to_mark(self, int64_t allocation_id, uint64_t stream):
        """Calls `mark_user`. Returns what it raised, or None."""
        try:
            self.mark_user(allocation_id, stream)
        except BaseException as error:
            return error
        return None

    cdef void could_not_mark(self, int64_t allocation_id, uint64_t stream, error, bint drained, put_off) noexcept:
        """Deals with the error of `try_to_mark`: nothing is wrong if the whole device was waited for (`drained`).
        Otherwise the free asks again. A Ctrl-C is reported in any case."""
        if not drained:
            self.keep_user(allocation_id, stream)
        if not drained or not isinstance(error, Exception):
            report_unraisable(error, put_off)

    cdef int forget(self, allocation_id) except -1:
        self.users.pop(allocation_id, None)
        self.marked.pop(allocation_id, None)
        return 0

    cdef int clear(self) except -1:
        """Forgets all: the allocator has closed, and its memory has gone back."""
        self.users.clear()
        self.marked.clear()
        return 0
