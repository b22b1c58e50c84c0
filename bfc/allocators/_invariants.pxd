"""Whether a pool is sound."""

from bfc._core cimport Pool
from bfc.allocators._pages cimport Pages

cdef const char* first_fault(Pool pool) noexcept nogil
cdef const char* fault_in_pages(Pages pages) noexcept nogil
