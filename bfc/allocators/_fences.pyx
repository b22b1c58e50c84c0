"""Fences: marks in the queues of other streams, and what was freed and waits behind them. Captures of graphs: which are
marked, and which pool a stream that captures takes its memory from.

Fences are created and queried with no lock held: the device may call back, and another thread may free meanwhile.
"""

import time
from collections import deque

cimport cython
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_make_room
from bfc.interpreter._process cimport era, is_finalizing, survivor
from bfc._core cimport ChunkHandle, Pool
from bfc.drivers.cuda._driver cimport CUresult, failure
from bfc.drivers.cuda._device cimport EventFence
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._private_pools cimport (
    ONE_CAPTURE, PoolId, PoolUses, PrivatePools, Scope, default_pool, id_of, name_of, this_thread,
)
from bfc.allocators._reasons cimport FREES_DEFERRED
from bfc.buffers._scopes import current_stream

from bfc.errors import out_of_host_memory
from bfc.streams import stream_handle

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

_POLL_SECONDS = 0.001

cdef extern from "source.h":
    int BFC_NOT_REACHED

cdef enum:                  # what became of a mark that was asked
    _NOT_REACHED            # it stays
    _REACHED                # whoever asked takes it out of its queue
    _SET_ASIDE              # the device failed for it

cdef enum:
    LEGACY_STREAM = 1       # handles up to this one name the default stream that waits for others


class _Over:
    """The fence of a stream that had nothing queued."""

    def done(self):
        return True

    def wait(self):
        pass


OVER = _Over()


cdef int drop_done(list fences) except -1:
    """Drops the leading fences that are done, so that memory that is exported again and again does not accumulate them.
    Another thread may do the same meanwhile."""
    while fences:
        oldest = fences[0]
        if not oldest[1].done():
            return 0
        # To ask a fence may have let another thread in.
        if fences and fences[0] is oldest:
            del fences[0]
    return 0


@cython.final
@cython.no_gc_clear
cdef class DeferredFree:
    """A chunk that was freed in a scope, and the streams that use it."""


# In a garbage cycle a buffer may be finalised after its allocator: the collector must leave the dictionaries in place.
@cython.no_gc_clear
cdef class FenceQueues:
    """Which streams use memory, and what was freed and waits for them: what allocators of all kinds of memory share."""

    def __cinit__(self):
        self.users = {}
        self.marked = {}
        self.era_seen.set(era())

    def __dealloc__(self):
        self.lock = NULL    # the allocator may be gone
        # The bits that it sets are the allocator's as well.
        self.queues.attach(NULL, 0, 0)
        self.drop_all_marks()

    # -- who uses memory -----------------------------------------------------------------------------------------------

    cdef int uses(self, int64_t allocation_id, object stream, object passed) except -1:
        """Notes that a stream uses an allocation, and keeps what the user passed for the stream alive meanwhile."""
        # By id and not by address: a later owner of the address must not wait for these streams.
        self.users.setdefault(allocation_id, {})[stream] = passed
        return 0

    cdef int forget(self, allocation_id) except -1:
        self.users.pop(allocation_id, None)
        self.marked.pop(allocation_id, None)
        return 0

    cdef int clear(self) except -1:
        """Forgets all uses and waiting frees: the allocator has closed, and its memory has gone back."""
        self.users.clear()
        self.marked.clear()
        self.drop_all_marks()
        return 0

    # -- marks in the queues of streams --------------------------------------------------------------------------------

    cdef void enter(self) noexcept nogil:
        if self.lock != NULL:
            # Whoever changes these lists holds the pool's lock, if they belong to a pool at all.
            acquire_lock(self.lock[0])

    cdef void leave(self) noexcept nogil:
        if self.lock != NULL:
            self.lock.release()

    cdef int wait_behind(self, ChunkHandle handle, list fences) except -1:
        """Makes a freed chunk wait for fences: for all of them, or for none if the host has no memory."""
        cdef vector[Mark] marks
        cdef bint added
        cdef size_t i
        if not fences:
            return 0
        # First: a mark that is made owns its event, and there must be a place for it.
        if not try_make_room(marks, <size_t>len(fences)):
            raise out_of_host_memory()
        for stream, fence in fences:
            marks.push_back(self.mark_from(stream, fence))
        self.enter()
        added = self.queues.add(handle, marks)
        self.leave()
        if added:
            return 0
        for i in range(marks.size()):       # the fences are as before
            if marks[i].kind == EVENT_MARK:
                # The caller still has the fences, and waits for them another time.
                (<EventFence>fences[i][1]).event = marks[i].what
            else:
                self.drop_mark(&marks[i])
        raise out_of_host_memory()

    cdef Mark mark_from(self, stream, fence) noexcept:
        """The mark in a queue that a fence becomes. An event of the native source needs no object around it."""
        cdef Mark mark = Mark(0 if stream is None else stream, NULL, PASSED_MARK)
        # Only of the source whose functions the queue will call: an event belongs to one context.
        if type(fence) is EventFence and self.native != NULL and <void*>(<EventFence>fence).memory == self.native.self:
            mark.what = (<EventFence>fence).event
            # The mark owns it now: the fence must not destroy it when it goes.
            (<EventFence>fence).event = NULL
            mark.kind = EVENT_MARK if mark.what != NULL else PASSED_MARK
        elif fence is not OVER:
            Py_INCREF(fence)
            mark.what, mark.kind = <void*>fence, FENCE_MARK
        return mark

    cdef void drop_mark(self, Mark* mark) noexcept nogil:
        """Gives up a mark that is in no queue any more. Without the lock, since this may run Python."""
        if mark.kind == FENCE_MARK:
            # A thread without the GIL gets no mark of this kind, so none waits here for the GIL under PyTorch's mutex.
            with gil:
                Py_DECREF(<object>mark.what)
        elif mark.kind == EVENT_MARK:
            self.native.drop(self.native.self, mark.what)

    cdef void drop_all_marks(self) noexcept:
        cdef Mark mark
        cdef bint more = True
        while more:
            self.enter()
            # One by one, since to drop one may run Python, which may come back here.
            more = self.queues.pop(mark)
            self.leave()
            if more:
                self.drop_mark(&mark)

    cdef int try_stuck_again(self, bint ahead=False) except -1:
        """Queues again what a device failed for; `ahead` of what has come since, or behind it."""
        self.enter()
        cdef bint queued = self.queues.try_again(ahead)
        self.leave()
        if not queued:
            raise out_of_host_memory()
        return 0

    cdef bint next_stream(self, bint first, uint64_t* stream) noexcept nogil:
        """The first stream with a queue, or the one after `stream`. Whether there is one."""
        if first:
            self.forget_dead_askers()
        self.enter()
        cdef bint found = self.queues.next_stream(first, stream[0])
        self.leave()
        return found

    cdef Turn take_first(self, uint64_t stream, cbool fences, TakenMark* taken) noexcept nogil:
        """Takes the oldest mark of a stream, to ask it without the lock. Other threads, and code that the device calls
        back, leave its queue alone meanwhile. `fences`: also one that only Python can ask."""
        self.enter()
        cdef Turn turn = self.queues.take_first(stream, PyThread_get_thread_ident(), fences, taken[0])
        self.leave()
        return turn

    cdef bint take_at_last(self, QueuedMark row, TakenMark* taken) except -1:
        """Takes a mark, wherever it is in its queue. Waits for a thread that has taken it. Whether it was there."""
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef Turn turn
        while True:
            self.enter()
            turn = self.queues.take(row, me, taken[0])
            self.leave()
            if turn != TURN_OF_ANOTHER:
                return turn == YOUR_TURN
            # This thread asks it further up its own stack, or its asker has been stopped for good: neither will end.
            if taken.by == me or is_finalizing():
                return False
            time.sleep(_POLL_SECONDS)

    cdef void put_back(self, TakenMark* taken) noexcept nogil:
        """Leaves a mark in its queue, or drops it where the queue is gone."""
        self.enter()
        cdef bint known = self.queues.put_back(taken[0])
        self.leave()
        if not known:
            self.drop_mark(&taken.mark)

    cdef void set_aside(self, TakenMark* taken) noexcept nogil:
        """The same for one that the device failed for: it is in no queue until it is tried again."""
        self.enter()
        cdef bint known = self.queues.set_aside(taken[0])
        self.leave()
        if not known:
            self.drop_mark(&taken.mark)

    cdef bint has_passed(self, TakenMark* taken) noexcept nogil:
        """Takes a mark out of its queue, to be dropped. Whether its chunk waits for nothing any more."""
        self.enter()
        cdef bint is_last = self.queues.passed(taken[0])
        self.leave()
        return is_last

    cdef bint is_reached(self, TakenMark* taken, bint wait) except -1:
        """Whether a stream has reached a mark that was taken; `wait`: waits until it has."""
        cdef int result
        if taken.mark.kind == PASSED_MARK:
            return True
        if taken.mark.kind == FENCE_MARK:
            fence = <object>taken.mark.what
            if wait:
                fence.wait()
                return True
            return fence.done()
        # An event may be far off, and whoever queues the work before it may need the GIL.
        with nogil:
            result = self.native.reached(self.native.self, &taken.mark.what, wait)
        if result != 0 and result != BFC_NOT_REACHED:
            raise failure(<CUresult>result, "cuEventSynchronize" if wait else "cuEventQuery")
        return result == 0

    cdef int answer(self, TakenMark* taken, list faults, bint wait) except -1:
        """Asks a mark that was taken. One that its stream has reached stays taken, and in its queue, for the caller.
        One that fails is set aside, and its error is appended to `faults`."""
        try:
            if self.is_reached(taken, wait):
                return _REACHED
        except Exception as error:
            # Else it would hold up its whole queue, in which later marks may be reached.
            self.set_aside(taken)
            faults.append(error)
            return _SET_ASIDE
        except BaseException as error:      # a Ctrl-C says nothing about the fence
            faults.append(error)
        self.put_back(taken)
        return _NOT_REACHED

    cdef bint next_reached(self, uint64_t stream, list faults, bint wait, TakenMark* taken) except -1:
        """Takes the oldest mark of a stream if that has reached it (`wait`: waits until it has). Returns whether it
        has: the caller then takes the mark out of its queue, and drops it.

        A stream reaches its marks in order, so the first that is not reached ends the search.
        """
        cdef int answer = _SET_ASIDE
        cdef Turn turn
        self.forget_dead_askers()
        while answer == _SET_ASIDE:
            turn = self.take_first(stream, True, taken)
            # Who waits for memory waits for that thread, too: what it finds reached is freed by it.
            if turn == TURN_OF_ANOTHER and wait and taken.by != PyThread_get_thread_ident() and not is_finalizing():
                time.sleep(_POLL_SECONDS)
                continue
            if turn != YOUR_TURN:
                return False
            answer = self.answer(taken, faults, wait)
        return answer == _REACHED

    cdef int list_marks(self, vector[QueuedMark]& rows) except -1:
        """All that waits now, stream by stream."""
        self.forget_dead_askers()
        self.enter()
        cdef bint listed = self.queues.list(rows)
        self.leave()
        if not listed:
            raise out_of_host_memory()
        return 0

    cdef bint wait_for(self, QueuedMark row, TakenMark* taken) except -1:
        """Takes one mark, wherever it is in its stream's queue, and waits for it. Whether it was there: the caller then
        takes it out of the queue, or puts it back."""
        if not self.take_at_last(row, taken):
            return False
        try:
            self.is_reached(taken, True)
        except BaseException:
            self.put_back(taken)
            raise
        return True

    cdef int wait_until_reached(self, QueuedMark row) except -1:
        """The same, and the mark stays in its queue."""
        cdef TakenMark taken
        if not self.wait_for(row, &taken):
            return 0
        if taken.mark.kind == EVENT_MARK:
            self.drop_mark(&taken.mark)
            # It has passed for good. An event would be asked again by the next look at the queue.
            taken.mark.kind = PASSED_MARK
        self.put_back(&taken)
        return 0

    cdef int wait_for_all(self, list faults) except -1:
        """Waits until the streams have finished with all that waits now. The marks stay for `next_reached`. The error
        of a fence goes to `faults`; None: it is raised."""
        cdef vector[QueuedMark] rows
        cdef QueuedMark row
        self.list_marks(rows)
        for row in rows:
            try:
                self.wait_until_reached(row)
            except Exception as error:
                if faults is None:
                    raise
                faults.append(error)
        return 0

    cdef void forget_dead_askers(self) noexcept nogil:
        """After a fork, gives up the marks that were taken by threads which the child does not have. When the
        interpreter shuts down, threads that need the GIL have ended, too; those that ask an event have not."""
        cdef uint64_t now = era(), seen
        if self.era_seen.get() == now:
            return
        self.enter()
        seen = self.era_seen.get()
        if seen != now:     # another thread may have been here first, and taken marks since
            # Shifted, an era is the count of forks: only a fork has ended those that ask events, too.
            self.queues.forget_threads(survivor(), now >> 1 != seen >> 1)
            self.era_seen.set(now)
        self.leave()


@cython.final
@cython.no_gc_clear
cdef class Fences(FenceQueues):
    """The streams that use a pool's memory, with a queue for each, and what captures and scopes put off."""

    def __cinit__(self):
        self.deferred = deque()     # removing its items needs no memory
        self.stuck_deferred = deque()
        self.captured = {}
        self.told = {}
        self.replayed = {}
        self.visited = {}

    cdef int forget(self, allocation_id) except -1:
        FenceQueues.forget(self, allocation_id)
        if self.captured:
            self.captured.pop(allocation_id, None)
        return 0

    cdef int clear(self) except -1:
        FenceQueues.clear(self)
        self.deferred.clear()
        self.stuck_deferred.clear()
        self.captured.clear()
        self.visited.clear()
        self.enter()
        self.noted.clear()
        self.leave()
        self.deferred_changed()
        return 0

    cdef void deferred_changed(self) noexcept:
        if self.reasons != NULL:
            # Not for those that are stuck: only `release_free_regions` and `close` try these again.
            self.reasons.put(FREES_DEFERRED, len(self.deferred) > 0)

    # -- marks ---------------------------------------------------------------------------------------------------------

    cdef int adopt(self, int64_t allocation_id) except -1:
        """Takes the uses of an allocation over that were noted without the GIL."""
        cdef vector[uint64_t] streams
        cdef vector[uint64_t] again
        cdef uint64_t stream
        cdef bint copied, settled = self.noted.empty()
        while not settled:
            streams.clear()
            self.enter()
            copied = self.noted.copy(allocation_id, streams)
            self.leave()
            if not copied:
                raise out_of_host_memory()
            for stream in streams:
                self.uses(allocation_id, stream, None)
            again.clear()
            self.enter()    # another thread may have noted one more
            # Dropped only if `users` has all of them: to enter a use there runs Python, which lets others note more.
            settled = self.noted.copy(allocation_id, again) and again.size() == streams.size()
            if settled:
                self.noted.drop(allocation_id)
            self.leave()
        return 0

    cdef cbool takes_events(self) noexcept nogil:
        """Whether a use can be noted now, and a free wait for it, without the GIL. Not in a capture: a stream that
        captures has no event."""
        return self.native != NULL and self.asks_later and not self.capture_is_marked() and not self.scopes_defer()

    cdef int mark_users(self, int64_t allocation_id) except -1:
        """Makes fences on the streams of an allocation now, since a stream may be destroyed before the free is made."""
        self.adopt(allocation_id)
        streams = self.users.get(allocation_id)
        if streams is not None and self.capture_is_marked() and self.some_capture(streams):
            return 0    # a captured stream has no fence. It is not destroyed either: the free is made by the next call
        if streams is not None and self.source.asynchronous:
            self.marked.setdefault(allocation_id, []).extend(self.fences_on(streams))
            del self.users[allocation_id]
        return 0

    cdef int mark_user(self, int64_t allocation_id, uint64_t stream) except -1:
        """Makes a fence now on one stream, which has let go of the memory."""
        self.adopt(allocation_id)
        if self.capture_is_marked() and self.some_capture((stream,)):
            return self.uses(allocation_id, stream, None)
        if self.source.asynchronous:
            self.marked.setdefault(allocation_id, []).extend(self.fences_on((stream,)))
            drop_done(self.marked[allocation_id])
        return 0

    cdef list fences_on(self, streams):
        fences = []
        # In the order of their numbers: PyTorch's is that of a hash table, which no two runs need share.
        for stream in sorted(streams):
            fence = self.source.fence(stream)
            if fence is not None:
                fences.append((stream, fence))
        return fences

    cdef list unfinished(self, int64_t allocation_id):
        """The fences that a free has to wait for: those made earlier, and a new one for each stream that may have used
        the memory up to now."""
        fences = list(self.marked.get(allocation_id, ()))
        streams = self.users.get(allocation_id, ())
        if self.source.asynchronous:
            # Made now and not when the use was recorded: the stream may have got more work since.
            fences += self.fences_on(streams)
        # PyTorch records an event also on a stream with nothing to do, and frees the block at the next allocation.
        if self.asks_later:
            marked = {stream for stream, _fence in fences}
            for stream in sorted(streams):
                if stream not in marked:
                    fences.append((stream, OVER))
            return fences
        if not self.asks_at_once():
            return fences
        unfinished = []
        for entry in fences:
            # TensorFlow has no fences, so nothing says that they are asked later than this.
            if not entry[1].done():
                unfinished.append(entry)
        return unfinished

    # -- captures ------------------------------------------------------------------------------------------------------

    cdef bint capture_is_marked(self) noexcept nogil:
        """Whether any capture is marked. Until then the source is not asked which streams capture."""
        return self.captures.get() > 0

    cdef bint asks_at_once(self) noexcept nogil:
        """Whether any call may ask a fence, and not only an allocation."""
        return not self.asks_later and not self.capture_is_marked()

    cdef bint is_capturing(self, stream) except -1:
        return self.source.capture_id(stream) != 0

    cdef bint is_captured(self, uint64_t stream) except -1:
        """Whether a capture is marked and the stream captures: then it cannot be waited for or given a fence. Upstream
        does not ask, and waits."""
        if self.strict or not self.capture_is_marked():
            return False
        # A replay has no driver that would tell.
        return stream in self.replayed or self.is_capturing(stream)

    cdef bint is_in_capture(self, uint64_t made_on) except -1:
        """Whether a capture is marked, and the stream of this thread captures: that of `use_stream`, or of the program
        of C that calls, or else the one that the memory was allocated for."""
        return self.capture_is_marked() and self.is_capturing(self.stream_here(made_on))

    cdef uint64_t stream_here(self, uint64_t made_on) except? 0xFFFFFFFFFFFFFFFF:
        current = current_stream()
        if current is not None:
            return stream_handle(current)
        return <uint64_t>self.current(self.device) if self.current != NULL else made_on

    cdef bint some_capture(self, streams) except -1:
        """Whether one of these streams cannot be given a fence now: it captures, or it is a default stream, which waits
        for those that do."""
        for stream in streams:
            if stream <= LEGACY_STREAM or self.is_capturing(stream):
                return True
        return False

    cdef int note_captured(self, allocation_id, uint64_t stream, uint64_t made_on) except -1:
        """Notes a use that a graph orders: its memory can be used again after the capture. Call it before `uses`: of a
        stream that used the memory outside of a capture, too, that work may be unfinished. Upstream counts all that is
        recorded in a capture as such, even of streams that do not capture or have such work."""
        if not self.strict and stream in self.users.get(allocation_id, ()) \
                and stream not in self.captured.get(allocation_id, ()):
            return 0
        # Upstream asks the thread's current stream, and not the one that is recorded.
        capture = self.source.capture_id(self.stream_here(made_on) if self.strict else stream)
        if capture:
            self.captured.setdefault(allocation_id, {})[stream] = capture
        return 0

    cdef int mark_captures(self, int more) except -1:
        """Counts a capture that begins, or that ends."""
        if more < 0 and self.captures.get() == 0:
            raise RuntimeError("no capture is marked: mark_capture_begin comes first")
        self.captures.set(self.captures.get() + more)
        if self.captures.get() == 0:
            # Nodes are named by their handles, which a later graph's may have again.
            self.visited.clear()
        return 0

    cdef object markers_of(self, uint64_t made_on, streams):
        """The last nodes of a capture on these streams, or None if one of them does not capture."""
        markers = set()
        for stream in (made_on, *streams):
            if not self.is_capturing(stream):
                # A graph says nothing of work outside of it, so nothing is proved.
                return None
            markers.update(self.source.capture_terminals(stream))
        return markers

    cdef list safe_in_capture(self, uint64_t stream):
        """The deferred chunks of a capturing stream that its next work may use: each of their last nodes comes before
        it in the graph. They are deferred no more."""
        cdef DeferredFree entry
        safe = []
        ends = self.source.capture_terminals(stream)
        if not ends:
            return safe
        # Kept: nodes are only added, so what came before stays before, and each is walked once per capture.
        visited = self.visited.setdefault((self.source.capture_id(stream), stream), set())
        todo = list(ends)
        while todo:
            node = todo.pop()
            if node not in visited:
                visited.add(node)
                todo.extend(self.source.capture_dependencies(node))
        # Once around: what is not safe goes to the end, in its order.
        for _ in range(len(self.deferred)):
            entry = self.deferred.popleft()
            # Of the same stream alone: a chunk stays in its lane.
            if entry.markers and entry.made_on == stream and entry.markers <= visited:
                safe.append(entry)
            else:
                self.deferred.append(entry)
        self.deferred_changed()
        return safe

    # -- frees in a scope ----------------------------------------------------------------------------------------------

    cdef bint scopes_defer(self) noexcept nogil:
        """Whether any scope of a private pool is open, on any thread or stream: 2.11 asks for no fences then."""
        return self.open_scopes != NULL and self.open_scopes.get() > 0

    cdef bint defers(self, allocation_id, uint64_t made_on) except -1:
        """Whether a free asks for its fences later: in a scope, or in a capture, where that cannot be done now."""
        if self.scopes_defer():
            return True
        if not self.capture_is_marked():
            return False
        return self.is_in_capture(made_on) or (not self.strict
                                               and self.some_capture(self.users.get(allocation_id, ())))

    cdef int defer(self, ChunkHandle handle, allocation_id, uint64_t made_on, tuple pool) except -1:
        """Puts a free off until no scope is open, or no capture, where PyTorch asks for its fences."""
        cdef DeferredFree entry = DeferredFree()
        entry.pool = pool
        entry.handle = handle
        # The dictionary itself, which keeps the streams' objects alive: `forget` is about to take it out of `users`.
        entry.streams = self.users.get(allocation_id) or {}
        entry.fences = self.marked.get(allocation_id) or []
        entry.made_on = made_on
        entry.captured = self.captured.get(allocation_id) or {}
        # Fences made before the free stand for work that no graph orders.
        if self.reuses and not entry.fences and self.capture_is_marked():
            entry.markers = self.markers_of(made_on, entry.streams)
        self.deferred.append(entry)
        self.deferred_changed()
        return 0

    cdef bint must_wait(self, DeferredFree entry) except -1:
        """Whether a deferred free cannot have its fences yet, as the capture goes on. Upstream does not ask."""
        if self.strict or not self.capture_is_marked():
            return False
        for stream, capture in entry.captured.items():
            if capture in (self.source.capture_id(stream), self.source.capture_id(entry.made_on)):
                return True
        return self.some_capture(set(entry.streams).difference(entry.captured))

    cdef int record_deferred(self, bint again, tuple only, vector[ChunkHandle]& done, list faults) except -1:
        """Puts deferred chunks behind fences (`only`: those of one pool); those that need none are listed in `done`.
        The streams that were recorded in a capture need none after it. (Upstream's 2.11 also forgets those that were
        recorded in a scope.) Chunks for which the device fails are set aside until they are tried `again`, and the
        error goes to `faults`."""
        cdef DeferredFree entry
        while again and self.stuck_deferred:
            # Entered before it leaves the other list, so that an interrupt loses none.
            self.deferred.appendleft(self.stuck_deferred[len(self.stuck_deferred) - 1])
            self.stuck_deferred.pop()
        cdef Py_ssize_t left = len(self.deferred)
        # Before any entry is taken out: what needs no fence must find a place.
        if not try_make_room(done, <size_t>left):
            raise out_of_host_memory()
        try:
            while left > 0 and self.deferred:
                left -= 1
                entry = self.deferred.popleft()
                try:
                    if (only is not None and entry.pool != only) or self.must_wait(entry):
                        self.deferred.append(entry)     # into the place that it has just left
                        continue
                    found = entry.fences
                    if self.source.asynchronous:
                        found = found + self.fences_on(set(entry.streams).difference(entry.captured))
                    self.wait_behind(entry.handle, found)
                    if not found:
                        done.push_back(entry.handle)
                except BaseException as error:
                    self.put_aside(entry, isinstance(error, Exception))
                    faults.append(error)
        finally:
            self.deferred_changed()
        return 0

    cdef int put_aside(self, DeferredFree entry, bint is_stuck) except -1:
        """Keeps a deferred free for another try. `is_stuck`: the device failed; False if a Ctrl-C interrupted it."""
        try:
            (self.stuck_deferred if is_stuck else self.deferred).append(entry)
        except MemoryError:
            self.deferred.appendleft(entry)     # into the place that it has just left
        return 0


@cython.final
@cython.no_gc_clear
cdef class Captures:
    """The captures that an allocator has been told of: a part of `Allocator`. What they put off is in `Fences`."""

    cdef int attach(self, Lock* lock, Pool pool, Fences fences, PrivatePools private_pools) except -1:
        self.lock = lock
        self.pool = pool
        self.fences = fences
        self.private_pools = private_pools
        self.pool_uses = PoolUses()
        self.pool_uses.attach(lock, private_pools)
        return 0

    cdef int mark(self, int more) except -1:
        """Counts a capture that begins or ends. A plan rests meanwhile."""
        self.fences.mark_captures(more)
        # Requests look at it under the lock, before they ask a plan.
        acquire_lock(self.lock[0])
        # A graph keeps its addresses for ever, while a plan gives a place to many in turn.
        self.pool.plans.rest = self.fences.capture_is_marked()
        self.lock.release()
        return 0

    cdef int begin(self, PoolId id, uint64_t stream, bint strict) except -1:
        """Diverts a capture that begins on a stream into a pool, and holds a reference to it."""
        self.pool_uses.begin(Scope(id, ONE_CAPTURE, stream, this_thread()), strict)
        try:
            self.mark(1)
        except BaseException:
            self.pool_uses.end(id)
            self.pool_uses.release_reference(id)
            raise
        return 0

    cdef list streams(self):
        """The streams on which captures have begun, and their pools."""
        return self.pool_uses.captures() if self.private_pools.open_captures.get() else []

    cdef list news_of(self, streams):
        """Which of these streams have joined a capture into a pool since the last call, or left it, as (stream, pool,
        whether it has joined)."""
        cdef dict told = self.fences.told
        found = []
        for stream in sorted({*streams, *told}):
            pool = self.fences.replayed.get(stream) or name_of(self.pool_for(stream))
            pool = pool if pool != (0, 0) else None
            known = told.get(stream)
            if pool == known:
                continue
            if known is not None:
                found.append((stream, told.pop(stream), False))
            if pool is not None:
                told[stream] = pool
                found.append((stream, pool, True))
        return found

    cdef int take_as_captured(self, pool, stream, bint is_captured) except -1:
        """Lets a stream count as captured into a pool, as in the run that is replayed, or no more."""
        if is_captured:
            self.fences.replayed[stream] = pool
        else:
            self.fences.replayed.pop(stream, None)
        return 0

    cdef int forget_streams_of(self, pool) except -1:
        """A capture into a pool has ended, and with it that of all its streams."""
        cdef dict named
        for named in (self.fences.told, self.fences.replayed):
            for stream in list(named) if named else ():
                if named[stream] == pool:
                    named.pop(stream, None)
        return 0

    cdef bint is_captured(self, uint64_t stream, bint strict) except -1:
        """Whether a request for a stream comes in a capture: the stream of this thread captures or, unless `strict`,
        the request's own."""
        # PyTorch's rule first: the current stream of the calling thread decides.
        if self.fences.is_in_capture(stream):
            return True
        return not strict and self.fences.capture_is_marked() and self.fences.is_capturing(stream)

    cdef PoolId pool_for(self, uint64_t stream) except *:
        """The pool of the capture that a stream has joined, in whichever thread; or the default pool."""
        # The driver is asked only while a capture is open, so that other programs do not pay for it.
        if self.private_pools.open_captures.get():
            mine = self.fences.source.capture_id(stream)
            for begun_on, name in self.pool_uses.captures() if mine else ():
                # Streams join a capture by waiting for one of its events, which nobody tells us: the driver's id is the
                # same.
                if self.fences.source.capture_id(begun_on) == mine:
                    return id_of(name)
        return default_pool()
