"""Frees: at once, from a finaliser, and after streams have finished. Rules (docs/design/threads.md says why):

- no driver call for memory that one stream alone has used;
- fences are created and queried with no lock held;
- a free from a finaliser never waits: where the lock is taken it leaves its handle behind for the next caller.
"""

cimport cython
from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable

from bfc.interpreter._exit cimport exiting
from bfc.interpreter._signals cimport Deferral, defer_handlers, resume_handlers
from bfc._core cimport (
    COUNTED, EXPORTED, IN_USE, INDEXED, LEFT_BEHIND, MARKS, NO_CHUNK, STATE, USED_ELSEWHERE, WAITING,
    ChunkHandle, Pool,
)
from bfc.buffers._arguments cimport address_from, addresses_from, small_int
from bfc.buffers._buffer cimport HOST_STREAM, NO_CONSUMER, Buffer, BufferView
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._fences cimport Fences, Waiting, some_use, some_wait

from bfc.errors import InvalidPointerError, out_of_host_memory

cdef extern from "debug.h":
    const int BFC_DEBUG

VIEWED = "another object holds a view of this memory (an array, a memoryview): delete it first"

cdef str PUT_OFF = "a free that was put off, and that release_free_regions() tries again"


cdef void report_unraisable(object error, object doing) noexcept:
    """Reports an error that cannot be raised to a caller, as Python does for errors in finalisers."""
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable(doing)


cdef int report_faults(list faults) except -1:
    """Reports errors of the device: they do not belong to the call that happens to find them. A Ctrl-C is raised."""
    interrupt = None
    for fault in faults:
        if isinstance(fault, Exception):
            report_unraisable(fault, PUT_OFF)
        else:
            interrupt = fault
    if interrupt is not None:
        raise interrupt
    return 0


cdef ChunkHandle left_behind(Pool pool, ChunkHandle first) noexcept nogil:
    """The next chunk, from this handle on, that is marked as left behind, or NO_CHUNK. Walks through all chunks."""
    cdef ChunkHandle handle
    for handle in range(first, <ChunkHandle>pool.chunk_count):
        if pool.chunks[handle].state & LEFT_BEHIND:
            return handle
    return NO_CHUNK


@cython.no_gc_clear
cdef class Frees(Ledger):
    """How memory comes back to an allocator: a part of `Allocator`."""

    def __cinit__(self, *args, **kwargs):
        self.fences = Fences()

    # -- free ---------------------------------------------------------------------------------------------------------

    def deallocate_raw(self, ptr):
        """Free the allocation at an address.

        Parameters
        ----------
        ptr : int
            An address that `allocate_raw` returned. 0 does nothing.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        BufferError
            If another object holds a view of the memory (an array, a memoryview).
        SubAllocatorError
            If another stream has used the memory, and the device fails when it is asked about it.

        Notes
        -----
        After an error the allocation is still live. Memory that other streams use is reused once they
        have finished with it; a CachingAllocator looks for that at its next allocation.

        Cost: O(log n). No device call for memory that one stream alone has used, otherwise one or two
        for each other stream. Source: `BFCAllocator::DeallocateRaw`, TensorFlow's behaviour, 2.5.
        """
        cdef uint64_t address
        if small_int(ptr, &address) and address and is_quiet(self) and self.free_at_once(address):
            return
        address = address_from(ptr)
        if address == 0:
            self.acquire()
            self.frees.add(1)
            self.lock.release()
            return
        self.free_address(address)

    @cython.final
    cdef int free_at_once(self, uint64_t address) except -1:
        """The fast path of a free: one that needs nothing but the pool. Returns whether it was one."""
        acquire_lock(self.lock)
        cdef bint freed = self.pool.free_plain(address)
        if freed:
            self.frees.add(1)
        self.lock.release()
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()
        return freed

    cdef int free_address(self, uint64_t address) except -1:
        if self.must_look:
            self.freeing(self.chunk_at(address).allocation_id)
        if self.orphans.some():
            self.catch_up()
        self.acquire()
        cdef ChunkHandle handle = self.pool.handle_of(address)
        if handle == NO_CHUNK:
            self.lock.release()
            self.raise_invalid_pointer(address)
        return self.free_locked(handle)

    def deallocate_many(self, ptrs):
        """Free the allocations at many addresses.

        Parameters
        ----------
        ptrs : iterable of int
            Addresses that `allocate_raw` or `allocate_many` returned. An array of 64-bit ints goes
            fastest. 0 does nothing.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at one of them, or one appears twice. None is freed then.
        TypeError
            If one of them is not an int. None is freed then.
        BufferError
            If another object holds a view of the memory of one of them. None is freed then.
        SubAllocatorError
            If another stream has used the memory of one of them, and the device fails when it is asked
            about it. That one and those after it are still live.

        Notes
        -----
        Cost: about 20 ns an address of an array, half of `deallocate_raw` from Python.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.deallocate_many(allocator.allocate_many([256, 512, 1024]))
        """
        cdef vector[uint64_t] addresses
        cdef vector[ChunkHandle] handles
        cdef size_t i = 0
        addresses_from(ptrs, &addresses)
        handles.resize(addresses.size())
        self.check_all_live(addresses, handles)
        if self.orphans.some():
            self.catch_up()
        while i < addresses.size():
            i = self.free_plain(addresses, handles, i)
            if i < addresses.size():
                if addresses[i]:
                    self.free_address(addresses[i])
                i += 1
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()

    cdef int check_all_live(self, const vector[uint64_t]& addresses, vector[ChunkHandle]& handles) except -1:
        """Looks the addresses up. Raises InvalidPointerError or BufferError where one of them could not be freed, or
        appears twice. An address of 0 may, and has no chunk."""
        cdef uint32_t* state
        cdef uint32_t found = 0
        cdef size_t checked = 0, i
        self.acquire()
        while checked < addresses.size():
            handles[checked] = NO_CHUNK
            if addresses[checked]:
                handles[checked] = self.pool.handle_of(addresses[checked])
                if handles[checked] == NO_CHUNK:
                    break
                state = &self.pool.chunks[handles[checked]].state
                found = state[0] & (COUNTED | EXPORTED)
                if found:
                    break
                state[0] |= COUNTED
            checked += 1
        for i in range(checked):
            if handles[i] != NO_CHUNK:
                self.pool.chunks[handles[i]].state &= ~<uint32_t>COUNTED
        self.lock.release()
        if checked == addresses.size():
            return 0
        if found & COUNTED:
            raise InvalidPointerError(f"{addresses[checked]:#x} appears twice in one call")
        if found & EXPORTED:
            raise BufferError(VIEWED)
        self.raise_invalid_pointer(addresses[checked])

    cdef size_t free_plain(self, const vector[uint64_t]& addresses, const vector[ChunkHandle]& handles,
                           size_t i) noexcept:
        """Frees the chunks from the i-th on under one lock. Returns the index of the first that needs more than that.
        Since they were looked up, another thread may have freed them, and a replay, whose chunks are not indexed by
        address, may have taken them."""
        cdef Chunk* chunk
        if self.must_look:
            return i
        self.acquire()
        while i < addresses.size():
            if handles[i] != NO_CHUNK:
                chunk = &self.pool.chunks[handles[i]]
                if chunk.ptr != addresses[i] or chunk.state & ~<uint32_t>MARKS != IN_USE | INDEXED:
                    break
                if not self.pool.free_chunk(handles[i]):
                    break
                self.frees.add(1)
            i += 1
            if i % BETWEEN_OTHERS == 0:
                self.give_way()
        self.lock.release()
        return i

    cdef int freeing(self, int64_t allocation_id) except -1:
        """What a policy does before a free that the user asks for."""
        return 0

    cdef object undo_at(self, uint64_t address):
        """Frees an allocation whose address will not be returned. Returns what `undo` does."""
        self.acquire()
        cdef ChunkHandle handle = self.pool.handle_of(address)
        cdef int64_t allocation_id = self.pool.chunks[handle].allocation_id if handle != NO_CHUNK else -1
        self.lock.release()
        if handle != NO_CHUNK:
            try:
                if self.must_look:
                    self.freeing(allocation_id)
            except MemoryError:
                pass
            return self.undo(handle, allocation_id)

    cdef object undo(self, ChunkHandle handle, int64_t allocation_id):
        """Frees a chunk whose allocation fails after all. Where that fails too, the next call tries again. Returns the
        user's Ctrl-C if it came meanwhile: it is no fault of the device."""
        self.acquire()
        if not self.is_live_locked(handle, allocation_id):
            self.lock.release()
            return None
        interrupt = None
        try:
            self.free_locked(handle)
        except BaseException as error:
            self.leave(&self.orphans, handle, allocation_id)
            interrupt = None if isinstance(error, Exception) else error
        return interrupt

    cdef void leave(self, PutOff[Orphan]* among, ChunkHandle handle, int64_t allocation_id) noexcept:
        """Leaves a free to a later call. If the host has no memory for the list, sets a flag on the chunk instead."""
        cdef Orphan orphan = Orphan(handle, allocation_id)
        if among.add(orphan):
            return
        self.acquire()
        if self.is_live_locked(handle, allocation_id):
            self.mark_left(handle)
        self.lock.release()
        self.orphans.miss()

    cdef void mark_left(self, ChunkHandle handle) noexcept nogil:
        """Sets LEFT_BEHIND on a chunk. The caller holds the lock, and calls the list's miss() afterwards."""
        cdef Chunk* chunk = &self.pool.chunks[handle]
        chunk.state |= LEFT_BEHIND

    cdef void strand(self, ChunkHandle handle) noexcept nogil:
        """Leaves what a free without the GIL cannot do to the next call from Python. Needs the lock."""
        cdef Orphan orphan = Orphan(handle, self.pool.chunks[handle].allocation_id)
        if not self.stranded.add(orphan):
            self.mark_left(handle)
        self.strandings.set(1)

    cdef int free_locked(self, ChunkHandle handle) except -1:
        """Frees a chunk with the lock held, and lets go of the lock."""
        cdef bint freed
        if self.pool.chunks[handle].state & (USED_ELSEWHERE | EXPORTED):
            if self.pool.chunks[handle].state & EXPORTED:
                self.lock.release()
                raise BufferError(VIEWED)
            return self.free_shared(handle)
        self.pool.prefetch_neighbours(handle)
        freed = self.pool.free_chunk(handle)
        self.frees.add(1)
        self.lock.release()
        if not freed:
            raise out_of_host_memory()
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()
        return 0

    cdef bint sync_exported(self, ChunkHandle handle, int64_t allocation_id, int64_t* exports) noexcept:
        """Marks a chunk as viewed or not, by the count of views as read under the lock. Returns whether the chunk is
        live, and awake if it is viewed."""
        self.acquire()
        cdef bint live = self.is_live_locked(handle, allocation_id)
        if live and exports[0] > 0 and self.is_asleep_locked(handle):
            live = False
        elif live and exports[0] > 0:
            self.pool.chunks[handle].state |= EXPORTED
        elif live:
            self.pool.chunks[handle].state &= ~<uint32_t>EXPORTED
        self.lock.release()
        return live

    cdef void last_view_gone(self) noexcept:
        """Closes an allocator that was garbage-collected while views of its memory remained: the last view to go does
        that."""
        if self.is_abandoned and not exiting:
            self.is_abandoned = False
            try:
                self.close()
            except BaseException as error:
                report_unraisable(error, PUT_OFF)

    cdef int free_handle(self, ChunkHandle handle, int64_t allocation_id) except -1:
        if exiting:
            return 0
        if self.must_look:
            self.freeing(allocation_id)
        if self.orphans.some():
            self.catch_up()
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
        if some_use(self.fences) and not self.fence_now(handle, allocation_id):
            return
        if not self.lock.try_acquire():
            self.leave(&self.orphans, handle, allocation_id)
            return
        cdef bint live = self.is_live_locked(handle, allocation_id)
        cdef bint freed = live and self.pool.free_unshared(handle)
        self.frees.add(freed)
        self.lock.release()
        if live and not freed:
            self.leave(&self.orphans, handle, allocation_id)

    cdef bint fence_now(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        """Asks for fences on the streams that use a chunk now, as the streams may be destroyed before the chunk is
        freed. A Ctrl-C that comes meanwhile is raised after the finaliser, which would swallow it."""
        cdef Deferral deferral
        cdef bint marked
        if not self.source_is_python:
            return self.mark_streams(handle, allocation_id)
        defer_handlers(&deferral)
        marked = self.mark_streams(handle, allocation_id)
        resume_handlers(&deferral)
        return marked

    cdef bint mark_streams(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        """Returns False if the device fails: that is reported, and release_free_regions() tries again."""
        try:
            self.fences.mark_users(allocation_id)
        except BaseException as error:
            self.leave(&self.stuck_orphans, handle, allocation_id)
            report_unraisable(error, PUT_OFF)
            return False
        return True

    cdef void consumer_left(self, int64_t allocation_id, uint64_t stream) noexcept:
        """A consumer's stream may be destroyed once it has let go of the memory, long before the memory's free. Where
        it was destroyed earlier, the whole device is waited for."""
        try:
            self.fences.mark_user(allocation_id, stream)
        except BaseException as error:
            if not self.drain():
                self.fences.uses(allocation_id, stream, None)
                report_unraisable(error, PUT_OFF)
            elif not isinstance(error, Exception):
                report_unraisable(error, PUT_OFF)

    cdef bint drain(self) noexcept:
        """Waits until the device has nothing to do. Returns False if it cannot tell."""
        return False

    # -- other streams ------------------------------------------------------------------------------------------------

    def record_stream(self, ptr_or_buffer, stream):
        """Tell the allocator that another stream uses this memory.

        Once freed, the memory is not reused before the work that was queued on that stream at the time
        of the free has finished.

        Parameters
        ----------
        ptr_or_buffer : int or Buffer
            A live allocation: its address, its buffer, or a view of that. One of 0 bytes is ignored.
        stream : int, stream object or None
            The other stream; None is stream 0. The allocator's own stream is ignored. A stream object
            is kept alive until the memory can be reused; the stream of an int must live as long.

        Raises
        ------
        InvalidPointerError
            If no live allocation of this allocator is there.
        TypeError
            If `ptr_or_buffer` is neither an address nor a buffer, or `stream` is not a stream.
        SubAllocatorError
            If `stream` is not an OpenCL queue of this context, where the memory is OpenCL's.

        Notes
        -----
        Cost: O(1), no device call; the free then asks the device about each stream that was recorded.
        """
        cdef uint64_t on = self.stream_of(stream)
        self.is_unordered(on)   # raises if it is not a stream; at the free that would be too late
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
            elsewhere = self.is_foreign(&self.pool.chunks[handle], on)
            if elsewhere:
                self.pool.chunks[handle].state |= USED_ELSEWHERE
        self.lock.release()
        if handle == NO_CHUNK and address:
            self.raise_invalid_pointer(address)
        if handle == NO_CHUNK:
            raise InvalidPointerError("this buffer's memory was freed already")
        if elsewhere:
            self.fences.uses(allocation_id, on, stream)

    cdef bint is_unordered(self, uint64_t stream) except -1:
        """Whether memory freed on a stream may still be in use by work that was queued there before, because the
        stream runs its work in any order. Raises SubAllocatorError if it is not a stream."""
        return False

    cdef cbool is_foreign(self, Chunk* chunk, uint64_t stream) noexcept nogil:
        """Whether a free of the chunk has to wait for this stream."""
        if self.by_stream:
            return stream != chunk.stream or self.is_of_thread(stream)
        # a chunk that was allocated for another stream may be used on the home stream only after this call
        return stream != self.home_stream or chunk.stream != self.home_stream

    cdef Buffer own_buffer(self, Buffer buffer):
        """The buffer itself, or the one under a view; InvalidPointerError where it is another allocator's."""
        while isinstance(buffer, BufferView) and (<BufferView>buffer).base is not None:
            buffer = (<BufferView>buffer).base
        if buffer.owner is not self or (buffer.allocation_id == 0 and buffer.nbytes):
            raise InvalidPointerError("this buffer was freed, or comes from another allocator")
        return buffer

    cdef uint64_t hand_to_stream(self, ChunkHandle handle, int64_t allocation_id, uint64_t made_on, consumer) except? 0:
        cdef uint64_t on = self.stream_of(consumer)
        cdef bint live
        if on == made_on and not self.is_of_thread(on):
            return NO_CONSUMER
        self.acquire()
        live = self.is_live_locked(handle, allocation_id)
        if live:
            self.pool.chunks[handle].state |= USED_ELSEWHERE
        self.lock.release()
        if live and made_on != HOST_STREAM and self.sub_allocator.asynchronous:
            self.sub_allocator.order(made_on, on)
        return on if live else NO_CONSUMER

    cdef int free_shared(self, ChunkHandle handle) except -1:
        """Frees a chunk that other streams use: at once if they have finished with it, or else when they have.
        Releases the lock. If the device fails, the chunk stays as it was, and can be freed again."""
        cdef int64_t allocation_id = self.pool.chunks[handle].allocation_id
        cdef bint waits
        self.pool.stop_using(handle)
        self.lock.release()
        try:
            key = allocation_id     # the host may have no memory for it later
            waits = self.put_behind_users(handle, key)
        except BaseException:
            self.acquire()
            if self.is_waiting(handle):
                self.pool.use_again(handle, allocation_id)
            self.lock.release()
            raise
        self.fences.forget(key)
        return 0 if waits else self.finish_waiting(handle)

    cdef bint put_behind_users(self, ChunkHandle handle, allocation_id) except -1:
        """Lets a freed chunk wait for the streams that use it. Whether there are any that have not finished."""
        fences = self.fences.unfinished(allocation_id)
        self.fences.wait_behind(handle, fences)
        return len(fences) > 0

    cdef bint is_waiting(self, ChunkHandle handle) noexcept:
        """Whether a chunk still waits. While the device was asked, without the lock, the allocator may have closed."""
        return not self.is_closed and self.pool.chunks[handle].state & STATE == WAITING

    cdef int finish_waiting(self, ChunkHandle handle) except -1:
        cdef bint freed = True
        self.acquire()
        if self.is_waiting(handle):
            self.fenced_frees += self.pool.chunks[handle].stream != self.home_stream
            freed = self.pool.free_chunk(handle)
            if not freed:
                self.mark_left(handle)
        self.frees.add(1)
        self.lock.release()
        if not freed:
            self.orphans.miss()
        return 0

    cdef int settle(self, bint again=False, bint wait=False) except -1:
        """Carries out the frees that finalisers left behind, and those that waited for streams which have finished.

        `wait` waits for these streams. If the device fails for a chunk, the chunk is set aside as stuck and the error
        reported like that of a finaliser, as it does not belong to the caller. `again` tries stuck chunks once more.
        """
        cdef Waiting done
        faults = []
        if again:
            self.try_stuck_again()
        self.free_put_off(faults)
        for stream in sorted(self.fences.queues):
            done = self.fences.next_done(stream, faults, wait)
            while done is not None:     # keeps the fence until the chunk is free: dropping it may run Python
                self.finish_waiting(done.late.handle)
                done = self.fences.next_done(stream, faults, wait)
        return report_faults(faults)

    cdef int try_stuck_again(self) except -1:
        cdef vector[Orphan] left
        cdef Orphan orphan
        self.stuck_orphans.take(left)
        for orphan in left:
            self.leave(&self.orphans, orphan.handle, orphan.allocation_id)
        return self.fences.try_stuck_again()

    cdef int catch_up(self) except -1:
        if self.orphans.some() or some_wait(self.fences) or self.strandings.get():
            self.settle()
        return 0

    cdef int free_put_off(self, list faults) except -1:
        """Frees what finalisers, and callers without the GIL, left behind."""
        self.free_stranded()
        self.free_orphans(faults)
        return 0

    cdef int free_stranded(self) except -1:
        """Carries out the frees that a caller without the GIL could not, because the device was not idle, or because
        the chunk's streams are noted in a dictionary."""
        cdef vector[Orphan] left
        cdef size_t i = 0
        if not self.strandings.get():
            return 0
        self.acquire()
        cdef bint missed = self.stranded.take(left)
        self.strandings.set(0)
        self.lock.release()
        try:
            while i < left.size():
                self.free_later(left[i])
                i += 1
            if missed:
                self.unstrand_left()
                missed = False
        finally:
            self.acquire()
            while i < left.size():
                if self.is_live_locked(left[i].handle, left[i].allocation_id):
                    self.strand(left[i].handle)
                i += 1
            if missed:
                self.stranded.miss()
                self.strandings.set(1)
            self.lock.release()
        return 0

    cdef int free_later(self, Orphan orphan) except -1:
        self.acquire()
        cdef bint live = self.is_live_locked(orphan.handle, orphan.allocation_id)
        if live:
            self.pool.chunks[orphan.handle].state |= USED_ELSEWHERE
        self.lock.release()
        if not live:
            return self.fences.forget(orphan.allocation_id)
        self.fences.uses(orphan.allocation_id, self.home_stream, None)
        self.leave(&self.orphans, orphan.handle, orphan.allocation_id)
        return 0

    cdef int unstrand_left(self) except -1:
        """The same for chunks that are flagged because the list had no room for them. Chunks that finalisers left have
        the same flag, so they wait for the home stream too, which does no harm."""
        cdef ChunkHandle handle = 0
        cdef int64_t allocation_id
        while True:
            self.acquire()
            handle = left_behind(self.pool, handle)
            allocation_id = self.pool.chunks[handle].allocation_id if handle != NO_CHUNK else -1
            if allocation_id > 0:
                self.pool.chunks[handle].state |= USED_ELSEWHERE
            self.lock.release()
            if handle == NO_CHUNK:
                self.orphans.miss()
                return 0
            if allocation_id > 0:
                self.fences.uses(allocation_id, self.home_stream, None)
            handle += 1

    cdef int free_orphans(self, list faults) except -1:
        cdef vector[Orphan] left
        cdef size_t i = 0
        cdef bint missed = self.orphans.take(left)
        try:
            while i < left.size():
                i += 1
                self.free_orphan(left[i - 1], faults)
            if missed:
                self.free_left(faults)
                missed = False
        finally:
            while i < left.size():
                self.leave(&self.orphans, left[i].handle, left[i].allocation_id)
                i += 1
            if missed:
                self.orphans.miss()
        return 0

    cdef int free_orphan(self, Orphan orphan, list faults) except -1:
        self.acquire()
        if not self.is_live_locked(orphan.handle, orphan.allocation_id):
            self.lock.release()
            return 0
        try:
            self.free_locked(orphan.handle)
        except BaseException as error:
            if isinstance(error, Exception):
                self.leave(&self.stuck_orphans, orphan.handle, orphan.allocation_id)
            else:
                self.leave(&self.orphans, orphan.handle, orphan.allocation_id)
            faults.append(error)
        return 0

    cdef int free_left(self, list faults) except -1:
        """Frees the chunks that are flagged because the list had no room for them."""
        cdef ChunkHandle handle = 0
        cdef Orphan orphan
        cdef bint waits
        while True:
            self.acquire()
            handle = left_behind(self.pool, handle)
            if handle != NO_CHUNK:
                self.pool.chunks[handle].state &= ~<uint32_t>LEFT_BEHIND
                waits = self.pool.chunks[handle].state & STATE == WAITING
                orphan = Orphan(handle, self.pool.chunks[handle].allocation_id)
            self.lock.release()
            if handle == NO_CHUNK:
                return 0
            if waits:
                self.finish_waiting(handle)
            else:
                self.free_orphan(orphan, faults)
            handle += 1

    cdef int wait_for_streams(self) except -1:
        """Waits until other streams have finished with all that was freed. Call it without the lock."""
        self.settle()   # the fences of a free from a finaliser may not have been made yet
        self.fences.wait_for_all()
        return self.settle(again=True)

    cdef int forget_frees(self) except -1:
        """Drops all frees that wait: the allocator has closed, and has given their memory back."""
        cdef vector[Orphan] nothing
        self.orphans.take(nothing)
        nothing.clear()
        self.stuck_orphans.take(nothing)
        return self.fences.clear()
