"""One trace under several policies: the figures of each."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from bfc.allocators._allocator import Allocator
from bfc.snapshots.snapshot import Snapshot
from bfc.study.counted import Counted
from bfc.suballocators import SubAllocator
from bfc.trace import Trace

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
        Given a new sub-allocator, it returns a new allocator over it.
    """

    name: str
    make_allocator: Callable[[SubAllocator], Allocator]


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


@contextlib.contextmanager
def unwatched(events: int) -> Iterator[Start]:
    """A progress that is not shown."""
    yield lambda: None


def compare(
    trace: Trace,
    policies: Iterable[Policy],
    make_source: Callable[[], Counted],
    *,
    name: str = "",
    passes: int = 3,
) -> list[Row]:
    """The figures of one trace under several policies.

    Parameters
    ----------
    trace : Trace
        What is replayed.
    policies : iterable of Policy
        One row each.
    make_source : callable
        Returns a new sub-allocator for each allocator.
    name : str, optional
        The trace's name in the rows.
    passes : int, optional
        How often the trace is replayed for its time, at least 1.

    Returns
    -------
    list of Row
        In the order of the policies.

    Notes
    -----
    Cost: `passes` + 1 replays for each policy.

    Examples
    --------
    >>> import bfc
    >>> from bfc.study.counted import CountedSimulated
    >>> rows = compare(
    ...     bfc.Trace([0, 1], [0, 0], [5 << 20, 0]),
    ...     [Policy("bfc", bfc.BFCAllocator), Policy("caching", bfc.CachingAllocator)],
    ...     lambda: CountedSimulated("1 GiB"),
    ... )
    >>> [(row.policy, row.peak_bytes_reserved >> 20) for row in rows]
    [('bfc', 1024), ('caching', 20)]
    """
    return [measure(trace, policy, make_source, name=name, passes=passes) for policy in policies]


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


def at_its_fullest(
    trace: Trace, policy: Policy, make_source: Callable[[], SubAllocator]
) -> Snapshot:
    """A policy's memory at the event of a trace after which most is live."""
    with policy.make_allocator(make_source()) as allocator:
        trace[: trace.fullest_event() + 1].replay(allocator)
        return allocator.snapshot()
