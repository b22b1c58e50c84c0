"""Four of Python's threads on pools that they share and on pools of their own: what threads may do
by `what-is-safe.md`. Contents are compared at each free, and the books at the end."""

from __future__ import annotations

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from soak_native import MAPPED, POLICIES
from waiting import PATIENCE, run_all

import bfc

STEPS, THREADS, MOST_LIVE, LOOK_EVERY = 20_000, 4, 40, 200
SIZES = (1, 100, 4096, 5000, 70_000, 300_000)
CAPACITY = "256 MiB"
STREAM = 7


class Block:
    """A Buffer or a raw block, with a mark at both ends."""

    def __init__(self, pool: Any, dice: random.Random, nbytes: int, is_raw: bool) -> None:
        self.pool, self.nbytes = pool, nbytes
        self.buffer = None if is_raw else pool.allocate(nbytes)
        self.address = pool.allocate_raw(nbytes) if is_raw else self.buffer.ptr
        self.mark = dice.randbytes(min(nbytes, 8))
        ctypes.memmove(self.address, self.mark, len(self.mark))
        ctypes.memmove(self.address + nbytes - len(self.mark), self.mark, len(self.mark))

    def verify(self) -> None:
        size = len(self.mark)
        last = ctypes.string_at(self.address + self.nbytes - size, size)
        assert last == self.mark, "other contents"
        if self.nbytes >= 2 * size:
            assert ctypes.string_at(self.address, size) == self.mark, "other contents"

    def free(self, dice: random.Random) -> None:
        self.verify()
        if self.buffer is None:
            self.pool.deallocate_raw(self.address)
        elif dice.random() < 0.5:
            self.buffer.free()
        self.buffer = None


def iterate(pool: Any) -> None:
    """An iteration of what the plan is made of."""
    kept = [pool.allocate(3 << 20) for _ in range(3)]
    while kept:
        pool.allocate(5 << 20)
        kept.pop()


def recorded(pool: Any) -> tuple[bfc.Plan, bfc.Trace]:
    """The plan of a program, and what it asks for."""
    with pool.record_plan() as recording:
        for _ in range(5):
            with pool.step("train"):
                iterate(pool)
    plan = recording.plan()
    pool.record_history()
    for _ in range(5):
        iterate(pool)
    trace = bfc.Trace.from_snapshot(pool.snapshot())
    pool.record_history(None)
    return plan, trace


def planned(plan: bfc.Plan) -> bfc.CachingAllocator:
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    pool.use_plan(plan, gate=None)
    return pool


class Shared:
    """What all threads have in common."""

    def __init__(self, dice: random.Random) -> None:
        self.policy = dice.choice(list(POLICIES))
        self.pool = POLICIES[self.policy](bfc.HostSubAllocator(CAPACITY))
        self.pinned = bfc.PinnedAllocator(bfc.HostSubAllocator(CAPACITY))
        self.is_recorded = dice.random() < 0.3
        if self.is_recorded:
            self.pool.record_history(max_entries=1000)
        self.handed: deque[Block] = deque(maxlen=None)  # from one thread to another
        self.twice: deque[bfc.Buffer] = deque()  # freed by whoever comes, and again
        self.owner, self.stream = bfc.owner("shared"), bfc.use_stream(0)
        self.graphs = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        self.capturing = threading.Lock()  # a stream captures once at a time
        self.plan, self.trace = recorded(self.graphs)
        self.planned = planned(self.plan)
        self.calls, self.counting = 0, threading.Lock()


class Player:
    def __init__(self, shared: Shared, seed: int, number: int, steps: int) -> None:
        self.shared, self.number, self.steps = shared, number, steps
        self.dice = random.Random(seed * THREADS + number)
        self.policy = self.dice.choice(list(POLICIES))
        self.own = POLICIES[self.policy](bfc.HostSubAllocator(CAPACITY))
        self.live: list[Block] = []
        self.calls = 0

    def play(self) -> None:
        deeds: list[Callable[[], None]] = [
            self.take_over, self.view, self.copy, self.free_twice, self.scopes, self.many,
            self.sleep, self.step, self.capture, self.record_stream, self.plan, self.trace,
        ]  # fmt: skip
        for step in range(self.steps):
            if step % LOOK_EVERY == 0:
                self.look()
            if self.dice.random() < 0.1:
                self.dice.choice(deeds)()
            elif self.live and (len(self.live) >= MOST_LIVE or self.dice.random() < 0.48):
                self.free_one()
            else:
                self.live.append(self.block())
            self.calls += 1
        while self.live:
            self.live.pop().free(self.dice)
        self.own.release_free_regions()
        self.own.check()
        assert self.own.stats().bytes_in_use == 0
        self.own.close()
        with self.shared.counting:
            self.shared.calls += self.calls

    def pools(self) -> list[Any]:
        return [self.shared.pool, self.shared.pinned, self.own]

    def block(self) -> Block:
        nbytes = self.dice.choice(SIZES)
        return Block(self.dice.choice(self.pools()), self.dice, nbytes, self.dice.random() < 0.5)

    def free_one(self) -> None:
        block = self.live.pop(self.dice.randrange(len(self.live)))
        if block.pool is not self.own and self.dice.random() < 0.3:
            self.shared.handed.append(block)
        else:
            block.free(self.dice)

    def take_over(self) -> None:
        for _ in range(20):
            try:
                block = self.shared.handed.popleft()
            except IndexError:
                return
            block.free(self.dice)

    def view(self) -> None:
        """Memory that is viewed is not freed."""
        with self.dice.choice(self.pools()).allocate(64) as buffer:
            array = np.asarray(buffer.view("u4", (4, 4)))
            array[:] = self.number
            try:
                buffer.free()
            except BufferError:
                assert not buffer.freed
            else:
                raise AssertionError("a viewed buffer was freed")
            assert (buffer.view("u4").to_host() == self.number).all()
            del array
            assert (np.from_dlpack(buffer.view("u4")) == self.number).all()

    def copy(self) -> None:
        before = np.frombuffer(self.dice.randbytes(5000), np.uint8)
        first = self.own.allocate(5000).from_host(before)
        second = self.shared.pool.allocate(5000)
        bfc.copy(second, first)
        assert (second.to_host() == before).all(), "other contents"

    def free_twice(self) -> None:
        """Several threads free the same buffer."""
        if self.dice.random() < 0.5:
            buffer = self.shared.pool.allocate(100)
            self.shared.twice.extend([buffer] * 3)
            buffer.free()
        for _ in range(3):
            with contextlib.suppress(IndexError):
                self.shared.twice.pop().free()

    def scopes(self) -> None:
        with self.shared.owner, self.shared.stream, bfc.owner(f"of {self.number}"):
            self.shared.pool.allocate(100).free()

    def many(self) -> None:
        addresses = self.shared.pool.allocate_many([100, 5000] * 4)
        assert len(set(addresses.tolist())) == 8
        self.shared.pool.deallocate_many(addresses)

    def sleep(self) -> None:
        """A tag of this thread sleeps, in a pool that others use meanwhile."""
        name = f"tag {self.number}"
        pool = self.shared.pool if self.shared.policy in MAPPED else self.own
        if pool is self.own and self.policy not in MAPPED:
            return
        with pool.tag(name):
            block = Block(pool, self.dice, 5000, False)
        pool.sleep(keep={name: "host"})
        pool.wake(name)
        block.free(self.dice)

    def step(self) -> None:
        with contextlib.suppress(RuntimeError), self.shared.pool.step("train"):
            self.shared.pool.allocate(300).free()

    def plan(self) -> None:
        """One plan serves a pool of this thread, and one that others use meanwhile."""
        own = planned(self.shared.plan)
        with own.step("train"):
            iterate(own)
        assert own.plan_stats()["hits"] == 6, own.plan_stats()
        own.close()
        with contextlib.suppress(RuntimeError), self.shared.planned.step("train"):
            iterate(self.shared.planned)

    def trace(self) -> None:
        """Replays take turns with those who allocate."""
        pool = self.dice.choice([self.shared.graphs, self.shared.planned])
        run = self.shared.trace.replay(pool)
        assert (run.failed, len(run.addresses)) == (0, len(self.shared.trace)), run

    def capture(self) -> None:
        with self.shared.capturing, self.shared.graphs.capture(STREAM) as graph:
            kept = self.shared.graphs.allocate(1000, stream=STREAM)
        kept.free()
        graph.release()

    def record_stream(self) -> None:
        pool = self.dice.choice([self.shared.graphs, self.shared.pinned])
        buffer = pool.allocate(2000)
        pool.record_stream(buffer, self.number + 1)
        buffer.free()

    def look(self) -> None:
        pool, pinned, graphs = self.shared.pool, self.shared.pinned, self.shared.graphs
        looks = [pool.check, pool.stats, pool.snapshot, pool.leaks, pool.reset_peak_stats]
        looks += [pinned.check, pinned.host_memory_stats, pinned.empty_cache]
        looks += [pool.release_free_regions, graphs.empty_cache]
        self.dice.choice(looks)()


def turns(seed: int, steps: int = STEPS) -> int:
    """How many operations were verified."""
    shared = Shared(random.Random(seed))
    players = [Player(shared, seed, number, steps) for number in range(THREADS)]
    errors = run_all([player.play for player in players], PATIENCE)
    if errors:
        raise errors[0]
    for block in shared.handed:
        block.free(random.Random(0))
    for block in list(shared.twice):
        block.free()
    shared.handed.clear()
    for pool in (shared.pool, shared.graphs, shared.planned):
        pool.release_free_regions()
        pool.check()
        assert pool.stats().bytes_in_use == 0, "something is still allocated"
        pool.close()
    shared.pinned.check()
    assert shared.pinned.host_memory_stats()["active_bytes.current"] == 0
    shared.pinned.close()
    return shared.calls
