"""The blocks of pinned memory, and where they come from. A change of these books runs no Python and calls no driver: a
`nogil` method here calls nothing that could release the GIL, or end a turn at the allocator.
"""

import time

cimport cython
from cython.operator cimport dereference, predecrement
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap

from bfc.native.nothrow cimport try_make_room, try_push_back, try_store
from bfc.interpreter._process cimport Deferral, defer_handlers, resume_handlers
from bfc.allocators._source cimport ask_for_block, offer_again

from bfc.errors import InvalidPointerError, SubAllocatorError, out_of_host_memory

cdef extern from "usage.hpp":
    pass

cdef enum:
    PIECE = 4096                # pieces of the reserve are multiples of this


cdef void count_since(Timer* timer, object start) noexcept:
    """Counts the time since `start`. As upstream, a shortest time of 0 means that there is none yet."""
    cdef int64_t microseconds
    try:
        microseconds = (time.perf_counter_ns() - start) // 1000
    except MemoryError:
        return          # the host has no memory for the time: that is not worth an error
    timer.total += microseconds
    timer.count += 1
    timer.longest = max(timer.longest, microseconds)
    timer.shortest = min(timer.shortest, microseconds) if timer.shortest else microseconds


# The garbage collector must not clear the reference to the sub-allocator before the blocks have gone back to it.
@cython.final
@cython.no_gc_clear
cdef class Source:
    """A sub-allocator that gives blocks to a `PinnedAllocator`, and takes them back: which blocks are on their way
    there, which it did not take back, and how long its calls take. Guarded by the GIL, or by a turn at the
    allocator. It never calls an allocator."""

    def __cinit__(self):
        self.rejected = []

    cdef bint cut(self, uint64_t size, Range* piece) noexcept nogil:
        """Cuts the next piece from the reserve. It is marked by 0 bytes received. Returns whether enough was left."""
        if size > self.reserve.nbytes - self.reserve_used:
            return False
        piece.ptr = self.reserve.ptr + self.reserve_used
        piece.nbytes = 0
        # A piece that is emptied is never cut again: PyTorch's reserve only moves forward (case 91).
        self.reserve_used = min(self.reserve.nbytes, self.reserve_used + (size + PIECE - 1) // PIECE * PIECE)
        return True

    cdef void leave_reserve(self) noexcept nogil:
        if self.reserve.nbytes:
            self.leave(self.reserve)
        self.reserve.nbytes = 0

    cdef bint ask(self, uint64_t size, uint64_t alignment, threads, Range* block) except -1:
        """Asks the sub-allocator for a block, and returns whether there was room. `threads` is how many register it
        with CUDA; None: it is not registered."""
        source = self.sub_allocator
        way = source.alloc
        if threads is not None and hasattr(source, "alloc_registered"):
            def way(alignment, nbytes):
                return source.alloc_registered(alignment, nbytes, threads)

        start = time.perf_counter_ns()
        cdef bint got = False
        try:
            if not self.keep_room():
                raise out_of_host_memory()
            got = ask_for_block(source, way, alignment, size, False, &block.ptr, &block.nbytes, self.rejected)
        finally:
            self.taken -= not got
        if got:
            count_since(&self.alloc_time, start)
        return got

    cdef cbool keep_room(self) noexcept nogil:
        """Makes room for one more block in both lists, before it is asked for. The caller counts it in `taken`."""
        self.taken += 1
        return try_make_room(self.leaving, self.taken) and try_make_room(self.unreturned, self.taken)

    cdef cbool leave(self, Range block) noexcept nogil:
        """Puts a block among those that `give_back` gives back. Returns False if the host has no memory for that."""
        return try_push_back(self.leaving, block)

    cdef int give_back_block(self, Range block) except -1:
        """Gives a block back that the source gave, and that is not used after all."""
        # Only a host without memory for the list comes here; then the block goes back outside of it.
        if not self.leave(block):
            self.free_timed(block, True)
        return self.give_back()

    cdef int give_back(self, bint idle=True) except -1:
        """Gives the blocks in `leaving` back. Raises SubAllocatorError if the sub-allocator does not take one; that is
        kept for another try. `idle`: no queued work uses any of them."""
        cdef Range block
        cdef Deferral deferral
        if self.leaving.empty():
            return 0
        fault, failed, interrupt = None, 0, None
        defer_handlers(&deferral)
        # After an exception from another thread the rest stays listed, for the next release.
        while self.leaving.size() and interrupt is None:
            block = self.leaving.back()
            self.leaving.pop_back()
            try:
                self.free_timed(block, idle)
            except BaseException as error:
                try_push_back(self.unreturned, block)
                interrupt = None if isinstance(error, Exception) else error
                fault, failed = fault or error, failed + 1
        resume_handlers(&deferral)
        if interrupt is not None:
            raise interrupt
        if fault is not None:
            raise SubAllocatorError(f"{self.sub_allocator!r}.free failed for {failed} block(s), first with {fault!r}; "
                                    f"empty_cache() and close() try again") from fault
        return 0

    cdef int free_timed(self, Range block, bint idle) except -1:
        start = time.perf_counter_ns()
        if idle:
            self.sub_allocator.free_idle(block.ptr, block.nbytes)
        else:
            self.sub_allocator.free(block.ptr, block.nbytes)
        self.taken -= 1
        count_since(&self.free_time, start)
        return 0

    cdef void offer_unreturned_again(self) noexcept nogil:
        """Lists what the sub-allocator did not take back, to be given back once more."""
        while self.unreturned.size() and try_push_back[Range](self.leaving, self.unreturned.back()):
            self.unreturned.pop_back()

    cdef int offer_rejected_again(self) except -1:
        offer_again(self.sub_allocator, self.rejected)
        return 0

    cdef bint has_nothing(self) noexcept:
        """Whether every block has gone back."""
        return self.unreturned.empty() and self.leaving.empty()


# As above: in a garbage cycle the allocator still closes.
@cython.final
@cython.no_gc_clear
cdef class Blocks:
    """All blocks of a `PinnedAllocator`: which are in use, and the stacks of those that are not, one for each power of
    two. Guarded by the GIL, or by a turn at the allocator."""

    def __cinit__(self):
        cdef uint32_t top = NO_BLOCK
        self.unused = NO_BLOCK
        for _bucket in range(BUCKETS):
            self.stacks.push_back(top)
        self.source = Source()

    cdef uint32_t pop(self, uint64_t size, uint64_t nbytes, uint64_t alignment) noexcept nogil:
        """Takes the block of a bucket that was freed last, is large enough and lies well, or NO_BLOCK.

        Sizes in a bucket differ only if the settings limit the rounding; then the search is linear in the blocks that
        are too small, and always in those whose address is no multiple of the alignment.
        """
        cdef uint32_t* link = &self.stacks[bucket_of(size)]
        cdef uint32_t handle
        # A release of PyTorch without the test of the size overflowed the heap (#192722).
        while link[0] != NO_BLOCK and (self.records[link[0]].size < size
                                       or self.records[link[0]].ptr & (alignment - 1)):
            link = &self.records[link[0]].next
        handle = link[0]
        if handle != NO_BLOCK:
            link[0] = self.records[handle].next
            self.begin(handle, nbytes)
        return handle

    cdef void begin(self, uint32_t handle, uint64_t nbytes) noexcept nogil:
        """Makes a block live."""
        cdef Block* block = &self.records[handle]
        # Ids tell a block from the one that had its record before.
        self.last_id += 1
        block.allocation_id = self.last_id
        block.requested = nbytes
        block.state = LIVE
        block.exported = block.unfreed = False
        self.active_requests.raise_by(1)
        self.active_bytes.raise_by(block.size)

    cdef cbool overlaps(self, uint64_t ptr, uint64_t nbytes) noexcept nogil:
        cdef cmap[uint64_t, uint32_t].iterator after = self.by_address.lower_bound(ptr + nbytes)
        if after == self.by_address.begin():
            return False
        predecrement(after)
        cdef Block* below = &self.records[dereference(after).second]
        # The source may have given more than the block's size, and that is not free either.
        return below.ptr + max(below.size, below.received) > ptr

    cdef uint32_t add(self, Range memory, uint64_t size, uint64_t nbytes) noexcept nogil:
        """A new live block; NO_BLOCK where the host has no memory for its record."""
        cdef uint32_t handle = self.new_record(memory.ptr)
        if handle != NO_BLOCK:
            self.records[handle].size = size
            self.records[handle].received = memory.nbytes
            self.allocations.raise_by(1)
            self.allocated_bytes.raise_by(size)
            self.begin(handle, nbytes)
        return handle

    cdef uint32_t new_record(self, uint64_t ptr) noexcept nogil:
        """A record for a block at this address; NO_BLOCK where the host has no memory for it."""
        cdef uint32_t handle = self.unused
        cdef Block block
        memset(&block, 0, sizeof(Block))
        block.ptr = ptr
        if handle == NO_BLOCK:
            handle = <uint32_t>self.records.size()
            block.next = NO_BLOCK
            block.state = UNUSED
            # The last number stands for none, so a table of as many records is full.
            if handle == NO_BLOCK or not try_push_back(self.records, block):
                return NO_BLOCK
            self.unused = handle
        # The record stays unused, and is found there by the next block.
        if not try_store(self.by_address, ptr, handle):
            return NO_BLOCK
        self.unused = self.records[handle].next
        self.records[handle] = block
        return handle

    cdef uint32_t holder_of(self, uint64_t address) noexcept nogil:
        """The block that an address lies in, or NO_BLOCK."""
        cdef cmap[uint64_t, uint32_t].iterator after = self.by_address.upper_bound(address)
        if after == self.by_address.begin():
            return NO_BLOCK
        predecrement(after)
        cdef uint32_t handle = dereference(after).second
        return handle if address - self.records[handle].ptr < self.records[handle].size else NO_BLOCK

    cdef void shelve(self, uint32_t handle) noexcept nogil:
        """Puts a block that nobody uses any more on the stack of its bucket."""
        cdef Block* block = &self.records[handle]
        cdef int bucket = bucket_of(block.size)
        self.active_requests.lower(1)
        self.active_bytes.lower(block.size)
        block.state = CACHED
        # On top: PyTorch takes the block that was freed last (case 86).
        block.next = self.stacks[bucket]
        self.stacks[bucket] = handle

    cdef cbool drop(self, uint32_t* link) noexcept nogil:
        """Forgets the block that a link of a stack leads to: it goes back to the source. A piece of the reserve is lost
        until the allocator closes. Returns False, and changes nothing, if the host has no memory for that."""
        cdef uint32_t handle = link[0]
        cdef Range block = Range(self.records[handle].ptr, self.records[handle].received)
        if block.nbytes and not self.source.leave(block):
            return False
        link[0] = self.records[handle].next
        self.forget_record(handle)
        return True

    cdef void drop_top(self, uint32_t handle) noexcept nogil:
        """Drops a block that is on top of its stack."""
        self.drop(&self.stacks[bucket_of(self.records[handle].size)])

    cdef void drop_cached(self) noexcept nogil:
        """Drops all cached blocks. The source gets the last one back first, so they are dropped in reverse of
        upstream's order: by bucket, and within a bucket the block that was freed first comes first."""
        cdef int bucket
        for bucket in range(BUCKETS - 1, -1, -1):
            while self.stacks[bucket] != NO_BLOCK:
                if not self.drop(&self.stacks[bucket]):
                    return

    cdef void forget_record(self, uint32_t handle) noexcept nogil:
        cdef Block* block = &self.records[handle]
        self.allocations.lower(1)
        self.allocated_bytes.lower(block.size)
        self.by_address.erase(block.ptr)
        block.state = UNUSED
        block.allocation_id = 0
        block.next = self.unused
        self.unused = handle

    cdef int64_t largest_cached(self) noexcept nogil:
        cdef int64_t largest = 0
        cdef size_t handle
        for handle in range(self.records.size()):
            if self.records[handle].state == CACHED:
                largest = max(largest, <int64_t>self.records[handle].size)
        return largest

    cdef void abandon_all(self) noexcept nogil:
        """Forgets every block, since the allocator closes: they go back to the source."""
        cdef uint32_t handle
        cdef int bucket
        for handle in range(<uint32_t>self.records.size()):
            self.abandon(handle)
        for bucket in range(BUCKETS):
            self.stacks[bucket] = NO_BLOCK

    cdef void abandon(self, uint32_t handle) noexcept nogil:
        cdef Block* block = &self.records[handle]
        cdef Range memory = Range(block.ptr, block.received)
        if block.state in (LIVE, LEAVING):
            self.active_requests.lower(1)
            self.active_bytes.lower(block.size)
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
        for handle in range(self.records.size()):
            block = &self.records[handle]
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
                if self.records[on_stack].state != CACHED:
                    return "a stack holds a block that is in use"
                if <size_t>bucket_of(self.records[on_stack].size) != bucket:
                    return "a block is on the stack of another bucket"
                on_stack = self.records[on_stack].next
        if stacked or self.by_address.size() != <size_t>sums[0]:
            return "a cached block is on no stack, or an address leads to no block"
        if sums[0] != self.allocations.current or sums[1] != self.allocated_bytes.current:
            return "the sums of all blocks are wrong"
        if sums[2] != self.active_requests.current or sums[3] != self.active_bytes.current:
            return "the sums of the blocks in use are wrong"
        return None

    cdef uint32_t live_at(self, uint64_t address) except? 0xFFFFFFFE:
        """The live block that starts there, or an error that says what is wrong."""
        cdef uint32_t handle = self.holder_of(address)
        if handle == NO_BLOCK:
            raise InvalidPointerError(f"{address:#x} is not memory of this allocator")
        if self.records[handle].state != LIVE:
            raise InvalidPointerError(f"{address:#x} was freed already")
        if self.records[handle].ptr != address:
            raise InvalidPointerError(f"{address:#x} lies inside the block at {self.records[handle].ptr:#x}")
        return handle

    cdef void restart_peaks(self) noexcept nogil:
        self.allocations.peak = self.allocations.current
        self.allocated_bytes.peak = self.allocated_bytes.current
        self.active_requests.peak = self.active_requests.current
        self.active_bytes.peak = self.active_bytes.current

    cdef void restart_totals(self) noexcept nogil:
        self.allocations.allocated = self.allocations.freed = 0
        self.allocated_bytes.allocated = self.allocated_bytes.freed = 0
        self.active_requests.allocated = self.active_requests.freed = 0
        self.active_bytes.allocated = self.active_bytes.freed = 0
