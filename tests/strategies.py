"""Set-ups and histories for the differential tests, and the pair of twins that they drive.

One function makes a set-up from a `choose`, so that Hypothesis and a plain `random.Random` draw the
same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from hypothesis import strategies as st

import bfc
from bfc.testing import IntegerSource
from bfc.testing.tensorflow_model import Model, layout_of

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


def check_figures(error: bfc.OutOfMemoryError, nbytes: int, stats: bfc.Stats) -> None:
    assert (error.requested, error.limit) == (nbytes, stats.bytes_limit)
    assert (error.in_use, error.reserved) == (stats.bytes_in_use, stats.pool_bytes)
    assert error.largest_free == stats.largest_free_block_bytes


class Twins:
    """An allocator and its model over two equal devices. Both take every step."""

    def __init__(self, policy: Policy, source: Source) -> None:
        self.devices = source.device(), source.device()
        self.allocator = bfc.BFCAllocator(self.devices[0], **asdict(policy))
        self.model = Model(self.devices[1], **asdict(policy))
        self.limit = policy.memory_limit
        self.live: list[int] = []
        self.frees = 0

    def allocate(self, nbytes: int, freed_before: int = 0) -> None:
        expected = self.model.allocate(nbytes, freed_before)
        if expected is None:
            with pytest.raises(bfc.OutOfMemoryError) as raised:
                self.allocator.allocate_raw(nbytes, freed_before=freed_before)
            check_figures(raised.value, nbytes, self.model.stats())
            return
        assert self.allocator.allocate_raw(nbytes, freed_before=freed_before) == expected
        if expected:
            self.live.append(expected)

    def free(self, index: int) -> None:
        ptr = self.live.pop(index % len(self.live))
        self.allocator.deallocate_raw(ptr)
        self.model.free(ptr)
        self.frees += 1

    def fail_at(self, number: int) -> None:
        for device in self.devices:
            device.fail_at(number)

    def release_free_regions(self) -> None:
        assert self.allocator.release_free_regions() == self.model.release_free_regions()

    def set_timing_counter(self) -> None:
        self.allocator.set_timing_counter(bfc.SharedCounter())
        self.model.set_timing_counter()
        self.frees = 0

    def set_safe_frontier(self, frontier: int) -> None:
        self.allocator.set_safe_frontier(frontier)
        self.model.set_safe_frontier(frontier)

    def clear_stats(self) -> None:
        self.allocator.clear_stats()
        self.model.clear_stats()

    def compare(self) -> None:
        assert self.devices[0].calls == self.devices[1].calls
        assert self.allocator.next_region_size == self.model.next_region_size
        assert layout_of(self.allocator) == self.model.layout()
        assert self.allocator.stats() == self.model.stats()

    def close(self) -> None:
        """Frees all, one by one, and gives the regions back."""
        while self.live:
            self.free(-1)
        self.compare()
        assert self.allocator.stats().bytes_in_use == 0
        if self.model.counter is None:
            assert all(len(region.chunks) == 1 for region in self.allocator.snapshot().regions)
        self.allocator.close()
        self.model.close()
        assert self.devices[0].calls == self.devices[1].calls
        assert self.devices[0].live == {}
