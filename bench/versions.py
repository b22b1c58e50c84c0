"""PyTorch 2.15's rules next to 2.11's: `python -m bench.versions`.

Each trace is replayed under both in turn. First on a device whose addresses rise, where both place
alike, and the newer rules must cost nothing. Then on one of 1.15 times the peak of live bytes that
hands freed addresses out again, where they do not: there, too, the time of an event, and how many
blocks lie elsewhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

import bfc
from bench.histories import chosen, traces
from bench.report import geometric_mean, machine, say, spread
from bfc.pytorch.rules import VERSIONS

LIMIT = 80 << 30
ROOM = 1.15
TURNS, FEWEST_EVENTS, MOST_PASSES = 9, 20_000, 400


def rising(_trace: bfc.Trace, torch: str) -> bfc.CachingAllocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator(LIMIT), strict=True, torch=torch)


def reusing(trace: bfc.Trace, torch: str) -> bfc.CachingAllocator:
    device = bfc.SimulatedSubAllocator(int(trace.peak_bytes_live() * ROOM), reuse=True)
    return bfc.CachingAllocator(device, strict=True, torch=torch)


def main(arguments: list[str] | None = None) -> None:
    listed = chosen(dict(traces()), __doc__, arguments)
    say(machine())
    compare("addresses rise", listed, rising, fresh=False)
    compare(f"addresses come again, device of {ROOM} times the peak", listed, reusing, fresh=True)


def compare(
    title: str,
    listed: dict[str, bfc.Trace],
    make: Callable[[bfc.Trace, str], bfc.CachingAllocator],
    fresh: bool,
) -> None:
    """`fresh`: each pass begins with an empty allocator, so that segments come and go."""
    say(f"\n{title}")
    heads = "".join(f"{version:>26}" for version in VERSIONS)
    say(f"{'ns an event, min / median / max':24}{heads}   ratio of medians   blocks elsewhere")
    ratios = []
    for name, trace in listed.items():
        makers = [partial(make, trace, version) for version in VERSIONS]
        old, new = times_in_turn(trace, makers, fresh)
        ratios.append(statistics.median(new) / statistics.median(old))
        placed = [make(trace, version) for version in VERSIONS]
        first, second = (trace.replay(allocator).addresses for allocator in placed)
        elsewhere = np.count_nonzero((first != second) & (trace.op == 0))
        say(f"{name:24}{spread(old):>26}{spread(new):>26}{ratios[-1]:19.3f}{elsewhere:19,}")
    say(f"geometric mean of the ratios: {geometric_mean(ratios):.3f}")


def times_in_turn(
    trace: bfc.Trace, makers: Sequence[Callable[[], bfc.CachingAllocator]], fresh: bool
) -> list[list[float]]:
    """ns an event of each pass, by maker. The first pass of each turn is not counted."""
    passes = 1 if fresh else min(MOST_PASSES, 1 + FEWEST_EVENTS // len(trace))
    allocators = [make() for make in makers]
    times: list[list[float]] = [[] for _ in makers]
    for _ in range(TURNS):
        for at, make in enumerate(makers):
            for count in range(1 + passes):
                allocator = make() if fresh else allocators[at]
                spent = trace.replay(allocator).ns_per_event
                if count:
                    times[at].append(spent)
    return times


if __name__ == "__main__":
    main()
