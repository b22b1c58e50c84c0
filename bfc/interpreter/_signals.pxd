from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

cdef enum:
    SIGNALS = 64

cdef struct Deferral:
    bint in_main_thread
    uint64_t put_aside              # bit n - 1: the handler of signal n was replaced
    PyObject* handlers[SIGNALS]     # by n - 1

cdef void defer_handlers(Deferral* deferral) noexcept
cdef void resume_handlers(Deferral* deferral) noexcept
cdef int run_handlers() except -1
