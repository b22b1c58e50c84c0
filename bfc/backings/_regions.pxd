"""Blocks from the sub-allocator."""

from libc.stdint cimport uint64_t

from bfc._core cimport ChunkHandle
from bfc.allocators.mapping._address_ranges cimport AddressRanges
from bfc.allocators._chunk_allocator cimport ChunkAllocator, Request
from bfc.backings._backing cimport Backing


cdef class Regions(Backing):
    cdef uint64_t mark                  # of a lane whose requests other backings serve: IN_REGIONS, or 0 without any

    cdef ChunkHandle find_beside(self, ChunkAllocator allocator, Request* request) noexcept nogil


cdef class SleepingRegions(Backing):
    cdef AddressRanges memory


cdef Regions regions_beside(uint64_t mark)
cdef SleepingRegions sleeping_regions(AddressRanges memory)
