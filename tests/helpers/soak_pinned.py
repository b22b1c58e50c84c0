"""Pinned memory under random use: two threads on one allocator, streams that hold what they use,
limits, and views. Contents are compared, and no two blocks share a byte."""

from __future__ import annotations

import ctypes
import functools
import gc
import random
import threading
from bisect import bisect_left, insort
from typing import Any

from waiting import PATIENCE, run_all

import bfc
from bfc.pinned import PinnedAllocator

STEPS, THREADS, MOST_LIVE, CHECK_EVERY = 4000, 2, 60, 500
SIZES = (1, 100, 4096, 5000, 70_000, 1 << 20)


class Pinned:
    def __init__(self, seed: int, steps: int = STEPS) -> None:
        dice = random.Random(seed)
        self.steps = steps
        self.source = bfc.HostSubAllocator(dice.choice(["4 MiB", "16 MiB", "256 MiB"]))
        self.pool = PinnedAllocator(self.source)
        self.lock = threading.Lock()
        self.starts: list[int] = []
        self.ends: dict[int, int] = {}
        self.calls = 0

    def came(self, address: int, nbytes: int) -> None:
        """A block that no other one lies over."""
        with self.lock:
            at = bisect_left(self.starts, address)
            assert at == len(self.starts) or address + nbytes <= self.starts[at], "over the next"
            assert at == 0 or self.ends[self.starts[at - 1]] <= address, "over the one before"
            insort(self.starts, address)
            self.ends[address] = address + nbytes

    def goes(self, address: int) -> None:
        """Before its free: afterwards another thread may have it."""
        with self.lock:
            del self.starts[bisect_left(self.starts, address)], self.ends[address]

    def play(self, seed: int) -> None:
        dice = random.Random(seed)
        live: list[tuple[Any, int, int, bytes]] = []
        calls = 0
        for step in range(self.steps):
            if live and (len(live) >= MOST_LIVE or dice.random() < 0.45):
                self.free(*live.pop(dice.randrange(len(live))))
                calls += 1
            elif made := self.allocate(dice):
                live.append(made)
                calls += 1
            if step % CHECK_EVERY == 0:
                self.look(dice)
        for one in live:
            self.free(*one)
        with self.lock:
            self.calls += calls + len(live)

    def allocate(self, dice: random.Random) -> tuple[Any, int, int, bytes] | None:
        """A Buffer or a raw block, with a mark at both ends; None where there is no room."""
        nbytes = dice.choice(SIZES)
        try:
            buffer = self.pool.allocate(nbytes) if dice.random() < 0.5 else None
            address = self.pool.allocate_raw(nbytes) if buffer is None else buffer.ptr
        except bfc.OutOfMemoryError:
            return None
        self.came(address, nbytes)
        mark = dice.randbytes(min(nbytes, 8))
        ctypes.memmove(address, mark, len(mark))
        ctypes.memmove(address + nbytes - len(mark), mark, len(mark))
        return buffer, address, nbytes, mark

    def free(self, buffer: Any, address: int, nbytes: int, mark: bytes) -> None:
        last = ctypes.string_at(address + nbytes - len(mark), len(mark))
        assert last == mark, "other contents"
        if nbytes >= 2 * len(mark):
            assert ctypes.string_at(address, len(mark)) == mark, "other contents"
        self.goes(address)
        if buffer is None:
            self.pool.deallocate_raw(address)
        else:
            buffer.free()

    def look(self, dice: random.Random) -> None:
        looks = [self.pool.check, self.pool.host_memory_stats, self.pool.empty_cache, gc.collect]
        dice.choice(looks)()


def pinned(seed: int, steps: int = STEPS) -> int:
    """How many allocations and frees were verified."""
    game = Pinned(seed, steps)
    works = [functools.partial(game.play, seed * THREADS + n) for n in range(THREADS)]
    errors = run_all(works, PATIENCE)
    if errors:
        raise errors[0]
    game.pool.check()
    held = game.pool.host_memory_stats()
    assert held["active_bytes.current"] == 0, "something is still allocated"
    game.pool.close()
    return game.calls
