"""One function that copies between any two of host, pinned, CUDA and OpenCL memory.

Importing this loads no NumPy and no driver; the first copy does.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")

_array: Any = None
_plain: Any = None
_same: Any = None
_run: Any = None


def copy(
    dst: T,
    src: Any,
    *,
    non_blocking: bool = False,
    stream: Any = None,
    conj: bool = False,
    neg: bool = False,
) -> T:
    """Copies `src` into `dst`, cast to its dtype and broadcast to its shape. Returns `dst`.

    Either side is a NumPy array, a `bfc.Buffer` or a view of one, an array or a buffer of
    pyopencl's, or speaks the buffer protocol, `__cuda_array_interface__` or DLPack; `src` may also
    be whatever NumPy makes an array of. `conj` and `neg` conjugate and negate the values that were
    read, before they are cast.

    Between the host and a device it is done when this returns; with `non_blocking` it is queued,
    and the host's memory must stay as it is until the stream is done. Between devices it is queued
    in any case, on the stream of the source. `stream` is a CUDA stream (a handle, or with
    `__cuda_stream__`) or a `pyopencl.CommandQueue`; None is that of `bfc.use_stream`, else the one
    that the device's side names, else the default stream. Work on other streams is ordered only
    where the memory names its stream, and is waited for then. A buffer of OpenCL's that names no
    queue is copied before this returns.

    As in C, a float that the destination's integers cannot hold becomes any number. A complex
    source loses its imaginary part in a real destination, with one `ComplexWarning` a copy. Source
    and destination on the host may overlap; elsewhere the result is any mixture then.

    Raises ValueError for shapes that do not broadcast, a read-only destination, or one whose items
    share places; TypeError for Python objects and for what is no memory; ClosedError or
    InvalidPointerError for memory that was freed; OutOfMemoryError where a device has no room for a
    temporary; DeviceUnavailableError where a package is missing; DriverError. `dst` is as it was
    then, but after a DriverError.

    Cost: one pass over the memory, two with a temporary: across the host's border where dtypes
    differ or one side is not contiguous, and between devices without peer access. The first copy
    that casts a pair of dtypes on a device compiles a kernel, in about a tenth of a second.
    Source: PyTorch's `Tensor.copy_`.

    >>> import bfc, numpy
    >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(24)
    >>> doubled = bfc.copy(buffer.view("f4", (2, 3)), numpy.arange(3))
    >>> bfc.copy(numpy.zeros((3, 2), "i2").T, doubled, neg=True)
    array([[ 0, -1, -2],
           [ 0, -1, -2]], dtype=int16)
    """
    if type(dst) is _array and type(src) is _array and not (conj or neg):
        if dst is not src and not _same(dst, src):
            _plain(dst, src)
        return dst
    if dst is src and not (conj or neg):
        return dst
    if _array is None:
        _load()
    _run(dst, src, non_blocking, stream, conj, neg)
    return dst


def _load() -> None:
    global _array, _plain, _same, _run
    import numpy

    from bfc.copy import _host, engine

    _array, _plain, _same, _run = numpy.ndarray, _host.copy_plain, _host.is_same_view, engine.run
