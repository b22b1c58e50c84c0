from typing import Any, TypeVar

T = TypeVar("T")

def copy(
    dst: T,
    src: Any,
    *,
    non_blocking: bool = False,
    stream: Any = None,
    conj: bool = False,
    neg: bool = False,
) -> T:
    """Copy `src` into `dst`, cast to its dtype and broadcast to its shape.

    Parameters
    ----------
    dst : array
        A NumPy array, a `bfc.Buffer` or a view of one, an array or a buffer of pyopencl, or an
        object with the buffer protocol, `__cuda_array_interface__` or DLPack.
    src : array or array_like
        The same, or anything that NumPy can convert to an array.
    non_blocking : bool, optional
        Between the host and a device, return when the copy is queued. Do not change the host's
        memory before the stream has finished.
    stream : int or stream object, optional
        The stream that the copy is queued on: a CUDA stream or a `pyopencl.CommandQueue`. None is
        the stream of the enclosing `bfc.use_stream` if the memory can be on it, or else the one
        that the device's side names (between devices, the source), or else the default stream.
    conj : bool, optional
        Conjugate the values that were read, before the cast.
    neg : bool, optional
        Negate the values that were read, before the cast.

    Returns
    -------
    array
        `dst`.

    Raises
    ------
    ValueError
        If the shapes do not broadcast, a text is not a number, `dst` is read-only, items of `dst`
        share memory by a stride of 0, or `stream` belongs to a device that is not part of the copy.
    TypeError
        If a side is not memory, or holds Python objects.
    ClosedError
        If a buffer was freed, or its allocator closed.
    InvalidPointerError
        If memory of another library was freed. (For a released `Buffer`, pyopencl cannot tell, and
        may crash.)
    OutOfMemoryError
        If a device has no room for a temporary.
    DeviceUnavailableError
        If a package is missing.
    DriverError
        If the driver fails.

    Notes
    -----
    Between the host and a device the copy is complete on return, unless `non_blocking`. Between
    devices it is queued. Work on another stream is waited for only if the memory names that stream;
    in a copy within the host, only if it does so by `__cuda_array_interface__`. If neither the call
    nor the memory names an OpenCL queue, an OpenCL copy is complete on return. A CUDA graph can
    capture a transfer of pinned memory if the host does nothing else in it. The graph uses that
    memory each time it runs: keep it for as long.

    On error `dst` is unchanged, except after a DriverError. If `numpy.errstate` or a warnings
    filter turns something into an error, it is raised after the write, as by `numpy.copyto`.

    As in C, a float that does not fit into an integer gives an arbitrary one. A complex value loses
    its imaginary part in a real `dst`, with one `ComplexWarning` per copy. `src` and `dst` may overlap
    on the host; elsewhere the result of an overlap is undefined.

    Cost: one pass over the memory. Two, with a temporary, between host and device if the dtypes
    differ or one side is not contiguous, and between devices without peer access. The first copy
    that casts a pair of dtypes on a device compiles a kernel, in about a tenth of a second. Source:
    PyTorch's `Tensor.copy_`.

    Examples
    --------
    >>> import bfc, numpy
    >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(24)
    >>> doubled = bfc.copy(buffer.view("f4", (2, 3)), numpy.arange(3))
    >>> bfc.copy(numpy.zeros((3, 2), "i2").T, doubled, neg=True)
    array([[ 0, -1, -2],
           [ 0, -1, -2]], dtype=int16)
    """
