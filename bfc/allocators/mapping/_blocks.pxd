"""Regions of private pools that sleep with a tag."""

from libc.stdint cimport uint64_t

from bfc.allocators.mapping._address_ranges cimport AddressRanges, MappedRun, TagTransition

cdef class Blocks:
    cdef AddressRanges memory
    cdef dict by_address                # of MappedRun, each of one page

    cdef object sub_allocator(self)
    cdef void give_up(self, MappedRun run) noexcept
    cdef int list_for(self, TagTransition transition, bint mapped) except -1
    cdef uint64_t bytes_of(self, bint asleep, bint mapped) noexcept


cdef Blocks blocks_of(AddressRanges memory)
