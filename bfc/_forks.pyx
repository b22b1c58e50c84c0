"""What has to know that the process was forked."""

from posix.unistd cimport usleep

cdef extern from "Python.h":
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from "_wait.hpp" namespace "bfc" nogil:
    bint is_finalizing()

cdef extern from "<pthread.h>" nogil:
    int pthread_atfork(void (*prepare)() noexcept, void (*parent)() noexcept, void (*child)() noexcept)

cdef enum:
    POLL_MICROSECONDS = 50
    POLL_MICROSECONDS_AT_MOST = 1000

cdef uint64_t forks = 0
cdef unsigned long survivor = 0


cdef void count_fork() noexcept nogil:
    """The C library calls it in a child before any hook of Python's runs, which may allocate."""
    global forks, survivor
    forks += 1
    survivor = PyThread_get_thread_ident()


pthread_atfork(NULL, NULL, count_fork)


cdef uint64_t fork_count() noexcept nogil:
    """How many forks lie between this process and the one that imported the package. What a thread has left behind
    under another count than today's, it will not go on with: it does not exist here."""
    return forks


cdef unsigned long thread_that_forked() noexcept nogil:
    """The one thread of the parent that lives in this process; 0 where nothing was forked."""
    return survivor


cdef uint64_t epoch_now() noexcept:
    """Other threads live as long as it stays the same: the end of the interpreter stops all but one, too."""
    return 2 * forks + is_finalizing()


cdef class ForkSafeLock:
    """A re-entrant lock for sections that run Python. One that a dead thread has held is free: of the parent's threads
    only the one that forked lives in the child, and of all only one sees the interpreter's end.

    What it guards must make sense after each step of a section, since the child may find the work half done.

    >>> from bfc._forks import ForkSafeLock
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
        """The GIL makes it one step."""
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef uint64_t now = epoch_now()
        if self.epoch != now:
            self.epoch = now
            self.depth = 0
        if self.depth and self.holder != me:
            return False
        self.holder = me
        self.depth += 1
        return True

    def __exit__(self, *exc_info):
        if self.depth and self.holder == PyThread_get_thread_ident() and self.epoch == epoch_now():
            self.depth -= 1     # else a fork inside the section has freed it already
