"""A trace through an allocator in one compiled loop, and the check that a trace makes sense."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t

from bfc._allocator cimport Allocator, Placement, Request
from bfc._core cimport ALLOCATE, DEALLOCATE, NO_CHUNK, ChunkHandle, Counters, Events, Tally

import time

cdef enum:
    EVENTS_BETWEEN_REPORTS = 1 << 18


def find_fault(const uint8_t[::1] op, const uint32_t[::1] number, const uint64_t[::1] size, Py_ssize_t numbers):
    """The first event that makes no sense, as (event, what is wrong), or None."""
    cdef unsigned char[::1] live = bytearray(numbers)
    cdef Py_ssize_t i
    for i in range(op.shape[0]):
        if op[i] > DEALLOCATE:
            return i, f"op is {op[i]}: 0 allocates, 1 frees"
        if size[i] >> 63:
            return i, "its size is above 2**63 - 1"
        if (not live[number[i]] and op[i] == ALLOCATE) or (op[i] == DEALLOCATE and live[number[i]]):
            live[number[i]] = op[i] == ALLOCATE
        elif op[i] == ALLOCATE:
            return i, "it allocates an id that is live already"
        else:
            return i, "it frees an id that is not live"
    return None


cdef class Run:
    """One replay: what is live in it, and its figures."""

    cdef Allocator allocator
    cdef Events events
    cdef object kept                        # the arrays behind `events`
    cdef ChunkHandle[::1] handles           # by the trace's allocation number
    cdef uint64_t[::1] addresses            # by event
    cdef Tally tally
    cdef readonly Py_ssize_t failed
    cdef readonly double seconds
    cdef readonly uint64_t peak_bytes_in_use
    cdef readonly uint64_t peak_bytes_reserved

    def __init__(self, Allocator allocator, const uint8_t[::1] op, const uint32_t[::1] number,
                 const uint64_t[::1] size, const uint16_t[::1] stream, ChunkHandle[::1] handles,
                 uint64_t[::1] addresses):
        self.allocator = allocator
        self.handles = handles
        self.addresses = addresses
        self.kept = (op, number, size, stream)
        if op.shape[0]:
            self.events = Events(&op[0], &number[0], &size[0], &stream[0], &handles[0], &addresses[0], op.shape[0])

    @property
    def peak_bytes_live(self):
        return self.tally.peak_live

    def play(self, progress=None):
        """Runs every event; `progress(events done)` is called now and then. What is live at the end stays live; after
        an error nothing does."""
        self.handles[:] = NO_CHUNK
        self.addresses[:] = 0           # touches the pages too, so that the loop is not charged for them
        cdef Counters before = self.allocator.start_peaks()
        try:
            self.play_all(progress)
            self.hand_over()
        except BaseException:
            self.take_back()
            raise
        finally:
            peaks = self.allocator.end_peaks(before)
            self.peak_bytes_in_use = peaks.peak_bytes_in_use
            self.peak_bytes_reserved = peaks.peak_pool_bytes

    cdef int play_all(self, progress) except -1:
        cdef size_t start = 0, end
        while start < self.events.count:
            end = min(start + EVENTS_BETWEEN_REPORTS, self.events.count)
            begun = time.perf_counter()
            if self.allocator.sub_allocator.asynchronous:
                self.play_with_fences(start, end)
            else:
                with nogil:
                    self.play_some(self.allocator, start, end)
            self.seconds += time.perf_counter() - begun
            start = end
            if progress is not None:
                progress(end)
        return 0

    cdef int play_some(self, Allocator allocator, size_t start, size_t end) except -1 nogil:
        allocator.lock.wait_and_acquire()
        while start < end:
            start = allocator.pool.play(&self.events, start, end, &self.tally)
            if start < end:
                with gil:
                    self.play_one(allocator, start)
                start += 1
        allocator.lock.release()
        return 0

    cdef int play_one(self, Allocator allocator, size_t i) except -1:
        """An event that the pool could not serve alone. The lock is held before and after; an error lets go of it."""
        cdef Request request
        cdef ChunkHandle handle = NO_CHUNK
        if self.events.op[i] == DEALLOCATE:
            allocator.lock.release()
            raise MemoryError("the host is out of memory for the allocator's bookkeeping")
        request = allocator.request(self.events.size[i], self.events.stream[i])
        if request.nbytes == 0:
            return 0
        request.indexed = False
        handle = allocator.after_miss(allocator.place(&request), &request)
        if handle == NO_CHUNK:
            self.failed += 1
        else:
            self.keep(i, &request, handle, allocator.pool.chunks[handle].ptr)
        return 0

    cdef int play_with_fences(self, size_t start, size_t end) except -1:
        """For a device whose streams may be unfinished: each free on another stream must ask it."""
        cdef Request request
        cdef Placement placed
        cdef uint32_t number
        cdef size_t i
        for i in range(start, end):
            number = self.events.number[i]
            if self.events.op[i] == ALLOCATE:
                request = self.allocator.request(self.events.size[i], self.events.stream[i])
                self.allocator.try_allocate(&request, &placed)
                self.failed += request.nbytes > 0 and placed.handle == NO_CHUNK
                self.keep(i, &request, placed.handle, placed.ptr)
            elif self.events.handles[number] != NO_CHUNK:
                self.allocator.acquire()
                self.tally.live -= self.allocator.pool.chunks[self.events.handles[number]].requested_size
                self.allocator.free_locked(self.events.handles[number])
                self.events.handles[number] = NO_CHUNK
        return 0

    cdef void keep(self, size_t i, Request* request, ChunkHandle handle, uint64_t ptr) noexcept:
        self.events.handles[self.events.number[i]] = handle
        self.events.addresses[i] = ptr
        if handle != NO_CHUNK:
            self.tally.live += request.nbytes
            self.tally.peak_live = max(self.tally.peak_live, self.tally.live)

    cdef int hand_over(self) except -1:
        """What is still live belongs to the caller now, who knows it by its address."""
        cdef Py_ssize_t i
        for i in range(self.handles.shape[0]):
            if self.handles[i] != NO_CHUNK:
                self.allocator.hand_over(self.handles[i])
        return 0

    cdef int take_back(self) except -1:
        cdef Py_ssize_t i
        for i in range(self.handles.shape[0]):
            if self.handles[i] != NO_CHUNK:
                self.allocator.acquire()
                self.allocator.free_locked(self.handles[i])
                self.handles[i] = NO_CHUNK
        return 0
