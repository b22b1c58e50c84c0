"""PyTorch's expandable segments: a part of `CachingAllocator`."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.vector cimport vector

from bfc._core cimport ChunkHandle
from bfc.allocators.mapping._address_ranges cimport AddressRange, AddressRanges, Faults, FreePart, Page


cdef struct Growing:                # a request that memory is mapped for
    uint64_t size                   # rounded
    uint32_t bin_set                # of ranges
    ChunkHandle start               # the chunk that becomes large enough; NO_CHUNK: none is chosen
    uint64_t ptr                    # where it begins
    cbool has_reserved              # addresses for it


cdef struct Span:                   # whole slots
    uint64_t ptr
    uint64_t nbytes


@cython.final
cdef class ExpandableSegments(AddressRanges):
    cdef bint strict                    # each slot is unmapped by a call of its own, and has PyTorch's size
    cdef bint checks_range              # a range that is smaller than the request is given back at once
    cdef object wanted_reserve          # the addresses of a range: a fraction of the memory, or bytes; None: 9/8 of it

    cdef Page* page_at(self, AddressRange* range, uint64_t ptr) noexcept nogil
    cdef uint64_t slot_of(self, Growing* growing) noexcept nogil
    cdef ChunkHandle ready(self, Growing* growing) noexcept nogil
    cdef int map_more(self, Growing* growing) noexcept nogil
    cdef ChunkHandle next_to_map(self, Growing* growing, uint64_t* nbytes) noexcept nogil
    cdef cbool is_on_its_way(self, Growing* growing) noexcept nogil
    cdef void choose_start(self, Growing* growing) noexcept nogil
    cdef int reserve_for(self, Growing* growing) noexcept nogil
    cdef int size_range(self, uint64_t* slot, uint64_t* nbytes) noexcept with gil
    cdef uint64_t bytes_to_reserve(self, uint64_t total)
    cdef bint refuses(self, uint64_t rounded, uint64_t total)
    cdef int reserve_in_vain(self, AddressRange* range) noexcept with gil
    cdef AddressRange* range_of(self, uint64_t ptr) noexcept nogil
    cdef int map_front(self, ChunkHandle handle, uint64_t nbytes) noexcept nogil
    cdef int map_made(self, AddressRange* range, ChunkHandle handle, uint64_t nbytes) noexcept nogil
    cdef uint64_t give_back(self, vector[FreePart]& parts, Faults faults) noexcept
    cdef uint64_t unmap_part(self, AddressRange* range, FreePart* part, Faults faults) noexcept
    cdef ChunkHandle begin_to_unmap(self, AddressRange* range, FreePart* part) noexcept
    cdef cbool make_room(self, AddressRange* range) noexcept nogil
    cdef uint64_t try_stuck_again(self, Faults faults) noexcept
    cdef void drop_unused(self, Faults faults) noexcept
    cdef void drop_if_unused(self, AddressRange* range, Faults faults) noexcept
    cdef cbool list_slots(self, AddressRange* range, cbool live_only, vector[Span]& out) noexcept nogil
    cdef cbool is_asleep(self, AddressRange* range) noexcept nogil
    cdef uint64_t lost_in(self, AddressRange* range) noexcept nogil
