"""Every trace and random churn through the compiled originals and ours, in turn:
`python -m bench.replay`. BFC stands beside TensorFlow's, the caching policy beside PyTorch's. Then
the iterations of the traces that have any, six times each, also from a plan of just that.
Memory with two ends stands beside TensorFlow's nightly build in `python -m bench.ends`.

All replay in one compiled loop, on a device of integers. Ours keep the handle of each allocation,
the originals its address, which is all that their interfaces have. They take turns of several
passes, and every address is compared, but for those of a plan, which places blocks elsewhere. A
replay from a plan is the first of a new allocator; all others have the memory of earlier passes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

import bfc
from bench.histories import Maker, churns, traces
from bench.peers import tensorflow, torch
from bench.peers.tensorflow import PeerUnavailable, TensorFlowBFC
from bench.peers.torch import TorchPeer
from bench.repeated import (
    ROUNDS,
    caching,
    growing_bfc,
    history,
    ns_of_first_replay,
    runs_that_repeat,
)
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
    #: None: the original is not available.
    open_original: Callable[[], AbstractContextManager[Replayer]] | None
    #: Makes an allocator that is given a plan.
    make_planned: Maker

    def opened(self) -> AbstractContextManager[Replayer | None]:
        return nullcontext() if self.open_original is None else self.open_original()


@dataclass(frozen=True)
class Times:
    """ns an event of each pass: ours, the original's if it is available, and ours from a plan if
    there is one."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    planned: list[float] = field(default_factory=list)


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
        caching,
    )


CONTESTS = (
    Contest("bfc", "TensorFlow 2.21", our_bfc, tensorflow.build, tensorflows, growing_bfc),
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


def repeating(names: Sequence[str] | None = None) -> Iterator[tuple[str, bfc.Trace]]:
    """The iterations of the traces that have any, six times, with what comes before them."""
    for name, run in runs_that_repeat(names=names).items():
        yield f"{name} x {ROUNDS}", history(run, [run.iteration] * ROUNDS).closed()


def passes_for(trace: bfc.Trace, passes: int) -> int:
    """More of a short trace: one pass of 72 events measures the clock."""
    return min(MOST_PASSES, passes * max(1, FEWEST_EVENTS // len(trace)))


def run(contest: Contest, passes: int) -> None:
    try:
        contest.build()
    except PeerUnavailable as error:
        say(f"{contest.policy} without {contest.original}: {error}")
        contest = replace(contest, open_original=None)
    say(heading(contest))
    for listed, is_planned in ((histories(), False), (repeating(), True)):
        rows = []
        for name, trace in listed:
            plan = bfc.Plan.from_trace(trace, fallback=contest.policy) if is_planned else None
            rows.append(time_in_turns(contest, trace, passes_for(trace, passes), plan))
            say(f"{name:24}{row(rows[-1])}")
        say(f"geometric mean: {means(rows)}")


def heading(contest: Contest) -> str:
    ours, planned = f"{contest.policy:>18}", f"{contest.policy + ' + plan':>26}{'of ours':>8}"
    if contest.open_original is not None:
        ours, planned = f"{ours}{contest.original:>26}{'ratio':>8}", f"{planned}{'ratio':>8}"
    return f"{'ns an event, min / median / max':32}{ours}{planned}"


def row(times: Times) -> str:
    cells = f"{spread(times.ours):>26}"
    if times.theirs:
        cells += f"{spread(times.theirs):>26}{ratio(times.theirs, times.ours):8.2f}"
    if times.planned:
        cells += f"{spread(times.planned):>26}{ratio(times.planned, times.ours):8.2f}"
        cells += f"{ratio(times.theirs, times.planned):8.2f}" if times.theirs else ""
    return cells


def means(rows: list[Times]) -> str:
    ours = geometric_mean([statistics.median(times.ours) for times in rows])
    said = [f"ours {ours:.1f} ns an event, {1e3 / ours:.0f} million events a second"]
    if rows[0].theirs:
        mean = geometric_mean([ratio(times.theirs, times.ours) for times in rows])
        said.insert(0, f"ratio {mean:.2f}")
    if rows[0].planned:
        mean = geometric_mean([ratio(times.planned, times.ours) for times in rows])
        said.append(f"a plan takes {mean:.2f} of that")
    if rows[0].planned and rows[0].theirs:
        mean = geometric_mean([ratio(times.theirs, times.planned) for times in rows])
        said.append(f"ratio {mean:.2f}")
    return ", ".join(said)


def ratio(samples: list[float], others: list[float]) -> float:
    return statistics.median(samples) / statistics.median(others)


def time_in_turns(
    contest: Contest, trace: bfc.Trace, passes: int, plan: bfc.Plan | None = None
) -> Times:
    """Raises where a placement differs from the original's. The first pass of a turn is left out:
    it finds other data in the caches, and the first of all asks the device for memory."""
    times = Times()
    with contest.make_ours() as allocator, contest.opened() as replay:
        for _ in range(TURNS):
            replays = [trace.replay(allocator) for _ in range(1 + passes // TURNS)]
            times.ours.extend(mine.ns_per_event for mine in replays[1:])
            if replay is not None:
                rivals = [replay(trace) for _ in replays]
                for mine, (addresses, _seconds) in zip(replays, rivals, strict=True):
                    if not np.array_equal(mine.addresses, addresses):
                        raise AssertionError(f"the placement differs from {contest.original}'s")
                times.theirs.extend(s * 1e9 / len(trace) for _addresses, s in rivals[1:])
            if plan is not None:
                served = [ns_of_first_replay(trace, contest.make_planned, plan) for _ in replays]
                times.planned.extend(served[1:])
    return times


if __name__ == "__main__":
    main()
