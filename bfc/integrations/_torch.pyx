"""The functions that PyTorch looks up by name in this extension module, as CUDAPluggableAllocator wants them.

PyTorch asks a `MemPool` for segments from any thread with its own mutex held. Meanwhile another thread may hold the GIL
and wait for that mutex, as it does to free a tensor. To take the GIL then would be a deadlock, so the pairs of
functions for pools never take it. See `bfc/native/source.h`.

Where we stand in the place of its allocator, PyTorch holds no mutex. A request that a free block serves takes no GIL,
nor does a free, nor what notes a stream. Any other request takes it, since memory is mapped, and a plan in pages
served, with the GIL held; but not one for the pool of a graph. What begins or ends a pool, or empties, takes it too.
"""

from cpython.exc cimport PyErr_SetInterrupt
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc.native.turns cimport TurnAt, counted
from bfc.interpreter._process cimport exiting, has_entered, start_entering
from bfc._core cimport Counters
from bfc.buffers._scopes cimport follow_scopes
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._frees cimport QUERY, RECORD, report_unraisable
from bfc.allocators._allocator cimport Allocator
from bfc.allocators._without_gil cimport (
    allocate_without_gil, free_without_gil, hit_on_any_stream, lead_from_home, use_without_gil,
)

from bfc.errors import ClosedError

cdef extern from *:
    """
    #include <atomic>
    #include <cstddef>
    #include <cstdint>
    #include <cstdio>
    #include <functional>
    #include <mutex>
    #include <new>
    #include <stdexcept>
    #include <utility>
    #include <vector>

    struct CUstream_st;
    using bfc_pool_id = std::pair<unsigned long long, unsigned long long>;     /* c10's MempoolId_t */
    using bfc_filter = std::function<bool(CUstream_st*)>;

    #define BFC_EXPORT extern "C" __attribute__((visibility("default")))

    struct bfc_figures { unsigned long long in_use, reserved, limit, largest_free; int closed, fault; };
    static void* (*bfc_pool)(int);      /* the allocator of a pool's pair of functions, or NULL */
    static void* (*bfc_device)(int);    /* the one that serves a device instead of PyTorch's, or NULL */
    static bool (*bfc_allocate)(void*, size_t, void*, const uint64_t*, void**);
    static bool (*bfc_serve)(void*, size_t, void*, void**, char*, size_t);  /* false: the text says why, or is empty */
    static bool (*bfc_free)(void*, void*, void*, bool);
    static void (*bfc_record)(void*, void*);
    static void (*bfc_read)(void*, bfc_figures*);
    enum { BFC_BEGIN, BFC_END, BFC_RELEASE };
    static bool (*bfc_use)(void*, int, uint64_t, uint64_t, char*, size_t);   /* false: the text says why */
    static bool (*bfc_empty)(char*, size_t);                                 /* the same */

    namespace {
    /* PyTorch shows what() as the text of its error. */
    struct OutOfMemory : std::bad_alloc {
        char text[1000] = "";
        OutOfMemory(void* allocator, size_t size, int device, const char* why) noexcept {
            bfc_figures now = {0, 0, 0, 0, 0, 0};
            if (*why) {
                std::snprintf(text, sizeof text, "bfc: %s", why);
                return;
            }
            if (allocator) bfc_read(allocator, &now);
            if (!allocator)
                std::snprintf(text, sizeof text, "bfc: no allocator serves device %d: "
                    "pass one for it to bfc.integrations.torch.replace", device);
            else if (now.closed)
                std::snprintf(text, sizeof text, "bfc: the allocator that serves device %d is closed", device);
            else if (now.fault)
                std::snprintf(text, sizeof text, "bfc: the driver of device %d failed with CUDA error %d, asked for "
                    "%zu bytes: that is not out of memory; an earlier kernel may have failed", device, now.fault, size);
            else
                std::snprintf(text, sizeof text, "bfc: out of memory: asked for %zu bytes on device %d; in use %llu, "
                    "reserved %llu of a limit of %llu, the largest free block %llu; print(allocator.snapshot()) shows "
                    "the rest", size, device, now.in_use, now.reserved, now.limit, now.largest_free);
        }
        const char* what() const noexcept override { return text; }
    };

    /* To PyTorch, NULL means that cudaMalloc failed, and a free stands for cudaFree, which waits for the device. */
    void* pool_alloc(int number, size_t size, void* stream) noexcept {
        void* ptr = nullptr;
        void* allocator = bfc_pool(number);
        if (allocator) bfc_allocate(allocator, size, stream, nullptr, &ptr);
        return ptr;
    }
    void pool_free(int number, void* ptr, void* stream) noexcept {
        void* allocator = bfc_pool(number);
        if (allocator) bfc_free(allocator, ptr, stream, true);
    }

    /* What PyTorch has begun: allocations for the streams that the filter names belong to the pool. A filter asks the
     * driver whether its stream is part of the capture. Never destroyed: PyTorch may allocate as the process ends. */
    struct Scope { int device; uint64_t pool[2]; bfc_filter takes; };
    std::mutex& scopes_lock = *new std::mutex;
    std::vector<Scope>& scopes = *new std::vector<Scope>;
    std::atomic<size_t> open_scopes{0};

    /* Of our own ids, which count like PyTorch's, these differ in one bit. */
    void own_id(bfc_pool_id id, uint64_t* pool) noexcept {
        pool[0] = id.first | 1ull << 32;
        pool[1] = id.second;
    }
    bool find_scope(int device, void* stream, uint64_t* pool) {
        if (!open_scopes.load(std::memory_order_acquire)) return false;
        std::lock_guard<std::mutex> held(scopes_lock);
        for (const Scope& it : scopes)
            if (it.device == device && it.takes(static_cast<CUstream_st*>(stream))) {
                pool[0] = it.pool[0];
                pool[1] = it.pool[1];
                return true;
            }
        return false;
    }
    void add_scope(int device, const uint64_t* pool, bfc_filter takes) {
        std::lock_guard<std::mutex> held(scopes_lock);
        scopes.push_back(Scope{device, {pool[0], pool[1]}, std::move(takes)});
        open_scopes.store(scopes.size(), std::memory_order_release);
    }
    void remove_scope(int device, const uint64_t* pool) {
        std::lock_guard<std::mutex> held(scopes_lock);
        for (size_t i = 0; i < scopes.size(); ++i)
            if (scopes[i].device == device && scopes[i].pool[0] == pool[0] && scopes[i].pool[1] == pool[1]) {
                scopes.erase(scopes.begin() + i);
                break;
            }
        open_scopes.store(scopes.size(), std::memory_order_release);
    }
    bool use(int what, int device, const uint64_t* pool, char* text, size_t room) noexcept {
        void* allocator = bfc_device(device);
        return !allocator || bfc_use(allocator, what, pool[0], pool[1], text, room);
    }
    }

    /* What PyTorch calls besides. A failure must be thrown, but for a release, which destructors call. */
    BFC_EXPORT void bfc_torch_begin_pool(int device, bfc_pool_id id, bfc_filter takes) {
        char text[400] = "";
        uint64_t pool[2];
        own_id(id, pool);
        if (!use(BFC_BEGIN, device, pool, text, sizeof text)) throw std::runtime_error(text);
        add_scope(device, pool, std::move(takes));
    }
    BFC_EXPORT void bfc_torch_end_pool(int device, bfc_pool_id id) {
        char text[400] = "";
        uint64_t pool[2];
        own_id(id, pool);
        remove_scope(device, pool);
        if (!use(BFC_END, device, pool, text, sizeof text)) throw std::runtime_error(text);
    }
    BFC_EXPORT void bfc_torch_release_pool(int device, bfc_pool_id id) {
        char text[1];
        uint64_t pool[2];
        own_id(id, pool);
        use(BFC_RELEASE, device, pool, text, 0);
    }
    BFC_EXPORT void bfc_torch_empty_cache() {
        char text[400] = "";
        if (!bfc_empty(text, sizeof text)) throw std::runtime_error(text);
    }

    /* Instead of PyTorch's allocator. PyTorch does not look at the result, so a failure must be thrown. */
    BFC_EXPORT void* bfc_torch_alloc(size_t size, int device, void* stream) {
        void* ptr = nullptr;
        void* allocator = bfc_device(device);
        uint64_t pool[2];
        char why[900] = "";
        if (!allocator) throw OutOfMemory(allocator, size, device, why);
        if (find_scope(device, stream, pool) ? !bfc_allocate(allocator, size, stream, pool, &ptr)
                                             : !bfc_serve(allocator, size, stream, &ptr, why, sizeof why))
            throw OutOfMemory(allocator, size, device, why);
        return ptr;
    }
    BFC_EXPORT void bfc_torch_free(void* ptr, size_t, int device, void* stream) {
        void* allocator = bfc_device(device);
        if (allocator) bfc_free(allocator, ptr, stream, false);
    }

    /* PyTorch names no device. It holds no mutex then, but the caller may. What is not ours is ignored. */
    BFC_EXPORT void bfc_torch_record_stream(void* ptr, void* stream) { bfc_record(ptr, stream); }

    /* Under PyTorch's allocator, as a MemPool. No argument tells a function which pool it is called for, so each
     * allocator that serves a pool has a pair of its own. */
    #define BFC_PAIR(n) \
        BFC_EXPORT void* bfc_torch_pool_alloc_##n(size_t size, int, void* on) { return pool_alloc(n, size, on); } \
        BFC_EXPORT void bfc_torch_pool_free_##n(void* ptr, size_t, int, void* on) { pool_free(n, ptr, on); }
    BFC_PAIR(0) BFC_PAIR(1) BFC_PAIR(2) BFC_PAIR(3) BFC_PAIR(4) BFC_PAIR(5) BFC_PAIR(6) BFC_PAIR(7)
    BFC_PAIR(8) BFC_PAIR(9) BFC_PAIR(10) BFC_PAIR(11) BFC_PAIR(12) BFC_PAIR(13) BFC_PAIR(14) BFC_PAIR(15)
    BFC_PAIR(16) BFC_PAIR(17) BFC_PAIR(18) BFC_PAIR(19) BFC_PAIR(20) BFC_PAIR(21) BFC_PAIR(22) BFC_PAIR(23)
    BFC_PAIR(24) BFC_PAIR(25) BFC_PAIR(26) BFC_PAIR(27) BFC_PAIR(28) BFC_PAIR(29) BFC_PAIR(30) BFC_PAIR(31)
    """
    ctypedef struct bfc_figures:
        unsigned long long in_use
        unsigned long long reserved
        unsigned long long limit
        unsigned long long largest_free
        int closed
        int fault
    void* (*bfc_pool)(int) noexcept nogil
    void* (*bfc_device)(int) noexcept nogil
    cbool (*bfc_allocate)(void*, size_t, void*, const uint64_t*, void**) noexcept nogil
    cbool (*bfc_serve)(void*, size_t, void*, void**, char*, size_t) noexcept nogil
    cbool (*bfc_free)(void*, void*, void*, cbool) noexcept nogil
    void (*bfc_record)(void*, void*) noexcept nogil
    void (*bfc_read)(void*, bfc_figures*) noexcept nogil
    cbool (*bfc_use)(void*, int, uint64_t, uint64_t, char*, size_t) noexcept nogil
    cbool (*bfc_empty)(char*, size_t) noexcept nogil
    cdef enum:
        BFC_BEGIN
        BFC_END
        BFC_RELEASE

cdef enum:
    POOLS = 32                      # as many as there are pairs above
    DEVICES = 64

# Written with the GIL, each place once; read without it. PyTorch may call for as long as the process lives, so what is
# served is kept: the list holds the references that these borrow.
cdef void* pools[POOLS]
cdef void* devices[DEVICES]
_kept = []


cdef int check_servable(Allocator allocator) except -1:
    # PyTorch calls these while it holds a mutex that a thread with the GIL may wait for, so none may take the GIL.
    if allocator.source.native == NULL or allocator.streams.home == HOST_STREAM:
        raise ValueError(f"PyTorch needs memory of a device, and asks for it without the GIL, which "
                         f"{allocator.sub_allocator!r} cannot serve: use a CUDASubAllocator")
    return 0


def serve_pool(Allocator allocator not None):
    """Assigns a pair of the functions above to an allocator, and returns its number. One allocator has one pair."""
    cdef int number
    check_servable(allocator)
    follow_scopes()
    for number in range(POOLS):
        if pools[number] == <void*>allocator:
            return number
        if pools[number] == NULL:
            _kept.append(allocator)
            pools[number] = <void*>allocator
            return number
    raise ValueError(f"{POOLS} allocators serve pools of PyTorch already, and no more can: use one of them")


def serve_device(Allocator allocator, int device):
    """Lets an allocator serve a device instead of PyTorch's own. None takes that back, before PyTorch has called."""
    if not 0 <= device < DEVICES:
        raise ValueError(f"there is no device {device}")
    if allocator is None:
        devices[device] = NULL
        return
    check_servable(allocator)
    follow_scopes()
    if devices[device] != NULL and devices[device] != <void*>allocator:
        raise RuntimeError(f"another allocator serves device {device} in this process already")
    _kept.append(allocator)
    devices[device] = <void*>allocator


cdef void* pool_at(int number) noexcept nogil:
    return pools[number]


cdef void* device_at(int device) noexcept nogil:
    return devices[device] if 0 <= device < DEVICES else NULL


# A borrowed reference cannot be used as an object without the GIL, but it can be passed as one.

cdef cbool allocate_in(Allocator allocator, size_t size, void* stream, const uint64_t* pool,
                       void** ptr) noexcept nogil:
    cdef uint64_t address = 0, on = <size_t>stream
    # PyTorch's callers may name the default stream by either of its handles.
    on = 0 if on == allocator.streams.default_alias else on
    if size and not allocate_without_gil(allocator, size, on, pool, &address):
        return False
    ptr[0] = <void*>address
    return True


cdef cbool serve(Allocator allocator, size_t size, void* stream, void** ptr, char* text, size_t room) noexcept nogil:
    """Serves a request instead of PyTorch's allocator. Of one that is out of memory, the text says nothing."""
    cdef uint64_t address = 0, on = <size_t>stream
    on = 0 if on == allocator.streams.default_alias else on
    if not allocator.streams.by_stream and allocator.streams.has_lanes.get() and on != allocator.streams.home:
        return allocate_in(allocator, size, stream, NULL, ptr)  # it is a scope's if that takes this very stream
    if size and not hit_on_any_stream(allocator, size, on, &address):
        if not (start_entering() and miss_with_gil(allocator, size, on, &address, text, room)):
            return False
    ptr[0] = <void*>address
    return True


cdef cbool miss_with_gil(Allocator allocator, size_t size, uint64_t on, uint64_t* address, char* text,
                         size_t room) noexcept with gil:
    has_entered()
    # What an earlier call failed with must not be told as this one's.
    allocator.source.last_fault.set(0)
    try:
        if allocator.streams.by_stream:
            address[0] = <uint64_t>allocator.allocate_raw(size, on)
            return True
        address[0] = <uint64_t>allocator.allocate_raw(size, allocator.streams.home)
    except MemoryError:
        return False
    except BaseException as error:
        say(str(error), text, room)
        if isinstance(error, KeyboardInterrupt):    # raised again as soon as Python code runs
            PyErr_SetInterrupt()
        return False
    return lead_from_home(allocator, address[0], on)


cdef cbool free_in(Allocator allocator, void* ptr, void* stream, cbool waits) noexcept nogil:
    cdef uint64_t on = <size_t>stream
    if ptr == NULL:
        return True
    return free_without_gil(allocator, <uint64_t>ptr, 0 if on == allocator.streams.default_alias else on, waits)


cdef void record_in_any(void* ptr, void* stream) noexcept nogil:
    """Finds the allocator that has given an address. Those of different devices do not overlap."""
    cdef int device
    if ptr == NULL or counted(exiting):
        return
    for device in range(DEVICES):
        if devices[device] != NULL and record_in(devices[device], ptr, stream):
            return


cdef cbool record_of(Allocator allocator, void* ptr, void* stream) noexcept nogil:
    cdef uint64_t on = <size_t>stream
    return use_without_gil(allocator, <uint64_t>ptr, 0 if on == allocator.streams.default_alias else on)


cdef cbool (*record_in)(void*, void*, void*) noexcept nogil
record_in = <cbool (*)(void*, void*, void*) noexcept nogil>record_of


cdef void figures_of(Allocator allocator, bfc_figures* now) noexcept nogil:
    # The figures are of one moment.
    allocator.acquire()
    cdef Counters counters = allocator.pool.totals()
    now.largest_free = allocator.pool.largest_free()
    now.fault = allocator.source.last_fault.get()
    now.closed = allocator.life.is_closed
    allocator.lock.release()
    now.in_use = counters.bytes_in_use
    now.reserved = counters.pool_bytes
    now.limit = allocator.limit


cdef cbool use_pool(Allocator allocator, int what, uint64_t first, uint64_t second, char* text,
                    size_t room) noexcept nogil:
    return not start_entering() or use_pool_with_gil(allocator, what, first, second, text, room)


cdef cbool use_pool_with_gil(Allocator allocator, int what, uint64_t first, uint64_t second, char* text,
                             size_t room) noexcept with gil:
    has_entered()
    try:
        use_pool_of(allocator, what, (first, second))
    except BaseException as error:
        if what == BFC_RELEASE:
            report_unraisable(error, "the release of the memory of a graph of PyTorch's")
        else:
            say(str(error), text, room)
        return False
    return True


cdef int use_pool_of(allocator, int what, tuple pool) except -1:
    if allocator.closed:
        # A program that ends frees its graphs after the allocator was closed, in whichever order.
        if what == BFC_BEGIN:
            raise ClosedError("the allocator that serves this device is closed")
    elif what == BFC_RELEASE:
        allocator.release_pool(pool)
    elif what == BFC_END:
        end_pool(allocator, pool)
    else:
        begin_pool(allocator, pool)
    return 0


cdef int begin_pool(allocator, tuple pool) except -1:
    """PyTorch's filter decides which requests are for the pool, and not a scope of ours: it is one of no stream."""
    allocator.begin_allocate_to_pool(pool, "none")
    try:
        # After the scope: from here on frees are put off, and requests must have their pool.
        allocator.mark_capture_begin()
    except BaseException:
        allocator.end_allocate_to_pool(pool)
        allocator.release_pool(pool)
        raise
    return 0


cdef int end_pool(Allocator allocator, tuple pool) except -1:
    """Ends a scope, and makes the frees that the capture has put off: those of PyTorch never take the GIL for that."""
    cdef TurnAt turn
    turn.take(allocator)
    try:
        allocator.mark_capture_end()
    finally:
        allocator.end_allocate_to_pool(pool)
    # Another capture may still be under way, in which no fence may be asked.
    if not allocator.fences.capture_is_marked():
        allocator.frees.drain(RECORD | QUERY)
    return 0


cdef cbool empty_all(char* text, size_t room) noexcept nogil:
    return not start_entering() or empty_all_with_gil(text, room)


cdef cbool empty_all_with_gil(char* text, size_t room) noexcept with gil:
    cdef int device
    cdef cbool emptied = True
    has_entered()
    for device in range(DEVICES):
        try:
            if devices[device] != NULL:
                (<Allocator>devices[device]).empty_cache()
        except BaseException as error:      # the others are emptied all the same
            say(str(error), text, room)
            emptied = False
    return emptied


cdef void say(str words, char* text, size_t room) noexcept:
    # ASCII, so that no character is cut in half.
    cdef bytes encoded = words.encode("ascii", "replace")[:room - 1]
    cdef size_t i
    for i in range(<size_t>len(encoded)):
        text[i] = encoded[i]
    text[len(encoded)] = 0


bfc_pool = pool_at
bfc_device = device_at
bfc_allocate = <cbool (*)(void*, size_t, void*, const uint64_t*, void**) noexcept nogil>allocate_in
bfc_serve = <cbool (*)(void*, size_t, void*, void**, char*, size_t) noexcept nogil>serve
bfc_free = <cbool (*)(void*, void*, void*, cbool) noexcept nogil>free_in
bfc_record = record_in_any
bfc_read = <void (*)(void*, bfc_figures*) noexcept nogil>figures_of
bfc_empty = empty_all
bfc_use = <cbool (*)(void*, int, uint64_t, uint64_t, char*, size_t) noexcept nogil>use_pool
