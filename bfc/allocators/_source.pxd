"""A sub-allocator behind a limit."""

cimport cython
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport Pool, Region
from bfc.drivers.cuda._device cimport bfc_native_source
from bfc.allocators._lock cimport Lock, Shown

cdef extern from *:
    """
    // Threads may count at the same time, since no lock is held during calls of the sub-allocator.
    static inline void bfc_add_up(uint64_t* value, uint64_t more) { __atomic_fetch_add(value, more, __ATOMIC_RELAXED); }
    """
    void add_up "bfc_add_up"(uint64_t* value, uint64_t more) noexcept nogil

cdef extern from "allocator_parts.hpp" namespace "bfc" nogil:
    cdef cppclass Unreturned[T]:
        vector[T] regions
        uint64_t nbytes
        vector[T] closing

cdef struct Call:
    unsigned long thread        # the thread that is inside the call
    uint64_t nbytes             # the bytes that are set aside for it

cdef struct Asking:             # what a request asks of the sub-allocator
    uint64_t asked              # bytes of the last block it was asked for
    uint64_t changes            # regions that came or went on the request's behalf
    cbool without_gil           # whether the sub-allocator must be called without the GIL
    cbool in_block              # whether the memory is to sleep: `blocks` is asked in place of the sub-allocator
    int fault                   # what the sub-allocator failed with, called without the GIL; 0: nothing
    uint64_t alignment          # that the request asks for; the block is at least as aligned as all others

cdef enum Taken:
    ADDED
    OVERLAPS                    # memory that the pool has already
    REFUSED                     # by the allocator, which has closed, or has no host memory for it


cdef uint64_t total_size(vector[Region]& regions) noexcept nogil

cdef int ask_for_block(object source, object alloc, uint64_t alignment, uint64_t nbytes, bint strict,
                       uint64_t* address, uint64_t* received, list rejected) except -1
cdef int offer_again(object source, list rejected) except -1


cdef struct GrowingPool:        # a private pool's id
    uint64_t first
    uint64_t second


@cython.final
cdef class Source:
    cdef Lock* lock                     # the allocator's: it guards the pool and what stands here
    cdef Pool pool
    cdef object sub_allocator
    cdef object blocks                  # regions that sleep: see mapping/_blocks.pyx; None until there are any
    cdef cbool has_blocks
    cdef bfc_native_source* native      # NULL where the sub-allocator has none
    cdef uint64_t alignment             # of regions
    cdef bint strict
    cdef bint joins_regions

    cdef uint64_t set_aside             # bytes that the sub-allocator is asked for now, or has not taken back yet
    cdef Shown[uint64_t] changes        # counts regions that came or went
    cdef Shown[uint64_t] calls_ended    # counts calls to the sub-allocator
    cdef uint64_t driver_calls          # what the sub-allocator was asked for so far; a map counts once for each page
    cdef Shown[uint64_t] refused_bytes  # of the sub-allocator's last refusal; 0: the limit refused
    cdef Shown[int] last_fault          # what the last allocation without the GIL failed with
    cdef vector[Call] calls             # to the sub-allocator, under way now
    cdef vector[GrowingPool] growing    # the private pools that calls under way add memory to
    cdef Unreturned[Region] unreturned  # given up by the pool, but the sub-allocator's free() failed
    cdef size_t on_their_way            # regions that are asked for, or go back
    cdef list rejected                  # (address, bytes) of blocks that break the contract and were not taken back

    cdef int attach(self, Lock* lock, Pool pool) except -1
    cdef int open(self, object sub_allocator) except -1
    cdef int set_granularity(self) except -1

    cdef cbool begin_growing(self, GrowingPool pool) noexcept nogil
    cdef void end_growing(self, GrowingPool pool) noexcept nogil
    cdef cbool is_growing(self, GrowingPool pool) noexcept nogil

    cdef uint64_t taken(self) noexcept nogil
    cdef uint64_t lasting(self) noexcept nogil
    cdef cbool set_bytes_aside(self, uint64_t nbytes, uint64_t limit, cbool* blocked) noexcept nogil
    cdef void put_bytes_back(self, uint64_t nbytes) noexcept nogil
    cdef int ask(self, Asking* asking, uint64_t nbytes, Region* block, cbool is_set_aside) except -1 nogil
    cdef Taken take_in(self, Asking* asking, Region* block, uint32_t bin_set, vector[Region]& refused) noexcept nogil
    cdef int refuse(self, Region* block, Taken taken, cbool closed) except -1 with gil
    cdef uint64_t forget(self, vector[Region]& regions) noexcept nogil
    cdef void take_unreturned(self, vector[Region]& regions) noexcept nogil
    cdef void forget_all(self, vector[Region]& regions) noexcept nogil
    cdef int give_back(self, vector[Region]& regions, cbool without_gil) except -1 nogil
    cdef void keep_block(self, uint64_t ptr, uint64_t nbytes) noexcept
    cdef void keep_bytes(self, int64_t nbytes) noexcept nogil
    cdef int offer_rejected_again(self) except -1

    cdef bint is_calling(self) noexcept
    cdef cbool holds_bytes_aside(self) noexcept nogil
    cdef bint is_called_here(self) noexcept
    cdef cbool is_listed(self, unsigned long thread) noexcept nogil
    cdef void forget_other_threads(self) noexcept

    cdef cbool keep_room(self) noexcept nogil
    cdef void keep_unreturned(self, Region region) noexcept nogil
    cdef cbool begin_call(self, uint64_t nbytes, uint64_t to_set_aside) noexcept nogil
    cdef Call* newest_call(self) noexcept nogil
    cdef void end_call(self, cbool listed, uint64_t nbytes) noexcept nogil
    cdef int ask_in_python(self, uint64_t alignment, uint64_t nbytes, Region* block, cbool in_block) except -1 with gil
    cdef int give_back_in_python(self, vector[Region]& regions) except -1 with gil
    cdef void region_returned(self, Region region, cbool returned) noexcept nogil
