"""For code whose threads may end half-way through their work, by a fork, or when the interpreter exits; and for calls
that no signal handler may interrupt."""

from cpython.object cimport PyObject
from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

cdef bint exiting       # finalisers then free nothing: the driver, or half of Python, may be gone

cdef extern from "gil_wait.hpp" namespace "bfc" nogil:
    bint is_finalizing()

cdef cbool start_entering() noexcept nogil
cdef void has_entered() noexcept nogil

ctypedef void (*InChild)() noexcept nogil

cdef int call_in_child(InChild function) except -1
cdef uint64_t era() noexcept nogil
cdef unsigned long survivor() noexcept nogil


cdef class ForkSafeLock:
    cdef unsigned long holder
    cdef uint64_t depth
    cdef uint64_t era

    cdef bint take(self) noexcept


cdef enum:
    SIGNALS = 64

cdef struct Deferral:
    bint in_main_thread
    uint64_t put_aside              # bit n - 1: the handler of signal n was replaced
    PyObject* handlers[SIGNALS]     # by n - 1

cdef void defer_handlers(Deferral* deferral) noexcept
cdef void resume_handlers(Deferral* deferral) noexcept
cdef int run_handlers() except -1
