"""Allocators: what a user holds. Rules of this room (docs/design.md has the reasons):

- the lock is held only around calls into the pool, which run no Python and call no device;
- a sub-allocator is called with no lock held, after the bytes asked for have been set aside from the limit;
- a free from a finaliser never waits: where the lock is taken it leaves its handle behind for the next caller.
"""

import atexit
import gc
import math
import time

from cpython.long cimport PyLong_AsLongLong, PyLong_CheckExact

from bfc._buffer cimport Buffer
from bfc._core cimport (
    FREE, IN_USE, INDEXED, MINIMUM_SIZE, NO_CHUNK, NO_HOST_MEMORY, STATE, USED_ELSEWHERE, WAITING,
    Chunk, Counters, SharedCounter, backpedal, round_up,
)

from bfc import snapshot as _snapshot
from bfc.errors import ClosedError, InvalidPointerError, InvariantError, OutOfMemoryError, SubAllocatorError
from bfc.streams import stream_handle
from bfc.suballocators.base import SubAllocator
from bfc.units import format_bytes, parse_bytes

cdef extern from "_debug.h":
    const int BFC_DEBUG

cdef enum:
    FIRST_REGION = 2 << 20              # where regions grow
    DEFAULT_SLACK_CAP = 128 << 20       # a chunk with more left over is always split

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


cdef class Allocator(Owner):
    """What both modes have in common. Make a `BFCAllocator`."""

    def __cinit__(self, *args, **kwargs):
        self.pool = Pool()
        self.streams_of = {}
        self.waiting = []
        self.last_refusal = ""

    cdef int set_up(self, sub_allocator, memory_limit, stream, strict) except -1:
        if type(self) is Allocator:
            raise TypeError("Allocator is the common base: make a BFCAllocator")
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
        return Request(nbytes, nbytes, stream, 0, True)

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
        self.try_allocate(&request, placed)
        if placed.handle != NO_CHUNK or size == 0:
            return 0
        if self.live_buffers and not self.strict:
            gc.collect()    # buffers in reference cycles
            self.try_allocate(&request, placed)
        if placed.handle == NO_CHUNK and self.retry_seconds > 0:
            self.wait_for_frees(&request, freed_before, placed)
        if placed.handle == NO_CHUNK:
            self.raise_out_of_memory(size)
        return 0

    cdef int wait_for_frees(self, Request* request, object freed_before, Placement* placed) except -1:
        """Tries again after each free until `retry_seconds` have passed, and once more then (spec 2.8)."""
        cdef uint64_t seen = self.frees
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
        try:
            if self.is_closed:
                raise ClosedError("this allocator is closed")
            if handle == NO_CHUNK:
                handle = self.place_after_miss(request)
            if handle == NO_CHUNK and (self.waiting or self.orphans.size()):
                self.lock.release()
                try:
                    self.wait_for_streams()
                finally:
                    self.acquire()
                handle = self.place(request)
                if handle == NO_CHUNK:
                    handle = self.place_after_miss(request)
            if handle == NO_HOST_MEMORY:
                raise MemoryError(OUT_OF_HOST_MEMORY)
        except BaseException:
            self.lock.release()
            raise
        return handle

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
        if self.pool.chunks[handle].state & USED_ELSEWHERE:
            return self.free_shared(handle)
        self.pool.prefetch_neighbours(handle)
        freed = self.pool.free_chunk(handle)
        self.frees += 1
        self.lock.release()
        if not freed:
            raise MemoryError(OUT_OF_HOST_MEMORY)
        if BFC_DEBUG >= 2:
            self.check()
        return 0

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
        if isinstance(ptr_or_buffer, Buffer):
            ptr_or_buffer = ptr_or_buffer.ptr
        cdef uint64_t address = self.address_from(ptr_or_buffer)
        self.acquire()
        cdef ChunkHandle handle = self.pool.handle_of(address)
        self.lock.release()
        if handle == NO_CHUNK:
            self.raise_invalid_pointer(address)
        if on != self.home_stream:
            self.mark_used_on(handle, on)

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
        """Frees a chunk that other streams use: at once if they are done with it, else when they are."""
        cdef Chunk* chunk = &self.pool.chunks[handle]
        cdef int64_t allocation_id = chunk.allocation_id
        self.pool.stop_using(handle)
        self.lock.release()
        try:
            fences = self.fences_for(self.streams_of.get(handle, ()))
        except BaseException:
            self.acquire()
            self.pool.use_again(handle, allocation_id)
            self.lock.release()
            raise
        self.streams_of.pop(handle, None)
        if fences:
            self.waiting.append((handle, fences))
            return 0
        return self.finish_waiting(handle)

    cdef int finish_waiting(self, ChunkHandle handle) except -1:
        cdef bint freed
        self.acquire()
        freed = self.pool.free_chunk(handle)
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
        """Frees what finalisers left behind, and what other streams have finished with. Takes the lock itself."""
        cdef vector[Orphan] left
        cdef Orphan orphan
        left.swap(self.orphans)
        for orphan in left:
            self.acquire()
            if self.is_live(orphan.handle, orphan.allocation_id):
                self.free_locked(orphan.handle)
            else:
                self.lock.release()
        waiting, self.waiting = self.waiting, []
        for handle, fences in waiting:
            unfinished = [fence for fence in fences if not fence.done()]
            if unfinished:
                self.waiting.append((handle, unfinished))
            else:
                self.finish_waiting(handle)
        return 0

    cdef int wait_for_streams(self) except -1:
        """Waits until other streams have finished with all that was freed. Call it without the lock."""
        for _handle, fences in list(self.waiting):
            for fence in fences:
                fence.wait()
        self.settle()
        return 0

    # -- regions ------------------------------------------------------------------------------------------------------

    cdef tuple ask(self, uint64_t nbytes):
        """A block as (address, bytes received), or None. The lock is held before and after, but not during the call."""
        self.being_asked += nbytes
        self.lock.release()
        try:
            block = ask_sub_allocator(self.sub_allocator, nbytes)
        finally:
            self.acquire()
            self.being_asked -= nbytes
        if block is None:
            self.last_refusal = f"{self.sub_allocator!r}, asked last for {format_bytes(nbytes)}"
        return block

    cdef int take_region(self, tuple block, uint32_t bin_set) except -1:
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
        return 0

    cdef int give_back(self, vector[Region]& regions) except -1:
        """Returns regions that the pool has forgotten, with no lock held. What cannot be returned is tried again at
        the next release."""
        cdef Region region
        faults = []
        for region in regions:
            try:
                self.sub_allocator.free(region.ptr, region.end - region.ptr)
            except Exception as error:
                faults.append(error)
                self.unreturned.push_back(region)
        if faults:
            raise SubAllocatorError(f"{self.sub_allocator!r}.free failed for {len(faults)} of {regions.size()} "
                                    f"region(s), first with {faults[0]!r}; close() tries again") from faults[0]
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
        cdef Region region
        cdef uint64_t released = 0
        self.settle()
        regions.swap(self.unreturned)
        self.acquire()
        cdef size_t again = regions.size()
        self.pool.free_regions(regions)
        for i in range(again, regions.size()):
            self.pool.remove_region(regions[i])
        self.regions_released()
        self.lock.release()
        for region in regions:
            released += region.end - region.ptr
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
        cdef vector[Region] regions
        if self.exports:
            raise BufferError(f"{self.exports} view(s) of this memory are in use (arrays, memoryviews): delete them, "
                              f"then close")
        if self.waiting:
            self.wait_for_streams()
        regions.swap(self.unreturned)
        cdef size_t again = regions.size()
        self.acquire()
        self.is_closed = True
        self.pool.all_regions(regions)
        for i in range(again, regions.size()):
            self.pool.remove_region(regions[i])
        self.lock.release()
        self.orphans.clear()
        self.streams_of.clear()
        self.give_back(regions)

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __del__(self):
        if not exiting and self.sub_allocator is not None and not self.exports:
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
        self.lock.release()
        if not copied:
            raise MemoryError(OUT_OF_HOST_MEMORY)
        return _snapshot.Snapshot(str(self.device), self.stats(), tuple(
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


cdef tuple ask_sub_allocator(sub_allocator, uint64_t nbytes):
    """Calls alloc and holds it to its contract. Anything but "out of memory" becomes a SubAllocatorError."""
    try:
        block = sub_allocator.alloc(MINIMUM_SIZE, nbytes)
    except MemoryError:
        return None
    except SubAllocatorError:
        raise
    except Exception as error:
        raise SubAllocatorError(f"{sub_allocator!r}.alloc({MINIMUM_SIZE}, {nbytes}) raised {error!r}") from error
    if block is None:
        return None
    try:
        address, received = block
        address, received = address.__index__(), received.__index__()
    except (AttributeError, TypeError, ValueError):
        raise SubAllocatorError(f"{sub_allocator!r}.alloc must return (address, bytes received) or None, "
                                f"not {block!r}") from None
    if 0 < address and 0 < received and address + received < 2**64 and address % MINIMUM_SIZE == 0:
        return address, received
    try:
        sub_allocator.free(address, received)
    except Exception:
        pass    # it broke the contract already; the error below says so
    raise SubAllocatorError(f"{sub_allocator!r}.alloc({MINIMUM_SIZE}, {nbytes}) returned address {address:#x} and "
                            f"{received} bytes: the address must be a multiple of {MINIMUM_SIZE}, both above 0")


cdef class BFCAllocator(Allocator):
    """TensorFlow's best fit with coalescing over one sub-allocator.

    `memory_limit` (None: what the sub-allocator says; bytes; "4 GiB"; a float: that fraction of the total) bounds what
    it takes. `allow_growth=False` takes all of it with the first allocation; True takes 2 MiB, then doubles.
    `garbage_collection` gives wholly free regions back when memory has run out. A chunk is split where at least
    `fragmentation_fraction` of the limit (0: 128 MiB) would be left over, or where it is twice the request.
    `strict` refuses whatever TensorFlow 2.21 refuses. `retry_seconds` waits that long for other threads to free memory.
    `stream` is the one that it belongs to.

    >>> import bfc
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), memory_limit="64 MiB")
    >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
    >>> allocator.stats().pool_bytes
    67108864
    """

    def __init__(self, sub_allocator, *, memory_limit=None, allow_growth=False, garbage_collection=True,
                 fragmentation_fraction=0.0, strict=False, retry_seconds=0.0, stream=0):
        if not 0 <= fragmentation_fraction <= 1:
            raise ValueError(f"fragmentation_fraction lies between 0 and 1, not {fragmentation_fraction}")
        if not 0 <= retry_seconds < math.inf:
            raise ValueError(f"retry_seconds is a number of seconds from 0 on, not {retry_seconds}")
        self.set_up(sub_allocator, memory_limit, stream, strict)
        self.allow_growth = allow_growth
        self.garbage_collection = garbage_collection
        self.fragmentation_fraction = fragmentation_fraction
        self.retry_seconds = retry_seconds
        cdef uint64_t slack_cap = DEFAULT_SLACK_CAP
        if fragmentation_fraction > 0:
            slack_cap = max(<uint64_t>(self.fragmentation_fraction * <double>self.limit), <uint64_t>MINIMUM_SIZE)
        self.pool.add_bin_set(slack_cap, True)
        self.growth = Growth(self.limit, min(self.limit, <uint64_t>FIRST_REGION) if allow_growth else self.limit)

    def __repr__(self):
        return f"<bfc.BFCAllocator, limit {format_bytes(self.limit)}, on {self.sub_allocator!r}>"

    @property
    def next_region_size(self):
        """The bytes that the next region would have, limits apart."""
        return self.growth.next_region_size

    def set_timing_counter(self, SharedCounter counter not None):
        """From now on a free carries the counter's next count, and is merged with its neighbours only when the safe
        frontier has passed it (TensorFlow's `SetTimingCounter`, spec 2.9)."""
        self.acquire()
        self.pool.set_timing_counter(counter)
        self.lock.release()

    def set_safe_frontier(self, count):
        """Frees counted before `count` are safe to merge and to reuse anywhere. It only ever rises."""
        cdef uint64_t frontier = count_from(count)
        self.acquire()
        if frontier > self.pool.safe_frontier:
            self.pool.safe_frontier = frontier
            self.frees += 1
        self.lock.release()

    cdef Request request(self, uint64_t nbytes, uint64_t stream) noexcept nogil:
        return Request(nbytes, round_up(nbytes, MINIMUM_SIZE), stream, 0, True)

    cdef ChunkHandle place(self, Request* request) noexcept nogil:
        cdef cbool satisfied
        if self.pool.timestamped.size():
            self.pool.merge_timestamped(0, &satisfied)
        return self.find(request)

    cdef inline ChunkHandle find(self, Request* request) noexcept nogil:
        return self.pool.allocate_chunk(0, request.rounded, request.nbytes, request.stream, request.freed_before,
                                        request.indexed)

    cdef ChunkHandle place_after_miss(self, Request* request) except? 0xFFFFFFFE:
        """The order of attempts is upstream's (spec 2.2): extend; merge what is not safe yet; collect and extend."""
        cdef ChunkHandle handle = NO_CHUNK
        cdef cbool satisfied = False
        if self.extend(request.rounded):
            handle = self.find(request)
        if handle == NO_CHUNK and request.freed_before == 0 and self.pool.timestamped.size():
            self.pool.merge_timestamped(request.rounded, &satisfied)
            if satisfied:
                handle = self.find(request)
        if handle == NO_CHUNK and self.garbage_collection and self.release_for(request.rounded) \
                and self.extend(request.rounded):
            handle = self.find(request)
        return handle

    cdef uint64_t available(self) noexcept nogil:
        """What the limit leaves. Upstream's difference wraps where a sub-allocator gave more than was asked."""
        cdef uint64_t taken = self.pool.counters.pool_bytes + self.being_asked
        return self.limit - taken if taken < self.limit else 0

    cdef bint extend(self, uint64_t rounded) except -1:
        """Adds a region of at least `rounded` bytes, asking for less after each refusal (spec 2.4)."""
        cdef uint64_t available = self.available() & ~<uint64_t>(MINIMUM_SIZE - 1)
        if rounded > available:
            self.last_refusal = f"the memory limit, of which {format_bytes(available)} are not taken yet"
            return False
        cdef cbool grew = False
        cdef uint64_t size = self.growth.grow_to(rounded, available, &grew)
        block = self.ask(size)
        while block is None and size > rounded:
            size = backpedal(size)
            if size < rounded:
                if self.strict:
                    return False
                size = rounded      # upstream never tries just what is needed
            block = self.ask(size)
        if block is None:
            return False
        self.growth.succeeded(grew)
        self.take_region(block, 0)
        return True

    cdef bint release_for(self, uint64_t rounded) except -1:
        """Gives all wholly free regions back, if a region of `rounded` bytes would fit the limit then (spec 2.7)."""
        cdef vector[Region] regions
        cdef Region region
        cdef uint64_t total = 0
        self.pool.free_regions(regions)
        for region in regions:
            total += region.end - region.ptr
        if total == 0 or rounded > self.available() + total:
            return False
        for region in regions:
            self.pool.remove_region(region)
        self.lock.release()
        try:
            self.give_back(regions)
        finally:
            self.acquire()
        return True

    cdef void regions_released(self) noexcept nogil:
        self.growth.reset()
