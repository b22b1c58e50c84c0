"""Plans in use: a part that an allocator may have."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t, uint8_t
from libcpp.vector cimport vector

from bfc._core cimport PlanServer, Pool, Region
from bfc.allocators._lock cimport Lock
from bfc.allocators._source cimport Source
from bfc.allocators._fences cimport Fences
from bfc.allocators.mapping._stitching cimport Stitching
from bfc.allocators.mapping._plan_ranges cimport PlanRanges


cdef enum:
    WHOLE_BESIDE_PLANS = 32 << 20       # a free chunk of at least this many bytes is not split beside a plan


cdef class Step:
    cdef object allocator       # kept alive: the part below points into it
    cdef Planned planned
    cdef str kind
    cdef bint is_entered


cdef struct StepState:
    uint64_t found, asked       # the requests that the plan knew, and all, once it has ended
    uint64_t found_before       # and of all steps before it
    uint64_t hits_before, asked_before      # when it began: hits, requests
    bint is_planned             # whether the plan has a body for it
    bint has_departed
    bint is_own                 # it has begun by itself
    bint was_begun              # there was a step of its kind before
    bint was_mistaken           # room was made for one that had begun by itself, and was none of that length


cdef struct StepCounts:
    uint64_t steps, departed
    uint64_t own_steps          # how many have begun by themselves


cdef struct PlanBound:
    uint64_t online             # what the policy alone reserved for the recording; 0: nothing bounds what may be
    uint64_t peak               # and the most that was live then


cdef struct PlanTurns:
    bint follows                # steps begin by themselves
    bint is_following           # a thread ends or begins such a step
    bint is_stretching          # a thread makes room for a longer step
    int waits                   # how many replays wait for what looks at the plan: the same comes to the same
    int64_t process             # that `changing` is for: a forked child needs another


@cython.final
cdef class ServedPlan:
    cdef object whole           # the plan
    cdef object plan            # with room for the lengths that there have been
    cdef object sequences       # numbers of the server's sequences: (the head's, {kind: first}, {kind: later})
    cdef list kinds             # the names of the plan's kinds, by number in the server
    cdef int layouts            # how often there was more room made
    cdef set begun              # the kinds of which there was a step
    cdef dict missed            # by kind: by length, the bytes that told one for which there was no room
    cdef dict refused           # by kind: those for which there is no memory, and the step at which to try again
    cdef object grown           # (kind, bytes) of the lengths that there was room for before the open step; or None
    cdef object departure       # where a step first departed from the plan, as a dictionary


@cython.final
cdef class Planned:
    cdef Lock* lock             # the allocator's: it guards the pool
    cdef Pool pool
    cdef Source source
    cdef Fences fences
    cdef PlanRanges ranges      # the regions, in pages; None: they are ordinary memory
    cdef uint64_t* limit        # the allocator's
    cdef bint* is_closed        # whether it is
    cdef uint64_t home
    cdef PlanServer* server     # of the plan in use; NULL: there is none
    cdef ServedPlan served      # that plan, or the last one
    cdef object step            # the kind of the step that is open; None: none is
    cdef object declined        # why the plan is not served
    cdef bint was_served        # whether that plan was served before
    cdef object watcher         # a function to tell the kind of each step that begins; or None
    cdef object changing        # a lock, for `changes`
    cdef object watch           # what looks whether the plan still pays; None: nothing does
    cdef StepState last         # of the step that is open, or the last one
    cdef StepCounts counted
    cdef PlanBound bound        # on what may be reserved
    cdef PlanTurns turns

    cdef int attach(self, Lock* lock, Pool pool, Source source, Fences fences, Stitching stitching, uint64_t* limit,
                    bint* is_closed, uint64_t home) except -1
    cdef object changes(self)
    cdef int use(self, object plan, object watch, object declined, bint strict, bint resumed) except -1
    cdef int change(self, object plan, object watch, object declined, bint strict, bint resumed) except -1
    cdef int end_plan(self, str why) except -1
    cdef bint body_is_idle(self) noexcept
    cdef bint has_ended_early(self) noexcept nogil
    cdef uint64_t allowed(self, uint64_t nbytes, bint in_part) noexcept nogil
    cdef uint64_t room_for(self, uint64_t nbytes, bint in_part) noexcept nogil
    cdef bint may_grow(self, uint64_t nbytes, bint in_part) noexcept
    cdef int about_to_grow(self, uint64_t nbytes) except -1
    cdef bint give_back_left(self) except -1
    cdef bint give_back_body(self) except -1
    cdef bint is_overdrawn(self) except -1
    cdef bint may_stretch(self, uint64_t body) noexcept
    cdef int drop(self) except -1
    cdef int install(self, object plan, object begun, object served, bint resumed, bint at_once) except -1
    cdef object fill_server(self, uint64_t at, object served)
    cdef list add_orders(self, uint64_t at, object orders, const uint8_t[::1] once)
    cdef int begin_step(self, str kind) except -1
    cdef PlanServer* new_server(self, object plan, object served) except NULL
    cdef int add_lengths(self, uint64_t at, object orders, object numbers, object lengths) except -1
    cdef int make_lengths_fit(self, str kind) except -1
    cdef uint32_t index_of(self, uint64_t stream) noexcept
    cdef int meet_length(self, uint64_t stream, uint64_t requested) except -1
    cdef int stretch(self, str kind, dict wanted) except -1
    cdef int lay_out_anew(self, str kind, dict wanted) except -1
    cdef bint exchange(self, uint64_t at, vector[Region]& regions) except -1
    cdef int take_regions(self, bint with_base, bint at_once) except -1
    cdef uint64_t bytes_taken(self) noexcept
    cdef bint take_region(self, int which) except -1
    cdef bint take_range(self, int which) except -1
    cdef int fill_place(self, object allocator, uint64_t stream, uint64_t rounded, uint64_t requested) except -1
    cdef int bring_region(self, object allocator, uint64_t stream, uint64_t rounded) except -1
    cdef uint64_t bytes_of_plan(self) noexcept
    cdef int retire(self) except -1
    cdef int give_back_empty(self) except -1
    cdef void list_region(self, uint64_t ptr, vector[Region]& regions) noexcept nogil
    cdef void drop_gone(self) noexcept nogil
    cdef bint give_back_idle(self) except -1
    cdef int give_back_side(self) except -1
    cdef bint is_in_pages(self) noexcept
    cdef object gate_for(self, gate)
    cdef int enter(self, str kind) except -1
    cdef int follow(self, object allocator, uint64_t stream, uint64_t rounded, uint64_t requested) except -1
    cdef int64_t turn(self, uint64_t stream, uint64_t rounded, uint64_t requested) noexcept
    cdef int take_turn(self, object allocator, uint64_t stream, uint64_t rounded, uint64_t requested,
                       int64_t turn) except -1
    cdef int end_own(self, object allocator) except -1
    cdef bint is_idle_for_long(self) noexcept
    cdef int give_up(self, object allocator) except -1
    cdef bint prove(self, object allocator) except -1
    cdef int open(self, object allocator, str kind) except -1
    cdef int tell_watch(self, object allocator) except -1
    cdef int count_step(self, object kind) except -1
    cdef int leave(self, bint counts) except -1
    cdef int note_departure(self, str kind) except -1
    cdef bint has_ended(self, str kind) except -1
    cdef int activate(self, object sequences) except -1
    cdef dict stats(self)


cdef bint is_beside_plan(Pool pool) noexcept nogil
cdef Step new_step(object allocator, Planned planned, str kind)
