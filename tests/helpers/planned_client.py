"""A library whose memory comes from a pool that learns a plan and serves it."""

from __future__ import annotations

import gc
from collections.abc import Callable

import bfc

MIB = 1 << 20
#: The blocks of a step, one after the other.
SIZES = (12 * MIB, 14 * MIB, 17 * MIB)


def play(pool: bfc.Allocator, allocate: Callable[[int], Callable[[], object]], steps: int) -> None:
    """Steps of the library. `allocate` returns a function that gives the memory back."""
    for _ in range(steps):
        with pool.step("train"):
            for size in SIZES:
                allocate(size)()
                gc.collect()


def learns_and_follows_a_plan(
    pool: bfc.Allocator, allocate: Callable[[int], Callable[[], object]]
) -> None:
    """Every request of the library has a place, and no more is reserved than the largest needs."""
    with pool.record_plan(iterations=2) as recording:
        play(pool, allocate, 4)
    before = pool.stats().pool_bytes
    pool.use_plan(recording.plan(), strict=True)
    pool.release_free_regions()
    play(pool, allocate, 3)
    stats = pool.plan_stats()
    assert (stats["hits"], stats["departed_steps"], stats["agreement"]) == (9, 0, 1.0)
    assert pool.stats().pool_bytes == stats["span"] == SIZES[-1] < before
    assert pool.check() is None
    pool.use_plan(None)
    pool.release_free_regions()
