"""The functions that PyTorch looks up by name in this extension module, as CUDAPluggableAllocator wants them.

PyTorch calls them from any thread with its own mutex held, while another thread may hold the GIL and wait for that
mutex (it frees tensors so). Whoever took the GIL here would wait for ever: nothing below does. See `bfc/_source.h`.
"""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._allocator cimport Allocator
from bfc._core cimport Counters
from bfc._ledger cimport Lock

cdef extern from *:
    """
    #include <cstddef>
    #include <cstdio>
    #include <new>

    #define BFC_EXPORT extern "C" __attribute__((visibility("default")))

    struct bfc_figures { unsigned long long in_use, reserved, limit, largest_free; int closed; };
    static int (*bfc_serve_alloc)(size_t, int, void*, void**);
    static void (*bfc_serve_free)(void*, int, void*, int);
    static void (*bfc_serve_figures)(int, bfc_figures*);

    namespace {
    /* PyTorch shows what() as the text of its error. */
    struct OutOfMemory : std::bad_alloc {
        char text[320];
        OutOfMemory(size_t size, int device, bool served) noexcept {
            if (!served) {
                std::snprintf(text, sizeof text, "bfc: no allocator serves device %d: "
                    "pass one for it to bfc.integrations.torch", device);
                return;
            }
            bfc_figures now = {0, 0, 0, 0, 0};
            bfc_serve_figures(device, &now);
            if (now.closed) {
                std::snprintf(text, sizeof text, "bfc: the allocator that serves device %d is closed", device);
                return;
            }
            std::snprintf(text, sizeof text, "bfc: out of memory: asked for %zu bytes on device %d; in use %llu, "
                "reserved %llu of a limit of %llu, the largest free block %llu; "
                "print(allocator.snapshot()) shows the rest", size, device, now.in_use, now.reserved, now.limit,
                now.largest_free);
        }
        const char* what() const noexcept override { return text; }
    };
    }

    /* Instead of PyTorch's allocator: it does not look at the result, so a failure must be thrown. */
    BFC_EXPORT void* bfc_torch_alloc(size_t size, int device, void* stream) {
        void* ptr = nullptr;
        int served = bfc_serve_alloc(size, device, stream, &ptr);
        if (served != 1) throw OutOfMemory(size, device, served == 0);
        return ptr;
    }
    BFC_EXPORT void bfc_torch_free(void* ptr, size_t, int device, void* stream) {
        bfc_serve_free(ptr, device, stream, 0);
    }

    /* Under PyTorch's allocator, as a MemPool: NULL is its cudaMalloc failing, and a free is its cudaFree. */
    BFC_EXPORT void* bfc_torch_pool_alloc(size_t size, int device, void* stream) {
        void* ptr = nullptr;
        bfc_serve_alloc(size, device, stream, &ptr);
        return ptr;
    }
    BFC_EXPORT void bfc_torch_pool_free(void* ptr, size_t, int device, void* stream) {
        bfc_serve_free(ptr, device, stream, 1);
    }
    """
    ctypedef struct bfc_figures:
        unsigned long long in_use
        unsigned long long reserved
        unsigned long long limit
        unsigned long long largest_free
        int closed
    int (*bfc_serve_alloc)(size_t, int, void*, void**) noexcept nogil
    void (*bfc_serve_free)(void*, int, void*, int) noexcept nogil
    void (*bfc_serve_figures)(int, bfc_figures*) noexcept nogil

ctypedef cbool (*AllocateCall)(void*, uint64_t, uint64_t, uint64_t*) noexcept nogil
ctypedef cbool (*FreeCall)(void*, uint64_t, uint64_t, cbool) noexcept nogil
ctypedef void (*FiguresCall)(void*, bfc_figures*) noexcept nogil

cdef enum:
    MAX_DEVICES = 64

cdef Lock lock                                  # guards `serving`
cdef vector[void*] serving[MAX_DEVICES]         # allocators by device, the newest last: it serves, the others get frees
_kept = []                                      # PyTorch may call for as long as the process lives


def serve(Allocator allocator not None, int device):
    """From now on this allocator serves PyTorch on a device. It is kept for the rest of the process."""
    if allocator.native == NULL:
        raise ValueError(f"PyTorch calls without the GIL, and {allocator.sub_allocator!r} cannot be called so: take a "
                         f"CUDASubAllocator")
    if not 0 <= device < MAX_DEVICES:
        raise ValueError(f"there is no device {device}")
    _kept.append(allocator)
    lock.wait_and_acquire()
    serving[device].push_back(<void*>allocator)
    lock.release()


def serves(int device):
    """Whether an allocator serves PyTorch on a device."""
    return 0 <= device < MAX_DEVICES and serving[device].size() > 0


cdef void* newest(int device) noexcept nogil:
    cdef void* found = NULL
    if 0 <= device < MAX_DEVICES:
        lock.wait_and_acquire()
        if serving[device].size():
            found = serving[device].back()
        lock.release()
    return found


cdef void* at(int device, size_t back) noexcept nogil:
    """The allocator that came so many before the newest, or NULL."""
    cdef void* found = NULL
    lock.wait_and_acquire()
    cdef size_t count = serving[device].size()
    if back < count:
        found = serving[device][count - 1 - back]
    lock.release()
    return found


# A borrowed reference cannot be used as an object without the GIL, but it can be passed as one.

cdef cbool allocate_in(Allocator allocator, uint64_t size, uint64_t stream, uint64_t* ptr) noexcept nogil:
    return allocator.allocate_without_gil(size, 0 if stream == allocator.default_stream_alias else stream, ptr)


cdef cbool free_in(Allocator allocator, uint64_t ptr, uint64_t stream, cbool drain) noexcept nogil:
    return allocator.free_without_gil(ptr, 0 if stream == allocator.default_stream_alias else stream, drain)


cdef void figures_of(Allocator allocator, bfc_figures* now) noexcept nogil:
    allocator.acquire()
    cdef Counters counters = allocator.pool.counters
    now.largest_free = allocator.pool.largest_free()
    allocator.lock.release()
    now.in_use = counters.bytes_in_use
    now.reserved = counters.pool_bytes
    now.limit = allocator.limit
    now.closed = allocator.is_closed


cdef int serve_alloc(size_t size, int device, void* stream, void** ptr) noexcept nogil:
    """1: served. 0: no memory. -1: nobody serves this device."""
    cdef void* allocator = newest(device)
    cdef uint64_t address = 0
    if allocator == NULL:
        return -1
    if size == 0:
        return 1
    if not (<AllocateCall>allocate_in)(allocator, size, <size_t>stream, &address):
        return 0
    ptr[0] = <void*>address
    return 1


cdef void serve_free(void* ptr, int device, void* stream, int drain) noexcept nogil:
    cdef size_t back = 0
    cdef void* allocator
    if ptr == NULL or not 0 <= device < MAX_DEVICES:
        return
    while True:
        allocator = at(device, back)
        if allocator == NULL or (<FreeCall>free_in)(allocator, <uint64_t>ptr, <size_t>stream, drain):
            return
        back += 1


cdef void serve_figures(int device, bfc_figures* now) noexcept nogil:
    cdef void* allocator = newest(device)
    if allocator != NULL:
        (<FiguresCall>figures_of)(allocator, now)


bfc_serve_alloc = serve_alloc
bfc_serve_free = serve_free
bfc_serve_figures = serve_figures
