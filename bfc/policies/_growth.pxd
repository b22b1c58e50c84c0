"""How TensorFlow's regions grow."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

cdef uint64_t backpedal(uint64_t size) noexcept nogil


cdef class Growth:
    cdef readonly uint64_t next_region_size
    cdef uint64_t grow_to(self, uint64_t rounded, uint64_t available, cbool* grew) noexcept nogil
    cdef void succeeded(self, cbool grew) noexcept nogil
    cdef void reset(self) noexcept nogil
    cdef void double(self) noexcept nogil
    cdef uint64_t first_size
