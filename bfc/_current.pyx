"""The stream that a program has chosen for a while: `with bfc.use_stream(stream):`."""

from contextvars import ContextVar

from bfc._stubs import SignatureOfStub
from bfc.streams import stream_handle

_stream = ContextVar("bfc.stream", default=None)

cdef int scopes_open = 0


cpdef object current_stream():
    """What `use_stream` was given last in this thread, or None."""
    return _stream.get()


cdef class use_stream:
    """Within it, allocations and copies that name no stream are for this one: of this thread, and of this task of
    asyncio. A copy of memory that cannot be on it goes as without.

    `stream` is an int (a CUDA stream handle, 0 the default stream), has `__cuda_stream__`, or is a
    `pyopencl.CommandQueue`. Scopes nest. Raises TypeError or ValueError for what is no stream, RuntimeError where one
    is left that was not entered.

    >>> import bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> with bfc.use_stream(7):
    ...     buffer = allocator.allocate(1000)
    >>> buffer.stream
    7
    """

    __signature__ = SignatureOfStub()

    cdef object stream
    cdef list tokens        # one for each time that it was entered and not left

    def __cinit__(self, *args, **kwargs):
        self.tokens = []

    def __init__(self, stream):
        stream_handle(stream)
        self.stream = stream

    def __enter__(self):
        global scopes_open
        self.tokens.append(_stream.set(self.stream))
        scopes_open += 1
        return self

    def __exit__(self, *exc_info):
        global scopes_open
        for token in reversed(self.tokens):
            try:
                _stream.reset(token)
            except ValueError:
                continue    # another thread, or another task, has entered it too
            self.tokens.remove(token)
            scopes_open -= 1
            return
        raise RuntimeError("this use_stream was not entered here: write `with bfc.use_stream(stream):`")
