"""Functions that a user attaches: a part of `CachingAllocator`."""

cimport cython
from libc.stdint cimport uint64_t


@cython.final
cdef class Observers:
    cdef list callbacks             # guarded by the GIL, as all of this
    cdef list observers
    cdef bint has_callbacks         # may be read without
    cdef object running             # in which threads one of them runs now

    cdef int add_callback(self, callback) except -1
    cdef int remove_callback(self, callback) except -1
    cdef int attach(self, observer) except -1
    cdef int detach(self, observer) except -1
    cdef bint run_callbacks(self) except -1
    cdef int tell(self, device, uint64_t asked, uint64_t limit, uint64_t device_free) except -1
    cdef bint call_each(self, list functions, tuple arguments) except -1
