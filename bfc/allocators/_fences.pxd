"""Which streams use memory, what was freed and waits for them, and which of them capture graphs."""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, Pool, Reasons
from bfc.allocators._lock cimport Lock, Shown
from bfc.allocators._private_pools cimport PoolId, PoolUses, PrivatePools


@cython.final
cdef class FencedFree:
    """A chunk that was freed, and how many fences it still waits for."""

    cdef ChunkHandle handle
    cdef Py_ssize_t left


@cython.final
cdef class PendingFence:
    """A fence that a freed chunk waits for, in the queue of its stream."""

    cdef object fence
    cdef FencedFree fenced
    cdef unsigned long polled_by         # the thread that is querying the fence; 0: none


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
    """Guarded by the GIL. It asks sub-allocators for fences, and never calls an allocator."""

    cdef object source                  # the allocator's sub-allocator
    cdef Reasons* reasons               # the allocator's; NULL: it has none
    cdef dict users                     # allocation id -> {stream: what the user passed for it, kept alive}
    cdef dict marked                    # allocation id -> [(stream, fence)], as the stream may be gone at the free
    cdef dict queues                    # stream -> deque of PendingFence
    cdef object stuck                   # deque of (stream, fence, FencedFree): fences whose query failed
    cdef uint64_t era_seen              # the era that the queues know of: see `era`

    cdef int uses(self, int64_t allocation_id, object stream, object passed) except -1
    cdef int forget(self, allocation_id) except -1
    cdef int clear(self) except -1

    cdef void queues_changed(self) noexcept
    cdef int wait_behind(self, ChunkHandle handle, list fences) except -1
    cdef int put_in_queue(self, stream, fence, FencedFree fenced) except -1
    cdef int try_stuck_again(self) except -1
    cdef PendingFence next_done(self, stream, list faults, bint wait)
    cdef int answered(self, stream, queue, PendingFence first, bint done, fault, list faults) except -1
    cdef bint wait_for(self, stream, PendingFence entry) except -1
    cdef int wait_for_all(self, list faults) except -1
    cdef int forget_dead_askers(self) except -1


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

    cdef bint scopes_defer(self) noexcept
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

    cdef int attach(self, Lock* lock, Pool pool, Fences fences, PrivatePools private_pools,
                    PoolUses pool_uses) except -1
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
    return PyDict_GET_SIZE(fences.queues) > 0

cdef int drop_done(list fences) except -1
