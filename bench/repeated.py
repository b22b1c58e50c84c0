"""Runs that repeat one recorded iteration, as it was or disturbed, and replays of them:
`python -m bench.plans --served` serves plans of them, and `python -m bench.replay` has plans beside
the originals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import bfc
from bench.histories import TRACES, Maker

UNIT = 512
#: A low point of live memory is at most this part of the peak above the lowest.
LOW = 0.02
#: Iterations are at least this part of a trace.
SHORTEST = 1 / 60
#: An iteration has at least so many blocks.
FEWEST = 100
ROUNDS = 6
RECORDED = 4

Events = NDArray[np.float64]


@dataclass(frozen=True)
class Blocks:
    """Blocks with the moments of birth and death, which may be infinite, in order of birth."""

    birth: Events
    death: Events
    size: NDArray[np.int64]
    stream: NDArray[np.uint16]

    def taken(self, chosen: NDArray[np.bool_]) -> Blocks:
        return Blocks(
            self.birth[chosen], self.death[chosen], self.size[chosen], self.stream[chosen]
        )


@dataclass(frozen=True)
class Repeated:
    """What comes before the iterations, and one iteration, whose moments count from its begin."""

    head: Blocks
    iteration: Blocks
    begin: float
    length: float


#: What is wrong with each iteration, in parts of its blocks.
DISTURBED: dict[str, dict[str, float]] = {
    "none": {},
    "sizes 1 %": {"sizes": 0.01},
    "sizes 5 %": {"sizes": 0.05},
    "sizes 20 %": {"sizes": 0.2},
    "insert 1 %": {"insert": 0.01},
    "insert 5 %": {"insert": 0.05},
    "delete 1 %": {"delete": 0.01},
    "delete 5 %": {"delete": 0.05},
    "late 1 %": {"late": 0.01},
    "late 10 %": {"late": 0.1},
    "swap 10 %": {"swap": 0.1},
    "all five at 1 %": {"sizes": 0.01, "insert": 0.01, "delete": 0.01, "late": 0.01, "swap": 0.01},
}
#: What comes between the iterations, of a kind that the plan does not have.
EVALUATION, OTHER_SHAPE = "evaluation", "other shape"
BETWEEN = (EVALUATION, OTHER_SHAPE)
#: An evaluation is this part of an iteration, and keeps nothing for a backward pass: its blocks
#: live for so many events at most. Another shape has this part of each size.
FORWARD, FORWARD_LIFE, SMALLER = 0.4, 30, 0.7


def blocks_of(trace: bfc.Trace) -> Blocks:
    """The blocks of a trace, whose moments are the numbers of its events."""
    born = np.flatnonzero((trace.op == 0) & (trace.size > 0))
    frees = trace._frees()[born].astype(np.float64)
    return Blocks(
        born.astype(np.float64),
        np.where(frees < 0, np.inf, frees),
        trace.size[born].astype(np.int64),
        trace.stream[born],
    )


def repeated(trace: bfc.Trace) -> Repeated | None:
    """The iteration of a trace with the highest peak. Iterations lie between the low points of live
    memory; None: there are no two of them, or they are short."""
    blocks = blocks_of(trace)
    change = np.zeros(len(trace) + 1, np.int64)
    np.add.at(change, blocks.birth.astype(np.int64) + 1, blocks.size)
    ends = np.isfinite(blocks.death)
    np.subtract.at(change, blocks.death[ends].astype(np.int64) + 1, blocks.size[ends])
    live = np.cumsum(change)[:-1]  # before each event
    asked = np.flatnonzero(trace.op == 0)
    asked = asked[asked >= len(trace) * 3 // 10]  # the first iterations make what stays
    until = asked[: len(asked) * 19 // 20]  # and the end frees everything
    low = asked[live[asked] <= live[until].min(initial=1 << 62) + LOW * live.max()]
    borders = [int(group.min()) for group in _groups(low, len(trace) * SHORTEST)]
    if len(borders) < 2:
        return None
    begin, end = max(itertools.pairwise(borders), key=lambda pair: live[pair[0] : pair[1]].max())
    length = float(end - begin)
    own = blocks.taken((blocks.birth >= begin) & (blocks.birth < end))
    own = replace(own, birth=own.birth - begin, death=own.death - begin)
    own = own.taken(own.death <= 2 * length - 1)  # what lives for longer is made once
    if len(own.size) < FEWEST:
        return None
    head = blocks.taken(blocks.birth < begin)
    over = head.death >= end
    head = replace(head, death=np.where(over, np.inf, head.death))
    return Repeated(head, own, float(begin), length)


def runs_that_repeat(
    folder: Path = TRACES, names: Sequence[str] | None = None
) -> dict[str, Repeated]:
    """Those of the traces in a folder that have iterations, by name; `names`: only these."""
    found = {}
    for path in sorted(folder.glob("*.npz")):
        if path.stem == "llm_decode_kv" or (names is not None and path.stem not in names):
            continue  # requests that come and go: there are no iterations
        run = repeated(bfc.Trace.load(path))
        if run is not None:
            found[path.stem] = run
    return found


def caching(source: bfc.SubAllocator) -> bfc.Allocator:
    return bfc.CachingAllocator(source)


def growing_bfc(source: bfc.SubAllocator) -> bfc.Allocator:
    return bfc.BFCAllocator(source, allow_growth=True)


def ns_of_first_replay(trace: bfc.Trace, make: Maker, plan: bfc.Plan | None) -> float:
    """ns an event of a replay by a new allocator, with a plan or without: of one training."""
    with make(bfc.SimulatedSubAllocator("1 TiB")) as allocator:
        allocator.use_plan(plan, gate=None)
        return trace.replay(allocator).ns_per_event


def _groups(points: NDArray[np.intp], apart: float) -> list[NDArray[np.intp]]:
    if not len(points):
        return []
    return np.split(points, np.flatnonzero(np.diff(points) > apart) + 1)


def disturbed(run: Repeated, dice: np.random.Generator, **parts: float) -> Blocks:
    """The iteration with other sizes (0.5 to 1.5 times), blocks put in or left out, late frees (by
    at most 20 events) and neighbours swapped, each for that part of its blocks."""
    blocks, length = run.iteration, run.length
    count = len(blocks.size)
    size, death, birth = blocks.size.copy(), blocks.death.copy(), blocks.birth.copy()
    chosen = dice.random(count) < parts.get("sizes", 0)
    size[chosen] = np.maximum(1, size[chosen] * dice.uniform(0.5, 1.5, chosen.sum()))
    chosen = (dice.random(count) < parts.get("late", 0)) & (death < length)
    late = death[chosen] + dice.integers(1, 21, chosen.sum()) + 0.5
    death[chosen] = np.minimum(late, length - 0.25)
    swaps = np.flatnonzero(dice.random(max(count - 1, 0)) < parts.get("swap", 0))
    for i in swaps[np.diff(swaps, prepend=-2) > 1]:
        if birth[i + 1] - birth[i] < 3 and birth[i + 1] < death[i]:
            birth[[i, i + 1]] = birth[[i + 1, i]]
    changed = Blocks(birth, np.maximum(death, birth + 0.1), size, blocks.stream)
    changed = changed.taken(dice.random(count) >= parts.get("delete", 0))
    added = dice.binomial(count, parts.get("insert", 0))
    source = dice.integers(0, count, added)
    at = dice.uniform(0, length - 1, added)
    life = np.minimum(blocks.death[source] - blocks.birth[source], length)
    grown = np.maximum(1, blocks.size[source] * dice.uniform(0.7, 1.3, added)).astype(np.int64)
    return joined(
        [
            changed,
            Blocks(at, np.minimum(at + life, length - 0.2), grown, blocks.stream[source]),
        ]
    )


def between(run: Repeated, kind: str) -> Blocks:
    """An evaluation, or an iteration of another shape."""
    blocks = run.iteration
    if kind == OTHER_SHAPE:
        return replace(blocks, size=np.maximum(1, (blocks.size * SMALLER).astype(np.int64)))
    own = blocks.taken(blocks.birth < run.length * FORWARD)
    return replace(own, death=np.minimum(own.death, own.birth + FORWARD_LIFE))


def joined(parts: Sequence[Blocks]) -> Blocks:
    """All blocks, in order of birth."""
    birth, death, size, stream = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("birth", "death", "size", "stream")
    )
    order = np.argsort(birth, kind="stable")
    return Blocks(birth[order], death[order], size[order], stream[order])


def history(
    run: Repeated, iterations: Sequence[Blocks], kinds: Sequence[str] | None = None
) -> bfc.Trace:
    """The head, then the iterations one after the other, with marks, whose kinds are "train"."""
    parts, marks = [run.head], []
    kinds = kinds or ["train"] * len(iterations)
    for number, part in enumerate(iterations):
        at = run.begin + number * run.length
        marks.append(at)
        death = part.death + at
        if number == len(iterations) - 1:
            death = np.where(part.death > run.length, np.inf, death)
        parts.append(replace(part, birth=part.birth + at, death=death))
    blocks = joined(parts)
    dies = np.flatnonzero(np.isfinite(blocks.death))
    moment = np.concatenate([blocks.death[dies], blocks.birth])
    is_birth = np.concatenate([np.zeros(len(dies), bool), np.ones(len(blocks.birth), bool)])
    ids = np.concatenate([dies, np.arange(len(blocks.birth))])
    order = np.lexsort((is_birth, moment))
    ids, is_birth = ids[order], is_birth[order]
    events = np.searchsorted(moment[order], marks)
    return bfc.Trace(
        np.where(is_birth, 0, 1),
        ids,
        np.where(is_birth, blocks.size[ids], 0),
        blocks.stream[ids],
        meta={"marks": [[int(event), kind] for event, kind in zip(events, kinds, strict=True)]},
    )


def most_live(trace: bfc.Trace) -> int:
    """The most rounded bytes that are live at once."""
    blocks = blocks_of(trace)
    rounded = -(-blocks.size // UNIT) * UNIT
    dies = np.isfinite(blocks.death)
    moment = np.concatenate([blocks.death[dies], blocks.birth])
    change = np.concatenate([-rounded[dies], rounded])
    return int(np.cumsum(change[np.argsort(moment, kind="stable")]).max())
