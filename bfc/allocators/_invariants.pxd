"""Whether a pool is sound."""

from bfc._core cimport Pool

cdef const char* first_fault(Pool pool) noexcept nogil
