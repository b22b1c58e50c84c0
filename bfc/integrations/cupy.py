"""CuPy arrays in a bfc pool.

    with bfc.use(a, "cupy"): ...                                    # process-wide
    with cupy.cuda.using_allocator(bfc.integrations.cupy.allocator(a)): ...   # this thread only

`MemoryPool` and `PinnedMemoryPool` have the methods of CuPy's classes of these names, for programs
that hold such a pool today.

Memory that CuPy's own pool has cached stays there; `cupy.get_default_memory_pool().
free_all_blocks()` gives it back. CuPy's memory hooks see only that pool.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, SupportsFloat, SupportsIndex

from bfc.allocators._allocator import Allocator
from bfc.integrations._shared import (
    Allocators,
    OneOrMore,
    by_device,
    client,
    no_allocator,
    refuse_unknown_capture,
    require_runtime,
)
from bfc.pinned import PinnedAllocator
from bfc.policies._caching import CachingAllocator
from bfc.units import format_bytes, parse_bytes

INSTALL = "cupy-cuda13x   (cupy-cuda12x for CUDA 12)"


def lookups(cupy: Any) -> tuple[Callable[[], int], Callable[[], Any]]:
    """The functions that return CuPy's current device and current stream."""
    return cupy.cuda.device.get_device_id, cupy.cuda.get_current_stream


def allocator(allocators: OneOrMore) -> Callable[[int], Any]:
    """Make what `cupy.cuda.using_allocator` and `cupy.cuda.set_allocator` take.

    Parameters
    ----------
    allocators : Allocator, list of Allocator, or dict of int to Allocator
        One, or one for each device.

    Returns
    -------
    callable
        It takes a number of bytes and returns a `MemoryPointer`, and raises what
        `Allocator.allocate` does, DeviceUnavailableError if the device has no allocator, or
        RuntimeError if the stream captures a CUDA graph outside of the allocator's `capture`.

    Raises
    ------
    DeviceUnavailableError
        If CuPy is missing, or its CUDA runtime refuses the driver, as it does the emulated one.

    Notes
    -----
    The memory is for CuPy's current stream, on its current device. It is freed when the last array
    on it is collected, and reused after the work that is queued on that stream then. If another
    stream uses it, call `allocator.record_stream(array.data.ptr, stream)`. The stream object is
    kept until the memory is reused; the owner of an `ExternalStream` must keep the stream itself.

    Cost: as `allocate`, and two small objects of CuPy; on a stream other than the default one, a
    driver call, which asks whether it captures. Source: `cupy.cuda.memory`.
    """
    pools = by_device(allocators)
    cupy = client("cupy", INSTALL)
    memory, pointer = _memory_class(cupy), cupy.cuda.MemoryPointer
    current_device, current_stream = lookups(cupy)
    require_runtime("cupy", current_device, pools)

    def allocate(nbytes: int) -> Any:
        device = current_device()
        pool = pools.get(device) or no_allocator(pools, device)
        stream = current_stream()
        # Reading `ptr` is cheaper than asking the object, which only other streams need.
        handle = stream.ptr
        if handle:
            refuse_unknown_capture(pool, handle)
        buffer = pool.allocate(nbytes, stream if handle else 0)
        # An explicit device saves CuPy a driver call, which would fail for an address of 0.
        return pointer(memory(buffer.ptr, nbytes, buffer, device), 0)

    return allocate


@functools.cache
def _memory_class(cupy: Any) -> Any:
    """What stands behind CuPy's pointers, with the `free` of `cupy.cuda.PooledMemory`."""

    class Memory(cupy.cuda.UnownedMemory):  # type: ignore[misc]
        __slots__ = ()

        def free(self) -> None:
            """Frees it. A second call does nothing."""
            self.ptr = 0  # type: ignore[misc]  # the base has it
            self._owner.free()

    return Memory


def serve(allocators: Allocators) -> Callable[[], None]:
    """Lets CuPy allocate from these allocators. The result puts CuPy's previous allocator back,
    unless another was set meanwhile."""
    ours = allocator(allocators)
    cuda = client("cupy", INSTALL).cuda
    before = _for_all_threads(lambda: _swap(cuda, ours))
    return lambda: _for_all_threads(lambda: _swap(cuda, before, only_if=ours))


def _swap(cuda: Any, new: Any, only_if: Any = None) -> Any:
    old = cuda.get_allocator()
    if only_if is None or old is only_if:
        cuda.set_allocator(new)
    return old


def _for_all_threads(action: Callable[[], Any]) -> Any:
    """Runs an action in a thread of its own. In this thread `using_allocator` may be active, and
    then CuPy shows that allocator, and not the one for all threads."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(action).result()


class MemoryPool:
    """bfc's allocators, with the methods of `cupy.cuda.MemoryPool`.

    Parameters
    ----------
    allocators : Allocator, list of Allocator, or dict of int to Allocator
        One, or one for each device. With several, each method is about CuPy's current device. A
        single one may be on any device; only `malloc` needs CUDA and CuPy.

    Notes
    -----
    What differs from CuPy's pool: all blocks are cut from larger regions, so that `total_bytes`
    rises in larger steps, and a `BFCAllocator` that does not grow has all of it at once.

    Examples
    --------
    >>> import bfc
    >>> a = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> pool = bfc.integrations.cupy.MemoryPool(a)
    >>> pool.set_limit(size=512 << 20)
    >>> block = a.allocate("30 MiB")
    >>> pool.used_bytes() >> 20, pool.free_bytes() >> 20, pool.total_bytes() >> 20
    (30, 0, 30)
    >>> block.free()
    >>> pool.n_free_blocks()
    1
    >>> pool.free_all_blocks()
    >>> pool.total_bytes(), pool.get_limit() >> 20
    (0, 512)
    """

    def __init__(self, allocators: OneOrMore) -> None:
        self._given = allocators
        self._malloc: Callable[[int], Any] | None = None
        self._pools: Allocators = {}
        if not isinstance(allocators, Allocator):
            self._pools = by_device(allocators)

    def __repr__(self) -> str:
        return f"<bfc.integrations.cupy.MemoryPool over {self._given!r}>"

    def malloc(self, size: int) -> Any:
        """Allocate memory on CuPy's current device, for its current stream.

        `cupy.cuda.set_allocator(pool.malloc)` lets CuPy take its memory here.

        Parameters
        ----------
        size : int
            In bytes.

        Returns
        -------
        cupy.cuda.MemoryPointer
            It frees the memory when the last array on it is collected.

        Raises
        ------
        OutOfMemoryError
            If there is no memory.
        ValueError
            If `size` is negative, or the allocator's memory is not that of a CUDA device.
        DeviceUnavailableError
            If CuPy is missing, or the device has no allocator.
        """
        if self._malloc is None:
            self._malloc = allocator(self._given)
        return self._malloc(size)

    def used_bytes(self) -> int:
        """The bytes in blocks that are in use.

        Returns
        -------
        int
            Each block counts with the size that its request was rounded up to.
        """
        return self._current().stats().bytes_in_use

    def free_bytes(self) -> int:
        """The bytes that were taken from the device and are not in use.

        Returns
        -------
        int
            `total_bytes() - used_bytes()`.
        """
        stats = self._current().stats()
        return stats.pool_bytes - stats.bytes_in_use

    def total_bytes(self) -> int:
        """The bytes that were taken from the device.

        Returns
        -------
        int
            In use or free.
        """
        return self._current().stats().pool_bytes

    def n_free_blocks(self) -> int:
        """How many free blocks there are.

        Returns
        -------
        int
            Free blocks that lie side by side in one region are one.

        Notes
        -----
        Cost: a snapshot, O(blocks).
        """
        return sum(1 for _ in self._current().snapshot().free_chunks())

    def free_all_blocks(self, stream: object = None) -> None:
        """Give what is free back to the device.

        Parameters
        ----------
        stream : object, optional
            CuPy would give back the blocks of this stream alone. Here those of all streams are.

        Notes
        -----
        A region stays as long as a block in it is in use.
        """
        self._current().release_free_regions()

    def free_all_free(self) -> None:
        """Do what `free_all_blocks` does, under a name that CuPy calls deprecated."""
        warnings.warn(
            "free_all_free is deprecated: use free_all_blocks", DeprecationWarning, stacklevel=2
        )
        self.free_all_blocks()

    def set_limit(
        self, size: SupportsIndex | str | None = None, fraction: SupportsFloat | None = None
    ) -> None:
        """Limit what may be taken from the device.

        Parameters
        ----------
        size : int or str, optional
            In bytes, or a text such as "4 GiB". 0 removes the limit.
        fraction : float, optional
            Of the device's memory, from 0 to 1, instead of `size`. 0 removes the limit.

        Raises
        ------
        ValueError
            If both are given, or one is out of range.
        NotImplementedError
            If the allocator is a `BFCAllocator`, whose limit is chosen where it is made.

        Notes
        -----
        What was taken already stays, as in CuPy: `free_all_blocks` gives back what is free.
        """
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot both be given")
        pool = self._current()
        if not isinstance(pool, CachingAllocator):
            raise NotImplementedError(
                f"the limit of a {type(pool).__name__} is chosen where it is made: "
                f"memory_limit={format_bytes(pool.memory_limit)!r}"
            )
        if size is None:
            pool.set_memory_fraction(float(fraction or 0.0) or 1.0)
        else:
            _set_limit(pool, parse_bytes(size))

    def get_limit(self) -> int:
        """The limit on what may be taken from the device.

        Returns
        -------
        int
            In bytes; 0 if there is none but the device's own memory.
        """
        pool = self._current()
        if isinstance(pool, CachingAllocator) and pool.memory_fraction == 1.0:
            return 0
        return pool.memory_limit

    def _current(self) -> Allocator:
        """The only allocator, or that of CuPy's current device."""
        if isinstance(self._given, Allocator):
            return self._given
        if len(self._pools) == 1:
            return next(iter(self._pools.values()))
        device = lookups(client("cupy", INSTALL))[0]()
        return self._pools.get(device) or no_allocator(self._pools, device)


def _set_limit(pool: CachingAllocator, size: int) -> None:
    """Sets a limit in bytes by a fraction of the device: the pool truncates the product."""
    pool.set_memory_fraction(1.0)
    total = pool.memory_limit
    if 0 < size < total:
        fraction = size / total
        while int(fraction * total) < size:
            fraction = math.nextafter(fraction, 1.0)
        pool.set_memory_fraction(fraction)


class PinnedMemoryPool:
    """A `bfc.PinnedAllocator`, with the methods of `cupy.cuda.PinnedMemoryPool`.

    Parameters
    ----------
    allocator : PinnedAllocator, optional
        Where the memory comes from; a new one if it is left out.

    Raises
    ------
    TypeError
        If `allocator` is not a `PinnedAllocator`.

    Examples
    --------
    >>> import bfc
    >>> pinned = bfc.PinnedAllocator(bfc.HostSubAllocator())
    >>> pool = bfc.integrations.cupy.PinnedMemoryPool(pinned)
    >>> pinned.allocate(1000).free()
    >>> pool.n_free_blocks()
    1
    >>> pool.free_all_blocks()
    >>> pool.n_free_blocks()
    0
    """

    def __init__(self, allocator: PinnedAllocator | None = None) -> None:
        if allocator is not None and not isinstance(allocator, PinnedAllocator):
            raise TypeError(f"expected a PinnedAllocator, not {type(allocator).__name__}")
        self._allocator = PinnedAllocator() if allocator is None else allocator

    def malloc(self, size: int) -> Any:
        """Allocate pinned memory on the host.

        `cupy.cuda.set_pinned_memory_allocator(pool.malloc)` lets CuPy take its memory here.

        Parameters
        ----------
        size : int
            In bytes.

        Returns
        -------
        cupy.cuda.PinnedMemoryPointer
            It frees the memory when it is collected.

        Raises
        ------
        OutOfMemoryError
            If there is no memory.
        DeviceUnavailableError
            If CuPy is missing.
        """
        pointer = client("cupy", INSTALL).cuda.PinnedMemoryPointer
        return pointer(_Pinned(self._allocator.allocate(size), size), 0)

    def n_free_blocks(self) -> int:
        """How many free blocks there are.

        Returns
        -------
        int
            Blocks that were freed, and are kept.
        """
        figures = self._allocator.host_memory_stats()
        return int(figures["allocations.current"] - figures["active_requests.current"])

    def free_all_blocks(self) -> None:
        """Give what is free back to the host."""
        self._allocator.empty_cache()


class _Pinned:
    """What CuPy reads of the memory behind a pointer. It keeps the buffer."""

    def __init__(self, buffer: Any, size: int) -> None:
        self.ptr = buffer.ptr
        self.size = size
        self.buffer = buffer

    def free(self) -> None:
        """Frees it. A second call does nothing."""
        self.ptr = 0
        self.buffer.free()
