"""What rules ask of a tensor, which is anything with `shape`, `stride()`, `dtype`,
`element_size()` and `device`: no rule of sizes imports PyTorch, and their tests need none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from bfc_tools.predicting.rules.interface import Call, Workspace


def argument(call: Call, name: str, default: Any = None) -> Any:
    """An argument by its name in the schema, or the default there."""
    if name in call.kwargs:
        return call.kwargs[name]
    for index, one in enumerate(call.func._schema.arguments):
        if one.name == name:
            return call.args[index] if index < len(call.args) else one.default_value
    return default


def operator(call: Call) -> str:
    """The name of the operator: "max"."""
    return str(call.func._schema.name).partition("::")[2]


def numel(tensor: Any) -> int:
    """How many elements a tensor has."""
    return math.prod(tensor.shape)


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape that these have together."""
    longest = max(map(len, shapes))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in shapes]
    return tuple(0 if 0 in sizes else max(sizes) for sizes in zip(*padded, strict=True))


def nbytes(tensor: Any) -> int:
    """The bytes of a contiguous copy of a tensor."""
    return numel(tensor) * int(tensor.element_size())


def type_name(tensor: Any) -> str:
    """The type of the elements: "float16"."""
    return str(tensor.dtype).removeprefix("torch.")


def is_contiguous(tensor: Any) -> bool:
    """Whether the elements lie row by row without gaps."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size != 1 and stride != expected:
            return numel(tensor) == 0
        expected *= size
    return True


def channels_last(tensor: Any) -> bool:
    """Whether the channels of a pixel lie side by side, and those of an image pixel by pixel."""
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if len(shape) not in (4, 5):
        return False
    expected = 1
    for index in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[index] == 1:  # any stride
            continue
        if strides[index] != expected:
            return False
        expected *= shape[index]
    # what is contiguous in both layouts counts as contiguous
    return not is_contiguous(tensor)


def suggests_channels_last(tensor: Any) -> bool:
    """Whether PyTorch takes the strides of a tensor to mean that channels lie side by side.

    From c10/core/MemoryFormat.h (is_channels_last_strides_2d_s4, is_channels_last_strides_3d_s5):
    the strides count where sizes are 1, too. So weights of one pixel, which lie alike in both
    layouts, say which layout they were converted to.
    """
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if len(shape) not in (4, 5) or strides[1] == 0:
        return False
    least = 0
    for index in (1, *range(len(shape) - 1, 1, -1), 0):
        if shape[index] == 0 or strides[index] < least:
            return False
        if index == 0 and least == strides[1]:  # nothing tells the layouts apart
            return False
        least = strides[index] * max(shape[index], 1)
    return True


def on_host(tensor: Any) -> bool:
    """Whether a tensor lies in host memory."""
    return str(tensor.device.type) == "cpu"


def even_parts(whole: int, count: int) -> list[int]:
    """So many parts of a number, the first ones larger by one where it does not divide.

    >>> even_parts(10, 4)
    [3, 3, 2, 2]
    """
    each, more = divmod(whole, count)
    return [each + 1] * more + [each] * (count - more)


def div_up(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


class Made:
    """A tensor that a kernel makes for itself, with the elements of another: contiguous, or a view
    with these strides."""

    def __init__(
        self, like: Any, shape: tuple[int, ...], strides: tuple[int, ...] | None = None
    ) -> None:
        self.shape, self.dtype, self.device = shape, like.dtype, like.device
        self._strides = strides
        self._size = int(like.element_size())

    def stride(self) -> tuple[int, ...]:
        """As given, or row by row."""
        if self._strides is not None:
            return self._strides
        return tuple(math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape)))

    def element_size(self) -> int:
        """The bytes of an element."""
        return self._size


def contiguous_copy(tensor: Any, what: str) -> list[Workspace]:
    """The copy that a kernel makes of a tensor that is not contiguous."""
    return [] if is_contiguous(tensor) else [Workspace(nbytes(tensor), what=what)]
