from collections.abc import Callable, Iterable
from typing import Self, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from bfc.allocators._tags import Tagged
from bfc.buffers._buffer import Buffer
from bfc.streams import StreamLike

class Allocator(Tagged):
    """The base class of `BFCAllocator` and `CachingAllocator`. It cannot be made itself.

    Attributes
    ----------
    strict : bool
        True if the allocator refuses whatever the original would refuse.
    retry_seconds : float
        How long a request that does not fit waits for other threads to free memory.

    Notes
    -----
    Any thread may call any method. Every method that changes something raises MemoryError if the
    host has no memory for the bookkeeping; nothing has changed then.
    """

    @property
    def strict(self) -> bool: ...
    @property
    def retry_seconds(self) -> float: ...
    @property
    def tracemalloc_domain(self) -> int | None:
        """The domain that `set_tracemalloc_domain` has set; None by default."""

    def set_tracemalloc_domain(self, domain: int | None) -> None:
        """Let Python's tracemalloc count the allocator's memory by line, under a domain of its own.

        While tracemalloc is tracing, its snapshots have the bytes in use that each line of the program
        has allocated. `tracemalloc.DomainFilter(True, domain)` shows them alone.

        Parameters
        ----------
        domain : int or None
            A number from 1 to 2**32 - 1; Python's own memory has domain 0. None ends it, and
            tracemalloc forgets the allocator's memory.

        Raises
        ------
        ValueError
            If the number is too small or too large.
        TypeError
            If it is not an int.

        Notes
        -----
        It counts what is allocated from Python from then on, as `Stats.bytes_in_use` does: whole chunks,
        until they can be used again. It does not count what a replay allocates, nor PyTorch's tensors
        under `bfc.use`. Allocators whose addresses may be equal (simulated ones) need domains of their
        own.

        Cost: about 1 us for each allocation, more where tracemalloc keeps many frames.

        Examples
        --------
        >>> import tracemalloc, bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.set_tracemalloc_domain(7)
        >>> tracemalloc.start()
        >>> ptr = allocator.allocate_raw(3 << 20)
        >>> on_device = tracemalloc.DomainFilter(True, 7)
        >>> snapshot = tracemalloc.take_snapshot().filter_traces([on_device])
        >>> tracemalloc.stop()
        >>> [statistic.size for statistic in snapshot.statistics("lineno")]
        [3145728]
        """

    @property
    def closed(self) -> bool:
        """True once `close()` has been called."""

    def allocate_raw(
        self,
        nbytes: SupportsIndex,
        stream: StreamLike | None = None,
        *,
        alignment: SupportsIndex | None = None,
        freed_before: SupportsIndex | Callable[[], SupportsIndex] | None = None,
    ) -> int:
        """Allocate `nbytes` bytes and return their address.

        Parameters
        ----------
        nbytes : int
            The size in bytes, from 0 to 2**63 - 1.
        stream : int, stream object or None, optional
            The stream that uses the memory first: a handle, or an object with `__cuda_stream__`. None
            is the stream of the enclosing `bfc.use_stream`, or else stream 0. A BFCAllocator treats a
            stream that is not its own as if `record_stream` had been called for it.
        alignment : int, optional
            A power of two that the address must be a multiple of. Addresses are multiples of 256 (of
            512 from a CachingAllocator) anyway; more cannot be had. A BFCAllocator with `strict`
            ignores it, as TensorFlow 2.21 does.
        freed_before : int or callable, optional
            Use only memory that was freed up to this count of the timing counter (see
            `SharedCounter`); a callable returns the count. Only for a BFCAllocator.

        Returns
        -------
        int
            The address; 0 for 0 bytes, which counts as no allocation.

        Raises
        ------
        OutOfMemoryError
            If no free chunk is large enough and no region could be added.
        TypeError
            If an argument has the wrong type (a text such as "3 MiB" is for `allocate`), or a
            CachingAllocator gets `freed_before`.
        ValueError
            If `nbytes` is negative or above 2**63 - 1, or if `alignment` is not a power of two or is
            too large.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: O(log n) in the free chunks, no device call on a hit. Source: `BFCAllocator::AllocateRaw`,
        TensorFlow's behaviour, 2.2.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
        >>> hex(allocator.allocate_raw(1000)), hex(allocator.allocate_raw(257))
        ('0x10000000000', '0x10000000400')
        """

    def try_allocate(
        self,
        nbytes: SupportsIndex | str,
        stream: StreamLike | None = None,
        *,
        alignment: SupportsIndex | None = None,
        contiguous: bool = False,
    ) -> Buffer | None:
        """Allocate like `allocate`, but return None where that raises OutOfMemoryError.

        Parameters
        ----------
        nbytes : int or str
            The size in bytes, or a text such as "3 MiB".
        stream : int, stream object or None, optional
            As in `allocate`.
        alignment : int, optional
            As in `allocate`.
        contiguous : bool, optional
            As in `allocate`.

        Returns
        -------
        Buffer or None
            None if no free chunk is large enough and no region could be added.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If `allocate` would raise it.
        MemoryError
            If the host has no memory for the bookkeeping.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        AsleepError
            If the tag of the enclosing `tag` sleeps.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        It tries all that `allocate` tries, and waits as long (`retry_seconds`). A refusal counts as one, in
        `memory_stats()["num_ooms"]` and in a history, and out-of-memory observers are called. No error
        is built, and no report written (`bfc.set_oom_report`).

        Cost: as `allocate`.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"))
        >>> batch = allocator.try_allocate("100 MiB") or allocator.try_allocate("50 MiB")
        >>> batch.nbytes >> 20
        50
        """

    def allocate(
        self,
        nbytes: SupportsIndex | str,
        stream: StreamLike | None = None,
        *,
        alignment: SupportsIndex | None = None,
        contiguous: bool = False,
    ) -> Buffer:
        """Allocate `nbytes` bytes as a `Buffer`, which frees itself.

        Parameters
        ----------
        nbytes : int or str
            The size in bytes, or a text such as "3 MiB".
        stream : int, stream object or None, optional
            The stream that uses the memory first, as in `allocate_raw`. But None, with no enclosing
            `bfc.use_stream`, is the allocator's own stream.
        alignment : int, optional
            As in `allocate_raw`.
        contiguous : bool, optional
            The memory must be one physical allocation of the device, and not pages that are mapped end to
            end: for a library that registers or shares memory by its physical allocation. It then comes
            from a region, which `release_free_regions` gives back once it is free.

        Returns
        -------
        Buffer
            The allocation. It is freed when the buffer is collected, and earlier by `Buffer.free`.

        Raises
        ------
        OutOfMemoryError
            If no free chunk is large enough and no region could be added.
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is malformed, negative or above 2**63 - 1, or if `alignment` is not a power of
            two or is too large; with `contiguous`, if the allocator joins regions that lie end to end,
            or inside `tag`, whose memory is mapped.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: as `allocate_raw`, and one Python object.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate("3 MiB")
        >>> buffer.nbytes, allocator.requested_size(buffer.ptr)
        (3145728, 3145728)
        """

    def allocate_many(
        self, sizes: Iterable[SupportsIndex], stream: StreamLike | None = None
    ) -> NDArray[np.uint64]:
        """Make one allocation for each size: all of them, or none.

        Parameters
        ----------
        sizes : iterable of int
            The sizes in bytes. An array of 64-bit ints goes fastest.
        stream : int, stream object or None, optional
            As in `allocate_raw`, for all of them.

        Returns
        -------
        numpy.ndarray of uint64, shape (len(sizes),)
            The addresses, in the order of `sizes`; 0 for 0 bytes.

        Raises
        ------
        OutOfMemoryError
            If one of them does not fit. Those before it have been freed again.
        TypeError
            If a size is not an int, or `stream` is not a stream.
        ValueError
            If a size is negative or above 2**63 - 1.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: about 20 ns a size on a hit, half of `allocate_raw` from Python.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> len(allocator.allocate_many([256, 512, 1024]))
        3
        """

    def _swap_noter(self, noter: Callable[[int], object] | None) -> Callable[[int], object] | None:
        """From now on `noter(allocation_id)` is called after each allocation. Returns the previous
        noter, or None.
        """

    def release_free_regions(self) -> int:
        """Give every region without a live allocation back to the sub-allocator.

        Returns
        -------
        int
            The bytes given back.

        Raises
        ------
        SubAllocatorError
            If the sub-allocator fails to take a region back. It is offered again by the next call of
            `release_free_regions` or `close`.

        Notes
        -----
        If regions grow, the next one starts small again. Source: `BFCAllocator::DeallocateFreeRegions`,
        TensorFlow's behaviour, 2.7, which upstream runs only when memory has run out.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
        >>> allocator.deallocate_raw(allocator.allocate_raw(100))
        >>> allocator.release_free_regions()
        2097152
        """

    def empty_cache(self) -> int:
        """Call `release_free_regions`, under PyTorch's name.

        Returns
        -------
        int
            The bytes given back.
        """

    def close(self) -> None:
        """Give every region back, with live allocations or without.

        Addresses and buffers must not be used afterwards. Closing twice does nothing.

        Raises
        ------
        BufferError
            If another object still holds a view of the memory (an array, a memoryview). The allocator
            stays open then.
        SubAllocatorError
            If the device fails, or the sub-allocator fails to take a region back. The allocator is
            closed all the same; closing it again offers those regions again.

        Notes
        -----
        Cost: waits for the streams that still use freed memory; one call of the sub-allocator for each region.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...
    def __del__(self) -> None: ...
