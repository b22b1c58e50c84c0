"""A request, from its size to its chunk, where a hit is not enough. The steps stand here in their order; what each
policy tries is its own."""

import gc
import time
from functools import partial

from cpython.exc cimport PyErr_Clear
from libc.stdint cimport uint64_t

from bfc.native.turns cimport TurnAt, counted
from bfc.interpreter._process cimport is_finalizing, run_handlers
from bfc._core cimport LOWER_END, NO_CHUNK, NO_HOST_MEMORY, TRACED, UPPER_END, Chunk
from bfc.buffers._scopes cimport note_tag_here, owner_here, owners_used, step_here
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._private_pools cimport PoolId, is_default, is_private, pool_of
from bfc.allocators._reasons cimport FREES_PENDING, IS_TOLD, SOME_WAIT
from bfc.allocators._reading cimport is_live_in, pages_in_use
from bfc.allocators._frees cimport AT_ALLOCATION, IN_CAPTURE
from bfc.allocators._tags cimport TAG_POOLS
from bfc.allocators._chunk_allocator cimport (
    CONTIGUOUS, FROM_UPPER_END, OR_NONE, ChunkAllocator, Placement, Request, closed, is_apart, is_in_capture,
)
from bfc.allocators._plan_use cimport asks_for_length, asks_plan, ends_waiting, keep_within_bounds, make_room_in_plan
from bfc.allocators._captured cimport look_at_captures, note_captured_streams
from bfc.allocators._looking cimport stats_now

from bfc.allocators._looking import snapshot_alone
from bfc.errors import out_of_host_memory
from bfc.interpreter.polling import sleep as _sleep
from bfc.snapshots.refusal import out_of_memory

cdef extern from "debug.h":
    const int BFC_DEBUG

cdef extern from "owners.hpp":
    pass
cdef extern from "plan_server.hpp":
    pass

_RETRY_POLL_SECONDS = 0.001

cdef enum:
    MOST_POLLS = 1000


cdef int allocate_placement(ChunkAllocator allocator, uint64_t size, uint64_t on, object stream, object freed_before,
                            int how, uint64_t alignment, Placement* placed) except -1:
    cdef bint unordered = allocator.streams.by_stream and size and allocator.is_unordered(on)
    cdef Request request
    cdef TurnAt turn
    turn.take(allocator)
    # An unordered stream has no lane of its own, as nothing can be reused there without waiting: it borrows from the
    # home stream.
    allocator.set_request(&request, size, allocator.streams.home if unordered else on)
    request.shared = unordered
    request.alignment = request.asking.alignment = alignment
    request.end = UPPER_END if how & FROM_UPPER_END else LOWER_END
    if freed_before is not None:
        allocator.set_freed_before(&request, freed_before)
    # Before the first attempt, and once: a retry belongs to the same scopes.
    set_scopes_of(allocator, &request)
    if how & CONTIGUOUS or alignment:      # what is mapped page by page lies at any multiple of all addresses
        request.contiguous = True
        check_contiguous(allocator, &request, how & CONTIGUOUS != 0)
    # Read before the attempt, so that a free during it is not missed. Upstream misses those (TensorFlow's behaviour,
    # 2.8).
    cdef uint64_t seen = allocator.frees.count.get()
    cdef uint64_t changes = allocator.source.changes.get()
    attempt(allocator, &request, placed)
    if placed.handle == NO_CHUNK and size:
        try_harder(allocator, &request, freed_before, seen, placed)
        if placed.handle == NO_CHUNK:
            if how & OR_NONE:
                return 0
            raise refusal_of(allocator, &request)
    # Asked of the lane that the request got: without pages BFC keeps private pools apart by stream, and nothing else.
    if on != allocator.streams.home and size and (unordered or not is_apart(allocator, &request.lane)):
        leave_home(allocator, placed, on, stream)
    if allocator.reasons.has(IS_TOLD) and placed.allocation_id:
        announce(allocator, placed, changes)
    return 0


cdef int set_scopes_of(ChunkAllocator allocator, Request* request) except -1:
    """Notes whose request this is, and its tag: the scopes that this call is in."""
    if owners_used.load():
        set_owner_of(allocator, request)
    if counted(allocator.tags.scopes_open):
        request.tag = allocator.tags.here(allocator)
        note_tag_here(<void*>allocator, request.tag, request.owner)
        if request.tag:
            check_tag(allocator, request)
    return 0


cdef int set_owner_of(ChunkAllocator allocator, Request* request) except -1:
    """Notes whose scope this call is in."""
    request.owner = owner_here(allocator)
    if request.owner == 0:
        return 0
    # The table of owners may grow, and other threads read it.
    allocator.acquire()
    # Room for its figures is made now, so that noting the owner of a chunk cannot fail.
    cdef bint is_known = allocator.pool.books.owned.know(request.owner)
    allocator.lock.release()
    if not is_known:
        raise out_of_host_memory()
    return 0


cdef int check_tag(ChunkAllocator allocator, Request* request) except -1:
    """Where a private pool is to serve the request, too, that pool has to sleep with the tag."""
    allocator.tags.refuse_if_asleep(request.tag)
    cdef PoolId pool = allocator.captures.pool_for(request.stream)
    if request.captured[0] or request.captured[1]:
        pool = PoolId(request.captured[0], request.captured[1])
    # The policy reads which scopes are open, which changes under the lock.
    allocator.acquire()
    allocator.set_lane(&request.lane, request.stream)
    if is_default(pool) and is_private(&request.lane):
        pool = pool_of(&request.lane)
    allocator.lock.release()
    return 0 if is_default(pool) else allocator.join_tag(request, pool)


cdef int check_contiguous(ChunkAllocator allocator, Request* request, bint is_asked) except -1:
    """Refuses a request that must lie in a region if it cannot, and, where that `is_asked`, one that must be one
    physical allocation if the allocator cannot tell whether a chunk is one."""
    if request.tag:
        name = allocator.tags.name_of_pool(TAG_POOLS, request.tag)
        raise ValueError(f"memory of tag {name!r} is mapped, so that it can sleep, and is neither one physical "
                         f"allocation nor aligned to more than {allocator.source.alignment}: allocate contiguous or "
                         f"aligned memory outside of it")
    # Alignment alone may cross a border: only who asks for one physical allocation minds.
    if is_asked and allocator.source.joins_regions:
        raise ValueError(f"this allocator joins the regions of {allocator.sub_allocator!r} that lie end to end, so a "
                         f"chunk may lie in two of them: virtual_memory=True or a CachingAllocator joins none")
    return 0


cdef int attempt(ChunkAllocator allocator, Request* request, Placement* placed) except -1:
    """Makes one complete attempt. `placed.handle` is NO_CHUNK if nothing fits, and for 0 bytes."""
    if allocator.fences.capture_is_marked() or allocator.private_pools.open_captures.get():
        look_at_captures(allocator, request)
    placed.handle = NO_CHUNK
    placed.allocation_id = 0
    placed.ptr = 0
    if request.refused and allocator.life.is_closed:
        raise closed()
    # Nothing is polled either: upstream's process_events does not run for such a request (PyTorch's behaviour, 2.12).
    if request.nbytes == 0 or request.refused:
        return 0
    # Frees that are due come first, so that what they free can serve this request: as in PyTorch's malloc.
    if not allocator.reasons.none():
        allocator.frees.drain(AT_ALLOCATION | (IN_CAPTURE if request.in_capture else 0))
    if allocator.pool.plans.current != NULL and allocator.planned.turns.follows and asks_plan(allocator, request):
        allocator.planned.follow(allocator, request.stream, request.rounded, request.nbytes)
    if (allocator.pool.plans.current != NULL and not request.tag and not request.in_capture
            and asks_for_length(allocator)):
        allocator.planned.meet_length(request.stream, request.nbytes)
    if allocator.pool.plans.current != NULL and asks_plan(allocator, request):
        allocator.planned.fill_place(
            allocator, request.stream if allocator.streams.by_stream else allocator.streams.home, request.rounded,
            request.nbytes)
    if allocator.pool.plans.current != NULL and ends_waiting(allocator):
        allocator.plan_changed()
    # Placed and written down at once. `frees_before` says which frees this look has seen.
    allocator.acquire()
    request.frees_before = allocator.frees.count.get()
    if not allocator.life.is_closed:
        allocator.fill(allocator.place(request), request, placed)
    allocator.lock.release()
    if placed.handle >= NO_HOST_MEMORY:
        after_miss(allocator, request, placed)
    if BFC_DEBUG >= 2 and allocator.pool.check_is_due():
        allocator.check_books()
    return 0


cdef int after_miss(ChunkAllocator allocator, Request* request, Placement* placed) except -1:
    """The slow path. The lock is not held: `place_after_miss` takes it where it needs the pool."""
    cdef uint64_t seen
    # Threads that Python has stopped for good may be inside a call. It never ends, so nobody may wait for its bytes.
    if is_finalizing():
        allocator.source.forget_other_threads()
    if allocator.fences.capture_is_marked():
        note_captured_streams(allocator)
    elif (allocator.planned is not None
          and allocator.pool.plans.all.size() > <size_t>(allocator.pool.plans.current != NULL)
          and not allocator.source.is_called_here()):
        allocator.planned.give_back_empty()      # of plans that have ended, before more is asked for
    # Before the device is asked: beside a plan memory may not grow past what the plan was chosen for.
    if placed.handle == NO_CHUNK and allocator.planned is not None and not allocator.fences.capture_is_marked():
        keep_within_bounds(allocator, request, placed)
    while placed.handle == NO_CHUNK:
        if allocator.life.is_closed:
            raise closed()
        seen = allocator.source.changes.get() - request.asking.changes   # of other threads
        allocator.place_after_miss(request, placed)
        if placed.handle != NO_CHUNK or request.refused or not worth_another_try(allocator, request, seen):
            break
        allocator.acquire()
        if not allocator.life.is_closed:
            allocator.fill(allocator.place(request), request, placed)
        allocator.lock.release()
    if placed.handle == NO_CHUNK and allocator.planned is not None and not request.refused:
        make_room_in_plan(allocator, request, placed)
    while placed.handle == NO_CHUNK and not request.refused:
        seen = allocator.source.changes.get() - request.asking.changes
        allocator.place_where_refused(request, placed)
        if placed.handle != NO_CHUNK or not worth_another_try(allocator, request, seen):
            break
    if placed.handle == NO_HOST_MEMORY:
        placed.handle = NO_CHUNK
        raise out_of_host_memory()
    try:
        run_handlers()      # signal handlers that were deferred while the sub-allocator was called
    except BaseException as error:
        raise allocator.frees.undo(placed.handle, placed.allocation_id) or error
    return 0


cdef bint worth_another_try(ChunkAllocator allocator, Request* request, uint64_t seen) except -1:
    """Waits for what may yet free memory: streams that still use freed blocks, and calls of other threads to the
    sub-allocator, which hold a part of the limit. Returns whether anything may have changed. That another thread
    has freed memory counts once: a request for more than there is must end."""
    cdef bint is_first = not request.has_waited, waits = is_first and allocator.reasons.has(SOME_WAIT | FREES_PENDING)
    cdef bint frees = is_first and allocator.frees.count.get() != request.frees_before
    request.has_waited = True
    if waits:
        allocator.frees.wait_for_streams()
    # Read before it is asked who is calling: a call that ends in between is not waited for.
    cdef uint64_t ended = allocator.source.calls_ended.get()
    # A request from inside a sub-allocator's call would wait for that call, and so for itself.
    cdef bint is_inside = allocator.source.is_called_here()
    if request.blocked and not is_inside:
        time.sleep(_RETRY_POLL_SECONDS)
    while not is_inside and allocator.source.is_calling() and allocator.source.calls_ended.get() == ended:
        time.sleep(_RETRY_POLL_SECONDS)
    if allocator.source.changes.get() - request.asking.changes != seen:
        return True
    if not is_inside and request.polls < MOST_POLLS and allocator.source.holds_bytes_aside():
        request.polls += not allocator.source.is_calling()   # the call that has ended may be a third thread's
        time.sleep(_RETRY_POLL_SECONDS)
        return True
    return waits or frees or (request.blocked and not is_inside)


cdef int try_harder(ChunkAllocator allocator, Request* request, object freed_before, uint64_t seen,
                    Placement* placed) except -1:
    """Tries what may still help. `seen` is the count of frees before the first attempt."""
    cdef uint64_t freed
    if counted(allocator.life.live_buffers) and not allocator.strict and not request.refused:
        freed = allocator.frees.count.get()
        gc.collect()    # buffers in reference cycles
        # Most collections find no buffer: then there is nothing to try.
        if allocator.frees.count.get() != freed or allocator.reasons.has(FREES_PENDING):
            attempt(allocator, request, placed)
    if placed.handle == NO_CHUNK and allocator.retry_seconds > 0 and not request.refused \
            and not is_in_capture(allocator, request):
        wait_for_frees(allocator, request, freed_before, seen, placed)
    if placed.handle == NO_CHUNK:
        # Told here and not where the error is made: `try_allocate` makes none, and counts as refused all the same.
        allocator.was_refused(request)
    return 0


cdef int wait_for_frees(ChunkAllocator allocator, Request* request, object freed_before, uint64_t seen,
                        Placement* placed) except -1:
    """Tries again after each free until `retry_seconds` have passed, and then once more (TensorFlow's behaviour,
    2.8). `seen` is the count of frees before the first attempt: upstream misses a free between that and the wait.
    """
    deadline = time.monotonic() + allocator.retry_seconds
    late = False
    while placed.handle == NO_CHUNK and not late:
        while allocator.frees.count.get() == seen and not allocator.reasons.has(FREES_PENDING) and not late:
            _sleep(_RETRY_POLL_SECONDS)
            allocator.frees.drain(0)     # a stream that finishes counts as a free
            # The deadline does not move with a free that was too small (CC-55).
            late = time.monotonic() >= deadline
        seen = allocator.frees.count.get()
        if freed_before is not None:
            allocator.set_freed_before(request, freed_before)
        attempt(allocator, request, placed)
    return 0


cdef object refusal_of(ChunkAllocator allocator, Request* request):
    """The error of a request without room."""
    source = allocator.sub_allocator
    return out_of_memory(request.nbytes, stats_now(allocator), source.total_bytes, allocator.refused_by(request),
                         source.largest_block, allocator.against_pieces(),
                         pages_in_use(allocator.pool, allocator.lock), partial(snapshot_alone, allocator))


cdef int leave_home(ChunkAllocator allocator, Placement* placed, uint64_t on, object stream) except -1:
    """Makes memory safe to use on a stream other than the home stream, and lets its free wait for a fence there.

    Work that is queued on the home stream may still use the memory, so the other stream waits for that work.
    """
    cdef uint64_t home_frees, stream_id
    try:
        if allocator.streams.home != HOST_STREAM and allocator.sub_allocator.asynchronous:
            # By the id: a driver may give the handle of a destroyed stream to a new one, which has waited for nothing.
            stream_id = allocator.sub_allocator.stream_id(on)
            if allocator.frees.must_order(stream_id, &home_frees) or allocator.is_of_thread(on):
                allocator.sub_allocator.order(allocator.streams.home, on)
                # With the count from before the order: what was freed since may not be covered by it.
                allocator.frees.was_ordered(stream_id, home_frees)
        allocator.fences.uses(placed.allocation_id, on, stream)
    except BaseException as error:
        raise allocator.frees.undo(placed.handle, placed.allocation_id) or error
    return 0


cdef int announce(ChunkAllocator allocator, Placement* placed, uint64_t changes_before) except -1:
    """Tells a leak check, a history and tracemalloc of an allocation. If one raises, frees it again."""
    cdef bint region_came = allocator.source.changes.get() != changes_before
    try:
        if allocator.recorder.noter is not None:
            allocator.recorder.noter(placed.allocation_id)
        if allocator.recorder.keeps_frames:
            allocator.recorder.keep_frames(allocator.pool, allocator.lock, placed.allocation_id, placed.ptr,
                                           region_came, step_here(allocator) if owners_used.load() else None)
    except BaseException as error:
        raise allocator.frees.undo(placed.handle, placed.allocation_id) or error
    if allocator.pool.books.owned.tracing.domain:
        trace_allocation(allocator, placed)
    return 0


cdef void trace_allocation(ChunkAllocator allocator, Placement* placed) noexcept:
    """Tells Python's tracemalloc of an allocation. Does nothing if the host has no memory for that."""
    cdef Chunk* chunk
    # Told while it is known to live: another thread may have freed it, and tracemalloc would keep it for good.
    allocator.acquire()
    if is_live_in(allocator.pool, placed.handle, placed.allocation_id):
        chunk = &allocator.pool.chunks[placed.handle]
        chunk.state |= TRACED
        allocator.pool.books.owned.tracing.tell(allocator.pool.books.owned.tracing.domain, chunk.ptr, chunk.size)
    allocator.lock.release()


cdef int take_back(ChunkAllocator allocator, Placement* placed) except -1:
    """Frees an allocation whose address cannot be returned: Python has no memory for the int."""
    PyErr_Clear()
    raise allocator.frees.undo(placed.handle, placed.allocation_id) or out_of_host_memory()
