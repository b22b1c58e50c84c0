"""All of it together in one process: native threads and Python's threads on shared pools, scrapes
of Prometheus, forks, snapshots, pinned memory, workers of Dask, and pools that come and go, of host
memory, of CUDA's emulated driver and of OpenCL.

Subinterpreters are not among it: Python 3.11 itself loses its thread state where some are made and
ended beside threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import random
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import soak_devices
import soak_native
from soak_native import MAPPED, POLICIES, Game, habits, in_a_child
from soak_pinned import pinned
from waiting import PATIENCE, run_all

import bfc
from bfc.integrations.prometheus import Collector

ROUND = 20.0
#: Of pinned memory: each waits for the GIL, which the others hold nearly always.
PINNED = 300
SIZES = [1, 256, 300, 5000, 70_000, 1 << 20]


class Mixed:
    def __init__(self, seed: int, seconds: float) -> None:
        import prometheus_client

        self.dice = random.Random(seed)
        self.until = time.monotonic() + seconds
        self.policy = self.dice.choice(list(POLICIES))
        self.source = bfc.HostSubAllocator("512 MiB")
        self.pool = POLICIES[self.policy](self.source)
        self.registry = prometheus_client.CollectorRegistry()
        self.collector = Collector(self.registry)
        self.collector.add("shared", self.pool)
        self.lock = threading.Lock()
        self.calls = 0

    def repeat(self, work: Callable[[random.Random], int], seed: int) -> None:
        dice, calls = random.Random(seed), 0
        while time.monotonic() < self.until:
            calls += work(dice)
        with self.lock:
            self.calls += calls

    def buffers(self, dice: random.Random) -> int:
        """Buffers of Python's, whose contents are theirs alone."""
        live: list[tuple[Any, bytes]] = []
        for _ in range(40):
            with bfc.owner(dice.choice(["a", "b", "c"])):
                buffer = self.pool.allocate(dice.choice(SIZES))
            mark = dice.randbytes(min(buffer.nbytes, 8))
            ctypes.memmove(buffer.ptr, mark, len(mark))
            live.append((buffer, mark))
        dice.shuffle(live)
        for number, (buffer, mark) in enumerate(live):
            assert ctypes.string_at(buffer.ptr, len(mark)) == mark
            ctypes.memset(buffer.ptr, 0, len(mark))  # as the native players leave it
            if number % 2:
                buffer.free()
        live.clear()  # the others are freed by their finalisers
        return 80

    def scrape(self, dice: random.Random) -> int:
        """What Prometheus reads can be parsed, and its owners' bytes are the bytes in use."""
        import prometheus_client
        from prometheus_client.parser import text_string_to_metric_families

        text = prometheus_client.generate_latest(self.registry).decode()
        names = {family.name for family in text_string_to_metric_families(text)}
        assert "bfc_used_bytes" in names, text
        time.sleep(dice.random() / 100)
        return 1

    def come_and_go(self, dice: random.Random) -> int:
        """Pools that are scraped, used by native threads, and closed in the middle."""
        policy = dice.choice(list(POLICIES))
        source = bfc.HostSubAllocator("128 MiB")
        pool = POLICIES[policy](source)
        self.collector.add("guest", pool)
        game = Game("marks", pool, dice.getrandbits(32), 2, ctypes.byref(habits(policy, dice)))
        game.call("play", 20_000)
        calls = soak_native.finish(game, pool, source)
        self.collector.remove("guest")
        return calls

    def pin(self, dice: random.Random) -> int:
        return pinned(dice.getrandbits(32), PINNED)

    def look(self, dice: random.Random) -> int:
        pool = self.pool
        looks = [pool.check, pool.stats, pool.snapshot, pool.release_free_regions, gc.collect]
        dice.choice(looks)()
        time.sleep(dice.random() / 20)
        return 1

    def fork(self, dice: random.Random) -> int:
        time.sleep(dice.random())
        return in_a_child(functools.partial(self.in_the_child, dice.getrandbits(32))) + 1

    def in_the_child(self, seed: int) -> int:
        import prometheus_client

        self.pool.check()
        # Another thread may have held the lock of the parent's registry, which Python does not
        # make anew: a child waited for it for ever.
        self.registry = prometheus_client.CollectorRegistry()
        self.registry.register(self.collector)
        calls = self.scrape(random.Random(seed))
        if self.policy not in MAPPED:  # else the memory is the parent's, too
            calls += self.buffers(random.Random(seed))
        return calls

    def play(self) -> int:
        works = [self.buffers, self.buffers, self.scrape, self.come_and_go, self.look, self.fork]
        works += [self.pin, *soak_devices.at_hand()]
        with contextlib.ExitStack() as stack:
            if find_spec("distributed"):  # `make test-dask` installs it
                cluster = stack.enter_context(contextlib.closing(soak_devices.Cluster()))
                works.append(cluster.tasks)
            return self.play_all(works)

    def play_all(self, works: list[Callable[[random.Random], int]]) -> int:
        wanted = habits(self.policy, self.dice)
        game = Game("marks", self.pool, self.dice.getrandbits(32), 2, ctypes.byref(wanted))
        seeds = [self.dice.getrandbits(32) for _ in works]
        pairs = zip(works, seeds, strict=True)
        with game.going_on():
            repeated = [functools.partial(self.repeat, *pair) for pair in pairs]
            errors = run_all(repeated, PATIENCE)
        if errors:
            raise errors[0]
        gc.collect()
        return self.calls + soak_native.finish(game, self.pool, self.source)


def mixed(seed: int, seconds: float = ROUND) -> int:
    return Mixed(seed, seconds).play()
