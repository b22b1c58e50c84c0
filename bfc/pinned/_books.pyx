"""The bookkeeping of a `PinnedAllocator`, in integers. A `nogil` function here calls nothing that could release the
GIL, so that the GIL alone makes it atomic."""

cimport cython
from cython.operator cimport dereference, predecrement
from libc.string cimport memset

from bfc.native.nothrow cimport try_push_back, try_store
from bfc.buffers._arguments cimport address_from
from bfc.pinned._source cimport Range, Timer

from bfc.errors import InvalidPointerError, InvariantError
from bfc.interpreter.stubs import SignatureOfStub
from bfc.pytorch import words
from bfc.snapshots.snapshot import ChunkInfo, RegionInfo, Snapshot, Stats


cdef int bucket_of(uint64_t size) noexcept nogil:
    """ceil(log2(size))"""
    cdef int bits = 0
    size -= 1
    while size:
        size >>= 1
        bits += 1
    return bits


cdef void increase(Stat* stat, int64_t amount) noexcept nogil:
    stat.current += amount
    stat.allocated += amount
    stat.peak = max(stat.peak, stat.current)


cdef void decrease(Stat* stat, int64_t amount) noexcept nogil:
    stat.current -= amount
    stat.freed += amount


cdef dict named(str name, tuple fields, tuple figures):
    return {f"{name}.{field}": figure for field, figure in zip(fields, figures)}


cdef dict stat_fields(str name, Stat stat):
    return named(name, words.FIELDS, (stat.current, stat.peak, stat.allocated, stat.freed))


cdef dict timer_fields(str name, Timer timer):
    average = timer.total / timer.count if timer.count else 0.0
    return named(name, words.TIME_FIELDS, (timer.total, timer.longest, timer.shortest, timer.count, average))


@cython.final
cdef class PinnedBlock:
    """A live block of a `PinnedAllocator`: the `context` that `record_event` takes.

    It does not keep the block alive.

    Parameters
    ----------
    ptr : int
        Its first byte.
    nbytes : int
        The bytes that were asked for.
    allocation_id : int
        The number of the allocation.

    Attributes
    ----------
    ptr : int
        As given.
    nbytes : int
        As given.
    allocation_id : int
        As given.
    """

    __signature__ = SignatureOfStub()

    def __init__(self, ptr, nbytes, allocation_id):
        self.ptr = ptr
        self.nbytes = nbytes
        self.allocation_id = allocation_id

    def __repr__(self):
        return f"<bfc.pinned.PinnedBlock {self.ptr:#x}, {self.nbytes} bytes>"


@cython.no_gc_clear
cdef class PinnedBooks(Owner):
    """The bookkeeping of a `PinnedAllocator`, and a part of it."""

    def __cinit__(self, *args, **kwargs):
        cdef uint32_t top = NO_BLOCK
        self.unused = NO_BLOCK
        self.source = Source()
        for _bucket in range(BUCKETS):
            self.stacks.push_back(top)

    cdef uint32_t pop(self, uint64_t size, uint64_t nbytes) noexcept nogil:
        """Takes the block of a bucket that was freed last and is large enough, or NO_BLOCK.

        Sizes in a bucket differ only if the settings limit the rounding; then the search is linear in the blocks that
        are too small.
        """
        cdef uint32_t* link = &self.stacks[bucket_of(size)]
        cdef uint32_t handle
        while link[0] != NO_BLOCK and self.blocks[link[0]].size < size:
            link = &self.blocks[link[0]].next
        handle = link[0]
        if handle != NO_BLOCK:
            link[0] = self.blocks[handle].next
            self.begin(handle, nbytes)
        return handle

    cdef void begin(self, uint32_t handle, uint64_t nbytes) noexcept nogil:
        """Makes a block live."""
        cdef Block* block = &self.blocks[handle]
        self.last_id += 1
        block.allocation_id = self.last_id
        block.requested = nbytes
        block.state = LIVE
        block.exported = block.unfreed = False
        increase(&self.active_requests, 1)
        increase(&self.active_bytes, block.size)

    cdef cbool overlaps(self, uint64_t ptr, uint64_t nbytes) noexcept nogil:
        cdef cmap[uint64_t, uint32_t].iterator after = self.by_address.lower_bound(ptr + nbytes)
        if after == self.by_address.begin():
            return False
        predecrement(after)
        cdef Block* below = &self.blocks[dereference(after).second]
        return below.ptr + max(below.size, below.received) > ptr

    cdef uint32_t new_record(self, uint64_t ptr) noexcept nogil:
        """A record for a block at this address; NO_BLOCK where the host has no memory for it."""
        cdef uint32_t handle = self.unused
        cdef Block block
        memset(&block, 0, sizeof(Block))
        block.ptr = ptr
        if handle == NO_BLOCK:
            handle = <uint32_t>self.blocks.size()
            block.next = NO_BLOCK
            block.state = UNUSED
            if handle == NO_BLOCK or not try_push_back(self.blocks, block):
                return NO_BLOCK
            self.unused = handle
        if not try_store(self.by_address, ptr, handle):
            return NO_BLOCK
        self.unused = self.blocks[handle].next
        self.blocks[handle] = block
        return handle

    cdef uint32_t holder_of(self, uint64_t address) noexcept nogil:
        """The block that an address lies in, or NO_BLOCK."""
        cdef cmap[uint64_t, uint32_t].iterator after = self.by_address.upper_bound(address)
        if after == self.by_address.begin():
            return NO_BLOCK
        predecrement(after)
        cdef uint32_t handle = dereference(after).second
        return handle if address - self.blocks[handle].ptr < self.blocks[handle].size else NO_BLOCK

    cdef void shelve(self, uint32_t handle) noexcept nogil:
        """Puts a block that nobody uses any more on the stack of its bucket."""
        cdef Block* block = &self.blocks[handle]
        cdef int bucket = bucket_of(block.size)
        decrease(&self.active_requests, 1)
        decrease(&self.active_bytes, block.size)
        block.state = CACHED
        block.next = self.stacks[bucket]
        self.stacks[bucket] = handle

    cdef cbool drop(self, uint32_t* link) noexcept nogil:
        """Forgets the block that a link of a stack leads to: it goes back to the source. A piece of the reserve is lost
        until the allocator closes. Returns False, and changes nothing, if the host has no memory for that."""
        cdef uint32_t handle = link[0]
        cdef Range block = Range(self.blocks[handle].ptr, self.blocks[handle].received)
        if block.nbytes and not self.source.leave(block):
            return False
        link[0] = self.blocks[handle].next
        self.forget_record(handle)
        return True

    cdef void drop_cached(self) noexcept nogil:
        """Drops all cached blocks. The source gets the last one back first, so they are dropped in reverse of
        upstream's order: by bucket, and within a bucket the block that was freed first comes first."""
        cdef int bucket
        for bucket in range(BUCKETS - 1, -1, -1):
            while self.stacks[bucket] != NO_BLOCK:
                if not self.drop(&self.stacks[bucket]):
                    return

    cdef void forget_record(self, uint32_t handle) noexcept nogil:
        cdef Block* block = &self.blocks[handle]
        decrease(&self.allocations, 1)
        decrease(&self.allocated_bytes, block.size)
        self.by_address.erase(block.ptr)
        block.state = UNUSED
        block.allocation_id = 0
        block.next = self.unused
        self.unused = handle

    cdef int64_t largest_cached(self) noexcept nogil:
        cdef int64_t largest = 0
        cdef size_t handle
        for handle in range(self.blocks.size()):
            if self.blocks[handle].state == CACHED:
                largest = max(largest, <int64_t>self.blocks[handle].size)
        return largest

    cdef void abandon(self, uint32_t handle) noexcept nogil:
        """Forgets any block of an allocator that closes: it goes back to the source."""
        cdef Block* block = &self.blocks[handle]
        cdef Range memory = Range(block.ptr, block.received)
        if block.state in (LIVE, LEAVING):
            decrease(&self.active_requests, 1)
            decrease(&self.active_bytes, block.size)
        if block.state != UNUSED:
            if memory.nbytes:
                self.source.leave(memory)
            self.forget_record(handle)

    cdef object recount(self, int64_t* sums):
        """What is wrong with the books, or None."""
        cdef size_t bucket, handle
        cdef uint32_t on_stack
        cdef Block* block
        cdef int64_t stacked = 0
        for handle in range(self.blocks.size()):
            block = &self.blocks[handle]
            if (block.state == LIVE) != (block.allocation_id != 0):
                return "a live block has no id, or another has one"
            if block.state == UNUSED:
                continue
            if self.by_address.count(block.ptr) == 0 or self.by_address[block.ptr] != handle:
                return "a block's address leads elsewhere"
            sums[0] += 1
            sums[1] += block.size
            sums[2] += block.state != CACHED
            sums[3] += block.size if block.state != CACHED else 0
            stacked += block.state == CACHED
        for bucket in range(self.stacks.size()):
            on_stack = self.stacks[bucket]
            while on_stack != NO_BLOCK:
                stacked -= 1
                if self.blocks[on_stack].state != CACHED:
                    return "a stack holds a block that is in use"
                if <size_t>bucket_of(self.blocks[on_stack].size) != bucket:
                    return "a block is on the stack of another bucket"
                on_stack = self.blocks[on_stack].next
        if stacked or self.by_address.size() != <size_t>sums[0]:
            return "a cached block is on no stack, or an address leads to no block"
        if sums[0] != self.allocations.current or sums[1] != self.allocated_bytes.current:
            return "the sums of all blocks are wrong"
        if sums[2] != self.active_requests.current or sums[3] != self.active_bytes.current:
            return "the sums of the blocks in use are wrong"
        return None

    def reset_peak_stats(self):
        """Restart the peaks from the current values, and forget the longest and shortest times."""
        self.allocations.peak = self.allocations.current
        self.allocated_bytes.peak = self.allocated_bytes.current
        self.active_requests.peak = self.active_requests.current
        self.active_bytes.peak = self.active_bytes.current
        self.source.alloc_time.longest = self.source.alloc_time.shortest = 0
        self.source.free_time.longest = self.source.free_time.shortest = 0

    def reset_accumulated_stats(self):
        """Restart the counts of what was allocated and freed, and the sums of times, from 0."""
        self.allocations.allocated = self.allocations.freed = 0
        self.allocated_bytes.allocated = self.allocated_bytes.freed = 0
        self.active_requests.allocated = self.active_requests.freed = 0
        self.active_bytes.allocated = self.active_bytes.freed = 0
        self.source.alloc_time.total = self.source.alloc_time.count = 0
        self.source.free_time.total = self.source.free_time.count = 0

    cdef uint32_t live_at(self, uint64_t address) except? 0xFFFFFFFE:
        """The live block that starts there, or an error that says what is wrong."""
        cdef uint32_t handle = self.holder_of(address)
        if handle == NO_BLOCK:
            raise InvalidPointerError(f"{address:#x} is not memory of this allocator")
        if self.blocks[handle].state != LIVE:
            raise InvalidPointerError(f"{address:#x} was freed already")
        if self.blocks[handle].ptr != address:
            raise InvalidPointerError(f"{address:#x} lies inside the block at {self.blocks[handle].ptr:#x}")
        return handle

    def find(self, address):
        """The live block that an address lies in.

        Parameters
        ----------
        address : int
            The first byte of the block, or any other.

        Returns
        -------
        PinnedBlock or None
            None if there is no such block.

        Raises
        ------
        TypeError
            If `address` is not an int.
        InvalidPointerError
            If `address` is negative or above 2**64 - 2.
        """
        cdef uint32_t handle = self.holder_of(address_from(address))
        if handle == NO_BLOCK or self.blocks[handle].state != LIVE:
            return None
        return PinnedBlock(self.blocks[handle].ptr, self.blocks[handle].requested, self.blocks[handle].allocation_id)

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
        return self.blocks[self.live_at(address_from(ptr))].requested

    def allocated_size(self, ptr):
        """The bytes of the block at an address.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.

        Returns
        -------
        int
            The request, rounded up to a power of two.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        """
        return self.blocks[self.live_at(address_from(ptr))].size

    def host_memory_stats(self):
        """PyTorch's figures by PyTorch's keys, as `torch.cuda.host_memory_stats()` returns them.

        Returns
        -------
        dict of str to int or float
            Bytes, counts and microseconds. "allocations" and "allocated_bytes" count the blocks that the
            allocator owns, in use or cached; "active_requests" and "active_bytes" those in use, or freed
            but still used by a stream. Each has "current", "peak", "allocated" and "freed". The times are
            those of the calls to the sub-allocator.

        Notes
        -----
        Cost: O(1), no device call. Source: PyTorch's behaviour, 4.7.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate(40_960)
        >>> stats = allocator.host_memory_stats()
        >>> stats["active_bytes.current"], stats["num_host_alloc"]
        (65536, 1)
        """
        allocations, allocated_bytes, active_requests, active_bytes = words.HOST_GROUPS
        alloc_time, free_time = words.HOST_TIMES
        fields = (
            stat_fields(active_bytes, self.active_bytes) | stat_fields(active_requests, self.active_requests)
            | stat_fields(allocated_bytes, self.allocated_bytes) | stat_fields(allocations, self.allocations)
            | timer_fields(alloc_time, self.source.alloc_time) | timer_fields(free_time, self.source.free_time)
            | {"num_host_alloc": self.allocations.allocated, "num_host_free": self.allocations.freed}
        )
        return dict(sorted(fields.items()))

    def _look(self):
        """The blocks as a snapshot, for an error: each is a region with one chunk."""
        cdef vector[Block] blocks
        cdef Block block
        blocks.assign(self.blocks.begin(), self.blocks.end())   # the objects made below may run anything
        found = []
        for block in blocks:
            if block.state == UNUSED:
                continue
            in_use = block.state != CACHED
            state = "free" if not in_use else "in use" if block.state == LIVE else "waiting"
            chunk = ChunkInfo(block.ptr, block.size, block.requested if in_use else 0, block.allocation_id or -1, state)
            found.append(RegionInfo(block.ptr, block.size, (chunk,)))
        stats = Stats(bytes_in_use=self.active_bytes.current, pool_bytes=self.allocated_bytes.current)
        return Snapshot(str(self.device), stats, tuple(sorted(found, key=lambda region: region.ptr)))

    def check(self):
        """Recount the bookkeeping from nothing.

        Raises
        ------
        InvariantError
            If it contradicts itself, which is a bug in bfc.

        Notes
        -----
        Cost: O(n) in the blocks.
        """
        cdef int64_t[4] sums = [0, 0, 0, 0]
        fault = self.recount(sums)
        if fault is not None:
            raise InvariantError(fault)
