from collections.abc import Callable, Iterable
from typing import Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from bfc._buffer import Buffer
from bfc._frees import Frees
from bfc.streams import StreamLike

class Allocator(Frees):
    """What both modes have in common. Make a `BFCAllocator` or a `CachingAllocator`."""

    @property
    def strict(self) -> bool: ...
    @property
    def retry_seconds(self) -> float: ...
    @property
    def closed(self) -> bool:
        """Whether `close()` has been called."""

    def allocate_raw(
        self,
        nbytes: SupportsIndex,
        stream: StreamLike | None = None,
        *,
        alignment: SupportsIndex | None = None,
        freed_before: SupportsIndex | Callable[[], SupportsIndex] | None = None,
    ) -> int:
        """An address for `nbytes` bytes, a multiple of 256 (of 512 from a CachingAllocator); 0 for 0 bytes, which
        counts nothing.

        `stream` is where it will be used first (None: that of `use_stream`, or 0): for a BFCAllocator, one that is not
        its own is treated as `record_stream` does.
        `alignment` is a power of two; ValueError where it is above that multiple, which is all that can be given. A
        BFCAllocator of `strict` ignores it, as TensorFlow 2.21 does.
        `freed_before` (a count, or a function that returns one) keeps off chunks freed later; see `SharedCounter`.
        Raises OutOfMemoryError, TypeError or ValueError for a size that is none, SubAllocatorError, ClosedError.
        Cost: O(log n) in the free chunks, no device call on a hit. Source: `BFCAllocator::AllocateRaw`, spec 2.2.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
        >>> hex(allocator.allocate_raw(1000)), hex(allocator.allocate_raw(257))
        ('0x10000000000', '0x10000000400')
        """

    def allocate(
        self,
        nbytes: SupportsIndex | str,
        stream: StreamLike | None = None,
        *,
        alignment: SupportsIndex | None = None,
    ) -> Buffer:
        """A `Buffer` of `nbytes` bytes (an int, or a text such as "3 MiB"). All else is as in `allocate_raw`.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate("3 MiB")
        >>> buffer.nbytes, allocator.requested_size(buffer.ptr)
        (3145728, 3145728)
        """

    def allocate_many(
        self, sizes: Iterable[SupportsIndex], stream: StreamLike | None = None
    ) -> NDArray[np.uint64]:
        """The addresses of one allocation for each size, as a uint64 array: all of them, or none and an error.

        `sizes` is any iterable; an array of ints goes fastest. `stream` and errors as `allocate_raw`. Cost: some 20 ns
        a size on a hit, half of `allocate_raw` from Python.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> len(allocator.allocate_many([256, 512, 1024]))
        3
        """

    def _swap_noter(self, noter: Callable[[int], object] | None) -> Callable[[int], object] | None:
        """From now on `noter(allocation_id)` is told each allocation. Returns whom was told before; None: nobody."""

    def release_free_regions(self) -> int:
        """Gives every region without a live allocation back to the sub-allocator. Returns the bytes given back.

        Where regions grow, the next one starts small again. Raises SubAllocatorError.
        Source: spec 2.7 (`DeallocateFreeRegions`), which upstream runs only when memory has run out.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
        >>> allocator.deallocate_raw(allocator.allocate_raw(100))
        >>> allocator.release_free_regions()
        2097152
        """

    def empty_cache(self) -> int:
        """`release_free_regions` under PyTorch's name."""

    def close(self) -> None:
        """Gives every region back, live allocations or not. Their addresses and buffers are worthless afterwards.

        Waits for the streams that still use freed memory. Raises BufferError, and closes nothing, while another object
        holds a view of host memory. Closing twice does nothing.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def __del__(self) -> None: ...
