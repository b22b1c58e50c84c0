"""One trace under several policies: the figures of each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bfc.allocators._allocator import Allocator
from bfc.libraries import frame_of_rows
from bfc.snapshots.snapshot import Snapshot
from bfc.suballocators import SubAllocator
from bfc.trace import Timeline, Trace
from bfc_tools.study import figure
from bfc_tools.study.counting import Counted, CountedSimulated
from bfc_tools.study.python_policy import PythonPolicy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

#: Called at the beginning of a replay. It returns what the replay is to call with the number of
#: events that are done, or None.
Start = Callable[[], Callable[[int], None] | None]
#: Called with the number of events in all replays together, which are run inside of it.
Progress = Callable[[int], AbstractContextManager[Start]]


@dataclass(frozen=True)
class Policy:
    """A policy to compare.

    Attributes
    ----------
    name : str
        What its row says.
    make_allocator : callable
        Given a new sub-allocator, it returns a new allocator over it, or a new `PythonPolicy`.
    """

    name: str
    make_allocator: Callable[[SubAllocator], Allocator | PythonPolicy]


@dataclass(frozen=True)
class Row:
    """The figures of one trace under one policy. Sizes are in bytes.

    Attributes
    ----------
    trace : str
        The trace's name.
    policy : str
        The policy's name.
    events : int
        The number of events in the trace.
    peak_bytes_live : int
        The most that was asked for and not freed.
    peak_bytes_in_use : int
        The most in chunks that were handed out.
    peak_bytes_reserved : int
        The most in regions.
    regions_taken : int
        How often a region was taken from the sub-allocator. Mapped memory is not in regions.
    driver_calls : int
        The calls to the sub-allocator that take memory and give it back, in regions or mapped.
        Refused ones count; what the end of the run gives back does not.
    driver_calls_by_kind : dict of str to int
        The same by kind: "alloc", "free", "reserve", "unreserve", "create", "release", "map" (one
        for each page), "access" and "unmap". A kind without calls is not in it.
    fragmentation : float or None
        The share of the free bytes outside the largest free block at the end; None if nothing is
        free.
    ns_per_event : float
        The fastest pass, in nanoseconds.
    refused : int
        The allocations that were refused.
    """

    trace: str
    policy: str
    events: int
    peak_bytes_live: int
    peak_bytes_in_use: int
    peak_bytes_reserved: int
    regions_taken: int
    driver_calls: int
    driver_calls_by_kind: dict[str, int]
    fragmentation: float | None
    ns_per_event: float
    refused: int


class Comparison(tuple[Row, ...]):
    """The rows of several policies, in their order.

    Attributes
    ----------
    timelines : dict of str to Timeline
        The figures over time by the policy's name; empty if `compare` was not given `samples`.
    """

    timelines: dict[str, Timeline]

    def to_frame(self) -> DataFrame:
        """The rows as a table of pandas.

        Returns
        -------
        pandas.DataFrame
            A column for each attribute of `Row`.

        Raises
        ------
        DeviceUnavailableError
            If pandas is not installed.
        """
        return frame_of_rows(Row, self)

    def plot(self, ax: Axes | None = None, *, width: float = 6.4) -> Axes:
        """Draw the timelines in one figure, as `bfc.study.plot` does.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw. The default is a new figure.
        width : float, optional
            The width of a new figure in inches.

        Returns
        -------
        matplotlib.axes.Axes
            What was drawn on.

        Raises
        ------
        DeviceUnavailableError
            If matplotlib is not installed.
        ValueError
            If there are no timelines: give `samples` to `compare`.
        """
        if not self.timelines:
            raise ValueError("there are no timelines to draw: compare(..., samples=400) keeps them")
        return figure.plot(self.timelines, ax, width=width)


@contextlib.contextmanager
def unwatched(events: int) -> Iterator[Start]:
    """A progress that is not shown."""
    yield lambda: None


def compare(
    trace: Trace,
    policies: Iterable[Policy] | Mapping[str, Callable[[SubAllocator], Allocator | PythonPolicy]],
    make_source: Callable[[], Counted] | int | str,
    *,
    name: str = "",
    passes: int = 3,
    samples: int | None = None,
) -> Comparison:
    """The figures of one trace under several policies.

    Parameters
    ----------
    trace : Trace
        What is replayed.
    policies : iterable of Policy, or mapping of str to callable
        One row each: names, and what makes the allocator or `PythonPolicy` over a sub-allocator. A
        class is such a callable.
    make_source : callable, int or str
        Returns a new sub-allocator for each allocator. A size, such as "34 GiB", stands for
        simulated devices of so many bytes.
    name : str, optional
        The trace's name in the rows.
    passes : int, optional
        How often the trace is replayed for its time, at least 1.
    samples : int, optional
        Keep `timelines` of at most so many rows each.

    Returns
    -------
    Comparison
        A tuple of `Row`, in the order of the policies.

    Notes
    -----
    Cost: `passes` + 1 replays for each policy, and one more with `samples`.

    Examples
    --------
    >>> import bfc
    >>> trace = bfc.Trace([0, 1], [0, 0], [5 << 20, 0])
    >>> rows = compare(trace, {"bfc": bfc.BFCAllocator, "caching": bfc.CachingAllocator}, "1 GiB")
    >>> [(row.policy, row.peak_bytes_reserved >> 20) for row in rows]
    [('bfc', 1024), ('caching', 20)]
    """
    if isinstance(policies, Mapping):
        policies = [Policy(*item) for item in policies.items()]
    make = make_source if callable(make_source) else partial(CountedSimulated, make_source)
    listed = list(policies)
    found = Comparison(measure(trace, it, make, name=name, passes=passes) for it in listed)
    found.timelines = {}
    if samples is not None:
        found.timelines |= {it.name: over_time(trace, it, make, samples) for it in listed}
    return found


def measure(
    trace: Trace,
    policy: Policy,
    make_source: Callable[[], Counted],
    *,
    name: str = "",
    passes: int = 3,
    progress: Progress = unwatched,
) -> Row:
    """The figures of one trace under one policy.

    All but the time are of one replay on a new allocator. The time is the best of several on
    another, each of which frees what it leaves live.
    """
    closed = trace.closed()
    with progress(len(trace) + len(closed) * passes) as start:
        source = make_source()
        with policy.make_allocator(source) as allocator:
            first = trace.replay(allocator, progress=start())
            fragmentation = allocator.stats().fragmentation
            calls = dict(source.calls_by_kind)
        with policy.make_allocator(make_source()) as allocator:
            times = [closed.replay(allocator, progress=start()).ns_per_event for _ in range(passes)]
    return Row(
        name,
        policy.name,
        len(trace),
        first.peak_bytes_live,
        first.peak_bytes_in_use,
        first.peak_bytes_reserved,
        source.regions_taken,
        sum(calls.values()),
        calls,
        None if math.isnan(fragmentation) else fragmentation,
        min(times),
        first.failed,
    )


def over_time(
    trace: Trace, policy: Policy, make_source: Callable[[], SubAllocator], samples: int
) -> Timeline:
    """The figures of a trace over time under a policy, in at most so many rows."""
    with policy.make_allocator(make_source()) as allocator:
        timeline = trace.replay(allocator, samples=samples).timeline
    assert timeline is not None
    return timeline


def at_its_fullest(
    trace: Trace, policy: Policy, make_source: Callable[[], SubAllocator]
) -> Snapshot:
    """A policy's memory at the event of a trace after which most is live."""
    with policy.make_allocator(make_source()) as allocator:
        trace[: trace.fullest_event() + 1].replay(allocator)
        return allocator.snapshot()
