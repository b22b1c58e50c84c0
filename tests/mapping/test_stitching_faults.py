"""Devices that fail under stitching: the caller is told, and nothing is lost.

Every driver call of every operation fails once, at several fills, alone or together with the call
that undoes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from mapping_faults import KINDS, AccountedDevice, PagedProgram, calls_of, fail_every_call

import bfc

MIB = 1 << 20
PAGE = 2 * MIB


def bfc_made(device: AccountedDevice, **more: Any) -> Any:
    return bfc.BFCAllocator(device, virtual_memory=True, page_size="2 MiB", headroom=0.05, **more)


def caching_made(device: AccountedDevice, **more: Any) -> Any:
    return bfc.CachingAllocator(device, stitch=True, **more)


class World(PagedProgram):
    """An allocator on a device that keeps account of its pages, and what a program has of it."""

    make = staticmethod(bfc_made)

    def __init__(self, capacity: str = "48 MiB", **more: Any) -> None:
        device = AccountedDevice(capacity)
        super().__init__(device, self.make(device, **more))

    def take(self, mebibytes: float, stream: int = 0) -> int:
        return super().take(int(mebibytes * MIB), stream)

    def cache(self, *mebibytes: float, stream: int = 0) -> None:
        self.drop(*[self.take(size, stream) for size in mebibytes])

    def make_holes(self, count: int, stream: int = 0) -> None:
        """Free blocks of 4 MiB, each before one that is live."""
        blocks = [self.take(size, stream) for _ in range(count) for size in (4, 2)]
        self.drop(*blocks[::2])

    # -- what must hold ---------------------------------------------------------------------------

    def examine(self) -> None:
        """Not a byte is unaccounted for. What is live can be used: the ledger looks at each."""
        self.ledger.read()
        device, figures = self.device, self.allocator.page_stats()
        assert bool(figures["lost_slots"]) >= bool(device.stuck)
        if self.allocator.closed:
            return
        self.allocator.check()
        assert figures["pages"] * figures["page_size"] + sum(device.live.values()) == (
            device.live_bytes
        )
        reserved = self.allocator.stats().bytes_reserved
        assert reserved == device.live_bytes
        for block in self.ledger.live.values():
            list(self.ledger._places(block.ptr, block.nbytes))
            for at, size in device.stuck.items():
                outside = block.ptr + block.nbytes <= at or at + size <= block.ptr
                assert outside, "handed out, and not unmapped"
        in_use = sum(block.nbytes for block in self.ledger.live.values())
        assert self.allocator.stats().bytes_in_use == in_use

    def use_all_free_memory(self) -> None:
        """Whatever is free is handed out, and can be used."""
        before = set(self.ledger.live)
        for size in (30, 18, 8, 4, 2, 2, 0.5, 0.0005):
            for stream in (0, 1):
                with suppress(bfc.OutOfMemoryError):
                    self.take(size, stream)
        self.examine()
        new = set(self.ledger.live) - before
        if not self.device.stuck:
            assert new
        self.drop(*new)

    def end(self) -> None:
        """The device has recovered: all of it goes back."""
        if not self.allocator.closed:
            self.examine()
            self.use_all_free_memory()
            self.drop(*list(self.ledger.live))
            self.allocator.release_free_regions()
            self.examine()
            assert self.device.live_bytes == self.allocator.stats().bytes_reserved == 0
            assert not self.device.stuck
        self.allocator.close()
        self.ledger.examine_closed()


@pytest.fixture(autouse=True, params=[bfc_made, caching_made])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "make", staticmethod(request.param))


# -- fills -----------------------------------------------------------------------------------------


def empty() -> World:
    return World()


def cached() -> World:
    world = World()
    world.cache(25, 1)
    return world


def with_holes() -> World:
    """Room is left, and what is free lies in pieces."""
    world = World()
    world.make_holes(4)
    world.take(0.5)
    return world


def full_of_holes() -> World:
    """Nothing is left, and half of the memory is free, in pieces."""
    world = World("48 MiB")
    world.make_holes(8)
    return world


def with_views() -> World:
    """A view that is live, and one that is free, over the holes."""
    world = World("48 MiB")
    world.make_holes(8)
    world.cache(20)
    world.take(8)
    return world


def with_many_views() -> World:
    """As many as are kept, so that the next one takes the place of the oldest."""
    world = World("48 MiB")
    world.make_holes(8)
    for size in (32, 28, 20, 16, 12, 10):
        world.cache(size)
    return world


def of_another_stream() -> World:
    """All that is free is another stream's."""
    world = World("48 MiB")
    world.make_holes(8, stream=1)
    return world


def had_by_two_streams() -> World:
    """All that is free is another stream's, and is mapped in the range of stream 0, too."""
    world = World("48 MiB")
    world.make_holes(4)
    for stream in (1, 0, 1):
        world.cache(36, stream=stream)
    return world


def limited() -> World:
    world = World("1 GiB", memory_limit="30 MiB")
    world.make_holes(4)
    return world


FILLS = [
    empty, cached, with_holes, full_of_holes, with_views, with_many_views, of_another_stream,
    had_by_two_streams, limited,
]  # fmt: skip

# -- operations ------------------------------------------------------------------------------------


def allocate(world: World) -> None:
    world.take(14)


def allocate_contiguous(world: World) -> None:
    buffer = world.allocator.allocate(9 * MIB, contiguous=True)
    world.ledger.take(buffer.ptr, 0)
    world.ledger.give_back(buffer.ptr)
    buffer.free()


def allocate_small(world: World) -> None:
    world.take(0.5)


def allocate_for_another_stream(world: World) -> None:
    world.take(10, stream=2)


def allocate_too_much(world: World) -> None:
    world.take(500)


def allocate_many(world: World) -> None:
    found = world.allocator.allocate_many([2 * MIB, 9 * MIB, 512, MIB])
    for ptr in found:
        world.ledger.take(int(ptr))


def release_free_regions(world: World) -> None:
    world.allocator.release_free_regions()


def trim(world: World) -> None:
    world.allocator.trim(3 * MIB)


def trim_all(world: World) -> None:
    world.allocator.trim(wait=True)


def extend(world: World) -> None:
    buffer = world.allocator.allocate(3 * MIB)
    try:
        world.allocator.try_extend(buffer, 9 * MIB)
    finally:
        buffer.free()


def churn(world: World) -> None:
    """Views are made and taken again, and pages pass between streams."""
    for size, stream in ((20, 0), (12, 1), (20, 0), (0.7, 1), (16, 0)):
        world.cache(size, stream=stream)


def close(world: World) -> None:
    for ptr in list(world.ledger.live):
        world.ledger.give_back(ptr)
    world.allocator.close()


OPERATIONS = [
    allocate, allocate_small, allocate_for_another_stream, allocate_too_much, allocate_many,
    allocate_contiguous, release_free_regions, trim, trim_all, extend, churn, close,
]  # fmt: skip

# -- every call fails once -------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fill", FILLS)
def test_every_call_fails_once(fill: Callable[[], World], operation: Callable) -> None:
    fail_every_call(fill, operation)


def test_the_operations_make_every_kind_of_call() -> None:
    """Else the test above would say little."""
    made = dict.fromkeys(KINDS, 0)
    for fill, operation in itertools.product(FILLS, OPERATIONS):
        for kind, count in calls_of(fill, operation).items():
            made[kind] += count
    assert [
        kind for kind, count in made.items() if not count and kind not in ("alloc", "free")
    ] == []
