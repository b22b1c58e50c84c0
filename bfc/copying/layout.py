"""Computes where the items of a copy lie on its two sides: shapes, and strides and offsets in
bytes. Needs no device and no NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

#: The most dimensions of one launch; a copy with more is launched in pieces.
MAX_DIMS = 6
#: The most items of one launch, so that a kernel can count them in 32 bits.
MAX_ITEMS = 2**31 - 1


class Dim(NamedTuple):
    """A dimension: the number of steps, and the stride in bytes on either side."""

    steps: int
    to: int
    source: int


class Walk(NamedTuple):
    """The items of a copy: dimensions, the outermost first, and the offsets of the first item."""

    dims: tuple[Dim, ...]
    to: int = 0
    source: int = 0

    @property
    def items(self) -> int:
        return math.prod(dim.steps for dim in self.dims)


class Rows(NamedTuple):
    """The arguments of a driver's copies of two and three dimensions, in bytes and rows."""

    width: int
    height: int
    depth: int
    to_pitch: int
    source_pitch: int
    to_slice: int
    source_slice: int


def packed_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The strides of an array that lies row by row without gaps.

    >>> packed_strides((2, 3), 4)
    (12, 4)
    """
    strides, step = [], itemsize
    for count in reversed(shape):
        strides.append(step)
        step *= count or 1
    return tuple(strides[::-1])


def is_packed(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """Whether items lie row by row without gaps. A dimension of one item may have any stride.

    >>> is_packed((2, 1, 3), (12, 99, 4), 4)
    True
    """
    step = itemsize
    for axis in range(len(shape) - 1, -1, -1):
        count = shape[axis]
        if count != 1 and strides[axis] != step:
            return False
        step *= count or 1
    return True


def expanded_strides(
    shape: Sequence[int], strides: Sequence[int], onto: Sequence[int]
) -> tuple[int, ...]:
    """The strides with which a shape is read as a larger one. Raises ValueError if it does not
    broadcast.

    >>> expanded_strides((3, 1), (8, 8), (2, 3, 4))
    (0, 8, 0)
    """
    lead = len(onto) - len(shape)
    if lead < 0:
        # In assignments NumPy drops leading dimensions of length 1.
        if any(count != 1 for count in shape[:-lead]):
            raise _no_broadcast(shape, onto)
        return expanded_strides(shape[-lead:], strides[-lead:], onto)
    result = [0] * lead
    for count, stride, wanted in zip(shape, strides, onto[lead:], strict=True):
        if count not in (1, wanted):
            raise _no_broadcast(shape, onto)
        result.append(stride if count == wanted and count != 1 else 0)
    return tuple(result)


def _no_broadcast(shape: Sequence[int], onto: Sequence[int]) -> ValueError:
    return ValueError(f"shape {tuple(shape)} does not broadcast to the destination's {tuple(onto)}")


def walk(shape: Sequence[int], to: Sequence[int], source: Sequence[int]) -> Walk:
    """The fewest dimensions that reach every item: sorted by the destination's strides, with
    positive ones there, and with adjacent dimensions joined where one continues the other.

    >>> walk((2, 3), (12, 4), (12, 4))
    Walk(dims=(Dim(steps=6, to=4, source=4),), to=0, source=0)
    """
    dims, to_start, source_start = [], 0, 0
    for count, step, read in zip(shape, to, source, strict=True):
        if count == 1:
            continue
        if step < 0:
            to_start += (count - 1) * step
            source_start += (count - 1) * read
            step, read = -step, -read
        dims.append(Dim(count, step, read))
    dims.sort(key=lambda dim: (dim.to, abs(dim.source)), reverse=True)
    joined: list[Dim] = []
    for dim in dims:
        outer = joined[-1] if joined else None
        if outer and outer.to == dim.steps * dim.to and outer.source == dim.steps * dim.source:
            joined[-1] = Dim(outer.steps * dim.steps, dim.to, dim.source)
        else:
            joined.append(dim)
    return Walk(tuple(joined), to_start, source_start)


def is_one_run(way: Walk, itemsize: int) -> bool:
    """Whether both sides are contiguous bytes in the same order."""
    dims = way.dims
    return not dims or (len(dims) == 1 and dims[0].to == dims[0].source == itemsize)


def rows_of(way: Walk, itemsize: int) -> Rows | None:
    """The walk as rows, or slices of rows, that a driver can copy. None if it cannot: if there are
    too many dimensions, items that go backwards or share memory, or slices that are not a whole
    number of rows."""
    dims = list(way.dims)
    width = itemsize
    if dims and dims[-1].to == dims[-1].source == itemsize:
        width *= dims.pop().steps
    if len(dims) > 2:
        return None
    height = dims.pop() if dims else Dim(1, width, width)
    if min(height.to, height.source) < width:
        return None
    outer = dims.pop() if dims else Dim(1, height.steps * height.to, height.steps * height.source)
    for pitch, step in ((height.to, outer.to), (height.source, outer.source)):
        if step < height.steps * pitch or step % pitch:
            return None
    return Rows(width, height.steps, outer.steps, height.to, height.source, outer.to, outer.source)


def pieces(way: Walk, max_dims: int = MAX_DIMS, max_items: int = MAX_ITEMS) -> Iterator[Walk]:
    """The walk, cut into pieces that one launch of a kernel can take: each has few enough
    dimensions and items."""
    dims, to, source = way
    if len(dims) <= max_dims and way.items <= max_items:
        yield way
        return
    first, rest = dims[0], dims[1:]
    inner = math.prod(dim.steps for dim in rest)
    at_once = 1 if len(dims) > max_dims else max(1, max_items // inner)
    for start in range(0, first.steps, at_once):
        count = min(at_once, first.steps - start)
        lead = (Dim(count, first.to, first.source),) if count > 1 else ()
        part = Walk(lead + rest, to + start * first.to, source + start * first.source)
        yield from pieces(part, max_dims, max_items)


def in_units(way: Walk, itemsize: int, to: int, source: int) -> tuple[int, Walk]:
    """(unit, walk): the same bytes as units of 1, 2, 4 or 8 bytes, the largest that are aligned to
    their size on both sides. The sides start at the addresses `to` and `source`."""
    together = itemsize | 8 | (to + way.to) | (source + way.source)
    for dim in way.dims:
        together |= dim.to | dim.source
    unit = together & -together
    if unit == itemsize:
        return unit, way
    count = itemsize // unit
    inner = Dim(count, unit, unit)
    dims = list(way.dims)
    if dims and dims[-1].to == dims[-1].source == itemsize:
        inner = Dim(dims.pop().steps * count, unit, unit)
    return unit, Walk((*dims, inner), way.to, way.source)


def is_aligned(way: Walk, to: int, to_size: int, source: int, source_size: int) -> bool:
    """Whether every item lies at a multiple of its size (of a component's, if it has two)."""
    to, source = to + way.to, source + way.source
    for dim in way.dims:
        to |= dim.to
        source |= dim.source
    return to % to_size == 0 and source % source_size == 0


def span(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """(first, last + 1) of the bytes that items touch, from where the first one starts.

    >>> span((3, 2), (-8, 4), 4)
    (-16, 8)
    """
    low = sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if step < 0)
    high = sum((n - 1) * step for n, step in zip(shape, strides, strict=True) if step > 0)
    return low, high + itemsize


def stands_still(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether several items share memory by a stride of 0."""
    return 0 in strides and any(n > 1 and not s for n, s in zip(shape, strides, strict=True))
