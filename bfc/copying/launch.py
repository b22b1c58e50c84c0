"""What CUDA and OpenCL have in common before a kernel is launched."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bfc.copying import kernels
from bfc.copying.layout import Walk, in_units, is_aligned, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from bfc.copying.copy_stream import CopyStream
    from bfc.copying.view import View


def plan(to: View, source: View, change: int) -> tuple[tuple[str, str], Walk] | None:
    """The codes of the kernel's dtypes, source and destination, and its walk. None if items are
    not aligned to their size, as a kernel with arithmetic requires."""
    way = walk(to.shape, to.strides, source.strides)
    if not change and to.dtype == source.dtype:
        unit, way = in_units(way, to.dtype.itemsize, to.address, source.address)
        return (kernels.UNITS[unit], kernels.UNITS[unit]), way
    codes = str(kernels.code_of(source.dtype)), str(kernels.code_of(to.dtype))
    sizes = [kernels.component_size(code) for code in codes]
    if not is_aligned(way, to.address, sizes[1], source.address, sizes[0]):
        return None
    return codes, way


def launch_by_temporaries(stream: CopyStream, to: View, source: View, change: int) -> None:
    """Copies through temporaries in which items are aligned to their size. Between these and source
    and destination, plain bytes are copied."""
    with (
        borrowed(stream, source.dtype, source.shape) as packed,
        borrowed(stream, to.dtype, to.shape) as cast,
    ):
        stream.launch(packed, source, 0)
        stream.launch(cast, packed, change)
        stream.launch(to, cast, 0)


@contextmanager
def borrowed(stream: CopyStream, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Iterator[View]:
    """A temporary of a stream, released at the end."""
    view = stream.temporary(dtype, shape)
    try:
        yield view
    finally:
        stream.release(view)
