"""Allocators: what a user holds. Rules of this room (docs/design.md has the reasons):

- the lock is held only around calls into the pool, which run no Python and call no device;
- a sub-allocator is called with no lock held, after the bytes asked for have been set aside from the limit;
- a free from a finaliser never waits: where the lock is taken it leaves its handle behind for the next caller.
"""

import atexit
import gc
import os
import time
import weakref
from threading import get_ident

cimport cython
from cpython.long cimport PyLong_CheckExact

from bfc._arguments cimport address_from, count_from, size_from, stream_from
from bfc._buffer cimport Buffer, BufferView
from bfc._core cimport (
    EXPORTED, FREE, IN_USE, INDEXED, MINIMUM_SIZE, NO_CHUNK, NO_HOST_MEMORY, STATE, USED_ELSEWHERE, WAITING,
    Chunk, Counters,
)

from bfc import snapshot as _snapshot
from bfc.errors import (
    ClosedError, InvalidPointerError, InvariantError, SubAllocatorError, out_of_memory, report_unraisable,
)
from bfc.suballocators.base import SubAllocator, checked_alloc, resolve_limit
from bfc.units import format_bytes, parse_bytes

cdef extern from "_debug.h":
    const int BFC_DEBUG

_RETRY_POLL_SECONDS = 0.001
_VIEWED = "another object holds a view of this memory (an array, a memoryview): delete it first"
_OUT_OF_HOST_MEMORY = "the host is out of memory for the allocator's bookkeeping; nothing has changed: try again"

cdef enum:
    HOST_STREAM = 0xFFFFFFFFFFFFFFFF    # the home of memory whose user is the host

cdef bint exiting = False


@atexit.register
def _leave_memory_alone():
    """After this frees do nothing: the driver, or half of Python, may be gone already."""
    global exiting
    exiting = True


_allocators = weakref.WeakSet()
_locked_for_a_fork = []


def _before_fork():
    """A child gets a copy of the pool as it is between two changes, never in the middle of one."""
    cdef Allocator allocator
    for allocator in list(_allocators):
        allocator.acquire()
        _locked_for_a_fork.append(allocator)


def _after_fork_in_parent():
    cdef Allocator allocator
    for allocator in _locked_for_a_fork:
        allocator.lock.release()
    _locked_for_a_fork.clear()


def _after_fork_in_child():
    """The threads that were inside a call to a sub-allocator do not exist here."""
    cdef Allocator allocator
    for allocator in _locked_for_a_fork:
        allocator.callers.clear()
        allocator.set_aside = allocator.unreturned_bytes
    _after_fork_in_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent,
                        after_in_child=_after_fork_in_child)


# In a garbage cycle the buffers may go after the allocator: the collector must leave it its pool until then.
@cython.no_gc_clear
cdef class Allocator(Owner):
    """What both modes have in common. Make a `BFCAllocator`."""

    def __cinit__(self, *args, **kwargs):
        self.pool = Pool()
        self.streams_of = {}
        self.waiting = []
        self.callers = []
        self.ordered = {}
        self.stuck = []
        self.is_closed = True   # until it is set up

    cdef int set_up(self, sub_allocator, memory_limit, stream, strict) except -1:
        if type(self) is Allocator:
            raise TypeError("Allocator is the common base: make a BFCAllocator")
        if self.sub_allocator is not None:
            raise RuntimeError("an allocator is set up once: make another")
        if not isinstance(sub_allocator, SubAllocator):
            raise TypeError(f"the first argument is a sub-allocator, such as bfc.HostSubAllocator(), "
                            f"not {type(sub_allocator).__name__}")
        self.limit = resolve_limit(memory_limit, sub_allocator)
        self.default_stream_alias = sub_allocator.default_stream_alias
        self.thread_streams = sub_allocator.thread_streams
        self.home_stream = self.stream_of(stream)
        if self.home_stream in self.thread_streams:
            raise ValueError(f"stream {self.home_stream} is another one in each thread, and an allocator belongs to one: "
                             f"give it stream 0, and name stream {self.home_stream} in each allocate()")
        if not sub_allocator.stream_ordered:
            if self.home_stream:
                raise ValueError(f"memory of {sub_allocator!r} belongs to the host: name streams in allocate() and "
                                 f"record_stream(), not here")
            self.home_stream = HOST_STREAM
        self.strict = strict
        self.sub_allocator = sub_allocator
        self.joins_regions = sub_allocator.supports_coalescing
        self.device = sub_allocator.device
        self.host_accessible = sub_allocator.host_accessible
        _allocators.add(self)
        return 0

    # -- what a policy answers ----------------------------------------------------------------------------------------

    cdef Request request(self, uint64_t nbytes, uint64_t stream) noexcept nogil:
        return Request(nbytes, nbytes, stream, 0, True, 0, False, False)

    cdef ChunkHandle place(self, Request* request) noexcept nogil:
        return NO_CHUNK

    cdef int place_after_miss(self, Request* request, Placement* placed) except -1:
        return 0

    # -- allocate -----------------------------------------------------------------------------------------------------

    def allocate_raw(self, nbytes, stream=0, *, freed_before=None):
        """An address for `nbytes` bytes, a multiple of 256; 0 for 0 bytes, which counts nothing.

        `stream` is where it will be used first: one that is not the allocator's is treated as `record_stream` does.
        `freed_before` (a count, or a function that returns one) keeps off chunks freed later; see `SharedCounter`.
        Raises OutOfMemoryError, TypeError or ValueError for a size that is none, SubAllocatorError, ClosedError.
        Cost: O(log n) in the free chunks, no device call on a hit. Source: `BFCAllocator::AllocateRaw`, spec 2.2.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
        >>> hex(allocator.allocate_raw(1000)), hex(allocator.allocate_raw(257))
        ('0x10000000000', '0x10000000400')
        """
        cdef Placement placed
        self.allocate_placement(size_from(nbytes), self.stream_of(stream), stream, freed_before, &placed)
        return placed.ptr

    def allocate(self, nbytes, stream=None):
        """A `Buffer` of `nbytes` bytes (an int, or a text such as "3 MiB"). Errors and cost as `allocate_raw`.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate("3 MiB")
        >>> buffer.nbytes, allocator.requested_size(buffer.ptr)
        (3145728, 3145728)
        """
        cdef uint64_t size = size_from(nbytes) if PyLong_CheckExact(nbytes) else parse_bytes(nbytes)
        cdef Buffer buffer = Buffer.__new__(Buffer)
        cdef Placement placed
        cdef uint64_t on = self.home_stream if stream is None else self.stream_of(stream)
        self.allocate_placement(size, on, stream, None, &placed)
        buffer.become(self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
        self.live_buffers += placed.allocation_id != 0
        return buffer

    cdef uint64_t stream_of(self, object stream) except? 0xFFFFFFFFFFFFFFFF:
        """A stream's handle, the default stream's always the same one."""
        cdef uint64_t handle = stream_from(stream)
        return 0 if handle == self.default_stream_alias else handle

    cdef int allocate_placement(self, uint64_t size, uint64_t on, object stream, object freed_before,
                                Placement* placed) except -1:
        cdef Request request = self.request(size, on)
        if freed_before is not None:
            request.freed_before = count_from(freed_before)
        cdef uint64_t seen = self.frees
        self.try_allocate(&request, placed)
        if placed.handle == NO_CHUNK and size:
            self.try_harder(&request, freed_before, seen, placed)
        if on != self.home_stream and size:
            self.leave_home(placed, on, stream)
        return 0

    cdef int try_harder(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1:
        """What helps, or an error. `seen` is the count of frees before the first attempt."""
        if self.live_buffers and not self.strict:
            gc.collect()    # buffers in reference cycles
            self.try_allocate(request, placed)
        if placed.handle == NO_CHUNK and self.retry_seconds > 0:
            self.wait_for_frees(request, freed_before, seen, placed)
        if placed.handle == NO_CHUNK:
            refused_by = f"{self.sub_allocator!r}, asked last for {format_bytes(self.refused_bytes)}"
            raise out_of_memory(request.nbytes, self.stats(), self.sub_allocator.total_bytes,
                                refused_by if self.refused_bytes else "")
        return 0

    cdef int leave_home(self, Placement* placed, uint64_t on, object stream) except -1:
        """Sees to it that memory for another stream is safe to use there, and comes back by a fence."""
        try:
            self.order_after_home(on)
        except BaseException:
            self.free_handle_quietly(placed)
            raise
        self.streams_of.setdefault(placed.allocation_id, {})[on] = stream
        return 0

    cdef int free_handle_quietly(self, Placement* placed) except -1:
        """Takes an allocation back that no stream has used yet."""
        self.acquire()
        if self.is_live_locked(placed.handle, placed.allocation_id):
            self.free_locked(placed.handle)
        else:
            self.lock.release()
        return 0

    cdef int order_after_home(self, uint64_t on) except -1:
        """Memory freed on the home stream may still be in use there by work that is queued: another stream that gets
        it must wait for that."""
        cdef uint64_t home_frees = self.frees - self.fenced_frees
        if self.home_stream == HOST_STREAM or not self.sub_allocator.asynchronous:
            return 0
        if home_frees == self.ordered.get(on, 0) and on not in self.thread_streams:
            return 0
        self.sub_allocator.order(self.home_stream, on)
        self.ordered[on] = home_frees
        return 0

    cdef int wait_for_frees(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1:
        """Tries again after each free until `retry_seconds` have passed, and once more then (spec 2.8). `seen` is the
        count of frees before the first attempt: upstream misses a free between that and the wait."""
        deadline = time.monotonic() + self.retry_seconds
        late = False
        while placed.handle == NO_CHUNK and not late:
            while self.frees == seen and not self.orphans.size() and not late:
                time.sleep(_RETRY_POLL_SECONDS)
                late = time.monotonic() >= deadline
            seen = self.frees
            if freed_before is not None:
                request.freed_before = count_from(freed_before)
            self.try_allocate(request, placed)
        return 0

    cdef int try_allocate(self, Request* request, Placement* placed) except -1:
        """One whole attempt. `placed.handle` is NO_CHUNK where nothing fits, and for 0 bytes."""
        placed.handle = NO_CHUNK
        placed.allocation_id = 0
        placed.ptr = 0
        if request.nbytes == 0:
            return 0
        if self.orphans.size() or self.waiting:
            self.settle()
        self.acquire()
        if not self.is_closed:
            self.fill(self.place(request), request, placed)
        self.lock.release()
        if placed.handle >= NO_HOST_MEMORY:
            self.after_miss(request, placed)
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check()
        return 0

    cdef void fill(self, ChunkHandle handle, Request* request, Placement* placed) noexcept nogil:
        """Notes what the pool has answered, with the lock held."""
        placed.handle = handle
        if handle >= NO_HOST_MEMORY:
            return
        cdef Chunk* chunk = &self.pool.chunks[handle]
        placed.allocation_id = chunk.allocation_id
        placed.ptr = chunk.ptr
        if request.stream != self.home_stream:
            chunk.state |= USED_ELSEWHERE

    cdef int after_miss(self, Request* request, Placement* placed) except -1:
        """The slow way, without the lock: `place_after_miss` takes it where it needs the pool."""
        cdef uint64_t seen
        while placed.handle == NO_CHUNK:
            if self.is_closed:
                raise ClosedError("this allocator is closed")
            seen = self.changes - request.changes   # what other threads have brought or taken
            self.place_after_miss(request, placed)
            if placed.handle != NO_CHUNK or not self.worth_another_try(request, seen):
                break
            self.acquire()
            if not self.is_closed:
                self.fill(self.place(request), request, placed)
            self.lock.release()
        if placed.handle == NO_HOST_MEMORY:
            placed.handle = NO_CHUNK
            raise MemoryError(_OUT_OF_HOST_MEMORY)
        return 0

    cdef bint worth_another_try(self, Request* request, uint64_t seen) except -1:
        """Waits for what may yet free memory: streams that still use freed blocks, and calls of other threads to the
        sub-allocator, which hold a part of the limit."""
        cdef bint waits = not request.has_waited and (self.waiting or self.orphans.size())
        cdef bint inside = get_ident() in self.callers
        request.has_waited = True
        if waits:
            self.wait_for_streams()
        # A sub-allocator that allocates from its own allocator would wait for itself.
        calls = [] if inside else list(self.callers)
        while calls and self.callers == calls:
            time.sleep(_RETRY_POLL_SECONDS)
        return waits or (request.blocked and not inside) or self.changes - request.changes != seen

    def allocate_many(self, sizes, stream=0):
        """The addresses of one allocation for each size, as a uint64 array: all of them, or none and an error.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> len(allocator.allocate_many([256, 512, 1024]))
        3
        """
        import numpy

        wanted = [size_from(size) for size in sizes]
        addresses = numpy.zeros(len(wanted), numpy.uint64)
        cdef uint64_t[::1] out = addresses
        cdef Py_ssize_t done = 0, i
        cdef Placement placed
        cdef uint64_t on = self.stream_of(stream)
        try:
            for size in wanted:
                self.allocate_placement(size, on, stream, None, &placed)
                out[done] = placed.ptr
                done += 1
        except BaseException:
            for i in range(done):
                try:
                    self.deallocate_raw(out[i])
                except Exception:
                    pass    # the error that is on its way says why
            raise
        return addresses

    # -- free ---------------------------------------------------------------------------------------------------------

    def deallocate_raw(self, ptr):
        """Gives an address of `allocate_raw` back. 0 is a no-op.

        Raises InvalidPointerError for what is no live allocation's first byte, BufferError while another object views
        the memory, and what the device raises where another stream used it; nothing changes then.
        Cost: O(log n). Source: `BFCAllocator::DeallocateRaw`, spec 2.5.
        """
        cdef uint64_t address = address_from(ptr)
        cdef ChunkHandle handle
        if address == 0:
            self.frees += 1
            return
        if self.orphans.size():
            self.settle()
        self.acquire()
        handle = self.pool.handle_of(address)
        if handle == NO_CHUNK:
            self.lock.release()
            self.raise_invalid_pointer(address)
        self.free_locked(handle)

    def deallocate_many(self, ptrs):
        """Frees every address. All are checked first: where one is no live allocation, stands there twice, or is
        viewed by another object, an error is raised and none is freed."""
        addresses = [address_from(ptr) for ptr in ptrs]
        live = [address for address in addresses if address]
        if len(set(live)) != len(live):
            raise InvalidPointerError("the same address stands twice in one call")
        for address in live:
            if self.chunk_at(address).state & EXPORTED:
                raise BufferError(_VIEWED)
        for address in live:
            self.deallocate_raw(address)

    cdef int free_locked(self, ChunkHandle handle) except -1:
        """Frees a chunk with the lock held, and lets go of the lock."""
        cdef bint freed
        if self.pool.chunks[handle].state & (USED_ELSEWHERE | EXPORTED):
            if self.pool.chunks[handle].state & EXPORTED:
                self.lock.release()
                raise BufferError(_VIEWED)
            return self.free_shared(handle)
        self.pool.prefetch_neighbours(handle)
        freed = self.pool.free_chunk(handle)
        self.frees += 1
        self.lock.release()
        if not freed:
            raise MemoryError(_OUT_OF_HOST_MEMORY)
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check()
        return 0

    cdef bint sync_exported(self, ChunkHandle handle, int64_t allocation_id, int64_t* exports) noexcept:
        """Marks a chunk as viewed or not, by the count at the moment of the lock. Whether it is live at all."""
        self.acquire()
        cdef bint live = self.is_live_locked(handle, allocation_id)
        if live and exports[0] > 0:
            self.pool.chunks[handle].state |= EXPORTED
        elif live:
            self.pool.chunks[handle].state &= ~<uint32_t>EXPORTED
        self.lock.release()
        return live

    cdef void last_view_gone(self) noexcept:
        """A finaliser of this allocator found views of its memory, and left the rest to them."""
        if self.is_abandoned and not exiting:
            self.is_abandoned = False
            try:
                self.close()
            except BaseException as error:
                report_unraisable(error)

    cdef int free_handle(self, ChunkHandle handle, int64_t allocation_id) except -1:
        if exiting:
            return 0
        if self.orphans.size():
            self.settle()
        self.acquire()
        if not self.is_live_locked(handle, allocation_id):
            self.lock.release()
            if self.is_closed:
                return 0
            raise InvalidPointerError("this buffer's memory was freed already, through its address")
        self.free_locked(handle)
        self.live_buffers -= 1
        return 0

    cdef void free_handle_from_finaliser(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        if exiting:
            return
        self.live_buffers -= 1
        if not self.lock.try_acquire():
            self.orphans.push_back(Orphan(handle, allocation_id))
            return
        if not self.is_live_locked(handle, allocation_id):
            self.lock.release()
        elif self.pool.chunks[handle].state & USED_ELSEWHERE or not self.pool.free_chunk(handle):
            self.lock.release()
            self.orphans.push_back(Orphan(handle, allocation_id))
        else:
            self.frees += 1
            self.lock.release()

    cdef bint is_live_locked(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        return handle < self.pool.chunk_count and self.pool.chunks[handle].allocation_id == allocation_id

    cdef bint is_live(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        self.acquire()
        live = self.is_live_locked(handle, allocation_id)
        self.lock.release()
        return live

    cdef void acquire(self) noexcept:
        if not self.lock.try_acquire():
            with nogil:
                self.lock.wait_and_acquire()

    # -- other streams ------------------------------------------------------------------------------------------------

    def record_stream(self, ptr_or_buffer, stream):
        """Says that another stream uses this memory: freed, it comes back only when what was queued on that stream at
        the free has finished. A no-op for the allocator's own stream. A stream object (with `__cuda_stream__`) is kept
        alive until then; an int must name a stream that lives as long.

        Raises InvalidPointerError, or TypeError for what is neither an address nor a buffer. A no-op for 0 bytes.
        """
        cdef uint64_t on = self.stream_of(stream)
        cdef uint64_t address = 0
        cdef int64_t allocation_id
        cdef bint elsewhere = False
        cdef ChunkHandle handle = NO_CHUNK
        cdef Buffer buffer
        if isinstance(ptr_or_buffer, Buffer):
            buffer = self.own_buffer(ptr_or_buffer)
            if buffer.nbytes == 0:
                return
            handle = buffer.handle
            allocation_id = buffer.allocation_id
        else:
            address = address_from(ptr_or_buffer)
            if address == 0:
                return
        self.acquire()
        if address:
            handle = self.pool.handle_of(address)
            allocation_id = self.pool.chunks[handle].allocation_id if handle != NO_CHUNK else -1
        elif not self.is_live_locked(handle, allocation_id):
            handle = NO_CHUNK
        if handle != NO_CHUNK:
            # what was allocated for another stream was never said to be used on the home stream
            elsewhere = on != self.home_stream or self.pool.chunks[handle].stream != self.home_stream
            if elsewhere:
                self.pool.chunks[handle].state |= USED_ELSEWHERE
        self.lock.release()
        if handle == NO_CHUNK and address:
            self.raise_invalid_pointer(address)
        if handle == NO_CHUNK:
            raise InvalidPointerError("this buffer's memory was freed already")
        if elsewhere:
            self.streams_of.setdefault(allocation_id, {})[on] = stream

    cdef Buffer own_buffer(self, Buffer buffer):
        """The buffer itself, or the one under a view; InvalidPointerError where it is another allocator's."""
        while isinstance(buffer, BufferView) and (<BufferView>buffer).base is not None:
            buffer = (<BufferView>buffer).base
        if buffer.owner is not self or (buffer.allocation_id == 0 and buffer.nbytes):
            raise InvalidPointerError("this buffer was freed, or comes from another allocator")
        return buffer

    cdef int hand_to_stream(self, ChunkHandle handle, int64_t allocation_id, uint64_t made_on, consumer) except -1:
        cdef uint64_t on = self.stream_of(consumer)
        cdef bint live
        if on == made_on:
            return 0
        self.acquire()
        live = self.is_live_locked(handle, allocation_id)
        if live:
            self.pool.chunks[handle].state |= USED_ELSEWHERE
        self.lock.release()
        if live and made_on != HOST_STREAM and self.sub_allocator.asynchronous:
            self.sub_allocator.order(made_on, on)
        if live:
            self.streams_of.setdefault(allocation_id, {})[on] = consumer
        return 0

    cdef int copy_bytes(self, uint64_t destination, uint64_t source, uint64_t nbytes, uint64_t stream) except -1:
        self.sub_allocator.copy(destination, source, nbytes, 0 if stream == HOST_STREAM else stream)
        return 0

    cdef Buffer another(self, Py_ssize_t nbytes, uint64_t stream):
        return self.allocate(nbytes, self.visible_stream(stream))

    cdef object visible_stream(self, uint64_t stream):
        return None if stream == HOST_STREAM else stream

    cdef object interface_stream(self, uint64_t stream):
        if stream == HOST_STREAM or not self.sub_allocator.asynchronous:
            return None
        return self.default_stream_alias if stream == 0 else stream

    cdef Counters start_peaks(self) noexcept:
        """Lets the peaks start from now; end_peaks puts back what start_peaks returned."""
        self.acquire()
        cdef Counters before = self.pool.counters
        self.pool.restart_peaks()
        self.lock.release()
        return before

    cdef Counters end_peaks(self, Counters before) noexcept:
        """The peaks since start_peaks."""
        cdef Counters* counters = &self.pool.counters
        self.acquire()
        cdef Counters since = counters[0]
        counters.peak_bytes_in_use = max(since.peak_bytes_in_use, before.peak_bytes_in_use)
        counters.peak_pool_bytes = max(since.peak_pool_bytes, before.peak_pool_bytes)
        self.lock.release()
        return since

    cdef int hand_over(self, ChunkHandle handle) except -1:
        """Makes a chunk that was allocated by handle known by its address, and its stream respected."""
        self.acquire()
        if self.is_closed:
            self.lock.release()
            raise ClosedError("this allocator was closed during the replay")
        cdef Chunk* chunk = &self.pool.chunks[handle]
        cdef bint indexed = chunk.state & INDEXED or self.pool.index_chunk(handle)
        cdef uint64_t stream = chunk.stream
        cdef int64_t allocation_id = chunk.allocation_id
        if stream != self.home_stream:
            chunk.state |= USED_ELSEWHERE
        self.lock.release()
        if not indexed:
            raise MemoryError(_OUT_OF_HOST_MEMORY)
        if stream != self.home_stream:
            self.streams_of.setdefault(allocation_id, {})[stream] = None
        return 0

    cdef int free_shared(self, ChunkHandle handle) except -1:
        """Frees a chunk that other streams use: at once if they are done with it, else when they are. Lets go of the
        lock. Where the device fails the chunk stays as it was, and can be freed again."""
        cdef int64_t allocation_id = self.pool.chunks[handle].allocation_id
        self.pool.stop_using(handle)
        self.lock.release()
        try:
            fences = self.fences_for(self.streams_of.get(allocation_id, ()))
        except BaseException:
            self.acquire()
            if self.is_waiting(handle):
                self.pool.use_again(handle, allocation_id)
            self.lock.release()
            raise
        self.streams_of.pop(allocation_id, None)
        if fences:
            self.waiting.append((handle, fences))
            return 0
        return self.finish_waiting(handle)

    cdef bint is_waiting(self, ChunkHandle handle) noexcept:
        """Whether a chunk is still there after a call out: the allocator may have been closed meanwhile."""
        return not self.is_closed and self.pool.chunks[handle].state & STATE == WAITING

    cdef int finish_waiting(self, ChunkHandle handle) except -1:
        self.acquire()
        self.fenced_frees += self.pool.chunks[handle].stream != self.home_stream
        cdef bint freed = not self.is_waiting(handle) or self.pool.free_chunk(handle)
        self.frees += 1
        self.lock.release()
        if not freed:
            self.waiting.append((handle, []))
        return 0

    cdef list fences_for(self, streams):
        if not self.sub_allocator.asynchronous:
            return []
        fences = [self.sub_allocator.fence(stream) for stream in sorted(streams)]
        return [fence for fence in fences if fence is not None and not fence.done()]

    cdef int settle(self, bint again=False) except -1:
        """Frees what finalisers left behind, and what other streams have finished with.

        A device that fails here must not fail whoever comes by: what it fails for is put aside as stuck, and reported
        as errors of finalisers are. `again` tries what is stuck, too.
        """
        cdef vector[Orphan] left
        cdef Orphan orphan
        faults = []
        left.swap(self.orphans)
        if again:
            left.insert(left.end(), self.stuck_orphans.begin(), self.stuck_orphans.end())
            self.stuck_orphans.clear()
            self.waiting, self.stuck = self.waiting + self.stuck, []
        for orphan in left:
            self.acquire()
            if not self.is_live_locked(orphan.handle, orphan.allocation_id):
                self.lock.release()
                continue
            try:
                self.free_locked(orphan.handle)
            except BaseException as error:
                self.stuck_orphans.push_back(orphan)
                faults.append(error)
        waiting, self.waiting = self.waiting, []
        for handle, fences in waiting:
            try:
                unfinished = [fence for fence in fences if not fence.done()]
            except BaseException as error:
                self.stuck.append((handle, fences))
                faults.append(error)
                continue
            if unfinished:
                self.waiting.append((handle, unfinished))
            else:
                self.finish_waiting(handle)
        for fault in faults:
            report_unraisable(fault)
        return 0

    cdef int wait_for_streams(self) except -1:
        """Waits until other streams have finished with all that was freed. Call it without the lock."""
        self.settle()   # a finaliser's free may have yet to ask for its fences
        for _handle, fences in list(self.waiting):
            for fence in fences:
                fence.wait()
        self.settle()
        return 0

    # -- regions ------------------------------------------------------------------------------------------------------

    cdef tuple ask(self, uint64_t nbytes):
        """A block as (address, bytes received), or None. Without the lock; meanwhile the bytes are set aside."""
        self.set_aside += nbytes
        me = get_ident()
        self.callers.append(me)
        try:
            block = checked_alloc(self.sub_allocator, MINIMUM_SIZE, nbytes, strict=self.strict)
        finally:
            self.callers.remove(me)
            self.set_aside -= nbytes
        self.refused_bytes = 0 if block is not None else nbytes
        return block

    cdef int take_region(self, Request* request, Placement* placed, tuple block, uint32_t bin_set) except -1:
        """Adds a block to the pool, and places the request under the same lock."""
        cdef uint64_t address = block[0], received = block[1]
        cdef bint overlaps = False, closed, added = False
        self.acquire()
        closed = self.is_closed
        if not closed:
            overlaps = self.pool.overlaps_region(address, received)
        if not closed and not overlaps:
            added = self.pool.add_region(address, received, bin_set, self.joins_regions)
            if added:
                self.fill(self.find(request), request, placed)
        self.lock.release()
        if added:
            self.changes += 1
            request.changes += 1
            return 0
        if overlaps:
            raise SubAllocatorError(f"{self.sub_allocator!r}.alloc returned {address:#x}, {received} bytes, which "
                                    f"overlaps a block that it gave before: not used, and not given back")
        self.sub_allocator.free(address, received)
        if closed:
            raise ClosedError("this allocator was closed while it asked for memory")
        raise MemoryError(_OUT_OF_HOST_MEMORY)

    cdef ChunkHandle find(self, Request* request) noexcept nogil:
        return NO_CHUNK

    cdef uint64_t forget(self, vector[Region]& regions) noexcept:
        """Takes regions out of the pool, with the lock held. Their bytes stay set aside until give_back is done."""
        cdef Region region
        cdef uint64_t total = 0
        for region in regions:
            self.pool.remove_region(region)
            total += region.end - region.ptr
        self.pool.forget_queued()
        self.set_aside += total
        return total

    cdef int take_unreturned(self, vector[Region]& regions) except -1:
        regions.insert(regions.end(), self.unreturned.begin(), self.unreturned.end())
        self.unreturned.clear()
        self.unreturned_bytes = 0
        return 0

    cdef int give_back(self, vector[Region]& regions) except -1:
        """Returns regions that the pool has forgotten, with no lock held. What cannot be returned is kept, and tried
        again at the next release."""
        cdef Region region
        cdef size_t i
        fault, interrupt = None, None
        self.callers.append(get_ident())
        for i in range(regions.size()):
            region = regions[i]
            try:
                if interrupt is not None:
                    raise interrupt
                self.sub_allocator.free(region.ptr, region.end - region.ptr)
            except BaseException as error:
                interrupt = interrupt if isinstance(error, Exception) else error
                fault = fault or error
                self.unreturned.push_back(region)
                self.unreturned_bytes += region.end - region.ptr
            else:
                self.set_aside -= region.end - region.ptr
                self.changes += 1
        self.callers.remove(get_ident())
        if interrupt is not None:
            raise interrupt
        if fault is not None:
            raise SubAllocatorError(f"{self.sub_allocator!r}.free failed for {self.unreturned.size()} of "
                                    f"{regions.size()} region(s), first with {fault!r}; close() tries again") from fault
        return 0

    def release_free_regions(self):
        """Gives every region without a live allocation back to the sub-allocator. Returns the bytes given back.

        Where regions grow, the next one starts small again. Raises SubAllocatorError.
        Source: spec 2.7 (`DeallocateFreeRegions`), which upstream runs only when memory has run out.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
        >>> allocator.deallocate_raw(allocator.allocate_raw(100))
        >>> allocator.release_free_regions()
        2097152
        """
        cdef vector[Region] regions
        cdef uint64_t released
        self.settle(again=True)
        self.acquire()
        self.pool.list_regions(regions, False)
        released = self.forget(regions) + self.unreturned_bytes
        self.regions_released()
        self.lock.release()
        self.take_unreturned(regions)
        self.give_back(regions)
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check()
        return released

    cdef void regions_released(self) noexcept nogil:
        pass

    def empty_cache(self):
        """`release_free_regions` under PyTorch's name."""
        return self.release_free_regions()

    def close(self):
        """Gives every region back, live allocations or not. Their addresses and buffers are worthless afterwards.

        Waits for the streams that still use freed memory. Raises BufferError, and closes nothing, while another object
        holds a view of host memory. Closing twice does nothing.
        """
        cdef vector[Region] regions
        cdef bint viewed, listed
        fault = None
        if self.exports == 0:
            try:
                self.wait_for_streams()
                self.settle(again=True)
            except Exception as error:
                fault = error   # a device that fails gets its memory back all the same
        self.acquire()
        viewed = self.exports > 0
        listed = not viewed and self.pool.list_regions(regions, True)
        if listed:
            self.is_closed = True
            self.forget(regions)
        self.lock.release()
        if not viewed and not listed:
            raise MemoryError(_OUT_OF_HOST_MEMORY)
        if viewed:
            raise BufferError(f"{self.exports} view(s) of this memory are in use (arrays, memoryviews): delete them, "
                              f"then close")
        self.orphans.clear()
        self.stuck_orphans.clear()
        self.streams_of.clear()
        self.waiting.clear()
        self.stuck.clear()
        self.take_unreturned(regions)
        self.give_back(regions)
        if fault is not None:
            raise fault

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __del__(self):
        if exiting or self.is_closed:
            return
        if self.exports:
            self.is_abandoned = True    # a view in the same garbage: the last of them closes
        else:
            self.close()

    @property
    def closed(self):
        """Whether `close()` has been called."""
        return self.is_closed

    # -- what can be seen ---------------------------------------------------------------------------------------------

    cdef Chunk chunk_at(self, object ptr) except *:
        """A copy of the live chunk that starts at an address."""
        cdef uint64_t address = address_from(ptr)
        cdef Chunk chunk
        self.acquire()
        cdef ChunkHandle handle = self.pool.handle_of(address)
        if handle != NO_CHUNK:
            chunk = self.pool.chunks[handle]
        self.lock.release()
        if handle == NO_CHUNK:
            self.raise_invalid_pointer(address)
        return chunk

    def requested_size(self, ptr):
        """The bytes that were asked for at this address. Raises InvalidPointerError."""
        return self.chunk_at(ptr).requested_size

    def allocated_size(self, ptr):
        """The bytes of the chunk at this address: what was asked for, rounded, and what was not split off."""
        return self.chunk_at(ptr).size

    def allocation_id(self, ptr):
        """The number of the allocation at this address: 1, 2, 3, ... in order, none used twice."""
        return self.chunk_at(ptr).allocation_id

    @property
    def memory_limit(self):
        """The most bytes that it takes from the sub-allocator."""
        return self.limit

    @property
    def stream(self):
        """The stream it belongs to, as an int; None for memory whose user is the host (pinned)."""
        return self.visible_stream(self.home_stream)

    def stats(self):
        """A `bfc.Stats`: TensorFlow's AllocatorStats, and what it leaves out. O(1)."""
        self.acquire()
        cdef Counters counters = self.pool.counters
        cdef uint64_t largest_free = self.pool.largest_free()
        self.lock.release()
        return self.stats_of(counters, largest_free)

    cdef object stats_of(self, Counters counters, uint64_t largest_free):
        return _snapshot.Stats(
            num_allocs=counters.num_allocs,
            bytes_in_use=counters.bytes_in_use,
            peak_bytes_in_use=counters.peak_bytes_in_use,
            largest_alloc_size=counters.largest_alloc_size,
            bytes_limit=self.limit,
            pool_bytes=counters.pool_bytes,
            peak_pool_bytes=counters.peak_pool_bytes,
            largest_free_block_bytes=largest_free,
            bytes_waiting_for_streams=counters.bytes_waiting,
        )

    @property
    def bookkeeping_bytes(self):
        """The host memory that the allocator's records take, in bytes."""
        self.acquire()
        cdef uint64_t total = self.pool.bookkeeping_bytes()
        self.lock.release()
        return total

    def reset_peak_stats(self):
        """Peaks start anew from what is in use and reserved now, and `largest_alloc_size` from 0."""
        self.acquire()
        self.pool.restart_peaks()
        self.pool.counters.largest_alloc_size = 0
        self.lock.release()

    def reset_accumulated_stats(self):
        """Counts start anew from 0. Allocation ids go on."""
        self.acquire()
        self.pool.counters.num_allocs = 0
        self.lock.release()

    def clear_stats(self):
        """TensorFlow's ClearStats: `num_allocs` and `largest_alloc_size` are 0, the peak is what is in use; the pool's
        peak stays."""
        self.acquire()
        self.pool.counters.num_allocs = 0
        self.pool.counters.peak_bytes_in_use = self.pool.counters.bytes_in_use
        self.pool.counters.largest_alloc_size = 0
        self.lock.release()

    def snapshot(self):
        """A `bfc.Snapshot`: every region and chunk as they are now. `print()` draws it. O(n)."""
        cdef vector[Region] regions
        cdef vector[Chunk] chunks
        cdef vector[uint64_t] firsts
        self.acquire()
        cdef bint copied = self.pool.copy_out(regions, chunks, firsts)
        cdef Counters counters = self.pool.counters
        cdef uint64_t largest_free = self.pool.largest_free()
        self.lock.release()
        if not copied:
            raise MemoryError(_OUT_OF_HOST_MEMORY)
        return _snapshot.Snapshot(str(self.device), self.stats_of(counters, largest_free), tuple(
            _snapshot.RegionInfo(regions[i].ptr, regions[i].end - regions[i].ptr, tuple(
                chunk_info(&chunks[j]) for j in range(firsts[i], firsts[i + 1])))
            for i in range(regions.size())))

    def check(self):
        """Recounts every invariant (docs/design.md, I1 to I10) from nothing. Raises InvariantError. O(n log n)."""
        self.acquire()
        cdef const char* fault = self.pool.fault()
        self.lock.release()
        if fault != NULL:
            raise InvariantError(fault.decode())

    # -- errors -------------------------------------------------------------------------------------------------------

    cdef int raise_invalid_pointer(self, uint64_t address) except -1:
        cdef Chunk chunk
        self.acquire()
        cdef ChunkHandle handle = self.pool.chunk_around(address)
        if handle != NO_CHUNK:
            chunk = self.pool.chunks[handle]
        self.lock.release()
        if handle == NO_CHUNK:
            text = "lies in no region of this allocator: it was allocated elsewhere, or its region was given back"
        elif chunk.state & STATE == IN_USE:
            text = (f"lies {address - chunk.ptr} bytes inside the allocation at {chunk.ptr:#x} "
                    f"({chunk.requested_size} bytes): pass the address that allocate_raw returned")
        elif chunk.state & STATE == WAITING:
            text = "is freed already, and waits for another stream to finish with it"
        else:
            text = "lies in free memory: it is freed already, or was never handed out"
        raise InvalidPointerError(f"{address:#x} {text}")


cdef object chunk_info(Chunk* chunk):
    cdef uint32_t state = chunk.state & STATE
    return _snapshot.ChunkInfo(
        ptr=chunk.ptr, size=chunk.size,
        requested_size=chunk.requested_size if state != FREE else 0,
        allocation_id=chunk.allocation_id,
        state="free" if state == FREE else "in use" if state == IN_USE else "waiting",
        stream=chunk.stream, freed_at_count=chunk.freed_at_count)
