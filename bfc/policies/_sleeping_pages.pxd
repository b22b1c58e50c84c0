"""Stitched pages that sleep: a part of `BFCAllocator(virtual_memory=True)`."""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from bfc.allocators._tags cimport Tag
from bfc.policies._mapper cimport Faults, Page, Place
from bfc.policies._sleep cimport Nap, Run
from bfc.policies._page_mapper cimport Stretch
from bfc.policies._stitching cimport Stitching


@cython.final
cdef class SleepingPages(Stitching):
    cdef list left                      # of Run: what is mapped where tags sleep, since it could not be unmapped

    cdef bint without_calls             # no calls: what is unmapped and released now went when its tag fell asleep

    cdef void give_up_left(self, Faults faults) noexcept
    cdef int retire_views_of(self, uint64_t tag) except -1
    cdef int list_runs(self, Nap nap, bint is_mapped) except -1
    cdef int add_view(self, Nap nap, uint32_t number, bint is_mapped, set seen) except -1
    cdef void forget_views_of(self, uint64_t tag) noexcept
    cdef void keep_left(self, Nap nap, Run run) noexcept
    cdef void shrink_stretch(self, Stretch stretch, Faults faults) noexcept
    cdef void forget_what_has_gone(self) noexcept
    cdef void forget_retired(self, Place gone) noexcept
    cdef void empty_touched(self, Stretch stretch) noexcept
