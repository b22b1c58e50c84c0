"""A trace through an allocator in one compiled loop, and the check that a trace makes sense."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from bfc._allocator cimport Allocator, Request
from bfc._core cimport NO_CHUNK, NO_HOST_MEMORY, Chunk, ChunkHandle, Counters

import time

cdef extern from *:
    """
    // Without the empty asm GCC takes a function that only prefetches for one that does nothing, and drops the call.
    #define bfc_prefetch(address) do { __builtin_prefetch(address); __asm__ volatile(""); } while (0)
    """
    void prefetch "bfc_prefetch"(const void* address) noexcept nogil

cdef struct Events:
    const uint8_t* op
    const uint32_t* number
    const uint64_t* size
    const uint16_t* stream
    ChunkHandle* handles
    uint64_t* addresses
    Py_ssize_t count

cdef enum:
    LOOK_AHEAD = 6
    FITS_THE_CACHE = 8192           # chunks: half a megabyte of records
    ALLOC = 0
    FREE = 1
    EVENTS_BETWEEN_REPORTS = 1 << 18


def find_fault(const uint8_t[::1] op, const uint32_t[::1] number, const uint64_t[::1] size, Py_ssize_t numbers):
    """The first event that makes no sense, as (event, what is wrong), or None."""
    cdef unsigned char[::1] live = bytearray(numbers)
    cdef Py_ssize_t i
    for i in range(op.shape[0]):
        if op[i] > FREE:
            return i, f"op is {op[i]}: 0 allocates, 1 frees"
        if size[i] >> 63:
            return i, "its size is above 2**63 - 1"
        if live[number[i]] == op[i] == FREE - 1 or (op[i] == FREE and live[number[i]]):
            live[number[i]] = op[i] == ALLOC
        elif op[i] == ALLOC:
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
    cdef uint64_t live
    cdef readonly Py_ssize_t failed
    cdef readonly double seconds
    cdef readonly uint64_t peak_bytes_live
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

    def play(self, progress=None):
        """Runs every event; `progress(events done)` is called now and then. What is live at the end stays live; after
        an error nothing does."""
        cdef Py_ssize_t start = 0, end
        self.handles[:] = NO_CHUNK
        self.addresses[:] = 0           # touches the pages too, so that the loop is not charged for them
        self.peak_bytes_in_use = self.allocator.pool.counters.bytes_in_use
        self.peak_bytes_reserved = self.allocator.pool.counters.pool_bytes
        try:
            while start < self.events.count:
                end = min(start + EVENTS_BETWEEN_REPORTS, self.events.count)
                begun = time.perf_counter()
                with nogil:
                    self.play_some(self.allocator, start, end)
                self.seconds += time.perf_counter() - begun
                start = end
                if progress is not None:
                    progress(end)
            self.hand_over()
        except BaseException:
            self.take_back()
            raise

    cdef int play_some(self, Allocator allocator, Py_ssize_t start, Py_ssize_t end) except -1 nogil:
        cdef Events* events = &self.events
        cdef Py_ssize_t i
        allocator.lock.wait_and_acquire()
        for i in range(start, end):
            if allocator.pool.chunk_count > FITS_THE_CACHE:
                look_ahead(events, allocator.pool.chunks, i)
            if events.op[i] == ALLOC:
                self.allocate(allocator, i)
            elif events.handles[events.number[i]] != NO_CHUNK:
                self.deallocate(allocator, i)
        allocator.lock.release()
        return 0

    cdef inline int allocate(self, Allocator allocator, Py_ssize_t i) except -1 nogil:
        cdef Request request = allocator.request(self.events.size[i], self.events.stream[i])
        if request.nbytes == 0:
            return 0
        request.indexed = False
        cdef ChunkHandle handle = allocator.place(&request)
        if handle >= NO_HOST_MEMORY:
            with gil:
                handle = allocator.after_miss(handle, &request)
        self.events.handles[self.events.number[i]] = handle
        if handle == NO_CHUNK:
            self.failed += 1
            return 0
        cdef Counters* counters = &allocator.pool.counters
        self.events.addresses[i] = allocator.pool.chunks[handle].ptr
        self.live += request.nbytes
        self.peak_bytes_live = max(self.peak_bytes_live, self.live)
        self.peak_bytes_in_use = max(self.peak_bytes_in_use, counters.bytes_in_use)
        self.peak_bytes_reserved = max(self.peak_bytes_reserved, counters.pool_bytes)
        return 0

    cdef inline int deallocate(self, Allocator allocator, Py_ssize_t i) except -1 nogil:
        cdef ChunkHandle* handle = &self.events.handles[self.events.number[i]]
        self.live -= allocator.pool.chunks[handle[0]].requested_size
        if not allocator.pool.free_chunk(handle[0]):
            allocator.lock.release()
            with gil:
                raise MemoryError("the host is out of memory for the allocator's bookkeeping")
        handle[0] = NO_CHUNK
        return 0

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


cdef inline void look_ahead(Events* events, Chunk* chunks, Py_ssize_t i) noexcept nogil:
    """Fetches what later frees will touch: their entry in the table, then the chunk, then its neighbours. With a
    million live chunks each of these is a cache miss, and a trace tells them in advance."""
    cdef Py_ssize_t j = i + 3 * LOOK_AHEAD
    cdef ChunkHandle handle
    if j < events.count and events.op[j] == FREE:
        prefetch(&events.handles[events.number[j]])
    j = i + 2 * LOOK_AHEAD
    if j < events.count and events.op[j] == FREE:
        handle = events.handles[events.number[j]]
        if handle < NO_HOST_MEMORY:
            prefetch(&chunks[handle])
    j = i + LOOK_AHEAD
    if j < events.count and events.op[j] == FREE:
        handle = events.handles[events.number[j]]
        if handle < NO_HOST_MEMORY:
            # A stale handle or a missing neighbour gives an address that is only fetched from, never read.
            prefetch(&chunks[chunks[handle].prev])
            prefetch(&chunks[chunks[handle].next])
