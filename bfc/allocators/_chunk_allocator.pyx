"""What an allocator is made of, and what a policy overrides. Rules of this module and of those that go on from here
(docs/design/threads.md has the reasons):

- the lock is held only around calls into the pool, which run no Python and call no device;
- a sub-allocator is called with no lock held, after the bytes asked for have been set aside from the limit;
- a `nogil` method takes the GIL only to call a sub-allocator that is Python, and never if `without_gil` is set.
"""

cimport cython
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.turns cimport TurnAt, count_by, counted, take_turns, unwatch_forks, watch_forks
from bfc.interpreter._process cimport exiting, is_finalizing
from bfc._core cimport (
    EXPORTED, HISTORY_ALLOC, LOCK_TAKEN, NO_CHUNK, NO_HOST_MEMORY, NO_LANE, USED_ELSEWHERE, BinSet, Chunk, ChunkHandle,
    Lane, Pool, Region,
)
from bfc.buffers._arguments cimport stream_from
from bfc.buffers._buffer cimport HOST_STREAM, NO_CONSUMER, BufferOwner
from bfc.allocators._lock cimport let_others_on
from bfc.allocators._private_pools cimport PoolId, PrivatePools
from bfc.allocators._reasons cimport FREES_DEFERRED, FREES_PENDING
from bfc.allocators._reading cimport first_fault, is_asleep_in, is_live_in
from bfc.allocators._source cimport ADDED, Source, Taken
from bfc.allocators._recorder cimport Recorder
from bfc.allocators._fences cimport Captures, Fences, some_use
from bfc.allocators._frees cimport Frees, report_unraisable
from bfc.allocators._tags cimport TAG_POOLS, Tags
from bfc.allocators.mapping._address_ranges cimport AddressRanges

from bfc.errors import AsleepError, ClosedError, InvalidPointerError, InvariantError
from bfc.streams import is_queue as _is_queue
from bfc.suballocators.base import SubAllocator, check_members, checked_memory_info, resolve_limit
from bfc.units import format_bytes

cdef extern from "debug.h":
    const int BFC_DEBUG

cdef extern from "history.hpp":
    pass
cdef extern from "owners.hpp":
    pass


cdef object closed():
    return ClosedError("this allocator is closed")


cdef int refuse_queue(stream, device) except -1:
    """Refuses an OpenCL queue where a CUDA stream is needed: the driver would take its address for a stream."""
    if device.kind.startswith("cuda") and _is_queue(stream):
        raise TypeError(f"memory on {device} takes CUDA streams, not a {type(stream).__name__}: pass a CUDA stream "
                        f"as stream= (a bfc.use_stream around the call may have set this one)")
    return 0


# In a garbage cycle buffers may be finalised after their allocator, so the collector must leave the pool in place.
@cython.no_gc_clear
cdef class ChunkAllocator(BufferOwner):
    """An allocator without what a user calls: its parts, what a policy overrides, and what buffers ask.

    Attributes
    ----------
    strict : bool
        True if the allocator refuses whatever the original would refuse.
    retry_seconds : float
        How long a request that does not fit waits for other threads to free memory.
    """

    def __cinit__(self, *args, **kwargs):
        # First, as __dealloc__ undoes it whatever fails below.
        watch_forks(self)
        self.life.is_closed = True   # until it is set up
        self.pool = Pool()      # may raise MemoryError; __dealloc__ then runs without a pool
        self.source = Source()
        self.source.attach(&self.lock, self.pool)
        self.fences = Fences()
        self.frees = Frees()
        self.frees.attach(&self.lock, self.pool, self.source, self.fences, &self.reasons, &self.life.is_closed)
        self.private_pools = PrivatePools()
        self.tags = Tags()
        self.tags.attach(&self.lock, &self.reasons, self.private_pools)
        self.captures = Captures()
        self.captures.attach(&self.lock, self.pool, self.fences, self.private_pools)
        self.recorder = Recorder()
        # Never None: an allocator that maps nothing has one that does nothing, and no caller asks which.
        self.mapped = AddressRanges()
        self.mapped.attach(&self.lock, self.pool, self.source, self.fences, self.tags)

    def __dealloc__(self):
        unwatch_forks(self)

    cdef int set_up(self, sub_allocator, memory_limit, stream, strict) except -1:
        # A second __init__ would leave chunks of the first source behind, of which the second knows nothing.
        if self.sub_allocator is not None:
            raise RuntimeError("an allocator is set up once: make another")
        if not isinstance(sub_allocator, SubAllocator):
            raise TypeError(f"the first argument is a sub-allocator, such as bfc.HostSubAllocator(), "
                            f"not {type(sub_allocator).__name__}")
        check_members(sub_allocator)
        self.limit = resolve_limit(memory_limit, sub_allocator)
        self.streams.default_alias = sub_allocator.default_stream_alias
        self.streams.of_threads = sorted(sub_allocator.thread_streams)
        self.sub_allocator = self.fences.source = sub_allocator
        self.streams.may_be_unordered = sub_allocator.may_be_unordered
        try:
            self.source.strict = strict
            self.source.open(sub_allocator)
            self.fences.keeps_native = sub_allocator.native
            if sub_allocator._fences_are_native:
                self.fences.native = self.source.native
            self.set_home_stream(stream)
        except BaseException:
            # As before the call, so that __init__ can be tried again.
            self.sub_allocator = self.fences.source = self.source.sub_allocator = None
            raise
        self.strict = strict
        self.device = sub_allocator.device
        self.host_accessible = sub_allocator.host_accessible
        return 0

    cdef int set_home_stream(self, stream) except -1:
        self.streams.home = self.stream_of(stream)
        self.fences.home_stream = stream    # an object that owns its stream must live as long
        if self.is_of_thread(self.streams.home):
            raise ValueError(f"stream {self.streams.home} is another one in each thread, and an allocator belongs to "
                             f"one: give it stream 0, and name stream {self.streams.home} in each allocate()")
        if self.is_unordered(self.streams.home):
            raise ValueError(f"stream {self.streams.home:#x} runs its work in any order, and memory freed there would "
                             f"be used again too early: give the allocator an ordered one, and name this one in "
                             f"allocate() and record_stream()")
        if not self.sub_allocator.stream_ordered:
            if self.streams.home:
                raise ValueError(f"memory of {self.sub_allocator!r} belongs to the host: name streams in allocate() "
                                 f"and record_stream(), not here")
            self.streams.home = HOST_STREAM
        self.frees.home_stream = self.streams.home
        return 0

    cdef bint is_unordered(self, uint64_t stream) except -1:
        """Whether memory freed on a stream may still be in use by work that was queued there before, because the
        stream runs its work in any order. Raises SubAllocatorError if it is not a stream."""
        return self.streams.may_be_unordered and stream != 0 and not self.sub_allocator.is_ordered(stream)

    cdef uint64_t stream_of(self, object stream) except? 0xFFFFFFFFFFFFFFFF:
        """A stream's handle. The default stream has several handles; always returns the same one of them."""
        if stream is None:
            return 0
        cdef uint64_t handle = stream_from(stream)
        # An int is a raw handle, and taken at its word.
        if not PyLong_CheckExact(stream):
            self.require_set_up()
            refuse_queue(stream, self.sub_allocator.device)
        # Streams are compared as integers, so one stream has one number, as PyTorch's default stream is 0.
        return 0 if handle == self.streams.default_alias else handle

    @cython.final
    cdef cbool is_of_thread(self, uint64_t stream) noexcept nogil:
        """Whether a handle names another stream in each thread."""
        cdef uint64_t handle
        for handle in self.streams.of_threads:
            if handle == stream:
                return True
        return False

    cdef void give_way(self) noexcept nogil:
        """Releases the lock if other threads wait for it, and takes it again. The caller holds it."""
        let_others_on(self.lock)

    cdef cbool hit(self, uint64_t nbytes, uint64_t stream, Placement* placed) noexcept nogil:
        """Serves a request that a free chunk fits, with the lock held. If it returns False, nothing has changed, and
        the slow path is taken."""
        return False

    cdef void set_request(self, Request* request, uint64_t nbytes, uint64_t stream) noexcept nogil:
        set_plain_request(request, nbytes, nbytes, stream)

    cdef ChunkHandle place(self, Request* request) noexcept nogil:
        return NO_CHUNK

    cdef ChunkHandle find(self, Request* request) noexcept nogil:
        cdef uint32_t bin_set = self.bin_set_of(request)
        if bin_set == NO_LANE:
            return NO_HOST_MEMORY
        return self.pool.allocate_aligned(bin_set, request.rounded, request.nbytes, request.stream,
                                          request.freed_before, request.alignment, request.indexed)

    cdef BinSet rules_for(self, Request* request, uint32_t bin_set) noexcept nogil:
        """The rules by which a request searches a set of bins. Needs the lock."""
        return self.pool.bin_sets[bin_set]

    cdef void set_rules(self, uint32_t lane) noexcept nogil:
        """Writes down what the policy decides for a lane's sets of bins. Needs the lock."""
        pass

    cdef uint64_t release_mapped(self) except? 0xFFFFFFFFFFFFFFFF:
        """Gives back free memory that does not lie in regions. Returns the bytes."""
        return 0

    cdef uint64_t set_aside_for(self, Request* request) noexcept nogil:
        """Sets the bytes of a new region aside from the limit. 0: there is no room for them."""
        return 0

    cdef int add_region(self, Request* request, Placement* placed) except -1 nogil:
        return 0

    cdef int place_after_miss(self, Request* request, Placement* placed) except -1 nogil:
        return 0

    cdef int place_where_refused(self, Request* request, Placement* placed) except -1 nogil:
        return 0

    cdef ChunkHandle find_in_new_region(self, Request* request, Region* region) noexcept nogil:
        return self.find(request)

    cdef uint32_t bin_set_of(self, Request* request) noexcept nogil:
        return 0

    cdef void set_lane(self, Lane* lane, uint64_t stream) noexcept nogil:
        memset(lane, 0, sizeof(Lane))

    cdef void regions_released(self) noexcept nogil:
        pass

    cdef int plan_changed(self) except -1:
        return 0

    cdef void scopes_changed(self) noexcept:
        pass

    cdef int pool_ended(self, pool) except -1:
        return 0

    cdef int pool_released(self, pool) except -1:
        return 0

    cdef object against_pieces(self):
        """The policy's remedies against fragmentation that are not in use, for the advice in an OutOfMemoryError."""
        return ""

    cdef object settings_now(self):
        """The settings of PyTorch's policy; None for another policy."""
        return None

    cdef object torch_now(self):
        """The version of PyTorch whose rules it follows; None for another policy."""
        return None

    cdef int was_refused(self, Request* request) except -1:
        if self.pool.books.history == NULL or request.refused:
            return 0
        device_free, _total = self.memory_of_device()
        request.lane.stream = request.stream
        return self.recorder.note_refusal(self.pool, self.lock, request.rounded, device_free, &request.lane,
                                          request.owner)

    cdef str refused_by(self, Request* request):
        """Who has refused a request, for the error; "" is the limit."""
        if not self.source.refused_bytes.get():
            return ""
        return f"{self.sub_allocator!r}, asked last for {format_bytes(self.source.refused_bytes.get())}"

    cdef bint plays_alone(self) except -1:
        return not self.reasons.has(FREES_DEFERRED)

    cdef int join_tag(self, Request* request, PoolId pool) except -1:
        """Has the memory of a private pool sleep with the request's tag, from its first region on."""
        name = self.tags.name_of_pool(TAG_POOLS, request.tag)
        raise RuntimeError(f"an allocation is within tag {name!r} and within a private pool: it can belong to one. The "
                           f"private pools of a CachingAllocator can sleep")

    cdef int end_for(self, object allocation_end) except -1:
        """How a request is asked that names an end: bits of `how`. Refuses what the policy cannot serve."""
        raise ValueError("allocation_end is for a BFCAllocator with enable_spatial_partitioning=True: other allocators "
                         "serve all requests alike")

    cdef int set_freed_before(self, Request* request, object freed_before) except -1:
        raise TypeError("freed_before belongs to a BFCAllocator's timing counter")

    cdef uint64_t alignment_for(self, uint64_t alignment) except? 0xFFFFFFFFFFFFFFFF:
        """What a request has to ask for, so that its address is a multiple of `alignment`: 0, where all addresses are
        such multiples. Refuses what the policy cannot place."""
        if alignment <= self.source.alignment:
            return 0
        if alignment > self.limit:
            raise ValueError(f"no address can be asked for that is a multiple of {format_bytes(alignment)}: the memory "
                             f"limit is {format_bytes(self.limit)}")
        return alignment

    cdef void fill(self, ChunkHandle handle, Request* request, Placement* placed) noexcept nogil:
        """Writes the pool's answer into `placed`. Needs the lock."""
        placed.handle = handle
        if not note_hit(self.pool, handle, placed):
            return
        cdef Chunk* chunk = &self.pool.chunks[handle]
        # PyTorch's policy notes it where it counts, in the pool.
        if self.pool.books.history != NULL and self.pool.books.usage == NULL:
            self.pool.note(HISTORY_ALLOC, chunk, request.nbytes)
        if request.owner:
            self.pool.set_owner(handle, request.owner)
        # Under the lock that placed it: a free that comes before `uses` is called must not take the chunk for the home
        # stream's.
        if request.shared or (request.stream != self.streams.home and not is_apart(self, &request.lane)):
            chunk.state |= USED_ELSEWHERE

    cdef int take_region(self, Request* request, Placement* placed, Region* block) except -1 nogil:
        """Adds a block to the pool, and places the request under the same lock."""
        cdef vector[Region] refused
        cdef cbool closed
        cdef Taken taken
        self.acquire()
        # `close` has taken all regions out, and this one would be left. With no lane `take_in` refuses it.
        closed = self.life.is_closed
        taken = self.source.take_in(&request.asking, block, NO_LANE if closed else self.bin_set_of(request), refused)
        if taken == ADDED:
            self.fill(self.find_in_new_region(request, block), request, placed)
        self.lock.release()
        if taken == ADDED:
            return 0
        self.source.give_back(refused, request.asking.without_gil)
        return 0 if request.asking.without_gil else self.source.refuse(block, taken, closed)

    cdef tuple memory_of_device(self):
        """The free bytes of the device, and all; 0 free where it does not say."""
        try:
            answer = self.sub_allocator.memory_info()
        except Exception as error:      # a request is refused all the same
            report_unraisable(error, self.sub_allocator)
            answer = 0, self.sub_allocator.total_bytes
        # The answer may be a user's, and goes into a history, where a negative number would be a huge one.
        return checked_memory_info(answer, self.sub_allocator)

    cdef int check_books(self) except -1:
        """`check` for a debug build, which recounts in the middle of a call. So this raises only if it finds a fault,
        even if Python's stack is exhausted."""
        # The books are only whole between two changes.
        self.acquire()
        cdef const char* fault = first_fault(self.pool)
        if fault == NULL and not self.life.is_closed:
            fault = self.mapped.first_fault()
        self.lock.release()
        if fault != NULL:
            raise InvariantError(fault.decode())

    cdef int free_handle(self, ChunkHandle handle, int64_t allocation_id) except -1:
        if counted(exiting) and is_finalizing():
            return 0    # names of Python's modules may be gone; functions of `atexit` and daemon threads come before
        cdef TurnAt turn
        turn.take(self)
        if self.recorder.keeps_free_frames:
            self.recorder.keep_free_frames(allocation_id)
        if self.reasons.has(FREES_PENDING):
            self.frees.drain(0)
        # Its id is compared and it is freed at once: of two frees one is refused.
        self.acquire()
        if not is_live_in(self.pool, handle, allocation_id):
            self.lock.release()
            if self.life.is_closed:
                return 0
            raise InvalidPointerError("this buffer's memory was freed already, through its address")
        self.frees.free_locked(handle)
        count_by(self.life.live_buffers, <int64_t>-1)
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()
        return 0

    cdef void free_handle_from_finaliser(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        if counted(exiting):
            return
        # Before anything that may leave the free to another call: the buffer is gone either way.
        count_by(self.life.live_buffers, <int64_t>-1)
        if (some_use(self.fences) or not self.fences.noted.empty()) and not self.fence_now(handle, allocation_id):
            return
        # A finaliser may run anywhere, in a fork hook, too: so it never waits.
        if not self.lock.try_acquire():
            self.frees.leave(handle, allocation_id, LOCK_TAKEN)
            return
        cdef bint live = is_live_in(self.pool, handle, allocation_id)
        # A chunk that streams use is not freed here, as its fences may run Python: it is left to the next call.
        cdef bint freed = live and self.pool.free_unshared(handle)
        self.frees.count.add(freed)
        self.lock.release()
        if live and not freed:
            self.frees.leave(handle, allocation_id, LOCK_TAKEN)

    cdef bint fence_now(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        cdef TurnAt turn
        turn.take(self)
        return self.frees.fence_now(handle, allocation_id)

    cdef uint64_t hand_to_stream(self, ChunkHandle handle, int64_t allocation_id, uint64_t made_on, consumer) except? 0:
        cdef uint64_t on = self.stream_of(consumer)
        cdef bint live
        # Work of one stream is done in its order, so its consumer needs neither an event nor a fence.
        if on == made_on and not self.is_of_thread(on):
            return NO_CONSUMER
        cdef TurnAt turn
        turn.take(self)
        # It is marked while it is known to live, so that its free waits for the stream.
        self.acquire()
        live = is_live_in(self.pool, handle, allocation_id)
        if live:
            self.pool.chunks[handle].state |= USED_ELSEWHERE
        self.lock.release()
        if live:
            self.fences.adopt(allocation_id)
        # Without the lock: the sub-allocator may be Python. The mark above keeps a free of another thread behind the
        # stream.
        if live and made_on != HOST_STREAM and self.sub_allocator.asynchronous:
            self.sub_allocator.order(made_on, on)
        return on if live else NO_CONSUMER

    cdef void consumer_left(self, int64_t allocation_id, uint64_t stream) noexcept:
        cdef TurnAt turn
        turn.take(self)
        self.frees.consumer_left(allocation_id, stream)

    cdef bint is_live(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        # The chunk's id and its set of bins are read together.
        self.acquire()
        live = is_live_in(self.pool, handle, allocation_id) and not is_asleep_in(self.pool, handle)
        self.lock.release()
        return live

    cdef object why_not(self, ChunkHandle handle, int64_t allocation_id):
        cdef Lane lane
        # The chunk's id and its set of bins are read together.
        self.acquire()
        cdef bint asleep = is_live_in(self.pool, handle, allocation_id) and is_asleep_in(self.pool, handle)
        if asleep:
            lane = self.pool.bin_sets[self.pool.chunks[handle].bin_set].lane
        self.lock.release()
        if not asleep:
            return BufferOwner.why_not(self, handle, allocation_id)
        name = self.tags.name_of_pool(lane.pool[0], lane.pool[1])
        return AsleepError(f"this memory sleeps: wake({name!r}) puts it back at the same address")

    cdef bint sync_exported(self, ChunkHandle handle, int64_t allocation_id, int64_t* exports) noexcept:
        """Marks a chunk as viewed or not, by the count of views as read under the lock. Returns whether the chunk is
        live, and awake if it is viewed."""
        self.acquire()
        cdef bint live = is_live_in(self.pool, handle, allocation_id)
        if live and counted(exports[0]) > 0 and is_asleep_in(self.pool, handle):
            live = False
        elif live and counted(exports[0]) > 0:
            self.pool.chunks[handle].state |= EXPORTED
        elif live:
            self.pool.chunks[handle].state &= ~<uint32_t>EXPORTED
        self.lock.release()
        return live


take_turns(ChunkAllocator, b"")
