"""What a user may pass as a stream: an int (a handle of the driver's, 0 the default), or an object
that knows its own."""

from __future__ import annotations

from typing import Protocol, SupportsIndex, runtime_checkable


@runtime_checkable
class SupportsCudaStream(Protocol):
    """The `__cuda_stream__` protocol of cuda.core: returns (version, handle)."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


@runtime_checkable
class SupportsIntPtr(Protocol):
    """What a `pyopencl.CommandQueue` has."""

    @property
    def int_ptr(self) -> int: ...

    def finish(self) -> None: ...


StreamLike = SupportsIndex | SupportsCudaStream | SupportsIntPtr


def is_queue(stream: object) -> bool:
    """Whether it is a queue of OpenCL's, and no stream of CUDA's.

    >>> is_queue(7)
    False
    """
    return hasattr(stream, "int_ptr") and not hasattr(stream, "__cuda_stream__")


def stream_handle(stream: object) -> int:
    """The handle of a stream as an int between 0 and 2**64 - 1.

    >>> stream_handle(7)
    7
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        try:
            _version, stream = protocol()
        except (TypeError, ValueError):
            raise TypeError("__cuda_stream__() must return (version, handle)") from None
    elif hasattr(stream, "int_ptr") and hasattr(stream, "finish"):
        stream = stream.int_ptr
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
