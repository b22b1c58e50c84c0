"""Stitching: a part of `BFCAllocator(virtual_memory=True)`."""

from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool

from bfc._core cimport ChunkHandle
from bfc.policies._page_mapper cimport PageMapper, Stretch


cdef struct Wanted:                 # a request that nothing fits
    uint64_t rounded
    uint64_t requested
    uint64_t stream
    cbool indexed
    ChunkHandle handle              # what it was served with, or NO_CHUNK


cdef class Stitching(PageMapper):
    cdef bint provide(self, uint32_t bin_set, Wanted* wanted) except -1
    cdef bint has_failed(self) noexcept
    cdef int try_again(self) except -1
    cdef bint provide_small(self, Stretch stretch) except -1
    cdef bint provide_large(self, Stretch stretch, Wanted* wanted) except -1
    cdef bint grow_behind(self, uint64_t address, uint64_t rounded) except -1
    cdef uint64_t missing_at_end(self, Stretch stretch, uint64_t rounded) noexcept
    cdef uint64_t room(self) noexcept
    cdef bint is_kin(self, Stretch other, Stretch stretch) noexcept
    cdef bint is_stranger(self, Stretch other, Stretch stretch) noexcept
    cdef bint trim_strangers(self, Stretch stretch, uint64_t wanted) except -1
    cdef uint64_t free_of_others(self, Stretch stretch) noexcept
    cdef bint is_within_headroom(self, uint64_t pages, uint64_t rounded) noexcept
    cdef uint64_t adopt(self, Stretch stretch, uint64_t wanted, bint from_others) except? 0xFFFFFFFFFFFFFFFF
    cdef uint64_t hold_free(self, Stretch stretch, uint64_t wanted, bint from_others) noexcept
    cdef int order_after(self, Stretch stretch) except -1
    cdef int map_held(self, Stretch stretch) except -1
    cdef int map_again(self, Stretch stretch, list pages) except -1
    cdef cbool add_slots(self, Stretch stretch, ChunkHandle handle, list pages)
    cdef int seat_held(self, Stretch stretch, bint for_good) except -1
    cdef bint stitch(self, Stretch stretch, uint64_t pages, Wanted* wanted) except -1
    cdef bint hold_for_view(self, Stretch stretch, uint64_t pages, uint32_t* number) except -1
    cdef int map_view(self, uint32_t number, list pages, Wanted* wanted) except -1
    cdef int enter_view(self, uint32_t number, uint64_t ptr, Wanted* wanted) except -1
    cdef int retire_for(self, uint64_t pages) except -1
