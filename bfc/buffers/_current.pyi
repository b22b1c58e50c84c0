from bfc.streams import StreamLike

def current_stream() -> StreamLike | None:
    """The stream of the innermost `use_stream` of this thread or task.

    Returns
    -------
    int, stream object or None
        As it was given; None outside of every `use_stream`.
    """

class use_stream:
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

    def __init__(self, stream: StreamLike) -> None: ...
    def __enter__(self) -> use_stream: ...
    def __exit__(self, *exc_info: object) -> None: ...
