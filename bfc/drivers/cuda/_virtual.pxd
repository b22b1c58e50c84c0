"""Reserved addresses of a CUDA device, and the physical memory that is mapped to them."""

from libc.stdint cimport uint64_t
from libcpp.vector cimport vector

from bfc.drivers.cuda._driver cimport Access, CUresult, MemoryProperties
from bfc.drivers.cuda._device cimport PrimaryContext

ctypedef CUresult (*Ending)(uint64_t, size_t) noexcept nogil


cdef class VirtualMemory:
    cdef PrimaryContext context
    cdef MemoryProperties wanted        # of each page
    cdef bint has_created               # whether a page was created: from then on the kind of handle is fixed
    cdef readonly uint64_t granularity

    cdef CUresult end(self, Ending call, uint64_t what, uint64_t nbytes) noexcept nogil
    cdef CUresult make(self, uint64_t nbytes, uint64_t* handle) noexcept nogil
    cdef CUresult drop(self, uint64_t handle) noexcept nogil
    cdef CUresult hide(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef CUresult let_go(self, uint64_t address, uint64_t nbytes) noexcept nogil
    cdef CUresult put(self, uint64_t address, vector[uint64_t]& handles, vector[uint64_t]& sizes,
                      size_t* done, uint64_t* end) noexcept nogil
    cdef CUresult allow(self, uint64_t address, uint64_t nbytes, vector[Access]& access) noexcept nogil
