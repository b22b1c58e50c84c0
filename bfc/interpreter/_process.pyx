"""Whether the interpreter is about to exit, what happens in a forked child, and locks that survive threads which end in
the middle of a section: by a fork, or when the interpreter shuts down. And signal handlers, which are deferred while a
sub-allocator runs.

Allocators, drivers and pools share one exit hook, which stands here. Code that must run in a forked child registers a
function here. One hook of the C library calls the C functions, and later one hook of Python's calls the Python
functions. Only the locks of allocators have a hook of their own (lock.hpp): they are taken before the fork, after all
of Python's before-fork hooks, and released in the parent too. So has the list of what has turns, where there is no GIL
(turns.hpp).
"""

import _signal
import atexit
import os
import sys

from cpython.ref cimport Py_DECREF, Py_INCREF
from libcpp cimport bool as cbool
from libcpp.atomic cimport atomic, memory_order, memory_order_seq_cst
from posix.signal cimport sigaction, sigaction_t
from posix.unistd cimport usleep

from bfc.native.turns cimport TurnAt, counted, put

cdef extern from "<atomic>" namespace "std" nogil:
    void atomic_thread_fence(memory_order order)

cdef extern from *:
    """
    #ifdef __clang__
    #define BFC_COMPILER "clang " __clang_version__
    #else
    #define BFC_COMPILER "gcc " __VERSION__
    #endif
    """
    const char* BFC_COMPILER
    const int CYTHON_HEX_VERSION    # a byte for each number: 0x030301F0 is 3.3.1

cdef enum:
    MICROSECONDS_AT_THE_END = 2_000_000

built_with = (f"{BFC_COMPILER.decode()} from Cython {CYTHON_HEX_VERSION >> 24}."
              f"{CYTHON_HEX_VERSION >> 16 & 255}.{CYTHON_HEX_VERSION >> 8 & 255}")
exiting = False
cdef atomic[int] entering       # threads between `start_entering` and `has_entered`


@atexit.register
def _note_the_exit():
    """Waits, for about two seconds at most, until the threads that are about to take the GIL have it. One that asks for
    it after Python is gone crashes."""
    cdef int passed = 0
    put(exiting, <bint>True)
    atomic_thread_fence(memory_order_seq_cst)
    with nogil:
        # Not for ever: such a thread may itself wait for something.
        while entering.load() and passed < MICROSECONDS_AT_THE_END:
            usleep(POLL_MICROSECONDS_AT_MOST)
            passed += POLL_MICROSECONDS_AT_MOST


cdef cbool start_entering() noexcept nogil:
    """Called by a thread before it asks for the GIL. False once the exit has begun, and then it must not ask for it,
    unless it has the GIL. Otherwise it calls `has_entered` as soon as it has the GIL."""
    entering.fetch_add(1)
    atomic_thread_fence(memory_order_seq_cst)       # either this sees `exiting`, or the exit sees this thread
    if (counted(exiting) or is_finalizing()) and not holds_gil():
        has_entered()
        return False
    return True


cdef void has_entered() noexcept nogil:
    entering.fetch_sub(1)


def is_exiting():
    """Whether Python's exit has begun. Finalisers then free nothing: the driver, or half of Python, may be gone.

    Returns
    -------
    bool
        False until the functions that are registered with `atexit` run.
    """
    return bool(counted(exiting))


cdef extern from "Python.h":
    int METH_O
    ctypedef object (*OneArgument "PyCFunction")(PyObject* module, object argument)
    int PyCFunction_GetFlags(object function) except -1
    OneArgument PyCFunction_GetFunction(object function) except NULL
    PyObject* PyCFunction_GetSelf(object function) except? NULL
    int PyCallable_Check(object found)
    void PyErr_SetObject(object type, object error)
    void PyErr_WriteUnraisable(object doing)
    int PyErr_SetInterruptEx(int number) nogil
    int Py_AddPendingCall(int (*call)(void*) except -1, void* argument)
    int Py_MakePendingCalls() except -1
    unsigned long PyThread_get_thread_ident() nogil

cdef extern from "gil_wait.hpp" namespace "bfc" nogil:
    bint holds_gil()

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
    entering.store(0)       # those threads are the parent's
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


cdef uint64_t era() noexcept nogil:
    """A number that changes when all threads but one end: in a forked child, and when the interpreter shuts down."""
    return 2 * forks + is_finalizing()


cdef unsigned long survivor() noexcept nogil:
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
            # Polled, since a lock of the C library's that a dead thread holds could never be taken again in a child.
            pause = min(2 * pause, <unsigned int>POLL_MICROSECONDS_AT_MOST)
        return self

    cdef bint take(self) noexcept:
        """Takes the lock if it is free. The GIL makes this atomic, or else the turn at it."""
        cdef TurnAt turn
        turn.take(self)
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
        cdef TurnAt turn
        turn.take(self)
        if self.depth and self.holder == PyThread_get_thread_ident() and self.era == era():
            self.depth -= 1     # otherwise a fork inside the section has released it already


# -- signals ----------------------------------------------------------------------------------------------------------
#
# An exception in a sub-allocator could lose memory that only it knows. Whichever thread the system delivers a signal
# to, Python runs its handler in the main thread, between any two lines. So a signal mask cannot keep a Ctrl-C out of a
# sub-allocator. Instead, `put_off` replaces the handlers during the call. Signals that came meanwhile are given to the
# interpreter as pending calls, after the handlers are restored.

cdef extern from *:
    """
    extern "C" int _PyOS_IsMainThread(void);
    """
    int _PyOS_IsMainThread()

cdef enum:
    ATTEMPTS = 100      # at replacing a handler, while pending handlers raise

cdef int last_signal = min(SIGNALS, _signal.NSIG - 1)
cdef object get_handler = _signal.getsignal
cdef object replace_handler = _signal.signal
cdef list numbers = list(range(SIGNALS + 1))

# `defer_handlers` asks for every signal's handler: called like this, that takes a fifth of the time.
if PyCFunction_GetFlags(get_handler) != METH_O:
    raise ImportError("in this Python signal.getsignal is no C function of one argument")
cdef OneArgument get_handler_of = PyCFunction_GetFunction(get_handler)
cdef PyObject* signal_module = PyCFunction_GetSelf(get_handler)

cdef int depth = 0                          # nested calls of sub-allocators in the main thread
cdef unsigned long main_thread = 0          # valid while depth > 0
cdef bint came[SIGNALS + 1]                 # by signal number
cdef list replaced = [None] * (SIGNALS + 1)     # the handler that was replaced last, by signal number


def put_off(number, frame):
    """The handler of every signal while a sub-allocator is called: the real one runs after the call has returned."""
    if depth:
        came[<int>number] = True
    elif replaced[number] is not None:      # somebody read this as the handler, and calls it
        return replaced[number](number, frame)


cdef int handle(void* number) except -1:
    """A pending call: the interpreter makes it in the main thread, with the GIL, between two lines of Python."""
    handler = get_handler(<size_t>number)
    if not PyCallable_Check(handler):
        return 0
    try:
        frame = sys._getframe()
    except ValueError:      # C code called it, with no Python frame below
        frame = None
    handler(<size_t>number, frame)
    return 0


cdef int raise_now(void* error) except -1:
    """A pending call: raises the error."""
    raised = <object>error
    Py_DECREF(raised)
    raise raised


cdef cbool raise_later(object error) noexcept:
    """Lets the main thread raise an error as soon as Python code runs there. False in another thread."""
    if not _PyOS_IsMainThread():
        return False
    Py_INCREF(error)
    if Py_AddPendingCall(raise_now, <void*>error) == 0:
        return True
    Py_DECREF(error)
    return False


cdef cbool set_handler(int number, object handler) noexcept:
    """Sets a handler as `signal.signal` does, but keeps the C handler of a library that has replaced Python's.

    `signal.signal` first runs the handlers of pending signals. Their exceptions must not stop this function.
    """
    cdef sigaction_t installed
    cdef int _attempt
    for _attempt in range(ATTEMPTS):
        sigaction(number, NULL, &installed)
        try:
            replace_handler(number, handler)
        except BaseException as error:
            if not raise_later(error):
                PyErr_SetObject(type(error), error)
                PyErr_WriteUnraisable(handler)
            continue
        sigaction(number, &installed, NULL)
        return True
    return False


cdef void defer_handlers(Deferral* deferral) noexcept:
    """Defers all Python handlers until `resume_handlers`. In threads other than the main one it does nothing.

    Cost: a few microseconds, to look at the handler of every signal.
    """
    global depth, main_thread
    cdef int number
    deferral.put_aside = 0
    deferral.in_main_thread = _PyOS_IsMainThread() != 0
    if not deferral.in_main_thread:
        return
    depth += 1
    main_thread = PyThread_get_thread_ident()
    for number in range(1, last_signal + 1):
        handler = get_handler_of(signal_module, numbers[number])
        # SIG_DFL and SIG_IGN run no Python, and a handler that C code has installed reads as None.
        if isinstance(handler, int) or not PyCallable_Check(handler) or handler is put_off:
            continue
        replaced[number] = handler
        if set_handler(number, put_off):
            Py_INCREF(handler)
            deferral.handlers[number - 1] = <PyObject*>handler
            deferral.put_aside |= <uint64_t>1 << (number - 1)


cdef void resume_handlers(Deferral* deferral) noexcept:
    """Puts the handlers back, except those that were replaced meanwhile. Handlers of signals that came meanwhile run as
    soon as Python code runs, or in `run_handlers`."""
    global depth
    cdef int number
    if not deferral.in_main_thread:
        return
    for number in range(1, last_signal + 1):
        if deferral.put_aside >> (number - 1) & 1:
            handler = <object>deferral.handlers[number - 1]
            if get_handler(number) is put_off:
                set_handler(number, handler)
            Py_DECREF(handler)
    depth -= 1
    for number in range(1, last_signal + 1):
        if came[number] and (depth == 0 or deferral.put_aside >> (number - 1) & 1):
            came[number] = False
            # If possible the signal is not raised again: an event loop with a wakeup fd was told of it already.
            if Py_AddPendingCall(handle, <void*><size_t>number) != 0:
                PyErr_SetInterruptEx(number)


cdef int run_handlers() except -1:
    """Runs this thread's pending calls, as Python does between two lines, and passes on their exceptions."""
    return Py_MakePendingCalls()


def _after_fork_in_child():
    """In a forked child, forgets the parent's signals, and calls under way in threads that do not exist here."""
    global depth
    cdef int number
    for number in range(1, last_signal + 1):
        came[number] = False
    if depth == 0 or main_thread == PyThread_get_thread_ident():
        return
    depth = 0
    for number in range(1, last_signal + 1):
        if get_handler(number) is put_off:
            set_handler(number, replaced[number])


call_python_in_child(_after_fork_in_child)
