"""PyTorch's expandable segments: a part of `CachingAllocator`."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, Pool
from bfc.allocators._lock cimport Lock
from bfc.allocators._source cimport Source
from bfc.policies._private_pools cimport PoolId


cdef struct Growing:                # a request that memory is mapped for
    uint64_t size                   # rounded
    uint32_t bin_set                # of ranges
    ChunkHandle start               # the chunk that becomes large enough; NO_CHUNK: none is chosen
    uint64_t ptr                    # where it begins
    cbool has_reserved              # addresses for it

cdef struct FreePart:               # a free chunk of a range
    ChunkHandle handle
    uint64_t ptr
    uint64_t size


@cython.final
cdef class Range:
    cdef uint64_t ptr
    cdef uint64_t nbytes
    cdef uint64_t slot                  # bytes of each of its pages
    cdef uint32_t bin_set
    cdef uint64_t stream
    cdef dict pages                     # by the address where each is mapped
    cdef vector[ChunkHandle] holes      # its unmapped chunks, in address order
    cdef bint is_known                  # to the pool: until the allocator closes


@cython.final
cdef class ExpandableSegments:
    cdef Lock* lock                     # the allocator's
    cdef Pool pool
    cdef Source source
    cdef bint strict                    # each slot is unmapped by a call of its own, and has PyTorch's size
    cdef list ranges                    # of Range, by address
    cdef list unreleased                # (page, bytes) that the sub-allocator did not take back
    cdef unsigned long mapper           # the thread that maps or unmaps now; 0: none. Guarded by the lock
    cdef size_t count                   # of ranges and unreleased pages
    cdef uint64_t changes               # counts what was mapped and unmapped
    cdef bint some_stuck                # memory that could not be unmapped

    cdef int stand_behind(self, Lock* lock, Pool pool, Source source) except -1
    cdef bint enter(self) except -1
    cdef int leave(self) except -1
    cdef uint64_t slot_of(self, Growing* growing) noexcept nogil
    cdef cbool are_some(self) noexcept nogil
    cdef ChunkHandle ready(self, Growing* growing) noexcept nogil
    cdef bint map_more(self, Growing* growing) except -1
    cdef ChunkHandle next_to_map(self, Growing* growing, uint64_t* nbytes)
    cdef int choose_start(self, Growing* growing)
    cdef int reserve(self, Growing* growing) except -1
    cdef int take_in(self, Range range, Growing* growing) except -1
    cdef Range range_of(self, uint64_t ptr)
    cdef bint map_front(self, Range range, ChunkHandle handle, uint64_t nbytes) except -1
    cdef int give_up_mapping(self, Range range, ChunkHandle handle) except -1
    cdef int finish_mapping(self, Range range, ChunkHandle handle, uint64_t nbytes) except -1
    cdef list create_pages(self, Range range, uint64_t nbytes)
    cdef int put_pages(self, Range range, uint64_t ptr, list pages) except -1
    cdef int release_pages(self, list pages, uint64_t nbytes) except -1
    cdef int release_page(self, page, uint64_t nbytes, list faults) except -1
    cdef uint64_t give_back(self, vector[FreePart]& parts, list faults) except? 0xFFFFFFFFFFFFFFFF
    cdef uint64_t unmap_part(self, Range range, FreePart* part, list faults) except? 0xFFFFFFFFFFFFFFFF
    cdef int unmap_pages(self, Range range, uint64_t ptr, uint64_t nbytes, uint64_t step, list faults) except -1
    cdef uint64_t settle(self, Range range, ChunkHandle handle) except? 0xFFFFFFFFFFFFFFFF
    cdef void note_change(self) noexcept nogil
    cdef void note_holes(self, Range range, ChunkHandle added) noexcept nogil
    cdef uint64_t try_stuck_again(self, list faults) except? 0xFFFFFFFFFFFFFFFF
    cdef int try_unreleased_again(self, list faults) except -1
    cdef list leaving(self, Range range)
    cdef int unmap_again(self, Range range, ChunkHandle handle, list faults) except -1
    cdef int drop_unused(self, list faults) except -1
    cdef int drop_if_unused(self, Range range, list faults) except -1
    cdef int unreserve(self, Range range, list faults) except -1
    cdef int close(self, list faults) except -1
    cdef int empty(self, Range range, list faults) except -1
    cdef dict figures(self)


cdef int check_mapping(sub_allocator) except -1
cdef int raise_faults(sub_allocator, list faults) except -1
cdef void list_parts(Pool pool, PoolId id, uint32_t kind, vector[FreePart]& out) noexcept nogil
