"""Memory with two ends next to memory with one, ours and the nightly's: `python -m bench.ends`.

Each trace and random churn is replayed in turn under today's rules of XLA and JAX: from one end,
and with every other allocation, by chance, from the upper end. The compiled allocator of
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

LIMIT = 80 << 30
TURNS, FEWEST_EVENTS, MOST_PASSES = 9, 20_000, 400

#: The address of each event, and the seconds in the loop.
Played = tuple[NDArray[np.uint64], float]


def main(arguments: list[str] | None = None) -> None:
    listed = chosen(dict([*traces(), *churns()]), __doc__, arguments)
    say(machine())
    has_nightly = is_built()
    names = ["one end", "two ends"] + ["nightly, one", "nightly, two"] * has_nightly
    heads = "".join(f"{name:>26}" for name in names)
    say(
        f"{'ns an event, min / median / max':24}{heads}   two / one"
        + "   nightly / ours" * has_nightly
    )
    ratios: list[list[float]] = []
    for name, trace in listed.items():
        times = times_in_turn(trace, has_nightly)
        medians = [statistics.median(each) for each in times]
        ratios.append(
            [medians[1] / medians[0], *(medians[i + 2] / medians[i] for i in (0, 1) if has_nightly)]
        )
        cells = "".join(f"{spread(each):>26}" for each in times)
        say(f"{name:24}{cells}   {'  '.join(f'{ratio:6.3f}' for ratio in ratios[-1])}")
    means = [geometric_mean(list(column)) for column in zip(*ratios, strict=True)]
    say(f"geometric means of the ratios: {'  '.join(f'{mean:.3f}' for mean in means)}")


def is_built() -> bool:
    try:
        build(version=NIGHTLY)
    except PeerUnavailable as error:
        say(f"without the nightly: {error}")
        return False
    return True


def times_in_turn(trace: bfc.Trace, has_nightly: bool) -> list[list[float]]:
    """ns an event of each pass: of ours from one end and from two, and of the nightly's. The first
    pass of each turn is not counted."""
    ends = np.random.default_rng(0).integers(0, 2, len(trace)).astype(np.uint8)
    passes = 1 + min(MOST_PASSES, 1 + FEWEST_EVENTS // len(trace))
    times: list[list[float]] = [[] for _ in range(4 if has_nightly else 2)]
    with ExitStack() as stack:
        ours = [stack.enter_context(our_bfc(upper)) for upper in (False, True)]
        theirs = [stack.enter_context(nightly(upper)) for upper in (False, True) if has_nightly]
        for _ in range(TURNS):
            for at, upper in enumerate((None, ends)):
                mine = [replay(ours[at], trace, upper) for _ in range(passes)]
                times[at] += [seconds * 1e9 / len(trace) for _, seconds in mine[1:]]
                if not has_nightly:
                    continue
                rivals = [
                    theirs[at].replay(trace.op, trace.id, trace.size, upper=upper) for _ in mine
                ]
                times[at + 2] += [seconds * 1e9 / len(trace) for _, seconds in rivals[1:]]
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
