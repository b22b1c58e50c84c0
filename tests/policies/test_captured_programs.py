"""Captured programs on host memory, replayed while others use the pool: what a graph uses goes to
nobody else, and all contents stay. The "graph" is a list of fills and copies between addresses."""

from __future__ import annotations

import ctypes
import os
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

import bfc

KIB, MIB = 1 << 10, 1 << 20
STREAM = 7

CACHING, BFC = bfc.CachingAllocator, bfc.BFCAllocator
Allocator = bfc.CachingAllocator | bfc.BFCAllocator
OPTIONS: list[tuple[type[Any], dict[str, Any]]] = [
    (CACHING, {}),
    (CACHING, {"settings": "expandable_segments:True"}),
    (CACHING, {"settings": "garbage_collection_threshold:0.5"}),
    (CACHING, {"stitch": True}),
    (CACHING, {"torch": "2.11", "strict": True}),
    (BFC, {"virtual_memory": True}),
    (BFC, {"allow_growth": True, "fragmentation_fraction": 0.01}),
    (BFC, {"allow_growth": True}),
]


def fill(address: int, value: int, nbytes: int) -> None:
    ctypes.memset(address, value, nbytes)


def holds(address: int, value: int, nbytes: int) -> bool:
    return ctypes.string_at(address, nbytes) == bytes([value]) * nbytes


@dataclass
class Program:
    """Work on a chain of temporary blocks, whose last one is copied to a result that stays."""

    allocator: Allocator
    result: int
    value: int
    nbytes: int
    steps: list[tuple[int, int]] = field(default_factory=list)
    pool: Any = None

    def capture(self, shared: Any = None) -> None:
        with self.allocator.capture(STREAM, pool=shared) as self.pool:
            last = 0
            for _ in range(4):
                block = self.allocator.allocate_raw(self.nbytes, stream=STREAM)
                self.steps.append((last, block))
                if last:
                    self.allocator.deallocate_raw(last)
                last = block
            self.allocator.deallocate_raw(last)
        self.steps.append((last, self.result))

    def replay(self) -> None:
        for source, target in self.steps:
            if source:
                ctypes.memmove(target, source, self.nbytes)
            else:
                fill(target, self.value, self.nbytes)


@dataclass
class Others:
    """Blocks outside of the graphs, each full of a value of its own."""

    allocator: Allocator
    rng: random.Random
    maps: bool
    live: dict[int, tuple[int, int]] = field(default_factory=dict)
    buffers: dict[int, bfc.Buffer] = field(default_factory=dict)

    def take(self) -> bool:
        nbytes = self.rng.choice((700, 40 * KIB, 40 * KIB, MIB, 11 * MIB))
        buffer = self.allocator.try_allocate(nbytes, stream=self.rng.choice((STREAM, 8)))
        if buffer is None:
            return False
        value = self.rng.randrange(1, 256)
        fill(buffer.ptr, value, nbytes)
        self.live[buffer.ptr] = value, nbytes
        self.buffers[buffer.ptr] = buffer
        return True

    def drop(self) -> None:
        if self.live:
            address = self.rng.choice(list(self.live))
            value, nbytes = self.live.pop(address)
            assert holds(address, value, nbytes)
            self.buffers.pop(address).free()

    def run_out(self) -> None:
        """Until a request is refused, after the retry that gives back what is cached."""
        for _ in range(200):
            if not self.take():
                return
        raise AssertionError("the limit was not reached")

    def step(self) -> None:
        self.rng.choices(
            [
                self.take,
                self.drop,
                self.allocator.empty_cache,
                self.trim,
                self.run_out,
            ],
            [8, 6, 1, 1, 0.3],
        )[0]()

    def trim(self) -> None:
        if self.maps:
            self.allocator.trim()

    def check(self) -> None:
        assert all(holds(address, *figures) for address, figures in self.live.items())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("policy", "options"), OPTIONS)
@pytest.mark.parametrize("seed", range(2))
def test_a_replayed_program_keeps_its_bytes(
    policy: type[Any], options: dict[str, Any], seed: int
) -> None:
    """Two graphs share a pool, a third has its own; each is replayed 100 times."""
    rng = random.Random(seed)
    with policy(bfc.HostSubAllocator(), memory_limit="48 MiB", **options) as allocator:
        programs = [
            Program(allocator, allocator.allocate_raw(2 * MIB, stream=STREAM), value, nbytes)
            for value, nbytes in ((11, 256 * KIB), (22, 1100 * KIB), (33, 5 * KIB))
        ]
        programs[0].capture()
        programs[1].capture(shared=programs[0].pool)
        programs[2].capture()
        others = Others(allocator, rng, maps="stitch" in options or "virtual_memory" in options)
        for turn in range(100):
            for _ in range(6):
                others.step()
            for program in programs:
                program.replay()
                assert holds(program.result, program.value, program.nbytes), (turn, program)
            if turn % 10 == 0:
                others.check()
                allocator.check()
        while others.live:
            others.drop()
        for program in programs:
            program.pool.release()
            allocator.deallocate_raw(program.result)
        allocator.empty_cache()
        assert allocator.stats().pool_bytes == 0


@pytest.mark.parametrize(("policy", "options"), [(CACHING, {}), (BFC, {"allow_growth": True})])
def test_a_fork_in_a_capture_leaves_both_processes_working(
    policy: type[Any], options: dict[str, Any]
) -> None:
    with policy(bfc.HostSubAllocator(), memory_limit="120 MiB", **options) as allocator:
        with allocator.capture(STREAM) as pool:
            block = allocator.allocate(MIB, stream=STREAM)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    block.free()
                    allocator.allocate(MIB, stream=STREAM).free()
                    allocator.check()
                    code = 0
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            block.free()
        pool.release()
        allocator.empty_cache()
        assert allocator.stats().pool_bytes == 0
