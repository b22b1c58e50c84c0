"""Allocators: what a user holds. How a request becomes a chunk stands in _chunk_allocator.pyx and _misses.pyx."""

import gc

cimport cython
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.turns cimport TurnAt, count_by, counted, take_turns
from bfc.interpreter._process cimport exiting
from bfc._core cimport (
    ENDS, HISTORY_ANNOTATE, INDEXED, NO_CHUNK, TRACED, USED_ELSEWHERE, Chunk, ChunkHandle, History, HistoryRecord, Lane,
    Region, Release, Tracing,
)
from bfc.buffers._arguments cimport address_from, addresses_from, alignment_from, size_from, sizes_from, small_int
from bfc.buffers._scopes cimport current_stream, number_of_owner, owner_here, owner_names, owners_used, scopes_open
from bfc.buffers._buffer cimport Buffer, BufferView, BufferOwner, become
from bfc.allocators._changes cimport extend_chunk
from bfc.allocators._lock cimport BETWEEN_OTHERS, acquire_lock
from bfc.allocators._private_pools cimport default_pool, id_of, scope_of as scope_of_pool
from bfc.allocators._reasons cimport FREES_PENDING, HAS_NOTER, IS_TRACED, KEEPS_HISTORY
from bfc.allocators._reading cimport (
    ChunkRow, RegionRow, bytes_of_chunks, chunk_at, copy_columns, count_bookkeeping, is_asleep_in, is_live_in,
    raise_invalid_pointer,
)
from bfc.allocators._recorder cimport new_history
from bfc.allocators._frees cimport AGAIN, QUERY, RECORD, WAIT, report_unraisable
from bfc.allocators._tags cimport names_asleep, scope_of
from bfc.allocators.mapping._address_ranges cimport Faults, raise_faults
from bfc.allocators.mapping._sleep cimport wake_up
from bfc.allocators._plans cimport Planned, new_step
from bfc.allocators._chunk_allocator cimport (
    CONTIGUOUS, FROM_UPPER_END, OR_NONE, ChunkAllocator, Placement, Request, closed, is_apart, is_foreign,
)
from bfc.allocators._plan_use cimport planned_part, put_plan, stop_watch
from bfc.allocators._captured cimport end_scope, note_captured_streams
from bfc.allocators._tagged cimport put_tags_to_sleep, stats_of_tags, tags_asleep
from bfc.allocators._looking cimport look, stats_now
from bfc.allocators._misses cimport allocate_placement, take_back

from bfc.allocators import _plans
from bfc.allocators._frees import PUT_OFF as _PUT_OFF
from bfc.allocators.graph_pool import Capture, GraphPool
from bfc.errors import ClosedError, InvalidPointerError, SettingsError, out_of_host_memory
from bfc.pytorch import words as _words
from bfc.pytorch.rules import NEWEST as _NEWEST, rules_of
from bfc.snapshots import columns as _columns, leaks as _leaks
from bfc.snapshots.refusal import out_of_memory
from bfc.units import parse_bytes

cdef extern from "debug.h":
    const int BFC_DEBUG

cdef extern from "history.hpp":
    pass
cdef extern from "owners.hpp":
    pass
cdef extern from "usage.hpp":
    pass
cdef extern from "pool_usage.hpp":
    pass
cdef extern from "plan_server.hpp":
    pass

cdef extern from "quick_methods.hpp" namespace "bfc":
    ctypedef PyObject** Arguments
    ctypedef PyObject* (*Method)(PyObject* self, Arguments given, Py_ssize_t count, PyObject* names) noexcept
    ctypedef PyObject* (*QuickMethod "bfc::Method")(PyObject*, Arguments, Py_ssize_t, PyObject*) except NULL
    Method put_in_front(PyTypeObject* type, const char* name, QuickMethod quick) except? NULL

cdef extern from "py_int.hpp" namespace "bfc":
    cbool plain_int "bfc::small_int"(PyObject* number, uint64_t* found)

cdef extern from *:
    """
    // Python's headers up to 3.12 declare these without extern "C". So they get other names here, which link to
    // Python's.
    extern "C" int bfc_track(unsigned domain, uintptr_t ptr, size_t size) __asm__("PyTraceMalloc_Track");
    extern "C" int bfc_untrack(unsigned domain, uintptr_t ptr) __asm__("PyTraceMalloc_Untrack");
    """
    int track "bfc_track"(unsigned int domain, uintptr_t ptr, size_t size) noexcept nogil   # with the GIL
    int untrack "bfc_untrack"(unsigned int domain, uintptr_t ptr) noexcept nogil


cdef inline object owned(PyObject* made):
    """Takes over a new reference, as C functions return it."""
    found = <object>made
    Py_DECREF(found)
    return found


cdef inline int hit_at_once(Allocator self, uint64_t nbytes, uint64_t on, Placement* placed) except -1:
    """The fast path of an allocation: a hit that needs nothing but the pool. Returns whether it was one."""
    # One word for all that may have to be done besides: each of these asked by itself would cost every hit.
    if nbytes == 0 or not self.reasons.none():
        return False
    cdef bint elsewhere = on != self.streams.home
    # An unordered stream may not reuse what was freed on it, and the alias is a second name of stream 0.
    if elsewhere and (self.streams.may_be_unordered or on == self.streams.default_alias):
        return False
    cdef uint32_t owner = owner_here(self) if owners_used.load() else 0
    acquire_lock(self.lock)     # under which lanes come and go
    cdef bint is_hit = (not self.life.is_closed
                        and (not elsewhere or self.streams.by_stream or self.streams.has_lanes.get())
                        and self.pool.books.owned.knows(owner) and self.hit(nbytes, on, placed))
    if owner and is_hit:
        self.pool.set_owner(placed.handle, owner)
    self.lock.release()
    if BFC_DEBUG >= 2 and self.pool.check_is_due():
        self.check_books()
    return is_hit


cdef inline int free_at_address(Allocator self, uint64_t address) except -1:
    """The fast path of a free: one that needs nothing but the pool. Returns whether it was one."""
    if not self.reasons.none():
        return False
    # Found and freed at once: of two frees of an address one is refused.
    acquire_lock(self.lock)
    cdef bint freed = self.pool.free_plain(address)
    if freed:
        self.frees.count.add(1)
    self.lock.release()
    if BFC_DEBUG >= 2 and self.pool.check_is_due():
        self.check_books()
    return freed


cdef Buffer own_buffer(Allocator allocator, Buffer buffer):
    """The buffer itself, or the one under a view; InvalidPointerError where it is another allocator's, ClosedError
    where it was freed."""
    while isinstance(buffer, BufferView) and (<BufferView>buffer).base is not None:
        buffer = (<BufferView>buffer).base
    if buffer.owner is not allocator:
        raise InvalidPointerError("this buffer comes from another allocator")
    if buffer.is_freed():
        raise BufferOwner.why_not(allocator, buffer.handle, 0)
    return buffer


@cython.no_gc_clear
cdef class Allocator(ChunkAllocator):
    """The base class of `BFCAllocator` and `CachingAllocator`. It cannot be made itself.

    Attributes
    ----------
    strict : bool
        True if the allocator refuses whatever the original would refuse.
    retry_seconds : float
        How long a request that does not fit waits for other threads to free memory.

    Notes
    -----
    Any thread may call any method. Every method that changes something raises MemoryError if the
    host has no memory for the bookkeeping; nothing has changed then.
    """

    # -- allocate -----------------------------------------------------------------------------------------------------

    def allocate_raw(self, nbytes, stream=None, *, alignment=None, freed_before=None, allocation_end=None):
        """Allocate `nbytes` bytes and return their address.

        Parameters
        ----------
        nbytes : int
            The size in bytes, from 0 to 2**63 - 1.
        stream : int, stream object or None, optional
            The stream that uses the memory first: a handle, or an object with `__cuda_stream__`. None
            is the stream of the enclosing `bfc.use_stream`, or else stream 0. A BFCAllocator treats a
            stream that is not its own as if `record_stream` had been called for it.
        alignment : int, optional
            A power of two that the address must be a multiple of, such as 4096 for O_DIRECT, or 2 MiB for
            memory that NCCL registers. Addresses are multiples of 256 (of 512 from a CachingAllocator)
            anyway; what lies before an address that is aligned to more stays free. Where memory is mapped
            page by page, such a request gets a region, like one that is `contiguous`. With `strict`, a
            BFCAllocator ignores it under the rules of TensorFlow 2.21, as TensorFlow does.
        freed_before : int or callable, optional
            Use only memory that was freed up to this count of the timing counter (see
            `SharedCounter`); a callable returns the count. Only for a BFCAllocator.
        allocation_end : AllocationEnd or str, optional
            "lower" or "upper": from which end of its memory a partitioned BFCAllocator serves the
            request. None is the lower end.

        Returns
        -------
        int
            The address; 0 for 0 bytes, which counts as no allocation.

        Raises
        ------
        OutOfMemoryError
            If no free chunk is large enough and no region could be added.
        TypeError
            If an argument has the wrong type (a text such as "3 MiB" is for `allocate`), or a
            CachingAllocator gets `freed_before`.
        ValueError
            If `nbytes` is negative or above 2**63 - 1, if `alignment` is not a power of two or is
            too large, or if `allocation_end` is no end of this allocator.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: O(log n) in the free chunks, no device call on a hit. Source: `BFCAllocator::AllocateRaw`,
        TensorFlow's behaviour, 2.2.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
        >>> hex(allocator.allocate_raw(1000)), hex(allocator.allocate_raw(257))
        ('0x10000000000', '0x10000000400')
        """
        cdef Placement placed
        cdef uint64_t size, on = 0, more = 0 if alignment is None else self.alignment_for(alignment_from(alignment))
        cdef int how = 0 if allocation_end is None else self.end_for(allocation_end)
        if stream is None and scopes_open.load():
            stream = current_stream()
        # What is asked in a special way goes the slow way from the start: the fast path knows sizes and streams alone.
        if (freed_before is not None or more or how or not small_int(nbytes, &size)
                or not (stream is None or small_int(stream, &on)) or not hit_at_once(self, size, on, &placed)):
            allocate_placement(self, size_from(nbytes), self.stream_of(stream), stream, freed_before, how, more,
                               &placed)
        cdef PyObject* address = self.addresses.get(placed.ptr)
        if address == NULL:
            take_back(self, &placed)
        return owned(address)

    def allocate(self, nbytes, stream=None, *, alignment=None, bint contiguous=False, allocation_end=None):
        """Allocate `nbytes` bytes as a `Buffer`, which frees itself.

        Parameters
        ----------
        nbytes : int or str
            The size in bytes, or a text such as "3 MiB".
        stream : int, stream object or None, optional
            The stream that uses the memory first, as in `allocate_raw`. But None, with no enclosing
            `bfc.use_stream`, is the allocator's own stream.
        alignment : int, optional
            As in `allocate_raw`.
        contiguous : bool, optional
            The memory must be one physical allocation of the device, and not pages that are mapped end to
            end: for a library that registers or shares memory by its physical allocation. It then comes
            from a region, which `release_free_regions` gives back once it is free.
        allocation_end : AllocationEnd or str, optional
            As in `allocate_raw`.

        Returns
        -------
        Buffer
            The allocation. It is freed when the buffer is collected, and earlier by `Buffer.free`.

        Raises
        ------
        OutOfMemoryError
            If no free chunk is large enough and no region could be added.
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is malformed, negative or above 2**63 - 1, or if `alignment` is not a power of
            two or is too large; with `contiguous`, if the allocator joins regions that lie end to end,
            or inside `tag`, whose memory is mapped.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: as `allocate_raw`, and one Python object.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate("3 MiB")
        >>> buffer.nbytes, allocator.requested_size(buffer.ptr)
        (3145728, 3145728)
        """
        cdef uint64_t size, on = self.streams.home
        if not small_int(nbytes, &size):
            size = size_from(nbytes) if PyLong_CheckExact(nbytes) else parse_bytes(nbytes)
        cdef Buffer buffer = Buffer.__new__(Buffer)
        cdef Placement placed
        if (alignment is not None or stream is not None or scopes_open.load() or contiguous
                or allocation_end is not None):
            on = place_as_asked(self, size, stream, alignment, allocation_end, CONTIGUOUS if contiguous else 0, &placed)
        elif not hit_at_once(self, size, on, &placed):
            allocate_placement(self, size, on, None, None, False, 0, &placed)
        become(buffer, self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
        count_by(self.life.live_buffers, <int64_t>(placed.allocation_id != 0))
        return buffer

    def try_allocate(self, nbytes, stream=None, *, alignment=None, bint contiguous=False, allocation_end=None):
        """Allocate like `allocate`, but return None where that raises OutOfMemoryError.

        Parameters
        ----------
        nbytes : int or str
            The size in bytes, or a text such as "3 MiB".
        stream : int, stream object or None, optional
            As in `allocate`.
        alignment : int, optional
            As in `allocate`.
        contiguous : bool, optional
            As in `allocate`.
        allocation_end : AllocationEnd or str, optional
            As in `allocate_raw`.

        Returns
        -------
        Buffer or None
            None if no free chunk is large enough and no region could be added.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If `allocate` would raise it.
        MemoryError
            If the host has no memory for the bookkeeping.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        AsleepError
            If the tag of the enclosing `tag` sleeps.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        It tries all that `allocate` tries, and waits as long (`retry_seconds`). A refusal counts as one, in
        `memory_stats()["num_ooms"]` and in a history, and out-of-memory observers are called. No error
        is built, and no report written (`bfc.set_oom_report`).

        Cost: as `allocate`.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"))
        >>> batch = allocator.try_allocate("100 MiB") or allocator.try_allocate("50 MiB")
        >>> batch.nbytes >> 20
        50
        """
        cdef uint64_t size = size_from(nbytes) if PyLong_CheckExact(nbytes) else parse_bytes(nbytes), on
        cdef Buffer buffer = Buffer.__new__(Buffer)
        cdef Placement placed
        on = place_as_asked(self, size, stream, alignment, allocation_end, OR_NONE | (CONTIGUOUS if contiguous else 0),
                            &placed)
        # A request of 0 bytes has no allocation, and is no refusal.
        if size and placed.allocation_id == 0:
            return None
        become(buffer, self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
        count_by(self.life.live_buffers, <int64_t>(placed.allocation_id != 0))
        return buffer

    @property
    def tracemalloc_domain(self):
        """The domain that `set_tracemalloc_domain` has set; None by default."""
        return self.pool.books.owned.tracing.domain or None

    def set_tracemalloc_domain(self, domain):
        """Let Python's tracemalloc count the allocator's memory by line, under a domain of its own.

        While tracemalloc is tracing, its snapshots have the bytes in use that each line of the program
        has allocated. `tracemalloc.DomainFilter(True, domain)` shows them alone.

        Parameters
        ----------
        domain : int or None
            A number from 1 to 2**32 - 1; Python's own memory has domain 0. None ends it, and
            tracemalloc forgets the allocator's memory.

        Raises
        ------
        ValueError
            If the number is too small or too large.
        TypeError
            If it is not an int.

        Notes
        -----
        It counts what is allocated from Python from then on, as `Stats.bytes_in_use` does: whole chunks,
        until they can be used again. It does not count what a replay allocates, nor PyTorch's tensors
        under `bfc.use`. Allocators whose addresses may be equal (simulated ones) need domains of their
        own.

        Cost: about 1 us for each allocation, more where tracemalloc keeps many frames.

        Examples
        --------
        >>> import tracemalloc, bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.set_tracemalloc_domain(7)
        >>> tracemalloc.start()
        >>> ptr = allocator.allocate_raw(3 << 20)
        >>> on_device = tracemalloc.DomainFilter(True, 7)
        >>> snapshot = tracemalloc.take_snapshot().filter_traces([on_device])
        >>> tracemalloc.stop()
        >>> [statistic.size for statistic in snapshot.statistics("lineno")]
        [3145728]
        """
        cdef uint32_t number = 0
        cdef size_t i
        if domain is not None:
            if not isinstance(domain, int):
                raise TypeError(f"a domain is an int or None, not {type(domain).__name__}")
            if not 0 < domain < 1 << 32:
                raise ValueError(f"a domain is a number from 1 to 2**32 - 1, not {domain}: 0 is Python's own memory")
            number = domain
        # No free comes in between, which would tell the new domain of what the old one has.
        self.acquire()
        for i in range(self.pool.chunk_count):
            if self.pool.chunks[i].state & TRACED:
                self.pool.books.owned.tracing.forget(self.pool.books.owned.tracing.domain, self.pool.chunks[i].ptr)
                self.pool.chunks[i].state &= ~<uint32_t>TRACED
        # What lives is told to no new domain: tracemalloc would count it for the line that calls this.
        self.pool.books.owned.tracing = Tracing(number, track, untrack)
        self.reasons.put(IS_TRACED, number != 0)
        self.lock.release()

    def _swap_noter(self, noter):
        """From now on `noter(allocation_id)` is called after each allocation. Returns the previous
        noter, or None."""
        noter, self.recorder.noter = self.recorder.noter, noter
        self.reasons.put(HAS_NOTER, self.recorder.noter is not None)
        return noter

    # -- plans --------------------------------------------------------------------------------------------------------

    def use_plan(self, plan, *, bint strict=False, gate=0.95, steps=None):
        """Serve a plan from now on, or none.

        Each region of the plan is taken when the first request for a place in it comes; of a plan without a head, and
        with `strict`, at once. Where memory is mapped page by page, pages are made as their places are first touched.
        Requests that come as planned have their places there; the policy serves all others.

        Parameters
        ----------
        plan : Plan or None
            A plan for this policy. None ends the plan in use: its regions go back once nothing lives in
            them.
        strict : bool, optional
            Raise an error if the plan is not served, and take all of its memory at once. By default there is a
            warning, and the policy serves all requests.
        gate : float or None, optional
            The plan is served only if the policy reserved less than this part of what it needed without the
            plan, when it replayed the recording. None serves any plan. An allocator that maps memory page by
            page serves any plan: it lends the pages that a plan leaves idle, at first to their own stream.
        steps : "auto" or None, optional
            With "auto" steps also begin by themselves, where the requests are those of the head of an
            iteration: for programs that cannot be edited. None: only `step` begins them.

        Raises
        ------
        PlanError
            If the plan is for the other policy, or for a device whose addresses are less aligned; in pages, if
            its streams share memory; and with `strict` if it would not have paid, or needs more than the
            limit or the device leaves.
        TypeError
            If it is not a plan.
        ValueError
            If the allocator is `strict`, or has a timing counter, if `gate` is not above 0, or if `steps` is
            neither None nor "auto".
        RuntimeError
            If a step is open, or a stream is being captured: the driver gives no memory meanwhile.
        SubAllocatorError
            If the device failed, with something other than "out of memory". No plan is served then.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        An allocator in which nothing lives serves the plan from its head on. Where less than seven eighths of the head
        was asked for when the first step begins, and something else was, the plan is for another program: it ends, with
        a warning. In one that has memory in use, what the head allocates counts as allocated already, and the region of
        what is never freed is not taken.

        Where lengths vary, the region of the bodies grows with those that come. It begins with room for none if all
        iterations of the recording were foretold; else, with `strict`, and in pages, with room for all that were
        recorded.

        With ``steps="auto"`` a step begins with a request that is one of the first of an iteration in the plan, once
        all of the iteration before has been asked for, or hardly anything of it lives. If what follows is not as
        planned, it was none, and the policy goes on. Where no iteration comes for long, the region of the bodies goes
        back; where none is recognised, the plan ends, with a warning. A step of `step` goes before.

        Examples
        --------
        >>> import bfc
        >>> trace = bfc.Trace([0, 0, 1, 1] * 3, [0, 1, 0, 1] * 3, [3 << 20, 1 << 20, 0, 0] * 3)
        >>> plan = bfc.Plan.from_trace(trace, marks=[0, 4, 8])
        >>> pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> pool.use_plan(plan)
        >>> with pool.step("train"):
        ...     one, other = pool.allocate("3 MiB"), pool.allocate("1 MiB")
        >>> pool.stats().pool_bytes >> 20, pool.plan_stats()["hits"]
        (4, 2)
        """
        cdef Planned planned = planned_part(self)
        if self.life.is_closed:
            raise closed()
        if gate is not None and not gate > 0:
            raise ValueError(f"gate is a part of what is reserved without a plan, such as 0.95, or None, not {gate!r}")
        if steps not in (None, "auto"):
            raise ValueError(f"steps is None, where the program calls step(), or 'auto', not {steps!r}")
        if plan is None:
            stop_watch(self)
            try:
                planned.use(None, None, None, strict, False)
            finally:
                self.plan_changed()     # the plan has ended, even if the device takes nothing back
            return
        if not hasattr(plan, "_served"):
            raise TypeError(f"a plan is a bfc.Plan or None, not {type(plan).__name__}")
        if self.strict:
            raise ValueError("an allocator with strict=True places as the original does, and the original has no plans")
        gate = planned.gate_for(gate)
        if self.pool.times.counter != NULL:
            raise ValueError("a plan does not know when memory may be used again by the timing counter")
        if self.pool.features & ENDS:
            raise ValueError("a plan has places of its own, and none at two ends of the memory")
        # Asked before anything changes: whether a plan pays is known from its own figures.
        declined = None if gate is None else plan._declined(gate, by_itself=steps is not None)
        stop_watch(self)
        planned.turns.follows = steps is not None
        put_plan(self, plan, None if gate is None else _plans.make_watch(plan, gate), declined, strict, False)

    def _resume_plan(self, plan, watch):
        """Serves a plan from now on whose head is there already: what a watch has made of the last steps."""
        planned_part(self)
        put_plan(self, plan, watch, None, False, True)

    def _end_plan(self, str why):
        """Ends the plan in use, since it has not paid."""
        planned = planned_part(self)
        try:
            planned.end_plan(why)
        finally:
            self.plan_changed()

    def step(self, str kind not None="train"):
        """One iteration of a program, as a context manager: requests inside come as the plan in use expects them.

        Parameters
        ----------
        kind : str, optional
            The kind of iteration, as in the plan. What stands behind a colon does not count: "train:512" is a
            step of the kind "train". A kind that the plan does not have is served by the policy, which also
            uses what the plan leaves idle.

        Returns
        -------
        Step
            The context manager. Without a plan it does nothing.

        Raises
        ------
        RuntimeError
            If a step is open already when this one is entered, of this thread or another: an allocator
            has one step at a time.
        SubAllocatorError
            If the device fails, when the step is entered, to take back what the one before took beside the
            plan, or to give the region of the bodies again. The step has not begun then.

        Notes
        -----
        What a step leaves alive stays alive; requests whose places it takes get others. A forked child has a plan of
        its own, at the same point.

        While a stream is captured no request gets a place: a graph has memory of its own, since it writes there at
        each replay. A step that begins in a capture asks the device for nothing and gives nothing back, and the plan
        does not change. A capture that begins in another thread meanwhile waits until the step has begun.

        Examples
        --------
        >>> import bfc
        >>> pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> with pool.step("train"):
        ...     buffer = pool.allocate("1 MiB")
        """
        return new_step(self, planned_part(self), kind)

    def record_plan(self, iterations=3):
        """Record steps, to plan them while the program runs.

        Parameters
        ----------
        iterations : int, optional
            How many steps of each kind become one. One more is recorded, to learn what the last of
            them leaves alive; then the recording stops by itself.

        Returns
        -------
        Recording
            A context manager, whose method `plan` makes the plan.

        Raises
        ------
        ValueError
            If it is not from 1 to 100.
        TypeError
            If it is not an int.

        Notes
        -----
        A history that is being recorded ends. The plan has no head: what is allocated already stays where it is, so
        a program saves more if it saves the plan of a recorded run, and begins with it.

        Cost: that of `record_history` without frames, and a copy of the history at each step.
        """
        if not isinstance(iterations, int):
            raise TypeError(f"iterations is an int, not {type(iterations).__name__}")
        if not 1 <= iterations <= 100:
            raise ValueError(f"iterations is a number from 1 to 100, not {iterations}")
        planned_part(self)
        return _plans.make_recording(self, iterations)

    def plan_stats(self):
        """How well the plan in use fits the program.

        Returns
        -------
        dict
            `state` is "none", "declined" or "switched off" (`why` says why), "between steps" or "in step". With a
            plan in use there are also, counted since then: `hits`, `guests` and `side`, the requests that got a
            place, room that the plan leaves idle, or neither (the policy served or refused them), and the
            bytes of each (`hit_bytes`, ...); `moved`, those whose place was taken; `agreement`, the part of
            requests that got a place; `steps`, `recognised`, those that began by themselves, and
            `departed_steps`, those in which not all did;
            `first_departure`, or None, is a dictionary about the first such step: its `kind` and number
            (`step`); the number of the first `request` in it without a place, from 0; its `size` and that of
            the place it should have had (`place_size`), in bytes; and the Python `frames`, if a history keeps
            them. What is not known is None. `replanned` is how often a new plan came into use by itself;
            `has_body`, whether the region of the bodies is there, which goes back if memory runs out between
            steps; `span`, the bytes of the plan, with room for the lengths that there have been;
            `side_bytes_reserved`, those of the policy; and `budget_left`, the bytes that the plan still saves
            beside what the policy alone reserved for the recording, in proportion to `span`.
        """
        cdef dict found = planned_part(self).stats()
        if found.get("first_departure") is not None:
            noted = dict(found["first_departure"])
            noted["frames"] = self.recorder.frames.get(noted.pop("allocation_id"), ())
            found["first_departure"] = noted
        return found

    def _watch_steps(self, watcher):
        """From now on `watcher(kind)` is called when a step has begun, and `watcher(None)` when another history begins.
        None ends that. Returns the previous one."""
        cdef Planned planned = planned_part(self)
        watcher, planned.watcher = planned.watcher, watcher
        return watcher

    # -- captures -----------------------------------------------------------------------------------------------------

    def capture(self, stream, pool=None):
        """Capture a CUDA graph: allocations of the capture come from a pool that is the graph's own.

        Parameters
        ----------
        stream : int or stream object
            The stream whose capture begins inside of the `with`, by the library that you capture with.
        pool : GraphPool, optional
            Of an earlier capture, to share its memory. The graphs must then be launched one after the
            other, in the order of their captures.

        Returns
        -------
        context manager
            It enters with a `GraphPool`. Keep that as long as the graph.

        Raises
        ------
        RuntimeError
            If the stream is being captured already when it is entered, or `pool` was released.
        TypeError
            If `stream` is not a stream, or `pool` not a GraphPool.
        ValueError
            If the stream belongs to another device, or `pool` to another allocator.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        In the `with` come from the pool: what is allocated for `stream`, for streams that have joined
        its capture, and all that this thread allocates. While the stream captures, nothing that the
        driver forbids is called: no event is asked, a free of memory that captured streams use is put
        off until the capture is over, and a request that does not fit is refused without a retry. New
        memory is taken in the relaxed capture mode. If the `with` is left by an exception, the pool is
        released. Source: `torch.cuda.graph`, PyTorch's behaviour, 2.15.

        TensorFlow's allocator serves no captures. A BFCAllocator places what a graph is given as another
        BFCAllocator would that has no more to do, on regions that grow from 2 MiB on, for each stream of
        the graph by itself. They count against the limit, of which `allow_growth=False` leaves nothing
        once memory was allocated: such an allocator refuses what a graph asks for.

        Examples
        --------
        >>> import bfc
        >>> device = bfc.SimulatedSubAllocator("1 GiB")
        >>> allocator = bfc.CachingAllocator(device)
        >>> with allocator.capture(7) as pool:
        ...     buffer = allocator.allocate(1000, stream=7)
        >>> pool.use_count()
        1
        >>> pool.release()
        """
        if pool is not None and not isinstance(pool, GraphPool):
            raise TypeError(f"pool is a bfc.GraphPool, as capture() returns it, not {type(pool).__name__}")
        self.require_set_up()
        handle = int(self.stream_of(stream))
        # An error comes from the call that names the stream, and not only from the driver when the capture begins.
        self.sub_allocator.check_stream(handle)
        return Capture(self, handle, pool)

    def mark_capture_begin(self):
        """Say that a capture has begun, as PyTorch's `markCaptureBegin` does. `capture` does it by itself.

        From now on an allocation or a free asks the sub-allocator whether its stream captures, and
        waits for nothing if it does.

        Notes
        -----
        Source: PyTorch's behaviour, 2.15.
        """
        with planned_part(self).changes():     # in which a plan asks the driver for memory
            self.captures.mark(1)

    def mark_capture_end(self):
        """Say that a capture has ended.

        Raises
        ------
        RuntimeError
            If none has begun.
        """
        self.require_set_up()
        self.captures.mark(-1)

    def begin_allocate_to_pool(self, pool, streams="all"):
        """Divert allocations into a private pool, and hold a reference to it, as PyTorch's function does.

        Parameters
        ----------
        pool : tuple of (int, int)
            The pool's id. It is made if it is new.
        streams : {"all", "thread", "none"}, int or stream object, optional
            Whose allocations: those of every stream, of this thread, of none, or of one stream.

        Raises
        ------
        RuntimeError
            If the pool is in use already.
        TypeError
            If `pool` is not two integers, or `streams` neither a text nor a stream.
        ValueError
            If an integer of `pool` is negative or above 2**64 - 1, `pool` is (0, 0), the default pool,
            or one of a tag, or `streams` is another text.
        ClosedError
            If the allocator is closed.
        """
        self.require_set_up()
        if self.life.is_closed:
            raise closed()
        named = streams if isinstance(streams, str) else int(self.stream_of(streams))
        self.captures.pool_uses.begin(scope_of_pool(pool, named), self.strict)
        self.scopes_changed()
        self.recorder.note_of_pool(self.pool, self.lock, pool, _words.SCOPE_BEGINS)

    def end_allocate_to_pool(self, pool):
        """End what `begin_allocate_to_pool` has begun. The reference stays.

        Parameters
        ----------
        pool : tuple of (int, int)
            The pool's id.

        Raises
        ------
        RuntimeError
            If the pool is not in use.
        TypeError, ValueError
            If `pool` is not the id of a pool.
        """
        self.require_set_up()
        end_scope(self, pool, _words.SCOPE_ENDS)

    def release_pool(self, pool):
        """Take one reference to a private pool away. Without any, what it caches goes back with the next emptying.

        Parameters
        ----------
        pool : tuple of (int, int)
            The pool's id.

        Raises
        ------
        RuntimeError
            If it has no reference.
        TypeError, ValueError
            If `pool` is not the id of a pool.
        """
        self.require_set_up()
        # Memory does not go back here: upstream leaves it to the next empty_cache, and live tensors may outlast the
        # pool.
        if self.captures.pool_uses.release_reference(id_of(pool)):
            self.recorder.note_of_pool(self.pool, self.lock, pool, _words.LET_GO)
            self.pool_released(pool)

    def _pool_use_count(self, pool):
        """How many references a pool has; 0 if it is not known."""
        return self.captures.pool_uses.count_references(id_of(pool))

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
        if small_int(ptr, &address) and address and free_at_address(self, address):
            return
        address = address_from(ptr)
        if address == 0:
            # Upstream counts a free of NULL, too, and who waits for memory looks again.
            self.acquire()
            self.frees.count.add(1)
            self.lock.release()
            return
        free_address(self, address)

    # -- many at once -------------------------------------------------------------------------------------------------

    def allocate_many(self, sizes, stream=None):
        """Make one allocation for each size: all of them, or none.

        Parameters
        ----------
        sizes : iterable of int
            The sizes in bytes. An array of 64-bit ints goes fastest.
        stream : int, stream object or None, optional
            As in `allocate_raw`, for all of them.

        Returns
        -------
        numpy.ndarray of uint64, shape (len(sizes),)
            The addresses, in the order of `sizes`; 0 for 0 bytes.

        Raises
        ------
        OutOfMemoryError
            If one of them does not fit. Those before it have been freed again.
        TypeError
            If a size is not an int, or `stream` is not a stream.
        ValueError
            If a size is negative or above 2**63 - 1.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: about 20 ns a size on a hit, half of `allocate_raw` from Python.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> len(allocator.allocate_many([256, 512, 1024]))
        3
        """
        import numpy

        cdef vector[uint64_t] wanted
        cdef size_t done = 0, i
        cdef Placement placed
        # All sizes are read before the first allocation: a wrong one must not undo those before it.
        sizes_from(sizes, &wanted)
        if stream is None and scopes_open.load():
            stream = current_stream()
        cdef uint64_t on = self.stream_of(stream)
        # Once for all of them: it reads a context variable, which is Python.
        cdef uint32_t owner = owner_here(self) if owners_used.load() else 0
        found = numpy.empty(wanted.size(), numpy.uint64)
        cdef uint64_t[::1] addresses = found
        try:
            while done < wanted.size():
                # Asked again after each miss, which runs Python: the reasons against may have changed.
                if hits_are_plain(self, on):
                    done = allocate_hits(self, wanted, addresses, done, on, owner)
                if done < wanted.size():
                    allocate_placement(self, wanted[done], on, stream, None, False, 0, &placed)
                    addresses[done] = placed.ptr
                    done += 1
            if BFC_DEBUG >= 2 and self.pool.check_is_due():
                self.check_books()
        except BaseException as error:
            for i in range(done):
                if addresses[i]:
                    error = undo_at(self, addresses[i]) or error
            raise error
        return found

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
        # Outside of the lock, since it may raise.
        handles.resize(addresses.size())
        # All are looked up before the first is freed: a wrong address raises, and nothing has changed.
        self.frees.look_up_all(addresses, handles)
        if self.reasons.has(FREES_PENDING):
            self.frees.drain(0)
        while i < addresses.size():
            # Frames are those of the free, and are gathered by the path that frees one.
            if not self.recorder.keeps_free_frames:
                i = self.frees.free_many(addresses, handles, i)
            if i < addresses.size():
                if addresses[i]:
                    free_address(self, addresses[i])
                i += 1
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()

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
        ClosedError
            If it is a buffer of this allocator that was freed.
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
        cdef uint64_t address = 0, made_on = 0
        cdef int64_t allocation_id
        cdef bint elsewhere = False
        cdef ChunkHandle handle = NO_CHUNK
        cdef Buffer buffer
        if isinstance(ptr_or_buffer, Buffer):
            buffer = own_buffer(self, ptr_or_buffer)
            if buffer.nbytes == 0:
                return
            handle = buffer.handle
            allocation_id = buffer.allocation_id
        else:
            address = address_from(ptr_or_buffer)
            if address == 0:
                return
        # It is marked while it is known to live, so that its free waits for the stream.
        self.acquire()
        if address:
            handle = self.pool.handle_of(address)
            allocation_id = self.pool.chunks[handle].allocation_id if handle != NO_CHUNK else -1
        # A buffer's memory may have been freed by its address, and its record be another chunk's.
        elif not is_live_in(self.pool, handle, allocation_id):
            handle = NO_CHUNK
        if handle != NO_CHUNK:
            elsewhere = is_foreign(self, &self.pool.chunks[handle], on)
            made_on = self.pool.chunks[handle].stream
            if elsewhere:
                self.pool.chunks[handle].state |= USED_ELSEWHERE
        self.lock.release()
        if handle == NO_CHUNK and address:
            raise_invalid_pointer(self.pool, self.lock, address)
        if handle == NO_CHUNK:
            raise BufferOwner.why_not(self, buffer.handle, allocation_id)
        if elsewhere:
            # Uses that were noted without the GIL join those of Python: the free must find all in one place.
            self.fences.adopt(allocation_id)
            if self.fences.capture_is_marked():
                self.fences.note_captured(allocation_id, on, made_on)
            self.fences.uses(allocation_id, on, stream)

    # -- regions ------------------------------------------------------------------------------------------------------

    def release_free_regions(self):
        """Give every region without a live allocation back to the sub-allocator.

        The regions of a private pool are given back only after the pool was released. While the stream of
        this thread captures a graph, only those are given back, and no stream is asked.

        Returns
        -------
        int
            The bytes given back.

        Raises
        ------
        SubAllocatorError
            If the sub-allocator fails to take a region back. It is offered again by the next call of
            `release_free_regions` or `close`.

        Notes
        -----
        If regions grow and any goes, the next one starts small again. Source: `BFCAllocator::DeallocateFreeRegions`,
        TensorFlow's behaviour, 2.7, which upstream runs only when memory has run out.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
        >>> allocator.deallocate_raw(allocator.allocate_raw(100))
        >>> allocator.release_free_regions()
        2097152
        """
        cdef vector[Region] regions
        cdef uint64_t released
        cdef bint captures = self.fences.is_in_capture(self.streams.home)
        if not captures:
            self.frees.drain(RECORD | QUERY | AGAIN)    # what a capture has put off, too
        note_captured_streams(self)
        cdef int64_t mark = self.recorder.mark_release(self.pool, self.lock)
        self.acquire()
        cdef Release before = self.pool.begin_release(mark)
        self.pool.list_regions(regions, False)
        self.private_pools.keep_used(self.pool, not captures, default_pool(), regions)
        if self.private_pools.some_default(self.pool, regions):     # else a history does not tell a replay of it
            self.regions_released()
        # What an earlier release left is offered again, and counts as released by the call that offers it.
        released = self.source.forget(regions) + self.source.unreturned.nbytes
        self.private_pools.drop_empty(self.pool, default_pool())
        self.source.take_unreturned(regions)
        self.lock.release()
        try:
            self.source.give_back(regions, False)
            if BFC_DEBUG >= 2 and self.pool.check_is_due():
                self.check_books()
            if self.planned is not None:
                self.planned.give_back_empty()
            return released + (0 if captures else self.release_mapped())
        finally:
            self.pool.end_release(before)

    def empty_cache(self):
        """Call `release_free_regions`, under PyTorch's name.

        Returns
        -------
        int
            The bytes given back.
        """
        return self.release_free_regions()

    def close(self):
        """Give every region back, with live allocations or without.

        Addresses and buffers must not be used afterwards. Closing twice does nothing.

        Raises
        ------
        BufferError
            If another object still holds a view of the memory (an array, a memoryview). The allocator
            stays open then.
        SubAllocatorError
            If the device fails, or the sub-allocator fails to take a region back. The allocator is
            closed all the same; closing it again offers those regions again.

        Notes
        -----
        Cost: waits for the streams that still use freed memory; one call of the sub-allocator for each region.
        """
        cdef vector[Region] regions
        cdef bint viewed
        fault = None
        # With views in use it fails below, so there is nothing to wait for.
        if counted(self.exports) == 0:
            try:
                self.frees.wait_for_streams()
                self.frees.drain(QUERY | AGAIN)
            except Exception as error:
                fault = error   # even if the device fails, its memory is given back
        # From here on nobody exports a view, and no request finds memory.
        self.acquire()
        viewed = counted(self.exports) > 0
        if not viewed:
            self.life.is_closed = True
            self.source.forget_all(regions)
        self.lock.release()
        if viewed:
            raise BufferError(f"{self.exports} view(s) of this memory are in use (arrays, memoryviews): delete them, "
                              f"then close")
        self.frees.forget()
        # Blocks that broke the contract never came into the pool, and only the sub-allocator can take them.
        self.source.offer_rejected_again()
        try:
            self.source.give_back(regions, False)
        finally:
            self.tags.drop_kept()
            # Even if regions could not be given back: what is mapped does not depend on them.
            self.mapped.give_all_back()
        if fault is not None:
            raise fault

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __del__(self):
        if counted(exiting) or self.life.is_closed:
            return
        if counted(self.exports):
            self.life.is_abandoned = True   # views of the memory are garbage, too: the last one closes the allocator
            return
        try:
            self.close()
        finally:
            if not self.life.is_closed or self.source.unreturned.regions.size():
                self.close()    # it may have failed because the host had no memory

    cdef void last_view_gone(self) noexcept:
        """Closes an allocator that was garbage-collected while views of its memory remained: the last view to go does
        that."""
        cdef TurnAt turn
        turn.take(self)
        # At the exit the driver may be gone, and the process gives all memory back by itself.
        if self.life.is_abandoned and not counted(exiting):
            self.life.is_abandoned = False
            try:
                self.close()
            except BaseException as error:
                report_unraisable(error, _PUT_OFF)

    @property
    def closed(self):
        """True once `close()` has been called."""
        return self.life.is_closed

    # -- memory that is mapped page by page ---------------------------------------------------------------------------

    def page_stats(self):
        """How much memory is mapped, and what was called for that, of an allocator that maps page by page.

        Returns
        -------
        dict of str to int or float
            `page_size` in bytes; `pages`, all that were made and not released; `pages_owned`, those
            of which at least a part is in use; `views`; `slots_mapped`, how many addresses pages
            are mapped at; `stitches`, the views made so far; `creates`, `maps` (of pages),
            `set_accesses`, `unmaps`, `releases`, the calls so far; `stream_waits`, how often a
            stream had to wait for another one's work; `most_calls_of_a_request`; `lost_slots`,
            those that could not be unmapped; `driver_seconds`, the time in these calls.

        Raises
        ------
        ValueError
            If the allocator has neither `virtual_memory` nor `stitch`.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
        >>> address = allocator.allocate_raw(5 << 20)
        >>> allocator.page_stats()["pages"]
        3
        """
        return self.mapped.stats() or require_pages(self, "page_stats")

    def trim(self, keep=0, *, wait=False):
        """Give free pages back, of an allocator that maps page by page. Their addresses stay reserved.

        Parameters
        ----------
        keep : int or str, optional
            The bytes to keep: free pages go until no more than that is reserved, or no page is free.
        wait : bool, optional
            Wait for the streams that may still use them. If False, the pages of streams that are busy
            stay.

        Returns
        -------
        int
            The bytes given back.

        Raises
        ------
        ValueError
            If the allocator has neither `virtual_memory` nor `stitch`, or if `keep` is negative or malformed.
        SubAllocatorError
            If the device failed. What it did not take back is offered again by the next call.

        Notes
        -----
        Pages that have one address go first, and the largest free chunks before smaller ones. Then the
        views go, and the pages behind them. Cost: one call to unmap each row of pages, and one to
        release each page.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
        >>> allocator.deallocate_raw(allocator.allocate_raw(64 << 20))
        >>> allocator.trim("16 MiB")
        50331648
        """
        cdef uint64_t kept = parse_bytes(keep)
        require_pages(self, "trim")
        return trim_pages(self, kept, wait)

    def try_extend(self, buffer, nbytes):
        """Make an allocation larger where it is, without a copy.

        Parameters
        ----------
        buffer : Buffer or int
            The allocation, or its address.
        nbytes : int or str
            Its new size in bytes, from its present one on.

        Returns
        -------
        bool
            True if what lies behind it was free, or could be mapped. If False, nothing has changed.

        Raises
        ------
        InvalidPointerError
            If it is no live allocation of this allocator.
        ValueError
            If `nbytes` is less than the present size, or malformed.
        TypeError
            If an argument has the wrong type.
        ClosedError
            If the buffer was freed, or the allocator is closed.

        Notes
        -----
        Where memory is mapped page by page, new pages are mapped behind a chunk that is the last of its
        range. A view, which is what a request was stitched for, only grows up to its last page.

        Cost: O(log n) if enough is free behind it, otherwise the calls that map pages.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
        >>> cache = allocator.allocate("64 MiB")
        >>> allocator.try_extend(cache, "96 MiB"), cache.nbytes
        (True, 100663296)
        """
        cdef Buffer owned = None
        cdef uint64_t size = parse_bytes(nbytes), rounded = rounded_size(self, size), address
        if self.life.is_closed:
            raise closed()
        if isinstance(buffer, Buffer):
            owned = own_buffer(self, buffer)
        address = address_from(buffer) if owned is None else owned.start
        cdef uint64_t present = chunk_at(self.pool, self.lock, address).requested_size
        if size < present:
            raise ValueError(f"{address:#x} has {present} bytes, and would have {size}: try_extend makes nothing "
                             f"smaller")
        if not extend_now(self, address, rounded, size):
            # Nothing is moved: new memory helps only at the addresses behind the chunk, which only a range can map.
            if not self.mapped.extend(address, rounded):
                return False
            if not extend_now(self, address, rounded, size):
                return False    # another thread has taken it
        if owned is not None:
            owned.nbytes = size
        return True

    # -- what can be seen ---------------------------------------------------------------------------------------------

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
        return chunk_at(self.pool, self.lock, address_from(ptr)).requested_size

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
        return chunk_at(self.pool, self.lock, address_from(ptr)).size

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
        return chunk_at(self.pool, self.lock, address_from(ptr)).allocation_id

    @property
    def memory_limit(self):
        """The most bytes that the allocator takes from its sub-allocator."""
        return self.limit

    @property
    def stream(self):
        """The stream that the allocator belongs to, as an int; None for memory of the host (pinned)."""
        return self.visible_stream(self.streams.home)

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
        return stats_now(self)

    @property
    def bookkeeping_bytes(self):
        """The host memory that the allocator's records take, in bytes."""
        # The sizes of the tables change with each that another thread adds to.
        self.acquire()
        cdef uint64_t total = count_bookkeeping(self.pool)
        self.lock.release()
        return total

    @property
    def _lock_acquisitions(self):
        # The lock itself counts, so this one is in it.
        self.acquire()
        cdef uint64_t count = self.lock.acquisitions()
        self.lock.release()
        return count

    def reset_peak_stats(self):
        """Restart the peaks from what is in use and reserved now, and `largest_alloc_size` from 0."""
        # The peaks restart at what is in use at this moment.
        self.acquire()
        self.pool.restart_peaks()
        if self.pool.books.usage != NULL:
            self.pool.books.usage.restart_peaks()
            self.pool.books.pool_usage.restart_peaks()
        self.pool.counters.largest_alloc_size = 0
        self.lock.release()

    def reset_accumulated_stats(self):
        """Restart the counts from 0. Allocation ids go on."""
        # Both sets of counts restart between the same two requests.
        self.acquire()
        self.pool.counters.num_allocs = 0
        if self.pool.books.usage != NULL:
            self.pool.books.usage.restart_totals()
            self.pool.books.pool_usage.restart_totals()
        self.lock.release()

    def clear_stats(self):
        """Restart `num_allocs`, `largest_alloc_size` and the peak of bytes in use (TensorFlow's ClearStats).

        The first two restart from 0, the peak from what is in use now. The peak of reserved bytes stays.

        Returns
        -------
        bool
            Always True, as from upstream's BFC allocator.
        """
        # The peak restarts at what is in use at this moment.
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
        return look(self, history, True)

    def _look(self):
        """A snapshot without the history, which leaves no entry in it."""
        return look(self, False, False)

    def annotate(self, ptr, text):
        """Write a text about a live allocation into the history, as PyTorch 2.14 and later can.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.
        text : str
            What to write. Texts should repeat: the process keeps each one, as it does names of owners.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        ValueError
            If `text` is empty, or the allocator follows a version of PyTorch without annotations.
        TypeError
            If an argument has the wrong type.

        Notes
        -----
        The entry has the action "annotate", the bytes that were asked for, and the text as its owner:
        `user_metadata` in PyTorch's files. Where no history is recorded, nothing is written. Source:
        PyTorch's behaviour, 12.5 (V-14).

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.record_history()
        >>> allocator.annotate(allocator.allocate_raw(1000), "logits")
        >>> entry = allocator.snapshot().history[-1]
        >>> entry.action, entry.size, entry.owner
        ('annotate', 1000, 'logits')
        """
        torch = self.torch_now()
        if torch is not None and not rules_of(torch).has_annotations:
            raise ValueError(f"PyTorch {torch} has no annotations: torch={_NEWEST!r} has")
        cdef uint32_t number = number_of_owner(text)
        cdef Chunk chunk = chunk_at(self.pool, self.lock, address_from(ptr))
        # A lane that another thread opens moves the sets of bins, and a history may have ended.
        acquire_lock(self.lock)
        cdef Lane* lane = &self.pool.bin_sets[chunk.bin_set].lane
        if self.pool.books.history != NULL:
            self.pool.books.history.add(HistoryRecord(chunk.ptr, chunk.requested_size, lane.stream,
                                                      [lane.pool[0], lane.pool[1]], 0, 0, HISTORY_ANNOTATE, number))
        self.lock.release()

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
        self.frees.drain(0)
        # All is copied at one moment, and made into objects without the lock.
        self.acquire()
        cdef bint copied = copy_columns(self.pool, regions, chunks, pages)
        self.lock.release()
        if not copied:
            raise out_of_host_memory()
        packed = _columns.RegionColumns(b"", bytes_of_chunks(chunks), b"", None, self.recorder.frames_of_chunks(chunks),
                                        owners=owner_names)
        return _leaks.leaks_in(packed, repr(self))

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

    # -- history ------------------------------------------------------------------------------------------------------

    def record_history(self, enabled="all", *, context="all", stacks="python", max_entries=None, skip_actions=()):
        """Start to record what happens, as `torch.cuda.memory._record_memory_history()` does.

        What was recorded before is dropped.

        Parameters
        ----------
        enabled : {"all", "state", None}, optional
            "all" records a history; "state" only keeps the Python frames of what is live; None stops.
        context : {"all", "alloc", "state", None}, optional
            Keep the Python frames of allocations ("alloc" or "state"), of frees too ("all"), or of
            neither (None).
        stacks : {"python"}, optional
            C++ frames ("all" in PyTorch) cannot be had.
        max_entries : int, optional
            How many entries to keep, the newest; None keeps all.
        skip_actions : iterable of str, optional
            Actions that are not recorded, such as "free_requested".

        Raises
        ------
        ValueError
            If an argument is not one of the values above, or `max_entries` is negative.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: 64 bytes an entry; some microseconds for the frames of each call. In a BFCAllocator each
        hit then takes the slow path, half a microsecond more, and a replay goes call by call. Nothing
        while nothing is recorded. Source: PyTorch's behaviour, 3.4.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.record_history()
        >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
        >>> [entry.action for entry in allocator.history()]
        ['segment_alloc', 'alloc', 'free_requested', 'free_completed']
        """
        cdef History* history = new_history(enabled, context, stacks, max_entries, skip_actions)
        if self.planned is not None:
            if self.planned.watch is not None:
                self.planned.watch.lost()
            if self.planned.watcher is not None:
                self.planned.watcher(None)      # its history ends
        self.reasons.put(KEEPS_HISTORY, True)   # before there is a history: what is allocated from now on is noted
        # It begins between two requests, and the one before it is dropped without the lock.
        self.acquire()
        cdef bint is_closed = self.life.is_closed
        if not is_closed:
            history = self.pool.set_history(history)
        self.lock.release()
        del history
        if not is_closed:
            self.recorder.restart(enabled, context)
            self.fences.told.clear()
        # Under PyTorch's policy the pool itself notes hits, so they stay fast unless frames are kept.
        self.reasons.put(KEEPS_HISTORY, self.recorder.keeps_history(self.pool))
        if is_closed:
            raise ClosedError("this allocator is closed: nothing happens any more that could be recorded")

    def history(self):
        """What `record_history` has recorded, oldest first.

        Returns
        -------
        list of HistoryEntry
            Empty if nothing is recorded.

        Notes
        -----
        Cost: O(n) in the entries.
        """
        self.frees.drain(0)
        return self.recorder.history(self.pool, self.lock)

    def dump(self, path):
        """Write `snapshot().to_torch()` as a pickle that PyTorch's memory viewer opens.

        Parameters
        ----------
        path : str or os.PathLike
            The file to write. See `Snapshot.dump`.
        """
        self.require_set_up()
        self.snapshot().dump(path)

    # -- tags ---------------------------------------------------------------------------------------------------------

    def tag(self, name):
        """A context manager: what is allocated within belongs to a tag, which `sleep` can put to sleep.

        It holds in this thread, and in this asyncio task. It can be nested; the innermost one wins.

        Parameters
        ----------
        name : str or None
            Any name. A new one makes a new tag. None: what is allocated within belongs to no tag, even inside of
            another scope.

        Returns
        -------
        context manager
            To be used in a `with` statement, any number of times.

        Raises
        ------
        TypeError
            If `name` is neither a str nor None.
        ValueError
            If `name` is empty.

        Notes
        -----
        What is allocated within also has an owner of the tag's name (see `bfc.owner`), unless another
        owner is set further in.

        Each tag has memory of its own, if the allocator maps memory. An allocation within both a tag
        and a `use_mem_pool` raises a RuntimeError. Tensors that PyTorch takes from a `MemPool` over bfc
        (`bfc.use`, `mem_pool`) belong to no tag; under `install` and `replace` they do, but for those of
        autograd's own threads. While a tag of an allocator is entered, its allocations from Python
        take their slow way, a few hundred nanoseconds more.

        Examples
        --------
        >>> import bfc
        >>> pool = bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"), settings="expandable_segments:True")
        >>> with pool.tag("weights"):
        ...     weights = pool.allocate("64 MiB")
        >>> report = pool.sleep(keep={"weights": "host"})
        >>> pool.asleep, pool.stats().bytes_reserved
        (frozenset({'weights'}), 0)
        >>> pool.wake("weights")
        """
        return scope_of(self, self.tags, name)

    def sleep(self, keep=None, drop=None, *, keep_limit=None):
        """Give the memory of tags back to the device. Their allocations stay, at the same addresses.

        With no argument all tags sleep, and their contents are dropped. Otherwise those that are named
        do, and the others stay awake. A tag that sleeps already is left as it is.

        Parameters
        ----------
        keep : mapping, "host", "pinned" or callable, optional
            Where the contents go, by tag: {"weights": "host"}. "host" is ordinary memory of the host,
            "pinned" is pinned memory, which a GPU reads and writes faster. A callable is called with a
            number of bytes, 32 MiB at most at a time, and returns a writable buffer for them, such as
            an `mmap.mmap` of a file. One of these, not in a mapping, holds for all tags that `drop`
            does not name.
        drop : str or iterable of str, optional
            Tags whose contents are lost.
        keep_limit : int or str, optional
            The most bytes that the host may hold of all tags that sleep. None: no limit.

        Returns
        -------
        SleepReport
            What went, and how long it took.

        Raises
        ------
        BufferError
            If another object holds a view of memory of these tags (an array, a memoryview).
        SettingsError
            If the allocator maps no memory (`virtual_memory=True` and `expandable_segments:True` do), a
            part of the tag's memory is not mapped, or contents are to be kept of a simulated device,
            which has none.
        ValueError
            If a tag is unknown or named twice, or `keep` has another value.
        TypeError
            If a name is not a str.
        SubAllocatorError
            If the device fails, or one of the streams is being captured into a CUDA graph.
        MemoryError
            If the host has no room for what is to be kept, or `keep_limit` has none.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        It waits for all streams that used the memory and that the allocator knows of. Wait yourself for
        a stream that it was not told of. After an error everything is as before, and the call can be
        repeated; only what was to be dropped may be lost. If the device fails a second time while that
        is undone, the tags sleep all the same, and a note of the error says so.

        While a tag sleeps, its buffers can be freed; that copies and maps nothing. Allocating in the
        tag, and reading or exporting a buffer, raises `AsleepError`. Only live allocations are copied.

        Cost: one driver call to unmap each run of addresses, one to release each page, and the copy.

        Examples
        --------
        >>> import bfc
        >>> pool = bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"), settings="expandable_segments:True")
        >>> with pool.tag("weights"):
        ...     weights = pool.allocate(4).from_host(b"abcd")
        >>> with pool.tag("kv"):
        ...     cache = pool.allocate("256 MiB")
        >>> pool.sleep(keep={"weights": "host"}, drop=["kv"]).kept_bytes
        4
        >>> pool.wake()
        >>> bytes(weights)
        b'abcd'
        """
        return put_tags_to_sleep(self, keep, drop, keep_limit)

    def wake(self, *tags, fill=None):
        """Give sleeping tags memory again, at the same addresses, and their contents if they were kept.

        Parameters
        ----------
        *tags : str
            Which ones; without any, all that sleep. A tag that is awake is left as it is.
        fill : int, optional
            A byte, from 0 to 255. Memory whose contents were dropped is filled with it. By default
            the contents of such memory are undefined.

        Raises
        ------
        OutOfMemoryError
            If there is no room for all of them, even after what is cached was given back.
        SettingsError
            If memory of a simulated device is to be filled: it has no contents.
        ValueError
            If a tag is unknown, or `fill` is not a byte.
        TypeError
            If a name is not a str.
        SubAllocatorError
            If the device fails.
        AsleepError
            If the contents of a tag were lost, since the process was forked while they were copied.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        All of the tags wake, or none. After an error they sleep as before, what was kept is still
        kept, and the call can be repeated. The host's memory is given back once it has succeeded.
        What was freed meanwhile is neither mapped nor copied.

        Cost: one driver call to create each page, one to map it, one to give access to each run of
        addresses, and the copy.
        """
        if self.life.is_closed:
            raise closed()
        cdef uint64_t needed
        cdef list wanted = self.tags.to_wake(tags, fill)
        if not names_asleep(wanted):
            return
        if fill is not None and self.device.kind == "simulated":
            raise SettingsError("a simulated device has no contents to fill", key="fill", where="wake()")
        needed = wake_up(self.mapped, wanted, fill)
        if needed:
            gc.collect()    # buffers in reference cycles
            self.release_free_regions()
            # Once more, and no third time: what is free has gone back by now.
            needed = wake_up(self.mapped, wanted, fill)
        if needed:
            refused_by = repr(self.sub_allocator) if self.source.refused_bytes.get() else ""
            raise out_of_memory(needed, self.stats(), self.sub_allocator.total_bytes, refused_by,
                                look=self._look, waking=names_asleep(wanted))

    def tag_stats(self):
        """What each tag has.

        Returns
        -------
        dict of str to dict
            By tag: `"bytes_in_use"`, the requested bytes of its live allocations, awake or asleep;
            `"allocations"`, how many they are; `"asleep"`, whether it sleeps; and `"bytes_kept"`, the
            bytes on the host while it does. The private pools that sleep with a tag are counted.

        Notes
        -----
        Cost: one look at each chunk, for each tag.

        Examples
        --------
        >>> import bfc
        >>> pool = bfc.BFCAllocator(bfc.HostSubAllocator("1 GiB"), virtual_memory=True)
        >>> with pool.tag("kv"):
        ...     cache = pool.allocate(1000)
        >>> pool.tag_stats()["kv"]["bytes_in_use"]
        1000
        """
        return stats_of_tags(self)

    @property
    def asleep(self):
        """The names of the tags that sleep, as a frozenset."""
        return tags_asleep(self)

cdef uint64_t trim_pages(ChunkAllocator allocator, uint64_t keep, bint wait) except? 0xFFFFFFFFFFFFFFFF:
    cdef uint64_t released
    cdef Faults faults = Faults()
    allocator.frees.drain(QUERY | AGAIN | (WAIT if wait else 0))
    note_captured_streams(allocator)
    if not allocator.stitching.enter(0):
        return 0        # another thread maps: it needs memory
    try:
        released = allocator.stitching.trim(keep, wait, faults)
    finally:
        allocator.stitching.leave()
    raise_faults(allocator.sub_allocator, faults)
    if BFC_DEBUG >= 2 and allocator.pool.check_is_due():
        allocator.check_books()
    return released


cdef uint64_t place_as_asked(Allocator allocator, uint64_t size, object stream, object alignment,
                             object allocation_end, int how, Placement* placed) except? 0xFFFFFFFFFFFFFFFF:
    """Serves an `allocate` that has arguments besides the size. Returns the stream that the memory is for."""
    cdef uint64_t on = allocator.streams.home
    cdef uint64_t more = 0 if alignment is None else allocator.alignment_for(alignment_from(alignment))
    if allocation_end is not None:
        how |= allocator.end_for(allocation_end)
    if stream is None and scopes_open.load():
        stream = current_stream()
    if stream is not None:
        on = allocator.stream_of(stream)
    # OR_NONE is not among these: a hit is the same with and without it.
    if how & (CONTIGUOUS | FROM_UPPER_END) or more or not hit_at_once(allocator, size, on, placed):
        allocate_placement(allocator, size, on, stream, None, how, more, placed)
    return on


cdef int free_address(Allocator allocator, uint64_t address) except -1:
    cdef TurnAt turn
    turn.take(allocator)
    if allocator.recorder.keeps_free_frames:
        allocator.recorder.keep_free_frames(chunk_at(allocator.pool, allocator.lock, address).allocation_id)
    if allocator.reasons.has(FREES_PENDING):
        allocator.frees.drain(0)
    # Found and freed at once: of two frees of an address one is refused.
    allocator.acquire()
    cdef ChunkHandle handle = allocator.pool.handle_of(address)
    if handle == NO_CHUNK:
        allocator.lock.release()
        # Without the lock: to find out why makes a text, which runs Python.
        raise_invalid_pointer(allocator.pool, allocator.lock, address)
    allocator.frees.free_locked(handle)
    if BFC_DEBUG >= 2 and allocator.pool.check_is_due():
        allocator.check_books()
    return 0


cdef object undo_at(Allocator allocator, uint64_t address):
    """Frees an allocation whose address will not be returned. Returns what `Frees.undo` does."""
    # The handle is read with its id, which tells whether the chunk is still the same later.
    allocator.acquire()
    cdef ChunkHandle handle = allocator.pool.handle_of(address)
    cdef int64_t allocation_id = allocator.pool.chunks[handle].allocation_id if handle != NO_CHUNK else -1
    allocator.lock.release()
    if handle == NO_CHUNK:
        return None
    try:
        if allocator.recorder.keeps_free_frames:
            allocator.recorder.keep_free_frames(allocation_id)
    except MemoryError:
        pass
    return allocator.frees.undo(handle, allocation_id)


cdef bint hits_are_plain(Allocator allocator, uint64_t on) except -1:
    """Whether a hit for this stream needs nothing but the free chunk."""
    if not allocator.reasons.none():
        return False
    # Under BFC another stream first waits for the home stream, by a call of the driver.
    return not allocator.is_unordered(on) if allocator.streams.by_stream else on == allocator.streams.home


cdef size_t allocate_hits(Allocator allocator, const vector[uint64_t]& sizes, uint64_t[::1] addresses, size_t i,
                          uint64_t on, uint32_t owner) noexcept:
    """Serves the requests from the i-th on under one lock, while free chunks fit. Returns the index of the first
    request that none fits."""
    cdef Placement placed
    allocator.acquire()
    while i < sizes.size() and not allocator.life.is_closed and allocator.pool.books.owned.knows(owner):
        addresses[i] = 0
        if sizes[i]:
            if not allocator.hit(sizes[i], on, &placed):
                break
            allocator.pool.set_owner(placed.handle, owner)
            addresses[i] = placed.ptr
        i += 1
        if i % BETWEEN_OTHERS == 0:
            allocator.give_way()
    allocator.lock.release()
    return i


cdef int hand_over_chunk(Allocator allocator, ChunkHandle handle) except -1:
    """Indexes a chunk by its address and records its stream. A replay allocates chunks by handle, without either.
    """
    # Another thread may have closed the allocator during the replay.
    allocator.acquire()
    if allocator.life.is_closed:
        allocator.lock.release()
        raise ClosedError("this allocator was closed during the replay")
    cdef Chunk* chunk = &allocator.pool.chunks[handle]
    # A replay keeps handles. From here on the program knows the address alone.
    cdef bint indexed = chunk.state & INDEXED or allocator.pool.index_chunk(handle)
    cdef uint64_t stream = chunk.stream
    cdef int64_t allocation_id = chunk.allocation_id
    cdef Lane* lane = &allocator.pool.bin_sets[chunk.bin_set].lane
    cdef bint elsewhere = stream != allocator.streams.home and not is_apart(allocator, lane)
    if elsewhere:
        chunk.state |= USED_ELSEWHERE
    allocator.lock.release()
    if not indexed:
        raise out_of_host_memory()
    if elsewhere:
        allocator.fences.uses(allocation_id, stream, None)
    return 0


cdef int require_pages(Allocator allocator, str method) except -1:
    if allocator.life.is_closed:
        raise closed()
    return allocator.mapped.check_pages(method)


cdef uint64_t rounded_size(Allocator allocator, uint64_t nbytes) noexcept:
    cdef Request request
    # The settings by which a policy rounds change under the lock.
    allocator.acquire()
    # Only to round: each policy has its own rule.
    allocator.set_request(&request, nbytes, allocator.streams.home)
    allocator.lock.release()
    return request.rounded


cdef bint extend_now(Allocator allocator, uint64_t address, uint64_t rounded, uint64_t nbytes) except -1:
    # The free chunk behind it is looked at and taken at once.
    allocator.acquire()
    cdef ChunkHandle handle = allocator.pool.handle_of(address)
    cdef bint asleep = handle != NO_CHUNK and is_asleep_in(allocator.pool, handle)
    cdef bint done = handle != NO_CHUNK and not asleep and extend_chunk(allocator.pool, handle, rounded, nbytes)
    cdef int64_t allocation_id = allocator.pool.chunks[handle].allocation_id if asleep else 0
    allocator.lock.release()
    if asleep:
        raise allocator.why_not(handle, allocation_id)
    return done


# -- the plainest calls -----------------------------------------------------------------------------------------------
# One plain int, no keyword, and no open scope of a stream. These stand in front of the methods, which read arguments by
# keyword, too, and do the same. What they do not serve, the methods do from the beginning.

cdef Method allocate_raw_as_asked, allocate_as_asked, deallocate_raw_as_asked


cdef PyObject* allocate_raw_plainly(PyObject* self, Arguments given, Py_ssize_t count, PyObject* names) except NULL:
    cdef Placement placed
    cdef uint64_t size
    cdef PyObject* address
    if count != 1 or names != NULL or scopes_open.load() or not plain_int(given[0], &size):
        return allocate_raw_as_asked(self, given, count, names)
    if not hit_at_once(<Allocator>self, size, 0, &placed):
        allocate_placement(<Allocator>self, size, 0, None, None, False, 0, &placed)
    address = (<Allocator>self).addresses.get(placed.ptr)
    if address == NULL:
        take_back(<Allocator>self, &placed)
    return address


cdef PyObject* allocate_plainly(PyObject* self, Arguments given, Py_ssize_t count, PyObject* names) except NULL:
    cdef Placement placed
    cdef uint64_t size, on = (<Allocator>self).streams.home
    if count != 1 or names != NULL or scopes_open.load() or not plain_int(given[0], &size):
        return allocate_as_asked(self, given, count, names)
    cdef Buffer buffer = Buffer.__new__(Buffer)     # first: nothing may fail once memory was taken
    if not hit_at_once(<Allocator>self, size, on, &placed):
        allocate_placement(<Allocator>self, size, on, None, None, False, 0, &placed)
    become(buffer, <Allocator>self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
    count_by((<Allocator>self).life.live_buffers, <int64_t>(placed.allocation_id != 0))
    Py_INCREF(buffer)
    return <PyObject*>buffer


cdef PyObject* deallocate_raw_plainly(PyObject* self, Arguments given, Py_ssize_t count, PyObject* names) except NULL:
    cdef uint64_t address
    if count != 1 or names != NULL or not plain_int(given[0], &address) or address == 0:
        return deallocate_raw_as_asked(self, given, count, names)
    if not free_at_address(<Allocator>self, address):
        return deallocate_raw_as_asked(self, given, 1, NULL)    # known: so they are not kept across the call
    Py_INCREF(None)
    return <PyObject*>None


take_turns(Allocator, b"allocate allocate_raw deallocate_raw try_allocate")     # those try the lock first
allocate_raw_as_asked = put_in_front(<PyTypeObject*>Allocator, "allocate_raw", allocate_raw_plainly)
allocate_as_asked = put_in_front(<PyTypeObject*>Allocator, "allocate", allocate_plainly)
deallocate_raw_as_asked = put_in_front(<PyTypeObject*>Allocator, "deallocate_raw", deallocate_raw_plainly)
