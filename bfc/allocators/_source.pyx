"""A sub-allocator behind a limit: what is asked of it, what goes back, and who is inside a call to it.

- It is called with no lock held. The bytes that a call asks for are set aside from the limit first, so that no other
  thread takes them meanwhile.
- A `nogil` method takes the GIL only to call a sub-allocator that is Python, and never if `without_gil` is set.
- Room to list what goes wrong is made before the call, so that a block that the sub-allocator does not take back can be
  listed without more memory of the host.
"""

cimport cython
from cpython.number cimport PyNumber_Index
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_make_room, try_push_back
from bfc.interpreter._process cimport Deferral, defer_handlers, resume_handlers
from bfc._core cimport MINIMUM_SIZE, NO_CHUNK, NO_LANE, Pool, Region
from bfc.allocators._changes cimport count_asleep, forget_queued
from bfc.allocators._lock cimport Lock, acquire_lock

from bfc.errors import ClosedError, SubAllocatorError, out_of_host_memory

cdef extern from "source.h":
    const char* BFC_NATIVE_SOURCE
    int BFC_NO_ROOM

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil


cdef uint64_t total_size(vector[Region]& regions) noexcept nogil:
    cdef Region region
    cdef uint64_t total = 0
    for region in regions:
        total += region.end - region.ptr
    return total


cdef void forget_calls_of_others(Source source) noexcept nogil:
    """Forgets the calls that other threads are in. In a forked child, and when the interpreter shuts down, they never
    return. This thread's own calls stay: its sub-allocator may be what forks. Needs the lock."""
    cdef Call call
    cdef vector[Call] own
    source.set_aside = source.unreturned.nbytes
    for call in source.calls:
        if call.thread == PyThread_get_thread_ident() and try_push_back(own, call):
            source.set_aside += call.nbytes
    source.calls.swap(own)
    source.growing.clear()


@cython.final
@cython.no_gc_clear
cdef class Source:
    """Where an allocator's regions come from and go to. It never calls the allocator."""

    def __cinit__(self):
        self.rejected = []

    cdef int attach(self, Lock* lock, Pool pool) except -1:
        """Takes the allocator's lock, which must live as long, and its pool."""
        self.lock = lock
        self.pool = pool
        lock.on_fork(<void (*)(void*) noexcept nogil>forget_calls_of_others, <void*>self)
        return 0

    cdef int open(self, object sub_allocator) except -1:
        """Sets the sub-allocator. If that raises, nothing has changed."""
        # Read before anything is set: a property of a user's class may raise.
        native = sub_allocator.native
        joins = bool(sub_allocator.supports_coalescing)
        self.sub_allocator = sub_allocator
        try:
            self.set_granularity()
            if native is not None:
                self.native = <bfc_native_source*>PyCapsule_GetPointer(native, BFC_NATIVE_SOURCE)
        except BaseException:
            self.sub_allocator = None
            raise
        self.joins_regions = joins
        return 0

    cdef int set_granularity(self) except -1:
        granularity = self.sub_allocator.granularity
        if not isinstance(granularity, int) or not 1 <= granularity <= 1 << 30 or granularity & (granularity - 1):
            raise ValueError(f"the granularity of {self.sub_allocator!r} is {granularity!r}: it must be a power of two")
        # Also of a source with a finer one: TensorFlow's chunks begin at multiples of 256.
        self.alignment = max(<uint64_t>granularity, <uint64_t>MINIMUM_SIZE)
        self.pool.granularity = self.alignment
        return 0

    # -- private pools that grow --------------------------------------------------------------------------------------

    cdef cbool begin_growing(self, GrowingPool pool) noexcept nogil:
        """Notes that a private pool is about to get memory: it has none of it yet, and may belong to no other tag any
        more. False: the host has no memory for the note. Needs the lock."""
        return try_push_back(self.growing, pool)

    cdef void end_growing(self, GrowingPool pool) noexcept nogil:
        """Ends that. A forked child has forgotten it. Needs the lock."""
        cdef size_t i
        for i in range(self.growing.size()):
            if self.growing[i].first == pool.first and self.growing[i].second == pool.second:
                self.growing.erase(self.growing.begin() + i)
                return

    cdef cbool is_growing(self, GrowingPool pool) noexcept nogil:
        """Needs the lock."""
        cdef GrowingPool grown
        for grown in self.growing:
            if grown.first == pool.first and grown.second == pool.second:
                return True
        return False

    # -- the limit ----------------------------------------------------------------------------------------------------

    cdef uint64_t taken(self) noexcept nogil:
        """The bytes that count against a limit now, with those of calls under way. Needs the lock."""
        return self.pool.counters.pool_bytes + self.set_aside

    cdef uint64_t lasting(self) noexcept nogil:
        """The part of them that will still count once the calls under way have ended. Needs the lock."""
        return self.pool.counters.pool_bytes + self.unreturned.nbytes

    cdef cbool set_bytes_aside(self, uint64_t nbytes, uint64_t limit, cbool* blocked) noexcept nogil:
        """Takes the bytes of a new region off what is left of a limit. If there are too few, says in `blocked` whether
        that is only for calls that are under way. Needs the lock: no other thread may find the limit free meanwhile."""
        cdef uint64_t taken = self.taken()
        cdef cbool fits = nbytes <= limit and taken <= limit - nbytes
        # Worth waiting for only if it fits without what is set aside: else it never will.
        blocked[0] = not fits and nbytes <= limit and self.lasting() <= limit - nbytes
        if fits:
            self.set_aside += nbytes
        else:
            self.refused_bytes.set(0)
        return fits

    cdef void put_bytes_back(self, uint64_t nbytes) noexcept nogil:
        """Gives the limit what was set aside, and is not asked for any more."""
        # From here on other threads may ask for it.
        acquire_lock(self.lock[0])
        self.set_aside -= nbytes
        self.lock.release()

    # -- calls to the sub-allocator -----------------------------------------------------------------------------------

    cdef int ask(self, Asking* asking, uint64_t nbytes, Region* block, cbool is_set_aside) except -1 nogil:
        """Asks the sub-allocator for a block, without the lock. Returns whether it gave one.

        The bytes are set aside from the limit meanwhile (`is_set_aside`: the caller has done that). Those of a block
        that was given stay set aside until `take_in` counts them.
        """
        cdef int got = 0
        cdef uint64_t received, alignment = max(self.alignment, asking.alignment)
        cdef cbool listed = self.begin_call(nbytes, 0 if is_set_aside else nbytes)
        try:
            # Before the source is asked: a block that comes must have a list to stand in, should it have to go back.
            if not self.keep_room():
                if not asking.without_gil:
                    with gil:
                        raise out_of_host_memory()
            elif asking.without_gil:
                # Counted without a lock: several threads may be inside calls.
                add_up(&self.driver_calls, 1)
                asking.fault = self.native.alloc(self.native.self, alignment, nbytes, &block.ptr, &received)
                got = asking.fault == 0
                # No memory is an answer, and the steps of a miss go on. Any other fault ends them, as it does upstream.
                if asking.fault == BFC_NO_ROOM:
                    asking.fault = 0
                block.end = block.ptr + received if got else 0
            else:
                add_up(&self.driver_calls, 1)
                got = self.ask_in_python(alignment, nbytes, block, asking.in_block)
        finally:
            self.end_call(listed, 0 if got else nbytes)
        # Until `take_in` only the caller knows the block. Its bytes stay set aside, so the limit is not found free. No
        # Python runs in between, so this thread cannot fork, which would forget them.
        asking.asked = nbytes
        return got

    cdef int ask_in_python(self, uint64_t alignment, uint64_t nbytes, Region* block, cbool in_block) except -1 with gil:
        cdef uint64_t received
        # Memory that is to sleep needs addresses that stay when its page goes, which a sub-allocator's block has not.
        source = self.blocks if in_block else self.sub_allocator
        cdef bint got = ask_for_block(source, source.alloc, alignment, nbytes, self.strict,
                                      &block.ptr, &received, self.rejected)
        block.end = block.ptr + received if got else 0
        return got

    cdef Taken take_in(self, Asking* asking, Region* block, uint32_t bin_set, vector[Region]& refused) noexcept nogil:
        """Adds a block that was asked for to the pool. Needs the lock. A block that is not added is put in `refused`,
        to be given back; one that overlaps the pool's memory is not, since it is not ours to give."""
        cdef uint64_t nbytes = block.end - block.ptr
        self.set_aside -= asking.asked
        # A source that hands memory out twice: given back, it would be freed under the block that is in use.
        if self.pool.overlaps_region(block.ptr, nbytes):
            self.on_their_way -= 1
            return OVERLAPS
        # What came counts, and not what was asked for: a source may give more (CC-35).
        if bin_set != NO_LANE and self.pool.add_region(block.ptr, nbytes, bin_set, self.joins_regions):
            self.on_their_way -= 1
            # Requests that fit nowhere look again when this has changed.
            self.changes.add(1)
            asking.changes += 1
            return ADDED
        # It counts against the limit until the source has taken it back.
        self.set_aside += nbytes
        if not try_push_back(refused, block[0]):
            self.keep_unreturned(block[0])
        return REFUSED

    cdef int refuse(self, Region* block, Taken taken, cbool closed) except -1 with gil:
        """Raises why a block was not added."""
        if taken == OVERLAPS:
            raise SubAllocatorError(f"{self.sub_allocator!r}.alloc returned {block.ptr:#x}, {block.end - block.ptr} "
                                    f"bytes, which overlaps a block that it gave before: not used, and not given back")
        if closed:
            raise ClosedError("this allocator was closed while it asked for memory")
        raise out_of_host_memory()

    cdef uint64_t forget(self, vector[Region]& regions) noexcept nogil:
        """Takes regions out of the pool, with the lock held. Their bytes stay set aside until give_back is done."""
        cdef Region region
        cdef uint64_t total = 0
        for region in regions:
            self.pool.remove_region(region)
            total += region.end - region.ptr
        # TensorFlow's garbage collection leaves such frees in its queue, and looks up chunks of memory that has gone.
        forget_queued(self.pool)
        self.set_aside += total
        # Each may have to be kept in `unreturned`, where room for it stays.
        self.on_their_way += regions.size()
        return total

    cdef void take_unreturned(self, vector[Region]& regions) noexcept nogil:
        """Adds the regions that the sub-allocator did not take back, to try again. Needs the lock."""
        cdef Region region
        while self.unreturned.regions.size():
            region = self.unreturned.regions.back()
            # It stays on the list, for the next attempt.
            if not try_push_back(regions, region):
                return
            self.unreturned.regions.pop_back()
            self.unreturned.nbytes -= region.end - region.ptr
            self.on_their_way += 1

    cdef void forget_all(self, vector[Region]& regions) noexcept nogil:
        """Takes every region out of the pool, and what was not returned, without more memory of the host. Needs the
        lock."""
        cdef uint32_t i
        for i in range(<uint32_t>self.pool.bin_sets.size()):
            if not self.pool.bin_sets[i].is_range:      # as those of ranges stay, and count as asleep
                # What sleeps is not in `pool_bytes`, and `forget` takes the bytes of each region off that.
                count_asleep(self.pool, i, False)
        # Into a vector that has room for all of them: close() must not fail for want of host memory.
        self.pool.list_regions(self.unreturned.closing, True)
        self.forget(self.unreturned.closing)
        self.take_unreturned(self.unreturned.closing)
        regions.swap(self.unreturned.closing)

    cdef int give_back(self, vector[Region]& regions, cbool without_gil) except -1 nogil:
        """Returns regions that the pool has forgotten, with no lock held. What cannot be returned is kept, and tried
        again at the next release."""
        cdef Region region
        cdef cbool listed
        if regions.empty():
            return 0
        add_up(&self.driver_calls, regions.size())
        if not without_gil:
            return self.give_back_in_python(regions)
        # Their bytes are set aside since `forget`: a child that is forked in the call finds them in the call.
        listed = self.begin_call(total_size(regions), 0)
        for region in regions:
            # Unmapping takes the GIL. Where there are blocks, the next release with the GIL gives all of these back.
            self.region_returned(region, not self.has_blocks and self.native.free(
                self.native.self, region.ptr, region.end - region.ptr) == 0)
        self.end_call(listed, 0)
        return 0

    cdef int give_back_in_python(self, vector[Region]& regions) except -1 with gil:
        cdef Region region
        cdef size_t failed = 0
        cdef cbool listed = self.begin_call(total_size(regions), 0)
        cdef Deferral deferral
        fault, interrupt = None, None
        # A Ctrl-C between two regions would leave the rest with nobody: the pool has forgotten them.
        defer_handlers(&deferral)
        for region in regions:      # the pool has forgotten them, so nobody else can take one or give it back
            returned = True
            try:
                if interrupt is not None:
                    raise interrupt
                source = self.sub_allocator
                if self.blocks is not None and region.ptr in self.blocks:
                    source = self.blocks
                source.free(region.ptr, region.end - region.ptr)
            except BaseException as error:
                # An exception from another thread cannot be deferred. The rest are kept without a call, to end soon.
                interrupt = interrupt if isinstance(error, Exception) else error
                fault = fault or error
                failed += 1
                returned = False
            self.region_returned(region, returned)
        resume_handlers(&deferral)
        self.end_call(listed, 0)
        if interrupt is not None:
            raise interrupt
        if fault is not None:
            raise SubAllocatorError(f"{self.sub_allocator!r}.free failed for {failed} of {regions.size()} region(s), "
                                    f"first with {fault!r}; close() tries again") from fault
        return 0

    cdef void region_returned(self, Region region, cbool returned) noexcept nogil:
        acquire_lock(self.lock[0])
        cdef Call* call = self.newest_call()
        if call != NULL:    # a child that is forked in the next call goes on counting only what has not gone yet
            call.nbytes -= min(call.nbytes, region.end - region.ptr)
        if returned:
            self.set_aside -= region.end - region.ptr
            self.changes.add(1)
            self.on_their_way -= 1
        else:
            self.keep_unreturned(region)
        self.lock.release()

    cdef cbool keep_room(self) noexcept nogil:
        """Makes room for one more region in the lists below, before it is asked for: a region that the sub-allocator
        does not take back can then be listed, and `close` can list them all, without more memory of the host."""
        acquire_lock(self.lock[0])
        self.on_their_way += 1      # from here on other threads count this region, too, and leave its room free
        cdef size_t regions = self.pool.regions.size() + self.unreturned.regions.size() + self.on_their_way
        cdef cbool kept = try_make_room(self.unreturned.regions, regions) and try_make_room(self.unreturned.closing,
                                                                                            regions)
        self.lock.release()
        return kept

    cdef void keep_unreturned(self, Region region) noexcept nogil:
        """Keeps a region for another try. keep_room() has made the room for it. Needs the lock."""
        if try_push_back(self.unreturned.regions, region):
            self.unreturned.nbytes += region.end - region.ptr
        self.on_their_way -= 1

    cdef void keep_block(self, uint64_t ptr, uint64_t nbytes) noexcept:
        """Keeps a block that was being made, failed, and could not be given back either: for another try. It takes the
        room that `ask` has kept for it."""
        acquire_lock(self.lock[0])
        self.set_aside += nbytes
        self.on_their_way += 1
        self.keep_unreturned(Region(ptr, ptr + nbytes, NO_CHUNK, 0))
        self.lock.release()

    cdef void keep_bytes(self, int64_t nbytes) noexcept nogil:
        """Counts memory that the sub-allocator did not take back against the limit. A negative number: it took so much
        back after all."""
        acquire_lock(self.lock[0])      # `taken` counts the one, and `lasting` the other
        self.unreturned.nbytes += nbytes
        self.set_aside += nbytes
        self.lock.release()

    cdef int offer_rejected_again(self) except -1:
        return offer_again(self.sub_allocator, self.rejected)

    # -- who is inside a call -----------------------------------------------------------------------------------------

    cdef cbool begin_call(self, uint64_t nbytes, uint64_t to_set_aside) noexcept nogil:
        """Lists that this thread calls the sub-allocator, and for how many bytes that are set aside. Returns False if
        the host has no memory for the list."""
        # The call and its bytes are listed together: a child that is forked gives back what it finds here.
        acquire_lock(self.lock[0])
        self.set_aside += to_set_aside
        cdef cbool listed = try_push_back(self.calls, Call(PyThread_get_thread_ident(), nbytes))
        self.lock.release()
        return listed

    cdef Call* newest_call(self) noexcept nogil:
        """This thread's newest call to the sub-allocator; NULL if it could not be listed. Needs the lock."""
        cdef Call* found = NULL
        cdef size_t i
        for i in range(self.calls.size()):
            if self.calls[i].thread == PyThread_get_thread_ident():
                found = &self.calls[i]
        return found

    cdef void end_call(self, cbool listed, uint64_t nbytes) noexcept nogil:
        acquire_lock(self.lock[0])
        self.set_aside -= nbytes
        # A block that came is still on its way, until `take_in` has it.
        self.on_their_way -= nbytes > 0
        # 0 after a success: the last refusal is none of a request that comes later.
        self.refused_bytes.set(nbytes)
        self.calls_ended.add(1)
        if listed:      # looked for again: other threads' calls have come and gone, and the list has moved
            self.calls.erase(self.calls.begin() + (self.newest_call() - self.calls.data()))
        self.lock.release()

    cdef bint is_calling(self) noexcept:
        """Whether any thread is inside a call to the sub-allocator."""
        # Other threads list their calls and take them off.
        acquire_lock(self.lock[0])
        cdef bint found = self.calls.size() > 0
        self.lock.release()
        return found

    cdef cbool holds_bytes_aside(self) noexcept nogil:
        """Whether a thread asks for memory, or gives some back. It may have taken regions out, and not yet called."""
        acquire_lock(self.lock[0])      # `keep_bytes` changes both
        cdef cbool found = self.set_aside > self.unreturned.nbytes
        self.lock.release()
        return found

    cdef bint is_called_here(self) noexcept:
        """Whether this thread is inside a call to the sub-allocator: one that allocates from its own allocator would
        wait for itself."""
        # Other threads list their calls and take them off.
        acquire_lock(self.lock[0])
        # By thread and not by a flag: sub-allocators of several allocators may call each other.
        cdef bint found = self.newest_call() != NULL
        self.lock.release()
        return found

    cdef cbool is_listed(self, unsigned long thread) noexcept nogil:
        """Whether a thread is inside a call to the sub-allocator. Needs the lock."""
        cdef Call call
        for call in self.calls:
            if call.thread == thread:
                return True
        return False

    cdef void forget_other_threads(self) noexcept:
        """Forgets the calls of threads that the interpreter has stopped for good."""
        # The list is read by threads that do not need the interpreter.
        acquire_lock(self.lock[0])
        forget_calls_of_others(self)
        self.lock.release()


# -- a sub-allocator that is written in Python ------------------------------------------------------------------------
#
# Its answers are checked against the contract of `suballocators/base.py`. It is called "the source" here. After it has
# returned, nothing below creates an object: a block must not be lost because the host has no memory.

cdef int ask_for_block(object source, object alloc, uint64_t alignment, uint64_t nbytes, bint strict,
                       uint64_t* address, uint64_t* received, list rejected) except -1:
    """Calls `source.alloc`, or another function of the source with the same contract. Returns whether it gave a block.
    Raises SubAllocatorError for any other answer than a block or None.

    `strict` accepts a block that is smaller than was asked for, as TensorFlow does (TensorFlow's behaviour, CC-36). No
    signal handler runs before this function returns: the caller must call `run_handlers` once the block is in its
    books. `rejected` collects blocks that break the contract and that the source did not take back: see `offer_again`.
    """
    cdef Deferral deferral
    defer_handlers(&deferral)
    try:
        block = alloc(alignment, nbytes)
        if block is None:
            return 0
        read_block(source, block, nbytes, alignment, 1 if strict else nbytes, address, received, rejected)
        return 1
    # Out of memory is an answer: the steps of a miss go on, as after None.
    except MemoryError:
        return 0
    # It has a text of its own, which says what failed.
    except SubAllocatorError:
        raise
    except Exception as error:
        raise SubAllocatorError(f"{source!r}.alloc({alignment}, {nbytes}) raised {error!r}") from error
    finally:
        resume_handlers(&deferral)


cdef int read_block(object source, object block, uint64_t nbytes, uint64_t alignment, uint64_t least,
                    uint64_t* address, uint64_t* received, list rejected) except -1:
    try:
        given_address, given_bytes = block
        given_address, given_bytes = PyNumber_Index(given_address), PyNumber_Index(given_bytes)
    except (TypeError, ValueError):
        raise SubAllocatorError(f"{source!r}.alloc({alignment}, {nbytes}) must return (address, bytes received) or "
                                f"None, not {block!r}") from None
    try:
        address[0], received[0] = given_address, given_bytes
    except OverflowError:
        # Fails the next test, which offers the block back, as any other that breaks the contract.
        address[0] = received[0] = 0
    if (address[0] > 0 and least <= received[0] and address[0] % alignment == 0
            # The end of a region is a key of the pool, and must not wrap.
            and received[0] <= ~<uint64_t>0 - address[0]):
        return 0
    offer_back(source, (given_address, given_bytes), rejected)
    raise SubAllocatorError(
        f"{source!r}.alloc({alignment}, {nbytes}) returned address {given_address:#x} and {given_bytes} bytes: the "
        f"address must be above 0 and a multiple of {alignment}, and the bytes at least what was asked for")


cdef int offer_back(object source, tuple block, list rejected) except -1:
    """Gives back a block that breaks the contract, since it may still be real memory. If the source does not take it,
    it is offered once more when the allocator closes."""
    try:
        source.free(*block)
    except BaseException as error:
        rejected.append(block)
        if not isinstance(error, Exception):
            raise
    return 0


cdef int offer_again(object source, list rejected) except -1:
    """Offers such blocks once more. No error is raised if the source does not take them: the violation was reported."""
    while rejected:
        block = rejected.pop()
        try:
            source.free(*block)
        except Exception:
            pass
    return 0
