"""Pools with the words that users of their libraries know, on simulated devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bfc


def refuses(pool: bfc.BFCAllocator | bfc.CachingAllocator, nbytes: float | str) -> str:
    """ "refused" if such a request runs out of memory, else "fits"; it is freed at once."""
    made = pool.try_allocate(nbytes if isinstance(nbytes, str) else int(nbytes))
    return "refused" if made is None else "fits"


class TorchPool:
    """PyTorch's caching allocator on a simulated GPU, with the names of `torch.cuda`."""

    def __init__(self, capacity: int | str, settings: str = "", **options: Any) -> None:
        self.device = bfc.SimulatedSubAllocator(capacity)
        options = {"strict": not options.get("stitch")} | options  # exactly as PyTorch
        self.pool = bfc.CachingAllocator(self.device, settings=settings, **options)
        self._graphs: list[bfc.GraphPool] = []

    @contextmanager
    def graph(self, stream: int) -> Iterator[None]:
        """As `torch.cuda.graph`, with one pool for all graphs."""
        with self.pool.capture(stream, pool=self._graphs[-1] if self._graphs else None) as graph:
            self._graphs.append(graph)
            yield

    def drop_graphs(self) -> None:
        """As the deletion of all of them."""
        while self._graphs:
            self._graphs.pop().release()

    def empty(self, nbytes: float | str, stream: int = 0) -> bfc.Buffer:
        """As `torch.empty`: memory that is freed with the last reference to what is returned."""
        return self.pool.allocate(nbytes if isinstance(nbytes, str) else int(nbytes), stream)

    def refuses(self, nbytes: float | str) -> str:
        """As the function."""
        return refuses(self.pool, nbytes)

    def empty_cache(self) -> None:
        self.pool.empty_cache()

    def stat(self, name: str) -> int:
        """An entry of `torch.cuda.memory_stats()`."""
        return self.pool.memory_stats()[name]

    @property
    def allocated(self) -> int:
        return self.stat("allocated_bytes.all.current")

    @property
    def reserved(self) -> int:
        return self.stat("reserved_bytes.all.current")

    @property
    def cached(self) -> int:
        """What is reserved, and belongs to no tensor."""
        return self.reserved - self.allocated

    @property
    def peak_allocated(self) -> int:
        return self.stat("allocated_bytes.all.peak")

    @property
    def peak_reserved(self) -> int:
        return self.stat("reserved_bytes.all.peak")


class BFCPool:
    """TensorFlow's and JAX's allocator on a simulated GPU, with the words of its log."""

    def __init__(self, capacity: int | str, **options: Any) -> None:
        self.device = bfc.SimulatedSubAllocator(capacity, supports_coalescing=True)
        self.pool = bfc.BFCAllocator(self.device, **options)

    def allocate(self, nbytes: float | str) -> bfc.Buffer:
        return self.pool.allocate(nbytes if isinstance(nbytes, str) else int(nbytes))

    def refuses(self, nbytes: float | str) -> str:
        """As the function."""
        return refuses(self.pool, nbytes)

    @property
    def in_use(self) -> int:
        """InUse of the log."""
        return self.pool.stats().bytes_in_use

    @property
    def peak_in_use(self) -> int:
        """MaxInUse of the log."""
        return self.pool.stats().peak_bytes_in_use

    @property
    def reserved(self) -> int:
        """What the pool has taken from the device."""
        return self.pool.stats().pool_bytes


class PinnedPool:
    """PyTorch's allocator of pinned host memory."""

    def __init__(self, settings: str = "", **options: Any) -> None:
        self.device = bfc.SimulatedSubAllocator("1 TiB")
        self.pool = bfc.PinnedAllocator(self.device, settings, **options)

    def empty(self, nbytes: float | str) -> bfc.Buffer:
        """As `torch.empty(..., pin_memory=True)`."""
        return self.pool.allocate(nbytes if isinstance(nbytes, str) else int(nbytes))

    @property
    def taken(self) -> int:
        """The bytes of the host that are pinned."""
        return int(self.pool.host_memory_stats()["allocated_bytes.current"])
