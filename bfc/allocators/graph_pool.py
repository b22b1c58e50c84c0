"""The memory of captured CUDA graphs: private pools that last as long as a graph is kept."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from bfc.allocators import _captured
from bfc.snapshots.snapshot import Snapshot

_numbers = itertools.count(1)


class PrivatePool:
    """Memory of an allocator that only a part of a program is given: a pool with an id.

    Parameters
    ----------
    allocator : Allocator
        Whose memory it is.
    pool_id : tuple of (int, int)
        PyTorch's id of the pool.

    Attributes
    ----------
    allocator : Allocator
        As given.
    id : tuple of (int, int)
        As given.
    """

    def __init__(self, allocator: Any, pool_id: tuple[int, int]) -> None:
        self.allocator: Any = allocator
        self.id = pool_id
        self._released = False

    def __repr__(self) -> str:
        state = "released" if self._released else f"{self.use_count()} uses"
        return f"<bfc.{type(self).__name__} {self.id}, {state}>"

    def use_count(self) -> int:
        """How many references the pool has.

        Returns
        -------
        int
            One of its own, and one more for each use that is under way, and for each graph that
            shares it; 0 once it is released.
        """
        uses: int = self.allocator._pool_use_count(self.id)
        return uses

    def snapshot(self) -> Snapshot:
        """The allocator's snapshot, with this pool's regions only.

        Returns
        -------
        Snapshot
            See `Snapshot.of_pool`.
        """
        found: Snapshot = self.allocator.snapshot().of_pool(self.id)
        return found


class GraphPool(PrivatePool):
    """The memory that one captured graph was given: what `capture` of an allocator enters with.

    Keep it as long as the graph, and release it afterwards. Until then nothing that the graph was
    given goes to anybody but later captures into the same pool.

    Parameters
    ----------
    allocator : CachingAllocator or BFCAllocator
        Whose memory it is.
    shared : GraphPool, optional
        Of an earlier capture, to share its pool.

    Attributes
    ----------
    allocator : CachingAllocator or BFCAllocator
        Whose memory it is.
    id : tuple of (int, int)
        PyTorch's id of the pool of a graph: (n, 0). Graphs that share a pool have the same.

    Raises
    ------
    RuntimeError
        If `shared` was released.
    ValueError
        If `shared` belongs to another allocator.

    Notes
    -----
    It is not released when it is collected: the graph may live on, and would use memory that others
    have by then. A `ResourceWarning` is reported instead.

    Examples
    --------
    >>> import bfc
    >>> device = bfc.SimulatedSubAllocator("1 GiB")
    >>> allocator = bfc.CachingAllocator(device)
    >>> with allocator.capture(7) as pool:
    ...     number = device.captures.begin(7)
    ...     inside = allocator.allocate(1000, stream=7)
    ...     device.captures.end(7)
    >>> [region.pool_id == pool.id for region in allocator.snapshot().regions]
    [True]
    >>> inside.free()
    >>> pool.release()
    >>> allocator.empty_cache()
    2097152
    """

    def __init__(self, allocator: Any, shared: GraphPool | None = None) -> None:
        if shared is not None and shared.allocator is not allocator:
            raise ValueError(f"{shared!r} belongs to another allocator: capture without pool=")
        if shared is not None and shared.released:
            raise RuntimeError(f"{shared!r} cannot be shared any more: capture without pool=")
        super().__init__(allocator, (next(_numbers), 0) if shared is None else shared.id)
        self._capturing = False

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return self._released

    def release(self) -> None:
        """Say that the graph is gone, and will not be launched again. Releasing twice does nothing.

        Once no graph holds the pool, what it caches goes back with the next `empty_cache`, or when
        memory runs out. Allocations that are still live stay.

        Raises
        ------
        RuntimeError
            If the graph is being captured.
        """
        if self._released:
            return
        if self._capturing and not self.allocator.closed:
            raise RuntimeError(f"{self!r} is in use: a graph is being captured into it")
        self._released = True
        if not self.allocator.closed:
            self.allocator.release_pool(self.id)

    def release_with(self, graph: object) -> None:
        """Release the pool when an object is collected: the graph, or whatever keeps it.

        Parameters
        ----------
        graph : object
            Anything that can be referred to weakly, such as a graph of cuda.core or PyTorch, or an
            object of yours that holds the graph. `cupy.cuda.Graph` cannot be.

        Raises
        ------
        TypeError
            If `graph` cannot be referred to weakly.
        """
        weakref.finalize(graph, self.release).atexit = False

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing():  # `sys` may be None then
            return
        if not getattr(self, "_released", True) and not self.allocator.closed:
            warnings.warn(
                f"{self!r} was collected, but not released: its memory stays until the allocator "
                f"closes. Call release() once its graph is gone",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )


class Capture:
    """What `with allocator.capture(stream):` enters: diverts allocations into a pool."""

    def __init__(self, allocator: Any, stream: int, shared: GraphPool | None = None) -> None:
        self._allocator = allocator
        self._stream = stream
        self._shared = shared
        self._pool: GraphPool | None = None

    def __enter__(self) -> GraphPool:
        if self._pool is not None:
            raise RuntimeError("this capture was entered already: call allocator.capture() again")
        pool = GraphPool(self._allocator, self._shared)
        self._pool, pool._capturing = pool, True  # first: behind the beginning nothing may fail
        try:
            _captured.begin_capture(self._allocator, pool.id, self._stream)
        except BaseException:
            self._pool, pool._capturing, pool._released = None, False, True
            raise
        return pool

    def __exit__(self, kind: object, value: object = None, traceback: object = None) -> None:
        pool = self._pool
        if pool is None or not pool._capturing:
            raise RuntimeError(
                "this capture was not entered: write `with allocator.capture(stream):`"
            )
        pool._capturing = False
        if self._allocator.closed:
            return
        try:
            _captured.end_capture(self._allocator, pool.id)
        finally:
            if kind is not None:
                pool.release()  # there is no graph
