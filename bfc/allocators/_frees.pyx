"""Frees: at once, from a finaliser, and after streams have finished. Rules (docs/design/threads.md says why):

- no driver call for memory that one stream alone has used;
- fences are created and queried with no lock held;
- a free from a finaliser never waits: where the lock is taken it leaves its handle behind for the next caller.
"""

cimport cython
from cpython.exc cimport PyErr_SetObject, PyErr_WriteUnraisable
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_store
from bfc.interpreter._process cimport Deferral, defer_handlers, resume_handlers
from bfc._core cimport (
    COUNTED, DEVICE_FAILED, EXPORTED, HOST_MEMORY_GONE, INDEXED, IN_USE, LOCK_TAKEN, MARKS, NOT_IDLE, NO_CHUNK, PLANNED,
    STATE, USED_ELSEWHERE, WAITING, Chunk, ChunkHandle, Lane, PendingFree, Pool, Reasons,
)
from bfc.allocators._lock cimport BETWEEN_OTHERS, Lock, acquire_lock, let_others_on
from bfc.allocators._reasons cimport EVENTS_WAIT, FREES_DEFERRED, FREES_PENDING, FREES_WAIT, SOME_WAIT
from bfc.allocators._reading cimport is_live_in, raise_invalid_pointer
from bfc.allocators._source cimport Source
from bfc.allocators._fences cimport (
    EVENT_MARK, TURN_OF_PYTHON, YOUR_TURN, DeferredFree, Fences, TakenMark, Turn, some_wait,
)

from bfc.errors import InvalidPointerError, out_of_host_memory

cdef extern from "pending_frees.hpp":
    pass

cdef extern from "source.h":
    int BFC_NOT_REACHED

VIEWED = "another object holds a view of this memory (an array, a memoryview): delete it first"

PUT_OFF = "a free that was put off, and that release_free_regions() tries again"

cdef enum:
    ENTRIES_TAKEN = 256         # pending frees that are made before the list is looked at again
    STREAMS_REMEMBERED = 1024


cdef void report_unraisable(object error, object doing) noexcept:
    """Reports an error that cannot be raised to a caller, as Python does for errors in finalisers."""
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable(doing)


cdef int report_faults(list faults, object doing) except -1:
    """Reports errors of the device: they do not belong to the call that happens to find them. A Ctrl-C is raised."""
    interrupt = None
    for fault in faults:
        if isinstance(fault, Exception):
            report_unraisable(fault, doing)
        else:
            interrupt = fault
    if interrupt is not None:
        raise interrupt
    return 0


# In a garbage cycle buffers may be finalised after their allocator, so the collector must leave its parts in place.
@cython.final
@cython.no_gc_clear
cdef class Frees:
    """How memory comes back to an allocator: a part of `Allocator`."""

    cdef int attach(self, Lock* lock, Pool pool, Source source, Fences fences, Reasons* reasons,
                    bint* is_closed) except -1:
        self.lock = lock
        self.pool = pool
        self.source = source
        self.fences = fences
        self.reasons = fences.reasons = reasons
        fences.lock = lock
        fences.queues.attach(reasons, FREES_WAIT, EVENTS_WAIT)
        self.is_closed = is_closed
        pool.pending.attach(reasons, FREES_PENDING)
        return 0

    # -- a free --------------------------------------------------------------------------------------------------------

    cdef int free_locked(self, ChunkHandle handle) except -1:
        """Frees a chunk with the lock held, and lets go of the lock."""
        cdef bint freed
        # One test for what is rare; a plain free goes past both.
        if self.pool.chunks[handle].state & (USED_ELSEWHERE | EXPORTED):
            if self.pool.chunks[handle].state & EXPORTED:
                self.lock.release()
                raise BufferError(VIEWED)
            return self.free_shared(handle)
        # The merge reads both neighbours' records, which a program seldom has in its cache.
        self.pool.prefetch_neighbours(handle)
        freed = self.pool.free_chunk(handle)
        self.count.add(1)
        self.lock.release()
        if not freed:
            raise out_of_host_memory()
        return 0

    cdef int free_shared(self, ChunkHandle handle) except -1:
        """Frees a chunk that other streams use: at once if they have finished with it, or else when they have.
        Releases the lock. If the device fails, the chunk stays as it was, and can be freed again."""
        cdef int64_t allocation_id = self.pool.chunks[handle].allocation_id
        cdef bint waits
        # Under the lock, and before Python makes fences: from here on a second free of the chunk is an error.
        self.pool.stop_using(handle)
        self.lock.release()
        try:
            key = allocation_id     # the host may have no memory for it later
            self.fences.adopt(allocation_id)
            waits = self.put_behind_users(handle, key)
        # A Ctrl-C while fences are made: the program can free it again, and no fence has been forgotten.
        except BaseException:
            self.use_again(handle, allocation_id)
            raise
        # Only now: had it been interrupted before, the next free would have found no users.
        self.fences.forget(key)
        return 0 if waits else self.finish_waiting(handle)

    cdef void use_again(self, ChunkHandle handle, int64_t allocation_id) noexcept nogil:
        """A chunk that was to wait stays as it was, and can be freed again."""
        # Another thread may have finished with the chunk, or closed the allocator.
        acquire_lock(self.lock[0])
        if self.is_waiting(handle):
            self.pool.use_again(handle, allocation_id)
        self.lock.release()

    cdef bint put_behind_users(self, ChunkHandle handle, allocation_id) except -1:
        """Lets a freed chunk wait for the streams that use it. Whether there are any that have not finished."""
        acquire_lock(self.lock[0])
        cdef Lane lane = self.pool.bin_sets[self.pool.chunks[handle].bin_set].lane
        # streams may share a lane where PyTorch's counts are not kept
        cdef uint64_t made_on = lane.stream if self.pool.books.usage != NULL else self.pool.chunks[handle].stream
        self.lock.release()
        # First: in a capture the driver refuses to record an event that could be asked later.
        if self.fences.defers(allocation_id, made_on):
            self.fences.defer(handle, allocation_id, made_on, (lane.pool[0], lane.pool[1]))
            return True
        fences = self.fences.unfinished(allocation_id)
        self.fences.wait_behind(handle, fences)
        return len(fences) > 0

    cdef bint is_waiting(self, ChunkHandle handle) noexcept nogil:
        """Whether a chunk still waits. While the device was asked, without the lock, the allocator may have closed."""
        return not self.is_closed[0] and self.pool.chunks[handle].state & STATE == WAITING

    cdef int finish_waiting(self, ChunkHandle handle) except -1:
        """Frees a chunk that no stream uses any more."""
        # Another thread may have found that the streams are done, and freed it already.
        acquire_lock(self.lock[0])
        self.finish_locked(handle)
        self.lock.release()
        return 0

    cdef void finish_locked(self, ChunkHandle handle) noexcept nogil:
        if self.is_waiting(handle):
            # Memory of another stream leaves no work on the home stream, so nobody need wait for that again.
            self.fenced += self.pool.chunks[handle].stream != self.home_stream
            if not self.pool.free_chunk(handle):
                self.leave(handle, -1, HOST_MEMORY_GONE)
        self.count.add(1)

    cdef object undo(self, ChunkHandle handle, int64_t allocation_id):
        """Frees a chunk whose allocation fails after all. Where that fails too, the next call tries again. Returns the
        user's Ctrl-C if it came meanwhile: it is no fault of the device."""
        acquire_lock(self.lock[0])      # `free_locked` releases it
        if not is_live_in(self.pool, handle, allocation_id):
            self.lock.release()
            return None
        interrupt = None
        try:
            self.free_locked(handle)
        except BaseException as error:
            self.leave(handle, allocation_id, LOCK_TAKEN)
            interrupt = None if isinstance(error, Exception) else error
        return interrupt

    cdef void leave(self, ChunkHandle handle, int64_t allocation_id, uint32_t reason) noexcept nogil:
        """Leaves a free to a later call. The caller holds the GIL, or else the lock."""
        self.pool.pending.add(handle, allocation_id, reason)

    # -- many at once --------------------------------------------------------------------------------------------------

    cdef int look_up_all(self, const vector[uint64_t]& addresses, vector[ChunkHandle]& handles) except -1:
        """Looks the addresses up. Raises InvalidPointerError or BufferError where one of them could not be freed, or
        appears twice. An address of 0 may, and has no chunk."""
        cdef uint32_t* state
        cdef uint32_t found = 0
        cdef size_t checked = 0, i
        acquire_lock(self.lock[0])      # until the marks are gone again: another thread's call would meet them
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
                # A mark in the chunk finds an address that appears twice without a set, which would need memory under
                # the lock.
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
        raise_invalid_pointer(self.pool, self.lock[0], addresses[checked])

    cdef size_t free_many(self, const vector[uint64_t]& addresses, const vector[ChunkHandle]& handles,
                          size_t i) noexcept:
        """Frees the chunks from the i-th on under one lock. Returns the index of the first that needs more than that.
        Since they were looked up, another thread may have freed them, and a replay, whose chunks are not indexed by
        address, may have taken them."""
        cdef Chunk* chunk
        acquire_lock(self.lock[0])
        while i < addresses.size():
            if handles[i] != NO_CHUNK:
                chunk = &self.pool.chunks[handles[i]]
                # Looked at again: the lock was free since the look-up, so the chunk may be another one, or have a user
                # by now.
                if chunk.ptr != addresses[i] or chunk.state & ~<uint32_t>(MARKS | PLANNED) != IN_USE | INDEXED:
                    break
                if not self.pool.free_chunk(handles[i]):
                    break
                self.count.add(1)
            i += 1
            # So many take some 10 us: a list of a million would keep other threads waiting throughout.
            if i % BETWEEN_OTHERS == 0:
                let_others_on(self.lock[0])
        self.lock.release()
        return i

    # -- streams -------------------------------------------------------------------------------------------------------

    cdef bint fence_now(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        """Asks for fences on the streams that use a chunk now, as the streams may be destroyed before the chunk is
        freed. A Ctrl-C that comes meanwhile is raised after the finaliser, which would swallow it."""
        cdef Deferral deferral
        cdef bint marked
        if self.source.native != NULL:      # no signal handler runs in its calls
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
            # Left to another call: a finaliser can raise to nobody, and a stream may still use the memory.
            self.leave(handle, allocation_id, DEVICE_FAILED)
            report_unraisable(error, PUT_OFF)
            return False
        return True

    cdef void consumer_left(self, int64_t allocation_id, uint64_t stream) noexcept:
        """A consumer's stream may be destroyed once it has let go of the memory, long before the memory's free. Where
        it was destroyed earlier, the whole device is waited for."""
        try:
            self.fences.mark_user(allocation_id, stream)
        except BaseException as error:
            if not self.synchronize():
                self.fences.uses(allocation_id, stream, None)
                report_unraisable(error, PUT_OFF)
            elif not isinstance(error, Exception):
                report_unraisable(error, PUT_OFF)

    cdef bint synchronize(self) noexcept:
        """Waits until the device has nothing to do. Returns False if it cannot tell, as while a graph is captured."""
        cdef int result = -1
        # A context that is synchronised while a stream captures spoils the capture.
        if self.source.native != NULL and not self.fences.capture_is_marked():
            with nogil:
                result = self.source.native.synchronize(self.source.native.self)
        return result == 0

    cdef cbool must_order(self, uint64_t stream_id, uint64_t* home_frees) noexcept nogil:
        """Whether memory was freed on the home stream since another stream was last made to wait for it."""
        # The count of frees and what the stream has waited for belong together.
        acquire_lock(self.lock[0])
        home_frees[0] = self.count.get() - self.fenced
        cdef uint64_t known = self.ordered[stream_id] if self.ordered.count(stream_id) else 0
        self.lock.release()
        return known != home_frees[0]

    cdef void was_ordered(self, uint64_t stream_id, uint64_t home_frees) noexcept nogil:
        """Remembers up to which free a stream has waited for the home stream. If that cannot be remembered (too many
        streams, no host memory), the stream waits once more than it has to."""
        # The map is shared by all threads that leave the home stream.
        acquire_lock(self.lock[0])
        # Nobody tells us of streams that are gone, so all are forgotten: each one then waits once more.
        if self.ordered.size() >= STREAMS_REMEMBERED:
            self.ordered.clear()
        try_store(self.ordered, stream_id, home_frees)
        self.lock.release()

    # -- frees that are due --------------------------------------------------------------------------------------------

    cdef int drain(self, int how) except -1:
        """Makes the frees that are due: those that were left to a later call, and of those that wait for streams the
        ones that have waited long enough.

        If the device fails for a chunk, the chunk is set aside and the error reported like that of a finaliser, as it
        does not belong to the caller. PyTorch's policy asks its fences at an allocation only, unless a scope of a
        private pool is open (PyTorch's behaviour, 0.3 and 2.12). While a capture is marked, so does TensorFlow's.
        """
        cdef bint asks
        cdef list faults
        cdef bint is_due = self.reasons.has(FREES_PENDING | FREES_DEFERRED | SOME_WAIT)
        # Nearly every call ends here. The other bits ask for what no reason shows, such as frees that the device failed
        # for.
        if not how & ~(AT_ALLOCATION | IN_CAPTURE) and not is_due:
            return 0
        faults = []
        asks = how & QUERY or self.fences.asks_at_once() or (how & AT_ALLOCATION and not self.fences.scopes_defer())
        asks = asks and not how & IN_CAPTURE
        if how & RECORD:
            self.record_deferred(True, None, faults)
        if how & AGAIN:
            self.pool.pending.try_failed_again()
            self.fences.try_stuck_again()
        # Frees of finalisers come before the fences are asked: they may have marks among those.
        self.free_pending(faults)
        # PyTorch's process_events turns deferred blocks into events before it asks any.
        if asks and how & AT_ALLOCATION and self.reasons.has(FREES_DEFERRED):
            self.record_deferred(False, None, faults)
        if asks:
            self.ask_fences(how & WAIT, faults)
        return report_faults(faults, PUT_OFF)

    cdef int free_pending(self, list faults) except -1:
        """Makes the frees that were left to a later call: as many as there are now."""
        cdef PendingFree[ENTRIES_TAKEN] entries
        # As many as there were: one that fails is entered again, and would be tried for ever.
        cdef size_t left = self.pool.pending.due(), taken = 0, i = 0
        while left > 0:
            taken = self.pool.pending.take(entries, min(left, <size_t>ENTRIES_TAKEN))
            if taken == 0:
                break       # another thread has made them
            left -= taken
            i = 0
            try:
                while i < taken:
                    i += 1
                    self.free_entry(&entries[i - 1], faults)
            finally:
                # After a Ctrl-C the rest of what was taken goes back on the list.
                while i < taken:
                    self.leave(entries[i].handle, entries[i].allocation_id, entries[i].reason)
                    i += 1
        return 0

    cdef int free_entry(self, PendingFree* entry, list faults) except -1:
        if entry.reason == HOST_MEMORY_GONE:
            return self.finish_waiting(entry.handle)
        # Left by a thread without the GIL, which could neither wait for the device nor make a fence.
        if entry.reason == NOT_IDLE:
            self.wait_for_home(entry)
        acquire_lock(self.lock[0])      # `free_locked` releases it
        # Freed by its address meanwhile: the free was made, if by another name.
        if not is_live_in(self.pool, entry.handle, entry.allocation_id):
            self.lock.release()
            return 0
        try:
            self.free_locked(entry.handle)
        except BaseException as error:
            self.leave(entry.handle, entry.allocation_id, DEVICE_FAILED if isinstance(error, Exception) else LOCK_TAKEN)
            faults.append(error)
        return 0

    cdef int wait_for_home(self, PendingFree* entry) except -1:
        """Lets a free that came without the GIL wait for the home stream, for the one that it named, and for those that
        were noted without the GIL: the device was not idle then, or the chunk's streams are noted in a dictionary."""
        # Whether it lives is asked with the mark, since its address can be freed by another thread.
        acquire_lock(self.lock[0])
        cdef bint live = is_live_in(self.pool, entry.handle, entry.allocation_id)
        cdef uint64_t freed_on = self.home_stream
        if self.pool.books.usage == NULL:
            freed_on = self.pool.chunks[entry.handle].stream
        if live:
            self.pool.chunks[entry.handle].state |= USED_ELSEWHERE
        else:
            self.fences.noted.drop(entry.allocation_id)
        self.lock.release()
        try:
            if not live:
                return self.fences.forget(entry.allocation_id)
            self.fences.adopt(entry.allocation_id)
            self.fences.uses(entry.allocation_id, self.home_stream, None)
            if freed_on != self.home_stream:
                self.fences.uses(entry.allocation_id, freed_on, None)
        except BaseException:
            self.leave(entry.handle, entry.allocation_id, NOT_IDLE)
            raise
        return 0

    cdef int record_deferred_of(self, tuple pool) except -1:
        """Asks for the fences of what was freed in the capture of a pool, which has ended."""
        cdef list faults = []
        self.record_deferred(False, pool, faults)
        return report_faults(faults, PUT_OFF)

    cdef int record_deferred(self, bint again, tuple only, list faults) except -1:
        """Asks for the fences of what was freed in a scope."""
        cdef vector[ChunkHandle] done
        cdef ChunkHandle handle
        try:
            self.fences.record_deferred(again, only, done, faults)
        finally:
            # Also after an error: their entries have left the queue, so nobody else would free them.
            for handle in done:
                self.finish_waiting(handle)
        return 0

    cdef int free_safe_in_capture(self, uint64_t stream) except -1:
        """Frees what the structure of a graph proves safe for the next work of a capturing stream (PyTorch's behaviour,
        2.15)."""
        cdef DeferredFree entry
        if self.reasons.has(FREES_DEFERRED):
            for entry in self.fences.safe_in_capture(stream):
                self.finish_waiting(entry.handle)
        return 0

    cdef int ask_fences(self, bint wait, list faults) except -1:
        """Frees what the streams have finished with; `wait` waits for them."""
        cdef TakenMark reached
        cdef uint64_t stream
        cdef bint more
        if not some_wait(self.fences):
            return 0
        more = self.fences.next_stream(True, &stream)
        while more:
            while self.fences.next_reached(stream, faults, wait, &reached):
                self.finish_mark(&reached)
            more = self.fences.next_stream(False, &stream)
        return 0

    cdef void finish_mark(self, TakenMark* taken) noexcept nogil:
        """Takes a mark that its stream has reached out of its queue, and frees its chunk if that waits for nothing
        more: in one go, so that a thread which finds that nothing waits finds the memory free."""
        # A thread that finds no mark any more finds the memory free.
        acquire_lock(self.lock[0])
        if self.fences.queues.passed(taken[0]):
            self.finish_locked(taken.handle)
        self.lock.release()
        self.fences.drop_mark(&taken.mark)      # not before the chunk is free: this may run Python

    cdef cbool ask_events(self) noexcept nogil:
        """Frees what the streams have finished with, as an allocation does, without the GIL. False: that needs the GIL,
        since a capture is marked, a fence is an object of Python, or the device fails."""
        cdef uint64_t stream
        cdef cbool more
        if self.fences.scopes_defer():
            return True     # as with the GIL: nobody asks in a scope
        # Whether the request comes in a capture is for Python to find out: then no event is asked.
        if self.fences.capture_is_marked():
            return False
        more = self.fences.next_stream(True, &stream)
        while more:
            if not self.ask_events_of(stream):
                return False
            more = self.fences.next_stream(False, &stream)
        return True

    cdef cbool ask_events_of(self, uint64_t stream) noexcept nogil:
        cdef TakenMark taken
        cdef Turn turn
        cdef int result
        while True:
            turn = self.fences.take_first(stream, False, &taken)
            if turn != YOUR_TURN:
                return turn != TURN_OF_PYTHON
            result = 0
            if taken.mark.kind == EVENT_MARK:
                result = self.fences.native.reached(self.fences.native.self, &taken.mark.what, False)
            if result != 0:
                # It stays first: a stream reaches its marks in their order, so those behind it need not be asked.
                self.fences.put_back(&taken)
                return result == BFC_NOT_REACHED
            self.finish_mark(&taken)

    cdef int wait_for_streams(self) except -1:
        """Waits until other streams have finished with all that was freed. Call it without the lock."""
        self.drain(RECORD | QUERY)      # the fences of a free from a finaliser may not have been made yet
        # Errors are raised: whoever waits for memory must not take what streams may still use.
        self.fences.wait_for_all(None)
        return self.drain(QUERY | AGAIN)

    cdef int forget(self) except -1:
        """Drops all frees that wait: the allocator has closed, and has given their memory back."""
        self.pool.pending.clear()
        return self.fences.clear()
