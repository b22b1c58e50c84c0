"""What a user may pass as a stream: an int (a handle of the driver; 0 is the default stream), or an
object that has such a handle."""

from __future__ import annotations

from typing import Protocol, SupportsIndex, runtime_checkable


@runtime_checkable
class SupportsCudaStream(Protocol):
    """An object with cuda.core's `__cuda_stream__` protocol, which returns (version, handle)."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


@runtime_checkable
class SupportsIntPtr(Protocol):
    """An object such as a `pyopencl.CommandQueue`."""

    @property
    def int_ptr(self) -> int:
        """The handle of the queue."""

    def finish(self) -> None:
        """Wait for everything that is queued."""


StreamLike = SupportsIndex | SupportsCudaStream | SupportsIntPtr


def is_queue(stream: object) -> bool:
    """Whether an object is an OpenCL queue, not a CUDA stream: judged by its attributes, since no
    package is imported."""
    return (
        hasattr(stream, "int_ptr")
        and hasattr(stream, "finish")
        and not hasattr(stream, "__cuda_stream__")
    )


def stream_handle(stream: object) -> int:
    """The handle of a stream.

    Parameters
    ----------
    stream : int or stream object
        A handle, an object with `__cuda_stream__`, or a `pyopencl.CommandQueue`.

    Returns
    -------
    int
        From 0 to 2**64 - 1.

    Raises
    ------
    TypeError
        If `stream` is not a stream.
    ValueError
        If the handle is negative or above 2**64 - 1.

    Examples
    --------
    >>> stream_handle(7)
    7
    """
    if type(stream) is not int:
        protocol = getattr(stream, "__cuda_stream__", None)
        if protocol is not None:
            try:
                _version, stream = protocol()
            except (TypeError, ValueError):
                raise TypeError("__cuda_stream__() must return (version, handle)") from None
        elif is_queue(stream):
            stream = stream.int_ptr  # type: ignore[attr-defined]
    index = getattr(stream, "__index__", None)
    if index is None or isinstance(stream, bool):
        raise TypeError(
            f"a stream is an int, a pyopencl.CommandQueue, or has __cuda_stream__, "
            f"not {type(stream).__name__}"
        )
    handle = int(index())
    if not 0 <= handle < 2**64:
        raise ValueError(f"a stream handle lies between 0 and 2**64 - 1, not {handle}")
    return handle
