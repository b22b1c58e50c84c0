"""The calls that map memory: what is asked of a sub-allocator, and what it fails with."""

cimport cython
from libc.stddef cimport size_t
from libc.stdint cimport uint64_t


@cython.final
cdef class Faults:
    cdef object first
    cdef object interrupt               # the first error that is not an Exception, such as a Ctrl-C
    cdef size_t count

    cdef Faults restart(self)
    cdef void add(self, error) noexcept


@cython.final
cdef class Page:
    cdef object number                  # as `create` returned it; None: it is still to be made
    cdef uint64_t nbytes
    cdef bint is_mapped
    cdef Page next                      # in the list of those that the sub-allocator did not take back


cdef inline uint64_t round_up_to(uint64_t size, uint64_t step) noexcept nogil:
    return (size + step - 1) // step * step

cdef uint64_t call_reserve(sub_allocator, uint64_t nbytes) except 0
cdef object call_create(sub_allocator, uint64_t nbytes)
cdef bint lies_in(uint64_t address, runs) noexcept
cdef uint64_t bytes_from(Page page) noexcept
cdef list driver_numbers(list pages)
cdef int raise_faults(sub_allocator, Faults faults) except -1
