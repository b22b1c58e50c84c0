"""Events: which streams use pinned memory, and the one queue that freed blocks wait in (PyTorch's behaviour, 4.3).

Fences are created and queried between two changes of the bookkeeping: they may call back, and other threads may free
meanwhile.
"""

import sys
import time
from collections import deque

cimport cython

from bfc.interpreter._process cimport era, survivor
from bfc.allocators._fences cimport drop_done
from bfc.allocators._frees cimport report_unraisable

from bfc.allocators._fences import OVER as _OVER
from bfc.drivers.opencl import queues as _queues
from bfc.streams import stream_handle

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

#: What errors that do not belong to the caller are reported for.
PUT_OFF = "memory that a PinnedAllocator keeps, and that empty_cache() tries to give back again"

_POLL_SECONDS = 0.001


@cython.final
@cython.no_gc_clear
cdef class Waiting:
    """A mark in a stream's queue, and the block that waits for it."""


# In a garbage cycle a buffer may be finalised after its allocator: the collector must leave the dictionaries in place.
@cython.final
@cython.no_gc_clear
cdef class Events:
    """Which streams use pinned memory, and the one queue of marks that freed blocks wait behind."""

    def __cinit__(self):
        self.users = {}
        self.marked = {}
        self.queue = deque()
        self.stuck = deque()    # removing an item needs no memory

    # -- streams ------------------------------------------------------------------------------------------------------

    cdef object source_of(self, stream):
        """The sub-allocator for a stream for which the caller named none: an OpenCL queue has another one than a CUDA
        stream."""
        cl = sys.modules.get("pyopencl")
        if cl is not None and isinstance(stream, getattr(cl, "CommandQueue", ())):
            return _queues.pinned_side()
        return self.source

    cdef object number_of(self, stream, source):
        """A stream's handle; 0 for None. The default stream has several handles; always returns the same one of them.
        """
        number = 0 if stream is None else stream_handle(stream)
        return 0 if number and number == source.default_stream_alias else number

    # -- who uses memory ----------------------------------------------------------------------------------------------

    cdef int uses(self, int64_t allocation_id, source, number, passed) except -1:
        """Notes that a stream uses an allocation, and keeps what the user passed for the stream alive meanwhile."""
        self.users.setdefault(allocation_id, {})[source, number] = passed
        return 0

    cdef int mark_user(self, int64_t allocation_id, uint64_t stream) except -1:
        """Marks a stream that has let go of the memory now: it may be destroyed before the memory is freed."""
        if self.source.asynchronous:
            fence = self.source.fence(stream) or _OVER
            self.marked.setdefault(allocation_id, []).append((stream, fence))
            drop_done(self.marked[allocation_id])
        return 0

    cdef int forget(self, key) except -1:
        self.users.pop(key, None)
        self.marked.pop(key, None)
        return 0

    cdef int clear(self) except -1:
        """Forgets everything: the allocator has closed."""
        self.users.clear()
        self.marked.clear()
        self.queue.clear()
        self.stuck.clear()
        return 0

    # -- the queue ----------------------------------------------------------------------------------------------------

    cdef list waiting_for(self, key, uint32_t handle):
        """The entries for a block that is freed: the earlier marks, and a new one for each stream that may have used
        the memory up to now. They are not in the queue yet."""
        cdef list entries = []
        fences = list(self.marked.get(key, ()))
        for source, stream in list(self.users.get(key, ())):
            if source.asynchronous:
                fences.append((stream, source.fence(stream) or _OVER))
        for _stream, fence in fences:
            entries.append(new_waiting(fence, handle))
        return entries

    cdef int enqueue(self, list entries) except -1:
        """Enqueues all of them, or none if the host has no memory for that."""
        cdef Py_ssize_t before = len(self.queue)
        try:
            self.queue.extend(entries)
        except BaseException:
            while <Py_ssize_t>len(self.queue) > before:
                self.queue.pop()
            raise
        return 0

    cdef bint take_turn(self) noexcept:
        """Whether this thread may query the queue's fences now: one thread at a time does so, until it sets `polled_by`
        to 0; the others do not wait for it."""
        if self.is_asked():
            return False
        self.polled_by = PyThread_get_thread_ident()
        return True

    cdef uint32_t next_done(self) except? 0xFFFFFFFE:
        """The block of the oldest entry, if its stream has reached its mark, so that it waits for one mark less;
        NO_BLOCK otherwise.

        If a fence fails, the error is reported like that of a finaliser, as it does not belong to the caller. Its block
        stays in use until empty_cache() or close() queries the fence again.
        """
        cdef Waiting oldest
        while self.queue:
            oldest = self.queue[0]
            fault = None
            try:
                if not oldest.fence.done():
                    return NO_BLOCK
            except Exception as error:
                fault = error
            if not self.queue or self.queue[0] is not oldest:
                return NO_BLOCK     # closed meanwhile
            if fault is not None:
                self.stuck.append(oldest)
            self.queue.popleft()
            if fault is None:
                return oldest.handle
            report_unraisable(fault, PUT_OFF)
        return NO_BLOCK

    cdef bint is_asked(self) noexcept:
        """Whether a thread is querying the queue's fences. After a fork only the surviving thread can be."""
        if self.era_seen != era():
            self.era_seen = era()
            if self.polled_by != survivor():
                self.polled_by = 0
        return self.polled_by != 0

    cdef int try_stuck_again(self) except -1:
        while self.stuck:
            self.queue.appendleft(self.stuck[len(self.stuck) - 1])
            self.stuck.pop()
        return 0

    cdef object wait_for_queue(self):
        """Waits for all that is queued. Returns the first error that a fence raised, or None; `next_done` queries that
        fence again."""
        cdef Waiting entry
        if self.is_asked() and self.polled_by == PyThread_get_thread_ident():
            return None         # inside one of its own fences
        fault = None
        for entry in list(self.queue):
            try:
                entry.fence.wait()
            except Exception as error:
                fault = fault or error
        while self.is_asked():
            time.sleep(_POLL_SECONDS)
        return fault

    cdef object wait_elsewhere(self):
        """Waits for streams of other devices that use live blocks: the source waits only for its own device when it
        frees. Returns the first error that one raised, or None."""
        fault = None
        for used_on in list(self.users.values()):
            for source, stream in list(used_on):
                if source is self.source or not source.asynchronous:
                    continue
                try:
                    (source.fence(stream) or _OVER).wait()
                except Exception as error:
                    fault = fault or error
        return fault


cdef Waiting new_waiting(fence, uint32_t handle):
    cdef Waiting entry = Waiting.__new__(Waiting)
    entry.fence = fence
    entry.handle = handle
    return entry
