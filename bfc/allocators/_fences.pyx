"""Fences: marks in the queues of other streams, and what was freed and waits behind them. Captures of graphs: which are
marked, and which pool a stream that captures takes its memory from.

Fences are created and queried with no lock held: the device may call back, and another thread may free meanwhile.
"""

import time
from collections import deque

cimport cython
from libc.stdint cimport uint64_t
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_make_room
from bfc.interpreter._process cimport era, survivor
from bfc._core cimport ChunkHandle, Pool
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._private_pools cimport (
    ONE_CAPTURE, PoolId, PoolUses, PrivatePools, Scope, default_pool, id_of, name_of, this_thread,
)
from bfc.allocators._reasons cimport FREES_DEFERRED, FREES_WAIT
from bfc.buffers._scopes import current_stream

from bfc.errors import out_of_host_memory
from bfc.streams import stream_handle

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

_POLL_SECONDS = 0.001

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
        if fences and fences[0] is oldest:
            del fences[0]
    return 0


@cython.final
@cython.no_gc
cdef class FencedFree:
    """A chunk that was freed, and how many fences it still waits for."""


@cython.final
@cython.no_gc_clear
cdef class PendingFence:
    """A fence that a freed chunk waits for, in the queue of its stream."""


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
        self.queues = {}
        self.stuck = deque()    # removing its items needs no memory
        self.era_seen = era()

    # -- who uses memory -----------------------------------------------------------------------------------------------

    cdef int uses(self, int64_t allocation_id, object stream, object passed) except -1:
        """Notes that a stream uses an allocation, and keeps what the user passed for the stream alive meanwhile."""
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
        self.queues.clear()
        self.stuck.clear()
        self.queues_changed()
        return 0

    # -- queues --------------------------------------------------------------------------------------------------------

    cdef void queues_changed(self) noexcept:
        if self.reasons != NULL:
            self.reasons.put(FREES_WAIT, PyDict_GET_SIZE(self.queues) > 0)

    cdef int wait_behind(self, ChunkHandle handle, list fences) except -1:
        """Makes a freed chunk wait for fences. If one cannot be queued, its count never reaches 0, though earlier ones
        are queued."""
        cdef FencedFree fenced = FencedFree()
        fenced.handle = handle
        fenced.left = len(fences)
        for stream, fence in fences:
            self.put_in_queue(stream, fence, fenced)
        return 0

    cdef int put_in_queue(self, stream, fence, FencedFree fenced) except -1:
        cdef PendingFence entry = PendingFence()
        entry.fence = fence
        entry.fenced = fenced
        try:
            self.queues.setdefault(stream, deque()).append(entry)
        finally:
            self.queues_changed()
        return 0

    cdef int try_stuck_again(self) except -1:
        while self.stuck:
            stream, fence, fenced = self.stuck[0]
            self.put_in_queue(stream, fence, fenced)
            self.stuck.popleft()
        return 0

    cdef PendingFence next_done(self, stream, list faults, bint wait):
        """Returns the last fence of a chunk once the stream has reached it (`wait`: waits until it has), so that the
        chunk waits for nothing any more; or None. A fence whose query fails is set aside as stuck, and its error is
        appended to `faults`.

        A stream reaches its fences in order, so the first that is not done ends the search. The thread that queries a
        fence is noted, so that other threads, and code that the fence calls back, leave its queue alone.
        """
        cdef PendingFence first
        cdef bint done
        self.forget_dead_askers()
        queue = self.queues.get(stream)     # None: another thread has settled it meanwhile
        while queue:
            first = queue[0]
            if first.polled_by:
                if not wait or first.polled_by == PyThread_get_thread_ident():
                    return None
                time.sleep(_POLL_SECONDS)
                continue
            first.polled_by = PyThread_get_thread_ident()
            fault = None
            try:
                done = wait or first.fence.done()
                if wait:
                    first.fence.wait()
            except BaseException as error:
                done, fault = True, error
            try:
                if not self.answered(stream, queue, first, done, fault, faults):
                    return None
            finally:
                first.polled_by = 0
            if fault is None:
                first.fenced.left -= 1
                if first.fenced.left == 0:
                    return first
        if queue is not None and self.queues.get(stream) is queue and not queue:
            del self.queues[stream]
            self.queues_changed()
        return None

    cdef int answered(self, stream, queue, PendingFence first, bint done, fault, list faults) except -1:
        """Takes the first entry out of its queue if it is done or has failed. Returns whether it was taken out."""
        if fault is not None:
            faults.append(fault)
            done = isinstance(fault, Exception)     # a Ctrl-C says nothing about the fence
        if not done or self.queues.get(stream) is not queue:
            return False    # or the allocator was closed meanwhile
        if fault is not None:       # before it leaves its queue, as this may raise MemoryError
            self.stuck.append((stream, first.fence, first.fenced))
        queue.popleft()
        return True

    cdef int forget_dead_askers(self) except -1:
        """After a fork, clears from the entries the threads that were querying fences: the child does not have them."""
        cdef PendingFence entry
        if self.era_seen == era():
            return 0
        self.era_seen = era()
        for queue in list(self.queues.values()):
            for entry in list(queue):
                if entry.polled_by != survivor():
                    entry.polled_by = 0
        return 0

    cdef bint wait_for(self, stream, PendingFence entry) except -1:
        """Waits for one entry, wherever it is in its stream's queue, and for a thread that is querying its fence.
        Returns whether its chunk waits for nothing any more."""
        cdef unsigned long me = PyThread_get_thread_ident()
        self.forget_dead_askers()
        while entry.polled_by not in (0, me):
            time.sleep(_POLL_SECONDS)
        queue = self.queues.get(stream, ())
        if entry.polled_by == me or entry not in queue:
            return False
        entry.polled_by = me
        try:
            entry.fence.wait()
        finally:
            entry.polled_by = 0
        queue.remove(entry)
        if not queue and self.queues.get(stream) is queue:
            del self.queues[stream]
            self.queues_changed()
        entry.fenced.left -= 1
        return entry.fenced.left == 0

    cdef int wait_for_all(self, list faults) except -1:
        """Waits until the streams have finished with all that waits now. The entries stay for `next_done`. The error of
        a fence goes to `faults`; None: it is raised."""
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef PendingFence entry
        self.forget_dead_askers()
        for queue in list(self.queues.values()):
            for entry in list(queue):
                try:
                    entry.fence.wait()
                except Exception as error:
                    if faults is None:
                        raise
                    faults.append(error)
                while entry.polled_by not in (0, me):
                    time.sleep(_POLL_SECONDS)
        return 0


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
        self.deferred_changed()
        return 0

    cdef void deferred_changed(self) noexcept:
        if self.reasons != NULL:
            self.reasons.put(FREES_DEFERRED, len(self.deferred) > 0)

    # -- marks ---------------------------------------------------------------------------------------------------------

    cdef int mark_users(self, int64_t allocation_id) except -1:
        """Makes fences on the streams of an allocation now, since a stream may be destroyed before the free is made."""
        streams = self.users.get(allocation_id)
        if streams is not None and self.capture_is_marked() and self.some_capture(streams):
            return 0    # a captured stream has no fence. It is not destroyed either: the free is made by the next call
        if streams is not None and self.source.asynchronous:
            self.marked.setdefault(allocation_id, []).extend(self.fences_on(streams))
            del self.users[allocation_id]
        return 0

    cdef int mark_user(self, int64_t allocation_id, uint64_t stream) except -1:
        """Makes a fence now on one stream, which has let go of the memory."""
        if self.capture_is_marked() and self.some_capture((stream,)):
            return self.uses(allocation_id, stream, None)
        if self.source.asynchronous:
            self.marked.setdefault(allocation_id, []).extend(self.fences_on((stream,)))
            drop_done(self.marked[allocation_id])
        return 0

    cdef list fences_on(self, streams):
        fences = []
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
            fences += self.fences_on(streams)
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
        return stream in self.replayed or self.is_capturing(stream)

    cdef bint is_in_capture(self, uint64_t made_on) except -1:
        """Whether a capture is marked, and the stream of this thread captures: that of `use_stream`, or else the one
        that the memory was allocated for."""
        return self.capture_is_marked() and self.is_capturing(self.stream_here(made_on))

    cdef uint64_t stream_here(self, uint64_t made_on) except? 0xFFFFFFFFFFFFFFFF:
        current = current_stream()
        return made_on if current is None else stream_handle(current)

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
            self.visited.clear()
        return 0

    cdef object markers_of(self, uint64_t made_on, streams):
        """The last nodes of a capture on these streams, or None if one of them does not capture."""
        markers = set()
        for stream in (made_on, *streams):
            if not self.is_capturing(stream):
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
        visited = self.visited.setdefault((self.source.capture_id(stream), stream), set())
        todo = list(ends)
        while todo:
            node = todo.pop()
            if node not in visited:
                visited.add(node)
                todo.extend(self.source.capture_dependencies(node))
        for _ in range(len(self.deferred)):
            entry = self.deferred.popleft()
            if entry.markers and entry.made_on == stream and entry.markers <= visited:
                safe.append(entry)
            else:
                self.deferred.append(entry)
        self.deferred_changed()
        return safe

    # -- frees in a scope ----------------------------------------------------------------------------------------------

    cdef bint scopes_defer(self) noexcept:
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
        entry.streams = self.users.get(allocation_id) or {}
        entry.fences = self.marked.get(allocation_id) or []
        entry.made_on = made_on
        entry.captured = self.captured.get(allocation_id) or {}
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
            self.deferred.appendleft(self.stuck_deferred[len(self.stuck_deferred) - 1])
            self.stuck_deferred.pop()
        cdef Py_ssize_t left = len(self.deferred)
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

    cdef int attach(self, Lock* lock, Pool pool, Fences fences, PrivatePools private_pools,
                    PoolUses pool_uses) except -1:
        self.lock = lock
        self.pool = pool
        self.fences = fences
        self.private_pools = private_pools
        self.pool_uses = pool_uses
        return 0

    cdef int mark(self, int more) except -1:
        """Counts a capture that begins or ends. A plan rests meanwhile."""
        self.fences.mark_captures(more)
        acquire_lock(self.lock[0])
        self.pool.plan_rests = self.fences.capture_is_marked()
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
        if self.fences.is_in_capture(stream):
            return True
        return not strict and self.fences.capture_is_marked() and self.fences.is_capturing(stream)

    cdef PoolId pool_for(self, uint64_t stream) except *:
        """The pool of the capture that a stream has joined, in whichever thread; or the default pool."""
        if self.private_pools.open_captures.get():
            mine = self.fences.source.capture_id(stream)
            for begun_on, name in self.pool_uses.captures() if mine else ():
                if self.fences.source.capture_id(begun_on) == mine:
                    return id_of(name)
        return default_pool()
