"""The blocks of a `PinnedAllocator`, its stacks of free blocks, and its statistics."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc.buffers._buffer cimport Owner
from bfc.pinned._source cimport Source

cdef enum:
    BUCKETS = 64
    NO_BLOCK = 0xFFFFFFFF

cdef enum State:
    UNUSED                      # a record without memory
    CACHED                      # on the stack of its bucket
    LIVE
    LEAVING                     # freed, and streams may still use it

cdef struct Block:
    uint64_t ptr
    uint64_t size
    uint64_t received           # bytes, from the source; 0: a piece of the reserve
    uint64_t requested
    int64_t allocation_id       # while it is live, else 0
    uint32_t fences             # the number of fences that it waits for
    uint32_t next               # the next block of its stack, or the next unused record
    State state
    cbool exported              # other objects hold views of it
    cbool unfreed               # a finaliser wanted to free it, but the device failed

cdef struct Stat:
    int64_t current
    int64_t peak
    int64_t allocated
    int64_t freed

cdef int bucket_of(uint64_t size) noexcept nogil
cdef void increase(Stat* stat, int64_t amount) noexcept nogil
cdef void decrease(Stat* stat, int64_t amount) noexcept nogil


cdef class PinnedBooks(Owner):
    cdef vector[Block] blocks
    cdef uint32_t unused            # the first of the records that have no memory
    cdef vector[uint32_t] stacks    # the top of each bucket's stack
    cdef cmap[uint64_t, uint32_t] by_address
    cdef int64_t last_id
    cdef Source source              # where the blocks come from
    cdef Stat allocations, allocated_bytes, active_requests, active_bytes

    cdef uint32_t pop(self, uint64_t size, uint64_t nbytes) noexcept nogil
    cdef void begin(self, uint32_t handle, uint64_t nbytes) noexcept nogil
    cdef cbool overlaps(self, uint64_t ptr, uint64_t nbytes) noexcept nogil
    cdef uint32_t new_record(self, uint64_t ptr) noexcept nogil
    cdef uint32_t holder_of(self, uint64_t address) noexcept nogil
    cdef uint32_t live_at(self, uint64_t address) except? 0xFFFFFFFE
    cdef void shelve(self, uint32_t handle) noexcept nogil
    cdef cbool drop(self, uint32_t* link) noexcept nogil
    cdef void drop_cached(self) noexcept nogil
    cdef void forget_record(self, uint32_t handle) noexcept nogil
    cdef int64_t largest_cached(self) noexcept nogil
    cdef void abandon(self, uint32_t handle) noexcept nogil
    cdef object recount(self, int64_t* sums)


cdef class PinnedBlock:
    cdef readonly object ptr
    cdef readonly object nbytes
    cdef readonly object allocation_id
