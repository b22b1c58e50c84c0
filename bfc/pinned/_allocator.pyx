"""The caching host allocator: PyTorch's policy for pinned memory (PyTorch's behaviour, 4). Rules of this module:

- a change of the bookkeeping runs no Python and calls no driver, so that the GIL alone makes it atomic: no other
  thread, garbage collection or finaliser can run in the middle of it; without a GIL a turn at the allocator does, which
  every call from outside has;
- the sub-allocator and fences are called between two such changes; what may have changed meanwhile is read again.
"""

import gc
import sys
import weakref

cimport cython
from cpython.long cimport PyLong_CheckExact
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc.native.turns cimport TurnAt, counted, take_turns, unwatch_forks, watch_forks
from bfc.interpreter._process cimport exiting, is_finalizing, run_handlers
from bfc._core cimport ChunkHandle, Gauge
from bfc.buffers._arguments cimport address_from, alignment_from, size_from
from bfc.buffers._scopes cimport current_stream, scopes_open
from bfc.buffers._buffer cimport HOST_STREAM, NO_CONSUMER, Buffer, BufferOwner, become
from bfc.allocators._fences cimport FenceQueues, TakenMark, drop_done, some_marked, some_use, some_wait
from bfc.allocators._frees cimport report_faults, report_unraisable
from bfc.pinned._blocks cimport (
    CACHED, LEAVING, LIVE, NO_BLOCK, UNUSED, Block, Blocks, Range, Source, Timer, bucket_of,
)

from bfc import cuda
from bfc.allocators._fences import OVER as _OVER
from bfc.allocators._frees import VIEWED as _VIEWED
from bfc.drivers.cuda._driver import device_in_use
from bfc.drivers.opencl import queues as _queues
from bfc.errors import (
    ClosedError, InvalidPointerError, InvariantError, OutOfMemoryError, SettingsError, SubAllocatorError,
    never_set_up, out_of_host_memory,
)
from bfc.interpreter.stubs import SignatureOfStub
from bfc.pytorch import words
from bfc.pytorch.pinned_settings import PinnedSettings
from bfc.pytorch.rules import rules_of
from bfc.snapshots.refusal import with_report
from bfc.snapshots.snapshot import ChunkInfo, RegionInfo, Snapshot, Stats
from bfc.streams import stream_handle
from bfc.suballocators.base import SubAllocator, check_members
from bfc.suballocators.cuda import CUDASubAllocator
from bfc.suballocators.host import HostSubAllocator
from bfc.units import format_bytes, parse_bytes

cdef extern from "usage.hpp":
    pass

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

cdef enum:
    ALIGNMENT = 256
    ONE_QUEUE = 0               # all fences wait in one queue, whatever their streams are

#: What errors that do not belong to the caller are reported for.
_PUT_OFF = "memory that a PinnedAllocator keeps, and that empty_cache() tries to give back again"

#: id -> weak reference of each open allocator. Inserting and removing are atomic, for threads and finalisers.
_open = {}


def open_allocators():
    """The allocators that are open now.

    Returns
    -------
    list of PinnedAllocator
        In no particular order.
    """
    allocators = []
    # Copied in one step, since a finaliser may close an allocator at any line.
    for reference in list(_open.values()):
        allocator = reference()
        if allocator is not None:
            allocators.append(allocator)
    return allocators


def _checked(settings, now, torch):
    if not isinstance(settings, PinnedSettings):
        return now.apply(settings, torch=torch)
    settings.check_version(torch)
    return settings


def _source_of(sub_allocator):
    """(source, why there is no better one, or "")"""
    if sub_allocator is None:
        usable = cuda.is_available()
        if usable:
            return CUDASubAllocator(device_in_use(), kind="pinned"), ""
        return HostSubAllocator(), str(usable)
    if not isinstance(sub_allocator, SubAllocator):
        raise TypeError(f"the first argument is a sub-allocator, such as bfc.CUDASubAllocator(kind=\"pinned\"), or "
                        f"None, not {type(sub_allocator).__name__}")
    check_members(sub_allocator)
    kind = sub_allocator.device.kind
    if not sub_allocator.host_accessible and kind != "simulated":
        raise ValueError(f"a PinnedAllocator needs memory of the host, and that of {sub_allocator!r} is not: take "
                         f"bfc.CUDASubAllocator(kind=\"pinned\") or bfc.HostSubAllocator()")
    return sub_allocator, ""


cdef int require_registering(source, settings) except -1:
    if settings.pinned_use_cuda_host_register and not hasattr(source, "alloc_registered"):
        raise SettingsError(f"True is not possible: {source!r} cannot register memory with CUDA",
                            key="pinned_use_cuda_host_register", given="True", allowed="False",
                            hint="bfc.CUDASubAllocator(kind=\"pinned\")")
    return 0


cdef dict named(str name, tuple fields, tuple figures):
    return {f"{name}.{field}": figure for field, figure in zip(fields, figures)}


cdef dict gauge_fields(str name, Gauge gauge):
    return named(name, words.FIELDS, (gauge.current, gauge.peak, gauge.allocated, gauge.freed))


cdef dict timer_fields(str name, Timer timer):
    average = timer.total / timer.count if timer.count else 0.0
    return named(name, words.TIME_FIELDS, (timer.total, timer.longest, timer.shortest, timer.count, average))


cdef uint64_t aligned_to(object alignment) except 0:
    """The alignment that a block is asked for with."""
    return ALIGNMENT if alignment is None else max(<uint64_t>ALIGNMENT, alignment_from(alignment))


# -- what blocks wait for ---------------------------------------------------------------------------------------------

# In a garbage cycle a buffer may be finalised after its allocator: the collector must leave the dictionaries in place.
@cython.final
@cython.no_gc_clear
cdef class Events(FenceQueues):
    """Which streams use pinned memory, and the one queue that freed blocks wait in (PyTorch's behaviour, 4.3). A stream
    is (source, handle) here: it may be one of another device, whose sub-allocator gives its fences."""

    # -- streams ------------------------------------------------------------------------------------------------------

    cdef object source_of(self, stream):
        """The sub-allocator for a stream for which the caller named none: an OpenCL queue has another one than a CUDA
        stream."""
        cl = sys.modules.get("pyopencl")
        if cl is not None and isinstance(stream, getattr(cl, "CommandQueue", ())):
            return _queues.pinned_side()
        return self.source

    cdef object number_of(self, stream, source):
        """A stream's handle; 0 for None. The default stream has several handles; always returns the same one of them.
        """
        number = 0 if stream is None else stream_handle(stream)
        return 0 if number and number == source.default_stream_alias else number

    cdef int mark_user(self, int64_t allocation_id, uint64_t stream) except -1:
        """Marks a stream that has let go of the memory now: it may be destroyed before the memory is freed."""
        if self.source.asynchronous:
            # A stream with nothing queued waits in the queue as well, as upstream's events of idle streams do.
            fence = self.source.fence(stream) or _OVER
            self.marked.setdefault(allocation_id, []).append((ONE_QUEUE, fence))
            drop_done(self.marked[allocation_id])
        return 0

    cdef list fences_of(self, key):
        """What a freed block waits for: the earlier marks, and a new one for each stream that may have used the memory
        up to now."""
        cdef list fences = list(self.marked.get(key, ()))
        for source, stream in list(self.users.get(key, ())):
            if source.asynchronous:
                # One queue, whatever the stream is: PyTorch checks its events from the head, and the oldest holds back
                # all (case 88).
                fences.append((ONE_QUEUE, source.fence(stream) or _OVER))
        return fences

    cdef bint is_asking(self) except -1:
        """Whether this thread is inside of one of the queue's fences."""
        self.forget_dead_askers()
        return self.queues.taken_by(ONE_QUEUE) == PyThread_get_thread_ident()

    cdef object wait_elsewhere(self):
        """Waits for streams of other devices that use live blocks: the source waits only for its own device when it
        frees. Returns the first error that one raised, or None."""
        fault = None
        for used_on in list(self.users.values()):
            for source, stream in list(used_on):
                if source is self.source or not source.asynchronous:
                    continue
                try:
                    (source.fence(stream) or _OVER).wait()
                except Exception as error:
                    fault = fault or error
        return fault

    cdef bint synchronize(self) noexcept:
        """Waits until the device has nothing to do. Returns False if it cannot tell."""
        try:
            self.source.synchronize()
        except BaseException as error:
            if not isinstance(error, Exception):
                report_unraisable(error, _PUT_OFF)
            return False
        return True


# -- the allocator ----------------------------------------------------------------------------------------------------

@cython.final
cdef class PinnedBlock:
    """A live block of a `PinnedAllocator`: the `context` that `record_event` takes.

    It does not keep the block alive.

    Parameters
    ----------
    ptr : int
        Its first byte.
    nbytes : int
        The bytes that were asked for.
    allocation_id : int
        The number of the allocation.

    Attributes
    ----------
    ptr : int
        As given.
    nbytes : int
        As given.
    allocation_id : int
        As given.
    """

    __signature__ = SignatureOfStub()

    cdef readonly object ptr, nbytes, allocation_id

    def __init__(self, ptr, nbytes, allocation_id):
        self.ptr = ptr
        self.nbytes = nbytes
        self.allocation_id = allocation_id

    def __repr__(self):
        return f"<bfc.pinned.PinnedBlock {self.ptr:#x}, {self.nbytes} bytes>"


# The garbage collector must not clear the reference to the source before the blocks have been given back to it.
@cython.no_gc_clear
cdef class PinnedAllocator(BufferOwner):
    """PyTorch's caching allocator for pinned host memory, which a device can copy asynchronously.

    A request is rounded up to a power of two, and a freed block serves the next request of the same
    power. Blocks are never split or merged.

    Parameters
    ----------
    sub_allocator : SubAllocator, optional
        Where the blocks come from. None takes CUDA's pinned memory on the current device, whose
        primary context it retains. Without CUDA, None takes pageable host memory, which behaves the
        same but is copied more slowly: `is_pinned` is False then, and `repr` says why.
    settings : str or PinnedSettings, optional
        The pinned_* settings of PYTORCH_CUDA_ALLOC_CONF. Others are checked and ignored.
    torch : str, optional
        The version of PyTorch whose rules it follows, as in `bfc.CachingAllocator`.

    Attributes
    ----------
    torch : str
        As given.

    Raises
    ------
    SettingsError
        If `settings` is malformed or out of range.
    TypeError
        If an argument has the wrong type.
    ValueError
        If bfc does not have the rules of the version `torch`, or the sub-allocator's memory cannot be
        reached from the host.
    DriverError
        If the device fails.
    RuntimeError
        If `__init__` is called twice.

    Notes
    -----
    A device may still use a block when it is freed. Declare such work with `record_stream` or
    `record_event`: the block is not reused before it has finished. All events wait in one queue. One
    that has not finished holds back those behind it, also events of other streams.

    Any thread may use it. Peaks are true peaks; PyTorch's are sums of the peaks of each size.
    Source: `CachingHostAllocatorImpl`, PyTorch's behaviour, 4.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> ptr = allocator.allocate_raw(40_960)
    >>> allocator.allocated_size(ptr)
    65536
    >>> allocator.deallocate_raw(ptr)
    >>> allocator.allocate_raw(50_000) == ptr
    True
    """

    cdef object rules               # of PyTorch's version: a `Rules`
    cdef object applied             # the settings
    cdef object __weakref__
    cdef object no_cuda             # why there is only pageable memory, if None was given; "" otherwise
    cdef object round_above         # None, or the largest request that becomes a power of two
    cdef object cached_at_most      # None, or the largest block that is kept
    cdef bint is_closed, is_abandoned

    cdef int64_t buffers            # that own a block

    cdef Blocks blocks
    cdef Source source              # where they come from
    cdef Events events              # which streams use them, and what waits for that

    def __cinit__(self, *args, **kwargs):
        watch_forks(self)
        self.blocks = Blocks()
        self.source = self.blocks.source
        self.events = Events()
        self.is_closed = True

    def __dealloc__(self):
        unwatch_forks(self)

    def __init__(self, sub_allocator=None, settings="", *, torch="2.15"):
        if self.sub_allocator is not None:
            raise RuntimeError("an allocator is set up once: make another")
        self.rules = rules_of(torch)
        checked = _checked(settings, PinnedSettings(), torch)
        source, self.no_cuda = _source_of(sub_allocator)
        if not self.no_cuda:
            require_registering(source, checked)
        self.apply(checked)
        self.sub_allocator = self.source.sub_allocator = self.events.source = source
        self.device = source.device
        self.host_accessible = source.host_accessible
        self.is_closed = False
        _open[id(self)] = weakref.ref(self)

    @property
    def torch(self):
        """The version of PyTorch whose rules it follows, such as "2.15"."""
        if self.rules is None:
            raise never_set_up()
        return self.rules.version

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def settings(self):
        """The settings' text that was applied last."""
        return self.applied.text

    cdef int apply(self, settings) except -1:
        self.applied = settings
        self.round_above = settings.pinned_max_round_threshold
        self.cached_at_most = settings.pinned_max_cached_size
        return 0

    def set_settings(self, text):
        """Apply new settings. Those that the text does not name stay.

        Parameters
        ----------
        text : str or PinnedSettings
            The pinned_* settings of PYTORCH_CUDA_ALLOC_CONF. Blocks that exist are still given back the
            way they were made, and a reserve that exists stays.

        Raises
        ------
        SettingsError
            If the text is malformed or out of range. Nothing has changed then.
        TypeError
            If `text` is neither of the two.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB"))
        >>> allocator.set_settings("pinned_max_cached_size_mb:16")
        >>> allocator.settings
        'pinned_max_cached_size_mb:16'
        """
        checked = _checked(text, self.applied, self.rules.version)
        if not self.no_cuda:
            require_registering(self.sub_allocator, checked)
        self.apply(checked)

    # -- what it is ---------------------------------------------------------------------------------------------------

    @property
    def is_pinned(self):
        """True if the memory is pinned, so that a CUDA device copies it directly."""
        return self.device.kind == "cuda_host"

    @property
    def closed(self):
        """True once `close()` has been called."""
        return self.is_closed

    def __repr__(self):
        source = f"pageable, since {self.no_cuda}" if self.no_cuda else repr(self.sub_allocator)
        return f"<bfc.PinnedAllocator, {format_bytes(self.blocks.allocated_bytes.current)} taken: {source}>"

    # -- allocate -----------------------------------------------------------------------------------------------------

    def allocate_raw(self, nbytes, stream=None, *, alignment=None):
        """Allocate `nbytes` bytes and return their address.

        Parameters
        ----------
        nbytes : int
            The size in bytes, from 0 to 2**63 - 1.
        stream : int, stream object or None, optional
            A stream that will use the memory: it is recorded, as by `record_stream`.
        alignment : int, optional
            A power of two that the address must be a multiple of, such as 4096 for O_DIRECT. A cached block
            that lies so is used again; else the sub-allocator is asked for one.

        Returns
        -------
        int
            The address; 0 for 0 bytes.

        Raises
        ------
        OutOfMemoryError
            If there is no cached block, and the sub-allocator has no memory.
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is negative or above 2**63 - 1, or if `alignment` is not a power of two.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: asks the device about the oldest event, if there is one; no other driver call on a hit.
        Source: `CachingHostAllocatorImpl::allocate`, PyTorch's behaviour, 4.2.
        """
        cdef uint32_t handle = self.take(size_from(nbytes), aligned_to(alignment))
        if handle == NO_BLOCK:
            return 0
        cdef object ptr
        try:
            ptr = self.blocks.records[handle].ptr
        except MemoryError:     # nobody has used the block, nor can anybody
            self.blocks.records[handle].allocation_id = 0
            self.retire(handle)
            raise
        if stream is not None or scopes_open.load():
            self.used_first(handle, stream)
        return ptr

    def allocate(self, nbytes, stream=None, *, alignment=None):
        """Allocate `nbytes` bytes as a `Buffer`, which frees itself.

        Parameters
        ----------
        nbytes : int or str
            The size in bytes, or a text such as "3 MiB".
        stream : int, stream object or None, optional
            As in `allocate_raw`.
        alignment : int, optional
            As in `allocate_raw`.

        Returns
        -------
        Buffer
            The allocation.

        Raises
        ------
        OutOfMemoryError
            If there is no cached block, and the sub-allocator has no memory.
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is malformed, negative or above 2**63 - 1.
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
        >>> with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
        ...     bytes(allocator.allocate(4).from_host(b"abcd"))
        b'abcd'
        """
        cdef uint64_t size = size_from(nbytes) if PyLong_CheckExact(nbytes) else parse_bytes(nbytes)
        cdef Buffer buffer = Buffer.__new__(Buffer)
        return self.into_buffer(buffer, self.take(size, aligned_to(alignment)), size, stream)

    def try_allocate(self, nbytes, stream=None, *, alignment=None):
        """Allocate like `allocate`, but return None where that raises OutOfMemoryError.

        Parameters
        ----------
        nbytes : int or str
            The size in bytes, or a text such as "3 MiB".
        stream : int, stream object or None, optional
            As in `allocate_raw`.
        alignment : int, optional
            As in `allocate_raw`.

        Returns
        -------
        Buffer or None
            None if there is no cached block, and the sub-allocator has no memory.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is malformed, negative or above 2**63 - 1.
        MemoryError
            If the host has no memory for the bookkeeping.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        It tries all that `allocate` tries. Cost: as `allocate`.

        Examples
        --------
        >>> import bfc
        >>> with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
        ...     allocator.try_allocate("100 MiB") is None
        True
        """
        cdef uint64_t size = size_from(nbytes) if PyLong_CheckExact(nbytes) else parse_bytes(nbytes)
        cdef Buffer buffer = Buffer.__new__(Buffer)
        cdef uint32_t handle
        try:
            handle = self.try_to_take(size, aligned_to(alignment))
        except OutOfMemoryError:        # of the reserve
            return None
        if handle == NO_BLOCK and size:
            return None
        return self.into_buffer(buffer, handle, size, stream)

    @cython.final
    cdef inline Buffer into_buffer(self, Buffer buffer, uint32_t handle, uint64_t size, stream):
        cdef uint64_t on = HOST_STREAM
        if handle == NO_BLOCK:
            become(buffer, self, 0, 0, 0, 0, on)
            return buffer
        cdef Block* block = &self.blocks.records[handle]
        become(buffer, self, handle, block.allocation_id, block.ptr, <Py_ssize_t>size, on)
        self.buffers += 1
        if stream is not None or scopes_open.load():
            buffer.made_on = self.used_first(handle, stream)
        return buffer

    cdef uint64_t used_first(self, uint32_t handle, stream) except? 0:
        """Records the stream of an allocation, if there is one, and returns its handle. If it is not a stream, the
        block is freed again."""
        cdef int64_t allocation_id = self.blocks.records[handle].allocation_id
        try:
            if stream is None:
                stream = current_stream()
            if stream is None:
                return HOST_STREAM
            source = self.events.source_of(stream)
            number = self.events.number_of(stream, source)
            self.events.uses(allocation_id, (source, number), stream)
            return number if source is self.sub_allocator else HOST_STREAM
        except BaseException:
            self.free_block(handle, allocation_id)
            raise

    @cython.final
    cdef inline uint32_t take(self, uint64_t nbytes, uint64_t alignment) except? 0xFFFFFFFE:
        """A live block for `nbytes` bytes; NO_BLOCK for 0."""
        cdef uint32_t handle = self.try_to_take(nbytes, alignment)
        if handle == NO_BLOCK and nbytes:
            raise self.refusal_of(nbytes, f"last for {format_bytes(self.rounded(nbytes))}",
                                  "freeing something first, or pinned_max_round_threshold_mb: above it a request is "
                                  "not rounded up to a power of two")
        return handle

    @cython.final
    cdef inline uint32_t try_to_take(self, uint64_t nbytes, uint64_t alignment) except? 0xFFFFFFFE:
        """A live block for `nbytes` bytes; NO_BLOCK for 0, and where there is no room."""
        cdef uint32_t handle
        cdef uint64_t size
        if self.is_closed:
            raise ClosedError("this allocator is closed")
        if nbytes == 0:
            return NO_BLOCK
        if some_wait(self.events):
            self.drain()
        size = self.rounded(nbytes)
        handle = self.blocks.pop(size, nbytes, alignment)
        if handle == NO_BLOCK:
            handle = self.take_after_miss(size, nbytes, alignment)
        return handle

    cdef uint64_t rounded(self, uint64_t nbytes) except 0:
        if self.round_above is not None or self.cached_at_most is not None:
            return min(self.applied.round_size(nbytes), <uint64_t>1 << 63)
        return <uint64_t>1 << bucket_of(nbytes)

    cdef uint32_t take_after_miss(self, uint64_t size, uint64_t nbytes, uint64_t alignment) except? 0xFFFFFFFE:
        """Asks the source for a block. If it has no room, first gives back what is cached and asks again, then waits
        for the streams that use freed blocks, and does the same with those; upstream gives up at once. NO_BLOCK: there
        is no room."""
        cdef int attempt
        cdef uint32_t handle
        cdef Range block
        for attempt in range(3):
            if attempt == 2:
                if self.buffers:
                    gc.collect()        # buffers in reference cycles
                fault = self.wait_for_queue()
                if fault is not None:
                    report_unraisable(fault, _PUT_OFF)
                handle = self.blocks.pop(size, nbytes, alignment)
                if handle != NO_BLOCK:
                    return handle
            if attempt:
                self.give_back_cached()
            # Rounded up to a power of two, the largest requests are more than a signed size can say.
            if size < <uint64_t>1 << 63 and self.ask(size, alignment, &block):
                return self.heard(self.add(block, size, nbytes))
        return NO_BLOCK

    cdef object refusal_of(self, uint64_t nbytes, str refused_by, str advice):
        """The error of a request without room."""
        error = OutOfMemoryError(nbytes, self.blocks.active_bytes.current, self.blocks.allocated_bytes.current,
                                 self.sub_allocator.total_bytes, self.blocks.largest_cached(),
                                 refused=f"{self.sub_allocator!r}, asked {refused_by}", advice=(advice,))
        return with_report(error, self._look)

    cdef uint32_t heard(self, uint32_t handle) except? 0xFFFFFFFE:
        """The same block, after running the signal handlers that were deferred. If one raises, the block is freed."""
        cdef int64_t allocation_id = self.blocks.records[handle].allocation_id
        try:
            run_handlers()
        except BaseException:
            if self.is_live(handle, allocation_id):
                self.free_block(handle, allocation_id)
            raise
        return handle

    cdef bint ask(self, uint64_t size, uint64_t alignment, Range* block) except -1:
        """Takes memory from the reserve, or asks the source. Returns whether there was room."""
        # Pieces lie one behind the other, so a larger alignment would leave gaps that nobody uses.
        if alignment <= ALIGNMENT and self.applied.pinned_reserve_segment_size:
            if self.source.reserve.nbytes == 0:
                self.take_reserve(size)
            if self.source.cut(size, block):
                return True
        return self.ask_source(size, alignment, block)

    cdef bint ask_source(self, uint64_t size, uint64_t alignment, Range* block) except -1:
        threads = self.applied.pinned_num_register_threads if self.applied.pinned_use_cuda_host_register else None
        return self.source.ask(size, alignment, threads, block)

    cdef int take_reserve(self, uint64_t size) except -1:
        cdef Range whole
        wanted = self.applied.pinned_reserve_segment_size
        if not self.ask_source(min(wanted, (<uint64_t>1 << 63) - 1), ALIGNMENT, &whole):
            raise self.refusal_of(size, f"for a reserve of {format_bytes(wanted)}",
                                  "a smaller pinned_reserve_segment_size_mb")
        if self.source.reserve.nbytes == 0 and not self.is_closed:
            self.source.reserve = whole
        else:                   # another thread was faster
            self.source.give_back_block(whole)
        if self.is_closed:
            raise ClosedError("this allocator was closed while it asked for memory")
        return 0

    cdef uint32_t add(self, Range memory, uint64_t size, uint64_t nbytes) except? 0xFFFFFFFE:
        """A new live block."""
        cdef uint32_t handle = NO_BLOCK
        cdef cbool overlaps = self.blocks.overlaps(memory.ptr, max(memory.nbytes, size))
        if not self.is_closed and not overlaps:
            handle = self.blocks.add(memory, size, nbytes)
        if handle != NO_BLOCK:
            return handle
        if overlaps:
            raise SubAllocatorError(f"{self.sub_allocator!r}.alloc returned {memory.ptr:#x}, {memory.nbytes} bytes, "
                                    f"which overlaps a block that it gave before: not used, and not given back")
        if memory.nbytes:
            self.source.give_back_block(memory)
        if self.is_closed:
            raise ClosedError("this allocator was closed while it asked for memory")
        raise out_of_host_memory()

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
            If a stream was recorded for it, and the device fails to mark that stream.

        Notes
        -----
        After an error the allocation is still live. Cost: an event for each stream that was recorded.
        Source: `CachingHostAllocatorImpl::free`, PyTorch's behaviour, 4.3.
        """
        cdef uint64_t address = address_from(ptr)
        if address == 0:
            return
        cdef uint32_t handle = self.blocks.live_at(address)
        if self.blocks.records[handle].exported:
            raise BufferError(_VIEWED)
        self.free_block(handle, self.blocks.records[handle].allocation_id)

    cdef int free_block(self, uint32_t handle, int64_t allocation_id) except -1:
        """Frees a live block: at once if no stream was recorded, otherwise after one event for each. If the device
        fails, the block stays live."""
        if some_use(self.events) or some_marked(self.events):
            return self.free_used(handle, allocation_id)
        self.blocks.records[handle].allocation_id = 0
        self.retire(handle)
        return 0

    cdef int free_used(self, uint32_t handle, int64_t allocation_id) except -1:
        cdef object key = allocation_id     # made before anything changes: the host may have no memory for it
        self.blocks.records[handle].allocation_id = 0
        # Before fences are made, which may run Python: a second free of the block is an error from here on.
        self.blocks.records[handle].state = LEAVING
        try:
            fences = self.events.fences_of(key)
            if self.is_closed:
                return 0
            self.events.wait_behind(handle, fences)
        except BaseException:
            if not self.is_closed:
                self.blocks.records[handle].allocation_id = allocation_id
                self.blocks.records[handle].state = LIVE
            raise
        if not fences:
            self.retire(handle)
        # Last: an interrupt before leaves all uses known, and the block live.
        self.events.forget(key)
        return 0

    cdef void retire(self, uint32_t handle) noexcept:
        """Caches a block that nobody uses any more, or gives it back to the source if it is too large for that."""
        self.blocks.shelve(handle)
        if self.cached_at_most is not None:
            self.give_back_too_large(handle)

    cdef void give_back_too_large(self, uint32_t handle) noexcept:
        """Gives a block back that is on top of its stack."""
        try:
            if self.blocks.records[handle].size > self.cached_at_most:
                self.blocks.drop_top(handle)
                self.source.give_back()
        except BaseException as error:
            report_unraisable(error, _PUT_OFF)

    # -- events -------------------------------------------------------------------------------------------------------

    cdef int drain(self) except -1:
        """Makes the frees that are due: caches the blocks at the head of the queue that their streams have finished
        with. An error of a fence is reported like that of a finaliser, as it does not belong to the caller; its block
        stays in use until empty_cache() or close() queries the fence again."""
        cdef TakenMark reached
        cdef list faults = []
        while self.events.next_reached(ONE_QUEUE, faults, False, &reached):
            # the allocator may have closed meanwhile
            if self.events.has_passed(&reached) and self.blocks.records[reached.handle].state == LEAVING:
                self.retire(reached.handle)
            self.events.drop_mark(&reached.mark)
        return report_faults(faults, _PUT_OFF)

    cdef object wait_for_queue(self):
        """Waits for all that is queued. Returns the first error that a fence raised, or None; `drain` queries that
        fence again."""
        cdef list faults = []
        # A fence that is asked further up this stack would be waited for by itself.
        if not self.events.is_asking():
            self.events.wait_for_all(faults)
        self.drain()
        return faults[0] if faults else None

    cdef int try_again(self) except -1:
        """Retries what has failed: fences, and the frees of finalisers."""
        cdef size_t handle
        self.events.try_stuck_again(True)   # ahead of what has come since: they are the oldest of the queue
        for handle in range(self.blocks.records.size()):
            if self.blocks.records[handle].unfreed and self.blocks.records[handle].state == LIVE:
                self.blocks.records[handle].unfreed = False
                self.free_from_finaliser(<uint32_t>handle, self.blocks.records[handle].allocation_id)
        return 0

    def record_event(self, ptr, context, stream, *, source=None):
        """Tell the allocator that a stream uses a block, as a framework does.

        Once freed, the block is not reused before the work that was queued on that stream at the time of
        the free has finished.

        Parameters
        ----------
        ptr : int
            An address of the block: its first byte, or any of its bytes if `context` is the block's.
        context : PinnedBlock, Buffer or object
            The block, from `find`, or its buffer. Anything else is ignored.
        stream : int or stream object
            A stream of this allocator's device, or of the device of `source`.
        source : SubAllocator, optional
            The sub-allocator of the device that the stream is on. A `pyopencl.CommandQueue` needs none.

        Returns
        -------
        bool
            True if there is such a block.

        Raises
        ------
        TypeError
            If `stream` is not a stream.
        ValueError
            If a handle is negative or above 2**64 - 1.

        Notes
        -----
        Cost: no driver call. Source: `CachingHostAllocatorImpl::record_event`, PyTorch's behaviour, 4.3.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> ptr = allocator.allocate_raw(4096)
        >>> allocator.record_event(ptr, None, 7), allocator.record_event(ptr + 8, None, 7)
        (True, False)
        """
        cdef uint64_t address
        cdef uint32_t handle
        cdef int64_t allocation_id
        source = self.events.source_of(stream) if source is None else source
        number = self.events.number_of(stream, source)
        # The context first, as upstream's record_event: an address inside a block is then as good as its start.
        allocation_id = self.known_by(context)
        if allocation_id == 0:
            address = address_from(ptr)
            handle = self.blocks.holder_of(address)
            if handle == NO_BLOCK or self.blocks.records[handle].ptr != address:
                return False
            allocation_id = self.blocks.records[handle].allocation_id   # 0: it is not live
        if allocation_id:
            self.events.uses(allocation_id, (source, number), stream)
        return allocation_id != 0

    def mark_event(self, block, stream):
        """Record a stream that uses a block now, and will not use it again.

        Unlike `record_event` it marks the stream at once: the stream may be destroyed before the block is
        freed. If it cannot be marked, the call waits for the whole device.

        Parameters
        ----------
        block : PinnedBlock, Buffer or object
            The block, from `find`, or its buffer.
        stream : int or stream object
            A stream of this allocator's device.

        Returns
        -------
        bool
            True if there is such a block.

        Raises
        ------
        TypeError
            If `stream` is not a stream.
        ValueError
            If a handle is negative or above 2**64 - 1.

        Notes
        -----
        Cost: an event.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> ptr = allocator.allocate_raw(4096)
        >>> allocator.mark_event(allocator.find(ptr + 8), 7), allocator.mark_event(None, 7)
        (True, False)
        """
        cdef int64_t allocation_id = self.known_by(block)
        cdef uint64_t number = self.events.number_of(stream, self.sub_allocator)
        if allocation_id:
            self.consumer_left(allocation_id, number)
        return allocation_id != 0

    cdef int64_t known_by(self, context) except -1:
        """The live allocation that a context belongs to, or 0."""
        cdef Buffer buffer
        cdef uint32_t handle
        if isinstance(context, Buffer):
            buffer = (<Buffer>context).memory()
            return buffer.allocation_id if buffer.owner is self and buffer.nbytes and self.is_live(
                buffer.handle, buffer.allocation_id) else 0
        if not isinstance(context, PinnedBlock):
            return 0
        handle = self.blocks.holder_of(context.ptr)
        if handle == NO_BLOCK or self.blocks.records[handle].allocation_id != context.allocation_id:
            return 0
        return self.blocks.records[handle].allocation_id

    def record_stream(self, ptr_or_buffer, stream, *, source=None):
        """Tell the allocator that a stream uses an allocation: `record_event` for addresses and buffers.

        Parameters
        ----------
        ptr_or_buffer : int or Buffer
            A live allocation: its address, its buffer, or a view of that. One of 0 bytes is ignored.
        stream : int or stream object
            As in `record_event`.
        source : SubAllocator, optional
            As in `record_event`.

        Raises
        ------
        InvalidPointerError
            If no live allocation of this allocator is there.
        ClosedError
            If it is a buffer of this allocator that was freed.
        TypeError
            If `ptr_or_buffer` is neither an address nor a buffer, or `stream` is not a stream.
        ValueError
            If a handle is negative or above 2**64 - 1.
        """
        if isinstance(ptr_or_buffer, Buffer):
            if len(ptr_or_buffer) == 0:
                return
            if self.record_event(0, ptr_or_buffer, stream, source=source):
                return
            if (<Buffer>ptr_or_buffer).owner is not self:
                raise InvalidPointerError("this buffer comes from another allocator")
            raise BufferOwner.why_not(self, (<Buffer>ptr_or_buffer).handle, (<Buffer>ptr_or_buffer).allocation_id)
        elif address_from(ptr_or_buffer) and not self.record_event(ptr_or_buffer, None, stream, source=source):
            self.blocks.live_at(address_from(ptr_or_buffer))

    # -- giving back --------------------------------------------------------------------------------------------------

    def empty_cache(self):
        """Give every block that nobody uses back to the sub-allocator, without waiting for streams.

        Returns
        -------
        int
            The bytes of these blocks. Pieces of the reserve are forgotten, and lost until `close()`.

        Raises
        ------
        SubAllocatorError
            If the sub-allocator fails to take a block back. The next call offers it again.

        Notes
        -----
        Source: `CachingHostAllocatorImpl::empty_cache`, PyTorch's behaviour, 4.4.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.allocate(1000).free()
        >>> allocator.empty_cache()
        1024
        """
        before = self.blocks.allocated_bytes.current
        self.try_again()
        # What its streams have left is free. Nothing is waited for, as in upstream (case 90).
        self.drain()
        self.source.offer_unreturned_again()
        self.blocks.drop_cached()
        given_back = before - self.blocks.allocated_bytes.current
        self.source.give_back()
        return given_back

    cdef int give_back_cached(self) except -1:
        """Gives what is cached back, before the source is asked again. What it does not take is kept for another
        try."""
        try:
            self.blocks.drop_cached()
            self.source.give_back()
        except SubAllocatorError as error:
            report_unraisable(error, _PUT_OFF)
        return 0

    def close(self):
        """Give every block back, live ones and the reserve too.

        Addresses and buffers must not be used afterwards. Closing twice does nothing.

        Raises
        ------
        BufferError
            If another object still holds a view of the memory. The allocator stays open then.
        SubAllocatorError
            If a stream failed, or the sub-allocator fails to take a block back. The allocator is closed
            all the same; closing it again offers those blocks again.

        Notes
        -----
        Cost: waits for the streams that use freed or live blocks.
        """
        fault = None
        if counted(self.exports) == 0 and not self.is_closed:
            self.try_again()
            fault = self.wait_for_queue()
            fault_elsewhere = self.events.wait_elsewhere()     # also after a fault: these streams use live blocks
            fault = fault or fault_elsewhere
        if counted(self.exports):
            raise BufferError(f"{self.exports} view(s) of this memory are in use (arrays, memoryviews): delete them, "
                              f"then close")
        self.is_closed = True
        # All at once, and without Python: a finaliser that comes in between finds no block.
        self.blocks.abandon_all()
        self.source.leave_reserve()
        self.source.offer_unreturned_again()
        self.events.clear()
        _open.pop(id(self), None)
        self.source.offer_rejected_again()
        # Here blocks may be live, so the device is waited for.
        self.source.give_back(idle=False)
        if fault is not None:
            raise fault     # even if the device fails, its memory is given back

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __del__(self):
        if counted(exiting) or self.sub_allocator is None or self.has_nothing():
            return
        if counted(self.exports):
            self.is_abandoned = True    # a view is garbage, too: the last one to go closes the allocator
            return
        try:
            self.close()
        finally:
            if not self.has_nothing():
                self.close()    # it may have failed because the host had no memory

    cdef bint has_nothing(self) noexcept:
        return self.is_closed and self.source.has_nothing()

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def reset_peak_stats(self):
        """Restart the peaks from the current values, and forget the longest and shortest times."""
        self.blocks.restart_peaks()
        self.source.alloc_time.longest = self.source.alloc_time.shortest = 0
        self.source.free_time.longest = self.source.free_time.shortest = 0

    def reset_accumulated_stats(self):
        """Restart the counts of what was allocated and freed, and the sums of times, from 0."""
        self.blocks.restart_totals()
        self.source.alloc_time.total = self.source.alloc_time.count = 0
        self.source.free_time.total = self.source.free_time.count = 0

    def find(self, address):
        """The live block that an address lies in.

        Parameters
        ----------
        address : int
            The first byte of the block, or any other.

        Returns
        -------
        PinnedBlock or None
            None if there is no such block.

        Raises
        ------
        TypeError
            If `address` is not an int.
        InvalidPointerError
            If `address` is negative or above 2**64 - 2.
        """
        cdef uint32_t handle = self.blocks.holder_of(address_from(address))
        if handle == NO_BLOCK or self.blocks.records[handle].state != LIVE:
            return None
        cdef Block block = self.blocks.records[handle]
        return PinnedBlock(block.ptr, block.requested, block.allocation_id)

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
        return self.blocks.records[self.blocks.live_at(address_from(ptr))].requested

    def allocated_size(self, ptr):
        """The bytes of the block at an address.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.

        Returns
        -------
        int
            The request, rounded up to a power of two.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        """
        return self.blocks.records[self.blocks.live_at(address_from(ptr))].size

    def host_memory_stats(self):
        """PyTorch's figures by PyTorch's keys, as `torch.cuda.host_memory_stats()` returns them.

        Returns
        -------
        dict of str to int or float
            Bytes, counts and microseconds. "allocations" and "allocated_bytes" count the blocks that the
            allocator owns, in use or cached; "active_requests" and "active_bytes" those in use, or freed
            but still used by a stream. Each has "current", "peak", "allocated" and "freed". The times are
            those of the calls to the sub-allocator.

        Notes
        -----
        Cost: O(1), no device call. Source: PyTorch's behaviour, 4.7.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate(40_960)
        >>> stats = allocator.host_memory_stats()
        >>> stats["active_bytes.current"], stats["num_host_alloc"]
        (65536, 1)
        """
        allocations, allocated_bytes, active_requests, active_bytes = words.HOST_GROUPS
        alloc_time, free_time = words.HOST_TIMES
        cdef Blocks blocks = self.blocks
        fields = (
            gauge_fields(active_bytes, blocks.active_bytes) | gauge_fields(active_requests, blocks.active_requests)
            | gauge_fields(allocated_bytes, blocks.allocated_bytes) | gauge_fields(allocations, blocks.allocations)
            | timer_fields(alloc_time, self.source.alloc_time) | timer_fields(free_time, self.source.free_time)
            | {"num_host_alloc": blocks.allocations.allocated, "num_host_free": blocks.allocations.freed}
        )
        return dict(sorted(fields.items()))

    def _look(self):
        """The blocks as a snapshot, for an error: each is a region with one chunk."""
        cdef vector[Block] blocks
        cdef Block block
        # a copy: the objects made below may run anything
        blocks.assign(self.blocks.records.begin(), self.blocks.records.end())
        found = []
        for block in blocks:
            if block.state == UNUSED:
                continue
            in_use = block.state != CACHED
            state = "free" if not in_use else "in use" if block.state == LIVE else "waiting"
            chunk = ChunkInfo(block.ptr, block.size, block.requested if in_use else 0, block.allocation_id or -1, state)
            found.append(RegionInfo(block.ptr, block.size, (chunk,)))
        stats = Stats(bytes_in_use=self.blocks.active_bytes.current, pool_bytes=self.blocks.allocated_bytes.current)
        return Snapshot(str(self.device), stats, tuple(sorted(found, key=lambda region: region.ptr)))

    def check(self):
        """Recount the bookkeeping from nothing.

        Raises
        ------
        InvariantError
            If it contradicts itself, which is a bug in bfc.

        Notes
        -----
        Cost: O(n) in the blocks.
        """
        cdef int64_t[4] sums = [0, 0, 0, 0]
        fault = self.blocks.recount(sums)
        if fault is not None:
            raise InvariantError(fault)

    # -- what a buffer asks of its owner ------------------------------------------------------------------------------

    cdef bint is_live(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        cdef TurnAt turn
        turn.take(self)
        return self.blocks.is_live(handle, allocation_id)

    cdef bint sync_exported(self, ChunkHandle handle, int64_t allocation_id, int64_t* exports) noexcept:
        cdef TurnAt turn
        turn.take(self)
        cdef bint live = self.is_live(handle, allocation_id)
        if live:
            self.blocks.records[handle].exported = counted(exports[0]) > 0
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

    cdef int free_handle(self, ChunkHandle handle, int64_t allocation_id) except -1:
        cdef TurnAt turn
        turn.take(self)
        if counted(exiting) and is_finalizing():
            return 0    # names of Python's modules may be gone; functions of `atexit` and daemon threads come before
        if self.is_live(handle, allocation_id):
            self.free_block(handle, allocation_id)
            self.buffers -= 1
        elif not self.is_closed:
            raise InvalidPointerError("this buffer's memory was freed already, through its address")
        return 0

    cdef void free_handle_from_finaliser(self, ChunkHandle handle, int64_t allocation_id) noexcept:
        cdef TurnAt turn
        turn.take(self)
        if counted(exiting):
            return
        self.buffers -= 1
        if self.is_live(handle, allocation_id):
            self.free_from_finaliser(handle, allocation_id)

    cdef void free_from_finaliser(self, uint32_t handle, int64_t allocation_id) noexcept:
        """Frees a block for a finaliser. If the device fails, that is reported, and empty_cache() tries again."""
        try:
            self.free_block(handle, allocation_id)
        except BaseException as error:
            # The block is live still, and has nobody who would free it again.
            self.blocks.records[handle].unfreed = True
            report_unraisable(error, _PUT_OFF)

    cdef uint64_t hand_to_stream(self, ChunkHandle handle, int64_t allocation_id, uint64_t made_on, consumer) except? 0:
        cdef TurnAt turn
        turn.take(self)
        cdef uint64_t on = self.events.number_of(consumer, self.sub_allocator)
        if on == made_on or not self.is_live(handle, allocation_id):
            return NO_CONSUMER
        if made_on != HOST_STREAM and self.sub_allocator.asynchronous:
            self.sub_allocator.order(made_on, on)
        return on

    cdef void consumer_left(self, int64_t allocation_id, uint64_t stream) noexcept:
        """Asks for a fence on a consumer's stream now, as the stream may be destroyed after the consumer has dropped
        the memory. If that fails, waits for the whole device."""
        cdef TurnAt turn
        turn.take(self)
        try:
            self.events.mark_user(allocation_id, stream)
        except BaseException as error:
            if not self.events.synchronize():
                self.events.uses(allocation_id, (self.sub_allocator, stream), None)
                report_unraisable(error, _PUT_OFF)
            elif not isinstance(error, Exception):
                report_unraisable(error, _PUT_OFF)


take_turns(PinnedAllocator, b"")
