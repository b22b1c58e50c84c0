"""Steps that begin by themselves: plans of programs that mark none."""

from __future__ import annotations

import bisect
import ctypes
import os
import random
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from repeated_runs import DisturbedProgram

import bfc
from bench.lengths import vision
from bench.plans import (
    MADE_UP,
    caching,
    first_iterations,
    growing_bfc,
    reserved,
    without_marks,
)
from bench.repeated import most_live

MIB = 1 << 20
POLICIES = ("caching", "bfc")
MAKES = {"caching": caching, "bfc": growing_bfc}
LAYERS, WORK = 6, 7 << 18
Event = tuple[int, int, int]


def made(policy: str, source: bfc.SubAllocator, **options: Any) -> bfc.Allocator:
    if policy == "caching":
        return bfc.CachingAllocator(source, **options)
    return bfc.BFCAllocator(source, allow_growth=True, **options)


class Training:
    """The events of a training: (operation, block, bytes)."""

    def __init__(self) -> None:
        self.blocks = 0
        self.loss: int | None = None

    def block(self, size: int) -> Event:
        self.blocks += 1
        return 0, self.blocks - 1, size

    def head(self) -> Iterator[Event]:
        for layer in range(LAYERS):
            yield self.block(MIB + 4096 * layer)

    def forward(self) -> Iterator[Event]:
        for layer in range(LAYERS):
            yield self.block((layer + 3) << 19)
            work = self.block(WORK)
            yield work
            yield 1, work[1], 0

    def iteration(self) -> Iterator[Event]:
        batch = self.block(3000)
        yield batch
        saved = []
        for event in self.forward():
            yield event
            if event[0] == 0 and event[2] != WORK:
                saved.append(event[1])
        if self.loss is not None:
            yield 1, self.loss, 0
        loss = self.block(4)
        yield loss
        self.loss = loss[1]
        gradients = []
        for layer in reversed(range(LAYERS)):
            gradients.append(self.block(MIB + 4096 * layer))
            yield gradients[-1]
            yield 1, saved[layer], 0
        for gradient in (*gradients, batch):
            yield 1, gradient[1], 0

    def evaluation(self) -> Iterator[Event]:
        batch = self.block(3000)
        yield batch
        last = None
        for event in self.forward():
            yield event
            if event[0] == 0 and event[2] != WORK:
                if last is not None:
                    yield 1, last, 0
                last = event[1]
        assert last is not None
        yield 1, last, 0
        yield 1, batch[1], 0


def recorded(iterations: int = 5) -> tuple[bfc.Trace, list[int]]:
    training = Training()
    events, marks = list(training.head()), []
    for _ in range(iterations):
        marks.append(len(events))
        events += training.iteration()
    ops, ids, sizes = zip(*events, strict=True)
    return bfc.Trace(ops, ids, sizes), marks


def plan_of(policy: str) -> bfc.Plan:
    trace, marks = recorded()
    return bfc.Plan.from_trace(trace, marks=marks, fallback=policy)


@dataclass(kw_only=True)
class Program(DisturbedProgram):
    """What plays events on host memory, writes all blocks and reads them back, and knows by itself
    which addresses are in use."""

    held: dict[int, tuple[bfc.Buffer, int]] = field(default_factory=dict)
    intervals: list[tuple[int, int]] = field(default_factory=list)

    def allocate(self, key: int, size: int) -> None:
        buffer = self.pool.allocate(size)
        self.number += 1
        interval = (buffer.ptr, buffer.ptr + size)
        at = bisect.bisect(self.intervals, interval)
        assert at == 0 or self.intervals[at - 1][1] <= interval[0]
        assert at == len(self.intervals) or interval[1] <= self.intervals[at][0]
        self.intervals.insert(at, interval)
        ctypes.memset(buffer.ptr, self.number % 251, size)
        self.held[key] = buffer, self.number % 251

    def free(self, key: int) -> None:
        if key not in self.held:
            return  # was never asked for
        buffer, value = self.held.pop(key)
        contents = np.frombuffer((ctypes.c_char * buffer.nbytes).from_address(buffer.ptr), np.uint8)
        assert (contents == value).all(), f"key {key}: its contents have changed"
        del contents
        self.intervals.remove((buffer.ptr, buffer.ptr + buffer.nbytes))
        buffer.free()

    def end(self) -> None:
        for key in list(self.held):
            self.free(key)
        assert self.pool.check() is None
        assert self.pool.stats().bytes_in_use == 0


def program(pool: bfc.Allocator, seed: object = 0, wrong: float = 0.0) -> Program:
    return Program(pool=pool, dice=random.Random(f"{seed}"), wrong=wrong, most=4 * MIB)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_program_without_marks_takes_what_its_plan_says(policy: str):
    plan = plan_of(policy)
    training = Training()
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(plan, steps="auto")
        run = program(pool)
        run.play(list(training.head()))
        for _ in range(6):
            run.play(list(training.iteration()))
            run.play(list(training.evaluation()))  # begins as an iteration does
        stats = pool.plan_stats()
        assert stats["agreement"] == 1.0
        assert stats["recognised"] == stats["steps"] == 11  # and one is open
        assert pool.stats().peak_pool_bytes == plan.span
        with pool.step("train"):  # goes before
            run.play(list(training.iteration()))
        assert pool.plan_stats()["agreement"] == 1.0
        run.end()
        with pytest.raises(ValueError, match="'auto'"):
            pool.use_plan(plan, steps="always")  # type: ignore[arg-type]
        pool.use_plan(None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["length", "height and width", "two models in turn"])
@pytest.mark.parametrize("policy", POLICIES)
def test_lengths_are_read_without_marks(policy: str, name: str):
    trace = MADE_UP[name](0)
    plan = bfc.Plan.from_trace(first_iterations(trace, 10), fallback=policy)
    taken = []
    for played, steps in ((trace, None), (without_marks(trace), "auto")):
        with MAKES[policy](bfc.SimulatedSubAllocator("1 TiB")) as pool:
            pool.use_plan(plan, steps=steps, gate=None)  # type: ignore[arg-type]
            taken.append(played.replay(pool).peak_bytes_reserved)
    assert taken[1] <= 1.005 * taken[0], pool.plan_stats()
    assert pool.plan_stats()["recognised"] >= 29


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("policy", POLICIES)
def test_disturbed_programs_keep_their_contents(policy: str, seed: int):
    """Iterations, evaluations, other work, exceptions and models that are made anew."""
    dice = random.Random(f"{policy} {seed}")
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(plan_of(policy), steps="auto", gate=None)
        run, training = program(pool, seed, (0.0, 0.02, 0.1)[seed % 3]), Training()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # it may be given up
            for _ in range(2):
                run.play(list(training.head()))
                for _ in range(8):
                    events = list(training.iteration())
                    what = dice.random()
                    if what < 0.2:
                        run.play(list(training.evaluation()))
                    elif what < 0.4:  # an exception: all but the weights is freed
                        run.play(events[: dice.randrange(len(events))])
                        for key in [key for key in run.held if key >= LAYERS]:
                            run.free(key)
                        training.loss = None
                        continue
                    run.play(events)
                if run.wrong == 0:
                    assert pool.plan_stats()["agreement"] > 0.9
                run.end()
                training.loss = None


def of_length(n: int, whole: bool = True) -> list[int]:
    return [n * 4096, *[n * 65536] * 4, *([n * 32768] * 12 if whole else [])]


@pytest.mark.parametrize("policy", POLICIES)
def test_longer_evaluations_make_room_once(policy: str):
    """They begin as an iteration does, and ask for less: the room that was made goes back."""
    ops, ids, sizes, marks = [], [], [], []
    for n in (100, 300, 200, 100):
        marks.append(len(ops))
        blocks = list(range(len(ops), len(ops) + 17))
        ops += [0] * 17 + [1] * 17
        ids += blocks * 2
        sizes += of_length(n) + [0] * 17
    plan = bfc.Plan.from_trace(bfc.Trace(ops, ids, sizes), marks=marks, fallback=policy)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(plan, steps="auto", gate=None)
        taken = []
        for n, whole in [(300, True), (550, False), (220, True), *[(550, False), (300, True)] * 3]:
            held = [pool.allocate(size) for size in of_length(n, whole)]
            del held
            taken.append(pool.stats().pool_bytes)
        assert taken[0] == plan.span < taken[1]
        if policy == "bfc":  # the other policy keeps what it had for evaluations
            assert taken[2] == taken[-1] == plan.span
        assert pool.plan_stats()["recognised"] >= 7
        assert pool.check() is None


def ask_for_others(pool: bfc.Allocator, times: int) -> None:
    for _ in range(times):
        held = [pool.allocate(size * 777) for size in (1, 900, 5000, 31)]
        del held


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_of_another_program_is_given_up(policy: str):
    """It holds its regions for two iterations at most, and ends with words."""
    source = bfc.SimulatedSubAllocator("1 GiB")
    with made(policy, source) as pool:
        pool.use_plan(plan_of(policy), steps="auto")
        with pytest.warns(RuntimeWarning, match="were not recognised"):
            ask_for_others(pool, 40)
        assert pool.plan_stats()["state"] == "switched off"
        large = pool.allocate(64 * MIB)  # what the plan held goes back before more is asked for
        del large
        taken = pool.stats().pool_bytes
    with made(policy, source) as pool:
        ask_for_others(pool, 1)
        large = pool.allocate(64 * MIB)
        assert taken <= pool.stats().pool_bytes
        del large


@pytest.mark.parametrize("policy", POLICIES)
def test_the_region_goes_back_while_no_iteration_comes(policy: str):
    training = Training()
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        plan = plan_of(policy)
        pool.use_plan(plan, steps="auto")
        run = program(pool)
        run.play(list(training.head()))
        for _ in range(2):
            run.play(list(training.iteration()))
        assert training.loss is not None
        run.free(training.loss)
        training.loss = None
        for number in range(200):  # serves, until it trains again
            run.allocate(-number - 1, 700 + number)
            run.free(-number - 1)
        assert not pool.plan_stats()["has_body"]
        assert pool.plan_stats()["state"] == "between steps"
        before = pool.plan_stats()["hits"]
        run.play(list(training.iteration()))
        assert pool.plan_stats()["has_body"]
        assert pool.plan_stats()["hits"] - before == 3 * LAYERS + 2
        run.end()


@pytest.mark.filterwarnings("ignore:the iterations of the plan")  # those of threads are others
def test_a_forked_child_and_threads_begin_steps_of_their_own():
    training = Training()
    with bfc.CachingAllocator(bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(plan_of("caching"), steps="auto")
        run = program(pool)
        run.play(list(training.head()))
        events = list(training.iteration())
        run.play(events[:9])
        child = os.fork()
        if child == 0:  # pytest must not go on here, whatever happens
            code = 1
            try:
                run.play(events[9:])
                run.play(list(training.iteration()))
                stats = pool.plan_stats()
                code = int(stats["agreement"] != 1.0 or stats["recognised"] != 1)
            finally:
                os._exit(code)
        run.play(events[9:])
        assert os.waitpid(child, 0)[1] == 0
        threads = [threading.Thread(target=_work, args=(pool, seed)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.check() is None
        run.play(list(training.iteration()))
        run.end()


def _work(pool: bfc.Allocator, seed: int) -> None:
    run, training = Training(), random.Random(seed)
    held: dict[int, bfc.Buffer] = {}
    for _ in range(20):
        for op, key, size in run.iteration():
            if op == 0:
                held[key] = pool.allocate(size)
            else:
                held.pop(key).free()
        if training.random() < 0.3:
            pool.plan_stats()


def test_a_run_is_served_by_its_own_recording():
    """With nothing but what was found in the events, from the recording to the run."""
    marked = vision(3, lambda dice: (32 * dice.randint(6, 16), 320))
    first, trace = without_marks(first_iterations(marked, 12)), without_marks(marked)
    plan = bfc.Plan.from_trace(first, marks="auto")
    assert plan.kinds
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 TiB")) as pool:
        pool.use_plan(plan, steps="auto")
        taken = trace.replay(pool).peak_bytes_reserved
    assert taken <= 1.02 * most_live(trace) < reserved(trace, caching)
