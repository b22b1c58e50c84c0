"""pyopencl arrays in a bfc pool.

    a = bfc.BFCAllocator(bfc.OpenCLSubAllocator(context), stream=queue)
    allocator = bfc.integrations.pyopencl.allocator(a)
    array = pyopencl.array.to_device(queue, values, allocator=allocator)

The results of arithmetic come from the same pool. `mem(buffer)` is the OpenCL object of a buffer,
for kernels.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.buffers._buffer import Buffer
from bfc.errors import ClosedError
from bfc.integrations._shared import client
from bfc.streams import StreamLike, stream_handle
from bfc.suballocators.opencl import OpenCLSubAllocator

INSTALL = "'bfc-allocator[opencl]'"
#: The buffers under the OpenCL objects that are in use, by those objects' ids.
_held: dict[int, Buffer] = {}


def allocator(pool: Allocator, queue: StreamLike | None = None) -> Callable[[int], Any]:
    """Make what `pyopencl.array` takes as `allocator=`.

    Parameters
    ----------
    pool : Allocator
        Over OpenCL memory.
    queue : pyopencl.CommandQueue, optional
        The queue that the arrays work on. pyopencl does not tell it, so it must be right: what is
        freed may be reused at once on it. None is the pool's own: its `stream`, or the `queue` of
        its sub-allocator. Arrays on a queue that runs its work in any order are wrong unless it is
        named here.

    Returns
    -------
    callable
        It takes a number of bytes and returns a `pyopencl.Buffer`, with SVM a `pyopencl.SVM`, and
        None for 0 bytes. It raises what `Allocator.allocate` does.

    Raises
    ------
    ValueError
        If the pool is over other memory.
    TypeError
        If `pool` is not an allocator.
    ClosedError
        If the pool is closed.
    DeviceUnavailableError
        If pyopencl is missing.

    Notes
    -----
    The block is freed when the last array on it is collected, or by `array.base_data.release()`. If
    the queue runs its work in any order, or is not the pool's own, the memory is reused only after
    a marker that the free puts into that queue. Other queues need
    `pool.record_stream(array.base_data.block, queue)`.

    Cost of an array's memory: `python -m bench.opencl`.
    """
    source = _source_of(pool)
    client("pyopencl", INSTALL)
    if pool.closed:
        raise ClosedError("this allocator is closed")
    stream: StreamLike | None = queue
    if queue is not None and stream_handle(queue) == pool.stream:
        stream = pool.stream  # the same, and an int is read faster
    take, wrap = pool.allocate, _svm_of if source.svm else _buffer_of

    def allocate(nbytes: int) -> Any:
        if nbytes == 0:
            return None
        buffer = take(nbytes, stream)
        return wrap(source, buffer, buffer.ptr, nbytes)

    return allocate


def mem(buffer: Buffer) -> Any:
    """The OpenCL object of a buffer or a view, for kernels and copies.

    Parameters
    ----------
    buffer : Buffer
        A buffer, or a view of one.

    Returns
    -------
    pyopencl.Buffer, pyopencl.SVM or None
        A new object for its bytes; None for 0 bytes. It keeps the buffer from being collected, but
        not from `buffer.free()`: after that others may get the same memory, and whatever is queued
        with this object writes into theirs.

    Raises
    ------
    TypeError
        If `buffer` is not a buffer of an allocator.
    ValueError
        If it is memory of another kind.
    ClosedError
        If the buffer was freed.

    Notes
    -----
    Cost: one driver call.
    """
    pool = getattr(buffer, "allocator", None)
    if not isinstance(pool, Allocator):
        raise TypeError(f"expected a buffer of an allocator, not {type(buffer).__name__}")
    source = _source_of(pool)
    if buffer.freed or pool.closed:
        raise ClosedError("this buffer was freed, or its allocator closed")
    if not buffer.nbytes:
        return None
    wrap = _svm_of if source.svm else _buffer_of
    return wrap(source, buffer, buffer.ptr, buffer.nbytes)


def _source_of(pool: Allocator) -> OpenCLSubAllocator:
    if not isinstance(pool, Allocator):
        raise TypeError(f"expected an allocator, not {type(pool).__name__}")
    source = pool.sub_allocator
    if not isinstance(source, OpenCLSubAllocator):
        raise ValueError(
            f"pyopencl needs memory of an OpenCL device, and this allocator's is on {pool.device}: "
            f"make it over bfc.OpenCLSubAllocator()"
        )
    return source


def _buffer_of(source: OpenCLSubAllocator, buffer: Buffer, address: int, nbytes: int) -> Any:
    memory = source.sub_buffer(address, nbytes)
    _held[id(memory)] = buffer
    memory.__class__ = _pooled_buffer()  # from here on it lets go of the buffer when it dies
    return memory


def _svm_of(source: OpenCLSubAllocator, buffer: Buffer, address: int, nbytes: int) -> Any:
    return _pooled_svm()((ctypes.c_ubyte * nbytes).from_address(address), buffer)


@functools.cache
def _pooled_buffer() -> type:
    base: Any = client("pyopencl", INSTALL).Buffer

    class PooledBuffer(base):  # type: ignore[misc]
        """A sub-buffer of a region, which keeps its block. The driver's objects take no attributes
        and no weak references, but their class may change to one without a layout of its own."""

        __slots__ = ()

        @property
        def block(self) -> Buffer | None:
            """The bfc.Buffer under it; None once it was released."""
            return _held.get(id(self))

        def release(self) -> None:
            """Gives the block back now."""
            super().release()
            _held.pop(id(self), None)

        def __del__(self, let_go: Any = _held.pop) -> None:
            let_go(id(self), None)

    return PooledBuffer


@functools.cache
def _pooled_svm() -> type:
    base: Any = client("pyopencl", INSTALL).SVM

    class PooledSVM(base):  # type: ignore[misc]
        """A range of a region of shared virtual memory, which keeps its block."""

        def __init__(self, memory: Any, block: Buffer) -> None:
            super().__init__(memory)
            self.block: Buffer | None = block

        def release(self) -> None:
            """Gives the block back now."""
            self.block = None

    return PooledSVM
