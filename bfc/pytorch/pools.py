"""What becomes of private pools over a recording: who captures into them, and when nobody holds
them any more.

A history of bfc says so. One of PyTorch does not, and what can be told is that a pool whose
segments went back had been let go: until then they stay, whoever empties the cache (PyTorch's
behaviour, 2.13 and 2.14). So its end is taken to be right before the first of them goes. An
allocation from the pool shows that it is held again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bfc.pytorch._recording import Event
from bfc.pytorch.words import CAPTURE_BEGINS, CAPTURE_ENDS, LET_GO, POOL_MARKS


class PoolMarks:
    """Follows the private pools of a history, if there `are_some`.

    The attribute `rows` has lists of event, mark, pool and stream: the number of the event before
    which it came, the index of what happened in `words.POOL_MARKS`, the pool's number, and the
    handle of the stream that it is about, or 0.
    """

    def __init__(self, events: Sequence[Event], are_some: bool) -> None:
        self.rows: list[list[int]] = []
        marked = events if are_some else ()
        #: The pools of which the history itself says what becomes of them.
        self._said = {event.pool for event in marked if event.action in POOL_MARKS}
        self._let_go: set[int] = set()
        self._captures = 0
        #: The pools that segments went back from, in the run of entries that is going on.
        self._going: dict[int, None] = {}

    def mark(self, at: int, action: str, pool: int, stream: int) -> None:
        """Notes an entry of the history, before an event."""
        if pool:
            self.rows.append([at, POOL_MARKS.index(action), pool, stream])
            self._captures += (action == CAPTURE_BEGINS) - (action == CAPTURE_ENDS)

    def allocated(self, pool: int) -> None:
        """An allocation from a pool: it is held."""
        self._let_go.discard(pool)

    def went(self, at: int, pool: int) -> None:
        """A segment of a pool goes back, before an event."""
        self._going[pool] = None
        if pool and pool not in self._said and pool not in self._let_go:
            self._let_go.add(pool)
            self.rows.append([at, POOL_MARKS.index(LET_GO), pool, 0])

    def released(self, pool: int) -> Iterator[int]:
        """What a replay is to empty for a run of entries that emptied one pool, or for the default
        one everything: 0, or the numbers of pools. While a graph is captured, that may be only what
        has been let go (PyTorch's behaviour, 2.15)."""
        if pool or self._captures <= 0 or 0 in self._going:
            yield pool
        else:
            yield from self._going

    def run_ends(self) -> None:
        """The run of entries that free segments ends."""
        self._going.clear()
