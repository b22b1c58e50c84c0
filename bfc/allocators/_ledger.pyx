"""What can be read from an allocator: facts about an address, statistics, snapshots."""

cimport cython
from cpython.long cimport PyLong_CheckExact
from cython.operator cimport dereference as deref
from libcpp.map cimport map as cmap

from bfc._core cimport (
    HISTORY_SNAPSHOT, IN_USE, NO_CHUNK, STATE, UNMAPPED, WAITING, BinSet, Chunk, ChunkHandle, Counters, Lane, Pool,
    Region,
)
from bfc.buffers._arguments cimport address_from, stream_from
from bfc.buffers._owners cimport name_of_owner, owner_names
from bfc.allocators._pages cimport Pages
from bfc.allocators._page_use cimport PageUse, count_use
from bfc.allocators._columns cimport bytes_of_chunks, bytes_of_pages, bytes_of_regions, copy_columns
from bfc.allocators._invariants cimport first_fault
from bfc.allocators._lock cimport acquire_lock, let_others_on
from bfc.allocators._source cimport Source

from bfc.errors import AsleepError, InvalidPointerError, InvariantError, PagesInUse, out_of_host_memory
from bfc.snapshots import columns as _columns, leaks as _leaks, snapshot as _snapshot
from bfc.streams import is_queue as _is_queue

cdef extern from "bins.hpp":
    pass
cdef extern from "history.hpp":
    pass
cdef extern from "usage.hpp":
    pass
cdef extern from "window.hpp":
    pass


def _by_falling_bytes(item):
    return -item[1], item[0]


cdef int refuse_queue(stream, device) except -1:
    """Refuses an OpenCL queue where a CUDA stream is needed: the driver would take its address for a stream."""
    if device.kind.startswith("cuda") and _is_queue(stream):
        raise TypeError(f"memory on {device} takes CUDA streams, not a {type(stream).__name__}: pass a CUDA stream "
                        f"as stream= (a bfc.use_stream around the call may have set this one)")
    return 0


cdef object bytes_by_name(uint64_t in_use, vector[uint64_t]& owned):
    """Bytes in use by owner, the largest first. `owned`: by the owner's number."""
    cdef uint64_t left = in_use
    cdef size_t i
    cdef list found = []
    for i in range(owned.size()):
        if owned[i]:
            left -= owned[i]
            found.append((name_of_owner(<uint32_t>i), owned[i]))
    if left:
        found.append(("", left))
    found.sort(key=_by_falling_bytes)
    return _snapshot.OwnerBytes(found)


cdef uint64_t count_bookkeeping(Pool pool) noexcept nogil:
    """The bytes of host memory that a pool keeps: records ever used, the table of starts, the bins. Needs the lock."""
    cdef uint64_t total = pool.chunk_count * sizeof(Chunk) + pool.starts.bytes()
    cdef BinSet bin_set
    for bin_set in pool.bin_sets:
        total += bin_set.bins.bytes() + (bin_set.window.bytes() if bin_set.window != NULL else 0)
    return total


cdef ChunkHandle chunk_around(Pool pool, uint64_t ptr) noexcept nogil:
    """The chunk, free or not, that `ptr` lies in, or NO_CHUNK: a walk along its region, for messages. Needs the lock.
    """
    cdef cmap[uint64_t, Region].iterator found = pool.regions.upper_bound(ptr)
    if found == pool.regions.end() or ptr < deref(found).second.ptr:
        return NO_CHUNK
    cdef ChunkHandle handle = deref(found).second.first
    while ptr >= pool.chunks[handle].ptr + pool.chunks[handle].size:
        handle = pool.chunks[handle].next
    return handle


# In a garbage cycle buffers may be finalised after their allocator, so the collector must leave the pool in place.
@cython.no_gc_clear
cdef class Ledger(Owner):
    """What can be read from an allocator: a part of `Allocator`."""

    def __cinit__(self, *args, **kwargs):
        self.is_closed = True   # until it is set up
        self.pool = Pool()      # may raise MemoryError; __dealloc__ then runs without a pool
        self.source = Source()
        self.source.stand_behind(&self.lock, self.pool)

    @cython.final
    cdef void acquire(self) noexcept nogil:
        """Takes the lock. Callers may hold the GIL or not."""
        acquire_lock(self.lock)

    cdef void give_way(self) noexcept nogil:
        """Releases the lock if other threads wait for it, and takes it again. The caller holds it."""
        let_others_on(self.lock)

    cdef int catch_up(self) except -1:
        """Makes the frees that are due, so that statistics and snapshots show what the user has freed as free."""
        return 0

    cdef bint is_live(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        self.acquire()
        live = self.is_live_locked(handle, allocation_id) and not self.is_asleep_locked(handle)
        self.lock.release()
        return live

    @cython.final
    cdef bint is_asleep_locked(self, ChunkHandle handle) noexcept nogil:
        """Whether the memory of a chunk sleeps."""
        return self.pool.bin_sets[self.pool.chunks[handle].bin_set].asleep != 0

    cdef object why_not(self, ChunkHandle handle, int64_t allocation_id):
        cdef Lane lane
        self.acquire()
        cdef bint asleep = self.is_live_locked(handle, allocation_id) and self.is_asleep_locked(handle)
        if asleep:
            lane = self.pool.bin_sets[self.pool.chunks[handle].bin_set].lane
        self.lock.release()
        if not asleep:
            return Owner.why_not(self, handle, allocation_id)
        name = self.tag_of_pool(lane.pool[0], lane.pool[1])
        return AsleepError(f"this memory sleeps: wake({name!r}) puts it back at the same address")

    cdef object tag_of_pool(self, uint64_t first, uint64_t second):
        """The name of the tag that memory of a pool belongs to, or None."""
        return None

    cdef uint64_t bytes_not_released(self) noexcept:
        """The bytes of pages that the sub-allocator failed to release, and that still count as reserved."""
        return 0

    cdef uint64_t bytes_asleep(self) noexcept:
        """The bytes that must be mapped to wake everything that sleeps."""
        return 0

    cdef uint64_t stream_of(self, object stream) except? 0xFFFFFFFFFFFFFFFF:
        """A stream's handle. The default stream has several handles; always returns the same one of them."""
        if stream is None:
            return 0
        cdef uint64_t handle = stream_from(stream)
        if not PyLong_CheckExact(stream):
            self.require_set_up()
            refuse_queue(stream, self.sub_allocator.device)
        return 0 if handle == self.default_stream_alias else handle

    @cython.final
    cdef cbool is_of_thread(self, uint64_t stream) noexcept nogil:
        """Whether a handle names another stream in each thread."""
        cdef uint64_t handle
        for handle in self.thread_streams:
            if handle == stream:
                return True
        return False

    cdef Counters start_peaks(self) noexcept:
        """Restarts the peaks of bytes. Returns the counters as they were, for end_peaks."""
        self.acquire()
        cdef Counters before = self.pool.totals()
        self.pool.restart_peaks()
        if self.pool.usage != NULL:
            self.pool.usage.restart_bytes_peak()
        self.lock.release()
        return before

    cdef Counters end_peaks(self, Counters before) noexcept:
        """The peaks since start_peaks."""
        cdef Counters* counters = &self.pool.counters
        self.acquire()
        cdef Counters since = self.pool.totals()
        if self.pool.usage != NULL:
            self.pool.usage.merge_bytes_peak(before.peak_bytes_in_use)
        counters.peak_bytes_in_use = max(since.peak_bytes_in_use, before.peak_bytes_in_use)
        counters.peak_pool_bytes = max(since.peak_pool_bytes, before.peak_pool_bytes)
        self.lock.release()
        return since

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
        """The bytes that were asked for at an address.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.

        Returns
        -------
        int
            The `nbytes` of the request.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        """
        return self.chunk_at(ptr).requested_size

    def allocated_size(self, ptr):
        """The bytes of the chunk at an address.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.

        Returns
        -------
        int
            The rounded size of the request, and any remainder that was too small to be split off.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        """
        return self.chunk_at(ptr).size

    def allocation_id(self, ptr):
        """The number of the allocation at an address.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.

        Returns
        -------
        int
            Allocations are numbered 1, 2, 3, ... in their order; no number is used twice.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        """
        return self.chunk_at(ptr).allocation_id

    @property
    def memory_limit(self):
        """The most bytes that the allocator takes from its sub-allocator."""
        return self.limit

    @property
    def stream(self):
        """The stream that the allocator belongs to, as an int; None for memory of the host (pinned)."""
        return self.visible_stream(self.home_stream)

    def stats(self):
        """The allocator's figures now: TensorFlow's AllocatorStats, and some that it lacks.

        Returns
        -------
        Stats
            A frozen copy.

        Raises
        ------
        ClosedError
            If a CachingAllocator's `__init__` has not finished.

        Notes
        -----
        Cost: O(1). A BFCAllocator asks the device once for each stream that freed memory waits for.
        """
        self.catch_up()
        self.acquire()
        cdef Counters counters = self.pool.totals()
        cdef uint64_t largest_free = self.pool.largest_free()
        cdef vector[uint64_t] owned
        cdef bint copied = self.pool.owned.copy(owned)
        self.lock.release()
        if not copied:
            raise out_of_host_memory()
        return self.stats_of(counters, largest_free, owned)

    cdef object stats_of(self, Counters counters, uint64_t largest_free, vector[uint64_t]& owned):
        return _snapshot.Stats(
            num_allocs=counters.num_allocs,
            bytes_in_use=counters.bytes_in_use,
            peak_bytes_in_use=counters.peak_bytes_in_use,
            largest_alloc_size=counters.largest_alloc_size,
            bytes_limit=self.limit,
            bytes_reserved=counters.pool_bytes + self.bytes_not_released(),
            peak_bytes_reserved=counters.peak_pool_bytes,
            pool_bytes=counters.pool_bytes,
            peak_pool_bytes=counters.peak_pool_bytes,
            largest_free_block_bytes=largest_free,
            bytes_waiting_for_streams=counters.bytes_waiting,
            bytes_asleep=self.bytes_asleep(),
            by_owner=bytes_by_name(counters.bytes_in_use, owned),
        )

    @property
    def bookkeeping_bytes(self):
        """The host memory that the allocator's records take, in bytes."""
        self.acquire()
        cdef uint64_t total = count_bookkeeping(self.pool)
        self.lock.release()
        return total

    @property
    def _lock_acquisitions(self):
        self.acquire()
        cdef uint64_t count = self.lock.acquisitions()
        self.lock.release()
        return count

    def reset_peak_stats(self):
        """Restart the peaks from what is in use and reserved now, and `largest_alloc_size` from 0."""
        self.acquire()
        self.pool.restart_peaks()
        if self.pool.usage != NULL:
            self.pool.usage.restart_peaks()
        self.pool.counters.largest_alloc_size = 0
        self.lock.release()

    def reset_accumulated_stats(self):
        """Restart the counts from 0. Allocation ids go on."""
        self.acquire()
        self.pool.counters.num_allocs = 0
        if self.pool.usage != NULL:
            self.pool.usage.restart_totals()
        self.lock.release()

    def clear_stats(self):
        """Restart `num_allocs`, `largest_alloc_size` and the peak of bytes in use (TensorFlow's ClearStats).

        The first two restart from 0, the peak from what is in use now. The peak of reserved bytes stays.

        Returns
        -------
        bool
            Always True, as from upstream's BFC allocator.
        """
        self.acquire()
        self.pool.counters.num_allocs = 0
        self.pool.counters.peak_bytes_in_use = self.pool.counters.bytes_in_use
        self.pool.counters.largest_alloc_size = 0
        self.lock.release()
        return True

    def _repr_html_(self):
        """What a notebook shows: the regions, and what is in use in them."""
        return self.snapshot(history=False)._repr_html_()

    def snapshot(self, *, history=True):
        """A copy of every region and chunk as they are now. `print()` draws it.

        Parameters
        ----------
        history : bool, optional
            False leaves out the history that `record_history` has recorded.

        Returns
        -------
        Snapshot
            Frozen.

        Notes
        -----
        Cost: O(n) in the chunks and the recorded history: some nanoseconds each, in one pass under the
        lock. The objects for regions, chunks and entries are made when they are first looked at.
        """
        return self.look(history, True)

    def _look(self):
        """A snapshot without the history, which leaves no entry in it."""
        return self.look(False, False)

    cdef object look(self, bint with_history, bint noted):
        """A snapshot. `noted`: whether the history says that one was taken."""
        cdef vector[RegionRow] regions
        cdef vector[ChunkRow] chunks
        cdef vector[uint32_t] pages
        cdef vector[HistoryRecord] records
        cdef vector[uint64_t] owned
        self.catch_up()
        self.acquire()
        cdef bint copied = copy_columns(self.pool, regions, chunks, pages)
        copied = copied and self.pool.owned.copy(owned)
        if self.pool.history != NULL:
            copied = copied and (not with_history or self.pool.history.copy(records))
            if noted:
                self.pool.history.add(HistoryRecord(0, self.pool.totals().bytes_in_use, 0, [0, 0], 0, 0,
                                                    HISTORY_SNAPSHOT, 0))
        cdef Counters counters = self.pool.totals()
        cdef uint64_t largest_free = self.pool.largest_free()
        self.lock.release()
        if not copied:
            raise out_of_host_memory()
        packed = _columns.RegionColumns(bytes_of_regions(regions), bytes_of_chunks(chunks), bytes_of_pages(pages),
                                        self.frames_of_regions(regions), self.frames_of_chunks(chunks),
                                        owners=owner_names, chunk_steps=self.steps_of_chunks(chunks))
        return _snapshot.Snapshot._of_columns(str(self.device), self.stats_of(counters, largest_free, owned), packed,
                                              self.columns_of(records), self.settings_now())

    def leaks(self):
        """What is live now, whose it is, and the lines of Python that allocated it.

        Returns
        -------
        Leaks
            A tuple of `Leak`, in address order. `print()` shows it by owner and by line, the largest
            first. What is freed and waits for a stream is not in it.

        Notes
        -----
        The lines are known only for what was allocated while `record_history()` kept frames.
        `bfc.testing.leak_check` finds them without a history. Cost: O(n) in the chunks.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.record_history()
        >>> with bfc.owner("weights"):
        ...     ptr = allocator.allocate_raw(1000)
        >>> leak, = allocator.leaks()
        >>> leak.owner, leak.nbytes, leak.frames[0].line
        ('weights', 1000, 2)
        """
        cdef vector[RegionRow] regions
        cdef vector[ChunkRow] chunks
        cdef vector[uint32_t] pages
        self.catch_up()
        self.acquire()
        cdef bint copied = copy_columns(self.pool, regions, chunks, pages)
        self.lock.release()
        if not copied:
            raise out_of_host_memory()
        packed = _columns.RegionColumns(b"", bytes_of_chunks(chunks), b"", None, self.frames_of_chunks(chunks),
                                        owners=owner_names)
        return _leaks.leaks_in(packed, repr(self))

    cdef object page_use(self):
        """How much of the pages is in use, for the text of a refusal; None: there are no pages."""
        cdef PageUse use
        if self.pool.pages == NULL:
            return None
        self.acquire()
        cdef cbool counted = count_use(<Pages>self.pool.pages, &use)
        self.lock.release()
        return PagesInUse(use.page_size, use.pages, use.in_use, use.sparse) if counted else None

    cdef object settings_now(self):
        """The settings of PyTorch's policy; None for another policy."""
        return None

    cdef list frames_of_chunks(self, vector[ChunkRow]& chunks):
        """The Python frames of each chunk's allocation; None where none are kept."""
        return None

    cdef list steps_of_chunks(self, vector[ChunkRow]& chunks):
        """The step of each chunk's allocation, or None; None where none are kept."""
        return None

    cdef list frames_of_regions(self, vector[RegionRow]& regions):
        """The Python frames of the allocation that each region was taken for; None where none are kept."""
        return None

    cdef object columns_of(self, vector[HistoryRecord]& records):
        """A recorded history as columns; None where there is none."""
        return None

    def check(self):
        """Recount every invariant from nothing: I1 to I15 of docs/design/invariants.md.

        Raises
        ------
        InvariantError
            If one does not hold, which is a bug in bfc.

        Notes
        -----
        Cost: O(n log n) in the chunks.
        """
        self.check_books()

    cdef int check_books(self) except -1:
        """`check` for a debug build, which recounts in the middle of a call. So this raises only if it finds a fault,
        even if Python's stack is exhausted."""
        self.acquire()
        cdef const char* fault = first_fault(self.pool)
        self.lock.release()
        if fault != NULL:
            raise InvariantError(fault.decode())

    # -- errors -------------------------------------------------------------------------------------------------------

    cdef int raise_invalid_pointer(self, uint64_t address) except -1:
        cdef Chunk chunk
        self.acquire()
        cdef ChunkHandle handle = chunk_around(self.pool, address)
        if handle != NO_CHUNK:
            chunk = self.pool.chunks[handle]
        self.lock.release()
        if handle == NO_CHUNK:
            text = "lies in no region of this allocator: it was allocated elsewhere, or its region was given back"
        elif chunk.state & STATE == IN_USE:
            text = (f"lies {address - chunk.ptr} bytes inside the allocation at {chunk.ptr:#x} "
                    f"({chunk.requested_size} bytes): pass the address that allocate_raw returned")
        elif chunk.state & STATE == UNMAPPED:
            text = "lies in reserved addresses that have no memory: it was freed, and given back to the device"
        elif chunk.state & STATE == WAITING:
            text = "is freed already, and waits for another stream to finish with it"
        else:
            text = "lies in free memory: it is freed already, or was never handed out"
        raise InvalidPointerError(f"{address:#x} {text}")
