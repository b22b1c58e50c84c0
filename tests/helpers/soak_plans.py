"""Random programs that repeat, served by plans, with the contents of every block verified by
`soak_table.cpp`. Most requests get the places that a plan has for them."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from soak_native import POLICIES, Game, agrees_with, finish, habits, opened

import bfc

KIB = 1024
PLANNED = tuple(name for name in POLICIES if name != "expandable")  # which serves no plans
STEPS, REPLANNED_STEPS = 1000, 400
#: Of a thousand requests, how many come otherwise than planned.
WRONG = (0, 0, 0, 2, 20)


class Event(ctypes.Structure):
    """An allocation, or a free if the size is 0."""

    _fields_ = (
        ("key", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("stream", ctypes.c_int64),
        ("address", ctypes.c_void_p),
    )


@dataclass
class Step:
    """What a program asks for in a step, and where each request was served."""

    kind: str
    events: Any
    addresses: Any

    @classmethod
    def of(cls, kind: str, rows: Sequence[tuple[int, int, int]]) -> Step:
        addresses = (ctypes.c_uint64 * len(rows))()
        first = ctypes.addressof(addresses)
        filled = [Event(*row, first + 8 * at if row[1] else 0) for at, row in enumerate(rows)]
        return cls(kind, (Event * len(rows))(*filled), addresses)

    def play(self, game: Game, wrong: int = 0) -> None:
        game.call("follow", ctypes.addressof(self.events), len(self.events), wrong)


class Program:
    """Weights, and a round of steps that comes again and again. Some blocks outlive their step, and
    the round: two rounds in turn have keys of their own."""

    def __init__(self, dice: random.Random, streams: int) -> None:
        count = dice.choice([10, 60, 300])
        longest = min(dice.choice([4, 12, 60]), count - 1)
        sizes = [self.some_size(dice) for _ in range(count)]
        places = [dice.randrange(streams) for _ in range(count)]
        border = dice.randrange(1, count)
        self.borders = [(0, "train")] if dice.random() < 0.5 else [(0, "train"), (border, "eval")]
        weights = [(-1 - n, self.some_size(dice), 0) for n in range(dice.randrange(12))]
        self.weights = Step.of("", weights)
        frees: list[list[int]] = [[] for _ in range(2 * count)]
        ends = [at for at, _ in self.borders[1:]] + [count]
        for born in range(count):
            end = next(end for end in ends if born < end)
            longer = ends[(ends.index(end) + 1) % len(ends)] if len(ends) > 1 else count
            most = end - born + (longer if end == count else longer - end) - 1
            frees[born + dice.randint(1, max(1, min(longest, most)))].append(born)
        self.rounds = [
            [
                Step.of(kind, self.rows(parity, range(begin, end), sizes, places, frees))
                for (begin, kind), end in zip(self.borders, ends, strict=True)
            ]
            for parity in range(2)
        ]

    @staticmethod
    def some_size(dice: random.Random) -> int:
        kind = dice.random()
        if kind < 0.6:
            return dice.randint(8, 16 * KIB)
        return dice.randint(8, 200 * KIB) if kind < 0.97 else dice.randint(1, 3 * KIB) * KIB

    @staticmethod
    def rows(
        parity: int, requests: range, sizes: list[int], streams: list[int], frees: list[list[int]]
    ) -> list[tuple[int, int, int]]:
        count, found = len(sizes), []
        for at in requests:
            found += [(born + (1 - parity) * count, 0, 0) for born in frees[at + count]]
            found += [(born + parity * count, 0, 0) for born in frees[at]]
            found.append((at + parity * count, sizes[at], streams[at]))
        return found

    def plan(self, policy: str, rounds: int = 5) -> bfc.Plan:
        """Of a recording of it."""
        columns: list[tuple[int, int, int, int]] = []
        marks, live, number = [], {}, 0
        steps = [self.weights, *(step for n in range(rounds) for step in self.rounds[n % 2])]
        for step in steps:
            if step.kind:
                marks.append((len(columns), step.kind))
            for event in step.events:
                if event.size:
                    live[event.key] = number, event.stream
                    columns.append((0, number, event.size, event.stream))
                    number += 1
                elif event.key in live:
                    freed, stream = live.pop(event.key)
                    columns.append((1, freed, 0, stream))
        trace = bfc.Trace(*zip(*columns, strict=True))
        return bfc.Plan.from_trace(trace, marks=marks, fallback=policy)


def some_streams(policy: str, dice: random.Random) -> int:
    """TensorFlow's policy refuses plans in which several share memory."""
    return 1 if fallback(policy) == "bfc" else dice.choice([1, 1, 3])


def game_of(policy: str, pool: Any, dice: random.Random) -> Game:
    return Game("marks", pool, dice.getrandbits(32), 1, ctypes.byref(habits(policy, dice, 4)))


def fallback(policy: str) -> str:
    return "bfc" if policy in ("bfc", "pages") else "caching"


def plans(seed: int, steps: int = STEPS) -> int:
    """A plan is served to the program that it was made of. Where nothing comes otherwise, every
    round gets the addresses of the one before the last."""
    dice = random.Random(seed)
    policy, wrong = dice.choice(PLANNED), dice.choice(WRONG)
    streams = some_streams(policy, dice)
    program = Program(dice, streams)
    pool, source = opened(policy, dice)
    pool.use_plan(program.plan(fallback(policy)), gate=None)
    game = game_of(policy, pool, dice)
    program.weights.play(game)
    #: There streams take idle pages from each other, and blocks move.
    trades = policy == "stitching" and streams > 1
    served: dict[tuple[int, int], list[int]] = {}
    for number in range(steps // len(program.borders)):
        for at, step in enumerate(program.rounds[number % 2]):
            with pool.step(step.kind):
                step.play(game, wrong)
            before, now = served.get((number % 2, at)), list(step.addresses)
            assert wrong or trades or number < 6 or now == before, (number, at)
            served[number % 2, at] = now
        if dice.random() < 0.02:
            agrees_with(pool, game, source)
    counts_agree(pool, game)
    assert trades or most_are_hits(pool, wrong), pool.plan_stats()
    pool.use_plan(None)
    return finish(game, pool, source)


def counts_agree(pool: Any, game: Game) -> None:
    stats = pool.plan_stats()
    asked = stats["hits"] + stats["guests"] + stats["side"]
    assert asked == game.counts.allocated, (stats, game.counts.allocated)


def most_are_hits(pool: Any, wrong: int) -> bool:
    stats = pool.plan_stats()
    asked = stats["hits"] + stats["guests"] + stats["side"]
    return bool(stats["hits"] > (0.5 if wrong else 0.9) * asked)


def replans(seed: int, steps: int = REPLANNED_STEPS) -> int:
    """A program that becomes another one again and again, until a new plan serves each."""
    return play_replans(seed, steps)[0]


def play_replans(seed: int, steps: int) -> tuple[int, int]:
    """How many calls were verified, and how often a new plan came into use."""
    dice = random.Random(seed)
    policy = dice.choice(PLANNED)
    streams = some_streams(policy, dice)
    program = Program(dice, streams)
    pool, source = opened(policy, dice)
    pool.use_plan(program.plan(fallback(policy)), gate=0.999)
    game = game_of(policy, pool, dice)
    program.weights.play(game)
    replanned, done = 0, 0
    while done < steps:
        before = pool.plan_stats().get("replanned", 0)
        for number in range(dice.choice([20, 60])):
            for step in program.rounds[number % 2]:
                with pool.step(step.kind):
                    step.play(game)
                done += 1
            if dice.random() < 0.5:
                await_look()
        replanned += pool.plan_stats().get("replanned", 0) - before
        agrees_with(pool, game, source)
        game.call("drain")
        if pool.plan_stats()["state"] in ("declined", "switched off"):
            pool.use_plan(program.plan(fallback(policy)), gate=0.999)
        program = Program(dice, streams)
    pool.use_plan(None)
    return finish(game, pool, source), replanned


def await_look() -> None:
    for thread in threading.enumerate():
        if thread.name == "bfc plan":
            thread.join()
