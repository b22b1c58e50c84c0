"""Runs that repeat, made up: a head with weights, then iterations of several kinds. And
programs that do not quite repeat them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field

import bfc

KIB = 1024
Event = tuple[int, int, int]  # op, key, size


@dataclass
class Block:
    """A block that lives from the request `born` up to the request `dies`; None: for good."""

    size: int
    born: int
    dies: int | None
    stream: int = 0


@dataclass
class Run:
    """A trace, and where its iterations begin."""

    trace: bfc.Trace
    marks: list[tuple[int, str]]

    def iterations(self) -> Iterator[tuple[str, slice]]:
        """Of each its kind, and where its events stand in the trace."""
        ends = [event for event, _ in self.marks[1:]] + [len(self.trace)]
        for (event, kind), end in zip(self.marks, ends, strict=True):
            yield kind, slice(event, end)


def trace_of(blocks: list[Block], borders: list[tuple[int, str]]) -> Run:
    """The trace of blocks in the order of their births. `borders` name requests."""
    frees: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        if block.dies is not None:
            frees.setdefault(block.dies, []).append(number)
    columns: list[tuple[int, int, int, int]] = []
    begins = dict(borders)
    marks = []
    for number, block in enumerate(blocks):
        columns += [(1, freed, 0, blocks[freed].stream) for freed in frees.get(number, ())]
        if number in begins:
            marks.append((len(columns), begins[number]))
        columns.append((0, number, block.size, block.stream))
    columns += [(1, freed, 0, blocks[freed].stream) for freed in frees.get(len(blocks), ())]
    op, ids, size, stream = zip(*columns, strict=True)
    return Run(bfc.Trace(op, ids, size, stream), marks)


def some_run(dice: random.Random, *, streams: int = 1, iterations: int = 5) -> Run:
    """Weights; iterations of one or two kinds, whose blocks partly outlive them; state that the
    first iteration of each kind makes for good."""
    kinds = {
        kind: [
            (dice.randrange(1, 900) * KIB, dice.randrange(1, 12), dice.randrange(streams))
            for _ in range(dice.randrange(6, 30))
        ]
        for kind in ("train", "eval")[: dice.randint(1, 2)]
    }
    blocks: list[Block] = []
    for number in range(dice.randrange(10)):
        dies = None if dice.random() < 0.6 else number + dice.randrange(1, 14)
        blocks.append(Block(dice.randrange(1, 500) * KIB, number, dies, dice.randrange(streams)))
    borders, seen = [], set()
    for _ in range(iterations):
        for kind, template in kinds.items():
            borders.append((len(blocks), kind))
            for position, (size, life, stream) in enumerate(template):
                born = len(blocks)
                over = born + life - (borders[-1][0] + len(template))
                dies = born + max(1, life if over <= 4 else life - over)
                blocks.append(Block(size, born, dies, stream))
                if kind not in seen and position in (3, 4):
                    blocks.append(Block(77 * KIB, born + 1, None))
            seen.add(kind)
    for block in blocks:
        if block.dies is not None and block.dies > len(blocks):
            block.dies = None
    return trace_of(blocks, borders)


def events_of(trace: bfc.Trace) -> list[Event]:
    """For `DisturbedProgram.play`: an allocation's id is its key."""
    return list(zip(trace.op.tolist(), trace.id.tolist(), trace.size.tolist(), strict=True))


@dataclass(kw_only=True)
class DisturbedProgram(ABC):
    """What plays iterations on an allocator, with requests left out, put in, changed or swapped,
    and late frees."""

    pool: bfc.Allocator
    dice: random.Random
    wrong: float  # the share of events that come otherwise
    most: int  # bytes of a request that is put in
    late: list[tuple[int, int]] = field(default_factory=list)
    number: int = 0  # of requests so far

    @abstractmethod
    def allocate(self, key: int, size: int) -> None: ...

    @abstractmethod
    def free(self, key: int) -> None: ...

    def play(self, events: list[Event]) -> None:
        dice, wrong = self.dice, self.wrong
        for i in range(len(events) - 1):
            if dice.random() < wrong and events[i][0] == events[i + 1][0] == 0:
                events[i], events[i + 1] = events[i + 1], events[i]
        for op, key, size in events:
            self.late = [(at - 1, other) for at, other in self.late]
            for _, other in [entry for entry in self.late if entry[0] <= 0]:
                self.free(other)
            self.late = [entry for entry in self.late if entry[0] > 0]
            if op == 1:
                if dice.random() < wrong:
                    self.late.append((dice.randrange(1, 20), key))
                else:
                    self.free(key)
            elif dice.random() >= wrong:
                changed = int(size * dice.uniform(0.5, 1.5)) if dice.random() < wrong else size
                self.allocate(key, max(1, changed))
            if dice.random() < wrong:
                self.allocate(-self.number - 1, dice.randrange(1, self.most))
                self.late.append((dice.randrange(1, 12), -self.number))
            assert self.pool.check() is None
