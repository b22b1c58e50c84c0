"""Set-ups for the differential tests of TensorFlow's policy, and random histories.

One function makes a set-up from a `choose`, so that Hypothesis and a plain `random.Random` draw the
same ones.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hypothesis import strategies as st

import bfc
from bfc.testing import IntegerSource, Twins

MIB = 1 << 20
STEPS = 200
Choose = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Policy:
    """What the allocator is told."""

    memory_limit: int
    allow_growth: bool
    garbage_collection: bool
    fragmentation_fraction: float
    strict: bool
    tensorflow: str = "2.21"


@dataclass(frozen=True)
class Source:
    """What the sub-allocator is like. `granule` is what it rounds a request up to; `reuses` says
    that it hands out freed addresses again, lowest first."""

    capacity: int
    max_bytes: int
    gap: int
    alignment: int
    supports_coalescing: bool
    granule: int
    reuses: bool

    def device(self) -> IntegerSource:
        return IntegerSource(**asdict(self))


SMALL_LIMITS = (100, 1000, 1024, 4096, 10_000, 65536)
LARGE_LIMITS = (MIB, 3 * MIB, 8 * MIB, 20 * MIB, 100_000_000, 1 << 30, 3 << 30)


def draw_policy(choose: Choose) -> Policy:
    return Policy(
        memory_limit=choose(SMALL_LIMITS + LARGE_LIMITS),
        allow_growth=choose((True, False)),
        garbage_collection=choose((True, False)),
        fragmentation_fraction=choose((0.0, 0.0, 1e-7, 0.01, 0.3, 1.0)),
        strict=choose((True, False)),
        tensorflow=choose(("2.21", "2.23")),
    )


def draw_source(choose: Choose, limit: int) -> Source:
    huge = 1 << 50
    return Source(
        capacity=choose((huge, huge, limit, limit * 7 // 10, limit // 3)),
        max_bytes=choose((huge, huge, huge, limit // 4, limit // 20)),
        gap=choose((0, 0, 256, 4096)),
        alignment=choose((256, 256, 2 * MIB)),
        supports_coalescing=choose((True, False)),
        granule=choose((256, 256, 256, 4096, 2 * MIB)),
        reuses=choose((True, False)),
    )


@st.composite
def setups(draw: st.DrawFn) -> tuple[Policy, Source]:
    def choose(items: Sequence[Any]) -> Any:
        return draw(st.sampled_from(items))

    policy = draw_policy(choose)
    return policy, draw_source(choose, policy.memory_limit)


def twins_of(policy: Policy, source: Source) -> Twins:
    """An allocator and its model."""
    return Twins(bfc.BFCAllocator(source.device(), **asdict(policy)))


def set_timing_counter(twins: Twins) -> None:
    twins.beside.set_timing_counter()
    twins.frees = 0


def play(rng: random.Random, steps: int = STEPS, check_every: int = 1) -> None:
    """One history: its set-up, then steps that fill the pool, churn, and drain it by turns. Each
    answer is compared; statistics, chunks and invariants after so many steps."""
    policy = draw_policy(rng.choice)
    twins = twins_of(policy, draw_source(rng.choice, policy.memory_limit))
    counted = rng.random() < 0.4
    if counted:
        set_timing_counter(twins)
    scale = rng.choice((3, 10, 40, 200))
    wanted = 0.8
    for step in range(steps):
        if step % 30 == 0:
            wanted = rng.choice((0.3, 0.5, 0.8))
        if twins.live and rng.random() > wanted:
            twins.free(rng.randrange(len(twins.live)))
        else:
            before = max(0, twins.frees - rng.randrange(5)) if counted else 0
            size = draw_size(rng, policy.memory_limit, scale)
            twins.allocate(size, freed_before=rng.choice((0, 0, before)))
        disturb(rng, twins, counted)
        if step % check_every == 0:
            twins.check()
    twins.close()


def draw_size(rng: random.Random, limit: int, scale: int) -> int:
    """Up to a share of the limit; now and then 256s, near a power of two, or most of the limit."""
    kind = rng.random()
    if kind < 0.15:
        return 256 * rng.randrange(1, 5)
    if kind < 0.3:
        return max(1, (1 << rng.randrange(8, max(9, limit.bit_length()))) + rng.randrange(-1, 2))
    if kind < 0.35:
        return rng.randrange(limit // 2, limit + 2)
    return rng.randrange(1, max(2, limit // scale))


def disturb(rng: random.Random, twins: Twins, counted: bool) -> None:
    kind = rng.random()
    if kind < 0.03:
        twins.fail_at(rng.randrange(1, 5))
    elif kind < 0.05:
        twins.release_free_regions()
    elif kind < 0.06:
        twins.clear_stats()
    elif counted and kind < 0.2:
        twins.beside.set_safe_frontier(max(0, twins.frees + 1 - rng.randrange(6)))
