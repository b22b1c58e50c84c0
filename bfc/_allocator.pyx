"""Allocators: what a user holds. Rules of this room (docs/design.md has the reasons):

- the lock is held only around calls into the pool, which run no Python and call no device;
- a sub-allocator is called with no lock held, after the bytes asked for have been set aside from the limit;
- a free from a finaliser never waits: where the lock is taken it leaves its handle behind for the next caller.
"""

import atexit
import gc
import math
import time
from threading import get_ident

cimport cython
from cpython.long cimport PyLong_AsLongLong, PyLong_CheckExact

from bfc._buffer cimport Buffer, BufferView
from bfc._core cimport (
    EXPORTED, FREE, IN_USE, INDEXED, MINIMUM_SIZE, NO_CHUNK, NO_HOST_MEMORY, STATE, USED_ELSEWHERE, WAITING,
    Chunk, Counters,
)

from bfc import snapshot as _snapshot
from bfc.errors import ClosedError, InvalidPointerError, InvariantError, OutOfMemoryError, SubAllocatorError
from bfc.streams import stream_handle
from bfc.suballocators.base import SubAllocator, checked_alloc
from bfc.units import format_bytes, parse_bytes

cdef extern from "_debug.h":
    const int BFC_DEBUG

RETRY_POLL_SECONDS = 0.001
OUT_OF_HOST_MEMORY = "the host is out of memory for the allocator's bookkeeping; nothing has changed: try again"

cdef bint exiting = False


@atexit.register
def _leave_memory_alone():
    """After this frees do nothing: the driver, or half of Python, may be gone already."""
    global exiting
    exiting = True


cdef uint64_t size_from(object nbytes) except? 0xFFFFFFFFFFFFFFFF:
    cdef long long value
    if PyLong_CheckExact(nbytes):
        try:
            value = PyLong_AsLongLong(nbytes)
        except OverflowError:
            value = -1
        if value >= 0:
            return <uint64_t>value
    elif isinstance(nbytes, str):
        raise TypeError(f"a size here is an int, not {nbytes!r}: allocate() takes texts")
    return parse_bytes(nbytes)


cdef uint64_t count_from(object freed_before) except? 0xFFFFFFFFFFFFFFFF:
    """A count of the timing counter: an int, or what a function returns now."""
    return size_from(freed_before() if callable(freed_before) else freed_before)


cdef uint64_t stream_from(object stream) except? 0xFFFFFFFFFFFFFFFF:
    cdef long long value
    if PyLong_CheckExact(stream):
        try:
            value = PyLong_AsLongLong(stream)
        except OverflowError:
            value = -1
        if value >= 0:
            return <uint64_t>value
    return 0 if stream is None else stream_handle(stream)


def memory_limit_of(memory_limit, sub_allocator):
    """The limit in bytes: None asks the sub-allocator, a float is a fraction of what it has in all."""
    if memory_limit is None:
        return parse_bytes(sub_allocator.allocation_limit())
    if isinstance(memory_limit, float):
        if not 0 < memory_limit or math.isinf(memory_limit):
            raise ValueError(f"memory_limit as a fraction must be above 0, not {memory_limit}")
        return parse_bytes(int(sub_allocator.total_bytes * memory_limit))
    return parse_bytes(memory_limit)


# In a garbage cycle the buffers may go after the allocator: the collector must leave it its pool until then.
@cython.no_gc_clear
cdef class Allocator(Owner):
    """What both modes have in common. Make a `BFCAllocator`."""

    def __cinit__(self, *args, **kwargs):
        self.pool = Pool()
        self.streams_of = {}
        self.waiting = []
        self.callers = []
        self.last_refusal = ""
        self.is_closed = True   # until it is set up

    cdef int set_up(self, sub_allocator, memory_limit, stream, strict) except -1:
        if type(self) is Allocator:
            raise TypeError("Allocator is the common base: make a BFCAllocator")
        if self.sub_allocator is not None:
            raise RuntimeError("an allocator is set up once: make another")
        if not isinstance(sub_allocator, SubAllocator):
            raise TypeError(f"the first argument is a sub-allocator, such as bfc.HostSubAllocator(), "
                            f"not {type(sub_allocator).__name__}")
        self.limit = memory_limit_of(memory_limit, sub_allocator)
        self.home_stream = stream_from(stream)
        self.strict = strict
        self.sub_allocator = sub_allocator
        self.joins_regions = sub_allocator.supports_coalescing
        self.device = sub_allocator.device
        self.host_accessible = sub_allocator.device.kind == "cpu"
        return 0

    # -- what a policy answers ----------------------------------------------------------------------------------------

    cdef Request request(self, uint64_t nbytes, uint64_t stream) noexcept nogil:
        return Request(nbytes, nbytes, stream, 0, True, 0, False, False)

    cdef ChunkHandle place(self, Request* request) noexcept nogil:
        return NO_CHUNK

    cdef ChunkHandle place_after_miss(self, Request* request) except? 0xFFFFFFFE:
        return NO_CHUNK

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
        self.allocate_placement(size_from(nbytes), stream_from(stream), freed_before, &placed)
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
        cdef uint64_t on = self.home_stream if stream is None else stream_from(stream)
        self.allocate_placement(size, on, None, &placed)
        buffer.become(self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
        self.live_buffers += placed.allocation_id != 0
        return buffer

    cdef int allocate_placement(self, uint64_t size, uint64_t on, object freed_before, Placement* placed) except -1:
        cdef Request request = self.request(size, on)
        if freed_before is not None:
            request.freed_before = count_from(freed_before)
        cdef uint64_t seen = self.frees
        self.try_allocate(&request, placed)
        if placed.handle != NO_CHUNK or size == 0:
            return 0
        if self.live_buffers and not self.strict:
            gc.collect()    # buffers in reference cycles
            self.try_allocate(&request, placed)
        if placed.handle == NO_CHUNK and self.retry_seconds > 0:
            self.wait_for_frees(&request, freed_before, seen, placed)
        if placed.handle == NO_CHUNK:
            self.raise_out_of_memory(size)
        return 0

    cdef int wait_for_frees(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1:
        """Tries again after each free until `retry_seconds` have passed, and once more then (spec 2.8). `seen` is the
        count of frees before the first attempt: upstream misses a free between that and the wait."""
        deadline = time.monotonic() + self.retry_seconds
        late = False
        while placed.handle == NO_CHUNK and not late:
            while self.frees == seen and not self.orphans.size() and not late:
                time.sleep(RETRY_POLL_SECONDS)
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
        cdef ChunkHandle handle = NO_CHUNK
        if not self.is_closed:
            handle = self.place(request)
        if handle >= NO_HOST_MEMORY:
            handle = self.after_miss(handle, request)
        placed.handle = handle
        if handle != NO_CHUNK:
            placed.allocation_id = self.pool.chunks[handle].allocation_id
            placed.ptr = self.pool.chunks[handle].ptr
        self.lock.release()
        if handle != NO_CHUNK and request.stream != self.home_stream:
            self.mark_used_on(handle, request.stream)
        if BFC_DEBUG >= 2:
            self.check()
        return 0

    cdef ChunkHandle after_miss(self, ChunkHandle handle, Request* request) except? 0xFFFFFFFE:
        """The slow way. The lock is held before and after; an error lets go of it."""
        cdef uint64_t seen
        try:
            while handle == NO_CHUNK:
                if self.is_closed:
                    raise ClosedError("this allocator is closed")
                seen = self.changes - request.changes
                handle = self.place_after_miss(request)
                if handle != NO_CHUNK or not self.worth_another_try(request, seen):
                    break
                handle = self.place(request)
            if handle == NO_HOST_MEMORY:
                raise MemoryError(OUT_OF_HOST_MEMORY)
        except BaseException:
            self.lock.release()
            raise
        return handle

    cdef bint worth_another_try(self, Request* request, uint64_t seen) except -1:
        """Waits for what may yet free memory: streams that still use freed blocks, and calls of other threads to the
        sub-allocator, which hold a part of the limit. The lock is held before and after, but not meanwhile."""
        cdef bint waits = not request.has_waited and (self.waiting or self.orphans.size())
        cdef bint inside = get_ident() in self.callers
        request.has_waited = True
        self.lock.release()
        try:
            if waits:
                self.wait_for_streams()
            if not inside:  # a sub-allocator that allocates from its own allocator would wait for itself
                self.wait_for_other_calls()
        finally:
            self.acquire()
        return waits or (request.blocked and not inside) or self.changes - request.changes != seen

    cdef int wait_for_other_calls(self) except -1:
        """Waits until one of the calls to the sub-allocator that are under way has ended."""
        calls = list(self.callers)
        while calls and self.callers == calls:
            time.sleep(RETRY_POLL_SECONDS)
        return 0

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
        cdef uint64_t on = stream_from(stream)
        try:
            for size in wanted:
                self.allocate_placement(size, on, None, &placed)
                out[done] = placed.ptr
                done += 1
        except BaseException:
            for i in range(done):
                self.deallocate_raw(out[i])
            raise
        return addresses

    # -- free ---------------------------------------------------------------------------------------------------------

    def deallocate_raw(self, ptr):
        """Gives an address of `allocate_raw` back. 0 is a no-op.

        Raises InvalidPointerError for what is no live allocation's first byte; nothing changes then.
        Cost: O(log n). Source: `BFCAllocator::DeallocateRaw`, spec 2.5.
        """
        cdef uint64_t address = self.address_from(ptr)
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

    cdef uint64_t address_from(self, object ptr) except? 0xFFFFFFFFFFFFFFFF:
        cdef long long value
        if PyLong_CheckExact(ptr):
            try:
                value = PyLong_AsLongLong(ptr)
                if value >= 0:
                    return <uint64_t>value
            except OverflowError:
                pass
        value = -1
        try:
            address = ptr.__index__()
        except AttributeError:
            raise TypeError(f"an address is an int, not {type(ptr).__name__}") from None
        if not 0 <= address < 2**64 - 1:
            raise InvalidPointerError(f"{address:#x} is no address")
        return address

    def deallocate_many(self, ptrs):
        """Frees every address, or none: all are checked first, and one given twice is refused."""
        addresses = [self.address_from(ptr) for ptr in ptrs]
        live = [address for address in addresses if address]
        if len(set(live)) != len(live):
            raise InvalidPointerError("the same address stands twice in one call")
        for address in live:
            self.allocation_id(address)
        for address in live:
            self.deallocate_raw(address)

    cdef int free_locked(self, ChunkHandle handle) except -1:
        """Frees a chunk with the lock held, and lets go of the lock."""
        cdef bint freed
        if self.pool.chunks[handle].state & (USED_ELSEWHERE | EXPORTED):
            return self.free_special(handle)
        self.pool.prefetch_neighbours(handle)
        freed = self.pool.free_chunk(handle)
        self.frees += 1
        self.lock.release()
        if not freed:
            raise MemoryError(OUT_OF_HOST_MEMORY)
        if BFC_DEBUG >= 2:
            self.check()
        return 0

    cdef int free_special(self, ChunkHandle handle) except -1:
        """free_locked for what others may still use."""
        if self.pool.chunks[handle].state & EXPORTED:
            self.lock.release()
            raise BufferError("another object holds a view of this memory (an array, a memoryview): delete it first")
        return self.free_shared(handle)

    cdef void set_exported(self, ChunkHandle handle, int64_t allocation_id, bint exported) noexcept:
        self.acquire()
        if self.is_live(handle, allocation_id):
            if exported:
                self.pool.chunks[handle].state |= EXPORTED
            else:
                self.pool.chunks[handle].state &= ~<uint32_t>EXPORTED
        self.lock.release()

    cdef int free_handle(self, ChunkHandle handle, int64_t allocation_id) except -1:
        if exiting:
            return 0
        if self.orphans.size():
            self.settle()
        self.acquire()
        if not self.is_live(handle, allocation_id):
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
        if not self.is_live(handle, allocation_id):
            self.lock.release()
        elif self.pool.chunks[handle].state & USED_ELSEWHERE or not self.pool.free_chunk(handle):
            self.lock.release()
            self.orphans.push_back(Orphan(handle, allocation_id))
        else:
            self.frees += 1
            self.lock.release()

    cdef bint is_live(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        return handle < self.pool.chunk_count and self.pool.chunks[handle].allocation_id == allocation_id

    cdef void acquire(self) noexcept:
        if not self.lock.try_acquire():
            with nogil:
                self.lock.wait_and_acquire()

    # -- other streams ------------------------------------------------------------------------------------------------

    def record_stream(self, ptr_or_buffer, stream):
        """Says that another stream uses this memory: freed, it comes back only when what was queued on that stream at
        the free has finished. A no-op for the allocator's own stream.

        Raises InvalidPointerError, or TypeError for what is neither an address nor a buffer.
        """
        cdef uint64_t on = stream_from(stream)
        cdef ChunkHandle handle
        cdef uint64_t address = 0
        if isinstance(ptr_or_buffer, Buffer):
            handle = self.handle_of_buffer(ptr_or_buffer)
        else:
            address = self.address_from(ptr_or_buffer)
            self.acquire()
            handle = self.pool.handle_of(address)
            self.lock.release()
        if handle == NO_CHUNK:
            self.raise_invalid_pointer(address)
        if on != self.home_stream:
            self.mark_used_on(handle, on)

    cdef ChunkHandle handle_of_buffer(self, Buffer buffer) except? 0xFFFFFFFE:
        while isinstance(buffer, BufferView) and (<BufferView>buffer).base is not None:
            buffer = (<BufferView>buffer).base
        if buffer.owner is not self or not self.is_live(buffer.handle, buffer.allocation_id):
            raise InvalidPointerError("this buffer was freed, or comes from another allocator")
        return buffer.handle

    cdef int mark_used_on(self, ChunkHandle handle, uint64_t stream) except -1:
        self.acquire()
        self.pool.chunks[handle].state |= USED_ELSEWHERE
        self.lock.release()
        self.streams_of.setdefault(handle, set()).add(stream)
        return 0

    cdef Counters start_peaks(self) noexcept:
        """Lets the peaks start from now; end_peaks puts back what start_peaks returned."""
        self.acquire()
        cdef Counters before = self.pool.counters
        self.pool.counters.peak_bytes_in_use = before.bytes_in_use
        self.pool.counters.peak_pool_bytes = before.pool_bytes
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
        cdef bint indexed = self.pool.chunks[handle].state & INDEXED or self.pool.index_chunk(handle)
        cdef uint64_t stream = self.pool.chunks[handle].stream
        self.lock.release()
        if not indexed:
            raise MemoryError(OUT_OF_HOST_MEMORY)
        if stream != self.home_stream:
            self.mark_used_on(handle, stream)
        return 0

    cdef int free_shared(self, ChunkHandle handle) except -1:
        """Frees a chunk that other streams use: at once if they are done with it, else when they are. Lets go of the
        lock. Where the device fails the chunk stays as it was, and can be freed again."""
        cdef int64_t allocation_id = self.pool.chunks[handle].allocation_id
        self.pool.stop_using(handle)
        self.lock.release()
        try:
            fences = self.fences_for(self.streams_of.get(handle, ()))
        except BaseException:
            self.acquire()
            if self.is_waiting(handle):
                self.pool.use_again(handle, allocation_id)
            self.lock.release()
            raise
        self.streams_of.pop(handle, None)
        if fences:
            self.waiting.append((handle, fences))
            return 0
        return self.finish_waiting(handle)

    cdef bint is_waiting(self, ChunkHandle handle) noexcept:
        """Whether a chunk is still there after a call out: the allocator may have been closed meanwhile."""
        return not self.is_closed and self.pool.chunks[handle].state & STATE == WAITING

    cdef int finish_waiting(self, ChunkHandle handle) except -1:
        self.acquire()
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

    cdef int settle(self) except -1:
        """Frees what finalisers left behind, and what other streams have finished with. Takes the lock itself. What the
        device fails for stays where it is, and the first error is raised at the end."""
        cdef vector[Orphan] left
        cdef Orphan orphan
        fault = None
        left.swap(self.orphans)
        for orphan in left:
            self.acquire()
            if not self.is_live(orphan.handle, orphan.allocation_id):
                self.lock.release()
                continue
            try:
                self.free_locked(orphan.handle)
            except BaseException as error:
                self.orphans.push_back(orphan)
                fault = fault or error
        waiting, self.waiting = self.waiting, []
        for handle, fences in waiting:
            try:
                unfinished = [fence for fence in fences if not fence.done()]
            except BaseException as error:
                unfinished = fences
                fault = fault or error
            if unfinished:
                self.waiting.append((handle, unfinished))
            else:
                self.finish_waiting(handle)
        if fault is not None:
            raise fault
        return 0

    cdef int wait_for_streams(self) except -1:
        """Waits until other streams have finished with all that was freed. Call it without the lock."""
        for _handle, fences in list(self.waiting):
            for fence in fences:
                fence.wait()
        self.settle()
        return 0

    # -- regions ------------------------------------------------------------------------------------------------------

    cdef tuple ask(self, Request* request, uint64_t nbytes):
        """A block as (address, bytes received), or None. The lock is held before and after, but not during the call;
        meanwhile the bytes are set aside from the limit."""
        self.set_aside += nbytes
        self.callers.append(get_ident())
        self.lock.release()
        try:
            block = checked_alloc(self.sub_allocator, MINIMUM_SIZE, nbytes, strict=self.strict)
            if block is not None and self.is_closed:
                self.sub_allocator.free(block[0], block[1])
                raise ClosedError("this allocator was closed while it asked for memory")
        finally:
            self.acquire()
            self.set_aside -= nbytes
            self.callers.remove(get_ident())
        if block is None:
            self.last_refusal = f"{self.sub_allocator!r}, asked last for {format_bytes(nbytes)}"
        return block

    cdef int take_region(self, Request* request, tuple block, uint32_t bin_set) except -1:
        """Adds a block to the pool. The lock is held before and after."""
        cdef uint64_t address = block[0], received = block[1]
        if self.pool.overlaps_region(address, received):
            raise SubAllocatorError(f"{self.sub_allocator!r}.alloc returned {address:#x}, {received} bytes, which "
                                    f"overlaps a block that it gave before: not used, and not given back")
        if not self.pool.add_region(address, received, bin_set, self.joins_regions):
            self.lock.release()
            try:
                self.sub_allocator.free(address, received)
            finally:
                self.acquire()
            raise MemoryError(OUT_OF_HOST_MEMORY)
        self.changes += 1
        request.changes += 1
        return 0

    cdef uint64_t forget(self, vector[Region]& regions) noexcept:
        """Takes regions out of the pool, with the lock held. Their bytes stay set aside until give_back is done."""
        cdef Region region
        cdef uint64_t total = 0
        for region in regions:
            self.pool.remove_region(region)
            total += region.end - region.ptr
        self.set_aside += total
        return total

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
        cdef vector[Region] regions, again
        self.settle()
        self.acquire()
        self.pool.free_regions(regions)
        cdef uint64_t released = self.forget(regions)
        self.regions_released()
        self.lock.release()
        again.swap(self.unreturned)
        for region in again:
            released += region.end - region.ptr
            regions.push_back(region)
        self.give_back(regions)
        if BFC_DEBUG >= 2:
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
        cdef vector[Region] regions, again
        if self.exports:
            raise BufferError(f"{self.exports} view(s) of this memory are in use (arrays, memoryviews): delete them, "
                              f"then close")
        fault = None
        try:
            self.settle()
            self.wait_for_streams()
        except Exception as error:
            fault = error   # a device that fails gets its memory back all the same
        self.acquire()
        self.is_closed = True
        self.pool.all_regions(regions)
        self.forget(regions)
        self.lock.release()
        self.orphans.clear()
        self.streams_of.clear()
        self.waiting.clear()
        again.swap(self.unreturned)
        for region in again:
            regions.push_back(region)
        self.give_back(regions)
        if fault is not None:
            raise fault

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __del__(self):
        if not exiting and not self.is_closed and not self.exports:
            self.close()

    @property
    def closed(self):
        """Whether `close()` has been called."""
        return self.is_closed

    # -- what can be seen ---------------------------------------------------------------------------------------------

    cdef Chunk chunk_at(self, object ptr) except *:
        """A copy of the live chunk that starts at an address."""
        cdef uint64_t address = self.address_from(ptr)
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
        """The stream it belongs to, as an int."""
        return self.home_stream

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
        """Peaks start anew from what is in use and reserved now."""
        self.acquire()
        self.pool.counters.peak_bytes_in_use = self.pool.counters.bytes_in_use
        self.pool.counters.peak_pool_bytes = self.pool.counters.pool_bytes
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
            raise MemoryError(OUT_OF_HOST_MEMORY)
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

    cdef int raise_out_of_memory(self, uint64_t nbytes) except -1:
        stats = self.stats()
        raise OutOfMemoryError(
            nbytes, stats.bytes_in_use, stats.pool_bytes, self.limit, stats.largest_free_block_bytes,
            stats.fragmentation, refused=self.last_refusal, advice=self.advice(nbytes, stats))

    def advice(self, nbytes, stats):
        """What to try when `nbytes` do not fit: the lines at the end of an OutOfMemoryError."""
        lines = []
        free = stats.pool_bytes - stats.bytes_in_use
        if nbytes > self.limit:
            lines.append(f"a smaller request: it is above the limit of {format_bytes(self.limit)}")
        if nbytes <= free:
            lines.append("less fragmentation: enough is free, but in pieces; print(allocator.snapshot()) shows what "
                         "stands between them")
        if self.limit < self.sub_allocator.total_bytes:
            lines.append(f"a higher memory_limit: the device has {format_bytes(self.sub_allocator.total_bytes)}")
        if stats.bytes_waiting_for_streams:
            lines.append(f"synchronising: {format_bytes(stats.bytes_waiting_for_streams)} wait for other streams")
        if not lines:
            lines.append("freeing something first: print(allocator.snapshot()) shows what is live")
        return tuple(lines)


cdef object chunk_info(Chunk* chunk):
    cdef uint32_t state = chunk.state & STATE
    return _snapshot.ChunkInfo(
        ptr=chunk.ptr, size=chunk.size,
        requested_size=chunk.requested_size if state != FREE else 0,
        allocation_id=chunk.allocation_id,
        state="free" if state == FREE else "in use" if state == IN_USE else "waiting",
        stream=chunk.stream, freed_at_count=chunk.freed_at_count)
