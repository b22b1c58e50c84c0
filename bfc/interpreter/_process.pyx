"""Whether the interpreter is about to exit, what happens in a forked child, and locks that survive threads which end in
the middle of a section: by a fork, or when the interpreter shuts down.

Allocators, drivers and pools share one exit hook, which stands here. Code that must run in a forked child registers a
function here. One hook of the C library calls the C functions, and later one hook of Python's calls the Python
functions. Only the locks of allocators have a hook of their own (lock.hpp): they are taken before the fork, after all
of Python's before-fork hooks, and released in the parent too.
"""

import atexit
import os

from posix.unistd cimport usleep

exiting = False


@atexit.register
def _note_the_exit():
    global exiting
    exiting = True


def is_exiting():
    """Whether Python's exit has begun. From then on frees do nothing: the driver, or half of Python, may be gone.

    Returns
    -------
    bool
        False until the functions that are registered with `atexit` run.
    """
    return bool(exiting)


cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from "gil_wait.hpp" namespace "bfc" nogil:
    bint is_finalizing()

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept, void (*parent)() noexcept, void (*child)() noexcept)

cdef enum:
    POLL_MICROSECONDS = 50
    POLL_MICROSECONDS_AT_MOST = 1000
    MOST_FUNCTIONS = 4          # C functions to call in a child

cdef uint64_t forks = 0
cdef unsigned long forker = 0

cdef InChild[MOST_FUNCTIONS] functions_of_c
cdef int registered = 0
cdef list functions_of_python = []


cdef void note_fork() noexcept nogil:
    """Called by the C library in a child process, before any of Python's fork hooks, which may allocate."""
    global forks, forker
    cdef int i
    forks += 1
    forker = PyThread_get_thread_ident()
    for i in range(registered):
        functions_of_c[i]()


def _run_in_child():
    for function in functions_of_python:
        function()


pthread_atfork(NULL, NULL, note_fork)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_run_in_child)


cdef int call_in_child(InChild function) except -1:
    """Registers a function that every forked child calls before any Python runs in it, in the order of registration."""
    global registered
    if registered == MOST_FUNCTIONS:
        raise RuntimeError("too many functions to call at a fork: raise MOST_FUNCTIONS")
    functions_of_c[registered] = function
    registered += 1
    return 0


cdef int call_python_in_child(object function) except -1:
    """Registers a Python function, which the interpreter calls in the child as a hook of `os.register_at_fork`."""
    functions_of_python.append(function)
    return 0


cdef uint64_t era() noexcept:
    """A number that changes when all threads but one end: in a forked child, and when the interpreter shuts down."""
    return 2 * forks + is_finalizing()


cdef unsigned long survivor() noexcept:
    """The thread that was left when the era last changed; 0 if it has never changed."""
    return PyThread_get_thread_ident() if is_finalizing() else forker


cdef class ForkSafeLock:
    """A re-entrant lock for sections that run Python. It counts as free if the thread that held it is dead: of the
    parent's threads only the one that forked lives in the child, and only one thread outlives the interpreter's end.

    The data that it guards must be valid after each step of a section, since the child may find the work half done.

    >>> from bfc.interpreter._process import ForkSafeLock
    >>> lock = ForkSafeLock()
    >>> with lock, lock:
    ...     pass
    """

    def __enter__(self):
        cdef unsigned int pause = POLL_MICROSECONDS
        while not self.take():
            with nogil:
                usleep(pause)
            pause = min(2 * pause, <unsigned int>POLL_MICROSECONDS_AT_MOST)
        return self

    cdef bint take(self) noexcept:
        """Takes the lock if it is free. The GIL makes this atomic."""
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef uint64_t now = era()
        if self.era != now:
            self.era = now
            self.depth = 0
        if self.depth and self.holder != me:
            return False
        self.holder = me
        self.depth += 1
        return True

    def __exit__(self, kind, error, traceback):     # *exc_info would need memory for a tuple
        if self.depth and self.holder == PyThread_get_thread_ident() and self.era == era():
            self.depth -= 1     # otherwise a fork inside the section has released it already
