"""A trace through an allocator in one compiled loop, and the check that a trace makes sense."""

import time

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t, uint8_t
from libc.string cimport memchr
from libcpp.vector cimport vector

from bfc.native.turns cimport TurnAt, count_by, counted
from bfc._core cimport (
    ALLOCATE, DEALLOCATE, ENDS, LOCK_TAKEN, LOWER_END, NO_CHUNK, RELEASE, USED_ELSEWHERE, ChunkHandle, Counters, Events,
    Lane, Tally, Timeline, TimelineRow, play, row_after,
)
from bfc.buffers._scopes cimport number_of_owner, owner_here
from bfc.allocators._reading cimport end_peaks, start_peaks
from bfc.allocators._fences cimport some_wait
from bfc.allocators._chunk_allocator cimport Placement, Request, is_apart
from bfc.allocators._misses cimport attempt, leave_home
from bfc.allocators._allocator cimport Allocator, hand_over_chunk

from bfc.allocators.replayed_pools import ReplayedPools
from bfc.errors import ClosedError, out_of_host_memory

cdef extern from "owners.hpp":
    pass
cdef extern from "timeline.hpp":
    pass

cdef extern from "debug.h":
    const int BFC_DEBUG

_CLOSED = "this allocator was closed during the replay"

cdef enum:
    EVENTS_BETWEEN_REPORTS = 1 << 18
    EVENTS_OF_A_BATCH = 1 << 13     # a fraction of a millisecond


def find_fault(const uint8_t[::1] op, const uint32_t[::1] id, const uint32_t[::1] number, const uint64_t[::1] size,
               Py_ssize_t numbers):
    """The first event that makes no sense, as (event, what is wrong), or None."""
    cdef unsigned char[::1] live = bytearray(numbers)
    cdef Py_ssize_t i
    for i in range(op.shape[0]):
        if op[i] > RELEASE:
            return i, f"op is {op[i]}: 0 allocates, 1 frees, 2 releases what is cached"
        if size[i] >> 63:
            return i, "its size is above 2**63 - 1"
        if op[i] == RELEASE:
            if id[i] or size[i]:
                return i, "it releases what is cached, which has no id and no size: both must be 0"
            continue
        if (not live[number[i]] and op[i] == ALLOCATE) or (op[i] == DEALLOCATE and live[number[i]]):
            live[number[i]] = op[i] == ALLOCATE
        elif op[i] == ALLOCATE:
            return i, "it allocates an id that is live already"
        else:
            return i, "it frees an id that is not live"
    return None


cdef class Run:
    """One replay: what is live in it, and its figures."""

    cdef Allocator allocator
    cdef Events events
    cdef object kept                        # the arrays behind `events`
    cdef bint names_streams                 # whether events name streams other than the allocator's
    cdef vector[uint16_t] owners            # by event; empty: none
    cdef ChunkHandle[::1] handles           # by the trace's allocation number
    cdef uint64_t[::1] addresses            # by event
    cdef Tally tally
    cdef Timeline timeline
    cdef bint keeps_timeline
    cdef uint64_t calls_before
    cdef list marks                         # (event, kind): where the steps of a plan begin
    cdef const uint64_t[:, ::1] pool_ids    # of the private pools, in this allocator
    cdef object pools                       # the `ReplayedPools`; None: all is for the default pool
    cdef readonly Py_ssize_t failed
    cdef readonly double seconds
    cdef readonly uint64_t peak_bytes_in_use
    cdef readonly uint64_t peak_bytes_reserved

    def __init__(self, Allocator allocator not None, const uint8_t[::1] op, const uint32_t[::1] number,
                 const uint64_t[::1] size, const uint16_t[::1] stream, ChunkHandle[::1] handles,
                 uint64_t[::1] addresses, const uint16_t[::1] owner=None, owners=()):
        lengths = {op.shape[0], number.shape[0], size.shape[0], stream.shape[0], addresses.shape[0]}
        if len(lengths) > 1:
            raise ValueError(f"the columns differ in length: {sorted(lengths)}")
        if self.allocator is not None:
            raise RuntimeError("a replay is set up once: make another")
        self.kept = (op, number, size, stream)
        self.handles = handles
        self.addresses = addresses
        cdef Py_ssize_t i
        cdef Lane lane
        for i in range(stream.shape[0]):
            self.names_streams = self.names_streams or stream[i] != allocator.streams.home
        if op.shape[0]:
            # The policy reads its scopes and settings for it, which change under the lock.
            allocator.acquire()
            allocator.set_lane(&lane, 0)
            allocator.lock.release()
            self.events = Events(&op[0], &number[0], &size[0], &stream[0], &handles[0], &addresses[0], op.shape[0],
                                 lane, allocator.streams.by_stream, NULL, NULL, NULL, NULL, NULL)
        self.allocator = allocator
        self.set_owners(op.shape[0], owner, owners)

    cdef int set_owners(self, size_t count, const uint16_t[::1] owner, owners) except -1:
        """Sets the owner of each allocation: the trace gives the index of a name. An allocation without a name, or with
        an empty one, gets the owner of the scope around this call."""
        cdef uint32_t here = owner_here(self.allocator)
        cdef vector[uint16_t] numbers
        cdef size_t i
        cdef bint known = True
        if owner is None and not here:
            return 0
        for name in owners if owner is not None else ():
            numbers.push_back(<uint16_t>(number_of_owner(name) if name else here))
        if owner is not None and <size_t>owner.shape[0] != count:
            raise ValueError(f"the columns differ in length: {sorted({count, owner.shape[0]})}")
        self.owners.assign(count, <uint16_t>here)
        for i in range(count if owner is not None else 0):
            if owner[i] >= numbers.size():
                raise ValueError(f"event {i} names owner {owner[i]}, and the table has {numbers.size()}")
            self.owners[i] = numbers[owner[i]]
        numbers.push_back(<uint16_t>here)
        # The table of owners may grow, and other threads read it.
        self.allocator.acquire()
        for i in range(numbers.size()):
            known = known and self.allocator.pool.books.owned.know(numbers[i])
        self.allocator.lock.release()
        if not known:
            raise out_of_host_memory()
        self.events.owner = self.owners.data() if count else NULL
        return 0

    def set_marks(self, marks):
        """The events at which steps of the allocator's plan begin, and their kinds. Before the first there is none."""
        self.marks = sorted(marks)

    def set_ends(self, const uint8_t[::1] end not None):
        """The end that each allocation asks from: 0 the lower, 1 the upper. It needs an allocator with two."""
        cdef Py_ssize_t i
        if self.allocator is None:
            raise RuntimeError("this replay was never set up: its __init__ did not run, or failed")
        if <size_t>end.shape[0] != self.events.count:
            raise ValueError(f"the columns differ in length: {sorted({end.shape[0], self.events.count})}")
        if not self.allocator.pool.features & ENDS:
            raise ValueError("this allocator has one end: two need enable_spatial_partitioning=True")
        for i in range(end.shape[0]):
            if end[i] > 1:
                raise ValueError(f"event {i} asks from end {end[i]}: 0 is the lower, 1 the upper")
        self.kept += (end,)
        self.events.end = &end[0] if end.shape[0] else NULL

    def set_pools(self, const uint16_t[::1] pool not None, const uint64_t[:, ::1] ids not None, actions):
        """The private pool of each event, their ids, and what happens to them: (event, action, pool, stream), where an
        action is an index of `words.POOL_MARKS`, or `words.HOLD`. All of it is for the pool that this thread's
        allocations are diverted into, if there is one."""
        cdef Py_ssize_t i
        if <size_t>pool.shape[0] != self.events.count:
            raise ValueError(f"the columns differ in length: {sorted({pool.shape[0], self.events.count})}")
        for i in range(pool.shape[0]):
            if pool[i] >= ids.shape[0]:
                raise ValueError(f"event {i} names pool {pool[i]}, and the table has {ids.shape[0]}")
        if self.events.count == 0 or self.events.lane.pool[0] or self.events.lane.pool[1]:
            return
        self.pools = ReplayedPools(self.allocator, ids, actions)
        self.pool_ids = self.pools.ids
        self.kept += (pool,)
        self.events.pool = &pool[0]
        self.events.pools = &self.pool_ids[0, 0]

    @property
    def peak_bytes_live(self):
        return self.tally.peak_live

    def keep_timeline(self, samples, size_t rebuilt=0):
        """Makes `play` keep figures over time, in about so many rows: from the last of the `rebuilt` events on."""
        if self.allocator is None:
            raise RuntimeError("this replay was never set up: its __init__ did not run, or failed")
        if not self.timeline.begin(min(max(rebuilt, 1) - 1, self.events.count), self.events.count, <size_t>samples):
            raise out_of_host_memory()
        self.keeps_timeline = True

    def timeline_rows(self):
        """The rows that `keep_timeline` asked for, as bytes: seven 64-bit numbers each."""
        cdef const vector[TimelineRow]* rows = &self.timeline.finish()
        return PyBytes_FromStringAndSize(<const char*>rows.data(), <Py_ssize_t>(rows.size() * sizeof(TimelineRow)))

    def play(self, progress=None, size_t rebuilt=0, give_up=False):
        """Runs every event; `progress(events done)` is called now and then. What is live at the end stays live; after
        an error nothing does.

        The first `rebuilt` events bring back what was live before: the figures begin behind them. With `give_up`, a
        refusal among them ends the replay: the answer is False then, and nothing is live."""
        if self.allocator is None:
            raise RuntimeError("this replay was never set up: its __init__ did not run, or failed")
        rebuilt = min(rebuilt, self.events.count)
        self.handles[:] = NO_CHUNK
        self.addresses[:] = 0           # also touches the pages, so that the timed loop does not pay for that
        # The allocator's own peaks come back afterwards: a replay must not hide them.
        cdef Counters before = start_peaks(self.allocator.pool, self.allocator.lock)
        self.calls_before = counted(self.allocator.source.driver_calls)
        try:
            self.play_range(0, rebuilt, None)
            if give_up and self.failed:
                self.take_back()
                return False
            self.begin_figures(rebuilt)
            self.play_steps(rebuilt, progress)
            if self.pools is not None:
                self.pools.act(self.events.count)
            self.hand_over()
        except BaseException:
            self.take_back()
            raise
        finally:
            if self.pools is not None:
                self.pools.let_go()
            peaks = end_peaks(self.allocator.pool, self.allocator.lock, before)
            self.peak_bytes_in_use = peaks.peak_bytes_in_use
            self.peak_bytes_reserved = peaks.peak_pool_bytes
        return True

    cdef int begin_figures(self, size_t rebuilt) except -1:
        """The peaks and the timeline begin here: gaps that were filled for a moment are none of the run's memory."""
        if rebuilt:
            start_peaks(self.allocator.pool, self.allocator.lock)
            self.tally.peak_live = self.tally.live
        if self.keeps_timeline and self.events.count:
            self.events.timeline = &self.timeline
            if rebuilt:
                # The figures of an event are read at one moment, if other threads use the allocator beside the replay.
                self.allocator.acquire()
                self.note_locked(rebuilt - 1)
                self.allocator.lock.release()
        return 0

    cdef int play_steps(self, size_t start, progress) except -1:
        """Plays the rest, with the steps of a plan if there is one."""
        cdef size_t at
        if self.allocator.planned is None:
            return self.play_range(start, self.events.count, progress)
        step = None
        count_by(self.allocator.planned.turns.waits, <int>1)
        try:
            for event, kind in self.marks or ():
                at = min(max(<size_t>event, start), self.events.count)
                self.play_range(start, at, progress)
                start = at
                if step is not None:
                    step, _ended = None, step.__exit__()
                if self.allocator.planned.watch is not None:    # the same replay comes to the same
                    self.allocator.planned.watch.wait()
                entered = self.allocator.step(kind)
                step = entered.__enter__()
            return self.play_range(start, self.events.count, progress)
        finally:
            count_by(self.allocator.planned.turns.waits, <int>-1)
            if step is not None:
                step.__exit__()

    cdef int play_range(self, size_t start, size_t last, progress) except -1:
        """Plays events, and what happens to private pools before each."""
        cdef size_t stop
        if self.pools is None:
            return self.play_stretch(start, last, progress)
        while start < last:
            self.pools.act(start)
            stop = min(last, <size_t>self.pools.next_action(last))
            self.play_stretch(start, stop, progress)
            start = stop
        return 0

    cdef int play_stretch(self, size_t start, size_t last, progress) except -1:
        cdef size_t end
        while start < last:
            end = min(start + EVENTS_BETWEEN_REPORTS, last)
            begun = time.perf_counter()
            if not self.plays_alone():
                end = self.play_with_fences(start, end)
            else:
                with nogil:
                    self.play_some(self.allocator, start, end)
            self.seconds += time.perf_counter() - begun
            start = end
            PyErr_CheckSignals()
            if progress is not None:
                progress(end)
            if BFC_DEBUG >= 2:
                self.allocator.check_books()
        return 0

    cdef bint plays_alone(self) except -1:
        """Whether no event needs a look at fences."""
        if self.allocator.streams.by_stream:
            return not some_wait(self.allocator.fences) and self.allocator.plays_alone()
        if self.allocator.streams.has_lanes.get():
            return False        # a private pool may be open
        return not (self.names_streams and self.allocator.sub_allocator.asynchronous)

    cdef int play_some(self, Allocator allocator, size_t start, size_t end) except -1 nogil:
        """Plays events in batches, between which other threads get the lock."""
        cdef size_t stop, reached, release = self.next_release(start, end)
        allocator.lock.wait_and_acquire()
        while start < end:
            if release < start:
                release = self.next_release(start, end)
            # The loop stops short of a RELEASE, so that it need not test for one at each event.
            stop = min(start + EVENTS_OF_A_BATCH, release)
            if allocator.life.is_closed:
                allocator.lock.release()
                with gil:
                    raise ClosedError(_CLOSED)
            if self.events.timeline != NULL:
                stop = min(stop, start + 1 if self.timeline.is_fresh() else self.timeline.end())
            reached = play(allocator.pool, &self.events, start, stop, &self.tally)
            if self.events.timeline != NULL and reached > start:
                self.note_locked(reached - 1)
            start = reached
            if start < stop or (start == release and start < end):
                allocator.lock.release()
                with gil:
                    self.play_one(start)
                start += 1
                allocator.lock.wait_and_acquire()
                if self.events.timeline != NULL:
                    self.note_locked(start - 1)
            else:
                allocator.lock.give_way()
        allocator.lock.release()
        return 0

    cdef size_t next_release(self, size_t start, size_t end) noexcept nogil:
        """The number of the first RELEASE from `start` on, or `end`."""
        cdef const void* found = memchr(self.events.op + start, RELEASE, end - start)
        return end if found == NULL else <size_t>(<const uint8_t*>found - self.events.op)

    cdef void note_locked(self, size_t event) noexcept nogil:
        """Adds the figures after an event to the timeline. Needs the lock."""
        self.timeline.refused = <uint64_t>self.failed
        self.timeline.driver_calls = counted(self.allocator.source.driver_calls) - self.calls_before
        cdef Counters totals = self.allocator.pool.totals()
        self.timeline.note(row_after(self.allocator.pool, &self.timeline, event, self.tally.live),
                           totals.peak_bytes_in_use, totals.peak_pool_bytes)

    cdef int play_one(self, size_t i) except -1:
        """Plays an event that the pool could not serve alone. The lock is not held."""
        cdef TurnAt turn
        turn.take(self.allocator)
        cdef Request request
        cdef Placement placed
        cdef ChunkHandle* handle = &self.events.handles[self.events.number[i]]
        if self.events.op[i] == ALLOCATE:
            self.allocator.set_request(&request, self.events.size[i], self.events.stream[i])
            # A replay keeps handles: the table of addresses is left to what outlives it.
            request.indexed = False
            request.owner = self.events.owner[i] if self.events.owner != NULL else 0
            request.end = self.events.end[i] if self.events.end != NULL else LOWER_END
            if self.events.pool != NULL and self.events.pool[i]:
                request.captured[0] = self.pool_ids[self.events.pool[i], 0]
                request.captured[1] = self.pool_ids[self.events.pool[i], 1]
                request.in_capture = self.pools.is_captured(self.events.pool[i])
            attempt(self.allocator, &request, &placed)
            if placed.handle == NO_CHUNK and request.nbytes:
                # The replay goes on all the same: a trace of a larger device still says how often this one refuses.
                self.allocator.was_refused(&request)
            elif placed.handle != NO_CHUNK and not is_apart(self.allocator, &request.lane):
                if request.stream != self.allocator.streams.home:
                    leave_home(self.allocator, &placed, request.stream, None)
            self.failed += request.nbytes > 0 and placed.handle == NO_CHUNK
            self.keep(i, &request, placed.handle, placed.ptr)
        elif self.events.op[i] == RELEASE and self.events.pool != NULL and self.events.pool[i]:
            self.acquire_open()
            self.allocator.lock.release()
            self.pools.empty(self.events.pool[i])
        elif self.events.op[i] == RELEASE:
            self.release()
        elif handle[0] != NO_CHUNK:
            self.acquire_open()
            self.tally.live -= self.allocator.pool.chunks[handle[0]].requested_size
            self.allocator.frees.free_locked(handle[0])
            handle[0] = NO_CHUNK
        return 0

    cdef int release(self) except -1:
        self.acquire_open()
        self.allocator.lock.release()
        self.allocator.release_free_regions()
        return PyErr_CheckSignals()     # a trace may hold any number of these, and each may call a driver

    cdef int acquire_open(self) except -1:
        """Takes the lock, and raises ClosedError if the allocator is closed: its handles mean nothing then."""
        self.allocator.acquire()
        if self.allocator.life.is_closed:
            self.allocator.lock.release()
            raise ClosedError(_CLOSED)
        return 0

    cdef size_t play_with_fences(self, size_t start, size_t end) except 0:
        """Plays events on a device whose streams may be unfinished, where each free on another stream must ask the
        device. Returns the index that it has reached: `end`, or the point from which nothing waits any more."""
        cdef size_t i = start
        while i < end:
            self.play_one(i)
            if self.events.timeline != NULL:
                # The figures of an event are read at one moment, if other threads use the allocator beside the replay.
                self.allocator.acquire()
                self.note_locked(i)
                self.allocator.lock.release()
            i += 1
            if self.allocator.streams.by_stream and self.plays_alone():
                break
        return i

    cdef void keep(self, size_t i, Request* request, ChunkHandle handle, uint64_t ptr) noexcept:
        self.events.handles[self.events.number[i]] = handle
        self.events.addresses[i] = ptr
        if handle != NO_CHUNK:
            self.tally.live += request.nbytes
            self.tally.peak_live = max(self.tally.peak_live, self.tally.live)

    cdef int hand_over(self) except -1:
        """Hands what is still live over to the caller: it is indexed by address from now on."""
        cdef Py_ssize_t i
        for i in range(self.handles.shape[0]):
            if self.handles[i] != NO_CHUNK:
                hand_over_chunk(self.allocator, self.handles[i])
        return 0

    cdef int take_back(self) except -1:
        """Frees what is live, after an error. If the device fails or a second Ctrl-C comes, the rest is left to the
        next call of the allocator: the user does not know its address."""
        cdef Py_ssize_t i
        interrupt = None
        # Under one lock what can be, since there may be millions. The rest have fences to make.
        self.take_back_plain()
        for i in range(self.handles.shape[0]):
            if self.handles[i] == NO_CHUNK or self.allocator.life.is_closed:
                continue
            try:
                self.acquire_open()
                self.allocator.frees.free_locked(self.handles[i])
            except BaseException as error:
                interrupt = interrupt if isinstance(error, Exception) else error
                self.leave_behind(self.handles[i])
            self.handles[i] = NO_CHUNK
        if interrupt is not None:
            raise interrupt
        return 0

    cdef int leave_behind(self, ChunkHandle handle) except -1:
        # A chunk that another thread adds moves the records.
        self.allocator.acquire()
        cdef int64_t allocation_id = self.allocator.pool.chunks[handle].allocation_id
        self.allocator.lock.release()
        self.allocator.frees.leave(handle, allocation_id, LOCK_TAKEN)
        return 0

    cdef void take_back_plain(self) noexcept:
        """Frees, under one lock, all that no other stream uses."""
        cdef Py_ssize_t i
        cdef ChunkHandle handle
        self.allocator.acquire()
        for i in range(self.handles.shape[0]):
            handle = self.handles[i]
            if handle == NO_CHUNK or self.allocator.life.is_closed:
                continue
            if not self.allocator.pool.chunks[handle].state & USED_ELSEWHERE and self.allocator.pool.free_chunk(handle):
                self.handles[i] = NO_CHUNK
        self.allocator.lock.release()
