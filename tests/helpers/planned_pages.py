"""Allocators that serve plans from mapped pages, next to an account of every page."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from mapping_faults import AccountedDevice, PagedProgram
from waiting import DEADLINE, Halt, at_call

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20
PAGE = 2 * MIB
PAGED_CALLS = ("reserve", "unreserve", "create", "release", "map", "unmap", "order")


def made(policy: str, source: bfc.SubAllocator, **options: Any) -> Any:
    if policy == "caching":
        return bfc.CachingAllocator(source, stitch=True, **options)
    return bfc.BFCAllocator(source, virtual_memory=True, page_size=PAGE, **options)


def simple(policy: str, steps: int = 3, streams: tuple[int, ...] = (0, 0, 0)) -> bfc.Plan:
    """4 MiB of weights; in each step 8 MiB, and 2 and 3 MiB that live one after the other."""
    rows, marks = [(0, 0, 4 * MIB, 0)], []
    for step in range(steps):
        marks.append(len(rows))
        a = 1 + 3 * step
        one, two, three = streams
        rows += [(0, a, 8 * MIB, one), (0, a + 1, 2 * MIB, two), (1, a + 1, 0, two)]
        rows += [(0, a + 2, 3 * MIB, three), (1, a + 2, 0, three), (1, a, 0, one)]
    return bfc.Plan.from_trace(bfc.Trace(*zip(*rows, strict=True)), marks=marks, fallback=policy)


def one_step(pool: bfc.Allocator) -> None:
    with pool.step("train"):
        first = pool.allocate(8 * MIB)
        second = pool.allocate(2 * MIB)
        del second
        third = pool.allocate(3 * MIB)
        del third, first


class World(PagedProgram):
    """An allocator on a device that keeps account of its pages, and what a program has of it."""

    def __init__(self, policy: str, capacity: str = "64 MiB", plan: bfc.Plan | None = None) -> None:
        device = AccountedDevice(capacity)
        super().__init__(device, made(policy, device))
        if plan is not None:
            self.allocator.use_plan(plan)

    def examine(self) -> None:
        self.ledger.read()
        assert self.allocator.check() is None
        figures = self.allocator.page_stats()
        assert bool(figures["lost_slots"]) >= bool(self.device.stuck)
        assert figures["pages"] * PAGE + sum(self.device.live.values()) == self.device.live_bytes
        assert self.allocator.stats().bytes_reserved == self.device.live_bytes
        for block in self.ledger.live.values():
            list(self.ledger._places(block.ptr, block.nbytes))

    def end(self) -> None:
        """All of it goes back, once the device has recovered."""
        self.examine()
        self.drop(*list(self.ledger.live))
        self.allocator.use_plan(None)
        self.allocator.release_free_regions()
        self.allocator.release_free_regions()  # what could not be unmapped is tried again
        self.examine()
        assert self.device.live_bytes == 0
        self.allocator.close()
        self.ledger.examine_closed()


def world_with(plan: bfc.Plan, policy: str, capacity: str = "64 MiB") -> World:
    """For `fail_every_call`: a world whose plan is asked for again where a call fails meanwhile."""
    world = World(policy, capacity)
    for _ in range(2):
        with suppress(bfc.SubAllocatorError):
            world.allocator.use_plan(plan)
            break
    return world


def fork_in_every_call(
    policy: str, capacity: str, operation: Callable[[Any], None], streams: Sequence[int] = (0,)
) -> None:
    """A child that is forked while another thread is in a call of the source has all of the pool,
    on each of the streams, and closes it. `operation` has no block of its own in the end."""
    counted = Misbehaving(capacity)
    with made(policy, counted) as pool:
        operation(pool)
        calls = sum(counted.counts[call] for call in PAGED_CALLS)
    for at in range(1, calls + 1):
        device, halt = Misbehaving(capacity), Halt()
        at_call(device, at, PAGED_CALLS, halt)
        with made(policy, device) as pool:
            thread = threading.Thread(target=operation, args=(pool,))
            thread.start()
            assert halt.inside.wait(DEADLINE)
            child = os.fork()
            if child == 0:  # pytest must not go on here, whatever happens
                code = 1
                try:
                    assert pool.check() is None
                    for stream in streams:
                        for size in (7, 3, 5):
                            pool.allocate(size * MIB, stream=stream).free()
                    pool.release_free_regions()
                    assert pool.check() is None
                    pool.close()
                    code = int(device.live_bytes != 0)
                finally:
                    os._exit(code)
            status = os.waitpid(child, 0)[1]
            halt.go.set()
            thread.join()
            assert status == 0, f"call {at} of {calls}"
            assert pool.check() is None
        assert not device.live_bytes


def fail_at_call(source: Misbehaving, n: int) -> None:
    """The n-th of the next calls that take memory or give it back fails."""

    def fail() -> None:
        raise OSError("the device has failed")

    at_call(source, n, ("alloc", "free"), fail)
