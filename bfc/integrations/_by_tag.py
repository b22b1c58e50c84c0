"""The memory that another library's calls put to sleep: tags of the pools that serve PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from bfc.allocators._tagged import tag_everything
from bfc.errors import OutOfMemoryError
from bfc.integrations import _torch_cuda
from bfc.integrations._shared import client
from bfc.policies._caching import CachingAllocator
from bfc.suballocators.cuda import CUDASubAllocator


def serving_books(needed_by: str) -> _torch_cuda.Books:
    """The pools that serve PyTorch. Raises RuntimeError where none does."""
    books = _torch_cuda.serving()
    if books is None:
        raise RuntimeError(
            f"{needed_by} needs a pool of bfc in PyTorch's place, and there is none: start the "
            "program with `bfc run`, or call bfc.integrations.torch.install() before CUDA is used"
        )
    return books


def serving_pool(needed_by: str, device: int | None = None) -> CachingAllocator:
    """The pool of one of PyTorch's devices: of the current one for None. Raises RuntimeError where
    none serves PyTorch."""
    books = serving_books(needed_by)
    if device is None:
        device = client("torch", "torch").cuda.current_device()
    return books.open(device)


class _Scope(NamedTuple):
    """One that is open: what this thread allocates belongs to a tag, or to none."""

    owner: ByTag
    tag: str | None
    entered: ExitStack
    late: list[CachingAllocator]  #: those that were made while it was open

    def enter(self, pool: CachingAllocator) -> None:
        self.entered.enter_context(pool.tag(self.tag))  # which refuses other things than names
        if self.tag is not None:
            self.owner._used.setdefault(self.tag, set()).add(pool)


_scopes: ContextVar[tuple[_Scope, ...]] = ContextVar("scopes of other libraries' tags", default=())
#: Whose new pools enter the scopes that are open.
_followed: list[_torch_cuda.Books] = []


def _enter_scopes(pool: CachingAllocator) -> None:
    """The first tensor on another device makes its pool, while scopes are open."""
    for scope in _scopes.get():
        scope.enter(pool)
        scope.late.append(pool)


def _open_pools() -> Iterable[CachingAllocator]:
    books = _torch_cuda.serving()
    return () if books is None else books.pools.values()


class ByTag:
    """Tags of one library, on all devices. Other tags of the pools are left alone."""

    def __init__(self, library: str) -> None:
        self._library = library
        self._used: dict[str, set[CachingAllocator]] = {}  # by tag, those that have memory of it
        self.margin = 0
        self._is_followed = False

    @contextmanager
    def scope(self, tag: str | None) -> Iterator[None]:
        """What this thread allocates belongs to a tag, or to none: on all devices."""
        pool, books = serving_pool(self._library), serving_books(self._library)
        if books not in _followed:
            books.for_each(_enter_scopes)  # no scope is open yet
            _followed.append(books)
        before, late = _scopes.get(), list[CachingAllocator]()
        try:
            with ExitStack() as entered:
                scope = _Scope(self, tag, entered, late)
                for it in {pool, *books.pools.values()}:
                    scope.enter(it)
                _scopes.set((*before, scope))
                yield
        finally:
            _scopes.set(before)
            for it in late:  # what this scope has left is as it was when it was entered
                for around in before:
                    around.enter(it)

    def cover(self, tag: str) -> None:
        """From now on what is allocated outside of every scope belongs to a tag: in all threads,
        and on all devices."""
        books = _torch_cuda.serving()
        assert books is not None
        used = self._used.setdefault(tag, set())

        def cover(pool: CachingAllocator) -> None:
            tag_everything(pool, tag)
            used.add(pool)

        books.for_each(cover)

    @property
    def tags(self) -> list[str]:
        """Those that were used."""
        return list(self._used)

    def sleep(self, tags: Iterable[str], keep: Mapping[str, Any]) -> None:
        """Puts tags to sleep, on each device all of them or none. The contents of those in `keep`
        go where it says, the others' are dropped. A tag that was never used has no memory."""
        wanted = [tag for tag in tags if tag in self._used]
        for pool in self._pools_of(wanted):
            here = [tag for tag in wanted if pool in self._used[tag]]
            pool.sleep(
                keep={tag: keep[tag] for tag in here if tag in keep},
                drop=[tag for tag in here if tag not in keep],
            )

    def wake(self, tags: Iterable[str]) -> None:
        """Wakes tags, on each device all of them or none. Who calls another library's functions
        expects a RuntimeError where there is no room, so it is PyTorch's own error."""
        wanted = [tag for tag in tags if tag in self._used]
        try:
            for pool in self._pools_of(wanted):
                pool.wake(*(tag for tag in wanted if pool in self._used[tag]))
        except OutOfMemoryError as error:
            raise client("torch", "torch").OutOfMemoryError(str(error)) from error

    def keep_margin(self, nbytes: int) -> None:
        """Has the pools leave so much of each device free when they take memory."""
        if nbytes < 0:
            raise ValueError(f"a margin is a number of bytes from 0 on, not {nbytes}")
        books = serving_books(self._library)
        self.margin = nbytes
        if self._is_followed:
            for pool in books.pools.values():
                self._tell(pool, nbytes)
        else:
            self._is_followed = True
            books.for_each(lambda pool: self._tell(pool, self.margin))  # those to come, too

    @contextmanager
    def margin_off(self) -> Iterator[None]:
        """While memory is asked for that was counted before."""
        pools = list(_open_pools()) if self.margin else []
        for pool in pools:
            self._tell(pool, 0)
        try:
            yield
        finally:
            for pool in pools:
                self._tell(pool, self.margin)

    @staticmethod
    def _tell(pool: CachingAllocator, nbytes: int) -> None:
        if isinstance(pool.sub_allocator, CUDASubAllocator):
            pool.sub_allocator._leave_free(nbytes)

    def bytes_in_use(self) -> int:
        """What lives in the tags, awake or asleep."""
        return sum(
            pool.tag_stats()[tag]["bytes_in_use"]
            for tag, pools in self._used.items()
            for pool in pools
        )

    def _pools_of(self, tags: list[str]) -> list[CachingAllocator]:
        return list(dict.fromkeys(pool for tag in tags for pool in self._used[tag]))
