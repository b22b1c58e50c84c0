"""One CUDA device: its primary context, a kind of memory on it, events that mark the end of queued work, and reserved
addresses with the physical memory that is mapped to them.

Here are only the calls of the driver; `suballocators/_cuda_pages.pyx` keeps the books of what is reserved and mapped.
No call that maps takes a stream, or waits for one.
"""

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.string cimport memset

from bfc.native.nothrow cimport try_push_back, try_store
from bfc.native.turns cimport TurnAt, counted
from bfc.interpreter._process cimport exiting
from bfc.drivers.cuda._driver cimport (
    CAPTURED, CAPTURES_OTHERS, CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_VALUE, NOT_FOUND, NOT_INITIALIZED,
    NOT_LIVE, NOT_READY, OUT_OF_MEMORY, SUCCESS, check, cu, failed, failure, first_active_device, forked, is_lost,
)

from bfc.drivers.cuda._driver import attribute, device_count, driver_error, driver_version, load
from bfc.errors import DeviceUnavailableError

cdef extern from "pages.hpp" namespace "bfc" nogil:
    void* map_pages(size_t nbytes)
    void unmap_pages(void* start, size_t nbytes)
    void touch_pages(void* start, size_t nbytes, unsigned int threads)

cdef extern from "source.h":
    const char* BFC_NATIVE_SOURCE

cdef enum:
    LEGACY_STREAM = 1           # the legacy default stream; what 0 means depends on cuda-python
    PER_THREAD_STREAM = 2
    NON_BLOCKING = 1            # cuStreamCreate
    BLOCKING_WAIT = 1           # cuEventCreate
    NO_TIMING = 2
    RELAXED = 2                 # CUstreamCaptureMode
    ATTACH_GLOBAL = 1           # cuMemAllocManaged
    PORTABLE_AND_MAPPED = 3     # cuMemHostAlloc
    PAGE = 4096
    ALIGNMENT = 256             # of every address from the driver, at least
    MEMORY_TYPE = 2             # CUpointer_attribute
    HOST_MEMORY = 1             # CUmemorytype

_KINDS = {"device": DEVICE, "managed": MANAGED, "pinned": PINNED, "async": ASYNC}


cdef inline void* stream_handle(uint64_t stream) noexcept nogil:
    return <void*><size_t>(stream if stream else LEGACY_STREAM)


cdef inline void* all_of(uint64_t stream) noexcept nogil:
    """The stream on which an event covers all work of `stream`. For the per-thread default stream the thread is
    unknown, but the legacy default stream waits for those of all threads."""
    return stream_handle(0 if stream == PER_THREAD_STREAM else stream)


cdef CUresult unless_capturing(void* stream, CUresult otherwise) noexcept nogil:
    """The error for a stream that is being captured, or `otherwise`. An event that is recorded in a capture becomes a
    part of the graph, and a stream that waits for it joins the capture. We must not do that to a user's capture, nor
    let it end with an error."""
    cdef int capturing = 0
    cdef CUresult result = cu.stream_is_capturing(stream, &capturing)
    return otherwise if result == SUCCESS and capturing else result


cdef inline bint is_reset(CUresult result) noexcept nogil:
    """Whether a context was destroyed by a reset of its device."""
    return result in (INVALID_CONTEXT, CONTEXT_IS_DESTROYED)


cdef class PrimaryContext:
    """The primary context of a device. It is retained until this object is collected.

    Another library may reset the device. Memory, streams and events of the context are gone then, and when the device
    is used again, its context has the same handle: only its id has changed. Code that has memory in the
    context uses `enter`, which fails after a reset. Code without memory there uses `push`, which takes the current
    context.
    """

    def __init__(self, device):
        if self.retained:
            raise RuntimeError("a context is retained once")
        load()
        self.open(device)

    cdef int open(self, int device) except -1:
        cdef int handle = 0
        self.ordinal = device
        check(cu.device_get(&handle, device), f"cuDeviceGet({device})")
        check(self.retain(), f"cuDevicePrimaryCtxRetain({device})")
        return 0

    cdef CUresult retain(self) noexcept nogil:
        cdef CUresult result = cu.context_retain(&self.context, self.ordinal)
        if result == SUCCESS:
            self.retained = True
            result = cu.context_id(self.context, &self.identity)
        return result

    def __dealloc__(self):
        # At the exit the driver may have shut down, and calling it crashes.
        if self.retained and not counted(exiting) and not forked:
            cu.context_release(self.ordinal)

    cdef CUresult enter(self, int* mode) noexcept nogil:
        """Makes the context current, and relaxes the capture mode, so that captures in other threads are not affected.
        Fails if the device was reset."""
        cdef unsigned long long identity = 0
        cdef void* popped
        if forked or not self.retained:
            return NOT_INITIALIZED
        cdef CUresult result = cu.context_id(self.context, &identity)
        # After a reset the primary context has the same handle, and none of this memory.
        if result == SUCCESS and identity != self.identity:
            result = CONTEXT_IS_DESTROYED
        if result == SUCCESS:
            result = cu.context_push(self.context)
        if result != SUCCESS:
            return result
        mode[0] = RELAXED
        result = cu.capture_mode(mode)
        if result != SUCCESS:
            cu.context_pop(&popped)
        return result

    cdef CUresult leave(self, int mode) noexcept nogil:
        """Makes the previous context current again, and restores the capture mode."""
        cdef void* popped
        if forked or not self.retained:
            return NOT_INITIALIZED
        cdef CUresult result = cu.capture_mode(&mode)
        # Even if the mode could not be put back: the caller's context must be current again.
        cdef CUresult second = cu.context_pop(&popped)
        return second if result == SUCCESS else result

    cdef CUresult renew(self) noexcept nogil:
        if forked or not self.retained:
            return NOT_INITIALIZED
        cdef CUresult result = cu.context_id(self.context, &self.identity)
        return self.retain() if is_reset(result) else result

    def push(self):
        """Like `enter`, but also works after a reset. Returns the argument for `pop`. Raises DriverError."""
        cdef int mode
        cdef CUresult result
        with nogil:
            result = self.enter(&mode)
            if is_reset(result):
                result = self.renew()
                if result == SUCCESS:
                    result = self.enter(&mode)
        check(result, "cuCtxPushCurrent")
        return mode

    def pop(self, int mode):
        """Makes the context current that was current before `push`. Raises DriverError."""
        cdef CUresult result
        with nogil:
            result = self.leave(mode)
        check(result, "cuCtxPopCurrent")

    def current_id(self):
        """The present id of the context. It changes if the device is reset. Raises DriverError."""
        cdef CUresult result
        with nogil:
            result = self.renew()
        check(result, "cuCtxGetId")
        return self.identity

    @property
    def handle(self):
        return <uint64_t>self.context


def device_of(uint64_t context):
    """The device of any context. Raises DriverError."""
    cdef int device = 0
    cdef void* popped
    cdef CUresult result
    load()
    with nogil:
        result = cu.context_push(<void*><size_t>context)
        if result == SUCCESS:
            result = cu.context_device(&device)
            cu.context_pop(&popped)
    check(result, "cuCtxGetDevice")
    return device


def is_host_memory(uint64_t address):
    """Whether the driver knows an address as host memory: pinned, or registered. Makes no context: if no device has
    one, nothing can be pinned. Raises DriverError if the driver does not answer."""
    cdef unsigned int found = 0
    cdef int mode
    cdef PrimaryContext context
    load()
    cdef CUresult result = cu.pointer_attribute(&found, MEMORY_TYPE, address)
    # The question needs a context, and any will do. To make one would take memory of a device.
    if result == INVALID_CONTEXT:
        context = PrimaryContext.__new__(PrimaryContext)
        context.ordinal = first_active_device()
        if context.ordinal >= 0 and context.retain() == SUCCESS and context.enter(&mode) == SUCCESS:
            result = cu.pointer_attribute(&found, MEMORY_TYPE, address)
            context.leave(mode)
    if result in (INVALID_VALUE, INVALID_CONTEXT):     # unknown memory, or no device has a context
        return False
    check(result, "cuPointerGetAttribute")
    return found == HOST_MEMORY


@cython.no_gc
cdef class DeviceMemory:
    """One kind of memory of a device, and its events."""

    def __cinit__(self):
        self.context = PrimaryContext.__new__(PrimaryContext)

    def __init__(self, device, kind):
        if kind not in _KINDS:
            raise ValueError(f"kind is one of {', '.join(map(repr, _KINDS))}, not {kind!r}")
        if self.context.retained:
            raise RuntimeError("a device is opened once")
        count = device_count()
        self.ordinal = device
        if not 0 <= device < count:
            raise DeviceUnavailableError(f"there is no device {device}: the driver shows {count}, counted from 0")
        self.kind = _KINDS[kind]
        if self.kind == ASYNC and not self.attribute(115):
            raise DeviceUnavailableError(f"device {device} or its driver has no memory pools (CUDA "
                                         f"{'.'.join(map(str, driver_version()))}): take kind=\"device\"")
        if self.kind == MANAGED and not self.attribute(83):
            raise DeviceUnavailableError(f"device {device} has no managed memory: take kind=\"device\"")
        self.context.open(device)
        if self.kind == ASYNC:
            self.open_own_stream()

    cdef int open_own_stream(self) except -1:
        cdef int mode
        check(self.context.enter(&mode), "cuCtxPushCurrent")
        cdef CUresult result = cu.stream_create(&self.own_stream, NON_BLOCKING)
        self.context.leave(mode)
        return check(result, "cuStreamCreate")

    def __dealloc__(self):
        cdef void* event
        cdef int mode
        if counted(exiting) or self.context.enter(&mode) != SUCCESS:
            return
        for event in self.idle_events:
            cu.event_destroy(event)
        if self.own_stream != NULL:
            cu.stream_destroy(self.own_stream)
        self.context.leave(mode)

    # -- what it is ----------------------------------------------------------------------------------------------------

    def attribute(self, number):
        """A CUdevice_attribute."""
        return attribute(self.ordinal, number)

    @property
    def name(self):
        cdef char text[256]
        load()
        check(cu.device_name(text, 256, self.ordinal), f"cuDeviceGetName({self.ordinal})")
        return (<const char*>text).decode()

    @property
    def total_bytes(self):
        cdef size_t total = 0
        load()
        check(cu.device_total(&total, self.ordinal), f"cuDeviceTotalMem({self.ordinal})")
        return total

    def memory_info(self):
        """The (free, total) bytes of the device now, with the memory of all processes on it counted."""
        cdef size_t free = 0, total = 0
        cdef int mode
        cdef CUresult result
        with nogil:
            result = self.context.enter(&mode)
            if result == SUCCESS:
                result = cu.memory_info(&free, &total)
                self.context.leave(mode)
        check(result, "cuMemGetInfo")
        return free, total

    # -- blocks --------------------------------------------------------------------------------------------------------

    def alloc(self, uint64_t alignment, uint64_t nbytes):
        """See SubAllocator.alloc."""
        cdef uint64_t address = 0
        cdef CUresult result
        with nogil:
            result = self.allocate(alignment, nbytes, &address)
        if result == OUT_OF_MEMORY:
            return None
        if failed(result):
            raise failure(result, f"{_ALLOC_CALLS[self.kind]}({nbytes} bytes) on device {self.ordinal}")
        return self.answer(address, nbytes)

    def alloc_registered(self, uint64_t alignment, uint64_t nbytes, unsigned int threads):
        """Like SubAllocator.alloc, with pages of the operating system that `threads` threads touch, and that
        cuMemHostRegister pins."""
        cdef uint64_t address = 0
        cdef CUresult result
        with nogil:
            result = self.allocate_registered(alignment, nbytes, threads, &address)
        if result == OUT_OF_MEMORY:
            return None
        if failed(result):
            raise failure(result, f"cuMemHostRegister({nbytes} bytes) on device {self.ordinal}")
        return self.answer(address, nbytes)

    cdef tuple answer(self, uint64_t address, uint64_t nbytes):
        """A new block as a tuple. If Python has no memory for the tuple, the block is given back: it would be lost."""
        try:
            return address, nbytes
        except MemoryError:
            with nogil:
                self.release(address, nbytes, True)
            raise

    def free(self, address, nbytes, bint idle=False):
        """See SubAllocator.free; with `idle`, see free_idle."""
        cdef CUresult result = NOT_LIVE
        cdef uint64_t start, size
        if 0 <= address < 2**64 and 0 <= nbytes < 2**64:
            start, size = address, nbytes
            with nogil:
                result = self.release(start, size, idle)
        if failed(result):
            raise failure(result, f"{_FREE_CALLS[self.kind]}({address:#x}, {nbytes} bytes) on device {self.ordinal}")

    cdef CUresult allocate(self, uint64_t alignment, uint64_t nbytes, uint64_t* address) noexcept nogil:
        cdef int mode
        cdef Block block
        # The driver aligns to 256 at least, so the margin can be smaller by that much.
        cdef uint64_t margin = alignment - ALIGNMENT if alignment > ALIGNMENT else 0
        if nbytes + margin < nbytes or nbytes + margin >= <uint64_t>1 << 63:
            return OUT_OF_MEMORY
        cdef CUresult result = self.context.enter(&mode)
        if result != SUCCESS:
            return result
        block.nbytes = nbytes
        block.mapped = 0
        result = self.ask(nbytes, &block.base)
        if result == SUCCESS and block.base & (alignment - 1):  # rare: the driver aligns more than it promises
            result = self.give_back(&block, True)
            if result == SUCCESS:
                # The first block went back before: together they might not fit.
                result = self.ask(nbytes + margin, &block.base)
        if result == SUCCESS:
            address[0] = (block.base + alignment - 1) & ~(alignment - 1)
            result = self.keep(address[0], &block)
        self.context.leave(mode)
        return result

    cdef CUresult allocate_registered(self, uint64_t alignment, uint64_t nbytes, unsigned int threads,
                                      uint64_t* address) noexcept nogil:
        cdef int mode
        cdef Block block
        cdef uint64_t margin = alignment if alignment > PAGE else 0
        if nbytes + margin < nbytes or nbytes + margin >= <uint64_t>1 << 62:
            return OUT_OF_MEMORY
        block.nbytes = nbytes
        block.mapped = (nbytes + margin + PAGE - 1) // PAGE * PAGE
        cdef void* pages = map_pages(block.mapped)
        if pages == NULL:
            return OUT_OF_MEMORY
        # First, and by several threads, as PyTorch does (pinned_num_register_threads): pinning then finds all pages
        # there.
        touch_pages(pages, block.mapped, threads)
        block.base = <uint64_t>pages
        cdef CUresult result = self.context.enter(&mode)
        if result == SUCCESS:
            result = cu.host_register(pages, block.mapped, PORTABLE_AND_MAPPED)
            if result == SUCCESS:
                address[0] = (block.base + alignment - 1) & ~(alignment - 1)
                result = self.keep(address[0], &block)
            else:
                unmap_pages(pages, block.mapped)
            self.context.leave(mode)
        else:
            unmap_pages(pages, block.mapped)
        return result

    cdef CUresult keep(self, uint64_t address, Block* block) noexcept nogil:
        """Adds a new block to the list of live ones, or gives it back if the host has no memory for that."""
        cdef bint kept
        self.lock.wait_and_acquire()
        kept = try_store(self.live, address, block[0])
        if kept:
            self.live_bytes += block.nbytes
        self.lock.release()
        if not kept:
            self.give_back(block, True)
        return SUCCESS if kept else OUT_OF_MEMORY

    cdef CUresult ask(self, uint64_t nbytes, uint64_t* address) noexcept nogil:
        cdef CUresult result
        if self.kind == MANAGED:
            return cu.managed_alloc(address, nbytes, ATTACH_GLOBAL)
        if self.kind == PINNED:
            return cu.host_alloc(<void**>address, nbytes, PORTABLE_AND_MAPPED)
        if self.kind == ASYNC:
            result = cu.async_alloc(address, nbytes, self.own_stream)
            if result != SUCCESS:
                return result
            # Memory of the driver's pool is ordered on this stream. After a wait for that, any stream may use it.
            result = cu.stream_synchronize(self.own_stream)
            if result != SUCCESS:
                cu.async_free(address[0], self.own_stream)
            return result
        return cu.memory_alloc(address, nbytes)

    cdef CUresult release(self, uint64_t address, uint64_t nbytes, bint idle) noexcept nogil:
        cdef int mode
        cdef CUresult result
        cdef Block block
        if forked:
            self.live_bytes -= min(nbytes, self.live_bytes)
            return SUCCESS      # in a forked child: a thread of the parent may have been changing the map
        self.lock.wait_and_acquire()
        # The size, too: a wrong one says that the caller takes this for another block.
        cdef bint found = self.live.count(address) and self.live[address].nbytes == nbytes
        if found:
            block = self.live[address]
            # Before the driver has it: another thread may get the same address at once.
            self.live.erase(address)
            self.live_bytes -= nbytes
        self.lock.release()
        if not found:
            return NOT_LIVE
        result = self.context.enter(&mode)
        if result == SUCCESS:
            result = self.give_back(&block, idle)
            self.context.leave(mode)
        elif is_lost(result) and block.mapped:      # the registration went with the context
            unmap_pages(<void*>block.base, block.mapped)
        # A context that was reset has taken its memory with it.
        if result == SUCCESS or is_lost(result):
            return SUCCESS
        self.lock.wait_and_acquire()
        try_store(self.live, address, block)    # without host memory for this, the block can only not be freed
        self.live_bytes += nbytes
        self.lock.release()
        return result

    cdef CUresult give_back(self, Block* block, bint idle) noexcept nogil:
        """Gives a block back to the driver. cuMemFree waits for all work on the device. For other kinds of memory
        this function waits, as any stream may use a region, unless the caller says that the block is idle."""
        cdef CUresult result = SUCCESS
        if self.kind == DEVICE or self.kind == MANAGED:
            return cu.memory_free(block.base)
        if not idle:
            result = cu.context_synchronize()
        if result != SUCCESS:
            return result
        if block.mapped:
            result = cu.host_unregister(<void*>block.base)
            if result == SUCCESS or is_lost(result):
                unmap_pages(<void*>block.base, block.mapped)
            return result
        if self.kind == PINNED:
            return cu.host_free(<void*>block.base)
        result = cu.async_free(block.base, self.own_stream)
        if result == SUCCESS:
            cu.stream_synchronize(self.own_stream)      # the block is freed even if this returns an earlier error
        return result

    # -- streams -------------------------------------------------------------------------------------------------------

    def fence(self, uint64_t stream):
        """See SubAllocator.fence. Raises DriverError."""
        cdef EventFence fence = EventFence.__new__(EventFence)
        cdef CUresult result
        with nogil:
            result = self.mark(stream, &fence.event)
        if is_lost(result):
            return None     # no work is queued in a context that is gone, and no memory left to protect
        if failed(result):
            raise failure(result, f"a fence on stream {stream:#x} of device {self.ordinal}")
        fence.memory = self
        return fence

    def order(self, uint64_t first, uint64_t then):
        """See SubAllocator.order. Raises DriverError."""
        cdef CUresult result
        with nogil:
            result = self.make_wait(first, then)
        if failed(result):
            raise failure(result, f"making stream {then:#x} wait for stream {first:#x} on device {self.ordinal}")

    def stream_id(self, uint64_t stream):
        """See SubAllocator.stream_id. Raises DriverError."""
        cdef uint64_t id = 0
        cdef CUresult result
        with nogil:
            result = self.identify(stream, &id)
        if failed(result):
            raise failure(result, f"cuStreamGetId of stream {stream:#x} on device {self.ordinal}")
        return id

    def is_capturing(self, uint64_t stream):
        """Whether a stream captures a graph, or has until that was spoilt. No default stream. Raises DriverError."""
        cdef int capturing = 0
        cdef CUresult result = NOT_INITIALIZED
        if self.context.retained and not forked:
            result = cu.stream_is_capturing(stream_handle(stream), &capturing)
        if failed(result):
            raise failure(result, f"cuStreamIsCapturing of stream {stream:#x} on device {self.ordinal}")
        return capturing != 0

    def synchronize(self):
        """Waits for all work on the device. Raises DriverError, even if only an earlier kernel has failed."""
        cdef CUresult result
        with nogil:
            result = self.wait_for_all()
        if failed(result):
            raise failure(result, f"cuCtxSynchronize on device {self.ordinal}")

    def wait(self, uint64_t stream):
        """See SubAllocator.wait. Raises DriverError."""
        cdef CUresult result
        with nogil:
            result = self.wait_for_stream(stream)
        if failed(result) and not is_lost(result):
            raise failure(result, f"cuStreamSynchronize of stream {stream:#x} on device {self.ordinal}")

    def copy_stream(self):
        """A stream for copies that no other work waits for, and that wait for none. Raises DriverError."""
        if self.own_stream == NULL:
            self.open_own_stream()
        return <uint64_t>self.own_stream

    def copy(self, uint64_t destination, uint64_t source, uint64_t nbytes, uint64_t stream):
        """See SubAllocator.copy. Raises DriverError."""
        cdef CUresult result
        with nogil:
            result = self.move(destination, source, nbytes, stream)
        if failed(result):
            raise failure(result, f"a copy of {nbytes} bytes on stream {stream:#x} of device {self.ordinal}")

    def fill(self, uint64_t address, uint64_t nbytes, unsigned char byte, uint64_t stream):
        """Fills memory of the device with a byte, as `copy` copies. Raises DriverError."""
        cdef CUresult result
        with nogil:
            result = self.move(address, 0, nbytes, stream, byte)
        if failed(result):
            raise failure(result, f"filling {nbytes} bytes on stream {stream:#x} of device {self.ordinal}")

    cdef CUresult take_event(self, void** event) noexcept nogil:
        """An unused event, or a new one, in the current context."""
        event[0] = NULL
        self.lock.wait_and_acquire()
        if self.idle_events.size():
            event[0] = self.idle_events.back()
            self.idle_events.pop_back()
        self.lock.release()
        if event[0] != NULL:
            return SUCCESS
        # Without timing, as PyTorch's: such an event costs least. A thread that waits for it sleeps.
        return cu.event_create(event, NO_TIMING | BLOCKING_WAIT)

    cdef void put_event(self, void* event) noexcept nogil:
        cdef bint kept
        if forked:
            return              # in a forked child: a thread of the parent may have been changing the list
        self.lock.wait_and_acquire()
        kept = try_push_back(self.idle_events, event)
        self.lock.release()
        if not kept:
            # Without host memory for the list it is dropped: the next one is made anew.
            cu.event_destroy(event)

    cdef CUresult mark(self, uint64_t stream, void** event) noexcept nogil:
        """Records an event on a stream. Refused in a capture: such an event could not be queried."""
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result != SUCCESS:
            return result
        result = unless_capturing(all_of(stream), CAPTURED)
        if result == SUCCESS:
            result = self.take_event(event)
        if result == SUCCESS:
            result = cu.event_record(event[0], all_of(stream))
            if result != SUCCESS:
                self.put_event(event[0])
                event[0] = NULL
        self.context.leave(mode)
        return result

    cdef CUresult make_wait(self, uint64_t first, uint64_t then) noexcept nogil:
        """Makes a stream wait for another. The event can be reused at once, as a wait refers to its state at the
        call."""
        cdef int mode
        cdef void* event
        cdef CUresult result = self.context.enter(&mode)
        if result != SUCCESS:
            return result
        result = unless_capturing(all_of(first), CAPTURED)
        if result == SUCCESS:
            # An event of work outside of the graph would spoil the capture.
            result = unless_capturing(stream_handle(then), CAPTURES_OTHERS)
        if result == SUCCESS:
            result = self.take_event(&event)
        if result == SUCCESS:
            result = cu.event_record(event, all_of(first))
            if result == SUCCESS:
                result = cu.stream_wait_event(stream_handle(then), event, 0)
            self.put_event(event)
        self.context.leave(mode)
        return result

    cdef CUresult identify(self, uint64_t stream, uint64_t* id) noexcept nogil:
        """A stream's id. The default streams, which have fixed handles, always exist: their handles serve as ids. A
        capture is spoilt by the question, in any mode, so a stream that captures is not asked."""
        cdef int mode
        cdef unsigned long long found = 0
        id[0] = stream
        if stream <= PER_THREAD_STREAM:
            return SUCCESS
        cdef CUresult result = self.context.enter(&mode)
        if result == SUCCESS:
            result = unless_capturing(stream_handle(stream), CAPTURES_OTHERS)
            if result == SUCCESS:
                result = cu.stream_id(stream_handle(stream), &found)
            self.context.leave(mode)
        # So that no id equals that of a default stream, which is its handle.
        id[0] = found | <uint64_t>1 << 63
        return result

    cdef CUresult wait_for_all(self) noexcept nogil:
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result == SUCCESS:
            result = cu.context_synchronize()
            self.context.leave(mode)
        return result

    cdef CUresult wait_for_stream(self, uint64_t stream) noexcept nogil:
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result != SUCCESS:
            return result
        result = unless_capturing(all_of(stream), CAPTURED)
        if result == SUCCESS:
            result = cu.stream_synchronize(all_of(stream))
        self.context.leave(mode)
        return result

    cdef CUresult move(self, uint64_t destination, uint64_t source, uint64_t nbytes, uint64_t stream,
                       int byte=-1) noexcept nogil:
        """Copies, or fills with a byte, and waits for that."""
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result != SUCCESS:
            return result
        result = unless_capturing(all_of(stream), CAPTURED)
        if result == SUCCESS and byte < 0:
            result = cu.copy_async(destination, source, nbytes, all_of(stream))
        elif result == SUCCESS:
            result = cu.fill_async(destination, <unsigned char>byte, nbytes, all_of(stream))
        if result == SUCCESS:
            result = cu.stream_synchronize(all_of(stream))
        self.context.leave(mode)
        return result

    cdef CUresult ask_event(self, void* event, bint wait) noexcept nogil:
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result == SUCCESS:
            result = cu.event_synchronize(event) if wait else cu.event_query(event)
            self.context.leave(mode)
        return result

    # -- without the GIL -----------------------------------------------------------------------------------------------

    def native(self):
        """The capsule of `native/source.h`, which keeps this object alive."""
        self.table.self = <void*>self
        self.table.alloc = <int (*)(void*, uint64_t, uint64_t, uint64_t*, uint64_t*) noexcept nogil>native_alloc
        self.table.free = <int (*)(void*, uint64_t, uint64_t) noexcept nogil>native_free
        self.table.order = <int (*)(void*, uint64_t, uint64_t) noexcept nogil>native_order
        self.table.stream_id = <int (*)(void*, uint64_t, uint64_t*) noexcept nogil>native_stream_id
        self.table.synchronize = <int (*)(void*) noexcept nogil>native_synchronize
        self.table.mark = <int (*)(void*, uint64_t, void**) noexcept nogil>native_mark
        self.table.reached = <int (*)(void*, void**, int) noexcept nogil>native_reached
        self.table.drop = <void (*)(void*, void*) noexcept nogil>native_drop
        Py_INCREF(self)
        try:
            return PyCapsule_New(&self.table, BFC_NATIVE_SOURCE, let_go)
        except BaseException:
            Py_DECREF(self)
            raise


_ALLOC_CALLS = {DEVICE: "cuMemAlloc", MANAGED: "cuMemAllocManaged", PINNED: "cuMemHostAlloc", ASYNC: "cuMemAllocAsync"}
_FREE_CALLS = {DEVICE: "cuMemFree", MANAGED: "cuMemFree", PINNED: "cuMemFreeHost", ASYNC: "cuMemFreeAsync"}


cdef int native_alloc(DeviceMemory memory, uint64_t alignment, uint64_t nbytes, uint64_t* address,
                      uint64_t* received) noexcept nogil:
    received[0] = nbytes
    return memory.allocate(alignment, nbytes, address)


cdef int native_free(DeviceMemory memory, uint64_t address, uint64_t nbytes) noexcept nogil:
    return memory.release(address, nbytes, False)


cdef int native_order(DeviceMemory memory, uint64_t first, uint64_t then) noexcept nogil:
    """A stream that captures must not wait for work outside of its graph: the host waits for it, in its place."""
    cdef CUresult result = memory.make_wait(first, then)
    return memory.wait_for_stream(first) if result == CAPTURES_OTHERS else result


cdef int native_stream_id(DeviceMemory memory, uint64_t stream, uint64_t* id) noexcept nogil:
    return memory.identify(stream, id)


cdef int native_synchronize(DeviceMemory memory) noexcept nogil:
    return memory.wait_for_all()


cdef int native_mark(DeviceMemory memory, uint64_t stream, void** event) noexcept nogil:
    event[0] = NULL
    cdef CUresult result = memory.mark(stream, event)
    return SUCCESS if is_lost(result) else result       # no work is queued in a context that is gone


cdef int native_reached(DeviceMemory memory, void** event, int waits) noexcept nogil:
    cdef CUresult result = memory.ask_event(event[0], waits)
    if is_lost(result):
        event[0] = NULL
        return SUCCESS
    return result


cdef void native_drop(DeviceMemory memory, void* event) noexcept nogil:
    if event != NULL and not counted(exiting):
        memory.put_event(event)


cdef void let_go(object capsule) noexcept:
    Py_DECREF(<object>(<bfc_native_source*>PyCapsule_GetPointer(capsule, BFC_NATIVE_SOURCE)).self)


@cython.no_gc
cdef class EventFence:
    """An event after the work that was queued on a stream. See `bfc.Fence`."""

    cdef int ask(self, bint wait) except -1:
        cdef CUresult result
        cdef TurnAt turn
        turn.take(self)
        cdef void* event = self.event
        if event == NULL:
            return 1
        with nogil:
            result = self.memory.ask_event(event, wait)
        if result == NOT_READY:
            return 0
        if not is_lost(result):
            if failed(result):
                raise failure(result, "cuEventSynchronize" if wait else "cuEventQuery")
        if self.event != NULL:      # another thread may have found it done, too
            self.event = NULL
            if result == SUCCESS:
                self.memory.put_event(event)
        return 1

    def done(self):
        """Whether everything queued before the mark has finished."""
        return bool(self.ask(False))

    def wait(self):
        """Blocks until everything queued before the mark has finished."""
        self.ask(True)

    def __dealloc__(self):
        if self.event != NULL and not counted(exiting):
            self.memory.put_event(self.event)


cdef enum:
    PINNED_ON_DEVICE = 1        # CUmemAllocationType
    ON_DEVICE = 1               # CUmemLocationType
    READ_WRITE = 3              # CUmemAccess_flags
    MINIMUM = 0                 # CUmemAllocationGranularity_flags
    # CUdevice_attribute
    HAS_VIRTUAL_MEMORY = 102
    HAS_DESCRIPTORS = 103
    HAS_RDMA = 110
    HAS_FABRIC_HANDLES = 128
    # CUmemAllocationHandleType
    NO_HANDLE = 0
    DESCRIPTOR = 1
    FABRIC = 8

HANDLE_TYPES = {"none": NO_HANDLE, "posix": DESCRIPTOR, "fabric": FABRIC}
_HANDLE_NAMES = {number: name for name, number in HANDLE_TYPES.items()}

_MAPPING_CALLS = {
    RESERVE: "cuMemAddressReserve", UNRESERVE: "cuMemAddressFree", CREATE: "cuMemCreate", RELEASE: "cuMemRelease",
    MAP: "cuMemMap", SET_ACCESS: "cuMemSetAccess", UNMAP: "cuMemUnmap",
}

_HINTS = {
    "cuMemCreate": "handle_type=\"none\", which every driver that maps memory can give",
    "cuMemMap": "larger pages, if there are very many: the driver holds only so many mappings",
    "cuMemSetAccess": "fewer peers: `nvidia-smi topo -m` shows which devices reach each other",
    "cuMemUnmap": "again, once all work that uses the memory has finished",
}


def why_not(int ordinal):
    """Why a device has no virtual memory; "" if it has. Raises DeviceUnavailableError if there is no driver."""
    cdef size_t granularity = 0
    if not attribute(ordinal, HAS_VIRTUAL_MEMORY):
        return f"device {ordinal} or its driver has no virtual memory management"
    cdef MemoryProperties wanted = on_device(ordinal)
    cdef CUresult result = cu.memory_granularity(&granularity, &wanted, MINIMUM)
    if failed(result):
        return ("the driver is too old to map memory: update it" if result == NOT_FOUND
                else str(driver_error("cuMemGetAllocationGranularity()", result)))
    return ""


def can_access(int ordinal, int peer):
    """Whether a device can be given access to memory of another. Raises DriverError."""
    cdef int can = 0
    load()
    check(cu.can_access_peer(&can, peer, ordinal), f"cuDeviceCanAccessPeer({peer}, {ordinal})")
    return bool(can)


cdef MemoryProperties on_device(int ordinal) noexcept:
    cdef MemoryProperties wanted
    memset(&wanted, 0, sizeof(wanted))
    wanted.type = PINNED_ON_DEVICE
    wanted.location.type = ON_DEVICE
    wanted.location.id = ordinal
    return wanted


cdef object mapping_error(CUresult result, MappingCall call, uint64_t what, uint64_t nbytes, int ordinal):
    """The DriverError of a call about an address or a page, and some bytes. A hint for the result is preferred to a
    hint for the call."""
    failed(result)
    name = _MAPPING_CALLS[call]
    if call == RESERVE:
        arguments = f"{nbytes} bytes"
    elif call == CREATE:
        arguments = f"{nbytes} bytes on device {ordinal}"
    else:
        arguments = f"{what:#x}" if call == RELEASE else f"{what:#x}, {nbytes} bytes"
    error = driver_error(f"{name}({arguments})", result)
    return error if error.hint else driver_error(error.call, result, _HINTS.get(name, ""))


cdef Access access_of(int device, bint allowed) noexcept nogil:
    cdef Access access
    access.location.type = ON_DEVICE
    access.location.id = device
    access.flags = READ_WRITE if allowed else 0
    return access


cdef class VirtualMemory:
    """Virtual memory of one device.

    `handle_type` is "none", "posix" or "fabric". A device without fabric handles gives file descriptors: the driver
    may say so at once, or refuse the first page.
    """

    def __cinit__(self):
        self.context = PrimaryContext.__new__(PrimaryContext)

    def __init__(self, DeviceMemory memory not None, str handle_type not None):
        cdef size_t granularity = 0
        if self.context.retained:
            raise RuntimeError("virtual memory is set up once")
        cdef int ordinal = memory.ordinal
        self.context = memory.context
        self.wanted = on_device(ordinal)
        self.wanted.handle_types = HANDLE_TYPES[handle_type]
        # As newer PyTorch decides it: before the first page is made.
        if self.wanted.handle_types == FABRIC and not attribute(ordinal, HAS_FABRIC_HANDLES):
            self.wanted.handle_types = DESCRIPTOR
        if self.wanted.handle_types == DESCRIPTOR and not attribute(ordinal, HAS_DESCRIPTORS):
            raise ValueError(f"device {ordinal} gives no handles for other processes: take handle_type=\"none\"")
        self.wanted.rdma = attribute(ordinal, HAS_RDMA) != 0
        check(cu.memory_granularity(&granularity, &self.wanted, MINIMUM), "cuMemGetAllocationGranularity")
        self.granularity = granularity

    @property
    def handle_type(self):
        """The kind of handle that pages have."""
        return _HANDLE_NAMES[self.wanted.handle_types]

    def leave_free(self, uint64_t nbytes):
        """Has new memory refused that would leave others fewer bytes of the device."""
        self.left_free = nbytes

    cdef CUresult take_addresses(self, uint64_t nbytes, uint64_t* address) noexcept nogil:
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result == SUCCESS:
            # No alignment and no hint, as PyTorch asks (11.2): the driver's granularity is enough.
            result = cu.address_reserve(address, nbytes, 0, 0, 0)
            self.context.leave(mode)
        return result

    cdef CUresult end(self, MappingCall call, uint64_t what, uint64_t nbytes) noexcept nogil:
        """Makes a call that gives something back, even if the context was reset: this memory belongs to no
        context."""
        cdef int mode
        cdef CUresult result
        if forked:
            return SUCCESS
        if not self.context.retained:
            return NOT_INITIALIZED
        cdef bint entered = self.context.enter(&mode) == SUCCESS
        if call == RELEASE:
            result = cu.memory_release(what)
        elif call == UNMAP:
            result = cu.memory_unmap(what, nbytes)
        else:
            result = cu.address_free(what, nbytes)
        if entered:
            self.context.leave(mode)
        return SUCCESS if is_lost(result) else result

    cdef CUresult look_for_room(self, uint64_t nbytes) noexcept nogil:
        """OUT_OF_MEMORY if new memory would leave others too little. Needs the context."""
        cdef size_t free = 0
        cdef size_t total = 0
        # Few ask for it: without it a page costs one call of the driver less.
        if self.left_free == 0:
            return SUCCESS
        cdef CUresult result = cu.memory_info(&free, &total)
        if result == SUCCESS and (free < nbytes or free - nbytes < self.left_free):
            result = OUT_OF_MEMORY
        return result

    cdef CUresult make(self, uint64_t nbytes, uint64_t* handle) noexcept nogil:
        """A handle of new memory."""
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result != SUCCESS:
            return result
        result = self.look_for_room(nbytes)
        if result == SUCCESS:
            result = cu.memory_create(handle, nbytes, &self.wanted, 0)
        if (result not in (SUCCESS, OUT_OF_MEMORY) and not self.has_created
                and self.wanted.handle_types == FABRIC):
            self.wanted.handle_types = DESCRIPTOR
            result = cu.memory_create(handle, nbytes, &self.wanted, 0)
        if result == SUCCESS:
            # As in PyTorch 2.11 only the first creation may change the kind of handle (11.3).
            self.has_created = True
        self.context.leave(mode)
        return result

    cdef CUresult allow(self, uint64_t address, uint64_t nbytes, const Access* access, size_t count) noexcept nogil:
        """Gives some devices access to mapped memory, or takes it from them, in one call."""
        cdef int mode
        cdef CUresult result = self.context.enter(&mode)
        if result == SUCCESS:
            result = cu.memory_set_access(address, nbytes, access, count)
            self.context.leave(mode)
        return result
