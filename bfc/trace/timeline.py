"""What a replay looks like over time: a few hundred rows of figures."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Timeline:
    """Figures of a replay over time. Each row says what was true after one event.

    The events are cut into equal intervals. Of each there are rows for its last event, and for
    those at which `live`, `in_use` and `reserved` are largest and smallest. So no peak is lost:
    `timeline.reserved.max()` is the replay's, and a line through the rows shows every interval's
    extent.

    Attributes
    ----------
    event : numpy.ndarray of uint64
        The index of the event, in rising order.
    live : numpy.ndarray of uint64
        The bytes that the trace has asked for and not freed.
    in_use : numpy.ndarray of uint64
        The bytes of the chunks in use in the allocator.
    reserved : numpy.ndarray of uint64
        The bytes that the allocator holds in regions, or has mapped.
    largest_free : numpy.ndarray of uint64
        The bytes of the largest free chunk.
    refused : numpy.ndarray of uint64
        The allocations that were refused so far, in this replay.
    driver_calls : numpy.ndarray of uint64
        The calls of the sub-allocator so far, in this replay: `alloc` and `free`, and for mapped
        memory `reserve`, `create`, `map` (one for each page), `set_access`, `unmap`, `release` and
        `unreserve`. Those that were refused count too, waits for streams do not.

    Notes
    -----
    If more was in use or reserved in the middle of an event than after it, that event has a row of
    its own for it, before the other.

    Examples
    --------
    >>> import bfc
    >>> trace = bfc.Trace(op=[0, 0, 1, 1], id=[0, 1, 0, 1], size=[1000, 300, 0, 0])
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
    >>> timeline = trace.replay(allocator, samples=400).timeline
    >>> timeline.live.tolist(), timeline.in_use.tolist()
    ([1000, 1300, 300, 0], [1024, 1536, 512, 0])
    """

    event: NDArray[np.uint64]
    live: NDArray[np.uint64]
    in_use: NDArray[np.uint64]
    reserved: NDArray[np.uint64]
    largest_free: NDArray[np.uint64]
    refused: NDArray[np.uint64]
    driver_calls: NDArray[np.uint64]

    @classmethod
    def _of_rows(cls, rows: bytes) -> Timeline:
        """From rows of seven numbers."""
        import numpy as np

        columns = np.frombuffer(rows, np.uint64).reshape(-1, len(fields(cls))).T.copy()
        return cls(*columns)

    def __len__(self) -> int:
        return len(self.event)


@dataclass(frozen=True, eq=False)
class Occupancy:
    """Which addresses were in use when: a map, events to the right and addresses upward.

    Attributes
    ----------
    cells : numpy.ndarray of float32, shape (columns, rows)
        The part of a cell's bytes that was in use, on the average of its events: from 0 to 1.
    ends : numpy.ndarray of uint64, shape (columns,)
        The number of events before the end of each column.
    ranges : tuple of (int, int)
        The address and the bytes of each range that the rows cover, in rising order. They are laid
        end to end, without the addresses in between, which were never used.
    cell_bytes : int
        The bytes of a row. The last row may cover fewer.
    """

    cells: NDArray[np.float32]
    ends: NDArray[np.uint64]
    ranges: tuple[tuple[int, int], ...]
    cell_bytes: int
