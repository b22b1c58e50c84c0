"""Frees in a scope with `strict`. Their fences are asked for after the scope, where PyTorch 2.11 does that."""

from collections import deque

cimport cython
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle
from bfc.allocators._fences cimport Fences

from bfc.errors import out_of_host_memory

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_make_room[T](vector[T]& items, size_t count)


@cython.final
@cython.no_gc_clear
cdef class DeferredFree:
    """A chunk that was freed in a scope, and the streams that use it."""


@cython.final
@cython.no_gc_clear
cdef class Deferred:
    """The frees that wait for the end of a scope. It asks the source for fences, and never calls an allocator."""

    def __cinit__(self):
        self.waiting = deque()
        self.stuck = deque()

    cdef int put(self, ChunkHandle handle, allocation_id, Fences fences) except -1:
        """Puts a free off, with the streams that use its memory."""
        cdef DeferredFree entry = DeferredFree()
        entry.handle = handle
        entry.streams = fences.users.get(allocation_id) or {}
        entry.fences = fences.marked.get(allocation_id) or []
        self.waiting.append(entry)
        return 0

    cdef int record(self, Fences fences, bint again, vector[ChunkHandle]& done, list faults) except -1:
        """Puts the chunks behind fences; those that need none are listed in `done`. Upstream forgets the streams that
        were recorded inside of the scope. Chunks for which the device fails are set aside until they are tried
        `again`, and the error goes to `faults`."""
        cdef DeferredFree entry
        while again and self.stuck:
            self.waiting.appendleft(self.stuck[len(self.stuck) - 1])
            self.stuck.pop()
        cdef Py_ssize_t left = len(self.waiting)
        if not try_make_room(done, <size_t>left):
            raise out_of_host_memory()
        while left > 0 and self.waiting:
            left -= 1
            entry = self.waiting.popleft()
            try:
                found = entry.fences
                if fences.source.asynchronous:
                    found = found + fences.fences_on(entry.streams)
                fences.wait_behind(entry.handle, found)
                if not found:
                    done.push_back(entry.handle)
            except BaseException as error:
                self.put_aside(entry, isinstance(error, Exception))
                faults.append(error)
        return 0

    cdef int put_aside(self, DeferredFree entry, bint is_stuck) except -1:
        """Keeps a deferred free for another try. `is_stuck`: the device failed; False if a Ctrl-C interrupted it."""
        try:
            (self.stuck if is_stuck else self.waiting).append(entry)
        except MemoryError:
            self.waiting.appendleft(entry)      # into the place that it has just left
        return 0

    cdef int clear(self) except -1:
        self.waiting.clear()
        self.stuck.clear()
        return 0
