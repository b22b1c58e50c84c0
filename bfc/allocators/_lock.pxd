"""The lock around a pool, and values that are written under it and may be read without."""

from libc.stdint cimport uint64_t
from libcpp cimport bool as cbool

cdef extern from "lock.hpp" namespace "bfc" nogil:
    cdef cppclass Lock:
        cbool try_acquire()
        void wait_and_acquire()
        void release()
        void give_way()
        void on_fork(void (*forget)(void*) noexcept nogil, void* whose)
        uint64_t acquisitions()
    cdef cppclass Shown[T]:
        T get()
        void set(T value)
        void add(T more)


cdef enum:
    BETWEEN_OTHERS = 256        # how many of a list are dealt with before others get the lock: some 10 us

cdef extern from "gil_wait.hpp" namespace "bfc" nogil:
    void acquire_lock "bfc::acquire"(Lock& lock)        # callers may hold the GIL or not
    void let_others_on "bfc::give_way"(Lock& lock)
