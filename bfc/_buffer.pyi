from collections.abc import Sequence
from typing import Any, NoReturn, Self, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray
from typing_extensions import CapsuleType

from bfc.suballocators.base import Device, SubAllocator

class Owner:
    """Who a buffer gives its chunk back to. The allocator derives from it, so no import points upwards."""

    @property
    def sub_allocator(self) -> SubAllocator: ...
    @property
    def device(self) -> Device: ...
    @property
    def host_accessible(self) -> bool: ...

class Buffer:
    """An allocation that gives itself back: when collected, on `free()`, or at the end of a `with` block.

    Made by `Allocator.allocate`, not by hand. Other libraries take its memory, as bytes or through `view` with a dtype
    and a shape, without a copy: by the buffer protocol where the host reaches it, by `__cuda_array_interface__` where a
    CUDA device does, and by DLPack. What takes it through the first or the last is counted, and nothing is freed under
    it; who has an address, or a `__cuda_array_interface__`, must keep the buffer.

    The host may read managed and pinned memory while work on it is still queued: nothing here waits, but `to_host`,
    `from_host`, and DLPack where the host is the one who asks.

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
        """Where the memory lies: `bfc.Device(kind, ordinal)`."""

    @property
    def allocator(self) -> Any:
        """The allocator that it came from."""

    @property
    def ptr(self) -> int:
        """The address as an int; 0 for a buffer of 0 bytes. Raises ValueError once the buffer was freed: who has the
        number may write into another's memory.
        """

    @property
    def stream(self) -> int | None:
        """The stream it was allocated on, as an int; None for pinned memory allocated on none."""

    @property
    def freed(self) -> bool:
        """Whether `free()` has been called on it."""

    def free(self) -> None:
        """Gives the memory back now. Freeing twice does nothing.

        Raises BufferError while another object holds a view of it through the buffer protocol or DLPack.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """NumPy comes here where the buffer protocol failed: for a dtype that it cannot name, or to hear the error."""

    def from_host(self, array: ArrayLike) -> Self:
        """Copies an array, or what NumPy makes one of, into this memory; returns the buffer.

        A buffer takes the bytes as they are, exactly as many as it has; a view takes an array of its own shape, and
        casts it to its dtype where NumPy's "same_kind" allows. Behind what is queued on the buffer's stream, and done
        when it returns. Raises ValueError for another size or shape and for a read-only view, TypeError for a dtype
        that is not cast, BufferError for simulated memory, ClosedError.
        Cost: one copy, two where the array is not C-contiguous; it waits for the stream, without the GIL.

        >>> import bfc, numpy
        >>> values = numpy.arange(3, dtype="f4")
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(values.nbytes).from_host(values)
        >>> buffer.view("f4").from_host([3, 4, 5]).to_host()
        array([3., 4., 5.], dtype=float32)
        """

    def to_host(self) -> NDArray[Any]:
        """A new NumPy array with what this memory holds: bytes of a buffer, the dtype and the shape of a view.

        Behind what is queued on the buffer's stream, and done when it returns. Raises BufferError for simulated memory,
        ClosedError. Cost: one copy; it waits for the stream, without the GIL.

        >>> import bfc
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(4).from_host(b"abcd")
        >>> buffer.to_host()
        array([ 97,  98,  99, 100], dtype=uint8)
        """

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The CUDA Array Interface, version 3, as a new dict; AttributeError where no CUDA device reaches the memory.

        `stream` is the one that the memory was allocated on, which the reader waits for: 1 for the default stream, None
        for pinned memory of no stream and for 0 bytes. A dtype without a typestr of NumPy's own has the one that NumPy
        prints, bfloat16 "<V2" as in PyTorch; only DLPack tells such dtypes apart. The interface keeps nothing alive:
        the reader must keep this object, and nobody can know of one that has not when `free()` comes.
        Raises ClosedError. No driver call.
        Source: numba-cuda's documentation, "CUDA Array Interface (Version 3)".

        >>> import bfc
        >>> hasattr(bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(4), "__cuda_array_interface__")
        False
        """

    def __dlpack_device__(self) -> tuple[int, int]:
        """(device type, device id) in DLPack's numbers; the id is 0 where the type is memory of the host, or managed.

        Raises BufferError for memory that DLPack has no number for. Source: dlpack.h, `DLDevice`.
        """

    def __dlpack__(
        self,
        *,
        stream: SupportsIndex | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType:
        """A DLPack capsule: versioned where the consumer takes 1.0 or later, else the old kind, which cannot say that
        memory is read-only or copied. The consumer keeps this object, and so the memory, until it is done.

        `stream` is the consumer's: 1, 2 or a handle; None is the legacy default stream. It waits for the buffer's own,
        and the memory is used again only when it has finished. -1: no waiting, and nothing recorded. Pinned memory goes
        to the host with None, once the buffer's stream has finished; other host memory takes only None and -1.
        `dl_device`: managed memory also goes as (2, ordinal), and what the host reaches as (1, 0), once the buffer's
        stream has finished; (1, 0) of other memory is a copy on the host. PyTorch asks for neither, but takes capsules:
        `torch.from_dlpack(pinned.__dlpack__(dl_device=(1, 0)))`. `copy=True` is a copy by the same allocator,
        `copy=False` a promise to make none.

        Raises BufferError for what cannot be had, ValueError for the stream 0, TypeError for a stream that is no int,
        ClosedError, DriverError for a stream that the driver does not know.
        Source: the Python array API standard (2024.12), `__dlpack__`.

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
        """The same memory with a dtype (anything NumPy takes) and a shape; one dimension may be -1.

        `read_only=True` offers it to others for reading only, and so are views of such a view: that binds the host's
        arrays, and whoever looks at it elsewhere, as NumPy does; CuPy and PyTorch do not. Raises ValueError where dtype
        and shape do not fit into the memory. No copy; the view keeps the buffer alive.

        >>> import bfc, numpy
        >>> buffer = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB")).allocate(24)
        >>> view = buffer.view("f4", (2, -1))
        >>> numpy.asarray(view)[:] = 7
        >>> view.shape, view.view("f4", read_only=True).to_host()
        ((2, 3), array([7., 7., 7., 7., 7., 7.], dtype=float32))
        """

class BufferView(Buffer):
    """A buffer's memory with a dtype and a shape, made by `Buffer.view`. Keeps it alive; frees nothing itself."""

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
        """Whether the buffer under the view was freed."""

    def free(self) -> None:
        """Does nothing: the memory belongs to the buffer under the view."""
