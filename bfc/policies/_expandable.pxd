"""PyTorch's expandable segments: a part of `CachingAllocator`."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle, Pool
from bfc.policies._private_pools cimport PoolId
from bfc.policies._mapper cimport Faults, Page
from bfc.policies._sleep cimport Nap, Sleeper


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


cdef struct Span:                   # whole slots
    uint64_t ptr
    uint64_t nbytes


@cython.final
cdef class Range:
    cdef uint64_t ptr
    cdef uint64_t nbytes
    cdef uint64_t slot                  # bytes of each of its pages
    cdef uint32_t bin_set
    cdef uint64_t stream
    cdef list pages                     # of Page or None, by slot
    cdef vector[ChunkHandle] holes      # its unmapped chunks, in address order
    cdef bint is_known                  # whether the pool knows it: until the allocator closes
    cdef bint is_gone                   # its addresses are given back, or were never had
    cdef bint must_wait                 # whether to wait for its stream before what is leaving is unmapped

    cdef Page page_at(self, uint64_t ptr)
    cdef int expect_pages(self, uint64_t ptr, uint64_t nbytes) except -1
    cdef void forget_page(self, uint64_t ptr) noexcept
    cdef size_t count_mapped(self) noexcept


@cython.final
cdef class ExpandableSegments(Sleeper):
    cdef bint strict                    # each slot is unmapped by a call of its own, and has PyTorch's size
    cdef list ranges                    # of Range, by address
    cdef bint some_stuck                # memory that could not be unmapped

    cdef void forget_what_has_gone(self) noexcept
    cdef ChunkHandle growing_in(self, Range range) noexcept
    cdef FreePart part_of(self, ChunkHandle handle) noexcept
    cdef uint64_t slot_of(self, Growing* growing) noexcept nogil
    cdef ChunkHandle ready(self, Growing* growing) noexcept nogil
    cdef bint map_more(self, Growing* growing) except -1
    cdef ChunkHandle next_to_map(self, Growing* growing, uint64_t* nbytes)
    cdef bint is_on_its_way(self, Growing* growing) noexcept
    cdef int choose_start(self, Growing* growing)
    cdef int reserve(self, Growing* growing) except -1
    cdef void sort_last(self) noexcept
    cdef int take_in(self, Range range, Growing* growing) except -1
    cdef Range range_of(self, uint64_t ptr)
    cdef bint map_front(self, ChunkHandle handle, uint64_t nbytes) except -1
    cdef void give_up_mapping(self, Range range, ChunkHandle handle) noexcept
    cdef void drop_pages(self, Range range, uint64_t ptr, uint64_t nbytes) noexcept
    cdef int finish_mapping(self, Range range, ChunkHandle handle) except -1
    cdef bint create_pages(self, Range range, uint64_t ptr, uint64_t nbytes) except -1
    cdef int put_pages(self, Range range, uint64_t ptr, uint64_t nbytes) except -1
    cdef void mark_mapped(self, Range range, uint64_t ptr, uint64_t nbytes, runs) noexcept
    cdef uint64_t give_back(self, vector[FreePart]& parts, Faults faults) noexcept
    cdef uint64_t unmap_part(self, Range range, FreePart* part, Faults faults) noexcept
    cdef ChunkHandle begin_to_unmap(self, Range range, FreePart* part, uint64_t start, uint64_t end) noexcept
    cdef bint make_room(self, Range range) noexcept
    cdef bint wait_for(self, Range range, Faults faults) noexcept
    cdef void unmap_pages(self, Range range, uint64_t ptr, uint64_t nbytes, uint64_t step, Faults faults) noexcept
    cdef uint64_t settle(self, Range range, ChunkHandle handle) noexcept
    cdef void note_holes(self, Range range, ChunkHandle added) noexcept nogil
    cdef uint64_t try_stuck_again(self, Faults faults) noexcept
    cdef uint64_t unmap_again(self, Range range, Faults faults) noexcept
    cdef ChunkHandle leaving_from(self, Range range, uint64_t ptr) noexcept
    cdef void drop_unused(self, Faults faults) noexcept
    cdef void drop_if_unused(self, Range range, Faults faults) noexcept
    cdef void unreserve(self, Range range, Faults faults) noexcept
    cdef void remove(self, Range range) noexcept
    cdef void empty(self, Range range, Faults faults) noexcept
    cdef list ranges_of(self, uint64_t tag)
    cdef cbool list_slots(self, Range range, cbool live_only, vector[Span]& out) noexcept nogil
    cdef uint64_t release_part(self, Range range, FreePart* part) noexcept
    cdef bint is_asleep(self, Range range) noexcept
    cdef dict figures(self)
    cdef uint64_t lost_in(self, Range range) noexcept


cdef int check_mapping(sub_allocator) except -1
cdef void list_parts(Pool pool, PoolId id, uint32_t kind, vector[FreePart]& out) noexcept nogil
