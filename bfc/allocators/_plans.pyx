"""Plans in use: which requests have a place in the regions of a plan, and what becomes of those regions.

The pool knows which places are taken (`PlanServer`). Here a plan comes into use, its regions are asked for and given
back, and steps begin and end. The source is called without the lock. A plan that is not in use any more keeps its
regions until nothing lives in them. Where memory is mapped page by page they are ranges (mapping/_plan_ranges.pyx).
"""

import os
import threading
import warnings

cimport cython
from cython.operator cimport dereference as deref
from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.nothrow cimport try_push_back
from bfc.native.turns cimport TurnAt, counted
from bfc._core cimport Counters, NO_LANE, NO_STREAM, ChunkHandle, PlanArea, PlanCounts, PlanServer, Pool, Region
from bfc.allocators._places cimport (
    add_plan, bind_stream, divide, drop_plan, list_places, point_places, read_length, set_of_region,
)
from bfc.allocators._lock cimport Lock, acquire_lock
from bfc.allocators._source cimport ADDED, OVERLAPS, Asking, Source, Taken
from bfc.allocators._fences cimport Fences
from bfc.allocators.mapping._stitching cimport Stitching
from bfc.allocators.mapping._plan_ranges cimport ranges_for_plans

from bfc.errors import ClosedError, PlanError, SubAllocatorError, out_of_host_memory
from bfc.units import format_bytes

cdef extern from "plan_server.hpp":
    pass
cdef extern from "bins.hpp":
    pass

cdef enum:
    BASE = 0                    # the region of what is never freed
    BODY = 1                    # and that of all else
    MOST_LENGTHS = 256          # of a kind of iterations: as in plans/lengths.py
    LAYOUTS_FOR_EACH = 8        # so often a plan gets room for the length that came alone
    STEPS_UNTIL_TRIED_AGAIN = 16    # after a longer step's region was refused
    MOST_OVERDRAWN = 64         # so often more is asked for beside a plan than the policy alone needs, then it ends
    NEARLY = 50                 # what is reserved may be more than what lives by this part of it
    GOES_ON = -1                # what PlanServer.turn says where no step begins
    WAS_NONE = -3

_make_recording = None
_make_watch = None


def set_recording(make):
    """Sets what makes the recording that `Allocator.record_plan` returns: `bfc.plans`, which stands above, does."""
    global _make_recording
    _make_recording = make


def set_watch(make):
    """Sets what makes the part that looks whether a plan in use still pays."""
    global _make_watch
    _make_watch = make


def make_watch(plan, gate):
    """What looks whether a plan in use still pays: it reserves less than this part of what the policy alone does."""
    return _make_watch(plan, gate)


def make_recording(allocator, iterations):
    """The recording that `Allocator.record_plan` returns."""
    return _make_recording(allocator, iterations)


cdef str no_room_for(PlanServer* server, Source source):
    """Why a plan is not served whose regions cannot be had."""
    base, body = server.region_size(BASE), server.region_size(BODY)
    return (f"the plan needs {format_bytes(base + body)} in blocks of {format_bytes(base)} and {format_bytes(body)}, "
            f"and {source.sub_allocator!r} has no room for them")


cdef bint is_beside_plan(Pool pool) noexcept nogil:
    """Whether the policy serves what lies beside a plan. While a plan has no memory, all is as if there were none.
    Needs the lock."""
    return pool.plans.current != NULL and not pool.plans.current.is_waiting


cdef class Step:
    """One iteration of a program, as a context manager: `Allocator.step` makes it."""

    def __init__(self):
        raise TypeError("a step is made by the method step() of an allocator")

    def __enter__(self):
        cdef TurnAt turn
        turn.take(self.allocator)
        if self.planned is not None:
            with self.planned.changes():
                self.planned.end_own(self.allocator)
                self.planned.open(self.allocator, self.kind)
                self.is_entered = True
        return self

    def __exit__(self, *exc_info):
        cdef TurnAt turn
        turn.take(self.allocator)
        if self.is_entered:
            self.is_entered = False
            self.planned.leave(True)
            self.planned.tell_watch(self.allocator)


cdef Step new_step(object allocator, Planned planned, str kind):
    cdef Step step = Step.__new__(Step)
    step.allocator = allocator
    step.planned = planned
    step.kind = kind.split(":")[0]      # "train:512" is a step of the kind "train", as in the marks of a trace
    return step


cdef dict longest_of(plan, str kind):
    """The bytes that tell the longest lengths of a kind, by number."""
    for part in plan.parts:
        if part.kind == kind and part.lengths is not None:
            return {number: key.longest * key.unit for number, key in enumerate(part.lengths.keys)}
    return {}


cdef object served_by(Planned planned, plan):
    """What a server of a plan is made of."""
    return plan._served("bfc" if planned.pool.books.usage == NULL else "caching", planned.source.alignment,
                        planned.is_in_pages())


cdef bint are_recorded(plan, str kind, dict wanted) except -1:
    """Whether each of these lengths of a kind is no longer than was recorded."""
    for part in plan.parts:
        if part.kind == kind and part.lengths is not None:
            return all(nbytes <= part.lengths.keys[number].recorded * part.lengths.keys[number].unit
                       for number, nbytes in wanted.items())
    return False


cdef bint are_shorter(dict wanted, dict other) except -1:
    """Whether each of these lengths is shorter than another."""
    return all(nbytes < other.get(number, 0) for number, nbytes in wanted.items())


@cython.final
@cython.no_gc_clear
cdef class ServedPlan:
    """A plan that is served, and what becomes of its kinds of steps."""


# In a garbage cycle buffers may be finalised after their allocator, so the collector must leave its parts in place.
@cython.final
@cython.no_gc_clear
cdef class Planned:
    """The plan of an allocator: a part of `Allocator`."""

    cdef int attach(self, Lock* lock, Pool pool, Source source, Fences fences, Stitching stitching, uint64_t* limit,
                    bint* is_closed, uint64_t home) except -1:
        self.lock = lock
        self.pool = pool
        self.source = source
        self.fences = fences
        self.limit = limit
        self.is_closed = is_closed
        self.home = home
        if stitching is not None:
            self.ranges = ranges_for_plans(stitching, &self.server)
        self.served = ServedPlan()
        self.served.begun = set()
        self.served.missed = {}
        self.served.refused = {}
        return 0

    cdef bint is_in_pages(self) noexcept:
        return self.ranges is not None

    cdef object gate_for(self, gate):
        """What a plan must save. In pages it needs hardly more than stitching does: it lends what is idle."""
        return None if self.is_in_pages() else gate

    # -- a plan comes into use, and goes ------------------------------------------------------------------------------

    cdef object changes(self):
        """A context in which no capture begins: what changes the plan, or begins a step, asks whether a stream is
        captured, and then asks the driver for memory or gives some back, which would break a capture."""
        if self.turns.process != os.getpid():     # in a forked child the thread that held the lock is gone
            try:
                self.changing = threading.RLock()
            except RuntimeError:        # "can't allocate lock"
                raise out_of_host_memory() from None
            self.turns.process = os.getpid()
            self.turns.is_stretching = False
        return self.changing

    cdef int use(self, object plan, object watch, object declined, bint strict, bint resumed) except -1:
        with self.changes():
            return self.change(plan, watch, declined, strict, resumed)

    cdef int change(self, object plan, object watch, object declined, bint strict, bint resumed) except -1:
        """Serves a plan from now on, or none. If it is `declined`, which says why, or there is no memory for it, there
        is a warning, or with `strict` an error; nothing has been taken then, and no plan is served. `resumed`: its head
        is there already, whatever lives."""
        begun = served = None
        if plan is not None:    # before another plan ends: this one may be of another policy
            # In ordinary memory it has room for the lengths that come, and no more.
            begun = plan if strict or self.is_in_pages() else plan._shortest()
            served = served_by(self, begun)
        self.end_own(None)
        if self.step is not None:
            raise RuntimeError(f"a step of the kind {self.step!r} is open: change the plan between steps")
        if self.fences.capture_is_marked():
            raise RuntimeError("a stream is being captured: change the plan before or after the capture, since the "
                               "driver gives no memory meanwhile, and takes none back")
        self.step = "use_plan"      # another thread neither begins a step meanwhile nor changes the plan
        try:
            self.drop()
            if not resumed:
                self.bound.online = plan.online if watch is not None and declined is None else 0
                self.bound.peak = plan.peak if self.bound.online else 0
            self.declined = declined
            self.was_served = False
            if plan is None:
                return 0
            if declined is None:
                if resumed and self.last.has_departed:
                    self.give_back_side()       # what the last step took beside the plan before
                at_once = strict or resumed or self.is_in_pages() or not len(plan.parts[0])
                self.install(plan, begun, served, resumed, at_once)
                self.watch = watch
        except BaseException:
            self.drop()
            raise
        finally:
            self.step = None
        if self.declined is None:
            return 0
        self.drop()
        if strict:
            raise PlanError(self.declined)
        warnings.warn(f"{self.declined}: the policy serves all requests", RuntimeWarning, stacklevel=2)
        return 0

    cdef int drop(self) except -1:
        self.retire()
        return self.give_back_empty()

    cdef int end_plan(self, str why) except -1:
        """The plan in use has not paid: the policy serves all requests from now on."""
        with self.changes():
            self.end_own(None)
            if self.step is not None or self.server == NULL or self.fences.capture_is_marked():
                return 0
            self.declined = why
            self.was_served = True
            # A region may have come of which no request has been told yet.
            is_untouched = self.server.is_waiting and not self.server.present[BASE] and not self.server.present[BODY]
            self.retire()
            if is_untouched:            # the policy is where it would be without a plan
                self.bound.online = 0
                self.last.has_departed = False
            else:
                self.give_back_side()   # what lay beside the plan is in pieces
            return self.give_back_empty()

    cdef bint body_is_idle(self) noexcept:
        """Whether nothing lives in the region of the bodies."""
        # Frees of other threads empty the region, and another thread may end the plan.
        acquire_lock(self.lock[0])
        cdef bint is_idle = self.server == NULL or self.server.is_empty(BODY)
        self.lock.release()
        return is_idle

    cdef PlanServer* new_server(self, object plan, object served) except NULL:
        """A server of the places of a plan, without sequences."""
        cdef vector[uint64_t] streams = served.streams
        cdef const uint64_t[::1] offsets = served.offset
        cdef const uint64_t[::1] sizes = served.size
        cdef size_t count = <size_t>offsets.shape[0]
        cdef PlanServer* server = new PlanServer(&offsets[0] if count else NULL, &sizes[0] if count else NULL, count,
                                                 served.base, served.span, streams, self.home)
        try:
            if self.ranges is not None:
                server.set_pages(self.ranges.memory.page_shift())
                server.peak = plan.peak
        except BaseException:
            del server
            raise
        return server

    cdef int install(self, object plan, object begun, object served, bint resumed, bint at_once) except -1:
        """Serves a plan. `at_once`: asks for its regions now, and not when they are needed first."""
        cdef bint from_start
        cdef cbool added
        cdef PlanServer* server = self.new_server(begun, served)
        try:
            sequences = self.fill_server(<uint64_t>server, served)
            # Whether anything lives is asked as the plan joins the pool, where its places count from then on.
            acquire_lock(self.lock[0])
            added = add_plan(self.pool, server)
            from_start = added and not resumed and self.pool.totals().bytes_in_use == 0
            self.lock.release()
            if not added:
                raise out_of_host_memory()
        except BaseException:
            del server
            raise
        self.server = server
        self.served.whole, self.served.plan = plan, begun
        self.served.layouts = 0
        self.served.sequences = sequences
        self.served.begun = set()
        self.served.missed = {}
        self.served.refused = {}
        self.served.grown = None
        self.served.kinds = list(sequences[2])
        self.counted.steps = self.counted.departed = self.counted.own_steps = 0
        self.last.has_departed = self.last.was_mistaken = False
        self.declined = self.served.departure = None
        server.begins_with_head = from_start
        server.is_proven = not from_start
        server.is_waiting = from_start and not at_once
        self.take_regions(from_start, at_once)
        # From here on requests are asked of the plan: it has its regions, and its head begins with it.
        acquire_lock(self.lock[0])
        if self.declined is None:
            self.pool.plans.current = server
            if from_start:
                self.activate(sequences[0])
        self.lock.release()
        if not from_start:
            self.served.begun.update(sequences[1])     # what is allocated once is allocated already
        return 0

    cdef object fill_server(self, uint64_t at, object served):
        """Gives a server its areas and sequences. Returns the sequences' numbers."""
        cdef PlanServer* server = <PlanServer*>at
        cdef const int64_t[:, ::1] growth
        cdef const uint32_t[::1] follows
        for begin, end, stream in served.areas:
            server.add_area(PlanArea(begin, end, stream))
        cdef dict first = {}, later = {}
        for kind, orders in served.first.items():
            first[kind] = self.add_orders(at, orders, served.once)
        for kind, orders in served.later.items():
            later[kind] = self.add_orders(at, orders, served.once)
        if served.lengths:
            growth, follows = served.growth, served.follows
            server.set_growths(&growth[0, 0], &follows[0])
        for kind, told in served.lengths.items():
            self.add_lengths(at, served.first[kind], first[kind], told)
            self.add_lengths(at, served.later[kind], later[kind], told)
        server.end_lengths()
        names = list(later)
        for kind, numbers in later.items():
            server.add_kind(numbers, names.index(served.followers[kind]) if kind in served.followers else -1)
        cdef list head = self.add_orders(at, served.head, served.once)
        for number in head:
            server.set_head(number)
        return head, first, later

    cdef int add_lengths(self, uint64_t at, object orders, object numbers, object lengths) except -1:
        """Tells a server of the lengths of a kind."""
        cdef vector[uint32_t] sequences = numbers
        (<PlanServer*>at).begin_lengths(sequences.data(), sequences.size())
        for place, unit, longest, recorded, is_clear in lengths:
            for order, number in zip(orders, numbers):
                there = (order.place == place).nonzero()[0]
                if len(there):
                    (<PlanServer*>at).add_length(number, there[0], unit, longest, recorded, is_clear)
        return 0

    cdef list add_orders(self, uint64_t at, object orders, const uint8_t[::1] once):
        cdef const uint32_t[::1] place, end
        cdef list numbers = []
        for order in orders:
            place, end = order.place, order.end
            numbers.append((<PlanServer*>at).add_sequence(order.stream, &place[0], &end[0], <size_t>place.shape[0],
                                                          &once[0]))
        return numbers

    # -- lengths that vary --------------------------------------------------------------------------------------------

    cdef uint32_t index_of(self, uint64_t stream) noexcept:
        """The plan's number of a stream. Needs the lock, and a plan in use."""
        cdef uint32_t index = self.server.stream_of(stream)
        return index if index != NO_STREAM else bind_stream(self.pool, stream)

    cdef int meet_length(self, uint64_t stream, uint64_t requested) except -1:
        """Makes room for a step whose length a request tells, if it is longer than all before."""
        cdef uint32_t index, number = 0
        cdef uint64_t length = 0, told = 0
        cdef cbool is_longer = False
        # Another thread may end the plan, or the step. Room is made without the lock, as that asks the device.
        acquire_lock(self.lock[0])
        if self.server != NULL and self.step is not None:
            index = self.index_of(stream)
            length = self.server.length_of(index, requested) if index != NO_STREAM else <uint64_t>0
            is_longer = length and self.server.is_too_long(index, length)
            if is_longer:
                told = self.server.bytes_of(index, length)
                number = self.server.number_of_length(index)
        self.lock.release()
        if is_longer:
            self.stretch(self.step, {number: told})
        return 0

    cdef int stretch(self, str kind, dict wanted) except -1:
        """Makes room for longer steps of a kind, where nothing lives in the region of the bodies: `wanted` are the
        bytes that tell the lengths. Where that cannot be had, the room before is asked for again, and more after some
        steps. A finaliser may allocate while the device is asked: that is not the time to grow once more, nor to wait
        for a thread that waits for this one to have mapped."""
        if self.source.is_called_here():
            return 0
        with self.changes():
            tried, again = self.served.refused.get(kind, (None, 0))
            if (self.server == NULL or self.turns.is_stretching or self.fences.capture_is_marked()
                    or not self.body_is_idle()      # another thread may have ended the plan
                    or (tried is not None and self.counted.steps < again and not are_shorter(wanted, tried))):
                return 0
            self.turns.is_stretching = True
            try:
                return self.lay_out_anew(kind, wanted)
            finally:
                self.turns.is_stretching = False

    cdef int lay_out_anew(self, str kind, dict wanted) except -1:
        """Lays the bodies out for longer steps of a kind. What they had is given back before more is asked for."""
        cdef vector[Region] regions
        cdef PlanServer* other
        cdef bint is_there = False
        try:
            plan = self.served.plan._stretched(kind, wanted, spare=self.served.layouts >= LAYOUTS_FOR_EACH)
            served = served_by(self, plan)
        except PlanError:
            self.served.refused[kind] = wanted, 1 << 62
            return 0
        was_recorded = are_recorded(plan, kind, wanted)
        is_bound = self.last.was_mistaken or len(longest_of(plan, kind)) > 1
        if is_bound and not was_recorded and not self.may_stretch(served.span - served.base):
            self.served.refused[kind] = wanted, self.counted.steps + STEPS_UNTIL_TRIED_AGAIN
            return 0
        other = self.new_server(plan, served)
        try:
            self.fill_server(<uint64_t>other, served)
            if self.ranges is not None and not self.ranges.give_up_all(self.server, BODY):
                return 0
            if not self.exchange(<uint64_t>other, regions):
                self.take_region(BODY)
                return 0
            before, self.served.plan = self.served.plan, plan
            self.source.give_back(regions, False)
            is_there = self.take_region(BODY)
            if not is_there:
                self.give_back_side()       # the policy may hold the memory, and nothing lives in it
                is_there = self.take_region(BODY)
            if is_there:
                self.served.refused.pop(kind, None)
                self.served.layouts += 1
                if not was_recorded:
                    self.served.grown = (kind, longest_of(before, kind))
                return 0
            self.served.refused[kind] = wanted, self.counted.steps + STEPS_UNTIL_TRIED_AGAIN
            self.exchange(<uint64_t>other, regions)
            self.served.plan = before
            self.take_region(BODY)
        finally:
            del other
        return 0

    cdef bint exchange(self, uint64_t at, vector[Region]& regions) except -1:
        """Exchanges the places of the plan with those of another server, and lists the region of the bodies. False:
        something lives there."""
        cdef vector[uint32_t] live
        cdef size_t i, count = 0
        cdef PlanServer* other = <PlanServer*>at
        acquire_lock(self.lock[0])
        cdef cbool is_idle = (self.server != NULL and self.server.is_empty(BODY)
                              and other.region_size(BASE) == self.server.region_size(BASE))
        cdef cbool is_listed = is_idle and list_places(self.pool, self.server, BASE, live)
        if is_listed:
            for i in range(live.size()):        # guests stay where they are
                if self.server.is_place(live[i]):
                    live[count] = live[i] - self.server.first_record
                    is_idle = is_idle and other.offset_of(live[count]) == self.server.offset_of(live[count])
                    count += 1
            live.resize(count)
        if is_listed and is_idle:
            regions.clear()
            if self.server.present[BODY]:
                self.list_region(self.server.address[BODY], regions)
                is_listed = regions.size() > 0
                self.source.forget(regions)
        if is_listed and is_idle:
            self.server.take_over(other[0], live)
            point_places(self.pool, self.server, BASE)
        self.lock.release()
        if is_idle and not is_listed:
            raise out_of_host_memory()
        return is_idle

    cdef int make_lengths_fit(self, str kind) except -1:
        """Before a step of a kind: makes room for what the last one had none for. Where it had grown, and most of its
        requests did not come as planned after all, what had told the length was something else."""
        if self.served.grown is not None:
            grown, before = self.served.grown
            self.served.grown = None
            if 2 * self.last.found < self.last.asked:
                self.stretch(grown, before)
                self.served.grown = None
        if kind in self.served.missed:
            self.stretch(kind, self.served.missed.pop(kind))
            self.served.grown = None
        return 0

    cdef int take_regions(self, bint with_base, bint at_once) except -1:
        """Looks whether the limit has room for the regions, and asks for them `at_once`. Sets `declined` where they
        cannot be had; those that came stay until `retire`."""
        cdef uint64_t base = self.served.whole.base if with_base else 0
        cdef uint64_t needed = base + <uint64_t>self.served.whole.body, taken
        if needed > self.limit[0] - min(self.limit[0], self.bytes_taken()):
            self.give_back_side()       # the policy may hold the memory, and nothing lives in it
        taken = self.bytes_taken()
        if self.ranges is not None:     # pages are made as they are needed, no more than are live at once
            needed, taken = min(needed, self.server.peak), 0
        if needed > self.limit[0] or taken > self.limit[0] - needed:
            self.declined = (f"the plan needs {format_bytes(needed)}, the limit is {format_bytes(self.limit[0])}, and "
                             f"{format_bytes(taken)} of it are taken")
        elif at_once and ((with_base and not self.take_region(BASE)) or not self.take_region(BODY)):
            self.declined = no_room_for(self.server, self.source)
        return 0

    cdef uint64_t bytes_taken(self) noexcept:
        # Other threads take regions and set bytes aside.
        acquire_lock(self.lock[0])
        cdef uint64_t taken = self.source.taken()
        self.lock.release()
        return taken

    cdef bint take_region(self, int which) except -1:
        """Asks for a region, if the limit lets it. Returns whether it is there."""
        cdef uint64_t nbytes = self.server.region_size(which)
        cdef Asking asking = Asking(0, 0, False, False, 0, 0)
        cdef vector[Region] refused
        cdef Region block
        cdef Taken taken
        cdef cbool fits, closed, late, is_there
        if nbytes == 0 or self.server.present[which]:
            return True
        if self.ranges is not None:
            return self.take_range(which)
        # The limit is compared and the bytes are set aside at once: no other thread counts on them.
        acquire_lock(self.lock[0])
        fits = nbytes <= self.limit[0] and self.source.taken() <= self.limit[0] - nbytes
        if fits:
            self.source.set_aside += nbytes
        self.lock.release()
        if not fits or not self.source.ask(&asking, nbytes, &block, True):
            return False
        acquire_lock(self.lock[0])
        closed = self.is_closed[0]
        # a finaliser that ran meanwhile may have taken the region, or ended the plan
        late = self.server == NULL or self.server.present[which] or self.server.region_size(which) != nbytes
        taken = self.source.take_in(
            &asking, &block, NO_LANE if closed or late else self.server.bin_sets[0] + (self.pool.books.usage != NULL),
            refused)
        if taken == ADDED:
            divide(self.pool, self.server, which, block.ptr)
        is_there = self.server != NULL and self.server.present[which]
        self.lock.release()
        if taken == ADDED:
            return True
        self.source.give_back(refused, False)
        if taken == OVERLAPS:
            raise SubAllocatorError(f"{self.source.sub_allocator!r}.alloc returned {block.ptr:#x}, which overlaps a "
                                    f"block that it gave before: not used, and not given back")
        if late and not closed:
            return is_there
        raise ClosedError("this allocator was closed while it asked for memory") if closed else out_of_host_memory()

    cdef bint take_range(self, int which) except -1:
        """As `take_region`, of addresses whose pages are made when they are first touched."""
        cdef bint late
        if not self.ranges.enter():
            return False
        try:
            if self.is_closed[0]:
                raise ClosedError("this allocator was closed while it asked for memory")
            # a finaliser that ran meanwhile may have taken the region, or ended the plan
            late = self.server == NULL or self.server.present[which] or self.server.region_size(which) == 0
            if not late:
                self.ranges.open(self.server, which, self.home)
            return self.server != NULL and (self.server.present[which] or self.server.region_size(which) == 0)
        finally:
            self.ranges.leave()

    cdef int fill_place(self, object allocator, uint64_t stream, uint64_t rounded, uint64_t requested) except -1:
        """Brings memory to the place that a request is to have, if it is the first to touch it."""
        cdef uint32_t index = NO_STREAM
        cdef cbool is_away = False
        if self.ranges is None:
            return self.bring_region(allocator, stream, rounded)
        # The place that comes next is looked up while the plan stands. Its pages are mapped without the lock.
        acquire_lock(self.lock[0])
        if self.server != NULL and self.server.has_pages() and not self.pool.plans.rest:
            index = self.index_of(stream)
            if index != NO_STREAM:
                self.server.resume_head(index, rounded)
                read_length(self.pool, index, requested)
                is_away = self.server.away_for(index, rounded).count > 0
        self.lock.release()
        return self.ranges.fill_place(stream, rounded) if is_away else 0

    cdef int bring_region(self, object allocator, uint64_t stream, uint64_t rounded) except -1:
        """Asks for the region of the place that a request is to have, if it is the first. Another program may ask for
        none of these places, and then has all of its memory for itself. Ends the plan if there is no room."""
        cdef uint32_t index
        cdef int which = -1
        # Another thread may end the plan. The region is asked for without the lock.
        acquire_lock(self.lock[0])
        if self.server != NULL and self.fences.capture_is_marked():
            self.server.is_proven = True    # its places are not given out meanwhile, so the head may lie elsewhere
        elif self.server != NULL:
            index = self.index_of(stream)
            if index != NO_STREAM:
                which = self.server.absent_for(index, rounded)
            if which == BASE and not self.server.begins_with_head:
                which = -1
        self.lock.release()
        if which < 0 or self.source.is_called_here():
            return 0
        with self.changes():
            if self.server == NULL or self.fences.capture_is_marked() or self.take_region(which):
                return 0
            self.give_back_side()       # the policy may hold the memory, and nothing lives in it
            if not self.take_region(which) and self.step is None:
                why = no_room_for(self.server, self.source)
                allocator._end_plan(why)
                warnings.warn(f"{why}: the policy serves all requests", RuntimeWarning, stacklevel=2)
        return 0

    cdef uint64_t bytes_of_plan(self) noexcept:
        """What the regions of the plan in use have taken. Needs the lock."""
        cdef uint64_t total = 0
        cdef int which
        for which in range(2):
            if self.server.has_pages():
                total += self.pool.bin_sets[set_of_region(self.pool, self.server, which)].mapped_bytes
            elif self.server.present[which]:
                total += self.server.region_size(which)
        return total

    cdef int retire(self) except -1:
        """The plan in use serves nothing more."""
        # No request is asked of a plan that has ended, nor finds it half ended.
        acquire_lock(self.lock[0])
        if self.server != NULL:
            self.server.end()
        self.pool.plans.current = self.server = NULL
        self.lock.release()
        self.served.whole = self.served.plan = self.served.sequences = self.watch = None
        return 0

    cdef int give_back_empty(self) except -1:
        """Gives back the regions of plans that are not in use and in which nothing lives, and forgets these plans."""
        cdef vector[Region] regions
        cdef PlanServer* plan
        cdef int which
        if self.ranges is not None:
            self.ranges.give_up_all(NULL, -1)
        # Found empty and taken out at once, so that nobody is handed a place. They go back without the lock.
        acquire_lock(self.lock[0])
        for plan in self.pool.plans.all:
            for which in range(2):
                if plan != self.server and plan.present[which] and plan.is_empty(which) and not plan.has_pages():
                    self.list_region(plan.address[which], regions)
        self.source.forget(regions)
        self.drop_gone()
        self.lock.release()
        return self.source.give_back(regions, False)

    cdef void list_region(self, uint64_t ptr, vector[Region]& regions) noexcept nogil:
        """Adds the region at an address, if the host has memory for that. Needs the lock."""
        try_push_back(regions, deref(self.pool.regions.upper_bound(ptr)).second)

    cdef void drop_gone(self) noexcept nogil:
        """Forgets the plans that have no regions any more. Needs the lock."""
        cdef size_t i = 0
        cdef PlanServer* plan
        while i < self.pool.plans.all.size():
            plan = self.pool.plans.all[i]
            if plan == self.server or plan.present[0] or plan.present[1]:
                i += 1
            else:
                drop_plan(self.pool, plan)

    cdef bint give_back_idle(self) except -1:
        """Gives back the region of the bodies where nothing lives in it, and no step of the plan is open: memory has
        run out. Returns whether it went."""
        cdef bint went
        if self.ranges is not None:
            went = self.server != NULL and self.step is None and self.server.present[BODY]
            went = went and self.ranges.give_up_all(self.server, BODY)
            self.give_back_empty()
            return went
        return (self.step is None or not self.last.is_planned) and self.give_back_body()

    cdef bint give_back_body(self) except -1:
        """Gives back the region of the bodies, of ordinary memory, where nothing lives in it. Returns whether it
        went."""
        cdef vector[Region] regions
        # Found empty and taken out at once, so that nobody is handed a place. It goes back without the lock.
        acquire_lock(self.lock[0])
        if self.server != NULL and self.server.present[BODY] and self.server.is_empty(BODY):
            self.list_region(self.server.address[BODY], regions)
        self.source.forget(regions)
        self.lock.release()
        self.source.give_back(regions, False)
        self.give_back_empty()
        return regions.size() > 0

    # -- steps that begin by themselves -------------------------------------------------------------------------------

    cdef int follow(self, object allocator, uint64_t stream, uint64_t rounded, uint64_t requested) except -1:
        """Ends and begins steps, as a request says that is not as planned, in a program that marks none. Where another
        thread does so, or a finaliser asks in the midst of it, nothing is done."""
        cdef int64_t turn
        if (self.step is not None and not self.last.is_own) or self.source.is_called_here():
            return 0
        if self.turns.is_following and self.turns.process == os.getpid():
            return 0
        turn = self.turn(stream, rounded, requested)
        if turn == GOES_ON and not self.is_idle_for_long() and not self.is_overdrawn():
            return 0
        with self.changes():
            if self.turns.is_following or self.server == NULL or (self.step is not None and not self.last.is_own):
                return 0
            self.turns.is_following = True
            try:
                if turn != GOES_ON:
                    self.take_turn(allocator, stream, rounded, requested, turn)
                elif self.ranges is None and self.step is None:
                    self.give_back_idle()       # no iteration has come for long
                self.give_up(allocator)
            finally:
                self.turns.is_following = False
        return 0

    cdef int64_t turn(self, uint64_t stream, uint64_t rounded, uint64_t requested) noexcept:
        """What a request says about the steps of a program that marks none."""
        cdef int64_t found = GOES_ON
        cdef uint32_t index
        # Other threads' requests turn the plan on, too, and one of them may end it.
        acquire_lock(self.lock[0])
        if self.server != NULL and not self.pool.plans.rest:
            index = self.index_of(stream)
            if index != NO_STREAM:
                found = self.server.turn(index, rounded, requested)
        self.lock.release()
        return found

    cdef int take_turn(self, object allocator, uint64_t stream, uint64_t rounded, uint64_t requested,
                       int64_t turn) except -1:
        self.end_own(allocator)
        if turn == WAS_NONE:
            turn = self.turn(stream, rounded, requested)
        if turn < 0 or self.server == NULL or not self.prove(allocator):
            return 0
        # Frees and requests of other threads change the plan's counts.
        acquire_lock(self.lock[0])
        self.server.note_begun(turn)
        self.lock.release()
        kind = self.served.kinds[turn]
        self.last.was_begun = kind in self.served.begun
        if counted(self.turns.waits) and self.watch is not None:
            self.watch.wait()
        self.open(allocator, kind)
        self.last.is_own = True
        return 0

    cdef int end_own(self, object allocator) except -1:
        """Ends the step that is open, if it has begun by itself. Its figures count if most of it was as planned."""
        cdef cbool was_one, was_whole
        if not self.last.is_own:
            return 0
        self.last.is_own = False
        kind = self.step
        # Requests of other threads go on in the step until it is left.
        acquire_lock(self.lock[0])
        was_whole = self.server != NULL and self.server.is_mostly_over()
        self.lock.release()
        self.leave(False)
        if self.served.grown is not None and not was_whole:
            # An evaluation, perhaps, which begins as an iteration does.
            self.last.was_mistaken = True
            grown = self.served.grown[0]
            longest = longest_of(self.served.plan, grown)
            self.served.refused[grown] = longest, self.counted.steps + STEPS_UNTIL_TRIED_AGAIN
            self.last.found = 0
        # The counts are those of the step that has just ended, before another begins.
        acquire_lock(self.lock[0])
        was_one = self.server != NULL and self.server.note_ended()
        self.lock.release()
        if was_one:
            self.counted.own_steps += 1
            self.count_step(kind)
            if allocator is not None:
                self.tell_watch(allocator)
        elif not self.last.was_begun:
            self.served.begun.discard(kind)
        return 0

    cdef bint is_idle_for_long(self) noexcept:
        # Another thread may end the plan.
        acquire_lock(self.lock[0])
        cdef bint is_idle = self.server != NULL and self.server.is_idle_for_long()
        self.lock.release()
        return is_idle

    cdef bint is_overdrawn(self) except -1:
        """Whether more was needed beside the plan than the policy alone would have, outside of steps."""
        return (self.step is None and self.watch is not None and self.watch.is_overdrawn
                and (self.body_is_idle() or self.watch.overdrawn > MOST_OVERDRAWN))

    cdef int give_up(self, object allocator) except -1:
        """Ends a plan whose iterations do not come."""
        # Another thread may end the plan.
        acquire_lock(self.lock[0])
        cdef bint is_in_vain = self.server != NULL and self.server.is_in_vain()
        self.lock.release()
        if not (is_in_vain or self.is_overdrawn()) or self.ranges is not None or self.step is not None:
            return 0
        why = ("the iterations of the plan were not recognised: the requests of the program are others, or come in "
               "another order")
        is_tried = self.turns.waits and self.watch is None    # a replay shows what the plan is worth
        allocator._end_plan(why)
        if not is_tried:
            warnings.warn(f"{why}: the policy serves all requests", RuntimeWarning, stacklevel=2)
        return 0

    # -- steps --------------------------------------------------------------------------------------------------------

    cdef int open(self, object allocator, str kind) except -1:
        """Begins a step; what looks at the plan may change it before."""
        self.prove(allocator)
        if self.watch is not None and self.step is None \
                and not self.fences.capture_is_marked():    # it would take memory and give some back
            self.watch.step_begins(allocator, kind)
        return self.enter(kind)

    cdef bint prove(self, object allocator) except -1:
        """Before the first step: ends the plan if what it expects before that does not live. It is another program's,
        with other sizes or another depth. Returns whether the plan is served."""
        cdef cbool is_there = True
        if self.watch is None or self.step is not None or self.fences.capture_is_marked():
            return True
        # What lives is compared at one moment, and by one thread.
        acquire_lock(self.lock[0])
        if self.server != NULL and not self.server.is_proven:
            is_there = (self.server.counts.hits + self.server.counts.guests + self.server.counts.side == 0
                        or self.server.has_whole_head())
            self.server.is_proven = is_there
        self.lock.release()
        if not is_there:
            why = "the plan is for another program: this one asks for something else before its first iteration"
            allocator._end_plan(why)
            # that program says nothing about what this one needs, but what lives does
            self.bound.online = min(self.bound.online, <uint64_t>1)
            warnings.warn(f"{why}: the policy serves all requests", RuntimeWarning, stacklevel=2)
        return is_there

    cdef int tell_watch(self, object allocator) except -1:
        if self.watch is not None and not self.fences.capture_is_marked():
            # of a step of which the plan knows little, what it holds is to be no more than the policy alone needs
            if (self.last.is_planned and self.server != NULL and self.server.present[BODY]
                    and 2 * self.last.found < self.last.asked and not self.may_grow(0, True)):
                self.watch.is_overdrawn = True
            self.watch.step_ended(allocator)
        return 0

    cdef int enter(self, str kind) except -1:
        """A step begins: requests come as in the body of its kind. A kind that the plan does not have is served by the
        policy. Where the region of the bodies was given back it is asked for again."""
        if self.step is not None:
            raise RuntimeError(f"a step of the kind {self.step!r} is open, perhaps of another thread: an allocator has "
                               f"one step at a time, so end it first")
        if self.is_closed[0]:
            raise ClosedError("this allocator is closed")
        self.step = kind        # before anything that lets another thread in
        try:
            self.begin_step(kind)
        except BaseException:
            # The step did not begin: requests of other threads must not count for it.
            acquire_lock(self.lock[0])
            if self.server != NULL:
                self.server.end()
                self.server.in_step = False
            self.lock.release()
            self.step = None
            raise
        return 0

    cdef int begin_step(self, str kind) except -1:
        cdef bint there = self.server != NULL and kind in self.served.sequences[1]
        if self.fences.capture_is_marked():     # the driver gives nothing and takes nothing back meanwhile
            there = there and (self.server.present[BODY] or self.server.region_size(BODY) == 0)
        else:
            self.give_back_empty()
            if self.last.has_departed:
                self.give_back_side()
            if there:
                self.make_lengths_fit(kind)
            if there and not self.take_region(BODY):
                self.give_back_side()           # the policy may hold the memory, and nothing lives in it
                there = self.take_region(BODY)
        # The counts of the step before and of this one meet here, between two requests of other threads.
        acquire_lock(self.lock[0])
        if self.server != NULL:
            self.server.end()
            self.server.in_step = True
            self.server.departures = 0
            self.last.hits_before = self.server.counts.hits
            self.last.found_before = self.server.counts.hits + self.server.counts.moved
            self.last.asked_before = self.server.counts.hits + self.server.counts.guests + self.server.counts.side
            if there:
                self.activate(self.served.sequences[1 if kind not in self.served.begun
                                                    or self.has_ended(kind) else 2][kind])
        self.last.is_planned = there
        self.lock.release()
        if self.watcher is not None:
            self.watcher(kind)
        self.served.begun.add(kind)
        self.last.has_departed = self.server != NULL and not there
        return 0

    cdef bint has_ended(self, str kind) except -1:
        """Whether something was freed that the first step of a kind had made for good. Needs the lock."""
        cdef size_t number
        for number in self.served.sequences[1][kind]:
            if self.server.has_ended(number):
                return True
        return False

    cdef int activate(self, object sequences) except -1:
        """From now on serves these sequences. Needs the lock."""
        cdef size_t number
        for number in sequences:
            self.server.begin(number)
        return 0

    cdef int leave(self, bint counts) except -1:
        """A step ends. What it leaves alive is freed later. It `counts` if it was one for certain."""
        cdef size_t i, lengths = 0
        cdef uint64_t[MOST_LENGTHS] missed      # no object is made while the lock is held
        kind, self.step = self.step, None
        # The counts of the step end here, between two requests of other threads.
        acquire_lock(self.lock[0])
        if self.server != NULL:
            self.server.end()
            self.server.in_step = False
            self.last.has_departed = self.last.has_departed or self.server.departures > 0
            self.last.found = self.server.counts.hits + self.server.counts.moved - self.last.found_before
            self.last.asked = self.server.counts.hits + self.server.counts.guests + self.server.counts.side
            self.last.asked -= self.last.asked_before
            self.server.note_passed(self.last.found == self.last.asked)
            lengths = min(self.server.missed.size(), <size_t>MOST_LENGTHS)
            for i in range(lengths):
                missed[i] = self.server.missed[i]
                self.server.missed[i] = 0
        self.lock.release()
        longer = {i: missed[i] for i in range(lengths) if missed[i]}
        if longer and 2 * self.last.found >= self.last.asked:
            self.served.missed[kind] = longer
        if counts:
            self.count_step(kind)
        return 0

    cdef int count_step(self, object kind) except -1:
        """Counts a step that has ended."""
        self.counted.steps += 1
        self.counted.departed += self.last.has_departed
        if self.last.has_departed and self.served.departure is None:
            self.note_departure(kind)
        return 0

    cdef int note_departure(self, str kind) except -1:
        """Writes down the first step that did not follow the plan, and the first request in it that did not."""
        cdef dict noted = {"kind": kind, "step": self.counted.steps, "request": None, "size": None, "place_size": None,
                           "allocation_id": None}
        # What departed is read at one moment, and made into objects without the lock.
        acquire_lock(self.lock[0])
        cdef bint is_known = self.server != NULL and self.last.is_planned and self.server.departures > 0
        cdef int64_t place = self.server.departed_place if is_known else -1
        if is_known:
            asked = self.server.departed_at - self.last.asked_before
            size, number = self.server.departed_size, self.server.departed_id
            place_size = self.server.size_of(place) if place >= 0 else 0
        self.lock.release()
        if is_known:
            noted.update(request=asked, size=size, place_size=place_size or None, allocation_id=number)
        self.served.departure = noted
        return 0

    def last_step(self):
        """The part of the requests that got a place, of the step that has just ended. None if the plan has no body for
        it, or it asked for nothing."""
        cdef uint64_t hits, asked = 0
        if self.server == NULL:
            return None         # as of a part that no allocator has
        # The counts are of one moment.
        acquire_lock(self.lock[0])
        cdef bint is_known = self.server != NULL and self.last.is_planned
        if is_known:
            hits = self.server.counts.hits - self.last.hits_before
            asked = self.server.counts.hits + self.server.counts.guests + self.server.counts.side
            asked -= self.last.asked_before
        self.lock.release()
        if not asked:
            return None
        return <double>hits / <double>asked

    cdef bint has_ended_early(self) noexcept nogil:
        """Whether a plan was in use, had memory, and did not pay, and no other one has come."""
        return self.was_served and self.server == NULL and self.bound.online > 0

    cdef uint64_t allowed(self, uint64_t nbytes, bint in_part) noexcept nogil:
        """What the policy alone needs, as far as is known, once so many more bytes live: what it did for the recording,
        or hardly more than lived. `in_part`: where less has lived than in the recording, less in proportion. Needs the
        lock."""
        cdef Counters totals = self.pool.totals()
        cdef uint64_t most = max(totals.peak_bytes_in_use, totals.bytes_in_use + nbytes), online = self.bound.online
        if in_part and most < self.bound.peak:
            online = <uint64_t>(<double>online * <double>most / <double>self.bound.peak)
        return max(online, most + most // NEARLY)

    cdef uint64_t room_for(self, uint64_t nbytes, bint in_part) noexcept nogil:
        """How many bytes may be asked for, once so many more live. Needs the lock."""
        cdef uint64_t allowed = self.allowed(nbytes, in_part)
        return allowed - min(allowed, self.source.taken())

    cdef bint may_grow(self, uint64_t nbytes, bint in_part) noexcept:
        """Whether the policy alone needs as much as there will be after it has asked for so many bytes beside the plan,
        or after the plan has ended; or nothing looks at the plan, or it has no memory yet."""
        if not self.bound.online or self.source.is_called_here():
            return True
        # What is reserved is compared at one moment.
        acquire_lock(self.lock[0])
        cdef bint is_waiting = self.server != NULL and self.server.is_waiting
        cdef bint fits = is_waiting or nbytes <= self.room_for(nbytes, in_part)
        self.lock.release()
        return fits

    cdef bint may_stretch(self, uint64_t body) noexcept:
        """Whether the region of the bodies may have so many bytes: no more than the policy alone needs. That holds
        where room was made in vain before, and where several lengths need not be at their longest together."""
        if not self.bound.online:
            return True
        # What is reserved is compared at one moment.
        acquire_lock(self.lock[0])
        cdef uint64_t room = self.room_for(0, False)
        if self.server.present[BODY]:
            room += self.server.region_size(BODY)
        self.lock.release()
        return body <= room

    cdef int about_to_grow(self, uint64_t nbytes) except -1:
        """Before the policy asks for memory: where that is more than it may be, what is free goes back first, and what
        looks at the plan is told if that is not enough."""
        if self.step is None and (self.server != NULL or self.has_ended_early()):
            self.last.has_departed = True    # what comes now goes back when a step begins
        if self.may_grow(nbytes, True):
            return 0
        self.give_back_side()
        if self.server == NULL or self.may_grow(nbytes, False):
            return 0
        self.give_back_left()
        if self.watch is not None and self.server.present[BODY] and not self.may_grow(nbytes, False):
            self.watch.is_overdrawn = True
            self.watch.overdrawn += 1
        return 0

    cdef bint give_back_left(self) except -1:
        """Gives back the region of the bodies where nothing lives in it. A step in which that is so does not follow the
        plan: the policy serves the rest of it."""
        cdef bint is_given_up = False
        if self.last.is_own and not self.turns.is_following and self.body_is_idle():
            with self.changes():
                self.end_own(None)
        # Found empty and given up at once: no request gets a place of it from here on.
        acquire_lock(self.lock[0])
        if self.server != NULL and self.step is not None and self.server.is_empty(BODY):
            self.server.end()
            self.last.has_departed = is_given_up = True
        self.lock.release()
        if is_given_up and self.watch is not None:
            self.watch.is_overdrawn = True
        return self.give_back_body()

    cdef int give_back_side(self) except -1:
        """Gives back the policy's free regions: a step that departed from the plan took them, and the next one may need
        others."""
        cdef vector[Region] listed, regions
        cdef Region region
        cdef ChunkHandle first
        # Listed and taken out at once, so that nobody is handed one of them. They go back without the lock.
        acquire_lock(self.lock[0])
        self.pool.list_regions(listed, False)
        for region in listed:
            first = region.first
            if not self.pool.bin_sets[self.pool.chunks[first].bin_set].lane.pool[0] \
                    | self.pool.bin_sets[self.pool.chunks[first].bin_set].lane.pool[1]:
                try_push_back(regions, region)
        self.source.forget(regions)
        self.lock.release()
        return self.source.give_back(regions, False)

    # -- what can be seen ---------------------------------------------------------------------------------------------

    cdef dict stats(self):
        """The figures of the plan in use."""
        cdef PlanCounts counts
        cdef dict reckoned
        cdef uint64_t side = 0
        cdef cbool serves, has_body = False
        # The figures are of one moment, and made into objects without the lock.
        acquire_lock(self.lock[0])
        serves = self.server != NULL
        if serves:
            counts = self.server.counts
            has_body = self.server.present[BODY] or self.server.region_size(BODY) == 0
            side = self.pool.counters.pool_bytes - self.bytes_of_plan()
        self.lock.release()
        if not serves:
            state = "none" if self.declined is None else "switched off" if self.was_served else "declined"
            return {"state": state, "why": self.declined}
        reckoned = counts
        asked = reckoned["hits"] + reckoned["guests"] + reckoned["side"]
        state = "in step" if self.step is not None else "between steps"
        online, span = self.served.whole.online, self.served.plan.span
        return {"state": state, "why": None} | reckoned | {
            "agreement": reckoned["hits"] / asked if asked else 1.0,
            "steps": self.counted.steps, "recognised": self.counted.own_steps, "departed_steps": self.counted.departed,
            "first_departure": self.served.departure,
            "replanned": 0 if self.watch is None else self.watch.replanned,
            "has_body": has_body, "span": span, "side_bytes_reserved": side,
            "budget_left": online * span // max(self.served.whole.span, 1) - span - side,
        }
