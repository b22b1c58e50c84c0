"""Allocators: what a user holds. Where the pool, a policy and a sub-allocator meet. Rules of this module
(docs/design/threads.md has the reasons):

- the lock is held only around calls into the pool, which run no Python and call no device;
- a sub-allocator is called with no lock held, after the bytes asked for have been set aside from the limit;
- a `nogil` method takes the GIL only to call a sub-allocator that is Python, and never if `without_gil` is set.
"""

import gc
import time

cimport cython
from cpython.exc cimport PyErr_Clear
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.turns cimport TurnAt, count_by, counted, take_turns, unwatch_forks, watch_forks
from bfc.interpreter._process cimport exiting, is_finalizing, run_handlers
from bfc._core cimport (
    ENDS, EXPORTED, HISTORY_ALLOC, HISTORY_ANNOTATE, HISTORY_SNAPSHOT, INDEXED, LOCK_TAKEN, LOWER_END, NO_CHUNK,
    NO_HOST_MEMORY, NO_LANE, NO_STREAM, TRACED, UNLIMITED, UPPER_END, USED_ELSEWHERE, BinSet, Chunk, ChunkHandle,
    Counters, History, HistoryRecord, Lane, PlanServer, Pool, Region, Release, Tracing, is_large,
)
from bfc.buffers._arguments cimport (
    address_from, addresses_from, alignment_from, size_from, sizes_from, small_int, stream_from,
)
from bfc.buffers._scopes cimport (
    current_stream, note_tag_here, number_of_owner, owner_here, owner_names, owners_used, scopes_open, step_here,
)
from bfc.buffers._buffer cimport HOST_STREAM, NO_CONSUMER, Buffer, BufferView, BufferOwner, become
from bfc.allocators._changes cimport extend_chunk
from bfc.allocators._lock cimport BETWEEN_OTHERS, acquire_lock, let_others_on
from bfc.allocators._private_pools cimport (
    PoolId, PoolUses, PrivatePools, default_pool, id_of, is_default, is_private, pool_of, scope_of as scope_of_pool,
)
from bfc.allocators._reasons cimport (
    FREES_DEFERRED, FREES_PENDING, HAS_NOTER, IS_TOLD, IS_TRACED, KEEPS_HISTORY, SOME_WAIT,
)
from bfc.allocators._reading cimport (
    ChunkRow, RegionRow, bytes_by_name, bytes_of_chunks, bytes_of_pages, bytes_of_regions, chunk_at, copy_columns,
    count_bookkeeping, first_fault, is_asleep_in, is_live_in, pages_in_use, raise_invalid_pointer,
)
from bfc.allocators._source cimport ADDED, Source, Taken
from bfc.allocators._recorder cimport Recorder, new_history
from bfc.allocators._fences cimport Captures, Fences, some_use
from bfc.allocators._frees cimport AGAIN, AT_ALLOCATION, IN_CAPTURE, QUERY, RECORD, WAIT, Frees, report_unraisable
from bfc.allocators._tags cimport TAG_POOLS, Tag, Tags, count_tag, names_asleep, no_mapping, scope_of, some_kept
from bfc.allocators.mapping._address_ranges cimport Faults, raise_faults
from bfc.allocators.mapping._sleep cimport bytes_asleep, put_to_sleep, wake_up
from bfc.allocators._plans cimport Planned, new_step

from bfc.allocators import _plans
from bfc.allocators._frees import PUT_OFF as _PUT_OFF
from bfc.allocators.graph_pool import Capture, GraphPool
from bfc.errors import (
    AsleepError, ClosedError, InvalidPointerError, InvariantError, SettingsError, out_of_host_memory,
)
from bfc.interpreter.polling import sleep as _sleep
from bfc.pytorch import words as _words
from bfc.pytorch.rules import NEWEST as _NEWEST, rules_of
from bfc.snapshots import columns as _columns, leaks as _leaks, snapshot as _snapshot
from bfc.snapshots.refusal import out_of_memory
from bfc.streams import is_queue as _is_queue
from bfc.suballocators.base import SubAllocator, check_members, checked_memory_info, resolve_limit
from bfc.units import format_bytes, parse_bytes

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

_RETRY_POLL_SECONDS = 0.001

cdef enum:
    MOST_POLLS = 1000


cdef void set_plain_request(Request* request, uint64_t nbytes, uint64_t rounded, uint64_t stream) noexcept nogil:
    memset(request, 0, sizeof(Request))
    request.nbytes = nbytes
    request.rounded = rounded
    request.stream = stream
    request.indexed = True


cdef inline object owned(PyObject* made):
    """Takes over a new reference, as C functions return it."""
    found = <object>made
    Py_DECREF(found)
    return found


cdef inline int hit_at_once(Allocator self, uint64_t nbytes, uint64_t on, Placement* placed) except -1:
    """The fast path of an allocation: a hit that needs nothing but the pool. Returns whether it was one."""
    if nbytes == 0 or not self.reasons.none():
        return False
    cdef bint elsewhere = on != self.home_stream
    if elsewhere and (self.may_be_unordered or on == self.default_stream_alias):
        return False
    cdef uint32_t owner = owner_here(self) if owners_used.load() else 0
    acquire_lock(self.lock)     # under which lanes come and go
    cdef bint is_hit = (not self.is_closed and (not elsewhere or self.by_stream or self.has_lanes.get())
                        and self.pool.owned.knows(owner) and self.hit(nbytes, on, placed))
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


cdef object closed():
    return ClosedError("this allocator is closed")


cdef int refuse_queue(stream, device) except -1:
    """Refuses an OpenCL queue where a CUDA stream is needed: the driver would take its address for a stream."""
    if device.kind.startswith("cuda") and _is_queue(stream):
        raise TypeError(f"memory on {device} takes CUDA streams, not a {type(stream).__name__}: pass a CUDA stream "
                        f"as stream= (a bfc.use_stream around the call may have set this one)")
    return 0


cdef void find_among_whole(Allocator allocator, Request* request, Placement* placed, uint64_t oversize) noexcept nogil:
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
    if placed.handle < NO_HOST_MEMORY and allocator.pool.usage != NULL:
        if whole <= allocator.pool.chunks[placed.handle].size < rules.oversize:
            allocator.pool.usage.oversize_allocations.raise_by(1)


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


# In a garbage cycle buffers may be finalised after their allocator, so the collector must leave the pool in place.
@cython.no_gc_clear
cdef class Allocator(BufferOwner):
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

    def __cinit__(self, *args, **kwargs):
        watch_forks(self)
        self.is_closed = True   # until it is set up
        self.pool = Pool()      # may raise MemoryError; __dealloc__ then runs without a pool
        self.source = Source()
        self.source.attach(&self.lock, self.pool)
        self.fences = Fences()
        self.frees = Frees()
        self.frees.attach(&self.lock, self.pool, self.source, self.fences, &self.reasons, &self.is_closed)
        self.private_pools = PrivatePools()
        self.tags = Tags()
        self.tags.attach(&self.lock, &self.reasons, self.private_pools)
        self.pool_uses = PoolUses()
        self.pool_uses.attach(&self.lock, self.private_pools)
        self.captures = Captures()
        self.captures.attach(&self.lock, self.pool, self.fences, self.private_pools, self.pool_uses)
        self.recorder = Recorder()
        self.mapped = AddressRanges()
        self.mapped.attach(&self.lock, self.pool, self.source, self.fences, self.tags)

    def __dealloc__(self):
        unwatch_forks(self)

    cdef int set_up(self, sub_allocator, memory_limit, stream, strict) except -1:
        if type(self) is Allocator:
            raise TypeError("Allocator is the common base: make a BFCAllocator or a CachingAllocator")
        if self.sub_allocator is not None:
            raise RuntimeError("an allocator is set up once: make another")
        if not isinstance(sub_allocator, SubAllocator):
            raise TypeError(f"the first argument is a sub-allocator, such as bfc.HostSubAllocator(), "
                            f"not {type(sub_allocator).__name__}")
        check_members(sub_allocator)
        self.limit = resolve_limit(memory_limit, sub_allocator)
        self.default_stream_alias = sub_allocator.default_stream_alias
        self.thread_streams = sorted(sub_allocator.thread_streams)
        self.sub_allocator = self.fences.source = sub_allocator
        self.may_be_unordered = sub_allocator.may_be_unordered
        try:
            self.source.strict = strict
            self.source.open(sub_allocator)
            self.fences.keeps_native = sub_allocator.native
            if sub_allocator._fences_are_native:
                self.fences.native = self.source.native
            self.set_home_stream(stream)
        except BaseException:
            self.sub_allocator = self.fences.source = self.source.sub_allocator = None
            raise
        self.strict = strict
        self.device = sub_allocator.device
        self.host_accessible = sub_allocator.host_accessible
        return 0

    cdef int set_home_stream(self, stream) except -1:
        self.home_stream = self.stream_of(stream)
        self.home_stream_object = stream    # an object that owns its stream must live as long
        if self.is_of_thread(self.home_stream):
            raise ValueError(f"stream {self.home_stream} is another one in each thread, and an allocator belongs to "
                             f"one: give it stream 0, and name stream {self.home_stream} in each allocate()")
        if self.is_unordered(self.home_stream):
            raise ValueError(f"stream {self.home_stream:#x} runs its work in any order, and memory freed there would "
                             f"be used again too early: give the allocator an ordered one, and name this one in "
                             f"allocate() and record_stream()")
        if not self.sub_allocator.stream_ordered:
            if self.home_stream:
                raise ValueError(f"memory of {self.sub_allocator!r} belongs to the host: name streams in allocate() "
                                 f"and record_stream(), not here")
            self.home_stream = HOST_STREAM
        self.frees.home_stream = self.home_stream
        return 0

    cdef bint is_unordered(self, uint64_t stream) except -1:
        """Whether memory freed on a stream may still be in use by work that was queued there before, because the
        stream runs its work in any order. Raises SubAllocatorError if it is not a stream."""
        return self.may_be_unordered and stream != 0 and not self.sub_allocator.is_ordered(stream)

    cdef uint64_t stream_of(self, object stream) except? 0xFFFFFFFFFFFFFFFF:
        """A stream's handle. The default stream has several handles; always returns the same one of them."""
        if stream is None:
            return 0
        cdef uint64_t handle = stream_from(stream)
        if not PyLong_CheckExact(stream):
            self.require_set_up()
            refuse_queue(stream, self.sub_allocator.device)
        return 0 if handle == self.default_stream_alias else handle

    @cython.final
    cdef cbool is_of_thread(self, uint64_t stream) noexcept nogil:
        """Whether a handle names another stream in each thread."""
        cdef uint64_t handle
        for handle in self.thread_streams:
            if handle == stream:
                return True
        return False

    @cython.final
    cdef void acquire(self) noexcept nogil:
        """Takes the lock. Callers may hold the GIL or not."""
        acquire_lock(self.lock)

    cdef void give_way(self) noexcept nogil:
        """Releases the lock if other threads wait for it, and takes it again. The caller holds it."""
        let_others_on(self.lock)

    # -- what a policy overrides --------------------------------------------------------------------------------------

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
        if self.pool.history == NULL or request.refused:
            return 0
        device_free, _total = self.memory_of_device()
        request.lane.stream = request.stream
        return self.recorder.note_refusal(self.pool, self.lock, request.rounded, device_free, &request.lane,
                                          request.owner)

    cdef bint plays_alone(self) except -1:
        return not self.reasons.has(FREES_DEFERRED)

    cdef int check_tag(self, Request* request) except -1:
        """Where a private pool is to serve the request, too, that pool has to sleep with the tag."""
        self.tags.refuse_if_asleep(request.tag)
        cdef PoolId pool = self.captures.pool_for(request.stream)
        if request.captured[0] or request.captured[1]:
            pool = PoolId(request.captured[0], request.captured[1])
        # The policy reads which scopes are open, which changes under the lock.
        self.acquire()
        self.set_lane(&request.lane, request.stream)
        if is_default(pool) and is_private(&request.lane):
            pool = pool_of(&request.lane)
        self.lock.release()
        return 0 if is_default(pool) else self.join_tag(request, pool)

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
        if (freed_before is not None or more or how or not small_int(nbytes, &size)
                or not (stream is None or small_int(stream, &on)) or not self.place_at_once(size, on, &placed)):
            self.allocate_placement(size_from(nbytes), self.stream_of(stream), stream, freed_before, how, more,
                                    &placed)
        cdef PyObject* address = self.addresses.get(placed.ptr)
        if address == NULL:
            self.take_back(&placed)
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
        cdef uint64_t size, on = self.home_stream
        if not small_int(nbytes, &size):
            size = size_from(nbytes) if PyLong_CheckExact(nbytes) else parse_bytes(nbytes)
        cdef Buffer buffer = Buffer.__new__(Buffer)
        cdef Placement placed
        if (alignment is not None or stream is not None or scopes_open.load() or contiguous
                or allocation_end is not None):
            on = self.place_as_asked(size, stream, alignment, allocation_end, CONTIGUOUS if contiguous else 0, &placed)
        elif not self.place_at_once(size, on, &placed):
            self.allocate_placement(size, on, None, None, False, 0, &placed)
        become(buffer, self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
        count_by(self.live_buffers, <int64_t>(placed.allocation_id != 0))
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
        on = self.place_as_asked(size, stream, alignment, allocation_end,
                                 OR_NONE | (CONTIGUOUS if contiguous else 0), &placed)
        if size and placed.allocation_id == 0:
            return None
        become(buffer, self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
        count_by(self.live_buffers, <int64_t>(placed.allocation_id != 0))
        return buffer

    cdef uint64_t place_as_asked(self, uint64_t size, object stream, object alignment, object allocation_end, int how,
                                 Placement* placed) except? 0xFFFFFFFFFFFFFFFF:
        """Serves an `allocate` that has arguments besides the size. Returns the stream that the memory is for."""
        cdef uint64_t on = self.home_stream
        cdef uint64_t more = 0 if alignment is None else self.alignment_for(alignment_from(alignment))
        if allocation_end is not None:
            how |= self.end_for(allocation_end)
        if stream is None and scopes_open.load():
            stream = current_stream()
        if stream is not None:
            on = self.stream_of(stream)
        if how & (CONTIGUOUS | FROM_UPPER_END) or more or not self.place_at_once(size, on, placed):
            self.allocate_placement(size, on, stream, None, how, more, placed)
        return on

    cdef uint64_t alignment_for(self, uint64_t alignment) except? 0xFFFFFFFFFFFFFFFF:
        """What a request has to ask for, so that its address is a multiple of `alignment`: 0, where all addresses are
        such multiples. Refuses what the policy cannot place."""
        if alignment <= self.source.alignment:
            return 0
        if alignment > self.limit:
            raise ValueError(f"no address can be asked for that is a multiple of {format_bytes(alignment)}: the memory "
                             f"limit is {format_bytes(self.limit)}")
        return alignment

    @cython.final
    cdef int place_at_once(self, uint64_t nbytes, uint64_t on, Placement* placed) except -1:
        return hit_at_once(self, nbytes, on, placed)

    cdef int take_back(self, Placement* placed) except -1:
        """Frees an allocation whose address cannot be returned: Python has no memory for the int."""
        PyErr_Clear()
        raise self.frees.undo(placed.handle, placed.allocation_id) or out_of_host_memory()

    cdef int allocate_placement(self, uint64_t size, uint64_t on, object stream, object freed_before, int how,
                                uint64_t alignment, Placement* placed) except -1:
        cdef bint unordered = self.by_stream and size and self.is_unordered(on)
        cdef Request request
        cdef TurnAt turn
        turn.take(self)
        self.set_request(&request, size, self.home_stream if unordered else on)
        request.shared = unordered
        request.alignment = request.asking.alignment = alignment
        request.end = UPPER_END if how & FROM_UPPER_END else LOWER_END
        if freed_before is not None:
            self.set_freed_before(&request, freed_before)
        self.set_scopes_of(&request)
        if how & CONTIGUOUS or alignment:      # what is mapped page by page lies at any multiple of all addresses
            request.contiguous = True
            self.check_contiguous(&request, how & CONTIGUOUS != 0)
        cdef uint64_t seen = self.frees.count.get()
        cdef uint64_t changes = self.source.changes.get()
        self.attempt(&request, placed)
        if placed.handle == NO_CHUNK and size:
            self.try_harder(&request, freed_before, seen, placed)
            if placed.handle == NO_CHUNK:
                if how & OR_NONE:
                    return 0
                raise self.refusal_of(&request)
        if on != self.home_stream and size and (unordered or not is_apart(self, &request.lane)):
            self.leave_home(placed, on, stream)
        if self.reasons.has(IS_TOLD) and placed.allocation_id:
            self.announce(placed, changes)
        return 0

    cdef int set_scopes_of(self, Request* request) except -1:
        """Notes whose request this is, and its tag: the scopes that this call is in."""
        if owners_used.load():
            self.set_owner_of(request)
        if counted(self.tags.scopes_open):
            request.tag = self.tags.here(self)
            note_tag_here(<void*>self, request.tag, request.owner)
            if request.tag:
                self.check_tag(request)
        return 0

    cdef int set_owner_of(self, Request* request) except -1:
        """Notes whose scope this call is in."""
        request.owner = owner_here(self)
        if request.owner == 0:
            return 0
        # The table of owners may grow, and other threads read it.
        self.acquire()
        cdef bint is_known = self.pool.owned.know(request.owner)
        self.lock.release()
        if not is_known:
            raise out_of_host_memory()
        return 0

    cdef int check_contiguous(self, Request* request, bint is_asked) except -1:
        """Refuses a request that must lie in a region if it cannot, and, where that `is_asked`, one that must be one
        physical allocation if the allocator cannot tell whether a chunk is one."""
        if request.tag:
            name = self.tags.name_of_pool(TAG_POOLS, request.tag)
            raise ValueError(f"memory of tag {name!r} is mapped, so that it can sleep, and is neither one physical "
                             f"allocation nor aligned to more than {self.source.alignment}: allocate contiguous or "
                             f"aligned memory outside of it")
        if is_asked and self.source.joins_regions:
            raise ValueError(f"this allocator joins the regions of {self.sub_allocator!r} that lie end to end, so a "
                             f"chunk may lie in two of them: virtual_memory=True or a CachingAllocator joins none")
        return 0

    cdef int announce(self, Placement* placed, uint64_t changes_before) except -1:
        """Tells a leak check, a history and tracemalloc of an allocation. If one raises, frees it again."""
        cdef bint region_came = self.source.changes.get() != changes_before
        try:
            if self.noter is not None:
                self.noter(placed.allocation_id)
            if self.recorder.keeps_frames:
                self.recorder.keep_frames(self.pool, self.lock, placed.allocation_id, placed.ptr, region_came,
                                          step_here(self) if owners_used.load() else None)
        except BaseException as error:
            raise self.frees.undo(placed.handle, placed.allocation_id) or error
        if self.pool.owned.tracing.domain:
            self.trace_allocation(placed)
        return 0

    cdef void trace_allocation(self, Placement* placed) noexcept:
        """Tells Python's tracemalloc of an allocation. Does nothing if the host has no memory for that."""
        cdef Chunk* chunk
        # Told while it is known to live: another thread may have freed it, and tracemalloc would keep it for good.
        self.acquire()
        if is_live_in(self.pool, placed.handle, placed.allocation_id):
            chunk = &self.pool.chunks[placed.handle]
            chunk.state |= TRACED
            self.pool.owned.tracing.tell(self.pool.owned.tracing.domain, chunk.ptr, chunk.size)
        self.lock.release()

    @property
    def tracemalloc_domain(self):
        """The domain that `set_tracemalloc_domain` has set; None by default."""
        return self.pool.owned.tracing.domain or None

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
                self.pool.owned.tracing.forget(self.pool.owned.tracing.domain, self.pool.chunks[i].ptr)
                self.pool.chunks[i].state &= ~<uint32_t>TRACED
        self.pool.owned.tracing = Tracing(number, track, untrack)
        self.reasons.put(IS_TRACED, number != 0)
        self.lock.release()

    def _swap_noter(self, noter):
        """From now on `noter(allocation_id)` is called after each allocation. Returns the previous
        noter, or None."""
        noter, self.noter = self.noter, noter
        self.reasons.put(HAS_NOTER, self.noter is not None)
        return noter

    # -- plans --------------------------------------------------------------------------------------------------------

    cdef Planned planned_part(self):
        self.require_set_up()
        if self.planned is None:
            planned = Planned()
            planned.attach(&self.lock, self.pool, self.source, self.fences, self.stitching, &self.limit,
                           &self.is_closed, self.home_stream)
            self.planned = planned
        return self.planned

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
            Raise an error if the plan is not served. By default there is a warning, and the policy serves all
            requests.
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
        cdef Planned planned = self.planned_part()
        if self.is_closed:
            raise closed()
        if gate is not None and not gate > 0:
            raise ValueError(f"gate is a part of what is reserved without a plan, such as 0.95, or None, not {gate!r}")
        if steps not in (None, "auto"):
            raise ValueError(f"steps is None, where the program calls step(), or 'auto', not {steps!r}")
        if plan is None:
            self.stop_watch()
            try:
                planned.use(None, None, None, None, strict, False)
            finally:
                self.plan_changed()     # the plan has ended, even if the device takes nothing back
            return
        if not hasattr(plan, "_served"):
            raise TypeError(f"a plan is a bfc.Plan or None, not {type(plan).__name__}")
        if self.strict:
            raise ValueError("an allocator with strict=True places as the original does, and the original has no plans")
        gate = planned.gate_for(gate)
        if self.pool.timing != NULL:
            raise ValueError("a plan does not know when memory may be used again by the timing counter")
        if self.pool.features & ENDS:
            raise ValueError("a plan has places of its own, and none at two ends of the memory")
        declined = None if gate is None else plan._declined(gate, by_itself=steps is not None)
        self.stop_watch()
        planned.follows = steps is not None
        self.put_plan(plan, None if gate is None else _plans.make_watch(plan, gate), declined, strict, False)

    cdef int put_plan(self, object plan, object watch, object declined, bint strict, bint resumed) except -1:
        """Serves a plan from now on."""
        served = plan._served("bfc" if self.pool.usage == NULL else "caching", self.source.alignment,
                              self.planned.is_in_pages())
        try:
            self.planned.use(plan, served, watch, declined, strict, resumed)
        finally:
            self.plan_changed()
        return 0

    cdef int stop_watch(self) except -1:
        """Ends the history of what looks whether the plan in use still pays."""
        if self.planned.watch is not None:
            self.planned.watch.stop(self)
        return 0

    def _resume_plan(self, plan, watch):
        """Serves a plan from now on whose head is there already: what a watch has made of the last steps."""
        self.planned_part()
        self.put_plan(plan, watch, None, False, True)

    def _end_plan(self, str why):
        """Ends the plan in use, since it has not paid."""
        planned = self.planned_part()
        try:
            planned.end_plan(why)
        finally:
            self.plan_changed()

    def _body_is_idle(self):
        """Whether nothing lives in the region of the plan's bodies."""
        return self.planned_part().body_is_idle()

    def _last_step(self):
        """What `Planned.last_step` says."""
        return self.planned_part().last_step()

    def _home_stream(self):
        """The stream that stands for stream 0 in a plan."""
        return self.home_stream

    def _keeps_history(self):
        """Whether a history is recorded, or frames are kept."""
        return self.pool.history != NULL or self.recorder.keeps_history(self.pool)

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
        return new_step(self, self.planned_part(), kind)

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
        self.planned_part()
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
            `has_body`, whether the
            region of the bodies is there, which goes back if memory runs out between steps; `span`, the
            bytes of the plan; `side_bytes_reserved`, those of the policy; and `budget_left`, the bytes that the
            plan still saves
            beside what the policy alone reserved for the recording.
        """
        cdef dict found = self.planned_part().stats()
        if found.get("first_departure") is not None:
            noted = dict(found["first_departure"])
            noted["frames"] = self.recorder.frames.get(noted.pop("allocation_id"), ())
            found["first_departure"] = noted
        return found

    def _watch_steps(self, watcher):
        """From now on `watcher(kind)` is called when a step has begun, and `watcher(None)` when another history begins.
        None ends that. Returns the previous one."""
        cdef Planned planned = self.planned_part()
        watcher, planned.watcher = planned.watcher, watcher
        return watcher

    @cython.final
    cdef cbool asks_plan(self, Request* request) noexcept nogil:
        """Whether a request may get pages of a plan."""
        return not (request.tag or request.contiguous or request.in_capture or request.asking.without_gil
                    or request.asked_plan or self.private_pools.open_scopes.get() or self.is_in_capture(request))

    @cython.final
    cdef ChunkHandle ask_plan(self, Request* request) noexcept nogil:
        """The place that the plan in use has for a request, or a guest's room. Asks once for each request: a plan
        counts what it is asked."""
        if self.pool.plan == NULL or not self.may_be_planned(request):
            return NO_CHUNK
        request.asked_plan = True
        return self.pool.ask_plan(request.rounded, request.nbytes,
                                  request.stream if self.pool.usage == NULL else request.lane.stream, request.indexed)

    cdef cbool may_be_planned(self, Request* request) noexcept nogil:
        """Whether a plan may have a place for a request whose lane is known."""
        if request.asked_plan or (request.contiguous and self.pool.plan.has_pages()):
            return False
        return self.may_lie_in_plan(request)

    cdef cbool may_lie_in_plan(self, Request* request) noexcept nogil:
        """Whether a request whose lane is known may be served from memory of plans."""
        return not (is_private(&request.lane) or request.lane.thread or request.freed_before
                    or (request.contiguous and request.alignment) or self.is_in_capture(request))

    cdef int make_room_in_plan(self, Request* request, Placement* placed) except -1:
        """Where nothing else fits: uses any gap of the plan, or gives back the region of the bodies."""
        self.use_gap_in_plan(request, placed)
        if placed.handle == NO_CHUNK and self.planned.give_back_idle():
            self.place_after_miss(request, placed)
        return 0

    cdef int use_gap_in_plan(self, Request* request, Placement* placed) except -1:
        """Uses any gap of the plan, or cuts a large chunk that stays whole beside a plan."""
        cdef uint32_t index
        cdef uint64_t oversize = UNLIMITED
        settings = self.settings_now()
        if settings is not None and settings.max_split_size is not None:
            oversize = settings.max_split_size
        self.acquire()
        if not self.is_closed and self.pool.plan != NULL and request.asked_plan:
            index = self.pool.plan.stream_of(request.stream if self.pool.usage == NULL else request.lane.stream)
            if index != NO_STREAM:
                self.fill(self.pool.hand_out_room(self.pool.plan, index,
                                                  self.pool.plan.any_room(index, request.rounded),
                                                  request.rounded, request.nbytes, request.stream, request.indexed),
                          request, placed)
                if placed.handle < NO_HOST_MEMORY:      # it was counted as served beside the plan
                    self.pool.plan.counts.side -= 1
                    self.pool.plan.counts.side_bytes -= request.rounded
        if not self.is_closed and self.pool.plan != NULL and placed.handle == NO_CHUNK:
            find_among_whole(self, request, placed, oversize)
        self.lock.release()
        return 0

    cdef int keep_within_bounds(self, Request* request, Placement* placed) except -1:
        """Before more memory is asked for than the policy alone has needed: uses any gap of the plan, and gives back
        what is free. What a plan that did not pay has left is used before anything is asked for."""
        if self.planned.has_ended_early():
            self.use_gap_left(request, placed)
        elif self.pool.plan != NULL and not self.planned.may_grow(request.rounded, False):
            self.use_gap_in_plan(request, placed)
        if placed.handle == NO_CHUNK and not request.refused:
            self.planned.about_to_grow(request.rounded)
        return 0

    cdef int use_gap_left(self, Request* request, Placement* placed) except -1:
        """Serves a large request in a gap of a plan that has ended, where blocks still live."""
        cdef uint64_t stream
        cdef PlanServer* plan
        self.acquire()
        if not self.is_closed and is_large(request.rounded) and self.may_lie_in_plan(request):
            stream = request.stream if self.pool.usage == NULL else request.lane.stream
            for plan in self.pool.plans:
                if placed.handle == NO_CHUNK and not plan.has_pages() and plan.stream_of(stream) != NO_STREAM:
                    self.fill(self.pool.hand_out_room(plan, plan.stream_of(stream),
                                                      plan.any_room(plan.stream_of(stream), request.rounded),
                                                      request.rounded, request.nbytes, request.stream,
                                                      request.indexed), request, placed)
        self.lock.release()
        return 0

    # -- captures -----------------------------------------------------------------------------------------------------

    @cython.final
    cdef cbool is_in_capture(self, Request* request) noexcept nogil:
        """Whether a request comes while its stream captures, or may capture: nothing is waited for then."""
        return self.fences.capture_is_marked() and (request.in_capture or request.asking.without_gil)

    cdef int look_at_captures(self, Request* request) except -1:
        """Asks the source about the request's stream: whether it captures, and for which graph."""
        cdef PoolId pool = self.captures.pool_for(request.stream)
        if pool.first or pool.second:   # else a replay may have named one
            request.captured[0] = pool.first
            request.captured[1] = pool.second
        request.in_capture = request.in_capture or self.captures.is_captured(request.stream, self.strict)
        request.has_waited = request.has_waited or request.in_capture
        if request.in_capture and self.fences.reuses:
            self.frees.free_safe_in_capture(request.stream)
        return 0

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
        self.sub_allocator.check_stream(handle)
        return Capture(self, handle, pool)

    def _begin_capture(self, pool, stream):
        self.require_set_up()
        if self.is_closed:
            raise closed()
        with self.planned_part().changes():     # in which a plan asks the driver for memory
            self.captures.begin(id_of(pool), stream, self.strict)
        self.scopes_changed()
        self.recorder.note_of_pool(self.pool, self.lock, pool, _words.CAPTURE_BEGINS)

    def _end_capture(self, pool):
        self.require_set_up()
        try:
            self.captures.mark(-1)
        finally:
            self.end_scope(pool, _words.CAPTURE_ENDS)
            self.captures.forget_streams_of(pool)

    def _take_as_captured(self, pool, stream, is_captured):
        """For a replay: lets a stream count as captured into a pool, or no more."""
        self.captures.take_as_captured(pool, stream, is_captured)

    def _forget_captured(self, pool):
        """For a replay: a capture into a pool has ended, and with it that of its streams."""
        self.captures.forget_streams_of(pool)

    def _captured_streams(self):
        streams = []
        for stream, _pool in self.captures.streams():
            streams.append(stream)
        return streams

    def mark_capture_begin(self):
        """Say that a capture has begun, as PyTorch's `markCaptureBegin` does. `capture` does it by itself.

        From now on an allocation or a free asks the sub-allocator whether its stream captures, and
        waits for nothing if it does.

        Notes
        -----
        Source: PyTorch's behaviour, 2.15.
        """
        with self.planned_part().changes():     # in which a plan asks the driver for memory
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
        if self.is_closed:
            raise closed()
        named = streams if isinstance(streams, str) else int(self.stream_of(streams))
        self.pool_uses.begin(scope_of_pool(pool, named), self.strict)
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
        self.end_scope(pool, _words.SCOPE_ENDS)

    cdef int end_scope(self, pool, str said) except -1:
        """Closes a scope of a pool, and writes that down."""
        self.pool_uses.end(id_of(pool))
        self.scopes_changed()
        self.recorder.note_of_pool(self.pool, self.lock, pool, said)
        self.pool_ended(pool)
        return 0

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
        if self.pool_uses.release_reference(id_of(pool)):
            self.recorder.note_of_pool(self.pool, self.lock, pool, _words.LET_GO)
            self.pool_released(pool)

    def _pool_use_count(self, pool):
        """How many references a pool has; 0 if it is not known."""
        return self.pool_uses.count_references(id_of(pool))

    # -- where a hit is not enough ------------------------------------------------------------------------------------

    cdef int try_harder(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1:
        """Tries what may still help. `seen` is the count of frees before the first attempt."""
        cdef uint64_t freed
        if counted(self.live_buffers) and not self.strict and not request.refused:
            freed = self.frees.count.get()
            gc.collect()    # buffers in reference cycles
            if self.frees.count.get() != freed or self.reasons.has(FREES_PENDING):
                self.attempt(request, placed)
        if placed.handle == NO_CHUNK and self.retry_seconds > 0 and not request.refused \
                and not self.is_in_capture(request):
            self.wait_for_frees(request, freed_before, seen, placed)
        if placed.handle == NO_CHUNK:
            self.was_refused(request)
        return 0

    cdef object refusal_of(self, Request* request):
        """The error of a request without room."""
        return out_of_memory(request.nbytes, self.stats(), self.sub_allocator.total_bytes, self.refused_by(request),
                             self.sub_allocator.largest_block, self.against_pieces(),
                             pages_in_use(self.pool, self.lock), self._look)

    cdef str refused_by(self, Request* request):
        """Who has refused a request, for the error; "" is the limit."""
        if not self.source.refused_bytes.get():
            return ""
        return f"{self.sub_allocator!r}, asked last for {format_bytes(self.source.refused_bytes.get())}"

    cdef int leave_home(self, Placement* placed, uint64_t on, object stream) except -1:
        """Makes memory safe to use on a stream other than the home stream, and lets its free wait for a fence there.

        Work that is queued on the home stream may still use the memory, so the other stream waits for that work.
        """
        cdef uint64_t home_frees, stream_id
        try:
            if self.home_stream != HOST_STREAM and self.sub_allocator.asynchronous:
                stream_id = self.sub_allocator.stream_id(on)
                if self.frees.must_order(stream_id, &home_frees) or self.is_of_thread(on):
                    self.sub_allocator.order(self.home_stream, on)
                    self.frees.was_ordered(stream_id, home_frees)
            self.fences.uses(placed.allocation_id, on, stream)
        except BaseException as error:
            raise self.frees.undo(placed.handle, placed.allocation_id) or error
        return 0

    cdef int wait_for_frees(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1:
        """Tries again after each free until `retry_seconds` have passed, and then once more (TensorFlow's behaviour,
        2.8). `seen` is the count of frees before the first attempt: upstream misses a free between that and the wait.
        """
        deadline = time.monotonic() + self.retry_seconds
        late = False
        while placed.handle == NO_CHUNK and not late:
            while self.frees.count.get() == seen and not self.reasons.has(FREES_PENDING) and not late:
                _sleep(_RETRY_POLL_SECONDS)
                self.frees.drain(0)     # a stream that finishes counts as a free
                late = time.monotonic() >= deadline
            seen = self.frees.count.get()
            if freed_before is not None:
                self.set_freed_before(request, freed_before)
            self.attempt(request, placed)
        return 0

    cdef int attempt(self, Request* request, Placement* placed) except -1:
        """Makes one complete attempt. `placed.handle` is NO_CHUNK if nothing fits, and for 0 bytes."""
        if self.fences.capture_is_marked() or self.private_pools.open_captures.get():
            self.look_at_captures(request)
        placed.handle = NO_CHUNK
        placed.allocation_id = 0
        placed.ptr = 0
        if request.refused and self.is_closed:
            raise closed()
        if request.nbytes == 0 or request.refused:
            return 0
        if not self.reasons.none():
            self.frees.drain(AT_ALLOCATION | (IN_CAPTURE if request.in_capture else 0))
        if self.pool.plan != NULL and self.planned.follows and self.asks_plan(request):
            self.planned.follow(self, request.stream, request.rounded, request.nbytes)
        if self.pool.plan != NULL and self.pool.plan.asks() and not request.tag and not request.in_capture:
            self.planned.meet_length(request.stream, request.nbytes)
        if self.pool.plan != NULL and self.asks_plan(request):
            self.planned.fill_place(self, request.stream if self.by_stream else self.home_stream, request.rounded,
                                    request.nbytes)
        # Placed and written down at once. `frees_before` says which frees this look has seen.
        self.acquire()
        request.frees_before = self.frees.count.get()
        if not self.is_closed:
            self.fill(self.place(request), request, placed)
        self.lock.release()
        if placed.handle >= NO_HOST_MEMORY:
            self.after_miss(request, placed)
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()
        return 0

    cdef void fill(self, ChunkHandle handle, Request* request, Placement* placed) noexcept nogil:
        """Writes the pool's answer into `placed`. Needs the lock."""
        placed.handle = handle
        if not note_hit(self.pool, handle, placed):
            return
        cdef Chunk* chunk = &self.pool.chunks[handle]
        if self.pool.history != NULL and self.pool.usage == NULL:
            self.pool.note(HISTORY_ALLOC, chunk, request.nbytes)
        self.pool.set_owner(handle, request.owner)
        if request.shared or (request.stream != self.home_stream and not is_apart(self, &request.lane)):
            chunk.state |= USED_ELSEWHERE

    cdef int after_miss(self, Request* request, Placement* placed) except -1:
        """The slow path. The lock is not held: `place_after_miss` takes it where it needs the pool."""
        cdef uint64_t seen
        if is_finalizing():
            self.source.forget_other_threads()
        if self.fences.capture_is_marked():
            self.note_captured_streams()
        elif (self.planned is not None and self.pool.plans.size() > <size_t>(self.pool.plan != NULL)
                and not self.source.is_called_here()):
            self.planned.give_back_empty()      # of plans that have ended, before more is asked for
        if placed.handle == NO_CHUNK and self.planned is not None and not self.fences.capture_is_marked():
            self.keep_within_bounds(request, placed)
        while placed.handle == NO_CHUNK:
            if self.is_closed:
                raise closed()
            seen = self.source.changes.get() - request.asking.changes   # of other threads
            self.place_after_miss(request, placed)
            if placed.handle != NO_CHUNK or request.refused or not self.worth_another_try(request, seen):
                break
            self.acquire()
            if not self.is_closed:
                self.fill(self.place(request), request, placed)
            self.lock.release()
        if placed.handle == NO_CHUNK and self.planned is not None and not request.refused:
            self.make_room_in_plan(request, placed)
        while placed.handle == NO_CHUNK and not request.refused:
            seen = self.source.changes.get() - request.asking.changes
            self.place_where_refused(request, placed)
            if placed.handle != NO_CHUNK or not self.worth_another_try(request, seen):
                break
        if placed.handle == NO_HOST_MEMORY:
            placed.handle = NO_CHUNK
            raise out_of_host_memory()
        try:
            run_handlers()      # signal handlers that were deferred while the sub-allocator was called
        except BaseException as error:
            raise self.frees.undo(placed.handle, placed.allocation_id) or error
        return 0

    cdef bint worth_another_try(self, Request* request, uint64_t seen) except -1:
        """Waits for what may yet free memory: streams that still use freed blocks, and calls of other threads to the
        sub-allocator, which hold a part of the limit. Returns whether anything may have changed. That another thread
        has freed memory counts once: a request for more than there is must end."""
        cdef bint is_first = not request.has_waited, waits = is_first and self.reasons.has(SOME_WAIT | FREES_PENDING)
        cdef bint frees = is_first and self.frees.count.get() != request.frees_before
        request.has_waited = True
        if waits:
            self.frees.wait_for_streams()
        cdef uint64_t ended = self.source.calls_ended.get()
        cdef bint is_inside = self.source.is_called_here()
        if request.blocked and not is_inside:
            time.sleep(_RETRY_POLL_SECONDS)
        while not is_inside and self.source.is_calling() and self.source.calls_ended.get() == ended:
            time.sleep(_RETRY_POLL_SECONDS)
        if self.source.changes.get() - request.asking.changes != seen:
            return True
        if not is_inside and request.polls < MOST_POLLS and self.source.holds_bytes_aside():
            request.polls += not self.source.is_calling()   # the call that has ended may be a third thread's
            time.sleep(_RETRY_POLL_SECONDS)
            return True
        return waits or frees or (request.blocked and not is_inside)

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
        self.free_address(address)

    cdef int free_address(self, uint64_t address) except -1:
        cdef TurnAt turn
        turn.take(self)
        if self.recorder.keeps_free_frames:
            self.recorder.keep_free_frames(chunk_at(self.pool, self.lock, address).allocation_id)
        if self.reasons.has(FREES_PENDING):
            self.frees.drain(0)
        # Found and freed at once: of two frees of an address one is refused.
        self.acquire()
        cdef ChunkHandle handle = self.pool.handle_of(address)
        if handle == NO_CHUNK:
            self.lock.release()
            raise_invalid_pointer(self.pool, self.lock, address)
        self.frees.free_locked(handle)
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()
        return 0

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
            if self.is_closed:
                return 0
            raise InvalidPointerError("this buffer's memory was freed already, through its address")
        self.frees.free_locked(handle)
        count_by(self.live_buffers, <int64_t>-1)
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()
        return 0

    cdef void free_handle_from_finaliser(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        if counted(exiting):
            return
        count_by(self.live_buffers, <int64_t>-1)
        if (some_use(self.fences) or not self.fences.noted.empty()) and not self.fence_now(handle, allocation_id):
            return
        if not self.lock.try_acquire():
            self.frees.leave(handle, allocation_id, LOCK_TAKEN)
            return
        cdef bint live = is_live_in(self.pool, handle, allocation_id)
        cdef bint freed = live and self.pool.free_unshared(handle)
        self.frees.count.add(freed)
        self.lock.release()
        if live and not freed:
            self.frees.leave(handle, allocation_id, LOCK_TAKEN)

    cdef bint fence_now(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        cdef TurnAt turn
        turn.take(self)
        return self.frees.fence_now(handle, allocation_id)

    cdef object undo_at(self, uint64_t address):
        """Frees an allocation whose address will not be returned. Returns what `Frees.undo` does."""
        # The handle is read with its id, which tells whether the chunk is still the same later.
        self.acquire()
        cdef ChunkHandle handle = self.pool.handle_of(address)
        cdef int64_t allocation_id = self.pool.chunks[handle].allocation_id if handle != NO_CHUNK else -1
        self.lock.release()
        if handle == NO_CHUNK:
            return None
        try:
            if self.recorder.keeps_free_frames:
                self.recorder.keep_free_frames(allocation_id)
        except MemoryError:
            pass
        return self.frees.undo(handle, allocation_id)

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
        sizes_from(sizes, &wanted)
        if stream is None and scopes_open.load():
            stream = current_stream()
        cdef uint64_t on = self.stream_of(stream)
        cdef uint32_t owner = owner_here(self) if owners_used.load() else 0
        found = numpy.empty(wanted.size(), numpy.uint64)
        cdef uint64_t[::1] addresses = found
        try:
            while done < wanted.size():
                if self.hits_are_plain(on):
                    done = self.allocate_hits(wanted, addresses, done, on, owner)
                if done < wanted.size():
                    self.allocate_placement(wanted[done], on, stream, None, False, 0, &placed)
                    addresses[done] = placed.ptr
                    done += 1
            if BFC_DEBUG >= 2 and self.pool.check_is_due():
                self.check_books()
        except BaseException as error:
            for i in range(done):
                if addresses[i]:
                    error = self.undo_at(addresses[i]) or error
            raise error
        return found

    @cython.final
    cdef bint hits_are_plain(self, uint64_t on) except -1:
        """Whether a hit for this stream needs nothing but the free chunk."""
        if not self.reasons.none():
            return False
        return not self.is_unordered(on) if self.by_stream else on == self.home_stream

    cdef size_t allocate_hits(self, const vector[uint64_t]& sizes, uint64_t[::1] addresses, size_t i,
                              uint64_t on, uint32_t owner) noexcept:
        """Serves the requests from the i-th on under one lock, while free chunks fit. Returns the index of the first
        request that none fits."""
        cdef Placement placed
        self.acquire()
        while i < sizes.size() and not self.is_closed and self.pool.owned.knows(owner):
            addresses[i] = 0
            if sizes[i]:
                if not self.hit(sizes[i], on, &placed):
                    break
                self.pool.set_owner(placed.handle, owner)
                addresses[i] = placed.ptr
            i += 1
            if i % BETWEEN_OTHERS == 0:
                self.give_way()
        self.lock.release()
        return i

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
        handles.resize(addresses.size())
        self.frees.look_up_all(addresses, handles)
        if self.reasons.has(FREES_PENDING):
            self.frees.drain(0)
        while i < addresses.size():
            if not self.recorder.keeps_free_frames:
                i = self.frees.free_many(addresses, handles, i)
            if i < addresses.size():
                if addresses[i]:
                    self.free_address(addresses[i])
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
            self.fences.adopt(allocation_id)
            if self.fences.capture_is_marked():
                self.fences.note_captured(allocation_id, on, made_on)
            self.fences.uses(allocation_id, on, stream)

    cdef uint64_t hand_to_stream(self, ChunkHandle handle, int64_t allocation_id, uint64_t made_on, consumer) except? 0:
        cdef uint64_t on = self.stream_of(consumer)
        cdef bint live
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
        if live and made_on != HOST_STREAM and self.sub_allocator.asynchronous:
            self.sub_allocator.order(made_on, on)
        return on if live else NO_CONSUMER

    cdef void consumer_left(self, int64_t allocation_id, uint64_t stream) noexcept:
        cdef TurnAt turn
        turn.take(self)
        self.frees.consumer_left(allocation_id, stream)

    cdef int hand_over(self, ChunkHandle handle) except -1:
        """Indexes a chunk by its address and records its stream. A replay allocates chunks by handle, without either.
        """
        # Another thread may have closed the allocator during the replay.
        self.acquire()
        if self.is_closed:
            self.lock.release()
            raise ClosedError("this allocator was closed during the replay")
        cdef Chunk* chunk = &self.pool.chunks[handle]
        cdef bint indexed = chunk.state & INDEXED or self.pool.index_chunk(handle)
        cdef uint64_t stream = chunk.stream
        cdef int64_t allocation_id = chunk.allocation_id
        cdef bint elsewhere = stream != self.home_stream and not is_apart(self, &self.pool.bin_sets[chunk.bin_set].lane)
        if elsewhere:
            chunk.state |= USED_ELSEWHERE
        self.lock.release()
        if not indexed:
            raise out_of_host_memory()
        if elsewhere:
            self.fences.uses(allocation_id, stream, None)
        return 0

    # -- regions ------------------------------------------------------------------------------------------------------

    cdef int take_region(self, Request* request, Placement* placed, Region* block) except -1 nogil:
        """Adds a block to the pool, and places the request under the same lock."""
        cdef vector[Region] refused
        cdef cbool closed
        cdef Taken taken
        self.acquire()
        closed = self.is_closed
        taken = self.source.take_in(&request.asking, block, NO_LANE if closed else self.bin_set_of(request), refused)
        if taken == ADDED:
            self.fill(self.find_in_new_region(request, block), request, placed)
        self.lock.release()
        if taken == ADDED:
            return 0
        self.source.give_back(refused, request.asking.without_gil)
        return 0 if request.asking.without_gil else self.source.refuse(block, taken, closed)

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
        cdef bint captures = self.fences.is_in_capture(self.home_stream)
        if not captures:
            self.frees.drain(RECORD | QUERY | AGAIN)    # what a capture has put off, too
        self.note_captured_streams()
        cdef int64_t mark = self.recorder.mark_release(self.pool, self.lock)
        self.acquire()
        cdef Release before = self.pool.begin_release(mark)
        self.pool.list_regions(regions, False)
        self.private_pools.keep_used(self.pool, not captures, default_pool(), regions)
        if self.private_pools.some_default(self.pool, regions):     # else a history does not tell a replay of it
            self.regions_released()
        released = self.source.forget(regions) + self.source.unreturned_bytes
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
            self.is_closed = True
            self.source.forget_all(regions)
        self.lock.release()
        if viewed:
            raise BufferError(f"{self.exports} view(s) of this memory are in use (arrays, memoryviews): delete them, "
                              f"then close")
        self.frees.forget()
        self.source.offer_rejected_again()
        try:
            self.source.give_back(regions, False)
        finally:
            self.tags.drop_kept()
            self.mapped.give_all_back()
        if fault is not None:
            raise fault

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __del__(self):
        if counted(exiting) or self.is_closed:
            return
        if counted(self.exports):
            self.is_abandoned = True    # views of the memory are garbage, too: the last of them closes the allocator
            return
        try:
            self.close()
        finally:
            if not self.is_closed or self.source.unreturned.size():
                self.close()    # it may have failed because the host had no memory

    @property
    def closed(self):
        """True once `close()` has been called."""
        return self.is_closed

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
        return self.mapped.stats() or self.require_pages("page_stats")

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
        self.require_pages("trim")
        return self.trim_pages(kept, wait)

    cdef uint64_t trim_pages(self, uint64_t keep, bint wait) except? 0xFFFFFFFFFFFFFFFF:
        cdef uint64_t released
        cdef Faults faults = Faults()
        self.frees.drain(QUERY | AGAIN | (WAIT if wait else 0))
        self.note_captured_streams()
        if not self.stitching.enter(0):
            return 0        # another thread maps: it needs memory
        try:
            released = self.stitching.trim(keep, wait, faults)
        finally:
            self.stitching.leave()
        raise_faults(self.sub_allocator, faults)
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()
        return released

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
        cdef uint64_t size = parse_bytes(nbytes), rounded = self.rounded_size(size), address
        if self.is_closed:
            raise ClosedError("this allocator is closed")
        if isinstance(buffer, Buffer):
            owned = own_buffer(self, buffer)
        address = address_from(buffer) if owned is None else owned.start
        cdef uint64_t present = chunk_at(self.pool, self.lock, address).requested_size
        if size < present:
            raise ValueError(f"{address:#x} has {present} bytes, and would have {size}: try_extend makes nothing "
                             f"smaller")
        if not self.extend_now(address, rounded, size):
            if not self.mapped.extend(address, rounded):
                return False
            if not self.extend_now(address, rounded, size):
                return False    # another thread has taken it
        if owned is not None:
            owned.nbytes = size
        return True

    cdef uint64_t rounded_size(self, uint64_t nbytes) noexcept:
        cdef Request request
        # The settings by which a policy rounds change under the lock.
        self.acquire()
        self.set_request(&request, nbytes, self.home_stream)
        self.lock.release()
        return request.rounded

    cdef bint extend_now(self, uint64_t address, uint64_t rounded, uint64_t nbytes) except -1:
        # The free chunk behind it is looked at and taken at once.
        self.acquire()
        cdef ChunkHandle handle = self.pool.handle_of(address)
        cdef bint asleep = handle != NO_CHUNK and is_asleep_in(self.pool, handle)
        cdef bint done = handle != NO_CHUNK and not asleep and extend_chunk(self.pool, handle, rounded, nbytes)
        cdef int64_t allocation_id = self.pool.chunks[handle].allocation_id if asleep else 0
        self.lock.release()
        if asleep:
            raise self.why_not(handle, allocation_id)
        return done

    cdef int require_pages(self, str method) except -1:
        if self.is_closed:
            raise ClosedError("this allocator is closed")
        if not self.stitches:
            raise ValueError(f"{method} is for BFCAllocator(virtual_memory=True) and CachingAllocator(stitch=True)")
        return 0

    # -- what a buffer asks -------------------------------------------------------------------------------------------

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

    cdef void last_view_gone(self) noexcept:
        """Closes an allocator that was garbage-collected while views of its memory remained: the last view to go does
        that."""
        cdef TurnAt turn
        turn.take(self)
        if self.is_abandoned and not counted(exiting):
            self.is_abandoned = False
            try:
                self.close()
            except BaseException as error:
                report_unraisable(error, _PUT_OFF)

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
        return self.visible_stream(self.home_stream)

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
        self.frees.drain(0)
        # All figures are of one moment.
        self.acquire()
        cdef Counters counters = self.pool.totals()
        cdef uint64_t largest_free = self.pool.largest_free()
        cdef vector[uint64_t] owned
        cdef bint copied = self.pool.owned.copy(owned)
        self.lock.release()
        if not copied:
            raise out_of_host_memory()
        return self.stats_of(counters, largest_free, owned)

    cdef object stats_of(self, Counters counters, uint64_t largest_free, vector[uint64_t]& owned):
        return _snapshot.Stats(
            num_allocs=counters.num_allocs,
            bytes_in_use=counters.bytes_in_use,
            peak_bytes_in_use=counters.peak_bytes_in_use,
            largest_alloc_size=counters.largest_alloc_size,
            bytes_limit=self.limit,
            bytes_reserved=counters.pool_bytes + self.mapped.bytes_beside_regions(),
            peak_bytes_reserved=counters.peak_pool_bytes,
            pool_bytes=counters.pool_bytes,
            peak_pool_bytes=counters.peak_pool_bytes,
            largest_free_block_bytes=largest_free,
            bytes_waiting_for_streams=counters.bytes_waiting,
            bytes_asleep=bytes_asleep(self.mapped) if self.tags.asleep.size() else 0,
            by_owner=bytes_by_name(counters.bytes_in_use, owned),
        )

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
        if self.pool.usage != NULL:
            self.pool.usage.restart_peaks()
            self.pool.pool_usage.restart_peaks()
        self.pool.counters.largest_alloc_size = 0
        self.lock.release()

    def reset_accumulated_stats(self):
        """Restart the counts from 0. Allocation ids go on."""
        # Both sets of counts restart between the same two requests.
        self.acquire()
        self.pool.counters.num_allocs = 0
        if self.pool.usage != NULL:
            self.pool.usage.restart_totals()
            self.pool.pool_usage.restart_totals()
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
        return self.look(history, True)

    def _look(self):
        """A snapshot without the history, which leaves no entry in it."""
        return self.look(False, False)

    cdef object look(self, bint with_history, bint noted):
        """A snapshot. `noted`: whether the history says that one was taken."""
        cdef vector[RegionRow] regions
        cdef vector[ChunkRow] chunks
        cdef vector[uint32_t] pages
        cdef vector[HistoryRecord] records
        cdef vector[uint64_t] owned
        self.frees.drain(0)
        # All is copied at one moment, and made into objects without the lock.
        self.acquire()
        cdef bint copied = copy_columns(self.pool, regions, chunks, pages)
        copied = copied and self.pool.owned.copy(owned)
        if self.pool.history != NULL:
            copied = copied and (not with_history or self.pool.history.copy(records))
            if noted:
                self.pool.history.add(HistoryRecord(0, self.pool.totals().bytes_in_use, 0, [0, 0], 0, 0,
                                                    HISTORY_SNAPSHOT, 0))
        cdef Counters counters = self.pool.totals()
        cdef uint64_t largest_free = self.pool.largest_free()
        self.lock.release()
        if not copied:
            raise out_of_host_memory()
        kept = self.recorder
        packed = _columns.RegionColumns(bytes_of_regions(regions), bytes_of_chunks(chunks), bytes_of_pages(pages),
                                        kept.frames_of_regions(regions), kept.frames_of_chunks(chunks),
                                        owners=owner_names, chunk_steps=kept.steps_of_chunks(chunks))
        return _snapshot.Snapshot._of_columns(str(self.device), self.stats_of(counters, largest_free, owned), packed,
                                              self.recorder.columns_of(records), self.settings_now(),
                                              self.torch_now(), self.tag_stats())

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
        if self.pool.history != NULL:
            self.pool.history.add(HistoryRecord(chunk.ptr, chunk.requested_size, lane.stream,
                                                [lane.pool[0], lane.pool[1]], 0, 0, HISTORY_ANNOTATE, number))
        self.lock.release()

    cdef int note_captured_streams(self) except -1:
        """Writes into a history which streams with mapped memory have joined a capture, or left it: nobody waits for
        those that capture, so that their pages stay, and a replay has no driver that would tell."""
        if self.strict or not self.private_pools.open_captures.get():
            return 0
        # A history may be started or ended by another thread.
        self.acquire()
        cdef bint is_recorded = self.pool.history != NULL
        self.lock.release()
        if is_recorded:
            for stream, pool, joins in self.captures.news_of(self.mapped.streams_asked()):
                said = _words.STREAM_JOINS if joins else _words.STREAM_LEAVES
                self.recorder.note_of_pool(self.pool, self.lock, pool, said, stream)
        return 0

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

    cdef int check_books(self) except -1:
        """`check` for a debug build, which recounts in the middle of a call. So this raises only if it finds a fault,
        even if Python's stack is exhausted."""
        # The books are only whole between two changes.
        self.acquire()
        cdef const char* fault = first_fault(self.pool)
        if fault == NULL and not self.is_closed:
            fault = self.mapped.first_fault()
        self.lock.release()
        if fault != NULL:
            raise InvariantError(fault.decode())

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
        cdef bint is_closed = self.is_closed
        if not is_closed:
            history = self.pool.set_history(history)
        self.lock.release()
        del history
        if not is_closed:
            self.recorder.restart(enabled, context)
            self.fences.told.clear()
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

    cdef tuple memory_of_device(self):
        """The free bytes of the device, and all; 0 free where it does not say."""
        try:
            answer = self.sub_allocator.memory_info()
        except Exception as error:      # a request is refused all the same
            report_unraisable(error, self.sub_allocator)
            answer = 0, self.sub_allocator.total_bytes
        return checked_memory_info(answer, self.sub_allocator)

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

    def _tag_everything(self, name):
        """From now on what is allocated outside of all scopes belongs to a tag, in every thread and for good."""
        self.tags.cover(name)

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
        if self.is_closed:
            raise ClosedError("this allocator is closed")
        cdef dict ways = self.tags.ways_from(keep, drop)
        if not (self.mapped.is_on or self.mapped.are_some() or self.source.blocks):
            raise no_mapping(self)
        if self.device.kind == "simulated" and some_kept(ways):
            raise SettingsError("a simulated device has no contents that could be kept", key="keep", where="sleep()",
                                hint="drop=[...], or a bfc.HostSubAllocator, whose memory can be written")
        self.frees.drain(RECORD | QUERY | AGAIN | WAIT)     # what was freed and waits for other streams
        return put_to_sleep(self.mapped, ways, None if keep_limit is None else parse_bytes(keep_limit))

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
        if self.is_closed:
            raise ClosedError("this allocator is closed")
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
            needed = wake_up(self.mapped, wanted, fill)
        if needed:
            refused_by = repr(self.sub_allocator) if self.source.refused_bytes.get() else ""
            raise out_of_memory(needed, self.stats(), self.sub_allocator.total_bytes, refused_by, look=self._look,
                                waking=names_asleep(wanted))

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
        cdef Tag tag
        cdef uint64_t nbytes, allocations
        cdef dict found = {}
        for tag in list(self.tags.by_name.values()):
            nbytes = count_tag(self.pool, self.lock, self.tags, tag.number, &allocations)
            found[tag.name] = {
                "bytes_in_use": nbytes,
                "allocations": allocations,
                "asleep": bool(tag.is_asleep),
                "bytes_kept": tag.kept.nbytes if tag.kept is not None else 0,
            }
        return found

    def _sleeps_with(self, pool):
        """The name of the tag that a private pool sleeps with now; None: it has memory."""
        cdef PoolId id = id_of(pool)
        cdef uint64_t[2] numbers = [id.first, id.second]
        return self.tags.name_of_pool(TAG_POOLS, self.tags.find_asleep_with(numbers))

    def _kept_contents(self, ptr, nbytes):
        """What the host keeps of these addresses, as a bytearray; None where nothing is kept."""
        cdef Tag tag
        for tag in list(self.tags.by_name.values()):
            kept = tag.kept         # another thread may wake the tag
            found = kept.read(ptr, nbytes) if kept is not None else None
            if found is not None:
                return found
        return None

    @property
    def asleep(self):
        """The names of the tags that sleep, as a frozenset."""
        cdef Tag tag
        cdef set names = set()
        for tag in list(self.tags.by_name.values()):
            if tag.is_asleep:
                names.add(tag.name)
        return frozenset(names)


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
        (<Allocator>self).allocate_placement(size, 0, None, None, False, 0, &placed)
    address = (<Allocator>self).addresses.get(placed.ptr)
    if address == NULL:
        (<Allocator>self).take_back(&placed)
    return address


cdef PyObject* allocate_plainly(PyObject* self, Arguments given, Py_ssize_t count, PyObject* names) except NULL:
    cdef Placement placed
    cdef uint64_t size, on = (<Allocator>self).home_stream
    if count != 1 or names != NULL or scopes_open.load() or not plain_int(given[0], &size):
        return allocate_as_asked(self, given, count, names)
    cdef Buffer buffer = Buffer.__new__(Buffer)     # first: nothing may fail once memory was taken
    if not hit_at_once(<Allocator>self, size, on, &placed):
        (<Allocator>self).allocate_placement(size, on, None, None, False, 0, &placed)
    become(buffer, <Allocator>self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
    count_by((<Allocator>self).live_buffers, <int64_t>(placed.allocation_id != 0))
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
