"""What a view is: items in some memory, with a dtype, a shape and strides."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from bfc.buffers._arguments import array_address
from bfc.buffers._buffer import Buffer
from bfc.copying.layout import expanded_strides, is_packed, span

HOST = ("cpu", "cuda_host")
CUDA = ("cuda", "cuda_managed")


@dataclass(slots=True, eq=False)
class View:
    """Items in some memory: `address` is where the first one lies, or in OpenCL buffers its offset
    in `memory`. Strides are in bytes."""

    kind: str  # "cpu", "cuda_host", "cuda", "cuda_managed" or "opencl"
    ordinal: int
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    readonly: bool = False
    array: np.ndarray[Any, Any] | None = None  # the host's memory as an array
    memory: Any = None  # the pyopencl.Buffer; None for shared virtual memory
    context: Any = None  # the pyopencl.Context
    stream: Any = None  # work queued on it comes first: a handle, for OpenCL a queue
    buffer: Buffer | None = None  # its allocator must learn which streams use it
    events: Any = None  # the pyopencl.Array that keeps a list of events
    owner: Any = None  # kept until the copy is done
    #: What keeps a `bfc.Buffer` from being freed meanwhile. Views made from this one share it. At
    #: the end it is cleared: a debugger or a profiler may keep the frames of the copy.
    held: list[object] = field(default_factory=list)

    @property
    def items(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.items * self.dtype.itemsize

    @property
    def on_host(self) -> bool:
        return self.kind in HOST

    @property
    def place(self) -> tuple[object, ...]:
        """Equal for two views if equal addresses in them mean the same memory."""
        if self.on_host or self.kind in CUDA:
            return ("unified",)
        return ("opencl", self.memory.int_ptr if self.memory is not None else None)

    @property
    def is_packed(self) -> bool:
        return is_packed(self.shape, self.strides, self.dtype.itemsize)

    def is_same(self, other: View) -> bool:
        """Whether both show the same items of the same memory."""
        return (
            self.address == other.address
            and self.shape == other.shape
            and self.strides == other.strides
            and self.dtype == other.dtype
            and self.place == other.place
        )

    def overlaps(self, other: View) -> bool:
        """Whether the ranges of memory that both reach have a byte in common."""
        if self.place != other.place:
            return False
        low, high = span(self.shape, self.strides, self.dtype.itemsize)
        first, last = span(other.shape, other.strides, other.dtype.itemsize)
        return self.address + low < other.address + last and other.address + first < (
            self.address + high
        )

    def expanded(self, shape: tuple[int, ...]) -> View:
        """This view, broadcast to a shape. Raises ValueError."""
        if shape == self.shape:
            return self
        strides = expanded_strides(self.shape, self.strides, shape)
        array = self.array
        if array is not None:
            array = array.reshape(array.shape[max(array.ndim - len(shape), 0) :])
            array = np.broadcast_to(array, shape)
        return replace(self, shape=shape, strides=strides, array=array)


def of_array(array: np.ndarray[Any, Any], owner: Any = None) -> View:
    """The host's memory under an array."""
    return View(
        "cpu",
        0,
        array_address(array),
        array.dtype,
        array.shape,
        array.strides,
        not array.flags.writeable,
        array=array,
        owner=owner,
    )


def with_array(view: View) -> View:
    """Gives a view of the host's memory the array that lies at its address."""
    low, high = span(view.shape, view.strides, view.dtype.itemsize)
    nbytes, first = (high - low, -low) if view.items else (0, 0)
    memory: Any = (ctypes.c_char * nbytes).from_address(view.address + low)
    view.array = np.ndarray(view.shape, view.dtype, memory, first, view.strides)
    view.array.flags.writeable = not view.readonly
    return view
