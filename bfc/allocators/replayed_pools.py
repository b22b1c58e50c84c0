"""The private pools of a replay: as long as the recorded program held them, an allocator does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from bfc.allocators import _captured
from bfc.libraries import NDArray, np
from bfc.pytorch.words import (
    CAPTURE_BEGINS,
    CAPTURE_ENDS,
    HOLD,
    LET_GO,
    POOL_MARKS,
    SCOPE_BEGINS,
    STREAM_JOINS,
    STREAM_LEAVES,
)

#: The first number that is tried where a recorded id is in use already.
APART = 1 << 32


class ReplayedPools:
    """What a replay on `allocator` does with private pools. Row 0 of `ids` is that of the default
    pool; `actions` are (event, action, pool, stream) by event, as `Run.set_pools` takes them.

    The attribute `ids` has the ids in the allocator: as recorded, but for pools that it has
    already, and holds.
    """

    def __init__(
        self, allocator: Any, ids: NDArray[np.uint64], actions: Iterable[tuple[int, int, int, int]]
    ) -> None:
        self._allocator = allocator
        self._actions = list(actions)[::-1]
        recorded = [(int(first), int(second)) for first, second in np.asarray(ids)]
        self._names = recorded[:1]
        others, numbers = set(recorded), itertools.count(APART)
        for name in recorded[1:]:
            is_held = allocator._pool_use_count(name) > 0
            while is_held:
                number = next(numbers)
                name = (number, 0) if name[0] else (0, number)  # of the same kind
                is_held = name in others or allocator._pool_use_count(name) > 0
            self._names.append(name)
        self.ids = np.array(self._names, np.uint64)
        #: By pool: how many references the replay has, and how many captures and scopes are open.
        self._held: Counter[int] = Counter()
        self._captures: Counter[int] = Counter()
        self._scopes: Counter[int] = Counter()

    def next_action(self, last: int) -> int:
        """The event before which something happens next, or `last`."""
        return self._actions[-1][0] if self._actions else last

    def is_captured(self, pool: int) -> bool:
        """Whether a graph is being captured into a pool."""
        return self._captures[pool] > 0

    def act(self, event: int) -> None:
        """Does all that happens up to an event, before it is played."""
        while self._actions and self._actions[-1][0] <= event:
            _, action, pool, stream = self._actions.pop()
            if action == HOLD:
                self._hold(pool)
            elif POOL_MARKS[action] == LET_GO:
                self._drop(pool)
            elif POOL_MARKS[action] in (STREAM_JOINS, STREAM_LEAVES):
                is_captured = POOL_MARKS[action] == STREAM_JOINS
                _captured.take_as_captured(self._allocator, self._names[pool], stream, is_captured)
            else:
                self._open_or_close(POOL_MARKS[action], pool)

    def empty(self, pool: int) -> None:
        """Gives back what a pool caches that nobody holds any more."""
        try:
            self._allocator._empty_pool(self._names[pool])
        except RuntimeError:  # not one alone while a scope is open: all that nobody holds goes
            self._allocator.release_free_regions()

    def let_go(self) -> None:
        """Ends all that is open, and lets all pools go: the replay is over."""
        if self._allocator.closed:
            return
        for pool in range(1, len(self._names)):
            for mark, opened in ((CAPTURE_ENDS, self._captures), ("", self._scopes)):
                while opened[pool]:
                    self._open_or_close(mark, pool)
            self._drop(pool)

    def _hold(self, pool: int) -> None:
        self._allocator.begin_allocate_to_pool(self._names[pool], "none")
        self._held[pool] += 1
        self._allocator.end_allocate_to_pool(self._names[pool])

    def _drop(self, pool: int) -> None:
        while self._held[pool]:
            self._held[pool] -= 1
            self._allocator.release_pool(self._names[pool])

    def _open_or_close(self, mark: str, pool: int) -> None:
        """Follows a capture or a scope. An allocator has one open scope of a pool at a time."""
        is_capture = mark in (CAPTURE_BEGINS, CAPTURE_ENDS)
        opened = self._captures if is_capture else self._scopes
        others = self._captures[pool] + self._scopes[pool]
        if mark in (CAPTURE_BEGINS, SCOPE_BEGINS):
            if not others:
                self._allocator.begin_allocate_to_pool(self._names[pool], "none")
                self._held[pool] += 1
            opened[pool] += 1
            if is_capture:
                self._allocator.mark_capture_begin()
        elif opened[pool]:
            opened[pool] -= 1
            if is_capture:
                _captured.forget_captured(self._allocator, self._names[pool])
                self._allocator.mark_capture_end()
            if others == 1:
                self._allocator.end_allocate_to_pool(self._names[pool])
