"""The blocks of pinned memory, and where they come from."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.map cimport map as cmap
from libcpp.vector cimport vector

from bfc._core cimport Gauge

cdef enum:
    NO_BLOCK = 0xFFFFFFFF
    BUCKETS = 64

cdef enum State:
    UNUSED                      # a record without memory
    CACHED                      # on the stack of its bucket
    LIVE
    LEAVING                     # freed, and streams may still use it

cdef struct Range:
    uint64_t ptr
    uint64_t nbytes

cdef struct Timer:              # microseconds
    int64_t total
    int64_t longest
    int64_t shortest
    int64_t count

cdef struct Block:
    uint64_t ptr
    uint64_t size
    uint64_t received           # bytes, from the source; 0: a piece of the reserve
    uint64_t requested
    int64_t allocation_id       # while it is live, else 0
    uint32_t next               # the next block of its stack, or the next unused record
    State state
    cbool exported              # other objects hold views of it
    cbool unfreed               # a finaliser wanted to free it, but the device failed


cdef inline int bucket_of(uint64_t size) noexcept nogil:
    """ceil(log2(size))"""
    cdef int bits = 0
    size -= 1
    while size:
        size >>= 1
        bits += 1
    return bits


@cython.final
cdef class Source:
    cdef object sub_allocator
    cdef vector[Range] leaving      # blocks that are being given back
    cdef vector[Range] unreturned   # what the sub-allocator did not take back
    cdef size_t taken               # blocks that it gave or is asked for: both lists have room for that many
    cdef list rejected              # (address, bytes) of blocks that break the contract and were not taken back
    cdef Timer alloc_time, free_time
    cdef Range reserve              # 0 bytes: there is none yet
    cdef uint64_t reserve_used

    cdef bint cut(self, uint64_t size, Range* piece) noexcept nogil
    cdef void leave_reserve(self) noexcept nogil
    cdef bint ask(self, uint64_t size, uint64_t alignment, threads, Range* block) except -1
    cdef cbool keep_room(self) noexcept nogil
    cdef cbool leave(self, Range block) noexcept nogil
    cdef int give_back_block(self, Range block) except -1
    cdef int give_back(self, bint idle=*) except -1
    cdef int free_timed(self, Range block, bint idle) except -1
    cdef void offer_unreturned_again(self) noexcept nogil
    cdef int offer_rejected_again(self) except -1
    cdef bint has_nothing(self) noexcept


@cython.final
cdef class Blocks:
    cdef vector[Block] records
    cdef uint32_t unused            # the first of the records that have no memory
    cdef vector[uint32_t] stacks    # the top of each bucket's stack
    cdef cmap[uint64_t, uint32_t] by_address
    cdef int64_t last_id
    cdef Source source              # where the blocks come from, and go
    cdef Gauge allocations, allocated_bytes, active_requests, active_bytes

    cdef uint32_t pop(self, uint64_t size, uint64_t nbytes, uint64_t alignment) noexcept nogil
    cdef void begin(self, uint32_t handle, uint64_t nbytes) noexcept nogil
    cdef cbool overlaps(self, uint64_t ptr, uint64_t nbytes) noexcept nogil
    cdef uint32_t add(self, Range memory, uint64_t size, uint64_t nbytes) noexcept nogil
    cdef uint32_t new_record(self, uint64_t ptr) noexcept nogil
    cdef uint32_t holder_of(self, uint64_t address) noexcept nogil
    cdef void shelve(self, uint32_t handle) noexcept nogil
    cdef cbool drop(self, uint32_t* link) noexcept nogil
    cdef void drop_top(self, uint32_t handle) noexcept nogil
    cdef void drop_cached(self) noexcept nogil
    cdef void forget_record(self, uint32_t handle) noexcept nogil
    cdef int64_t largest_cached(self) noexcept nogil
    cdef void abandon_all(self) noexcept nogil
    cdef void abandon(self, uint32_t handle) noexcept nogil
    cdef object recount(self, int64_t* sums)
    cdef uint32_t live_at(self, uint64_t address) except? 0xFFFFFFFE
    cdef void restart_peaks(self) noexcept nogil
    cdef void restart_totals(self) noexcept nogil

    cdef inline cbool is_live(self, uint32_t handle, int64_t allocation_id) noexcept nogil:
        return (allocation_id != 0 and handle < self.records.size()
                and self.records[handle].allocation_id == allocation_id)
