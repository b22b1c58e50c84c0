"""The stream that `with bfc.use_stream(stream):` sets."""

from contextvars import ContextVar

from bfc.interpreter.stubs import SignatureOfStub
from bfc.streams import stream_handle

_stream = ContextVar("bfc.stream", default=None)

cdef int scopes_open = 0


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
