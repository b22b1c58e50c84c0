"""Which streams use memory, what was freed and waits for them, and which of them capture graphs."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, Pool, Reasons
from bfc.drivers.cuda._device cimport bfc_native_source
from bfc.allocators._lock cimport Lock, Shown
from bfc.allocators._private_pools cimport PoolId, PoolUses, PrivatePools


cdef extern from "stream_uses.hpp" namespace "bfc" nogil:
    cdef cppclass StreamUses:
        cbool add(int64_t allocation_id, uint64_t stream) noexcept
        cbool copy(int64_t allocation_id, vector[uint64_t]& out) noexcept
        cbool has(int64_t allocation_id) noexcept
        void drop(int64_t allocation_id) noexcept
        void clear() noexcept
        cbool empty() noexcept

cdef extern from "stream_queues.hpp" namespace "bfc" nogil:
    cdef enum MarkKind:
        PASSED_MARK "bfc::kPassedMark"
        EVENT_MARK "bfc::kEvent"
        FENCE_MARK "bfc::kFence"

    cdef struct Mark:
        uint64_t stream
        void* what
        uint32_t kind

    cdef struct TakenMark:
        Mark mark
        uint64_t number
        ChunkHandle handle
        unsigned long by

    cdef struct QueuedMark:
        uint64_t stream
        uint64_t number
        ChunkHandle handle

    cdef enum Turn:
        NO_MARK "bfc::kNoMark"
        TURN_OF_ANOTHER "bfc::kTurnOfAnother"
        TURN_OF_PYTHON "bfc::kTurnOfPython"
        YOUR_TURN "bfc::kYourTurn"

    cdef cppclass StreamQueues:
        void attach(Reasons* reasons, uint32_t fences, uint32_t events) noexcept
        cbool add(ChunkHandle handle, const vector[Mark]& marks) noexcept
        size_t size() noexcept
        cbool next_stream(cbool first, uint64_t& stream) noexcept
        cbool list(vector[QueuedMark]& out) noexcept
        Turn take_first(uint64_t stream, unsigned long thread, cbool fences, TakenMark& out) noexcept
        Turn take(const QueuedMark& row, unsigned long thread, TakenMark& out) noexcept
        cbool put_back(const TakenMark& taken) noexcept
        cbool passed(const TakenMark& taken) noexcept
        cbool set_aside(const TakenMark& taken) noexcept
        cbool try_again(cbool ahead) noexcept
        unsigned long taken_by(uint64_t stream) noexcept
        void forget_threads(unsigned long but, cbool with_events) noexcept
        cbool pop(Mark& out) noexcept


ctypedef int64_t (*CurrentStream)(int device) noexcept nogil


@cython.final
cdef class DeferredFree:
    """A chunk that was freed in a scope of a private pool, and the streams that use it."""

    cdef ChunkHandle handle
    cdef dict streams                   # what `record_stream` named -> what the user passed for it
    cdef list fences                    # (stream, fence), of streams that were marked before the free
    cdef uint64_t made_on               # the stream that it was allocated for
    cdef dict captured                  # stream -> the capture it was recorded in, whose graph orders its work
    cdef tuple pool                     # the private pool that it belongs to
    cdef object markers                 # the last nodes of a graph that use it, or None: see `safe_in_capture`


cdef class FenceQueues:
    """It asks sub-allocators for fences, and never calls an allocator."""

    cdef object source                  # the allocator's sub-allocator
    cdef Reasons* reasons               # the allocator's; NULL: it has none
    cdef Lock* lock                     # the allocator's, for the queues; NULL: the GIL guards them, too
    cdef bfc_native_source* native      # the sub-allocator's events; NULL: it has none
    cdef object keeps_native            # its capsule
    cdef dict users                     # allocation id -> {stream: what the user passed for it, kept alive}
    cdef dict marked                    # allocation id -> [(stream, fence)], as the stream may be gone at the free
    cdef StreamQueues queues
    cdef Shown[uint64_t] era_seen       # the era that the queues know of: see `era`

    cdef int uses(self, int64_t allocation_id, object stream, object passed) except -1
    cdef int forget(self, allocation_id) except -1
    cdef int clear(self) except -1

    cdef void enter(self) noexcept nogil
    cdef void leave(self) noexcept nogil
    cdef int wait_behind(self, ChunkHandle handle, list fences) except -1
    cdef Mark mark_from(self, stream, fence) noexcept
    cdef void drop_mark(self, Mark* mark) noexcept nogil
    cdef void drop_all_marks(self) noexcept
    cdef int try_stuck_again(self, bint ahead=*) except -1
    cdef bint next_stream(self, bint first, uint64_t* stream) noexcept nogil
    cdef Turn take_first(self, uint64_t stream, cbool fences, TakenMark* taken) noexcept nogil
    cdef bint take_at_last(self, QueuedMark row, TakenMark* taken) except -1
    cdef void put_back(self, TakenMark* taken) noexcept nogil
    cdef void set_aside(self, TakenMark* taken) noexcept nogil
    cdef bint has_passed(self, TakenMark* taken) noexcept nogil
    cdef bint is_reached(self, TakenMark* taken, bint wait) except -1
    cdef int answer(self, TakenMark* taken, list faults, bint wait) except -1
    cdef bint next_reached(self, uint64_t stream, list faults, bint wait, TakenMark* taken) except -1
    cdef int list_marks(self, vector[QueuedMark]& rows) except -1
    cdef bint wait_for(self, QueuedMark row, TakenMark* taken) except -1
    cdef int wait_until_reached(self, QueuedMark row) except -1
    cdef int wait_for_all(self, list faults) except -1
    cdef void forget_dead_askers(self) noexcept nogil


@cython.final
cdef class Fences(FenceQueues):
    cdef Shown[size_t]* open_scopes     # how many scopes of private pools are open; NULL: the policy has none
    cdef Shown[size_t] captures         # how many captures are marked
    cdef bint reuses                    # whether a graph's structure may prove that a free is safe
    cdef bint strict                    # whether all that is recorded in a capture belongs to its graph
    cdef dict captured                  # allocation id -> {stream: the capture that it was recorded in}
    cdef dict told                      # {stream: its capture's pool}, as a history was told
    cdef dict replayed                  # {stream: its capture's pool} of a replay, whose streams do not capture
    cdef dict visited                   # (capture, stream) -> the nodes that the stream's next one comes after
    cdef bint asks_later                # a fence is first queried at the next allocation, not at the free
    cdef object deferred                # deque of DeferredFree: removing an item needs no memory
    cdef object stuck_deferred          # of those, the ones that the device failed for
    cdef CurrentStream current          # of a program of C; NULL: there is none
    cdef int device                     # as that program numbers them
    cdef StreamUses noted               # uses of allocations that `users` does not have; guarded by the lock
    cdef object home_stream             # of the allocator: an object that owns its stream must live as long

    cdef int adopt(self, int64_t allocation_id) except -1
    cdef cbool takes_events(self) noexcept nogil
    cdef int mark_users(self, int64_t allocation_id) except -1
    cdef int mark_user(self, int64_t allocation_id, uint64_t stream) except -1
    cdef list fences_on(self, streams)
    cdef list unfinished(self, int64_t allocation_id)

    cdef bint capture_is_marked(self) noexcept nogil
    cdef bint asks_at_once(self) noexcept nogil
    cdef bint is_capturing(self, stream) except -1
    cdef bint is_captured(self, uint64_t stream) except -1
    cdef bint is_in_capture(self, uint64_t made_on) except -1
    cdef uint64_t stream_here(self, uint64_t made_on) except? 0xFFFFFFFFFFFFFFFF
    cdef bint some_capture(self, streams) except -1
    cdef int note_captured(self, allocation_id, uint64_t stream, uint64_t made_on) except -1
    cdef object markers_of(self, uint64_t made_on, streams)
    cdef int mark_captures(self, int more) except -1
    cdef list safe_in_capture(self, uint64_t stream)

    cdef bint scopes_defer(self) noexcept nogil
    cdef bint defers(self, allocation_id, uint64_t made_on) except -1
    cdef int defer(self, ChunkHandle handle, allocation_id, uint64_t made_on, tuple pool) except -1
    cdef bint must_wait(self, DeferredFree entry) except -1
    cdef int record_deferred(self, bint again, tuple only, vector[ChunkHandle]& done, list faults) except -1
    cdef int put_aside(self, DeferredFree entry, bint is_stuck) except -1
    cdef void deferred_changed(self) noexcept


@cython.final
cdef class Captures:
    cdef Lock* lock                     # the allocator's, and so are the next four
    cdef Pool pool
    cdef Fences fences
    cdef PrivatePools private_pools
    cdef PoolUses pool_uses

    cdef int attach(self, Lock* lock, Pool pool, Fences fences, PrivatePools private_pools) except -1
    cdef int mark(self, int more) except -1
    cdef int begin(self, PoolId id, uint64_t stream, bint strict) except -1
    cdef list streams(self)
    cdef list news_of(self, streams)
    cdef int take_as_captured(self, pool, stream, bint is_captured) except -1
    cdef int forget_streams_of(self, pool) except -1
    cdef bint is_captured(self, uint64_t stream, bint strict) except -1
    cdef PoolId pool_for(self, uint64_t stream) except *


cdef extern from "Python.h":
    Py_ssize_t PyDict_GET_SIZE(dict items) nogil    # reads one number: safe, as the dict is never replaced

cdef inline bint some_use(FenceQueues fences) noexcept nogil:
    """Whether any live allocation is used by another stream."""
    return PyDict_GET_SIZE(fences.users) > 0

cdef inline bint some_marked(FenceQueues fences) noexcept nogil:
    """Whether streams were marked before the free of what they use."""
    return PyDict_GET_SIZE(fences.marked) > 0

cdef inline bint some_wait(FenceQueues fences) noexcept nogil:
    """Whether anything that was freed waits for a stream."""
    return fences.queues.size() > 0

cdef int drop_done(list fences) except -1
