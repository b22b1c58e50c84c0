"""The CUDA driver's calls on one device. No lock is held while the driver is called."""

from libc.stddef cimport size_t
from libc.stdint cimport uint64_t
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc.drivers.cuda._driver cimport Access, CUresult, MemoryProperties

cdef extern from "lock.hpp" namespace "bfc" nogil:
    cdef cppclass Lock:
        void wait_and_acquire()
        void release()
        void reset()

cdef extern from "source.h":
    ctypedef struct bfc_native_source:
        void* self
        int (*alloc)(void*, uint64_t alignment, uint64_t nbytes, uint64_t* address, uint64_t* received) noexcept nogil
        int (*free)(void*, uint64_t address, uint64_t nbytes) noexcept nogil
        int (*order)(void*, uint64_t first, uint64_t then) noexcept nogil
        int (*stream_id)(void*, uint64_t stream, uint64_t* id) noexcept nogil
        int (*synchronize)(void*) noexcept nogil
        int (*mark)(void*, uint64_t stream, void** event) noexcept nogil
        int (*reached)(void*, void** event, int waits) noexcept nogil
        void (*drop)(void*, void* event) noexcept nogil

cdef enum Kind:
    DEVICE
    MANAGED
    PINNED
    ASYNC

cdef struct Block:
    uint64_t base               # the address from the driver; the block's address is this, aligned
    uint64_t nbytes
    uint64_t mapped             # bytes of our own pages that were registered with the driver; 0: the driver's memory


cdef class PrimaryContext:
    cdef readonly int ordinal
    cdef void* context
    cdef unsigned long long identity    # the id of the context when it was retained
    cdef bint retained

    cdef int open(self, int device) except -1
    cdef CUresult retain(self) noexcept nogil
    cdef CUresult enter(self, int* mode) noexcept nogil
    cdef CUresult leave(self, int mode) noexcept nogil
    cdef CUresult renew(self) noexcept nogil


cdef class DeviceMemory:
    cdef readonly int ordinal
    cdef Kind kind
    cdef PrimaryContext context
    cdef void* own_stream               # for memory of the kind "async": it is allocated and freed on this stream
    cdef Lock lock                      # guards the next three; never held across a driver call
    cdef cmap[uint64_t, Block] live
    cdef readonly uint64_t live_bytes
    cdef vector[void*] idle_events
    cdef bfc_native_source table
    cdef object __weakref__

    cdef int open_own_stream(self) except -1
    cdef CUresult allocate(self, uint64_t alignment, uint64_t nbytes, uint64_t* address) noexcept nogil
    cdef CUresult ask(self, uint64_t nbytes, uint64_t* address) noexcept nogil
    cdef tuple answer(self, uint64_t address, uint64_t nbytes)
    cdef CUresult allocate_registered(self, uint64_t alignment, uint64_t nbytes, unsigned int threads,
                                      uint64_t* address) noexcept nogil
    cdef CUresult keep(self, uint64_t address, Block* block) noexcept nogil
    cdef CUresult release(self, uint64_t address, uint64_t nbytes, bint idle) noexcept nogil
    cdef CUresult give_back(self, Block* block, bint idle) noexcept nogil
    cdef CUresult take_event(self, void** event) noexcept nogil
    cdef void put_event(self, void* event) noexcept nogil
    cdef CUresult mark(self, uint64_t stream, void** event) noexcept nogil
    cdef CUresult make_wait(self, uint64_t first, uint64_t then) noexcept nogil
    cdef CUresult identify(self, uint64_t stream, uint64_t* id) noexcept nogil
    cdef CUresult wait_for_all(self) noexcept nogil
    cdef CUresult wait_for_stream(self, uint64_t stream) noexcept nogil
    cdef CUresult move(self, uint64_t destination, uint64_t source, uint64_t nbytes, uint64_t stream,
                       int byte=*) noexcept nogil
    cdef CUresult ask_event(self, void* event, bint wait) noexcept nogil


cdef class EventFence:
    cdef DeviceMemory memory
    cdef void* event                    # NULL once it was found to be done
    cdef int ask(self, bint wait) except -1


cdef enum MappingCall:
    RESERVE
    UNRESERVE
    CREATE
    RELEASE
    MAP
    SET_ACCESS
    UNMAP


cdef class VirtualMemory:
    cdef PrimaryContext context
    cdef MemoryProperties wanted        # of each page
    cdef bint has_created               # whether a page was created: from then on the kind of handle is fixed
    cdef readonly uint64_t granularity
    cdef uint64_t left_free             # what new memory leaves to others on the device

    cdef CUresult take_addresses(self, uint64_t nbytes, uint64_t* address) noexcept nogil
    cdef CUresult look_for_room(self, uint64_t nbytes) noexcept nogil
    cdef CUresult end(self, MappingCall call, uint64_t what, uint64_t nbytes) noexcept nogil
    cdef CUresult make(self, uint64_t nbytes, uint64_t* handle) noexcept nogil
    cdef CUresult allow(self, uint64_t address, uint64_t nbytes, const Access* access, size_t count) noexcept nogil


cdef Access access_of(int device, bint allowed) noexcept nogil
cdef object mapping_error(CUresult result, MappingCall call, uint64_t what, uint64_t nbytes, int ordinal)
