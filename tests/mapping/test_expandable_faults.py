"""Devices that fail under expandable segments: the caller is told, and nothing is lost.

Every driver call of every operation fails once, at several fills, alone or together with the call
that undoes it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

import pytest
from mapping_faults import MAPPING, AccountedDevice, fail_every_call
from own_interpreter import run

import bfc

MIB = 1 << 20


class World:
    """An allocator on such a device, and what a program has of it."""

    def __init__(
        self, strict: bool, capacity: str = "400 MiB", settings: str = "", **more: object
    ) -> None:
        self.device = AccountedDevice(capacity)
        settings = ",".join(filter(None, ("expandable_segments:True", settings)))
        self.allocator = bfc.CachingAllocator(self.device, settings=settings, strict=strict, **more)
        self.live: list[int] = []
        self.pool: bfc.MemPool | None = None
        self.regions_lost = 0

    def take(self, mebibytes: float, stream: int = 0) -> int:
        self.live.append(self.allocator.allocate_raw(int(mebibytes * MIB), stream))
        return self.live[-1]

    def drop(self, address: int) -> None:
        self.allocator.deallocate_raw(address)
        self.live.remove(address)

    def cache(self, *mebibytes: float, stream: int = 0) -> None:
        for address in [self.take(size, stream) for size in mebibytes]:
            self.drop(address)

    # -- what must hold ---------------------------------------------------------------------------

    def examine(self) -> None:
        """Not a byte is unaccounted for, and all that a program may get can be used."""
        figures = self.allocator.page_stats()
        stuck = sum(self.device.stuck.values())
        assert figures["page_bytes"] == sum(self.device.pages.values())
        assert figures["pages"] == len(self.device.pages)
        assert figures["reservations"] == len(self.device.reservations)
        assert figures["reserved_address_bytes"] == sum(self.device.reservations.values())
        assert figures["lost_bytes"] >= stuck
        assert bool(figures["lost_slots"]) == bool(stuck)
        if self.allocator.closed:
            assert self.device.live_bytes == figures["page_bytes"] == figures["lost_bytes"]
            return
        self.allocator.check()
        reserved = self.allocator.stats().bytes_reserved
        mapped = figures["page_bytes"] - figures["lost_bytes"]
        ordinary = sum(self.device.live.values())
        assert self.device.live_bytes == ordinary + figures["page_bytes"]
        assert ordinary + mapped <= reserved <= self.device.live_bytes
        counted = self.allocator.memory_stats()["reserved_bytes.all.current"]
        assert counted == reserved
        for address in self.live:
            self.examine_block(address, self.allocator.allocated_size(address))

    def examine_block(self, address: int, nbytes: int) -> None:
        runs = [*self.device.accessible, *self.device.live.items()]
        assert any(at <= address and address + nbytes <= at + size for at, size in runs)
        for at, size in self.device.stuck.items():
            assert address + nbytes <= at or at + size <= address, "handed out, and not unmapped"

    def use_all_free_memory(self) -> None:
        """Whatever is free is handed out, and can be used."""
        before = len(self.live)
        for size in (60, 18, 3, 0.5, 0.0005):
            for stream in (0, 1):
                with suppress(bfc.OutOfMemoryError):
                    self.take(size, stream)
        self.examine()
        assert len(self.live) > before
        for address in self.live[before:]:
            self.drop(address)

    def end(self) -> None:
        """The device has recovered: all of it goes back."""
        if not self.allocator.closed:
            self.examine()
            self.use_all_free_memory()
            for address in list(self.live):
                self.drop(address)
            if self.pool is not None:
                self.pool.release()
            self.allocator.release_free_regions()
            self.examine()
            assert not self.device.stuck
            assert self.device.live_bytes == self.allocator.stats().bytes_reserved == 0
            assert self.allocator.page_stats()["lost_bytes"] == 0
        self.allocator.close()
        left = self.device
        assert (left.live_bytes, left.reservations, left.pages, left.mappings) == (0, {}, {}, {})


# -- fills -----------------------------------------------------------------------------------------


def empty(strict: bool) -> World:
    return World(strict)


def cached(strict: bool) -> World:
    world = World(strict)
    world.cache(25, 1)
    return world


def with_holes(strict: bool) -> World:
    """Unmapped slots and free edges between blocks that are used, and a small range."""
    world = World(strict)
    hole = [world.take(10), world.take(50), world.take(10)][1]
    world.drop(hole)
    world.allocator.empty_cache()
    world.take(25)
    world.cache(30)
    world.take(0.5)
    return world


def on_streams(strict: bool) -> World:
    world = World(strict)
    world.cache(25, 30, stream=1)
    world.cache(25, 1)
    world.take(21, stream=1)
    return world


def full(strict: bool) -> World:
    """No request of 60 MiB is served before something goes back."""
    world = World(strict, "110 MiB")
    world.cache(60, stream=1)
    world.take(0.5)
    world.cache(1.5, 1, stream=3)
    return world


def with_a_pool(strict: bool) -> World:
    world = World(strict)
    world.pool = bfc.MemPool(world.allocator)
    with bfc.use_mem_pool(world.pool):
        world.cache(25, 1)
        world.take(0.5)
    world.drop(world.live[0])
    world.cache(30)
    return world


def mixed(strict: bool) -> World:
    """Ordinary segments, too."""
    world = World(strict)
    world.cache(25)
    world.allocator.set_settings("expandable_segments:False")
    world.cache(30, 1)
    world.allocator.set_settings("expandable_segments:True")
    world.take(0.5)
    return world


def limited(strict: bool) -> World:
    settings = "garbage_collection_threshold:0.4,max_split_size_mb:32"
    world = World(strict, settings=settings, memory_limit="120 MiB")
    world.cache(50, stream=1)
    world.take(0.5)
    return world


FILLS = [empty, cached, with_holes, on_streams, full, with_a_pool, mixed, limited]

# -- operations ------------------------------------------------------------------------------------


def allocate(world: World) -> None:
    world.take(45)


def allocate_small(world: World) -> None:
    world.take(0.5)


def allocate_much(world: World) -> None:
    """Of another stream: where little is left, all that is cached goes back first."""
    world.take(60, stream=2)


def allocate_too_much(world: World) -> None:
    world.take(500)


def allocate_many(world: World) -> None:
    sizes = [2 * MIB, 45 * MIB, 512, 1 * MIB]
    world.live += [int(it) for it in world.allocator.allocate_many(sizes)]


def empty_cache(world: World) -> None:
    world.allocator.empty_cache()


def release_free_regions(world: World) -> None:
    world.allocator.release_free_regions()


def release_the_pool(world: World) -> None:
    if world.pool is not None:
        world.pool.release()


def close(world: World) -> None:
    world.live.clear()
    world.allocator.close()


def toggle(world: World) -> None:
    world.allocator.set_settings("expandable_segments:False")
    world.take(22)
    world.allocator.empty_cache()
    world.allocator.set_settings("expandable_segments:True")
    world.take(23)
    world.allocator.empty_cache()


OPERATIONS = [
    allocate, allocate_small, allocate_much, allocate_too_much, allocate_many, empty_cache,
    release_free_regions, release_the_pool, close, toggle,
]  # fmt: skip

# -- every call fails once -------------------------------------------------------------------------


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fill", FILLS)
def test_every_call_fails_once(fill, operation, strict: bool) -> None:
    fail_every_call(partial(fill, strict), operation, MAPPING)


def test_half_a_million_pages_go_without_a_crash():
    """The records of pages are a list: one that is dropped must not end them one inside the
    other."""
    run("""
    class Keeps(bfc.SimulatedSubAllocator):
        def create(self, nbytes):
            self.number = getattr(self, "number", 0) + 1
            return self.number
        def map(self, address, pages): raise bfc.SubAllocatorError("no")
        def release(self, page): raise bfc.SubAllocatorError("no")

    device = Keeps("32 TiB")
    allocator = bfc.CachingAllocator(device, settings="expandable_segments:True")
    with contextlib.suppress(bfc.SubAllocatorError, bfc.OutOfMemoryError):
        allocator.allocate("10 TiB")
    with contextlib.suppress(bfc.SubAllocatorError, bfc.OutOfMemoryError):
        allocator.close()
    del allocator

    device = bfc.SimulatedSubAllocator("32 TiB")
    held = device.alloc(256, 31 << 40)
    allocator = bfc.CachingAllocator(device, settings="expandable_segments:True")
    with contextlib.suppress(bfc.OutOfMemoryError):
        allocator.allocate("30 TiB")
    allocator.close()
    """)
