"""Every trace and random churn through TensorFlow's compiled BFC and ours, in turn:
`python -m bench.replay`.

Both replay in one compiled loop, on a device of integers. Ours keeps the handle of each allocation,
TensorFlow's its address, which is all that its interface has. They take turns of several
passes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import bfc
from bench.histories import churns, traces
from bench.peers.tensorflow import PeerUnavailable, TensorFlowBFC, build
from bench.report import geometric_mean, machine, say, spread

LIMIT = 80 << 30
MOST_PASSES, FEWEST_EVENTS = 400, 20_000
TURNS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--passes", type=int, default=9, help="timed passes of each, 3 at least (default: 9)"
    )
    passes = max(TURNS, parser.parse_args().passes)
    say(machine())
    try:
        build()
    except PeerUnavailable as error:
        say(f"without TensorFlow: {error}")
        run_alone(passes)
        return
    run_beside_tensorflow(passes)


def histories() -> Iterator[tuple[str, bfc.Trace]]:
    yield from traces()
    yield from churns()


def passes_for(trace: bfc.Trace, passes: int) -> int:
    """More of a short trace: one pass of 72 events measures the clock."""
    return min(MOST_PASSES, passes * max(1, FEWEST_EVENTS // len(trace)))


def run_beside_tensorflow(passes: int) -> None:
    say(
        f"{'ns an event, min / median / max':24}{'bfc':>26}{'TensorFlow 2.21':>26}"
        "   ratio of medians"
    )
    ratios, medians = [], []
    for name, trace in histories():
        ours, theirs = time_both(trace, passes_for(trace, passes))
        ratios.append(statistics.median(theirs) / statistics.median(ours))
        medians.append(statistics.median(ours))
        say(f"{name:24}{spread(ours):>26}{spread(theirs):>26}   {ratios[-1]:5.2f}")
    say(
        f"geometric mean: ratio {geometric_mean(ratios):.2f}, "
        f"ours {geometric_mean(medians):.1f} ns an event, "
        f"{1e3 / geometric_mean(medians):.0f} million events a second"
    )


def time_both(trace: bfc.Trace, passes: int) -> tuple[list[float], list[float]]:
    """ns an event of each pass, in turns. The first pass of a turn is not counted: it finds the
    other's data in the caches. Raises where a placement differs."""
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator(LIMIT), strict=True)
    ours: list[float] = []
    theirs: list[float] = []
    with allocator, TensorFlowBFC(memory_limit=LIMIT, capacity=LIMIT) as peer:
        for _ in range(TURNS):
            replays = [trace.replay(allocator) for _ in range(1 + passes // TURNS)]
            rivals = [
                peer.replay(trace.op, trace.id, trace.size) for _ in range(1 + passes // TURNS)
            ]
            if not (rivals[-1][0] == replays[-1].addresses).all():
                raise AssertionError("the placement differs from TensorFlow's")
            ours += [replay.ns_per_event for replay in replays[1:]]
            theirs += [seconds * 1e9 / len(trace) for _addresses, seconds in rivals[1:]]
    return ours, theirs


def run_alone(passes: int) -> None:
    say(f"{'ns an event, min / median / max':24}{'bfc':>26}")
    medians = []
    for name, trace in histories():
        with bfc.BFCAllocator(bfc.SimulatedSubAllocator(LIMIT), strict=True) as allocator:
            times = [
                trace.replay(allocator).ns_per_event for _ in range(1 + passes_for(trace, passes))
            ][1:]
        medians.append(statistics.median(times))
        say(f"{name:24}{spread(times):>26}")
    say(f"geometric mean: {geometric_mean(medians):.1f} ns an event")


if __name__ == "__main__":
    main()
