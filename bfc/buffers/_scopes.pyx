"""The stream that `with bfc.use_stream(stream):` sets, and the owner that `with bfc.owner(name):` sets.

The innermost scope of an owner is the value of a context variable, so each thread and each asyncio task has its own.
Python caches the last value that was looked up in a thread, and drops it when the context changes: a look-up from C
costs 3 ns, or 7 in a context without a scope. A cache of our own would be wrong, since nothing tells us of such a
change.

Names have numbers, the same in every allocator of the process. A number is never used for another name.
"""

import operator
import warnings
from contextvars import ContextVar

cimport cython
from cpython.object cimport PyObject
from cpython.ref cimport Py_DECREF
from libc.stdint cimport uint32_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.atomic cimport atomic

from bfc.native.turns cimport TurnAt, counted, put, take_turns
from bfc.interpreter._process cimport exiting

from bfc.interpreter.stubs import SignatureOfStub
from bfc.streams import stream_handle

_stream = ContextVar("bfc.stream", default=None)


cpdef object current_stream():
    """The stream of the innermost `use_stream` of this thread or task.

    Returns
    -------
    int, stream object or None
        As it was given; None outside of every `use_stream`.
    """
    return _stream.get()


cdef class use_stream:
    """A context manager that sets the stream of allocations and copies that name no stream.

    It applies to this thread, and to this asyncio task. It can be nested.

    Parameters
    ----------
    stream : int or stream object
        A CUDA stream handle (0 is the default stream), an object with `__cuda_stream__`, or a
        `pyopencl.CommandQueue`. A copy of memory that cannot be on this stream ignores it.

    Raises
    ------
    TypeError
        If `stream` is not a stream.
    ValueError
        If a handle is negative or above 2**64 - 1.
    RuntimeError
        If it is left without having been entered.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> with bfc.use_stream(7):
    ...     buffer = allocator.allocate(1000)
    >>> buffer.stream
    7
    """

    __signature__ = SignatureOfStub()

    cdef object stream
    cdef list tokens        # one for each time that it was entered and not yet left

    def __cinit__(self, *args, **kwargs):
        self.tokens = []

    def __init__(self, stream):
        stream_handle(stream)
        self.stream = stream

    def __enter__(self):
        self.tokens.append(_stream.set(self.stream))
        # A count for the process, so that an allocation outside of all scopes reads one word and no variable.
        scopes_open.fetch_add(1)
        return self

    def __exit__(self, *exc_info):
        for token in reversed(self.tokens):
            try:
                _stream.reset(token)
            except ValueError:
                continue    # another thread, or another task, has entered it too
            self.tokens.remove(token)
            scopes_open.fetch_sub(1)
            return
        raise RuntimeError("this use_stream was not entered here: write `with bfc.use_stream(stream):`")


cdef extern from "Python.h":
    int PyContextVar_Get(object var, PyObject* default, PyObject** value) except -1
    object PyContextVar_Set(object var, object value)
    int PyContextVar_Reset(object var, object token) except -1

    ctypedef struct PyThreadState:
        PyObject* context           # the current context. Only the thread itself changes it
        uint64_t context_ver        # rises when the context is left, or changed
        uint64_t id
    PyThreadState* PyThreadState_Get()
    PyThreadState* PyGILState_GetThisThreadState() noexcept nogil

cdef extern from "owner_scopes.hpp" namespace "bfc" nogil:
    cdef struct OpenScope:
        const void* context
        const void* scope
        const void* only
        uint64_t tag
        uint32_t owner
    cdef cppclass OpenScopes:
        OpenScopes() except +
        cbool add(const OpenScope& scope)
        void remove(const void* scope)
        uint32_t owner_in(const void* context, const void* allocator)
        uint64_t tag_in(const void* context, const void* allocator)

cdef extern from *:
    """
    /* What Python has said last about tags in this thread. It holds as long as the thread's context is the same, since
     * who inherits a scope is in another context. A tag holds only as long as no scope is left. */
    struct bfc_seen_tag { const void* allocator; uint64_t thread, version, left, tag; uint32_t owner; };
    static thread_local bfc_seen_tag bfc_tag_seen;
    """
    ctypedef struct SeenTag "bfc_seen_tag":
        const void* allocator
        uint64_t thread
        uint64_t version
        uint64_t left
        uint64_t tag
        uint32_t owner
    SeenTag seen "bfc_tag_seen"

cdef enum:
    MOST_OWNERS = 0xFFFF        # numbers: they have 16 bits in a chunk, and in a trace
    MARKS_OF_POOLS = 7          # of them say in a history what becomes of private pools: see `note_of_pool`

_MAX_STEP = 2**63 - 1

#: The name of the last number, which is shared by all names for which no number was left.
_MORE_OWNERS = "(more owners)"

_scope = ContextVar("bfc.owner")

#: By number. It only grows, so the name of an older number can be read at any time.
cdef list owner_names = [""]
cdef object naming = object()           # a turn at it is needed to add a name
cdef dict numbers = {}
cdef object no_allocator = object()
cdef OpenScopes* open_scopes = NULL     # NULL: no thread allocates without the GIL
cdef atomic[uint64_t] scopes_left       # counts scopes that were left
_ranges = (None, None)                  # functions that begin and end a range in a profiler


cdef uint32_t number_of_owner(object name) except 0:
    """The number of a name, a new one if need be."""
    if not isinstance(name, str):
        raise TypeError(f"an owner is a str, not {type(name).__name__}")
    found = numbers.get(name)
    if found is not None:
        return found
    cdef TurnAt turn
    turn.take(naming)
    # Asked again in the turn: another thread may have named it since.
    found = numbers.get(name)
    if found is not None:
        return found
    if not name:
        raise ValueError("an owner needs a name")
    if len(owner_names) >= MOST_OWNERS:
        named = MOST_OWNERS - 1 - MARKS_OF_POOLS
        warnings.warn(f"this process has named {named} owners already: {name!r} and all further ones count as "
                      f"{_MORE_OWNERS!r}. Use names that repeat, such as 'kv cache', not one for each request",
                      RuntimeWarning, stacklevel=2)
        name = _MORE_OWNERS
        found = numbers.get(name)
        if found is not None:
            return found
    # The name before its number: who has the number finds the name.
    owner_names.append(str(name))
    return numbers.setdefault(owner_names[len(owner_names) - 1], len(owner_names) - 1)


cdef object name_of_owner(uint32_t number):
    return owner_names[number]


# In a garbage cycle the context is cleared first, but its address must stay taken until this object is gone.
@cython.final
@cython.no_gc_clear
cdef class Scope:
    """The value of the context variable: an owner, and the scope around it."""

    def __dealloc__(self):
        self.close()

    cdef int open(self) except -1:
        """Lets threads without the GIL find this scope, which has just become the innermost one."""
        cdef PyObject* context = PyThreadState_Get().context
        cdef OpenScope made
        # No thread asks without the GIL until something serves such threads, and a table would cost every scope.
        if counted(open_scopes) == NULL or context == NULL:
            return 0
        made.context, made.scope, made.tag, made.owner = context, <void*>self, self.tag, self.number
        made.only = NULL
        if self.only is not None:
            made.only = <void*>self.only
        if not open_scopes.add(made):
            raise MemoryError
        self.context = <object>context
        self.is_open = True
        return 0

    cdef void close(self) noexcept:
        if self.is_open:
            open_scopes.remove(<void*>self)
            self.is_open = False

    cdef int stop(self) except -1:
        """From now on it applies to nothing, not even in tasks that were started within it."""
        self.only = no_allocator
        scopes_left.fetch_add(1)
        return 0


@cython.final
cdef class Entered:
    """One time that a scope was entered."""


cdef Entered enter(uint32_t number, object only, object step=None, uint64_t tag=NOT_A_TAG):
    """Sets the owner, and the step, of all allocations from now on, or of those from the allocator `only`."""
    cdef Entered entered = Entered.__new__(Entered)
    cdef Scope scope = Scope.__new__(Scope)
    scope.number = number
    scope.only = only
    scope.step = step
    scope.tag = tag
    scope.outer = innermost()
    entered.scope = scope
    try:
        entered.token = PyContextVar_Set(_scope, scope)
    except BaseException:
        scope.stop()    # it may be the value already: CPython 3.11 sets it before it needs memory for the token
        raise
    owners_used.store(1)
    try:
        scope.open()
    except BaseException:
        leave(entered)
        raise
    return entered


cdef bint leave(Entered entered) except -1:
    """Undoes `enter`. False: the scope was not entered in this thread, or in this task."""
    try:
        PyContextVar_Reset(_scope, entered.token)
    except ValueError:
        return False
    except MemoryError:
        entered.scope.stop()    # it stays the value, but the scope around it applies
    entered.scope.close()
    return True


cdef int follow_scopes() except -1:
    """From now on threads without the GIL look up the owner: see `owner_without_gil`."""
    cdef Scope scope = innermost()
    cdef list entered = []
    cdef TurnAt turn
    turn.take(naming)
    if open_scopes != NULL:
        return 0
    while scope is not None:
        entered.append(scope)
        scope = scope.outer
    put(open_scopes, new OpenScopes())      # for as long as the process lives
    for scope in reversed(entered):
        scope.open()
    return 0


cdef uint32_t owner_without_gil(const void* allocator) noexcept nogil:
    """The number of the owner in a thread that has released the GIL: that of the innermost scope that was entered in
    its current context. NO_OWNER if there is none, even if the context has inherited one."""
    cdef PyThreadState* thread
    if counted(open_scopes) == NULL or counted(exiting):
        return NO_OWNER
    thread = PyGILState_GetThisThreadState()
    return open_scopes.owner_in(thread.context, allocator) if thread != NULL and thread.context != NULL else NO_OWNER


cdef cbool tag_without_gil(const void* allocator, uint64_t* tag, uint32_t* owner) noexcept nogil:
    """The tag and the owner of what an allocator allocates in a thread that has released the GIL; the tag stays as it
    is in a thread that is in no scope at all. False: no scope of a tag was entered in its context, which may have
    inherited one, and Python was not asked yet."""
    cdef PyThreadState* thread
    owner[0] = NO_OWNER
    if counted(open_scopes) == NULL or counted(exiting):
        return False
    thread = PyGILState_GetThisThreadState()
    if thread == NULL or thread.context == NULL:
        return True
    owner[0] = open_scopes.owner_in(thread.context, allocator)
    tag[0] = open_scopes.tag_in(thread.context, allocator)
    if tag[0] != NOT_A_TAG:
        return True
    if (seen.allocator != allocator or seen.thread != thread.id or seen.version != thread.context_ver
            or (seen.tag != 0 and seen.left != scopes_left.load())):
        return False
    tag[0] = seen.tag
    if seen.tag:
        owner[0] = seen.owner
    return True


cdef void note_tag_here(const void* allocator, uint64_t tag, uint32_t owner) noexcept:
    """Remembers the tag and the owner of what an allocator allocates in this thread, for `tag_without_gil`."""
    cdef PyThreadState* thread = PyThreadState_Get()
    seen.allocator = allocator
    seen.thread = thread.id
    seen.version = thread.context_ver
    seen.left = scopes_left.load()
    seen.tag = tag
    seen.owner = owner


def set_ranges(begin, end):
    """From now on `begin(name)` is called where an `owner` is entered, and `end` with its answer where it is left.
    None and None: nothing is called."""
    global _ranges
    _ranges = begin, end


cdef Scope innermost():
    """The scope that this call is in, or None."""
    cdef PyObject* value = NULL
    PyContextVar_Get(_scope, NULL, &value)
    if value == NULL:
        return None
    found = <object>value
    Py_DECREF(found)
    return <Scope>found if type(found) is Scope else None


cdef uint32_t owner_here(object allocator) except? 0xFFFFFFFF:
    """The number of the owner of what an allocator allocates in this call, or NO_OWNER."""
    cdef Scope scope = innermost()
    while scope is not None:
        if scope.only is None or scope.only is allocator:
            return scope.number
        scope = scope.outer
    return NO_OWNER


cdef object step_here(object allocator):
    """The step of what an allocator allocates in this call, or None."""
    cdef Scope scope = innermost()
    while scope is not None:
        if scope.step is not None and (scope.only is None or scope.only is allocator):
            return scope.step
        scope = scope.outer
    return None


cdef object checked_step(object step):
    number = operator.index(step)
    if not 0 <= number <= _MAX_STEP:
        raise ValueError(f"a step is a number from 0 to 2**63 - 1, not {number}")
    return number


cdef class owner:
    """A context manager that says whose memory is allocated within it.

    `Stats.by_owner` has the bytes in use of each owner. Snapshots, histories, `leaks()` and the
    text of an `OutOfMemoryError` name them. It can be nested; the innermost one wins.

    Parameters
    ----------
    name : str
        Any name, such as "weights" or "kv cache". The same name is the same owner everywhere.
    step : int, optional
        The number of the training step, or of whatever else the program counts. Without one, that of
        the scope around it holds. `ChunkInfo` and `HistoryEntry` have it for what is allocated while
        `record_history` keeps frames.

    Attributes
    ----------
    name : str
        As given.
    step : int or None
        As given.

    Raises
    ------
    TypeError
        If `name` is not a str, or `step` is not an int.
    ValueError
        If `name` is empty, or `step` is negative or above 2**63 - 1.
    RuntimeError
        If it is left without having been entered, or in another thread or asyncio task.

    Notes
    -----
    It holds in this thread and in this asyncio task, for every allocator. A task that is started
    within it inherits it, and keeps it after the `with` block has ended; so does
    `asyncio.to_thread`. Other threads do not inherit it.

    The owner of an allocation does not change. Its bytes count until the memory can be reused: if
    it waits for a stream, until that has finished.

    Tensors that PyTorch allocates through bfc (`bfc.use`) have the owner of a `with` block that was
    entered in the same thread, or in the same task, after `bfc.use`: PyTorch allocates without the
    GIL, where an inherited owner cannot be seen. Autograd's own threads have none.

    A process can name 65,527 owners. Further names share one owner, "(more owners)", and a
    RuntimeWarning says so.

    Cost: about 5 ns for each allocation within, and 0.3 us for the `with` statement.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> with bfc.owner("kv cache"):
    ...     cache = allocator.allocate("3 MiB")
    >>> rest = allocator.allocate("1 MiB")
    >>> allocator.stats().by_owner
    {'kv cache': 3145728, '': 1048576}
    """

    __signature__ = SignatureOfStub()

    cdef readonly str name
    cdef readonly object step
    cdef uint32_t number
    cdef list entered   # [Entered, how its range ends, and with what], for each time that it was entered and not left

    def __cinit__(self, *args, **kwargs):
        self.entered = []

    def __init__(self, name, *, step=None):
        self.step = None if step is None else checked_step(step)
        self.number = number_of_owner(name)
        self.name = str(name)

    def __enter__(self):
        cdef Entered entered
        if self.number == NO_OWNER:
            raise RuntimeError("this owner was never set up: its __init__ did not run, or failed")
        begin, end = _ranges
        cdef list item = [None, end, None]
        self.entered.append(item)       # before the variable is set, since this may fail for lack of host memory
        try:
            item[2] = begin(self.name) if begin is not None else None
            entered = enter(self.number, None, self.step)
        except BaseException:
            self.entered.remove(item)
            raise
        item[0] = entered
        return self

    def __exit__(self, kind=None, error=None, traceback=None):     # *exc_info would need memory for a tuple
        cdef list item
        cdef Py_ssize_t i
        for i in range(len(self.entered) - 1, -1, -1):
            item = self.entered[i]
            if item[0] is not None and leave(item[0]):
                del self.entered[i]
                if item[1] is not None:
                    item[1](item[2])
                return
        raise RuntimeError("this owner was not entered here: write `with bfc.owner(name):`")

    def __repr__(self):
        return f"bfc.owner({self.name!r})" if self.step is None else f"bfc.owner({self.name!r}, step={self.step})"


for _shared in (use_stream, owner):    # several threads may enter the same one
    take_turns(_shared, b"")
