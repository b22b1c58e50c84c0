"""Allocate and free for callers without the GIL.

PyTorch asks a `MemPool` for segments with its own mutex held, and the GIL must not be taken then:
`allocate_without_gil` and `free_without_gil` never do. Other callers may take it, and need it only where
`hit_without_gil`, `note_use` and `free_at_once_without_gil` have answered False.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.algorithm cimport sort
from libcpp.vector cimport vector
from posix.unistd cimport usleep

from bfc.native.nothrow cimport try_reserve
from bfc.native.turns cimport counted
from bfc.interpreter._process cimport exiting
from bfc._core cimport EXPORTED, NOT_IDLE, NO_CHUNK, NO_HOST_MEMORY, USED_ELSEWHERE, Chunk, ChunkHandle, Lane
from bfc.drivers.cuda._device cimport bfc_native_source
from bfc.buffers._scopes cimport NO_OWNER, owner_without_gil, tag_without_gil
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._private_pools cimport PoolId, default_pool, is_private
from bfc.allocators._reasons cimport EVENTS_WAIT, FREES_PENDING, IN_A_TAG, IS_TOLD
from bfc.allocators._fences cimport EVENT_MARK, PASSED_MARK, Mark
from bfc.allocators._tags cimport NO_TAG
from bfc.allocators._chunk_allocator cimport Placement, Request, is_apart, is_foreign
from bfc.allocators._allocator cimport Allocator

cdef extern from "owners.hpp":
    pass

cdef enum:
    POLLS = 100     # of 1 ms


cdef cbool allocate_without_gil(Allocator allocator, uint64_t nbytes, uint64_t stream, const uint64_t* pool,
                                uint64_t* ptr) noexcept nogil:
    """Allocates for a caller that must not take the GIL. Needs `native`. Returns whether there was memory.

    If another thread's call to the sub-allocator holds the rest of the memory, it is waited for, but not for long:
    that thread may need the GIL, while the thread that has the GIL may be waiting for a mutex that our caller holds.

    No fence is made for the memory: its free names a stream, and the home stream waits for that one.

    `pool` is the id of the private pool, two numbers, that the request is for unless a scope diverts it; or NULL.
    """
    cdef Placement placed
    cdef Request request
    cdef Lane lane
    cdef int poll
    cdef cbool closed = False
    # Context variables are read with the GIL. Who is in which scope stands in a table besides, for such threads.
    cdef uint32_t owner = owner_without_gil(<const void*>allocator)
    placed.handle = NO_CHUNK
    if nbytes >= <uint64_t>1 << 63:     # which a call from Python refuses: rounded up, it might become 0
        allocator.source.last_fault.set(0)
        return False
    for poll in range(POLLS):
        allocator.acquire()
        if poll == 0:   # under the lock: a thread with the GIL may be changing the settings that round it
            allocator.set_request(&request, nbytes, stream)
            request.asking.without_gil = True
            if pool != NULL:
                request.captured[0] = pool[0]
                request.captured[1] = pool[1]
            # Without host memory it has no owner: a call without the GIL could raise no error about it.
            request.owner = owner if allocator.pool.books.owned.know(owner) else NO_OWNER
        allocator.set_lane(&lane, stream)
        if pool != NULL and not is_private(&lane):
            lane.pool[0], lane.pool[1] = pool[0], pool[1]
        # Under BFC memory is taken for the home stream, and another stream is made to wait for that at the end.
        request.stream = stream if is_apart(allocator, &lane) else allocator.streams.home
        closed = allocator.life.is_closed
        if not closed and not request.refused:
            allocator.fill(allocator.place(&request), &request, &placed)
        allocator.lock.release()
        if placed.handle != NO_CHUNK or closed or request.refused:
            break
        allocator.place_after_miss(&request, &placed)
        if placed.handle != NO_CHUNK or request.refused:
            break
        # Nobody holds a part of the limit that may come back.
        if not (request.blocked or allocator.source.holds_bytes_aside()):
            break
        usleep(1000)
    if request.refused:
        allocator.source.last_fault.set(0)
        return False
    if placed.handle == NO_CHUNK and not closed:
        allocator.place_where_refused(&request, &placed)
    # Nothing can be raised here: PyTorch's error is made later, with the GIL, and names it.
    allocator.source.last_fault.set(request.asking.fault)
    if placed.handle >= NO_HOST_MEMORY:
        # As PyTorch counts: an error of the driver is no lack of memory.
        if not closed and not request.asking.fault:
            count_refusal(allocator)
        return False
    ptr[0] = placed.ptr
    return is_apart(allocator, &request.lane) or lead_from_home(allocator, placed.ptr, stream)


cdef void count_refusal(Allocator allocator) noexcept nogil:
    # Several threads may be refused at once.
    allocator.acquire()
    allocator.recorder.num_ooms += 1
    allocator.lock.release()


cdef cbool hit_on_any_stream(Allocator allocator, uint64_t nbytes, uint64_t stream, uint64_t* ptr) noexcept nogil:
    """Like `hit_without_gil`, and makes a stream wait for the home stream where memory is reused in the order of that
    one. False, and nothing has changed, where a free chunk does not serve the request, or the driver fails."""
    if allocator.streams.by_stream or stream == allocator.streams.home:
        return hit_without_gil(allocator, nbytes, stream, ptr)
    return (not allocator.streams.has_lanes.get() and hit_without_gil(allocator, nbytes, allocator.streams.home, ptr)
            and lead_from_home(allocator, ptr[0], stream))


cdef cbool lead_from_home(Allocator allocator, uint64_t ptr, uint64_t stream) noexcept nogil:
    """Makes memory of the home stream safe to use on another one. Frees it again, and returns False, if that fails."""
    if stream == allocator.streams.home or wait_for_home(allocator, stream):
        return True
    free_without_gil(allocator, ptr, allocator.streams.home, False)
    return False


cdef cbool wait_for_home(Allocator allocator, uint64_t stream) noexcept nogil:
    """Makes a stream wait for what is queued on the home stream, if anything was freed there. Returns whether that
    worked. A stream that the driver gives no id waits in any case: nothing is remembered of it."""
    cdef bfc_native_source* native = allocator.source.native
    cdef uint64_t home_frees, stream_id
    cdef cbool has_id = native.stream_id(native.self, stream, &stream_id) == 0
    if has_id and not allocator.frees.must_order(stream_id, &home_frees) and not allocator.is_of_thread(stream):
        return True
    if native.order(native.self, allocator.streams.home, stream) != 0:
        return False
    if has_id:
        allocator.frees.was_ordered(stream_id, home_frees)
    return True


cdef cbool free_without_gil(Allocator allocator, uint64_t ptr, uint64_t stream, cbool waits) noexcept nogil:
    """Frees on a stream, without the GIL. Returns whether a live allocation starts at the address.

    `waits`: waits for the whole device, as cudaFree does. Otherwise the home stream waits for this stream, and for
    those of `use_without_gil`. The device is waited for only where record_stream has named others, or where that
    order cannot be had. Where it does not become idle (a graph is being captured), the next call in Python frees
    the memory.
    """
    cdef bfc_native_source* native = allocator.source.native
    cdef ChunkHandle handle
    cdef cbool elsewhere = False, idle = True
    cdef uint64_t home = allocator.streams.home, noted
    cdef vector[uint64_t] uses
    # The chunk and the streams that have used it are read together: without the GIL other threads free meanwhile.
    allocator.acquire()
    handle = allocator.pool.handle_of(ptr)
    if handle != NO_CHUNK:
        if not allocator.fences.noted.empty():
            # Without host memory for the list the whole device is waited for.
            waits = not allocator.fences.noted.copy(allocator.pool.chunks[handle].allocation_id, uses) or waits
        elsewhere = allocator.pool.chunks[handle].state & USED_ELSEWHERE
        if is_apart(allocator, &allocator.pool.bin_sets[allocator.pool.chunks[handle].bin_set].lane):
            home = allocator.pool.chunks[handle].stream
    allocator.lock.release()
    if handle == NO_CHUNK:
        return False
    # The driver may be gone, and the process gives its memory back by itself.
    if counted(exiting):
        return True
    if not waits and not elsewhere and stream != home:
        # The home stream waits, on the device: then memory is free at once, and later work is ordered behind the use.
        waits = native.order(native.self, stream, home) != 0
    for noted in uses:
        if not waits and not elsewhere and noted != home:
            # in a capture it may belong to the graph, or not: no stream may wait for another across that border
            waits = allocator.fences.capture_is_marked() or native.order(native.self, noted, home) != 0
    if waits or elsewhere:
        # A context that is synchronised while a stream captures spoils the capture.
        idle = not allocator.fences.capture_is_marked() and native.synchronize(native.self) == 0
    allocator.acquire()
    # Looked up again: the lock was free while the device was asked.
    handle = allocator.pool.handle_of(ptr)
    if handle != NO_CHUNK and not allocator.life.is_closed:
        if idle and not elsewhere and uses.size():
            allocator.fences.noted.drop(allocator.pool.chunks[handle].allocation_id)
        # Python knows which streams `record_stream` has named. It makes the free, behind their fences.
        if elsewhere or not idle:
            if not allocator.streams.by_stream:
                allocator.pool.chunks[handle].stream = stream   # `wait_for_home` waits for it, too
            allocator.frees.leave(handle, allocator.pool.chunks[handle].allocation_id, NOT_IDLE)
        if idle and allocator.pool.free_chunk(handle):
            allocator.frees.count.add(1)
        elif idle and not elsewhere:
            allocator.frees.leave(handle, allocator.pool.chunks[handle].allocation_id, NOT_IDLE)
    allocator.lock.release()
    return True


cdef cbool use_without_gil(Allocator allocator, uint64_t ptr, uint64_t stream) noexcept nogil:
    """Notes that a stream uses the allocation at an address. Returns whether there is one."""
    cdef ChunkHandle handle
    cdef Chunk* chunk
    allocator.acquire()
    handle = allocator.pool.handle_of(ptr)
    if handle != NO_CHUNK and not allocator.life.is_closed:
        chunk = &allocator.pool.chunks[handle]
        if is_foreign(allocator, chunk, stream) and not allocator.fences.noted.add(chunk.allocation_id, stream):
            chunk.state |= USED_ELSEWHERE       # the host has no memory: then its free waits for the device
    allocator.lock.release()
    return handle != NO_CHUNK


# -- what needs the pool, and at most a look at events ----------------------------------------------------------------

cdef inline cbool prepare_hit(Allocator allocator, uint64_t nbytes, uint64_t* tag, uint32_t* owner) noexcept nogil:
    """Does what comes before a hit: finds out whose it is (`tag` is NULL where it belongs to none), and frees what
    streams have finished with. False: that needs the GIL, or the request does."""
    if nbytes == 0 or nbytes >= <uint64_t>1 << 63:
        return False    # so many bytes would be rounded up to 0
    if tag != NULL:
        tag[0] = NO_TAG
    if not allocator.reasons.none():
        return prepare_with_reasons(allocator, tag, owner)
    owner[0] = owner_without_gil(<const void*>allocator)
    return True


cdef cbool prepare_with_reasons(Allocator allocator, uint64_t* tag, uint32_t* owner) noexcept nogil:
    # Events and tags are what C can see to; for all else the call goes to Python.
    if allocator.reasons.has(~<uint32_t>(EVENTS_WAIT | IN_A_TAG)):
        return False
    if tag == NULL or not allocator.reasons.has(IN_A_TAG):
        owner[0] = owner_without_gil(<const void*>allocator)
    else:
        # What holds outside of all scopes: a scope of this thread overwrites it.
        tag[0] = counted(allocator.tags.everywhere)
        if not tag_without_gil(<const void*>allocator, tag, owner):
            return False
    # PyTorch polls its events at each allocation, and what they free may serve this one.
    return not allocator.reasons.has(EVENTS_WAIT) or allocator.frees.ask_events()


cdef cbool hit_without_gil(Allocator allocator, uint64_t nbytes, uint64_t stream, uint64_t* ptr) noexcept nogil:
    """Allocates where a free chunk serves the request. `stream` is one that runs its work in order."""
    cdef Placement placed
    cdef uint64_t tag
    cdef uint32_t owner
    cdef cbool is_hit
    # Under BFC another stream waits for the home stream first, which is the caller's to do.
    if stream != allocator.streams.home and (not (allocator.streams.by_stream or allocator.streams.has_lanes.get())
                                             or stream == allocator.streams.default_alias):
        return False
    if not prepare_hit(allocator, nbytes, &tag, &owner):
        return False
    if tag != NO_TAG:
        return hit_in_tag(allocator, nbytes, stream, tag, owner, ptr)
    allocator.acquire()
    is_hit = (not allocator.life.is_closed     # lanes may have gone meanwhile
              and (stream == allocator.streams.home or allocator.streams.by_stream or allocator.streams.has_lanes.get())
              and allocator.pool.books.owned.knows(owner) and allocator.hit(nbytes, stream, &placed))
    if is_hit:
        if owner != NO_OWNER:
            allocator.pool.set_owner(placed.handle, owner)
        ptr[0] = placed.ptr
    allocator.lock.release()
    return is_hit


cdef cbool hit_in_tag(Allocator allocator, uint64_t nbytes, uint64_t stream, uint64_t tag, uint32_t owner,
                      uint64_t* ptr) noexcept nogil:
    """The same for a request that belongs to a tag. One that a private pool is to serve as well is an error."""
    cdef Request request
    # Which of the two serves it, or that it is an error, is for Python to say.
    if allocator.private_pools.open_scopes.get() or allocator.fences.capture_is_marked():
        return False
    return place_hit(allocator, nbytes, stream, default_pool(), tag, owner, &request, ptr)


cdef cbool hit_in_pool_without_gil(Allocator allocator, uint64_t nbytes, uint64_t stream, const uint64_t* pool,
                                   uint64_t* ptr) noexcept nogil:
    """The same from the private pool of an id, two numbers, under a policy that keeps streams apart."""
    cdef Request request
    cdef uint32_t owner
    # No tag: what is asked of a private pool by name belongs to none.
    if not allocator.streams.by_stream or not prepare_hit(allocator, nbytes, NULL, &owner):
        return False
    return place_hit(allocator, nbytes, stream, PoolId(pool[0], pool[1]), NO_TAG, owner, &request, ptr)


cdef cbool place_hit(Allocator allocator, uint64_t nbytes, uint64_t stream, PoolId pool, uint64_t tag, uint32_t owner,
                     Request* request, uint64_t* ptr) noexcept nogil:
    cdef Placement placed
    placed.handle = NO_CHUNK
    # The request is made under the lock, too: the settings that round it change under it.
    allocator.acquire()
    if not allocator.life.is_closed and allocator.pool.books.owned.knows(owner):
        allocator.set_request(request, nbytes, stream)
        request.captured[0], request.captured[1] = pool.first, pool.second
        request.tag = tag
        # Nobody asks whether the stream captures: while any capture is marked, the request counts as one in it.
        request.asking.without_gil = True
        request.owner = owner
        if not request.refused:
            allocator.fill(allocator.place(request), request, &placed)
    allocator.lock.release()
    ptr[0] = placed.ptr
    return placed.handle < NO_HOST_MEMORY


cdef cbool note_use(Allocator allocator, uint64_t ptr, uint64_t stream) noexcept nogil:
    """Notes that a stream uses the allocation at an address, whose free then waits for it. False: that needs the GIL,
    or no allocation is there."""
    cdef ChunkHandle handle
    cdef Chunk* chunk
    cdef cbool noted = False
    # An event says too little on a stream that runs its work in any order: there Python makes a fence.
    if (not allocator.fences.takes_events() or allocator.streams.may_be_unordered
            or allocator.streams.home == HOST_STREAM):
        return False
    stream = 0 if stream == allocator.streams.default_alias else stream
    # The stream is noted while the chunk is known to live.
    allocator.acquire()
    handle = allocator.pool.handle_of(ptr)
    if handle != NO_CHUNK and not allocator.life.is_closed:
        chunk = &allocator.pool.chunks[handle]
        if not is_foreign(allocator, chunk, stream):
            noted = True
        # One of the two lists has all uses of an allocation. If Python's has one already, this belongs there.
        elif not chunk.state & USED_ELSEWHERE or allocator.fences.noted.has(chunk.allocation_id):
            noted = allocator.fences.noted.add(chunk.allocation_id, stream)
            if noted:
                chunk.state |= USED_ELSEWHERE
    allocator.lock.release()
    return noted


cdef cbool free_at_once_without_gil(Allocator allocator, uint64_t ptr) noexcept nogil:
    """Frees memory at once, or behind events on the streams that `note_use` has noted."""
    cdef cbool freed
    # A history gathers the frames of a free, and frees that were left to a later call come first.
    if allocator.reasons.has(IS_TOLD | FREES_PENDING):
        return False
    # Found and freed at once: of two frees of an address one is refused.
    allocator.acquire()
    freed = not allocator.life.is_closed and allocator.pool.free_plain(ptr)
    if freed:
        allocator.frees.count.add(1)
    allocator.lock.release()
    return freed or (not allocator.fences.noted.empty() and free_behind_events(allocator, ptr))


cdef cbool free_behind_events(Allocator allocator, uint64_t ptr) noexcept nogil:
    """Frees memory whose users are all noted without the GIL. False: nothing has changed, as the device has failed, or
    the host has no memory for it."""
    cdef ChunkHandle handle
    cdef Chunk* chunk
    cdef int64_t allocation_id = -1
    cdef vector[uint64_t] streams
    cdef vector[Mark] marks
    if not allocator.fences.takes_events():
        return False
    # From here on the chunk counts as freed, so that a second free is refused while the streams are marked.
    allocator.acquire()
    handle = allocator.pool.handle_of(ptr)
    if handle != NO_CHUNK and not allocator.life.is_closed:
        chunk = &allocator.pool.chunks[handle]
        if (chunk.state & USED_ELSEWHERE and not chunk.state & EXPORTED
                and allocator.fences.noted.copy(chunk.allocation_id, streams) and streams.size()
                and try_reserve(marks, streams.size())):
            allocation_id = chunk.allocation_id
            allocator.pool.stop_using(handle)
    allocator.lock.release()
    if allocation_id < 0:
        return False
    # In the order in which Python makes its fences, so that the driver is called alike.
    sort(streams.begin(), streams.end())
    if mark_streams(allocator, streams, marks) and wait_behind_marks(allocator, handle, allocation_id, marks):
        return True
    # As if nothing had been asked: the caller goes on to free it with the GIL.
    allocator.frees.use_again(handle, allocation_id)
    drop_events(allocator, marks)
    return False


cdef cbool mark_streams(Allocator allocator, vector[uint64_t]& streams, vector[Mark]& marks) noexcept nogil:
    """Marks each stream by an event. False: the device has failed, or a stream captures."""
    cdef bfc_native_source* native = allocator.source.native
    cdef Mark mark
    cdef uint64_t stream
    for stream in streams:
        mark.stream = stream
        if native.mark(native.self, stream, &mark.what) != 0:
            return False
        # No event: the stream has nothing queued. The chunk is freed by the next allocation all the same, as PyTorch's.
        mark.kind = PASSED_MARK if mark.what == NULL else EVENT_MARK
        # There is room: it was reserved under the lock.
        marks.push_back(mark)
    return True


cdef cbool wait_behind_marks(Allocator allocator, ChunkHandle handle, int64_t allocation_id,
                             vector[Mark]& marks) noexcept nogil:
    """Lets a chunk that was freed wait for marks. False: the host has no memory for that, or the allocator was closed.
    """
    # The marks are queued only if nobody has finished with the chunk or closed the allocator meanwhile.
    allocator.acquire()
    cdef cbool queued = allocator.frees.is_waiting(handle) and allocator.fences.queues.add(handle, marks)
    if queued:
        allocator.fences.noted.drop(allocation_id)
    allocator.lock.release()
    return queued


cdef void drop_events(Allocator allocator, vector[Mark]& marks) noexcept nogil:
    cdef bfc_native_source* native = allocator.source.native
    cdef Mark mark
    for mark in marks:
        native.drop(native.self, mark.what)
