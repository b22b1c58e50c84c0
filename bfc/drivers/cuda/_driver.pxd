"""The CUDA driver's C functions, and what their results mean. What is `nogil` here needs no GIL."""

from libc.stdint cimport uint64_t

ctypedef int CUresult

cdef enum:                      # the values of CUresult that the code compares with; the driver names the others
    SUCCESS = 0
    INVALID_VALUE = 1
    OUT_OF_MEMORY = 2
    NOT_INITIALIZED = 3
    DEINITIALIZED = 4
    NO_DEVICE = 100
    INVALID_CONTEXT = 201
    INVALID_HANDLE = 400
    NOT_FOUND = 500
    NOT_READY = 600
    CONTEXT_IS_DESTROYED = 709
    CAPTURES_OTHERS = 905       # a capturing stream would have to wait for one that does not capture
    CAPTURED = 907
    NOT_LIVE = -1               # not CUDA's: the address is not a block of this sub-allocator

cdef struct Location:           # CUmemLocation
    int type
    int id

cdef struct MemoryProperties:   # CUmemAllocationProp
    int type
    int handle_types
    Location location
    void* windows
    unsigned char compressed
    unsigned char rdma
    unsigned short usage
    unsigned char reserved[4]

cdef struct Access:             # CUmemAccessDesc
    Location location
    int flags

cdef struct Functions:          # in the order of _SIGNATURES
    CUresult (*init)(unsigned int) noexcept nogil
    CUresult (*driver_version)(int*) noexcept nogil
    CUresult (*error_name)(CUresult, const char**) noexcept nogil
    CUresult (*error_text)(CUresult, const char**) noexcept nogil
    CUresult (*device_count)(int*) noexcept nogil
    CUresult (*device_get)(int*, int) noexcept nogil
    CUresult (*device_name)(char*, int, int) noexcept nogil
    CUresult (*device_total)(size_t*, int) noexcept nogil
    CUresult (*device_attribute)(int*, int, int) noexcept nogil
    CUresult (*context_state)(int, unsigned int*, int*) noexcept nogil
    CUresult (*context_device)(int*) noexcept nogil
    CUresult (*context_retain)(void**, int) noexcept nogil
    CUresult (*context_release)(int) noexcept nogil
    CUresult (*context_id)(void*, unsigned long long*) noexcept nogil
    CUresult (*context_push)(void*) noexcept nogil
    CUresult (*context_pop)(void**) noexcept nogil
    CUresult (*context_synchronize)() noexcept nogil
    CUresult (*capture_mode)(int*) noexcept nogil
    CUresult (*memory_info)(size_t*, size_t*) noexcept nogil
    CUresult (*memory_alloc)(uint64_t*, size_t) noexcept nogil
    CUresult (*memory_free)(uint64_t) noexcept nogil
    CUresult (*managed_alloc)(uint64_t*, size_t, unsigned int) noexcept nogil
    CUresult (*host_alloc)(void**, size_t, unsigned int) noexcept nogil
    CUresult (*host_free)(void*) noexcept nogil
    CUresult (*host_register)(void*, size_t, unsigned int) noexcept nogil
    CUresult (*host_unregister)(void*) noexcept nogil
    CUresult (*pointer_attribute)(void*, int, uint64_t) noexcept nogil
    CUresult (*async_alloc)(uint64_t*, size_t, void*) noexcept nogil
    CUresult (*async_free)(uint64_t, void*) noexcept nogil
    CUresult (*copy_async)(uint64_t, uint64_t, size_t, void*) noexcept nogil
    CUresult (*fill_async)(uint64_t, unsigned char, size_t, void*) noexcept nogil
    CUresult (*event_create)(void**, unsigned int) noexcept nogil
    CUresult (*event_record)(void*, void*) noexcept nogil
    CUresult (*event_query)(void*) noexcept nogil
    CUresult (*event_synchronize)(void*) noexcept nogil
    CUresult (*event_destroy)(void*) noexcept nogil
    CUresult (*stream_create)(void**, unsigned int) noexcept nogil
    CUresult (*stream_destroy)(void*) noexcept nogil
    CUresult (*stream_wait_event)(void*, void*, unsigned int) noexcept nogil
    CUresult (*stream_synchronize)(void*) noexcept nogil
    CUresult (*stream_is_capturing)(void*, int*) noexcept nogil
    CUresult (*stream_id)(void*, unsigned long long*) noexcept nogil
    CUresult (*can_access_peer)(int*, int, int) noexcept nogil
    CUresult (*memory_granularity)(size_t*, const MemoryProperties*, int) noexcept nogil
    CUresult (*address_reserve)(uint64_t*, size_t, size_t, uint64_t, unsigned long long) noexcept nogil
    CUresult (*address_free)(uint64_t, size_t) noexcept nogil
    CUresult (*memory_create)(uint64_t*, size_t, const MemoryProperties*, unsigned long long) noexcept nogil
    CUresult (*memory_release)(uint64_t) noexcept nogil
    CUresult (*memory_map)(uint64_t, size_t, size_t, uint64_t, unsigned long long) noexcept nogil
    CUresult (*memory_unmap)(uint64_t, size_t) noexcept nogil
    CUresult (*memory_set_access)(uint64_t, size_t, const Access*, size_t) noexcept nogil

cdef Functions cu               # filled by `load`
cdef bint forked                # the driver does not survive a fork: its calls fail in the child


cdef inline bint is_lost(CUresult result) noexcept nogil:
    """Whether the memory no longer exists: its context was reset, or it belongs to the parent of this process."""
    return result in (NOT_INITIALIZED, DEINITIALIZED, INVALID_CONTEXT, CONTEXT_IS_DESTROYED)

cdef object failure(CUresult result, str call)
cdef bint failed(CUresult result) noexcept
cdef int check(CUresult result, str call) except -1
cdef int first_active_device() except -2
