"""The regions of plans where memory is mapped page by page."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from bfc._core cimport ChunkHandle, PlanServer, Pool
from bfc.allocators._pages cimport Pages
from bfc.allocators._lock cimport Lock
from bfc.allocators.mapping._address_ranges cimport AddressRange, Faults
from bfc.allocators.mapping._stitching cimport Stitching


@cython.final
cdef class PlanRanges:
    cdef Stitching memory       # what maps the pages
    cdef Lock* lock             # the allocator's
    cdef Pool pool
    cdef Pages pages
    cdef PlanServer** in_use    # where the plan in use stands; NULL there: none is

    cdef AddressRange* range_of(self, PlanServer* plan, int region) noexcept nogil
    cdef int open(self, PlanServer* plan, int region, uint64_t home) except -1
    cdef int fill_place(self, uint64_t stream, uint64_t rounded) except -1
    cdef int fill_while_mapping(self, uint64_t stream, uint64_t rounded) except -1
    cdef uint64_t fill_at(self, AddressRange* addresses, uint32_t first, uint32_t count, uint32_t index,
                          uint64_t stream) except? 0xFFFFFFFFFFFFFFFF
    cdef uint64_t bring_back(self, AddressRange* addresses, uint32_t first, uint32_t count,
                             uint64_t stream) except? 0xFFFFFFFFFFFFFFFF
    cdef bint hold_moved(self, AddressRange* addresses, uint32_t slot) noexcept
    cdef ChunkHandle cut_at(self, AddressRange* addresses, uint64_t ptr) noexcept
    cdef void join_at(self, AddressRange* addresses, uint64_t ptr) noexcept
    cdef uint64_t move_into_plan(self, AddressRange* addresses, uint64_t stream, uint64_t wanted,
                                 ChunkHandle at) except? 0xFFFFFFFFFFFFFFFF
    cdef bint give_up(self, AddressRange* addresses, Faults faults) except -1
    cdef bint is_vacant(self, AddressRange* addresses) noexcept
    cdef bint hold_region(self, AddressRange* addresses) noexcept
    cdef void leave_moved(self, AddressRange* addresses, Faults faults) noexcept
    cdef bint enter(self) except -1
    cdef void leave(self) noexcept
    cdef bint give_up_all(self, PlanServer* plan, int which) except -1
    cdef bint has_any(self, PlanServer* plan, int which) noexcept
    cdef bint is_range_of(self, AddressRange* addresses, PlanServer* plan, int which) noexcept


cdef PlanRanges ranges_for_plans(Stitching memory, PlanServer** in_use)
