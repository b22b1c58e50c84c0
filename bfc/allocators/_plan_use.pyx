"""Plans in use, as a request meets them, and as `use_plan` and what watches a plan change them."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc.native.turns cimport TurnAt
from bfc._core cimport (
    NO_CHUNK, NO_HOST_MEMORY, NO_LANE, NO_STREAM, UNLIMITED, BinSet, ChunkHandle, PlanServer, is_large,
)
from bfc.allocators._places cimport hand_out_room, place_or_room
from bfc.allocators._private_pools cimport is_private
from bfc.allocators._plans cimport Planned
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Placement, Request, is_in_capture

cdef extern from "plan_server.hpp":
    pass
cdef extern from "usage.hpp":
    pass


cdef void find_among_whole(ChunkAllocator allocator, Request* request, Placement* placed,
                           uint64_t oversize) noexcept nogil:
    """Serves a request from a chunk that stays whole beside a plan, unless the user's own limit, `oversize`, keeps
    it whole. Needs the lock."""
    cdef uint32_t number = allocator.bin_set_of(request)
    cdef BinSet rules
    cdef uint64_t whole
    if number == NO_LANE:
        return
    rules = allocator.rules_for(request, number)
    whole = rules.oversize
    rules.oversize = max(whole, oversize)
    rules.cuts_below = max(rules.cuts_below, oversize)
    allocator.fill(allocator.pool.allocate_by(&rules, request.rounded, request.nbytes, request.stream,
                                              request.freed_before, request.alignment, request.indexed),
                   request, placed)
    if placed.handle < NO_HOST_MEMORY and allocator.pool.books.usage != NULL:
        if whole <= allocator.pool.chunks[placed.handle].size < rules.oversize:
            allocator.pool.books.usage.oversize_allocations.raise_by(1)


cdef Planned planned_part(ChunkAllocator allocator):
    allocator.require_set_up()
    if allocator.planned is None:
        planned = Planned()
        planned.attach(&allocator.lock, allocator.pool, allocator.source, allocator.fences, allocator.stitching,
                       &allocator.limit, &allocator.life.is_closed, allocator.streams.home)
        allocator.planned = planned
    return allocator.planned


cdef int put_plan(ChunkAllocator allocator, object plan, object watch, object declined, bint strict,
                  bint resumed) except -1:
    """Serves a plan from now on."""
    try:
        allocator.planned.use(plan, watch, declined, strict, resumed)
    finally:
        allocator.plan_changed()
    return 0


cdef int stop_watch(ChunkAllocator allocator) except -1:
    """Ends the history of what looks whether the plan in use still pays."""
    if allocator.planned.watch is not None:
        allocator.planned.watch.stop(allocator)
    return 0


cdef cbool asks_plan(ChunkAllocator allocator, Request* request) noexcept nogil:
    """Whether a request may get pages of a plan."""
    return not (request.tag or request.contiguous or request.in_capture or request.asking.without_gil
                or request.asked_plan or allocator.private_pools.open_scopes.get() or is_in_capture(allocator, request))


cdef inline uint64_t stream_in_plan(ChunkAllocator allocator, Request* request) noexcept nogil:
    """The stream whose places a plan has for a request."""
    return request.stream if allocator.pool.books.usage == NULL else request.lane.stream


cdef ChunkHandle ask_plan(ChunkAllocator allocator, Request* request) noexcept nogil:
    """The place that the plan in use has for a request, or a guest's room. Asks once for each request: a plan
    counts what it is asked."""
    if allocator.pool.plans.current == NULL or not may_be_planned(allocator, request):
        return NO_CHUNK
    request.asked_plan = True
    return place_or_room(allocator.pool, request.rounded, request.nbytes, stream_in_plan(allocator, request),
                         request.indexed)


cdef cbool may_be_planned(ChunkAllocator allocator, Request* request) noexcept nogil:
    """Whether a plan may have a place for a request whose lane is known."""
    if request.asked_plan or (request.contiguous and allocator.pool.plans.current.has_pages()):
        return False
    return may_lie_in_plan(allocator, request)


cdef cbool may_lie_in_plan(ChunkAllocator allocator, Request* request) noexcept nogil:
    """Whether a request whose lane is known may be served from memory of plans."""
    return not (is_private(&request.lane) or request.lane.thread or request.freed_before
                or (request.contiguous and request.alignment) or is_in_capture(allocator, request))


cdef cbool asks_for_length(ChunkAllocator allocator) noexcept:
    """Whether the plan waits for a request that tells the length of its step."""
    cdef cbool asks
    # Another thread may end the plan.
    allocator.acquire()
    asks = allocator.pool.plans.current != NULL and allocator.pool.plans.current.asks()
    allocator.lock.release()
    return asks


cdef cbool ends_waiting(ChunkAllocator allocator) noexcept:
    """Whether the policy has served all as if there were no plan, and from now on serves what lies beside it: the plan
    has got its first region, or is taken for this program's."""
    cdef PlanServer* plan
    cdef cbool ends = False
    # Another thread may end the plan.
    allocator.acquire()
    plan = allocator.pool.plans.current
    if plan != NULL and plan.is_waiting:
        ends = plan.is_proven or plan.present[0] or plan.present[1]
        plan.is_waiting = not ends
    allocator.lock.release()
    return ends


cdef int keep_within_bounds(ChunkAllocator allocator, Request* request, Placement* placed) except -1:
    """Before more memory is asked for than the policy alone has needed: uses any gap of the plan, and gives back
    what is free. What a plan that did not pay has left is used before anything is asked for."""
    if allocator.planned.has_ended_early():
        use_gap_left(allocator, request, placed)
    elif allocator.pool.plans.current != NULL and not allocator.planned.may_grow(request.rounded, False):
        use_gap_in_plan(allocator, request, placed)
    if placed.handle == NO_CHUNK and not request.refused:
        allocator.planned.about_to_grow(request.rounded)
    return 0


cdef void use_any_room(ChunkAllocator allocator, PlanServer* plan, Request* request, Placement* placed) noexcept nogil:
    """Serves a request in any gap of a plan, if that has some for its stream. Needs the lock."""
    cdef uint32_t index = plan.stream_of(stream_in_plan(allocator, request))
    if index == NO_STREAM:
        return
    allocator.fill(hand_out_room(allocator.pool, plan, index, plan.any_room(index, request.rounded), request.rounded,
                                 request.nbytes, request.stream, request.indexed), request, placed)


cdef int use_gap_in_plan(ChunkAllocator allocator, Request* request, Placement* placed) except -1:
    """Uses any gap of the plan, or cuts a large chunk that stays whole beside a plan."""
    cdef uint64_t oversize = UNLIMITED
    settings = allocator.settings_now()
    if settings is not None and settings.max_split_size is not None:
        oversize = settings.max_split_size
    # Another thread may end the plan, or close the allocator.
    allocator.acquire()
    if not allocator.life.is_closed and allocator.pool.plans.current != NULL and request.asked_plan:
        use_any_room(allocator, allocator.pool.plans.current, request, placed)
        if placed.handle < NO_HOST_MEMORY:      # it was counted as served beside the plan
            allocator.pool.plans.current.counts.side -= 1
            allocator.pool.plans.current.counts.side_bytes -= request.rounded
    if not allocator.life.is_closed and allocator.pool.plans.current != NULL and placed.handle == NO_CHUNK:
        find_among_whole(allocator, request, placed, oversize)
    allocator.lock.release()
    return 0


cdef int use_gap_left(ChunkAllocator allocator, Request* request, Placement* placed) except -1:
    """Serves a large request in a gap of a plan that has ended, where blocks still live."""
    cdef PlanServer* plan
    # Which plans are left changes under the lock.
    allocator.acquire()
    if not allocator.life.is_closed and is_large(request.rounded) and may_lie_in_plan(allocator, request):
        for plan in allocator.pool.plans.all:
            if placed.handle == NO_CHUNK and not plan.has_pages():
                use_any_room(allocator, plan, request, placed)
    allocator.lock.release()
    return 0


cdef int make_room_in_plan(ChunkAllocator allocator, Request* request, Placement* placed) except -1:
    """Where nothing else fits: uses any gap of the plan, or gives back the region of the bodies."""
    use_gap_in_plan(allocator, request, placed)
    if placed.handle == NO_CHUNK and allocator.planned.give_back_idle():
        allocator.place_after_miss(request, placed)
    return 0


def last_step(ChunkAllocator allocator not None):
    """The part of the last step's requests that the plan knew, or None: see `Planned.last_step`."""
    cdef TurnAt turn
    turn.take(allocator)
    return planned_part(allocator).last_step()


def body_is_idle(ChunkAllocator allocator not None):
    """Whether nothing lives in the region of the plan's bodies."""
    cdef TurnAt turn
    turn.take(allocator)
    return planned_part(allocator).body_is_idle()


def home_stream(ChunkAllocator allocator not None):
    """The stream that stands for stream 0 in a plan."""
    return allocator.streams.home


def keeps_history(ChunkAllocator allocator not None):
    """Whether a history is recorded, or frames are kept."""
    cdef TurnAt turn
    turn.take(allocator)
    return allocator.pool.books.history != NULL or allocator.recorder.keeps_history(allocator.pool)
