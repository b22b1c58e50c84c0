"""Memory with two ends next to memory with one, ours and the nightly's: `python -m bench.ends`.

Each trace and random churn is replayed in turn under today's rules of XLA and JAX: from one end,
with what is larger than the median from the upper end, as a program may order it, and with every
other allocation from there by chance, which no processor can predict. The compiled allocator of
TensorFlow's nightly build does the same, and every address is compared. Its wheel (645 MB) goes
from the index after some time; without it ours is measured alone.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

import bfc
from bench.histories import chosen, churns, traces
from bench.peers.tensorflow import NIGHTLY, PeerUnavailable, TensorFlowBFC, build
from bench.report import geometric_mean, machine, say, spread
from bfc.allocators._play import Run
from bfc.trace.trace import ALLOCATE

LIMIT = 80 << 30
WAYS = ("one end", "two, by size", "two, by chance")
TURNS, FEWEST_EVENTS, MOST_PASSES = 9, 20_000, 400

#: The address of each event, and the seconds in the loop.
Played = tuple[NDArray[np.uint64], float]


def main(arguments: list[str] | None = None) -> None:
    listed = chosen(dict([*traces(), *churns()]), __doc__, arguments)
    say(machine())
    has_nightly = is_built()
    names = [*WAYS] + [f"nightly, {name}" for name in WAYS] * has_nightly
    heads = "".join(f"{name:>26}" for name in names)
    say(f"{'ns an event, min / median / max':24}{heads}   medians: by size / one, by chance / one")
    ratios: list[list[float]] = []
    for name, trace in listed.items():
        times = times_in_turn(trace, has_nightly)
        medians = [statistics.median(each) for each in times]
        theirs = medians[len(WAYS) :]
        ratios.append([medians[1] / medians[0], medians[2] / medians[0]])
        ratios[-1] += [their / ours for their, ours in zip(theirs, medians, strict=False)]
        cells = "".join(f"{spread(each):>26}" for each in times)
        say(f"{name:24}{cells}   {'  '.join(f'{ratio:6.3f}' for ratio in ratios[-1])}")
    means = [geometric_mean(list(column)) for column in zip(*ratios, strict=True)]
    say(f"geometric means of the ratios: {'  '.join(f'{mean:.3f}' for mean in means)}")
    say("the ratios behind the first two: the nightly's medians to ours, one for each way")


def is_built() -> bool:
    try:
        build(version=NIGHTLY)
    except PeerUnavailable as error:
        say(f"without the nightly: {error}")
        return False
    return True


def ends_of(trace: bfc.Trace) -> list[NDArray[np.uint8] | None]:
    """The end of each event, of each way."""
    by_size = trace.size > np.median(trace.size[trace.op == ALLOCATE])
    by_chance = np.random.default_rng(0).integers(0, 2, len(trace))
    return [None, by_size.astype(np.uint8), by_chance.astype(np.uint8)]


def times_in_turn(trace: bfc.Trace, has_nightly: bool) -> list[list[float]]:
    """ns an event of each pass, of each way: ours, then the nightly's. The first pass of each turn
    is not counted."""
    passes = 1 + min(MOST_PASSES, 1 + FEWEST_EVENTS // len(trace))
    times: list[list[float]] = [[] for _ in range(len(WAYS) * (1 + has_nightly))]
    with ExitStack() as stack:
        ways = [
            (
                ends,
                stack.enter_context(our_bfc(ends is not None)),
                stack.enter_context(nightly(ends is not None)) if has_nightly else None,
            )
            for ends in ends_of(trace)
        ]
        for _ in range(TURNS):
            for at, (upper, ours, theirs) in enumerate(ways):
                mine = [replay(ours, trace, upper) for _ in range(passes)]
                times[at] += [seconds * 1e9 / len(trace) for _, seconds in mine[1:]]
                if theirs is None:
                    continue
                rivals = [theirs.replay(trace.op, trace.id, trace.size, upper=upper) for _ in mine]
                times[len(WAYS) + at] += [seconds * 1e9 / len(trace) for _, seconds in rivals[1:]]
                for (places, _), (others, _) in zip(mine, rivals, strict=True):
                    if not np.array_equal(places, others):
                        raise AssertionError("the placement differs from the nightly's")
    return times


def our_bfc(has_ends: bool) -> bfc.BFCAllocator:
    return bfc.BFCAllocator(
        bfc.SimulatedSubAllocator(LIMIT),
        memory_limit=LIMIT,
        strict=True,
        tensorflow="2.23",
        enable_spatial_partitioning=has_ends,
    )


def nightly(has_ends: bool) -> TensorFlowBFC:
    return TensorFlowBFC(
        version=NIGHTLY, memory_limit=LIMIT, capacity=LIMIT, spatial_partitioning=has_ends
    )


def replay(allocator: bfc.BFCAllocator, trace: bfc.Trace, ends: NDArray[np.uint8] | None) -> Played:
    """As `trace.replay`, with the end of each allocation: a trace does not say it."""
    if ends is None:
        played = trace.replay(allocator)
        return played.addresses, played.seconds
    addresses = np.empty(len(trace), np.uint64)
    handles = np.empty(int(trace.id.max(initial=0)) + 1, np.uint32)
    run = Run(
        allocator,
        trace.op,
        trace.id,
        trace.size,
        np.zeros(len(trace), np.uint16),
        handles,
        addresses,
    )
    run.set_ends(ends)
    run.play()
    return addresses, run.seconds


if __name__ == "__main__":
    main(sys.argv[1:])
