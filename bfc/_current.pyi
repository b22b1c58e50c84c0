from bfc.streams import StreamLike

def current_stream() -> StreamLike | None:
    """What `use_stream` was given last in this thread, or None."""

class use_stream:
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

    def __init__(self, stream: StreamLike) -> None: ...
    def __enter__(self) -> use_stream: ...
    def __exit__(self, *exc_info: object) -> None: ...
