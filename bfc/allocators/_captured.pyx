"""Captures of graphs and scopes of private pools, as requests, contexts and replays change and ask them."""

from bfc.native.turns cimport TurnAt
from bfc.allocators._private_pools cimport PoolId, id_of
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Request, closed
from bfc.allocators._plan_use cimport planned_part

from bfc.pytorch import words as _words


cdef int look_at_captures(ChunkAllocator allocator, Request* request) except -1:
    """Asks the source about the request's stream: whether it captures, and for which graph."""
    cdef PoolId pool = allocator.captures.pool_for(request.stream)
    if pool.first or pool.second:   # else a replay may have named one
        request.captured[0] = pool.first
        request.captured[1] = pool.second
    request.in_capture = request.in_capture or allocator.captures.is_captured(request.stream, allocator.strict)
    # To wait for streams would break the capture, so a request in one counts as one that has waited.
    request.has_waited = request.has_waited or request.in_capture
    if request.in_capture and allocator.fences.reuses:
        allocator.frees.free_safe_in_capture(request.stream)
    return 0


cdef int note_captured_streams(ChunkAllocator allocator) except -1:
    """Writes into a history which streams with mapped memory have joined a capture, or left it: nobody waits for
    those that capture, so that their pages stay, and a replay has no driver that would tell."""
    # PyTorch's histories say nothing of streams in a capture. Without a capture the driver is not asked.
    if allocator.strict or not allocator.private_pools.open_captures.get():
        return 0
    # A history may be started or ended by another thread.
    allocator.acquire()
    cdef bint is_recorded = allocator.pool.books.history != NULL
    allocator.lock.release()
    if is_recorded:
        for stream, pool, joins in allocator.captures.news_of(allocator.mapped.streams_asked()):
            said = _words.STREAM_JOINS if joins else _words.STREAM_LEAVES
            allocator.recorder.note_of_pool(allocator.pool, allocator.lock, pool, said, stream)
    return 0


cdef int end_scope(ChunkAllocator allocator, pool, str said) except -1:
    """Closes a scope of a pool, and writes that down."""
    allocator.captures.pool_uses.end(id_of(pool))
    allocator.scopes_changed()
    allocator.recorder.note_of_pool(allocator.pool, allocator.lock, pool, said)
    allocator.pool_ended(pool)
    return 0


def begin_capture(ChunkAllocator allocator not None, pool, stream):
    cdef TurnAt turn
    turn.take(allocator)
    allocator.require_set_up()
    if allocator.life.is_closed:
        raise closed()
    with planned_part(allocator).changes():     # in which a plan asks the driver for memory
        allocator.captures.begin(id_of(pool), stream, allocator.strict)
    allocator.scopes_changed()
    allocator.recorder.note_of_pool(allocator.pool, allocator.lock, pool, _words.CAPTURE_BEGINS)


def end_capture(ChunkAllocator allocator not None, pool):
    cdef TurnAt turn
    turn.take(allocator)
    allocator.require_set_up()
    try:
        allocator.captures.mark(-1)
    # Also where no capture is marked any more: the scope would divert all later requests into the graph's pool.
    finally:
        end_scope(allocator, pool, _words.CAPTURE_ENDS)
        allocator.captures.forget_streams_of(pool)


def take_as_captured(ChunkAllocator allocator not None, pool, stream, is_captured):
    """For a replay: lets a stream count as captured into a pool, or no more."""
    cdef TurnAt turn
    turn.take(allocator)
    allocator.captures.take_as_captured(pool, stream, is_captured)


def forget_captured(ChunkAllocator allocator not None, pool):
    """For a replay: a capture into a pool has ended, and with it that of its streams."""
    cdef TurnAt turn
    turn.take(allocator)
    allocator.captures.forget_streams_of(pool)


def captured_streams(ChunkAllocator allocator not None):
    cdef TurnAt turn
    turn.take(allocator)
    streams = []
    for stream, _pool in allocator.captures.streams():
        streams.append(stream)
    return streams
