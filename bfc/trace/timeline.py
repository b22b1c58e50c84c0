"""The figures of a replay over time, in a few hundred rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from bfc.libraries import NDArray, client, frame_of, np
from bfc.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class Timeline:
    """Figures of a replay over time. Each row has the figures after one event.

    The events are cut into equal intervals. Each interval has rows for its last event, and for the
    events at which `live`, `in_use` and `reserved` are largest and smallest. So no peak is lost:
    `timeline.reserved.max()` is the peak of the replay, and a line through the rows shows the
    extent of every interval.

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
    If more was in use or reserved in the middle of an event than after it, the event has another
    row for that, before the usual one.

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
        columns = np.frombuffer(rows, np.uint64).reshape(-1, len(fields(cls))).T.copy()
        return cls(*columns)

    def _at(self, events: NDArray[np.intp]) -> Timeline:
        """The same rows, if the replay was of these events of a longer trace."""
        return replace(self, event=events[self.event.astype(np.intp)].astype(np.uint64))

    def __len__(self) -> int:
        return len(self.event)

    def to_frame(self) -> DataFrame:
        """The rows as a table of pandas.

        Returns
        -------
        pandas.DataFrame
            A column for each attribute.

        Raises
        ------
        DeviceUnavailableError
            If pandas is not installed.

        Examples
        --------
        >>> import bfc
        >>> trace = bfc.Trace(op=[0, 0, 1, 1], id=[0, 1, 0, 1], size=[1000, 300, 0, 0])
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> frame = trace.replay(allocator, samples=400).timeline.to_frame()
        >>> int(frame["live"].max())
        1300
        """
        return frame_of({field.name: getattr(self, field.name) for field in fields(self)})

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw `reserved`, `in_use` and `live` over the events, with matplotlib.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw. The default is a new figure.

        Returns
        -------
        matplotlib.axes.Axes
            What was drawn on, to be changed, shown or saved: `ax.figure.savefig("run.png")`.

        Raises
        ------
        DeviceUnavailableError
            If matplotlib is not installed.

        Notes
        -----
        The largest value of each line is in the legend. A dotted line marks the first refusal.

        Examples
        --------
        >>> import bfc
        >>> trace = bfc.Trace(op=[0, 0, 1, 1], id=[0, 1, 0, 1], size=[1000, 300, 0, 0])
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> ax = trace.replay(allocator, samples=400).timeline.plot()  # doctest: +SKIP
        """
        if ax is None:
            ax = pyplot_of().subplots(layout="constrained")[1]
        for name in ("reserved", "in_use", "live"):
            values = getattr(self, name)
            most = format_bytes(int(values.max(initial=0)))
            label = f"{name.replace('_', ' ')}, at most {most}"
            ax.step(self.event, values, where="post", label=label, linewidth=1.2)
        refused = self.refused > 0
        if refused.any():
            first = int(self.event[refused.argmax()])
            ax.axvline(first, color="black", linestyle=":", label=f"refused by event {first}")
        set_axes(ax)
        ax.legend(**ABOVE)
        return ax


#: Where a legend hides no line: above the axes.
ABOVE: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False}


def pyplot_of() -> Any:
    """`matplotlib.pyplot`. Raises DeviceUnavailableError where matplotlib is not installed."""
    client("matplotlib", "matplotlib")
    return client("matplotlib.pyplot", "matplotlib")


def set_axes(ax: Axes) -> None:
    """Events to the right, and round numbers of bytes upward, from 0 to above all that is drawn."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    top = int(ax.dataLim.y1) if ax.dataLim.height > 0 else 0
    step = 1 << max(top // 8, 1).bit_length()  # a power of two: 4 to 8 round numbers
    ax.yaxis.set_major_locator(MultipleLocator(step))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _short(round(value))))
    ax.set_ylim(0, max(1.05 * top, 1))
    ax.set_xlabel("event")


def sampled(figures: Sequence[NDArray[Any]], samples: int) -> NDArray[np.int64]:
    """The rows to show of many: all, if they are at most `samples`. Else of each interval the last,
    and those where a figure is largest and smallest."""
    count, each = len(figures[0]), 1 + 2 * len(figures)
    if count <= samples:
        return np.arange(count)
    edges = np.arange(max(samples // each, 1) + 1) * count // max(samples // each, 1)
    chosen = {count - 1}
    for first, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        chosen.add(end - 1)
        for figure in figures:
            chosen.add(first + int(figure[first:end].argmax()))
            chosen.add(first + int(figure[first:end].argmin()))
    return np.array(sorted(chosen), np.int64)


def _short(nbytes: int) -> str:
    """Like `format_bytes`, but "256 MiB" instead of "256.00 MiB"."""
    return format_bytes(nbytes).replace(".00 ", " ").replace(".0 ", " ")


@dataclass(frozen=True, eq=False)
class Occupancy:
    """A map of the addresses in use over time: events to the right and addresses upward.

    Attributes
    ----------
    cells : numpy.ndarray of float32, shape (columns, rows)
        The fraction of a cell's bytes that was in use, averaged over its events: from 0 to 1.
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
