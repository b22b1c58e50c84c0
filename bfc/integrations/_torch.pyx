"""The functions that PyTorch looks up by name in this extension module, as CUDAPluggableAllocator wants them.

PyTorch calls them from any thread with its own mutex held. Meanwhile another thread may hold the GIL and wait for that
mutex, as it does to free a tensor. To take the GIL here would be a deadlock, so nothing below takes it. See
`bfc/native/source.h`.
"""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport Counters
from bfc.buffers._scopes cimport follow_scopes
from bfc.buffers._buffer cimport HOST_STREAM
from bfc.allocators._allocator cimport Allocator
from bfc.allocators._without_gil cimport allocate_without_gil, free_without_gil

cdef extern from *:
    """
    #include <cstddef>
    #include <cstdio>
    #include <new>

    #define BFC_EXPORT extern "C" __attribute__((visibility("default")))

    struct bfc_figures { unsigned long long in_use, reserved, limit, largest_free; int closed, fault; };
    static void* (*bfc_pool)(int);      /* the allocator of a pool's pair of functions, or NULL */
    static void* (*bfc_device)(int);    /* the one that serves a device instead of PyTorch's, or NULL */
    static bool (*bfc_allocate)(void*, size_t, void*, void**);
    static bool (*bfc_free)(void*, void*, void*, bool);
    static void (*bfc_read)(void*, bfc_figures*);

    namespace {
    /* PyTorch shows what() as the text of its error. */
    struct OutOfMemory : std::bad_alloc {
        char text[360];
        OutOfMemory(void* allocator, size_t size, int device) noexcept {
            bfc_figures now = {0, 0, 0, 0, 0, 0};
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
        if (allocator) bfc_allocate(allocator, size, stream, &ptr);
        return ptr;
    }
    void pool_free(int number, void* ptr, void* stream) noexcept {
        void* allocator = bfc_pool(number);
        if (allocator) bfc_free(allocator, ptr, stream, true);
    }
    }

    /* Instead of PyTorch's allocator. PyTorch does not look at the result, so a failure must be thrown. */
    BFC_EXPORT void* bfc_torch_alloc(size_t size, int device, void* stream) {
        void* ptr = nullptr;
        void* allocator = bfc_device(device);
        if (!allocator || !bfc_allocate(allocator, size, stream, &ptr)) throw OutOfMemory(allocator, size, device);
        return ptr;
    }
    BFC_EXPORT void bfc_torch_free(void* ptr, size_t, int device, void* stream) {
        void* allocator = bfc_device(device);
        if (allocator) bfc_free(allocator, ptr, stream, false);
    }

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
    cbool (*bfc_allocate)(void*, size_t, void*, void**) noexcept nogil
    cbool (*bfc_free)(void*, void*, void*, cbool) noexcept nogil
    void (*bfc_read)(void*, bfc_figures*) noexcept nogil

cdef enum:
    POOLS = 32                      # as many as there are pairs above
    DEVICES = 64

# Written with the GIL, each place once; read without it. PyTorch may call for as long as the process lives, so what is
# served is kept: the list holds the references that these borrow.
cdef void* pools[POOLS]
cdef void* devices[DEVICES]
_kept = []


cdef int check_servable(Allocator allocator) except -1:
    if allocator.source.native == NULL or allocator.home_stream == HOST_STREAM:
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

cdef cbool allocate_in(Allocator allocator, size_t size, void* stream, void** ptr) noexcept nogil:
    cdef uint64_t address = 0, on = <size_t>stream
    if size and not allocate_without_gil(allocator, size, 0 if on == allocator.default_stream_alias else on, &address):
        return False
    ptr[0] = <void*>address
    return True


cdef cbool free_in(Allocator allocator, void* ptr, void* stream, cbool drain) noexcept nogil:
    cdef uint64_t on = <size_t>stream
    if ptr == NULL:
        return True
    return free_without_gil(allocator, <uint64_t>ptr, 0 if on == allocator.default_stream_alias else on, drain)


cdef void figures_of(Allocator allocator, bfc_figures* now) noexcept nogil:
    allocator.acquire()
    cdef Counters counters = allocator.pool.totals()
    now.largest_free = allocator.pool.largest_free()
    now.fault = allocator.last_fault.get()
    now.closed = allocator.is_closed
    allocator.lock.release()
    now.in_use = counters.bytes_in_use
    now.reserved = counters.pool_bytes
    now.limit = allocator.limit


bfc_pool = pool_at
bfc_device = device_at
bfc_allocate = <cbool (*)(void*, size_t, void*, void**) noexcept nogil>allocate_in
bfc_free = <cbool (*)(void*, void*, void*, cbool) noexcept nogil>free_in
bfc_read = <void (*)(void*, bfc_figures*) noexcept nogil>figures_of
