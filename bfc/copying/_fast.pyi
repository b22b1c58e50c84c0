from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

def address_of(array: np.ndarray[Any, Any]) -> int:
    """Where the first item of a NumPy array lies. NumPy's own attributes for it take about 1 us. Raises TypeError."""

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
    `__cuda_stream__`) or a `pyopencl.CommandQueue`; None is that of `bfc.use_stream` where the
    memory can be on it, else the one that the device's side names, else the default stream. Work on
    other streams is ordered only where the memory names its stream, and is waited for then; within
    the host only for a stream that `__cuda_array_interface__` names. A buffer of OpenCL's that names
    no queue, where none is chosen, is copied before this returns. A CUDA graph captures a transfer
    of pinned memory that the host has no part in, and uses that memory at each run: keep it for as
    long.

    As in C, a float that the destination's integers cannot hold becomes any number. A complex
    source loses its imaginary part in a real destination, with one `ComplexWarning` a copy. Source
    and destination on the host may overlap; elsewhere the result is any mixture then.

    Raises ValueError for shapes that do not broadcast, texts that are no numbers, a read-only
    destination, one whose items share places by a stride of 0, or a stream of a device that has no
    part in the copy; TypeError for Python objects and for what is no memory; ClosedError or
    InvalidPointerError for memory that was freed (but pyopencl cannot tell of a `Buffer` that was
    released, and may crash); OutOfMemoryError where a device has no room for a temporary;
    DeviceUnavailableError where a package is missing; DriverError. `dst` is as it was then, but
    after a DriverError. What `numpy.errstate` or a filter of warnings makes an error of is raised
    after the write, as by `numpy.copyto`.

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
