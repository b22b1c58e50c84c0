"""The table of C functions behind `bfc_allocator.h`: a pool for each device of a back end of PyTorch.

A hit and an ordinary free take no GIL. Everything else does, with no lock held.
"""

import signal
import warnings

from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t
from libc.string cimport memcpy, memset
from libcpp cimport bool as cbool

from bfc.interpreter._exit cimport exiting
from bfc.interpreter._forks cimport call_in_child
from bfc.buffers._owners cimport follow_scopes
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._lock cimport Shown
from bfc.allocators._frees cimport report_unraisable
from bfc.allocators._allocator cimport Allocator
from bfc.allocators._without_gil cimport free_at_once_without_gil, hit_without_gil

from bfc.errors import InvalidPointerError
from bfc.integrations._torch_stats import memory_stats
from bfc.pytorch.words import FIELDS as _FIELDS, GROUPS as _GROUPS
from bfc.suballocators.base import checked_memory_info

cdef extern from "wait.hpp" namespace "bfc" nogil:
    bint is_finalizing()

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

cdef enum:
    DEVICES = 64
    ORDERED = 64        # streams of a device that are known to run their work in order

cdef const char* EXITS = "bfc: the interpreter exits, and nothing can be allocated any more"
cdef const char* FORKED = ("bfc: this process was forked from one that has used the device, which does not work in a "
                           "child: start processes with multiprocessing's \"spawn\" or \"forkserver\"")

cdef uint64_t forks = 0     # that led to this process


cdef void note_fork() noexcept nogil:
    global forks
    forks += 1


call_in_child(note_fork)


cdef class Table:
    """The functions for some pools, which are opened when their device is first used.

    Parameters
    ----------
    open_pool : callable
        Returns the `Allocator` of a device, by its number.
    devices : int
        How many there are.

    Raises
    ------
    ValueError
        If there are none, or more than 64.
    """

    cdef bfc_allocator functions
    cdef object open_pool
    cdef readonly int devices
    cdef void* pools[DEVICES]           # borrowed from `kept`; NULL: not open yet
    cdef dict kept
    cdef uint64_t forks_before          # it was made
    cdef Shown[int64_t] invalid
    cdef int64_t ordered[DEVICES][ORDERED]
    cdef Shown[int] ordered_count[DEVICES]

    def __cinit__(self, open_pool, int devices):
        if not 0 < devices <= DEVICES:
            raise ValueError(f"a back end has 1 to {DEVICES} devices, not {devices}")
        self.open_pool = open_pool
        self.devices = devices
        self.kept = {}
        self.forks_before = forks
        memset(self.pools, 0, sizeof(self.pools))
        self.functions = functions_of(self)
        follow_scopes()

    @property
    def invalid_frees(self):
        """How often an address was freed that was not live."""
        return self.invalid.get()

    def capsule(self):
        """The table in a PyCapsule, which keeps it alive.

        Returns
        -------
        PyCapsule
            Named "bfc.allocator".
        """
        Py_INCREF(self)
        try:
            return PyCapsule_New(&self.functions, BFC_ALLOCATOR_CAPSULE, drop)
        except BaseException:
            Py_DECREF(self)
            raise

    def note_ordered(self, int device, int64_t stream):
        """Note that a stream runs its work in order, so that a hit there needs no question to the device.

        Parameters
        ----------
        device : int
            The number of the device.
        stream : int
            The stream's handle. It must live as long as the table.
        """
        cdef int count = self.ordered_count[device].get()
        if count < ORDERED:
            self.ordered[device][count] = stream
            self.ordered_count[device].set(count + 1)

    cdef cbool is_ordered(self, int device, int64_t stream) noexcept nogil:
        cdef int place
        if stream == 0 or not (<Allocator>self.pools[device]).may_be_unordered:
            return True
        for place in range(self.ordered_count[device].get()):
            if self.ordered[device][place] == stream:
                return True
        return False

    cdef cbool is_lost(self) noexcept nogil:
        """Whether this is a forked child of the process that used the device."""
        return forks != self.forks_before and not self.is_of_host()

    cdef cbool is_of_host(self) noexcept nogil:
        cdef int device
        for device in range(self.devices):
            if self.pools[device] != NULL and (<Allocator>self.pools[device]).home_stream != HOST_STREAM:
                return False
        return True

    cdef Allocator pool_of(self, int device):
        if not 0 <= device < self.devices:
            raise ValueError(f"there is no device {device}: this back end has {self.devices}")
        found = self.kept.get(device)
        if found is None:
            found = self.kept.setdefault(device, self.open_pool(device))
            if not isinstance(found, Allocator):
                del self.kept[device]
                raise TypeError(f"device {device} needs an allocator of bfc, not {type(found).__name__}")
            self.pools[device] = <void*>found
        return found

    def device_at(self, address):
        """The number of the device whose pool an address lies in; -1 for others' memory."""
        return device_of(self, <void*><uintptr_t>address)


# -- the functions: a borrowed reference cannot be used as an object without the GIL, but it can be passed as one ------

cdef bfc_result allocate(Table self, int device, size_t nbytes, int64_t stream, void** ptr,
                         char* why, size_t room) noexcept nogil:
    cdef uint64_t address = 0
    ptr[0] = NULL
    if self.is_lost():
        return refuse(FORKED, why, room)
    if (0 <= device < self.devices and self.pools[device] != NULL and self.is_ordered(device, stream)
            and hit_without_gil(<Allocator>self.pools[device], nbytes, on(<Allocator>self.pools[device], stream),
                                &address)):
        ptr[0] = <void*>address
        return BFC_OK
    if exiting or is_finalizing():
        return refuse(EXITS, why, room)
    return allocate_with_gil(self, device, nbytes, stream, ptr, why, room)


cdef uint64_t on(Allocator pool, int64_t stream) noexcept nogil:
    """The stream as a pool knows it: memory of the host has one of its own."""
    return HOST_STREAM if stream == 0 and pool.home_stream == HOST_STREAM else <uint64_t>stream


cdef bfc_result allocate_with_gil(Table self, int device, size_t nbytes, int64_t stream, void** ptr,
                                  char* why, size_t room) noexcept with gil:
    try:
        ptr[0] = <void*><uintptr_t>self.pool_of(device).allocate_raw(nbytes, <uint64_t>stream)
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result free(Table self, void* ptr) noexcept nogil:
    cdef int device
    if ptr == NULL or exiting or self.is_lost():
        return BFC_OK
    for device in range(self.devices):
        if self.pools[device] != NULL and free_at_once_without_gil(<Allocator>self.pools[device], <uint64_t>ptr):
            return BFC_OK
    if is_finalizing():
        return BFC_OK
    return free_with_gil(self, <uint64_t>ptr)


cdef bfc_result free_with_gil(Table self, uint64_t address) noexcept with gil:
    """Frees what other streams have used, or what something else is to be told of."""
    try:
        for pool in list(self.kept.values()):
            if pool.closed:
                continue
            try:
                pool.deallocate_raw(address)
                return BFC_OK
            except InvalidPointerError:
                continue
        for pool in self.kept.values():
            if pool.closed:
                return BFC_OK   # its memory went back when it was closed
        self.invalid.add(1)
        warnings.warn(f"{address:#x} was freed, and is not live: it was freed before, or is another allocator's. "
                      f"Nothing has changed; memory_stats()[\"invalid_frees\"] counts it", RuntimeWarning, stacklevel=1)
        return BFC_NOT_LIVE
    except BaseException as error:
        report_unraisable(error, "a free without the GIL")
        return BFC_FAILED


cdef bfc_result record_stream(Table self, void* ptr, int64_t stream, char* why, size_t room) noexcept with gil:
    try:
        pool_at(self, <uint64_t>ptr).record_stream(<uint64_t>ptr, <uint64_t>stream)
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result copy(Table self, void* to, const void* start, size_t nbytes, int64_t stream,
                     char* why, size_t room) noexcept with gil:
    try:
        if nbytes:
            source = pool_at(self, <uint64_t>to).sub_allocator
            source.copy(<uint64_t>to, <uint64_t>start, nbytes, <uint64_t>stream)
            source.wait(<uint64_t>stream)
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result empty(Table self, char* why, size_t room) noexcept with gil:
    try:
        for pool in list(self.kept.values()):
            pool.empty_cache()
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result stats(Table self, int device, bfc_device_stats* out, char* why, size_t room) noexcept with gil:
    try:
        memset(out, 0, sizeof(bfc_device_stats))
        fill_stats(memory_stats(self.pool_of(device)), out)
        out.invalid_frees = self.invalid.get()
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef int fill_stats(dict found, bfc_device_stats* out) except -1:
    """Fills the groups, which lie one behind the other in the order of _GROUPS, then the single counters."""
    cdef int64_t* place = &out.allocation[0].current
    keys = []
    for group in _GROUPS:
        keys += f"{group}.all", f"{group}.small_pool", f"{group}.large_pool"
    for key in (*keys, "oversize_allocations", "oversize_segments"):
        for field in _FIELDS:
            place[0] = found.get(f"{key}.{field}", 0)
            place += 1
    out.num_alloc_retries = found.get("num_alloc_retries", 0)
    out.num_ooms = found.get("num_ooms", 0)
    out.num_sync_all_streams = found.get("num_sync_all_streams", 0)
    out.num_device_alloc = found.get("num_device_alloc", 0)
    out.num_device_free = found.get("num_device_free", 0)
    out.max_split_size = found.get("max_split_size", 0)
    return 0


cdef bfc_result reset_accumulated(Table self, int device, char* why, size_t room) noexcept with gil:
    try:
        self.pool_of(device).reset_accumulated_stats()
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result reset_peaks(Table self, int device, char* why, size_t room) noexcept with gil:
    try:
        self.pool_of(device).reset_peak_stats()
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef bfc_result memory_info(Table self, int device, size_t* free_bytes, size_t* total,
                            char* why, size_t room) noexcept with gil:
    try:
        source = self.pool_of(device).sub_allocator
        free_bytes[0], total[0] = checked_memory_info(source.memory_info(), source)
    except BaseException as error:
        return explain(error, why, room)
    return BFC_OK


cdef int device_of(Table self, const void* ptr) noexcept nogil:
    cdef int device
    for device in range(self.devices):
        if self.pools[device] != NULL and lies_in(<Allocator>self.pools[device], <uint64_t>ptr):
            return device
    return -1


cdef cbool lies_in(Allocator pool, uint64_t address) noexcept nogil:
    pool.acquire()
    cdef cbool found = pool.pool.overlaps_region(address, 1)
    pool.lock.release()
    return found


cdef Allocator pool_at(Table self, uint64_t address):
    cdef int device = device_of(self, <void*>address)
    if device < 0:
        raise InvalidPointerError(f"{address:#x} lies in no pool of this back end")
    return self.pool_of(device)


cdef void retain(Table self) noexcept with gil:
    Py_INCREF(self)


cdef void release(Table self) noexcept with gil:
    Py_DECREF(self)


cdef void drop(object capsule) noexcept:
    """The capsule is gone."""
    cdef bfc_allocator* functions = <bfc_allocator*>PyCapsule_GetPointer(capsule, BFC_ALLOCATOR_CAPSULE)
    Py_DECREF(<Table>functions.self)


cdef bfc_allocator functions_of(Table self) noexcept:
    cdef bfc_allocator table
    table.version = BFC_ALLOCATOR_VERSION
    table.size = sizeof(bfc_allocator)
    table.self = <void*>self
    table.allocate = <bfc_result (*)(void*, int, size_t, int64_t, void**, char*, size_t) noexcept>allocate
    table.free = <bfc_result (*)(void*, void*) noexcept>free
    table.record_stream = <bfc_result (*)(void*, void*, int64_t, char*, size_t) noexcept>record_stream
    table.copy = <bfc_result (*)(void*, void*, const void*, size_t, int64_t, char*, size_t) noexcept>copy
    table.empty = <bfc_result (*)(void*, char*, size_t) noexcept>empty
    table.stats = <bfc_result (*)(void*, int, bfc_device_stats*, char*, size_t) noexcept>stats
    table.reset_accumulated_stats = <bfc_result (*)(void*, int, char*, size_t) noexcept>reset_accumulated
    table.reset_peak_stats = <bfc_result (*)(void*, int, char*, size_t) noexcept>reset_peaks
    table.memory_info = <bfc_result (*)(void*, int, size_t*, size_t*, char*, size_t) noexcept>memory_info
    table.device_of = <int (*)(void*, const void*) noexcept>device_of
    table.retain = <void (*)(void*) noexcept>retain
    table.release = <void (*)(void*) noexcept>release
    return table


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
    """Writes an error down for C, whose caller raises one of its own. A Ctrl-C is raised again where Python goes on."""
    cdef bytes text
    cdef bfc_result result = BFC_FAILED
    try:
        if isinstance(error, MemoryError):
            result = BFC_OUT_OF_MEMORY
        elif isinstance(error, InvalidPointerError):
            result = BFC_NOT_LIVE
        elif isinstance(error, KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        said = str(error) or type(error).__name__
        text = said.encode("utf-8", "replace")[:room - 1].decode("utf-8", "ignore").encode("utf-8")
        memcpy(why, <char*>text, len(text))
        why[len(text)] = 0
    except BaseException:
        refuse("bfc: the host has no memory to say what failed", why, room)
    return result
