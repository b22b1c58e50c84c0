"""The table of C functions behind `bfc_allocator.h`: a pool for each device of a back end of PyTorch.

A hit takes no GIL, nor does a use or a free under PyTorch's policy. Everything else does, with no lock held.
"""

import warnings

from cpython.exc cimport PyErr_Fetch, PyErr_Restore, PyErr_SetInterrupt
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from cython.operator cimport dereference as deref
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memset
from libcpp cimport bool as cbool
from libcpp.atomic cimport atomic
from libcpp.map cimport map as cmap

from bfc.native.turns cimport TurnAt, counted
from bfc.interpreter._process cimport call_in_child, exiting, has_entered, start_entering
from bfc._core cimport FREE, NO_CHUNK, NO_HOST_MEMORY, ChunkHandle, Counters, Pool, Region
from bfc.buffers._scopes cimport follow_scopes
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._lock cimport Shown
from bfc.allocators._reasons cimport IS_TOLD
from bfc.allocators._fences cimport CurrentStream
from bfc.allocators._frees cimport report_unraisable
from bfc.allocators._chunk_allocator cimport Placement, Request
from bfc.allocators._misses cimport announce, attempt, refusal_of, set_scopes_of, try_harder
from bfc.allocators._allocator cimport Allocator
from bfc.allocators._without_gil cimport (
    free_at_once_without_gil, hit_in_pool_without_gil, hit_without_gil, note_use,
)

from bfc.errors import InvalidPointerError
from bfc.integrations._torch_stats import STATS as _STATS, memory_stats
from bfc.suballocators.base import checked_memory_info

cdef extern from "debug.h":
    const int BFC_DEBUG

cdef extern from "gil_wait.hpp" namespace "bfc" nogil:
    pass

cdef extern from *:
    """
    /* Callers cannot be unwound, and up to 3.13 Python unwinds a thread that asks for the GIL while the interpreter
     * shuts down: see gil_wait.hpp. Each place of the table has a function of its own, which stops the thread there. */
    template <int place, class Result, class... Arguments>
    auto bfc_stopping(Result (*function)(Arguments...)) {
        static Result (*calls)(Arguments...);
        calls = function;
        return +[](Arguments... arguments) noexcept -> Result {
            try {
                return calls(arguments...);
            } catch (...) {
                bfc::stop_here();
            }
        };
    }
    #define BFC_SET(place, function) (place) = bfc_stopping<__COUNTER__>(function)
    """
    void set_function "BFC_SET"(...) noexcept

cdef extern from *:
    """
    /* The device that this thread allocated on, or freed on, last: mostly it is also that of its next free. */
    static thread_local int bfc_last_device = 0;
    """
    int last_device "bfc_last_device"

cdef extern from "bfc_allocator.h" nogil:
    const uint32_t BFC_ALLOCATOR_VERSION
    const char* BFC_ALLOCATOR_CAPSULE
    ctypedef enum bfc_result:
        BFC_OK
        BFC_OUT_OF_MEMORY
        BFC_NOT_LIVE
        BFC_FAILED
    ctypedef struct bfc_stat:
        int64_t current
    ctypedef struct bfc_device_stats:
        bfc_stat allocation[3]
        bfc_stat oversize_allocations
        bfc_stat oversize_segments
        int64_t num_alloc_retries
        int64_t num_ooms
        int64_t num_sync_all_streams
        int64_t num_device_alloc
        int64_t num_device_free
        int64_t max_split_size
        int64_t invalid_frees
    ctypedef struct bfc_block:
        int device
        int64_t allocation_id
        uint64_t size
        uint64_t requested_size
        int64_t stream
        uint64_t bytes_in_use
        uint64_t bytes_reserved
        uint64_t changes
    ctypedef struct bfc_allocator:
        uint32_t version
        uint32_t size
        void* self
        bfc_result (*allocate)(void*, int, size_t, int64_t, void**, char*, size_t) noexcept
        bfc_result (*free)(void*, void*) noexcept
        bfc_result (*record_stream)(void*, void*, int64_t, char*, size_t) noexcept
        bfc_result (*copy)(void*, void*, const void*, size_t, int64_t, char*, size_t) noexcept
        bfc_result (*empty)(void*, char*, size_t) noexcept
        bfc_result (*stats)(void*, int, bfc_device_stats*, char*, size_t) noexcept
        bfc_result (*reset_accumulated_stats)(void*, int, char*, size_t) noexcept
        bfc_result (*reset_peak_stats)(void*, int, char*, size_t) noexcept
        bfc_result (*memory_info)(void*, int, size_t*, size_t*, char*, size_t) noexcept
        int (*device_of)(void*, const void*) noexcept
        void (*retain)(void*) noexcept
        void (*release)(void*) noexcept
        bfc_result (*allocate_in_pool)(void*, int, size_t, int64_t, uint64_t, uint64_t, void**, char*, size_t) noexcept
        void (*look)(void*, const void*, bfc_block*) noexcept
        void (*follow_streams)(void*, CurrentStream) noexcept

cdef enum:
    DEVICES = 64
    ORDERED = 64        # streams of a device that are known to run their work in order

cdef const char* EXITS = "bfc: the interpreter exits, and memory cannot be used any more"
cdef const char* FORKED = ("bfc: this process was forked from one that has used the device, which does not work in a "
                           "child: start processes with multiprocessing's \"spawn\" or \"forkserver\"")

cdef uint64_t forks = 0     # that led to this process
cdef int64_t used_after = -1    # so many, a table first used a device; -1: none has


cdef void note_fork() noexcept nogil:
    global forks
    forks += 1


call_in_child(note_fork)


cdef class Table:
    """The functions for the pools of so many devices, which are opened when their device is first used: `open_pool`
    returns the `Allocator` of a device, by its number. Raises ValueError if there are none, or more than 64."""

    cdef bfc_allocator functions
    cdef object open_pool
    cdef readonly int devices
    cdef atomic[void*] pools[DEVICES]   # borrowed from `kept`; NULL: not open yet
    cdef dict kept
    cdef CurrentStream current          # the caller's, for pools that are opened; NULL: it was not named
    cdef uint64_t forks_before          # the value of `forks` when a device was first used
    cdef Shown[bint] survives_no_fork   # an open pool has memory of a device, which a child cannot use
    cdef Shown[int64_t] invalid         # changed with the GIL
    cdef int64_t ordered[DEVICES][ORDERED]
    cdef atomic[int] ordered_count[DEVICES]

    def __cinit__(self, open_pool, int devices):
        if not 0 < devices <= DEVICES:
            raise ValueError(f"a back end has 1 to {DEVICES} devices, not {devices}")
        self.open_pool = open_pool
        self.devices = devices
        self.kept = {}
        self.forks_before = forks
        self.functions = functions_of(self)
        follow_scopes()

    @property
    def invalid_frees(self):
        """How often an address was freed that was not live."""
        return self.invalid.get()

    def capsule(self):
        """The table in a PyCapsule named "bfc.allocator", which keeps it alive."""
        # The capsule holds the table by a plain pointer, and gives the reference back when it goes.
        Py_INCREF(self)
        try:
            return PyCapsule_New(&self.functions, BFC_ALLOCATOR_CAPSULE, drop)
        except BaseException:
            Py_DECREF(self)
            raise

    def note_ordered(self, int device, int64_t stream):
        """Notes that a stream runs its work in order, so that a hit there need not ask the device. The handle must live
        as long as the table."""
        self.check_device(device)
        cdef int count = self.ordered_count[device].load()
        if count < ORDERED:
            self.ordered[device][count] = stream
            self.ordered_count[device].store(count + 1)     # last, since other threads read it meanwhile

    cdef cbool is_ordered(self, int device, int64_t stream) noexcept nogil:
        cdef int place
        if stream == 0 or not (<Allocator>self.pools[device].load()).streams.may_be_unordered:
            return True
        for place in range(self.ordered_count[device].load()):
            if self.ordered[device][place] == stream:
                return True
        return False

    cdef cbool hit(self, int device, size_t nbytes, int64_t stream, uint64_t* address) noexcept nogil:
        """Serves a request that needs no GIL. False for all else, and then nothing has changed."""
        # A pool is opened by Python, once. A stream that is not known to be ordered takes the GIL, and is asked about
        # there.
        if not 0 <= device < self.devices or self.pools[device].load() == NULL or not self.is_ordered(device, stream):
            return False
        cdef void* pool = self.pools[device].load()
        if not hit_without_gil(<Allocator>pool, nbytes, on(<Allocator>pool, stream), address):
            return False
        note_device(device)
        if BFC_DEBUG >= 2 and start_entering():
            check_books_of(<Allocator>pool)
        return True

    cdef cbool free_at_once(self, int device, void* ptr) noexcept nogil:
        """Frees what is live on a device, and needs no GIL to be freed. False for all else, and then nothing has
        changed."""
        cdef void* pool = self.pools[device].load()
        if pool == NULL or not free_at_once_without_gil(<Allocator>pool, <uint64_t>ptr):
            return False
        if BFC_DEBUG >= 2 and start_entering():
            check_books_of(<Allocator>pool)
        return True

    cdef cbool note_use_on(self, int device, void* ptr, int64_t stream) noexcept nogil:
        cdef void* pool = self.pools[device].load()
        return pool != NULL and note_use(<Allocator>pool, <uint64_t>ptr, <uint64_t>stream)

    cdef cbool is_lost(self) noexcept nogil:
        """Whether this is a forked child of the process that used the device."""
        return forks != self.forks_before and self.survives_no_fork.get()

    cdef int refuse_if_lost(self) except -1:
        if self.is_lost():
            raise RuntimeError(FORKED.decode())
        return 0

    cdef int check_device(self, int device) except -1:
        if not 0 <= device < self.devices:
            raise ValueError(f"there is no device {device}: this back end has {self.devices}")
        return 0

    cdef Allocator pool_of(self, int device):
        """The pool of a device, for calls that leave the device alone."""
        global used_after
        self.check_device(device)
        found = self.kept.get(device)
        if found is None:
            found = self.open_pool(device)
            if not isinstance(found, Allocator):
                raise TypeError(f"device {device} needs an allocator of bfc, not {type(found).__name__}")
            found = self.kept.setdefault(device, found)     # another thread may have been first
            (<Allocator>found).fences.current, (<Allocator>found).fences.device = self.current, device
            if found.device.kind not in ("cpu", "simulated") and not self.survives_no_fork.get():
                if used_after < 0:      # a process may fork, and its child be the first to use a device
                    used_after = <int64_t>forks
                self.forks_before = <uint64_t>used_after
                self.survives_no_fork.set(True)
            # Last: from here on other threads use it without the GIL.
            self.pools[device].store(<void*>found)
        return found

    cdef Allocator usable_pool_of(self, int device):
        """The same for calls that use the device, which a forked child cannot."""
        pool = self.pool_of(device)
        self.refuse_if_lost()
        return pool


# -- the functions: a borrowed reference cannot be used as an object without the GIL, but it can be passed as one ------

cdef bfc_result allocate(Table self, int device, size_t nbytes, int64_t stream, void** ptr,
                         char* why, size_t room) noexcept nogil:
    cdef uint64_t address = 0
    ptr[0] = NULL
    if self.is_lost():
        return refuse(FORKED, why, room)
    if self.hit(device, nbytes, stream, &address):
        ptr[0] = <void*>address
        return BFC_OK
    if counted(exiting) or not start_entering():
        return refuse(EXITS, why, room)
    return allocate_with_gil(self, device, nbytes, stream, ptr, why, room)


cdef void note_device(int device) noexcept nogil:
    global last_device
    last_device = device


cdef uint64_t on(Allocator pool, int64_t stream) noexcept nogil:
    """The stream as a pool knows it: for host memory, that is a stream of its own."""
    return HOST_STREAM if stream == 0 and pool.streams.home == HOST_STREAM else <uint64_t>stream


cdef bfc_result allocate_with_gil(Table self, int device, size_t nbytes, int64_t stream, void** ptr,
                                  char* why, size_t room) noexcept with gil:
    has_entered()
    try:
        ptr[0] = <void*><uintptr_t>self.usable_pool_of(device).allocate_raw(nbytes, <uint64_t>stream)
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result allocate_in_pool(Table self, int device, size_t nbytes, int64_t stream, uint64_t first, uint64_t second,
                                 void** ptr, char* why, size_t room) noexcept nogil:
    cdef uint64_t address = 0
    cdef uint64_t[2] pool = [first, second]
    ptr[0] = NULL
    if self.is_lost():
        return refuse(FORKED, why, room)
    if (0 <= device < self.devices and self.pools[device].load() != NULL
            and hit_in_pool_without_gil(<Allocator>self.pools[device].load(), nbytes, stream, pool, &address)):
        note_device(device)
        ptr[0] = <void*>address
        return BFC_OK
    if counted(exiting) or not start_entering():
        return refuse(EXITS, why, room)
    return allocate_in_pool_with_gil(self, device, nbytes, stream, first, second, ptr, why, room)


cdef bfc_result allocate_in_pool_with_gil(Table self, int device, size_t nbytes, int64_t stream, uint64_t first,
                                          uint64_t second, void** ptr, char* why, size_t room) noexcept with gil:
    has_entered()
    try:
        ptr[0] = <void*><uintptr_t>take_in_pool(self.usable_pool_of(device), nbytes, stream, first, second)
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef uint64_t take_in_pool(Allocator pool, uint64_t nbytes, uint64_t stream, uint64_t first,
                           uint64_t second) except? 0xFFFFFFFFFFFFFFFF:
    cdef Request request
    cdef Placement placed
    cdef TurnAt turn
    turn.take(pool)
    pool.set_request(&request, nbytes, stream)
    request.captured[0], request.captured[1] = first, second
    set_scopes_of(pool, &request)
    cdef uint64_t seen = pool.frees.count.get(), changes = pool.source.changes.get()
    attempt(pool, &request, &placed)
    if placed.handle == NO_CHUNK and nbytes:
        try_harder(pool, &request, None, seen, &placed)
        if placed.handle == NO_CHUNK:
            raise refusal_of(pool, &request)
    if pool.reasons.has(IS_TOLD) and placed.allocation_id:
        announce(pool, &placed, changes)
    return placed.ptr


cdef bfc_result free(Table self, void* ptr) noexcept nogil:
    # A destructor in C++ cannot be told of an error, and the memory goes with the process.
    if ptr == NULL or counted(exiting) or self.is_lost():
        return BFC_OK
    # each question takes the lock of a pool, which threads on other devices need, too
    cdef int guess = last_device if last_device < self.devices else 0, device
    if self.free_at_once(guess, ptr):
        return BFC_OK
    for device in range(self.devices):
        if device != guess and self.free_at_once(device, ptr):
            note_device(device)
            return BFC_OK
    if not start_entering():
        return BFC_OK
    return free_with_gil(self, <uint64_t>ptr)


cdef bfc_result free_with_gil(Table self, uint64_t address) noexcept with gil:
    """Preserves an exception that is being raised: tensors are freed while one propagates."""
    cdef PyObject* kind
    cdef PyObject* error
    cdef PyObject* trace
    has_entered()
    PyErr_Fetch(&kind, &error, &trace)
    cdef bfc_result result = free_anywhere(self, address)
    PyErr_Restore(kind, error, trace)
    return result


cdef bfc_result free_anywhere(Table self, uint64_t address) noexcept:
    """Frees what other streams have used, or what needs more than the pool to be freed."""
    cdef Allocator pool
    cdef cbool one_is_closed = False
    cdef int device
    for device in range(self.devices):
        if self.pools[device].load() == NULL:
            continue
        pool = <Allocator>self.pools[device].load()
        if pool.life.is_closed:
            one_is_closed = True
        elif free_for_good(pool, address):
            return BFC_OK
    if one_is_closed:
        return BFC_OK       # its memory went back when it was closed
    self.invalid.add(1)
    try:
        warnings.warn(f"{address:#x} was freed, and is not live: it was freed before, or is another allocator's. "
                      f"Nothing has changed; memory_stats()[\"invalid_frees\"] counts it", RuntimeWarning, stacklevel=1)
    except BaseException as error:
        report(error)
    return BFC_NOT_LIVE


cdef cbool free_for_good(Allocator pool, uint64_t address) noexcept:
    """Frees for a caller that does not ask again: what fails is left to a later call. Whether a live allocation starts
    at the address."""
    cdef TurnAt turn
    turn.take(pool)
    # The handle is read with its id, which tells whether the chunk is still the same later.
    pool.acquire()
    cdef ChunkHandle handle = pool.pool.handle_of(address)
    cdef int64_t allocation_id = pool.pool.chunks[handle].allocation_id if handle != NO_CHUNK else -1
    pool.lock.release()
    if handle == NO_CHUNK:
        return False
    try:
        if pool.recorder.keeps_free_frames:
            pool.recorder.keep_free_frames(allocation_id)
    except BaseException as error:
        report(error)
    try:
        interrupt = pool.frees.undo(handle, allocation_id)
        if interrupt is not None:
            report(interrupt)
    except BaseException as error:
        report(error)
    return True


cdef void report(error, doing="a free without the GIL") noexcept:
    """Reports an error that has no caller. A Ctrl-C is raised again as soon as Python code runs."""
    if isinstance(error, KeyboardInterrupt):
        PyErr_SetInterrupt()
    else:
        report_unraisable(error, doing)


def report_error(error, doing):
    """Reports what Python code cannot raise, either."""
    report(error, doing)


cdef void check_books_of(Allocator pool) noexcept with gil:
    """What a debug build does after each change."""
    has_entered()
    try:
        if pool.pool.check_is_due():
            pool.check_books()
    except BaseException as error:
        report(error)


cdef bfc_result record_stream(Table self, void* ptr, int64_t stream, char* why, size_t room) noexcept nogil:
    cdef int guess = last_device if last_device < self.devices else 0, device     # as `free` does
    if not self.is_lost():
        if self.note_use_on(guess, ptr, stream):
            return BFC_OK
        for device in range(self.devices):
            if device != guess and self.note_use_on(device, ptr, stream):
                return BFC_OK
    return record_with_gil(self, ptr, stream, why, room) if start_entering() else BFC_OK    # nothing is reused any more


cdef bfc_result record_with_gil(Table self, void* ptr, int64_t stream, char* why, size_t room) noexcept with gil:
    has_entered()
    try:
        self.refuse_if_lost()
        pool_at(self, <uint64_t>ptr).record_stream(<uint64_t>ptr, <uint64_t>stream)
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result copy(Table self, void* to, const void* start, size_t nbytes, int64_t stream,
                     char* why, size_t room) noexcept nogil:
    return copy_with_gil(self, to, start, nbytes, stream, why, room) if start_entering() else refuse(EXITS, why, room)


cdef bfc_result copy_with_gil(Table self, void* to, const void* start, size_t nbytes, int64_t stream,
                              char* why, size_t room) noexcept with gil:
    has_entered()
    try:
        self.refuse_if_lost()
        if nbytes:
            source = pool_at(self, <uint64_t>to).sub_allocator
            source.copy(<uint64_t>to, <uint64_t>start, nbytes, <uint64_t>stream)
            # The caller may free either side when this returns.
            source.wait(<uint64_t>stream)
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result empty(Table self, char* why, size_t room) noexcept nogil:
    return empty_with_gil(self, why, room) if start_entering() else refuse(EXITS, why, room)


cdef bfc_result empty_with_gil(Table self, char* why, size_t room) noexcept with gil:
    cdef bfc_result result = BFC_OK
    has_entered()
    try:
        self.refuse_if_lost()
        for pool in list(self.kept.values()):
            try:
                pool.empty_cache()
            except BaseException as error:      # the others are emptied all the same
                result = explain(error, why, room)
    except BaseException as error:
        return explain(error, why, room)
    return result


cdef bfc_result stats(Table self, int device, bfc_device_stats* out, char* why, size_t room) noexcept nogil:
    return stats_with_gil(self, device, out, why, room) if start_entering() else refuse(EXITS, why, room)


cdef bfc_result stats_with_gil(Table self, int device, bfc_device_stats* out, char* why, size_t room) noexcept with gil:
    has_entered()
    try:
        memset(out, 0, sizeof(bfc_device_stats))
        fill_stats(memory_stats(self.pool_of(device)), out)
        out.invalid_frees = self.invalid.get()
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef int fill_stats(dict found, bfc_device_stats* out) except -1:
    """Fills the groups, which lie one behind the other in the order of _STATS, then the single counters."""
    cdef int64_t* place = &out.allocation[0].current
    for key in _STATS:
        place[0] = found.get(key, 0)
        place += 1
    out.num_alloc_retries = found.get("num_alloc_retries", 0)
    out.num_ooms = found.get("num_ooms", 0)
    out.num_sync_all_streams = found.get("num_sync_all_streams", 0)
    out.num_device_alloc = found.get("num_device_alloc", 0)
    out.num_device_free = found.get("num_device_free", 0)
    out.max_split_size = found.get("max_split_size", 0)
    return 0


cdef bfc_result reset_accumulated(Table self, int device, char* why, size_t room) noexcept nogil:
    return reset_accumulated_with_gil(self, device, why, room) if start_entering() else refuse(EXITS, why, room)


cdef bfc_result reset_accumulated_with_gil(Table self, int device, char* why, size_t room) noexcept with gil:
    has_entered()
    try:
        self.pool_of(device).reset_accumulated_stats()
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result reset_peaks(Table self, int device, char* why, size_t room) noexcept nogil:
    return reset_peaks_with_gil(self, device, why, room) if start_entering() else refuse(EXITS, why, room)


cdef bfc_result reset_peaks_with_gil(Table self, int device, char* why, size_t room) noexcept with gil:
    has_entered()
    try:
        self.pool_of(device).reset_peak_stats()
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result memory_info(Table self, int device, size_t* free_bytes, size_t* total,
                            char* why, size_t room) noexcept nogil:
    if not start_entering():
        return refuse(EXITS, why, room)
    return memory_info_with_gil(self, device, free_bytes, total, why, room)


cdef bfc_result memory_info_with_gil(Table self, int device, size_t* free_bytes, size_t* total,
                                     char* why, size_t room) noexcept with gil:
    has_entered()
    try:
        source = self.usable_pool_of(device).sub_allocator
        free_bytes[0], total[0] = checked_memory_info(source.memory_info(), source)
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef int device_of(Table self, const void* ptr) noexcept nogil:
    cdef int device
    cdef void* pool
    for device in range(self.devices):
        pool = self.pools[device].load()
        if pool != NULL and lies_in(<Allocator>pool, <uint64_t>ptr):
            return device
    return -1


cdef cbool lies_in(Allocator pool, uint64_t address) noexcept nogil:
    # Another thread's miss may add regions.
    pool.acquire()
    cdef cbool found = pool.pool.overlaps_region(address, 1)
    pool.lock.release()
    return found


cdef void look(Table self, const void* ptr, bfc_block* block) noexcept nogil:
    cdef int device
    cdef void* pool
    block.device = -1
    for device in range(self.devices):
        pool = self.pools[device].load()
        if pool != NULL and look_in(<Allocator>pool, <uint64_t>ptr, block):
            block.device = device
            return


cdef cbool look_in(Allocator pool, uint64_t address, bfc_block* block) noexcept nogil:
    # The block and the figures are of one moment, as observers expect.
    pool.acquire()
    cdef ChunkHandle handle = pool.pool.handle_of(address)
    cdef Counters counters
    if handle != NO_CHUNK:
        counters = pool.pool.totals()
        block.allocation_id = pool.pool.chunks[handle].allocation_id
        block.size = pool.pool.chunks[handle].size
        block.requested_size = pool.pool.chunks[handle].requested_size
        block.stream = <int64_t>pool.pool.chunks[handle].stream
        block.bytes_in_use = counters.bytes_in_use
        block.bytes_reserved = counters.pool_bytes
        block.changes = pool.source.changes.get()
    pool.lock.release()
    return handle != NO_CHUNK


cdef Allocator pool_at(Table self, uint64_t address):
    cdef int device = device_of(self, <void*>address)
    if device < 0:
        raise InvalidPointerError(f"{address:#x} lies in no pool of this back end")
    return self.pool_of(device)


cdef void follow_streams(Table self, CurrentStream current) noexcept nogil:
    self.current = current


cdef void retain(Table self) noexcept nogil:
    if start_entering():
        change_references(self, 1)


cdef void release(Table self) noexcept nogil:
    if start_entering():
        change_references(self, -1)


cdef void change_references(Table self, int by) noexcept with gil:
    has_entered()
    if by > 0:
        Py_INCREF(self)
    else:
        Py_DECREF(self)


cdef void drop(object capsule) noexcept:
    """Called when the capsule is destroyed."""
    cdef bfc_allocator* functions = <bfc_allocator*>PyCapsule_GetPointer(capsule, BFC_ALLOCATOR_CAPSULE)
    Py_DECREF(<Table>functions.self)


cdef bfc_allocator functions_of(Table self) noexcept:
    cdef bfc_allocator table
    table.version = BFC_ALLOCATOR_VERSION
    table.size = sizeof(bfc_allocator)
    table.self = <void*>self
    set_function(table.allocate, <bfc_result (*)(void*, int, size_t, int64_t, void**, char*, size_t) noexcept>allocate)
    set_function(table.free, <bfc_result (*)(void*, void*) noexcept>free)
    set_function(table.record_stream, <bfc_result (*)(void*, void*, int64_t, char*, size_t) noexcept>record_stream)
    set_function(table.copy, <bfc_result (*)(void*, void*, const void*, size_t, int64_t, char*, size_t) noexcept>copy)
    set_function(table.empty, <bfc_result (*)(void*, char*, size_t) noexcept>empty)
    set_function(table.stats, <bfc_result (*)(void*, int, bfc_device_stats*, char*, size_t) noexcept>stats)
    set_function(table.reset_accumulated_stats, <bfc_result (*)(void*, int, char*, size_t) noexcept>reset_accumulated)
    set_function(table.reset_peak_stats, <bfc_result (*)(void*, int, char*, size_t) noexcept>reset_peaks)
    set_function(table.memory_info, <bfc_result (*)(void*, int, size_t*, size_t*, char*, size_t) noexcept>memory_info)
    set_function(table.device_of, <int (*)(void*, const void*) noexcept>device_of)
    set_function(table.retain, <void (*)(void*) noexcept>retain)
    set_function(table.release, <void (*)(void*) noexcept>release)
    set_function(table.allocate_in_pool, <bfc_result (*)(void*, int, size_t, int64_t, uint64_t, uint64_t, void**, char*,
                                                         size_t) noexcept>allocate_in_pool)
    set_function(table.look, <void (*)(void*, const void*, bfc_block*) noexcept>look)
    set_function(table.follow_streams, <void (*)(void*, CurrentStream) noexcept>follow_streams)
    return table


def changes_of(Allocator pool not None):
    """How often memory has come to a pool or gone, in segments and in pages."""
    return pool.source.changes.get()


# -- checkpoints of private pools ------------------------------------------------------------------------------------

def allocate_at(Allocator pool not None, tuple pool_id, uint64_t address, uint64_t nbytes, uint64_t stream):
    """Allocates at an address, where a free chunk covers it. RuntimeError if none does."""
    cdef Request request
    cdef ChunkHandle taken
    pool.set_request(&request, nbytes, stream)
    # Found and taken at once, so that nobody else takes the chunk at that address.
    pool.acquire()
    if not pool.life.is_closed:
        taken = take_at(pool.pool, address, &request)
    else:
        taken = NO_CHUNK
    pool.lock.release()
    if taken >= NO_HOST_MEMORY:
        raise RuntimeError(f"a block of pool {pool_id} cannot be put at {address:#x}, where a checkpoint has it: the "
                           f"memory there is in use, or went back to the device")


cdef ChunkHandle take_at(Pool pool, uint64_t address, Request* request) noexcept nogil:
    """Hands out what lies before the address, then the block, and frees the former."""
    cdef ChunkHandle before = NO_CHUNK, handle = free_chunk_over(pool, address)
    if handle == NO_CHUNK or pool.chunks[handle].ptr + pool.chunks[handle].size < address + request.rounded:
        return NO_CHUNK
    if pool.chunks[handle].ptr < address:
        # As mallocWithAddress does, so that statistics see three allocations for two requests (V-15).
        before = pool.allocate_this(handle, address - pool.chunks[handle].ptr,
                                    address - pool.chunks[handle].ptr, pool.chunks[handle].stream, True)
        if before >= NO_HOST_MEMORY:
            return before
        handle = pool.chunks[before].next
    if (handle != NO_CHUNK and pool.chunks[handle].ptr == address and pool.chunks[handle].state == FREE
            and pool.chunks[handle].size >= request.rounded):
        handle = pool.allocate_this(handle, request.rounded, request.nbytes, request.stream, True)
    else:
        handle = NO_CHUNK
    if before != NO_CHUNK:
        pool.free_chunk(before)
    return handle


cdef ChunkHandle free_chunk_over(Pool pool, uint64_t address) noexcept nogil:
    cdef cmap[uint64_t, Region].iterator it = pool.regions.upper_bound(address)
    cdef ChunkHandle handle
    if it == pool.regions.end():
        return NO_CHUNK
    handle = deref(it).second.first
    while handle != NO_CHUNK and pool.chunks[handle].ptr + pool.chunks[handle].size <= address:
        handle = pool.chunks[handle].next
    if handle == NO_CHUNK or pool.chunks[handle].state != FREE or pool.chunks[handle].ptr > address:
        return NO_CHUNK
    return handle


# -- failures in words -----------------------------------------------------------------------------------------------

cdef bfc_result refuse(const char* text, char* why, size_t room) noexcept nogil:
    cdef size_t length = 0
    while length + 1 < room and text[length] != 0:
        why[length] = text[length]
        length += 1
    if room:
        why[length] = 0
    return BFC_FAILED


cdef bfc_result explain(error, char* why, size_t room) noexcept:
    """Writes an error down for C, whose caller raises one of its own. A Ctrl-C is raised again as soon as Python code
    runs."""
    cdef bytes text
    cdef bfc_result result = BFC_FAILED
    cdef bint interrupted = isinstance(error, KeyboardInterrupt)
    if isinstance(error, MemoryError):
        result = BFC_OUT_OF_MEMORY
    elif isinstance(error, InvalidPointerError):
        result = BFC_NOT_LIVE
    try:
        said = str(error) or ("the host has no memory" if result == BFC_OUT_OF_MEMORY else type(error).__name__)
        text = said.encode("utf-8", "replace")
        if room and <size_t>len(text) >= room:      # no half of a character at its end
            text = text[:room - 1].decode("utf-8", "ignore").encode()
        refuse(text, why, room)
    except BaseException as another:
        interrupted |= isinstance(another, KeyboardInterrupt)
        refuse("bfc: the host has no memory to say what failed", why, room)
    if interrupted:     # not before: Python would raise it here
        PyErr_SetInterrupt()
    return result
