"""Allocators: what a user holds. Rules of this module (docs/design/threads.md has the reasons):

- the lock is held only around calls into the pool, which run no Python and call no device;
- a sub-allocator is called with no lock held, after the bytes asked for have been set aside from the limit;
- a `nogil` method takes the GIL only to call a sub-allocator that is Python, and never if `without_gil` is set.
"""

import gc
import time

cimport cython
from cpython.exc cimport PyErr_Clear
from cpython.long cimport PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport uintptr_t
from libc.string cimport memset

from bfc.interpreter._exit cimport exiting
from bfc.interpreter._signals cimport run_handlers
from bfc._core cimport (
    HISTORY_ALLOC, INDEXED, NO_CHUNK, NO_HOST_MEMORY, NO_LANE, TRACED, USED_ELSEWHERE, Chunk, Tracing,
)
from bfc.buffers._arguments cimport alignment_from, size_from, sizes_from, small_int
from bfc.buffers._current cimport current_stream, scopes_open
from bfc.buffers._owners cimport owner_here, owners_used
from bfc.buffers._buffer cimport HOST_STREAM, Buffer, become
from bfc.allocators._lock cimport acquire_lock
from bfc.allocators._source cimport ADDED, OVERLAPS, Taken
from bfc.allocators._fences cimport some_wait
from bfc.allocators._frees cimport BETWEEN_OTHERS, is_quiet
from bfc.allocators._tags cimport TAG_POOLS, Tagged

from bfc.errors import ClosedError, SubAllocatorError, out_of_host_memory
from bfc.snapshots.refusal import out_of_memory
from bfc.suballocators.base import SubAllocator, check_members, resolve_limit
from bfc.units import format_bytes, parse_bytes

cdef extern from "debug.h":
    const int BFC_DEBUG

cdef extern from "history.hpp":
    pass

cdef extern from "nothrow.hpp" namespace "bfc" nogil:
    cbool try_store[K, T](cmap[K, T]& items, K& key, T& item)

cdef extern from "wait.hpp" namespace "bfc" nogil:
    bint is_finalizing()

cdef extern from "Python.h":
    PyObject* PyLong_FromUnsignedLongLong(unsigned long long number)    # NULL where there is no memory

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
    _STREAMS_REMEMBERED = 1024


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


cdef object closed():
    return ClosedError("this allocator is closed")


@cython.no_gc_clear
cdef class Allocator(Tagged):
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
            self.set_home_stream(stream)
        except BaseException:
            self.sub_allocator = self.fences.source = self.source.sub_allocator = None
            raise
        self.strict = strict
        self.device = sub_allocator.device
        self.host_accessible = sub_allocator.host_accessible
        self.source_is_python = self.source.native == NULL
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
        return 0

    cdef bint is_unordered(self, uint64_t stream) except -1:
        return self.may_be_unordered and stream != 0 and not self.sub_allocator.is_ordered(stream)

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
        return NO_CHUNK

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

    cdef int give_up_ranges(self) except -1:
        return 0

    cdef int64_t mark_release(self) except -1:
        """The number that a history has for what goes back because the program empties the cache; 0: none is kept."""
        return 0

    cdef uint64_t release_pages(self) except? 0xFFFFFFFFFFFFFFFF:
        """Gives back what is mapped and free. Returns the bytes."""
        return 0

    cdef object against_pieces(self):
        """The policy's remedies against fragmentation that are not in use, for the advice in an OutOfMemoryError."""
        return ""

    cdef int poll(self) except -1:
        return self.catch_up()

    cdef int was_refused(self, Request* request) except -1:
        return 0

    cdef bint plays_alone(self) except -1:
        return True

    cdef int check_tag(self, Request* request) except -1:
        return self.refuse_if_asleep(request.tag)

    cdef int set_freed_before(self, Request* request, object freed_before) except -1:
        raise TypeError("freed_before belongs to a BFCAllocator's timing counter")

    cdef int allocated(self, Placement* placed, uint64_t changes_before) except -1:
        return 0

    # -- allocate -----------------------------------------------------------------------------------------------------

    def allocate_raw(self, nbytes, stream=None, *, alignment=None, freed_before=None):
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
            A power of two that the address must be a multiple of. Addresses are multiples of 256 (of
            512 from a CachingAllocator) anyway; more cannot be had. A BFCAllocator with `strict`
            ignores it, as TensorFlow 2.21 does.
        freed_before : int or callable, optional
            Use only memory that was freed up to this count of the timing counter (see
            `SharedCounter`); a callable returns the count. Only for a BFCAllocator.

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
            If `nbytes` is negative or above 2**63 - 1, or if `alignment` is not a power of two or is
            too large.
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
        cdef uint64_t size, on = 0
        if alignment is not None:
            self.check_alignment(alignment_from(alignment))
        if stream is None and scopes_open:
            stream = current_stream()
        if (freed_before is not None or not small_int(nbytes, &size) or not (stream is None or small_int(stream, &on))
                or not self.place_at_once(size, on, &placed)):
            self.allocate_placement(size_from(nbytes), self.stream_of(stream), stream, freed_before, False, &placed)
        cdef PyObject* address = PyLong_FromUnsignedLongLong(placed.ptr)
        if address == NULL:
            self.take_back(&placed)
        return owned(address)

    def allocate(self, nbytes, stream=None, *, alignment=None, bint contiguous=False):
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
        if alignment is not None or stream is not None or scopes_open or contiguous:
            on = self.place_as_asked(size, stream, alignment, contiguous, &placed)
        elif not self.place_at_once(size, on, &placed):
            self.allocate_placement(size, on, None, None, False, &placed)
        become(buffer, self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
        self.live_buffers += placed.allocation_id != 0
        return buffer

    def try_allocate(self, nbytes, stream=None, *, alignment=None, bint contiguous=False):
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
        on = self.place_as_asked(size, stream, alignment, OR_NONE | (CONTIGUOUS if contiguous else 0), &placed)
        if size and placed.allocation_id == 0:
            return None
        become(buffer, self, placed.handle, placed.allocation_id, placed.ptr, <Py_ssize_t>size, on)
        self.live_buffers += placed.allocation_id != 0
        return buffer

    cdef uint64_t place_as_asked(self, uint64_t size, object stream, object alignment, int how,
                                 Placement* placed) except? 0xFFFFFFFFFFFFFFFF:
        """Serves an `allocate` that has arguments besides the size. Returns the stream that the memory is for."""
        cdef uint64_t on = self.home_stream
        if alignment is not None:
            self.check_alignment(alignment_from(alignment))
        if stream is None and scopes_open:
            stream = current_stream()
        if stream is not None:
            on = self.stream_of(stream)
        if how & CONTIGUOUS or not self.place_at_once(size, on, placed):
            self.allocate_placement(size, on, stream, None, how, placed)
        return on

    cdef int check_alignment(self, uint64_t alignment) except -1:
        """Refuses an alignment that the policy's addresses do not have."""
        if alignment > self.source.alignment:
            raise ValueError(f"addresses here are multiples of {self.source.alignment}, not of {alignment}: ask for "
                             f"{alignment - self.source.alignment} bytes more, and round the address up")
        return 0

    @cython.final
    cdef int place_at_once(self, uint64_t nbytes, uint64_t on, Placement* placed) except -1:
        """The fast path of an allocation: a hit that needs nothing but the pool. Returns whether it was one."""
        if nbytes == 0 or not is_quiet(self):
            return False
        if on != self.home_stream and (not self.by_stream or self.may_be_unordered or on == self.default_stream_alias):
            return False
        cdef uint32_t owner = owner_here(self) if owners_used else 0
        acquire_lock(self.lock)
        cdef bint is_hit = not self.is_closed and self.pool.owned.knows(owner) and self.hit(nbytes, on, placed)
        if owner and is_hit:
            self.pool.set_owner(placed.handle, owner)
        self.lock.release()
        if BFC_DEBUG >= 2 and self.pool.check_is_due():
            self.check_books()
        return is_hit

    cdef int take_back(self, Placement* placed) except -1:
        """Frees an allocation whose address cannot be returned: Python has no memory for the int."""
        PyErr_Clear()
        raise self.undo(placed.handle, placed.allocation_id) or out_of_host_memory()

    cdef int allocate_placement(self, uint64_t size, uint64_t on, object stream, object freed_before, int how,
                                Placement* placed) except -1:
        cdef bint unordered = self.by_stream and size and self.is_unordered(on)
        cdef Request request
        self.set_request(&request, size, self.home_stream if unordered else on)
        request.shared = unordered
        if freed_before is not None:
            self.set_freed_before(&request, freed_before)
        if owners_used:
            self.set_owner_of(&request)
        if self.tags_open:
            request.tag = self.tag_here()
            if request.tag:
                self.check_tag(&request)
        if how & CONTIGUOUS:
            request.contiguous = True
            self.check_contiguous(&request)
        cdef uint64_t seen = self.frees.get()
        cdef uint64_t changes = self.source.changes.get()
        self.attempt(&request, placed)
        if placed.handle == NO_CHUNK and size:
            self.try_harder(&request, freed_before, seen, placed)
            if placed.handle == NO_CHUNK:
                if how & OR_NONE:
                    return 0
                raise self.refusal_of(&request)
        if on != self.home_stream and size and (unordered or not self.by_stream):
            self.leave_home(placed, on, stream)
        if self.must_look and placed.allocation_id:
            self.announce(placed, changes)
        return 0

    cdef int set_owner_of(self, Request* request) except -1:
        """Notes whose scope this call is in."""
        request.owner = owner_here(self)
        if request.owner == 0:
            return 0
        self.acquire()
        cdef bint is_known = self.pool.owned.know(request.owner)
        self.lock.release()
        if not is_known:
            raise out_of_host_memory()
        return 0

    cdef int check_contiguous(self, Request* request) except -1:
        """Refuses a request that must be one physical allocation if the allocator cannot tell whether a chunk is one.
        """
        if request.tag:
            raise ValueError(f"memory of tag {self.tag_of_pool(TAG_POOLS, request.tag)!r} is mapped, so that it can "
                             f"sleep, and is not one physical allocation: allocate contiguous memory outside of it")
        if self.source.joins_regions:
            raise ValueError(f"this allocator joins the regions of {self.sub_allocator!r} that lie end to end, so a "
                             f"chunk may lie in two of them: virtual_memory=True or a CachingAllocator joins none")
        return 0

    cdef int announce(self, Placement* placed, uint64_t changes_before) except -1:
        """Reports an allocation to the noter (a leak check) and to the policy. If one raises, frees it again."""
        try:
            if self.noter is not None:
                self.noter(placed.allocation_id)
            self.allocated(placed, changes_before)
        except BaseException as error:
            raise self.undo(placed.handle, placed.allocation_id) or error
        if self.pool.owned.tracing.domain:
            self.trace_allocation(placed)
        return 0

    cdef void trace_allocation(self, Placement* placed) noexcept:
        """Tells Python's tracemalloc of an allocation. Does nothing if the host has no memory for that."""
        cdef Chunk* chunk
        self.acquire()
        if self.is_live_locked(placed.handle, placed.allocation_id):
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
        self.acquire()
        for i in range(self.pool.chunk_count):
            if self.pool.chunks[i].state & TRACED:
                self.pool.owned.tracing.forget(self.pool.owned.tracing.domain, self.pool.chunks[i].ptr)
                self.pool.chunks[i].state &= ~<uint32_t>TRACED
        self.pool.owned.tracing = Tracing(number, track, untrack)
        self.lock.release()
        self.must_look = self.has_more_to_do()

    cdef bint has_more_to_do(self) noexcept:
        """The value for `must_look`: whether anything besides the pool takes part in an allocation or a free."""
        return self.noter is not None or self.pool.owned.tracing.domain or Tagged.has_more_to_do(self)

    def _swap_noter(self, noter):
        """From now on `noter(allocation_id)` is called after each allocation. Returns the previous
        noter, or None."""
        noter, self.noter = self.noter, noter
        self.must_look = self.has_more_to_do()
        return noter

    cdef int try_harder(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1:
        """Tries what may still help. `seen` is the count of frees before the first attempt."""
        if self.live_buffers and not self.strict and not request.refused:
            gc.collect()    # buffers in reference cycles
            self.attempt(request, placed)
        if placed.handle == NO_CHUNK and self.retry_seconds > 0 and not request.refused:
            self.wait_for_frees(request, freed_before, seen, placed)
        if placed.handle == NO_CHUNK:
            self.was_refused(request)
        return 0

    cdef object refusal_of(self, Request* request):
        """The error of a request without room."""
        refused_by = f"{self.sub_allocator!r}, asked last for {format_bytes(self.source.refused_bytes.get())}"
        return out_of_memory(request.nbytes, self.stats(), self.sub_allocator.total_bytes,
                             refused_by if self.source.refused_bytes.get() else "", self.sub_allocator.largest_block,
                             self.against_pieces(), self.page_use(), self._look)

    cdef int leave_home(self, Placement* placed, uint64_t on, object stream) except -1:
        """Makes memory safe to use on a stream other than the home stream, and lets its free wait for a fence there.

        Work that is queued on the home stream may still use the memory, so the other stream waits for that work.
        """
        cdef uint64_t home_frees, stream_id
        try:
            if self.home_stream != HOST_STREAM and self.sub_allocator.asynchronous:
                stream_id = self.sub_allocator.stream_id(on)
                if self.must_order(stream_id, &home_frees) or self.is_of_thread(on):
                    self.sub_allocator.order(self.home_stream, on)
                    self.was_ordered(stream_id, home_frees)
            self.fences.uses(placed.allocation_id, on, stream)
        except BaseException as error:
            raise self.undo(placed.handle, placed.allocation_id) or error
        return 0

    cdef cbool must_order(self, uint64_t stream_id, uint64_t* home_frees) noexcept nogil:
        """Whether memory was freed on the home stream since another stream was last made to wait for it."""
        self.acquire()
        home_frees[0] = self.frees.get() - self.fenced_frees
        cdef uint64_t known = self.ordered[stream_id] if self.ordered.count(stream_id) else 0
        self.lock.release()
        return known != home_frees[0]

    cdef void was_ordered(self, uint64_t stream_id, uint64_t home_frees) noexcept nogil:
        """Remembers up to which free a stream has waited for the home stream. If that cannot be remembered (too many
        streams, no host memory), the stream waits once more than it has to."""
        self.acquire()
        if self.ordered.size() >= _STREAMS_REMEMBERED:
            self.ordered.clear()
        try_store(self.ordered, stream_id, home_frees)
        self.lock.release()

    cdef int wait_for_frees(self, Request* request, object freed_before, uint64_t seen, Placement* placed) except -1:
        """Tries again after each free until `retry_seconds` have passed, and then once more (TensorFlow's behaviour,
        2.8). `seen` is the count of frees before the first attempt: upstream misses a free between that and the wait.
        """
        deadline = time.monotonic() + self.retry_seconds
        late = False
        while placed.handle == NO_CHUNK and not late:
            while self.frees.get() == seen and not self.orphans.some() and not late:
                time.sleep(_RETRY_POLL_SECONDS)
                self.catch_up()     # a stream that finishes counts as a free
                late = time.monotonic() >= deadline
            seen = self.frees.get()
            if freed_before is not None:
                self.set_freed_before(request, freed_before)
            self.attempt(request, placed)
        return 0

    cdef int attempt(self, Request* request, Placement* placed) except -1:
        """Makes one complete attempt. `placed.handle` is NO_CHUNK if nothing fits, and for 0 bytes."""
        placed.handle = NO_CHUNK
        placed.allocation_id = 0
        placed.ptr = 0
        if request.refused and self.is_closed:
            raise closed()
        if request.nbytes == 0 or request.refused:
            return 0
        self.poll()
        self.acquire()
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
        if request.shared or (request.stream != self.home_stream and not self.by_stream):
            chunk.state |= USED_ELSEWHERE

    cdef int after_miss(self, Request* request, Placement* placed) except -1:
        """The slow path. The lock is not held: `place_after_miss` takes it where it needs the pool."""
        cdef uint64_t seen
        if is_finalizing():
            self.source.forget_other_threads()
        while placed.handle == NO_CHUNK:
            if self.is_closed:
                raise closed()
            seen = self.source.changes.get() - request.asking.changes   # of other threads
            self.place_after_miss(request, placed)
            if placed.handle != NO_CHUNK or not self.worth_another_try(request, seen):
                break
            self.acquire()
            if not self.is_closed:
                self.fill(self.place(request), request, placed)
            self.lock.release()
        if placed.handle == NO_CHUNK:
            self.place_where_refused(request, placed)
        if placed.handle == NO_HOST_MEMORY:
            placed.handle = NO_CHUNK
            raise out_of_host_memory()
        try:
            run_handlers()      # signal handlers that were deferred while the sub-allocator was called
        except BaseException as error:
            raise self.undo(placed.handle, placed.allocation_id) or error
        return 0

    cdef bint worth_another_try(self, Request* request, uint64_t seen) except -1:
        """Waits for what may yet free memory: streams that still use freed blocks, and calls of other threads to the
        sub-allocator, which hold a part of the limit. Returns whether anything may have changed."""
        cdef bint waits = not request.has_waited and (some_wait(self.fences) or self.orphans.some())
        request.has_waited = True
        if waits:
            self.wait_for_streams()
        cdef uint64_t ended = self.source.calls_ended.get()
        cdef bint is_inside = self.source.is_called_here()
        if request.blocked and not is_inside:
            time.sleep(_RETRY_POLL_SECONDS)
        while not is_inside and self.source.is_calling() and self.source.calls_ended.get() == ended:
            time.sleep(_RETRY_POLL_SECONDS)
        cdef uint64_t changes = self.source.changes.get() - request.asking.changes
        return waits or (request.blocked and not is_inside) or changes != seen

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
        if stream is None and scopes_open:
            stream = current_stream()
        cdef uint64_t on = self.stream_of(stream)
        cdef uint32_t owner = owner_here(self) if owners_used else 0
        found = numpy.empty(wanted.size(), numpy.uint64)
        cdef uint64_t[::1] addresses = found
        try:
            while done < wanted.size():
                if self.hits_are_plain(on):
                    done = self.allocate_hits(wanted, addresses, done, on, owner)
                if done < wanted.size():
                    self.allocate_placement(wanted[done], on, stream, None, False, &placed)
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
        if not is_quiet(self):
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

    cdef bint drain(self) noexcept:
        cdef int result = -1
        if self.source.native != NULL:
            with nogil:
                result = self.source.native.synchronize(self.source.native.self)
        return result == 0

    cdef int hand_over(self, ChunkHandle handle) except -1:
        """Indexes a chunk by its address and records its stream. A replay allocates chunks by handle, without either.
        """
        self.acquire()
        if self.is_closed:
            self.lock.release()
            raise ClosedError("this allocator was closed during the replay")
        cdef Chunk* chunk = &self.pool.chunks[handle]
        cdef bint indexed = chunk.state & INDEXED or self.pool.index_chunk(handle)
        cdef uint64_t stream = chunk.stream
        cdef int64_t allocation_id = chunk.allocation_id
        cdef bint elsewhere = stream != self.home_stream and not self.by_stream
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
        return 0 if request.asking.without_gil else self.refuse_region(block, taken, closed)

    cdef int refuse_region(self, Region* block, Taken taken, cbool closed) except -1 with gil:
        if taken == OVERLAPS:
            raise SubAllocatorError(f"{self.sub_allocator!r}.alloc returned {block.ptr:#x}, {block.end - block.ptr} "
                                    f"bytes, which overlaps a block that it gave before: not used, and not given back")
        if closed:
            raise ClosedError("this allocator was closed while it asked for memory")
        raise out_of_host_memory()

    def release_free_regions(self):
        """Give every region without a live allocation back to the sub-allocator.

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
        If regions grow, the next one starts small again. Source: `BFCAllocator::DeallocateFreeRegions`,
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
        self.settle(again=True)
        cdef int64_t mark = self.mark_release()
        self.acquire()
        self.pool.release_id = mark
        self.pool.list_regions(regions, False)
        released = self.source.forget(regions) + self.source.unreturned_bytes
        self.regions_released()
        self.source.take_unreturned(regions)
        self.lock.release()
        try:
            self.source.give_back(regions, False)
            if BFC_DEBUG >= 2 and self.pool.check_is_due():
                self.check_books()
            return released + self.release_pages()
        finally:
            self.pool.release_id = 0

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
        if self.exports == 0:
            try:
                self.wait_for_streams()
                self.settle(again=True)
            except Exception as error:
                fault = error   # even if the device fails, its memory is given back
        self.acquire()
        viewed = self.exports > 0
        if not viewed:
            self.is_closed = True
            self.source.forget_all(regions)
        self.lock.release()
        if viewed:
            raise BufferError(f"{self.exports} view(s) of this memory are in use (arrays, memoryviews): delete them, "
                              f"then close")
        self.forget_frees()
        self.source.offer_rejected_again()
        try:
            self.source.give_back(regions, False)
        finally:
            self.give_up_ranges()
        if fault is not None:
            raise fault

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    def __del__(self):
        if exiting or self.is_closed:
            return
        if self.exports:
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
