"""What a snapshot of an allocator knows, as a trace: its history, or what it holds."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from bfc.pytorch.writer import content
from bfc.trace import Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bfc.snapshots.snapshot import Frame, Snapshot


class StackTable:
    """Tuples of frames as rows of a parent and a frame."""

    def __init__(self) -> None:
        self.frames: dict[tuple[str, int, str], int] = {}
        self.rows: dict[tuple[int, int], int] = {(0, 0): 0}
        self._known: dict[tuple[Frame, ...], int] = {(): 0}

    def number_of(self, stack: tuple[Frame, ...]) -> int:
        """The number of a stack whose innermost frame stands first."""
        if stack not in self._known:
            at = 0
            for frame in reversed(stack):
                number = self.frames.setdefault((*frame,), len(self.frames))
                # Row 0 is the empty stack, and no other row may look like it.
                at = self.rows.setdefault((at, number + 1), len(self.rows))
            self._known[stack] = at
        return self._known[stack]

    def as_rows(self) -> list[tuple[int, int]]:
        """What a trace takes as `stacks`."""
        return [(parent, max(frame - 1, 0)) for parent, frame in self.rows]


def trace_of(snapshot: Snapshot) -> Trace:
    """A snapshot as a run: its history if it has one, else what is live, as allocations.

    Parameters
    ----------
    snapshot : Snapshot
        Of an allocator of bfc.

    Returns
    -------
    Trace
        With owners and stacks, as far as the snapshot has them.
    """
    if len(snapshot._history_columns()):
        return trace_of_history(snapshot)
    return trace_of_live(snapshot)[0]


def trace_of_history(snapshot: Snapshot) -> Trace:
    """The run that the history of a snapshot recorded.

    Parameters
    ----------
    snapshot : Snapshot
        One with a history.

    Returns
    -------
    Trace
        Its events, with owners and stacks.

    Raises
    ------
    TraceError
        If the history cannot be written in PyTorch's format and read back.
    """
    written = content(
        snapshot.device,
        snapshot._region_columns(),
        snapshot._history_columns(),
        snapshot.settings,
    )
    return Trace.from_torch(io.BytesIO(written))


def trace_of_live(snapshot: Snapshot) -> tuple[Trace, NDArray[np.uint64], list[int]]:
    """The blocks of a snapshot as allocations, in the order in which they were made.

    Parameters
    ----------
    snapshot : Snapshot
        What is in use in it, or waits for a stream, is taken.

    Returns
    -------
    tuple of (Trace, numpy.ndarray of uint64, list of int)
        The trace; the address of each event's allocation; and the handle of each of its streams.
    """
    import numpy as np

    chunks = sorted(snapshot.live_chunks(), key=lambda chunk: (chunk.allocation_id, chunk.ptr))
    table = StackTable()
    owners: dict[str, int] = {"": 0}
    streams: dict[int, int] = {0: 0}
    for region in snapshot.regions:
        streams.setdefault(region.stream, len(streams))
    made = Trace(
        np.zeros(len(chunks), np.uint8),
        np.arange(len(chunks)),
        np.array([chunk.requested_size for chunk in chunks], np.uint64),
        np.array([streams.setdefault(chunk.stream, len(streams)) for chunk in chunks], np.int64),
        owner=np.array([owners.setdefault(chunk.owner, len(owners)) for chunk in chunks], np.int64),
        stack=np.array([table.number_of(chunk.frames) for chunk in chunks], np.int64),
        owners=list(owners),
        frames=list(table.frames),
        stacks=np.array(table.as_rows()),
    )
    return made, np.array([chunk.ptr for chunk in chunks], np.uint64), list(streams)
