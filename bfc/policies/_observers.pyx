"""Functions that a user attaches to an allocator: callbacks that may free memory, and observers of refusals."""

import threading

cimport cython

from bfc.allocators._frees cimport report_unraisable


cdef int attach(list attached, function, str kind) except -1:
    if not callable(function):
        raise TypeError(f"{kind} is a function, not {type(function).__name__}")
    attached.append(function)
    return 0


cdef int detach(list attached, function, str kind) except -1:
    if function not in attached:
        raise ValueError(f"{function!r} is not {kind} of this allocator")
    attached.remove(function)
    return 0


@cython.final
@cython.no_gc_clear
cdef class Observers:
    """Free-memory callbacks and out-of-memory observers. They are called without a lock.

    None is called in a thread that is already running one: that one may itself allocate, and be
    refused.
    """

    def __cinit__(self):
        self.callbacks = []
        self.observers = []
        self.running = threading.local()

    cdef int add_callback(self, callback) except -1:
        attach(self.callbacks, callback, "a free-memory callback")
        self.has_callbacks = True
        return 0

    cdef int remove_callback(self, callback) except -1:
        detach(self.callbacks, callback, "a free-memory callback")
        self.has_callbacks = bool(self.callbacks)
        return 0

    cdef int attach(self, observer) except -1:
        return attach(self.observers, observer, "an out-of-memory observer")

    cdef int detach(self, observer) except -1:
        return detach(self.observers, observer, "an out-of-memory observer")

    cdef bint run_callbacks(self) except -1:
        """Calls the callbacks. Returns whether one of them says that it has freed memory."""
        return self.call_each(self.callbacks, ())

    cdef int tell(self, device, uint64_t asked, uint64_t limit, uint64_t device_free) except -1:
        """Tells the observers of a refusal. What they return is ignored."""
        if self.observers:
            self.call_each(self.observers, (device.ordinal, asked, limit, device_free))
        return 0

    cdef bint call_each(self, list functions, tuple arguments) except -1:
        """Calls each function. Returns whether one returned something true. If one raises, that is reported, and the
        next is called."""
        cdef bint freed = False
        if not functions or getattr(self.running, "here", False):
            return False
        self.running.here = True
        try:
            for function in list(functions):
                try:
                    answer = function(*arguments)
                    freed = (functions is self.callbacks and bool(answer)) or freed
                except Exception as error:
                    report_unraisable(error, function)
        finally:
            self.running.here = False
        return freed
