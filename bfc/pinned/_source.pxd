"""A sub-allocator that gives blocks to a `PinnedAllocator`, and takes them back."""

cimport cython
from libc.stdint cimport int64_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

cdef struct Range:
    uint64_t ptr
    uint64_t nbytes

cdef struct Timer:              # microseconds
    int64_t total
    int64_t longest
    int64_t shortest
    int64_t count


@cython.final
cdef class Source:
    cdef object sub_allocator
    cdef vector[Range] leaving      # blocks that are being given back
    cdef vector[Range] unreturned   # what the sub-allocator did not take back
    cdef size_t taken               # blocks that it gave or is asked for: both lists have room for that many
    cdef list rejected              # (address, bytes) of blocks that break the contract and were not taken back
    cdef Timer alloc_time, free_time

    cdef bint ask(self, uint64_t size, threads, Range* block) except -1
    cdef cbool leave(self, Range block) noexcept nogil
    cdef int give_back(self, bint idle=*) except -1
    cdef int give_back_block(self, Range block) except -1
    cdef void offer_unreturned_again(self) noexcept nogil
    cdef int offer_rejected_again(self) except -1
    cdef bint has_nothing(self) noexcept
    cdef cbool keep_room(self) noexcept nogil
    cdef int free_timed(self, Range block, bint idle) except -1
