"""What has to know that the process was forked."""

from libc.stdint cimport uint64_t


cdef uint64_t fork_count() noexcept nogil
cdef unsigned long thread_that_forked() noexcept nogil


cdef class ForkSafeLock:
    cdef unsigned long holder
    cdef uint64_t depth
    cdef uint64_t epoch

    cdef bint take(self) noexcept
