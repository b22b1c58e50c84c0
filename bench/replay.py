"""Every trace and random churn through the compiled originals and ours, in turn:
`python -m bench.replay`. BFC stands beside TensorFlow's, the caching policy beside PyTorch's.

All replay in one compiled loop, on a device of integers. Ours keep the handle of each allocation,
the originals its address, which is all that their interfaces have. They take turns of several
passes, and every address is compared.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

import bfc
from bench.histories import churns, traces
from bench.peers import tensorflow, torch
from bench.peers.tensorflow import PeerUnavailable, TensorFlowBFC
from bench.peers.torch import TorchPeer
from bench.report import geometric_mean, machine, say, spread
from bfc.pytorch.rules import NEWEST, VERSIONS

LIMIT = 80 << 30
MOST_PASSES, FEWEST_EVENTS = 400, 20_000
TURNS = 3

#: One replay by an original: the address of each event, and the seconds in its loop.
Replayer = Callable[[bfc.Trace], tuple[NDArray[np.uint64], float]]


@dataclass(frozen=True)
class Contest:
    """One policy of ours, and its original."""

    policy: str
    original: str
    make_ours: Callable[[], bfc.Allocator]
    #: Makes what the original needs. Raises PeerUnavailable.
    build: Callable[[], object]
    open_original: Callable[[], AbstractContextManager[Replayer]]


@contextmanager
def tensorflows() -> Iterator[Replayer]:
    with TensorFlowBFC(memory_limit=LIMIT, capacity=LIMIT) as peer:
        yield lambda trace: peer.replay(trace.op, trace.id, trace.size)


@contextmanager
def pytorchs(version: str) -> Iterator[Replayer]:
    with TorchPeer(capacity=LIMIT, torch=version) as peer:
        # A trace numbers its streams; PyTorch wants handles, and those are even.
        yield lambda trace: peer.replay(
            trace.op, trace.id, trace.size, trace.stream.astype(np.uint64) * 2
        )


def our_bfc() -> bfc.Allocator:
    return bfc.BFCAllocator(bfc.SimulatedSubAllocator(LIMIT), strict=True)


def our_caching(version: str = NEWEST) -> bfc.Allocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator(LIMIT), strict=True, torch=version)


def beside_pytorch(version: str) -> Contest:
    return Contest(
        "caching",
        f"PyTorch {version}",
        partial(our_caching, version),
        partial(torch.build, version=version),
        partial(pytorchs, version),
    )


CONTESTS = (
    Contest("bfc", "TensorFlow 2.21", our_bfc, tensorflow.build, tensorflows),
    beside_pytorch(NEWEST),
)


def main(arguments: list[str] | None = None) -> None:
    policies = [contest.policy for contest in CONTESTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--policy", choices=policies, action="append", help="one policy alone (default: all)"
    )
    parser.add_argument(
        "--passes", type=int, default=9, help="timed passes of each, 3 at least (default: 9)"
    )
    parser.add_argument(
        "--torch", choices=VERSIONS, default=NEWEST, help=f"PyTorch's version (default: {NEWEST})"
    )
    parsed = parser.parse_args(arguments)
    say(machine())
    for contest in CONTESTS:
        if contest.policy == "caching" and parsed.torch != NEWEST:
            contest = beside_pytorch(parsed.torch)
        if contest.policy in (parsed.policy or policies):
            say()
            run(contest, max(TURNS, parsed.passes))


def histories() -> Iterator[tuple[str, bfc.Trace]]:
    yield from traces()
    yield from churns()


def passes_for(trace: bfc.Trace, passes: int) -> int:
    """More of a short trace: one pass of 72 events measures the clock."""
    return min(MOST_PASSES, passes * max(1, FEWEST_EVENTS // len(trace)))


def run(contest: Contest, passes: int) -> None:
    try:
        contest.build()
    except PeerUnavailable as error:
        say(f"{contest.policy} without {contest.original}: {error}")
        run_alone(contest, passes)
    else:
        run_beside(contest, passes)


def run_beside(contest: Contest, passes: int) -> None:
    say(
        f"{'ns an event, min / median / max':24}{contest.policy:>26}{contest.original:>26}"
        "   ratio of medians"
    )
    ratios, medians = [], []
    for name, trace in histories():
        ours, theirs = time_both(contest, trace, passes_for(trace, passes))
        ratios.append(statistics.median(theirs) / statistics.median(ours))
        medians.append(statistics.median(ours))
        say(f"{name:24}{spread(ours):>26}{spread(theirs):>26}   {ratios[-1]:5.2f}")
    say(
        f"geometric mean: ratio {geometric_mean(ratios):.2f}, "
        f"ours {geometric_mean(medians):.1f} ns an event, "
        f"{1e3 / geometric_mean(medians):.0f} million events a second"
    )


def time_both(contest: Contest, trace: bfc.Trace, passes: int) -> tuple[list[float], list[float]]:
    """ns an event of each pass, in turns. The first pass of a turn is not counted: it finds the
    other's data in the caches. Raises where a placement differs."""
    ours: list[float] = []
    theirs: list[float] = []
    with contest.make_ours() as allocator, contest.open_original() as replay:
        for _ in range(TURNS):
            replays = [trace.replay(allocator) for _ in range(1 + passes // TURNS)]
            rivals = [replay(trace) for _ in range(1 + passes // TURNS)]
            for mine, (addresses, _seconds) in zip(replays, rivals, strict=True):
                if not np.array_equal(mine.addresses, addresses):
                    raise AssertionError(f"the placement differs from {contest.original}'s")
            ours += [mine.ns_per_event for mine in replays[1:]]
            theirs += [seconds * 1e9 / len(trace) for _addresses, seconds in rivals[1:]]
    return ours, theirs


def run_alone(contest: Contest, passes: int) -> None:
    say(f"{'ns an event, min / median / max':24}{contest.policy:>26}")
    medians = []
    for name, trace in histories():
        with contest.make_ours() as allocator:
            times = [
                trace.replay(allocator).ns_per_event for _ in range(1 + passes_for(trace, passes))
            ][1:]
        medians.append(statistics.median(times))
        say(f"{name:24}{spread(times):>26}")
    say(f"geometric mean: {geometric_mean(medians):.1f} ns an event")


if __name__ == "__main__":
    main()
