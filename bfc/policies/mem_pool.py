"""Private pools: memory that one part of a program allocates from, and no other part."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from bfc.allocators.graph_pool import PrivatePool
from bfc.interpreter._process import is_exiting
from bfc.policies._caching import CachingAllocator

_numbers = itertools.count(1)
#: Each thread's number, kept as an int: there may be no memory to make one when a scope is left.
_here = threading.local()


class MemPool(PrivatePool):
    """A private pool of a CachingAllocator: memory that only `use_mem_pool` allocates from.

    Parameters
    ----------
    allocator : CachingAllocator
        Whose memory it is.
    use_on_oom : bool, optional
        Let other requests use its free memory when they would be refused.
    no_split : bool, optional
        Hand out its chunks whole.

    Attributes
    ----------
    allocator : CachingAllocator
        As given.
    id : tuple of (int, int)
        PyTorch's id of a pool that a user made: (0, n).

    Raises
    ------
    TypeError
        If `allocator` is not a CachingAllocator.

    Notes
    -----
    The pool is released by `release()`, or when it is collected. What it caches is given back at
    once; what is live is given back after it was freed, when memory runs out or `empty_cache()` is
    called. Source: `torch.cuda.MemPool` of PyTorch 2.11, PyTorch's behaviour, 2.14.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> pool = bfc.MemPool(allocator)
    >>> with bfc.use_mem_pool(pool):
    ...     inside = allocator.allocate(1000)
    >>> outside = allocator.allocate(1000)
    >>> [region.pool_id == pool.id for region in allocator.snapshot().regions]
    [True, False]
    """

    def __init__(
        self, allocator: CachingAllocator, use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        if not isinstance(allocator, CachingAllocator):
            raise TypeError(
                f"a MemPool is made of a bfc.CachingAllocator, not {type(allocator).__name__}: "
                f"TensorFlow's policy has private pools for captured graphs only"
            )
        super().__init__(allocator, (0, next(_numbers)))
        self._released = True
        allocator._create_pool(self.id, bool(use_on_oom), bool(no_split))
        self._released = False

    def release(self) -> None:
        """End the pool. Releasing twice does nothing.

        Raises
        ------
        RuntimeError
            If it is in use.
        """
        if self._released:
            return
        if self.use_count() > 1 and not self.allocator.closed:
            raise RuntimeError(f"{self!r} is in use: leave its use_mem_pool first")
        self._released = True
        if self.allocator.closed:
            return
        try:
            self.allocator._set_use_on_oom(self.id, False)
            self.allocator.release_pool(self.id)
        except BaseException:
            self._released = False
            raise
        try:
            self.allocator._empty_pool(self.id, or_later=True)
        finally:
            self.allocator._set_no_split(self.id, False)

    def __del__(self, is_exiting: Callable[[], bool] = is_exiting) -> None:
        # a default outlives the names of this module, which are None at the end of Python
        if is_exiting() or getattr(self, "_released", True):
            return
        self.release()


class use_mem_pool:  # noqa: N801 - it reads as a function
    """A context manager: what this thread allocates from the pool's allocator comes from the pool.

    It can be nested, and the inner one wins. Other threads are not affected.

    Parameters
    ----------
    pool : MemPool
        Which one.

    Raises
    ------
    TypeError
        If `pool` is not a MemPool.
    RuntimeError
        If the pool was released, or the `with` block is left in a thread that has not entered it.
    ClosedError
        If the pool's allocator is closed.
    """

    def __init__(self, pool: MemPool) -> None:
        if not isinstance(pool, MemPool):
            raise TypeError(f"use_mem_pool takes a bfc.MemPool, not {type(pool).__name__}")
        self._pool = pool
        self._entered: list[int] = []

    def __enter__(self) -> MemPool:
        if self._pool._released:
            raise RuntimeError(f"{self._pool!r} cannot be used any more: make another")
        me = _here.ident = threading.get_ident()
        self._entered.append(me)
        try:
            self._pool.allocator.begin_allocate_to_pool(self._pool.id, "thread")
        except BaseException:
            self._entered.remove(me)
            raise
        return self._pool

    def __exit__(self, kind: object, value: object = None, traceback: object = None) -> None:
        try:
            self._entered.remove(getattr(_here, "ident", 0))
        except ValueError:
            raise RuntimeError(
                "this use_mem_pool was not entered in this thread: "
                "write `with bfc.use_mem_pool(pool):`"
            ) from None
        self._pool.allocator.end_allocate_to_pool(self._pool.id)
        self._pool.allocator.release_pool(self._pool.id)
