from collections.abc import Sequence
from typing import Any, NoReturn, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from typing_extensions import CapsuleType

from bfc.devices import Device
from bfc.suballocators.base import SubAllocator

class Owner:
    """What a buffer belongs to: the base class of every allocator.

    Attributes
    ----------
    sub_allocator : SubAllocator
        Where the memory comes from.
    device : Device
        Where it lies.
    host_accessible : bool
        True if the host can read and write it at the same addresses.
    """

    @property
    def sub_allocator(self) -> SubAllocator: ...
    @property
    def device(self) -> Device: ...
    @property
    def host_accessible(self) -> bool: ...

class Buffer:
    """An allocation that frees itself, made by `Allocator.allocate`.

    It is freed when it is collected, by `free()`, or at the end of a `with` block. Other libraries
    use its memory without a copy: through the buffer protocol if the host can reach it, through
    `__cuda_array_interface__` if a CUDA device can, and through DLPack.

    Attributes
    ----------
    nbytes : int
        The size in bytes.
    read_only : bool
        True if other libraries may only read it; False except in a read-only `view`.

    Raises
    ------
    TypeError
        If called: an allocator makes buffers.

    Notes
    -----
    Views through the buffer protocol and DLPack are counted, and the memory is not freed while there
    are any. A reader of the address, or of `__cuda_array_interface__`, must keep the buffer alive.

    The host can read managed and pinned memory while work on it is still queued. Only `to_host`,
    `from_host` and DLPack to the host wait for that work.

    Examples
    --------
    >>> import bfc
    >>> with bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(4) as buffer:
    ...     memoryview(buffer)[:] = b"abcd"
    ...     bytes(buffer)
    b'abcd'
    """

    def __init__(self) -> NoReturn: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def read_only(self) -> bool: ...
    @property
    def device(self) -> Device:
        """Where the memory lies: a `bfc.Device(kind, ordinal)`."""

    @property
    def allocator(self) -> Any:
        """The allocator that made the buffer."""

    @property
    def ptr(self) -> int:
        """The address as an int; 0 for a buffer of 0 bytes.

        Raises
        ------
        ValueError
            If the buffer was freed: the address may belong to another allocation by now.
        """

    @property
    def stream(self) -> int | None:
        """The stream it was allocated for, as an int; None for pinned memory without a stream."""

    @property
    def freed(self) -> bool:
        """True once `free()` has been called."""

    def free(self) -> None:
        """Free the memory now. Freeing twice does nothing.

        Raises
        ------
        BufferError
            If another object holds a view of it, through the buffer protocol or DLPack.
        InvalidPointerError
            If the memory was freed through its address.
        SubAllocatorError
            If another stream has used it, and the device fails when it is asked about it.

        Notes
        -----
        After an error the memory is still allocated. Cost: as `Allocator.deallocate_raw`.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """NumPy calls this if the buffer protocol fails: for a dtype that it has no format for, or to get the error."""

    def from_host(self, array: ArrayLike) -> Self:
        """Copy an array of the host into this memory.

        Parameters
        ----------
        array : array_like
            For a buffer: the bytes, exactly `nbytes` of them. For a view: an array of its shape, which
            is cast to its dtype if NumPy's "same_kind" rule allows it.

        Returns
        -------
        Buffer
            This one.

        Raises
        ------
        ValueError
            If the size or the shape differs, or if the view is read-only.
        TypeError
            If the dtype cannot be cast.
        BufferError
            If the memory is simulated.
        ClosedError
            If the memory was freed, or its allocator closed.

        Notes
        -----
        The copy comes after what is queued on the buffer's stream, and is complete on return. Cost: one
        copy, two if the array is not C-contiguous; it waits for the stream, without the GIL.

        Examples
        --------
        >>> import bfc, numpy
        >>> values = numpy.arange(3, dtype="f4")
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(values.nbytes).from_host(values)
        >>> buffer.view("f4").from_host([3, 4, 5]).to_host()
        array([3., 4., 5.], dtype=float32)
        """

    def to_host(self) -> NDArray[Any]:
        """Copy this memory into a new NumPy array.

        Returns
        -------
        numpy.ndarray
            Of uint8 with shape (nbytes,) for a buffer, of its dtype and shape for a view.

        Raises
        ------
        BufferError
            If the memory is simulated.
        ClosedError
            If the memory was freed, or its allocator closed.

        Notes
        -----
        The copy comes after what is queued on the buffer's stream, and is complete on return. Cost: one
        copy; it waits for the stream, without the GIL.

        Examples
        --------
        >>> import bfc
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(4).from_host(b"abcd")
        >>> buffer.to_host()
        array([ 97,  98,  99, 100], dtype=uint8)
        """

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA Array Interface, version 3, as a new dict.

        The reader must keep this object alive: the interface does not, and such readers are not counted by `free()`.

        Raises
        ------
        AttributeError
            If a CUDA device cannot reach the memory.
        ClosedError
            If the memory was freed, or its allocator closed.

        Notes
        -----
        `stream` is the buffer's stream, which the reader has to wait for: 1 for the default stream, None
        for pinned memory without a stream and for 0 bytes. A dtype without a typestr of its own has the
        one that NumPy prints ("<V2" for bfloat16, as in PyTorch); use DLPack to tell such dtypes apart.

        Cost: no driver call. Source: numba-cuda's documentation, "CUDA Array Interface (Version 3)".

        Examples
        --------
        >>> import bfc
        >>> hasattr(bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(4), "__cuda_array_interface__")
        False
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """The device in DLPack's numbers.

        Returns
        -------
        tuple of (int, int)
            The device type and the device id. The id is 0 for memory of the host, and for managed memory.

        Raises
        ------
        BufferError
            If DLPack has no number for such memory.

        Notes
        -----
        Source: dlpack.h, `DLDevice`.
        """

    def __dlpack__(
        self,
        *,
        stream: SupportsIndex | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """A DLPack capsule of this memory. It keeps the buffer alive until the consumer is done.

        Parameters
        ----------
        stream : int, optional
            The consumer's stream: 1 (the legacy default stream, as None), 2 or a handle. It waits for
            the buffer's stream, and the memory is not reused before it has finished. With -1 nothing
            waits and nothing is recorded. Memory of the host takes None and -1 only, except that
            pinned memory takes streams too; with None it is handed to the host once the buffer's stream
            has finished.
        max_version : tuple of (int, int), optional
            The newest DLPack that the consumer knows. From (1, 0) on the capsule is versioned; older
            ones cannot say that memory is read-only or copied.
        dl_device : tuple of (int, int), optional
            Where the consumer wants it. Managed memory can be had as (2, ordinal), and what the host
            reaches as (1, 0), once the buffer's stream has finished; (1, 0) of other memory is a copy
            on the host.
        copy : bool, optional
            True copies within the same allocator; False never copies.

        Returns
        -------
        PyCapsule
            Named "dltensor_versioned", or "dltensor".

        Raises
        ------
        BufferError
            If the memory cannot be had in that way.
        ValueError
            If `stream` is 0, which is ambiguous.
        TypeError
            If `stream` is not an int.
        ClosedError
            If the memory was freed, or its allocator closed.
        DriverError
            If the driver does not know the stream.

        Notes
        -----
        PyTorch passes neither `dl_device` nor `copy`, but takes capsules:
        `torch.from_dlpack(pinned.__dlpack__(dl_device=(1, 0)))`.
        Source: the Python array API standard (2024.12), `__dlpack__`.

        Examples
        --------
        >>> import bfc, numpy
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(8).from_host(numpy.arange(2, dtype="i4"))
        >>> numpy.from_dlpack(buffer.view("i4"))
        array([0, 1], dtype=int32)
        """

    def view(
        self,
        dtype: DTypeLike,
        shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
        *,
        read_only: bool = False,
    ) -> BufferView:
        """The same memory with a dtype and a shape.

        Parameters
        ----------
        dtype : dtype_like
            Anything that NumPy takes as a dtype.
        shape : int or sequence of int, optional
            One dimension may be -1. By default, as many items as the memory holds.
        read_only : bool, optional
            Offer the memory for reading only. NumPy and the host's arrays respect that; CuPy and
            PyTorch do not. A view of a read-only view is read-only.

        Returns
        -------
        BufferView
            It keeps the buffer alive.

        Raises
        ------
        ValueError
            If dtype and shape do not fit into the memory.
        TypeError
            If `dtype` or `shape` is not one.

        Notes
        -----
        Cost: no copy, no driver call.

        Examples
        --------
        >>> import bfc, numpy
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(24)
        >>> view = buffer.view("f4", (2, -1))
        >>> numpy.asarray(view)[:] = 7
        >>> view.shape, view.view("f4", read_only=True).to_host()
        ((2, 3), array([7., 7., 7., 7., 7., 7.], dtype=float32))
        """

class BufferView(Buffer):
    """A buffer's memory with a dtype and a shape, made by `Buffer.view`.

    It keeps the buffer alive, and frees nothing itself.

    Parameters
    ----------
    base : Buffer
        The buffer that has the memory.
    dtype : dtype_like
        As in `Buffer.view`.
    shape : int or sequence of int, optional
        As in `Buffer.view`.
    read_only : bool, optional
        As in `Buffer.view`.

    Attributes
    ----------
    base : Buffer
        As given.
    shape : tuple of int
        Every dimension, none of them -1.

    Raises
    ------
    ValueError
        If dtype and shape do not fit into the memory.
    TypeError
        If `dtype` or `shape` is not one.
    RuntimeError
        If `__init__` is called twice.
    """

    def __init__(
        self,
        base: Buffer,
        dtype: DTypeLike,
        shape: SupportsIndex | Sequence[SupportsIndex] | None = None,
        *,
        read_only: bool = False,
    ) -> None: ...
    @property
    def base(self) -> Buffer: ...
    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype of its items."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def freed(self) -> bool:
        """True once the buffer under the view was freed."""

    def free(self) -> None:
        """Do nothing: the memory belongs to the buffer under the view."""
