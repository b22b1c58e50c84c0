"""Set-ups for the differential tests of TensorFlow's policy.

One function makes a set-up from a `choose`, so that Hypothesis and a plain `random.Random` draw the
same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hypothesis import strategies as st

import bfc
from bfc.testing import IntegerSource, Twins

MIB = 1 << 20
Choose = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Policy:
    """What the allocator is told."""

    memory_limit: int
    allow_growth: bool
    garbage_collection: bool
    fragmentation_fraction: float
    strict: bool


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
