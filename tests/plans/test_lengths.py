"""Iterations whose lengths vary: all sizes follow from the first that does, or from several."""

from __future__ import annotations

import ctypes
import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planned_pages import fail_at_call

import bfc
from bench.lengths import RUNS
from bench.plans import made_up
from bfc.plans.lengths import fitted
from bfc.testing import Misbehaving

MIB = 1 << 20
POLICIES = ("caching", "bfc")
LAYERS = 4
#: Lengths that are recorded; the last iteration shows what the one before leaves alive.
RECORDED = (100, 260, 180, 100)


def made(policy: str, source: bfc.SubAllocator, **options: Any) -> bfc.Allocator:
    if policy == "caching":
        return bfc.CachingAllocator(source, **options)
    return bfc.BFCAllocator(source, allow_growth=True, **options)


class Program:
    """A training on batches of several lengths. Its events are (operation, block, bytes)."""

    def __init__(self, keeps: bool = True) -> None:
        self.keeps = keeps  # the batch and the loss until the next iteration has others
        self.blocks = 0
        self.kept: list[int] = []

    def block(self, size: int) -> tuple[int, int, int]:
        self.blocks += 1
        return 0, self.blocks - 1, size

    def head(self) -> Iterator[tuple[int, int, int]]:
        for _ in range(LAYERS):
            yield self.block(3 * MIB)

    def iteration(self, n: int, first: bool = False) -> Iterator[tuple[int, int, int]]:
        batch = self.block(128 * n)
        yield batch
        if self.kept:
            yield 1, self.kept.pop(0), 0
        saved = []
        for _ in range(LAYERS):
            hidden, scores = self.block(16384 * n + 8192), self.block(64 * n * n)
            work = self.block(16384 * n)
            yield from (hidden, scores, work)
            yield 1, work[1], 0
            saved += [hidden[1], scores[1]]
        loss = self.block(4)
        yield loss
        if self.kept:
            yield 1, self.kept.pop(0), 0
        gradients = []
        for _ in range(LAYERS):
            gradients.append(self.block(3 * MIB))
            yield gradients[-1]
            yield 1, saved.pop(), 0
            yield 1, saved.pop(), 0
        if first:  # the optimizer's state
            for _ in range(LAYERS):
                yield self.block(6 * MIB)
        for gradient in gradients:
            yield 1, gradient[1], 0
        if self.keeps:
            self.kept = [batch[1], loss[1]]
        else:
            yield 1, batch[1], 0
            yield 1, loss[1], 0


def recorded(
    lengths: tuple[int, ...] = RECORDED, program: Program | None = None, **options: Any
) -> bfc.Trace:
    program = program or Program(**options)
    events, marks = list(program.head()), []
    for i, n in enumerate(lengths):
        marks.append([len(events), "train"])
        events += program.iteration(n, first=i == 0)
    ops, ids, sizes = zip(*events, strict=True)
    return bfc.Trace(ops, ids, sizes, meta={"marks": marks})


def plan_of(policy: str, **options: Any) -> bfc.Plan:
    return bfc.Plan.from_trace(recorded(**options), fallback=policy)


def peak_of(lengths: tuple[int, ...], **options: Any) -> int:
    """The most rounded bytes that are live at once."""
    return bfc.Plan.from_trace(recorded(lengths, **options), fallback="caching").peak


class Played:
    """The same program on an allocator. On host memory its blocks are written and read back."""

    def __init__(
        self,
        pool: bfc.Allocator,
        writes: bool = False,
        program: Program | None = None,
        **options: Any,
    ) -> None:
        self.pool, self.writes = pool, writes
        self.program = program or Program(**options)
        self.live: dict[int, bfc.Buffer] = {}
        self.is_first = True
        self.play(self.program.head())

    def play(self, events: Iterator[tuple[int, int, int]]) -> None:
        for op, block, size in events:
            if op:
                self.free(block)
                continue
            self.live[block] = self.pool.allocate(size)
            if self.writes:
                ctypes.memset(self.live[block].ptr, block % 251, size)

    def free(self, block: int) -> None:
        buffer = self.live.pop(block)
        if self.writes:
            view = (ctypes.c_char * buffer.nbytes).from_address(buffer.ptr)
            held = np.frombuffer(view, np.uint8)
            assert (held == block % 251).all(), f"block {block}: its contents have changed"
        buffer.free()

    def step(self, n: int) -> None:
        with self.pool.step("train"):
            self.play(self.program.iteration(n, self.is_first))
        self.is_first = False
        assert self.pool.check() is None

    def end(self) -> None:
        for block in list(self.live):
            self.free(block)


def play_disturbed(run: Played, dice: random.Random, wrong: float) -> None:
    """Eight steps, in which this part of the sizes is another, and as many requests are put in."""
    for number in range(8):
        events = []
        for op, block, size in run.program.iteration(dice.randrange(20, 520), number == 0):
            halved = dice.random() < wrong and not op
            events.append((op, block, max(1, size // 2) if halved else size))
            if dice.random() < wrong:
                events.append(run.program.block(dice.choice((128 * 300, 512, 3 * MIB))))
        with run.pool.step("train"):
            for event in events:
                run.play(iter([event]))
                assert run.pool.check() is None
        for block in list(run.live):
            if dice.random() < 0.2 and block not in run.program.kept:
                run.free(block)
    run.end()
    assert run.pool.stats().bytes_in_use == 0


def test_sizes_follow_from_three_lengths():
    def sizes(n: int) -> list[int]:
        return [512, 8 * n, 4096 * n + 8192, 12 * n * n, 7]

    found = fitted([np.array(sizes(n), np.uint64) for n in (128, 512, 256, 384)])
    assert found is not None
    (key,) = found.keys
    assert (key.request, key.unit, key.longest) == (1, 4, 1024)
    for n in (384, 385, 77):  # lengths that are no multiples of 128, too
        assert found.sizes([8 * n // key.unit]).tolist() == sizes(n)
    assert fitted([np.array(sizes(n), np.uint64) for n in (128, 512, 512)]) is None
    assert fitted([np.array(sizes(9), np.uint64)] * 3) is None


def test_sizes_at_random_do_not_follow():
    """Such as loads of experts, whose sum is always the same."""
    dice = np.random.default_rng(1)
    rows = [np.append(64 * n, dice.integers(1, 1 << 20, 200)) for n in (100, 200, 300, 400)]
    assert fitted([row.astype(np.uint64) for row in rows[:3]]) is None
    assert fitted([row.astype(np.uint64) for row in rows]) is None


def test_sizes_follow_from_several_lengths():
    """Two batches of an iteration; attention in blocks of 128, which is no polynomial; and a matrix
    of the one by the other, which follows from neither."""

    def sizes(n: int, m: int) -> list[int]:
        of = [[8 * x, 4096 * x + 512, 8192 * (-(-x // 128) * 128), 12 * x * x] for x in (n, m)]
        return [*of[0], 77, *of[1], 2 * n * m, 6 * n * m]

    pairs = [(64, 500), (300, 130), (511, 90), (129, 257), (410, 333), (77, 78)]
    found = fitted([np.array(sizes(*pair), np.uint64) for pair in pairs])
    assert found is not None
    assert [key.request for key in found.keys] == [0, 2, 5, 7, 9]
    assert found.follows.tolist() == [0, 0, 1, 0, 0, 2, 2, 3, 2, 4, 4]
    assert [key.like for key in found.keys] == [0, 1, 0, 1, 4]  # the batches are alike
    for pair in [(400, 65), (3, 2000)]:  # also lengths that are longer than all
        asked = np.array(sizes(*pair), np.uint64)
        assert found.sizes(found.of(asked)).tolist() == asked.tolist()
    assert fitted([np.array(sizes(*pair), np.uint64) for pair in pairs], most_keys=4) is None


def test_room_for_one_length_is_room_for_those_like_it():
    pairs = [(64, 500), (300, 130), (511, 90), (129, 257)]
    rows = []
    for n, m in pairs:
        blocks = -(-n // 64) * 64
        rows.append([8 * n, 4096 * n, 1024 * blocks, 256 * blocks, 9, 8 * m, 4096 * m])
    lengths = fitted([np.array(row, np.uint64) for row in rows])
    assert lengths is not None
    first, blocks, second = lengths.longest
    unit = lengths.keys[0].unit
    spare = (511 - 64) * unit  # of eight numbers the next largest is an eighth of that away
    assert first == second == (511 * 8 + spare) // unit
    longer = lengths.with_room({0: 8000 // unit}).longest
    assert longer[0] == longer[2] == 8000 // unit
    assert longer[1] > blocks  # which is bounded by the first
    assert longer[1] * lengths.keys[1].unit >= 1000 * 1024
    recorded = lengths.with_keys({0: 1}).with_room({0: lengths.keys[0].recorded}).longest
    assert recorded[1:] == [blocks, second]  # what was recorded needs no more than it did


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(RUNS))
def test_made_up_runs_take_no_more_than_the_policy_alone(name: str):
    """A plan of ten iterations serves these and twenty more, with lengths that it has not seen."""
    limits = {"length and sentences": 1.16}
    of_caching, of_bfc = np.split(np.array(made_up(name, seed=0)), 2)
    for alone, with_marks, by_itself in (of_caching, of_bfc):
        for planned in (with_marks, by_itself):
            assert planned <= 1.03 * alone
            assert planned <= limits.get(name, 1.06)


class TwoBatches(Program):
    """Gradients of two batches are added up; the second has half of the length, or a third."""

    def iteration(self, n: int, first: bool = False) -> Iterator[tuple[int, int, int]]:
        yield from super().iteration(n, first)
        yield from super().iteration(n // 2 if n % 3 else n // 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", POLICIES)
def test_disturbed_runs_of_several_lengths_keep_their_contents(policy: str, seed: int):
    dice = random.Random(f"{policy} {seed}")
    trace = recorded((100, 260, 180, 330, 75, 240, 100), program=TwoBatches(keeps=False))
    plan = bfc.Plan.from_trace(trace, fallback=policy)
    lengths = plan.parts[1].lengths
    assert lengths is not None
    assert len(lengths.keys) > 1
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(plan)
        run = Played(pool, writes=True, program=TwoBatches(keeps=False))
        play_disturbed(run, dice, wrong=0.05 * (seed % 2))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_later_length_has_room_from_the_next_step_on(policy: str):
    """Something lives when it is told, so that the places cannot be laid out anew."""

    def requests(n: int, m: int) -> list[int]:
        return [n << 16, 3 * n << 16, m << 16, 5 * m << 16]

    plan = plan_of_pairs(requests, [0] * 4, policy)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(plan, gate=None)
        for pair, departed in [((20, 30), 0), ((20, 90), 1), ((30, 90), 1), ((45, 80), 1)]:
            with pool.step("train"):
                blocks = [pool.allocate(size) for size in requests(*pair)]
                del blocks
            assert pool.check() is None
            assert pool.plan_stats()["departed_steps"] == departed


PAIRS = [(30, 40), (50, 20), (10, 30), (20, 10), (40, 50)]


def plan_of_pairs(
    requests: Callable[[int, int], list[int]], streams: list[int], policy: str = "caching"
) -> bfc.Plan:
    """Of iterations that ask for four blocks, which two numbers tell, and free them."""
    trace = bfc.Trace(
        ([0] * 4 + [1] * 4) * len(PAIRS),
        [0, 1, 2, 3] * 2 * len(PAIRS),
        [size for pair in PAIRS for size in (*requests(*pair), 0, 0, 0, 0)],
        streams * 2 * len(PAIRS),
    )
    return bfc.Plan.from_trace(trace, marks=range(0, 8 * len(PAIRS), 8), fallback=policy)


def test_another_streams_length_is_not_taken_for_the_first() -> None:
    """It was, where that stream asked before the one whose request tells the first length."""

    def requests(n: int, m: int) -> list[int]:
        return [n << 16, 3 * n << 16, m << 16, 5 * m << 16]

    plan = plan_of_pairs(requests, [0, 0, 1, 1])
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(plan, gate=None)
        for n, m in ((50, 90), (20, 30)):
            with pool.step("train"):
                other = [pool.allocate(size, stream=7) for size in requests(n, m)[2:]]
                own = [pool.allocate(size) for size in requests(n, m)[:2]]
                spans = pool.plan_stats()["span"]
                del other, own
        assert spans == plan._stretched("train", {1: 90 << 16}).span
        assert pool.check() is None


@pytest.mark.parametrize("stitch", [False, True])
def test_one_request_tells_one_length(stitch: bool):
    """Two that tell one follow each other, and a request was put in before the first."""
    plan = plan_of_pairs(lambda n, m: [n << 16, m << 16, 3 * n << 16, 5 * m << 16], [0] * 4)
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), stitch=stitch) as pool:
        pool.use_plan(plan, gate=None)
        for step, (n, m) in enumerate(((20, 30), (35, 45)), 1):
            with pool.step("train"):
                sizes = [1_000_001, n << 16, m << 16, 3 * n << 16, 5 * m << 16]
                blocks = [pool.allocate(size) for size in sizes]
                del blocks
            stats = pool.plan_stats()
            assert stats["hits"] + stats["moved"] == 4 * step  # what pages lay elsewhere has moved
            assert pool.check() is None


def test_a_length_is_read_though_what_comes_before_it_was_left_out():
    """The request behind it shows which one told the length, and not itself."""
    ops, ids, sizes = [], [], []
    for number, n in enumerate((100, 300, 200, 100)):
        ops += [0] * 4 + [1] * 4
        ids += [4 * number + i for i in range(4)] * 2
        sizes += [3000, n * 4096, n * 16384, n * n * 512] + [0] * 4
    plan = bfc.Plan.from_trace(bfc.Trace(ops, ids, sizes), marks=range(0, 32, 8))
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(plan, gate=None)
        for n in (150, 222):
            before = pool.plan_stats()["hits"]
            with pool.step("train"):
                held = [pool.allocate(size) for size in (n * 4096, n * 16384, n * n * 512)]
                del held
            assert pool.plan_stats()["hits"] - before == 2
        assert pool.check() is None


def test_a_length_is_read_from_its_own_request():
    """What was put in before it had been looked at, and it is rounded as that of the last step."""

    def requests(n: int) -> list[int]:
        return [16 * n, 32768 * n, 128 * n * n, 32768 * n]

    sizes = [size for n in RECORDED for size in (*requests(n), 0, 0, 0, 0)]
    trace = bfc.Trace(([0] * 4 + [1] * 4) * 4, [0, 1, 2, 3] * 8, sizes)
    plan = bfc.Plan.from_trace(trace, marks=range(0, 32, 8))
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), plan=plan) as pool:
        for n, others in ((200, []), (200, []), (222, [MIB // 2])):  # all ask for 3584 bytes
            hits = pool.plan_stats()["hits"]
            with pool.step("train"):
                blocks = [pool.allocate(size) for size in (*others, *requests(n))]
                del blocks
            assert pool.plan_stats()["hits"] - hits == 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_of_other_lengths_takes_what_is_live(policy: str, keeps: bool, tmp_path: Path):
    """Shorter and longer ones than those that were recorded; the plan comes from a file."""
    plan_of(policy, keeps=keeps).save(tmp_path / "plan.npz")
    plan = bfc.Plan.load(tmp_path / "plan.npz")
    assert plan.parts[1].lengths is not None
    assert "lengths vary" in str(plan)
    lengths = (140, 260, 77, 301, 200, 370, 370, 90)
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(plan, strict=True)
        run = Played(pool, writes=True, keeps=keeps)
        most = []
        for n in lengths:
            run.step(n)
            most.append(pool.stats().peak_pool_bytes)
        stats = pool.plan_stats()
        assert stats["agreement"] >= (0.94 if keeps else 1.0)
        beside = 2 * MIB if keeps else 0  # a batch comes while its place is that of the last
        assert stats["side_bytes_reserved"] == beside
        assert most[-1] - beside <= 1.005 * peak_of((*lengths, 90), keeps=keeps)
        assert most[1] - beside == plan.span  # no room for longer ones before they come
        run.end()
        assert pool.check() is None


@pytest.mark.parametrize("policy", POLICIES)
def test_another_training_is_served_after_the_room_has_grown(policy: str):
    """The places of the weights are those of another server then."""
    plan = plan_of(policy, keeps=False)
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB", plan=plan) as pool:
        for lengths in ((140, 301), (90, 400, 260), (370,)):
            run = Played(pool, writes=True, keeps=False)
            for n in lengths:
                run.step(n)
            run.end()
        stats = pool.plan_stats()
        assert (stats["agreement"], stats["departed_steps"]) == (1.0, 0)
        assert pool.stats().peak_pool_bytes <= 1.005 * peak_of((140, 400, 90), keeps=False)


@pytest.mark.parametrize("policy", POLICIES)
def test_lengths_are_told_apart_whose_first_requests_are_rounded_alike(policy: str):
    """Ids of two sentences: 16 bytes for each token, and 512 bytes are the least that is given."""

    def requests(n: int) -> list[int]:
        return [16 * n, 32768 * n, 128 * n * n, 32768 * n]

    trace = bfc.Trace(
        ([0] * 4 + [1] * 4) * 4,
        [0, 1, 2, 3] * 8,
        [size for n in RECORDED for size in (*requests(n), 0, 0, 0, 0)],
    )
    plan = bfc.Plan.from_trace(trace, marks=range(0, 32, 8), fallback=policy)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB"), plan=plan) as pool:
        for n in range(200, 261):
            with pool.step("train"):
                blocks = [pool.allocate(size) for size in requests(n)]
                del blocks
        assert pool.plan_stats()["agreement"] == 1.0
        assert pool.stats().peak_pool_bytes == plan.span


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_has_room_for_the_lengths_that_there_were(policy: str):
    """It had room for the longest that was recorded, though a program may ask for less."""
    plan = plan_of(policy, keeps=False)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB"), plan=plan) as pool:
        run = Played(pool, keeps=False)
        for n in (60, 40, 150, 90, max(RECORDED), 200):
            for _ in range(2):  # the first step ever lacks the optimizer's state at its peak
                run.step(n)
            stats = pool.stats()
            assert stats.pool_bytes <= 1.01 * stats.peak_bytes_in_use
        assert pool.plan_stats()["agreement"] == 1.0
        assert stats.pool_bytes == plan.span
        assert pool.plan_stats()["budget_left"] == plan.online - plan.span
        run.end()
    with made(policy, bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(plan, strict=True)
        assert pool.stats().pool_bytes == plan.span
    source = bfc.SimulatedSubAllocator("1 GiB")
    with (
        made(policy, source, memory_limit=plan.span - 1) as pool,
        pytest.warns(RuntimeWarning, match="the limit is"),
    ):
        pool.use_plan(plan)


def test_iterations_that_are_not_foretold_find_the_room_of_the_longest():
    """What has no place is a guest: it was served beside the places of a short iteration."""
    trace = recorded(keeps=False)
    once = [*trace.meta["marks"][:-1], [trace.meta["marks"][-1][0], "evaluate"]]
    for marks in (trace.meta["marks"], once):
        plan = bfc.Plan.from_trace(recorded((*RECORDED, 100), keeps=False), marks=marks)
        assert (plan._shortest() is plan) == (marks is once)


@pytest.mark.parametrize("policy", POLICIES)
def test_room_may_be_made_at_once(policy: str):
    plan = plan_of(policy, keeps=False).stretched("train", 128 * 400)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB"), plan=plan) as pool:
        run = Played(pool, keeps=False)
        for n in (300, 400, 100):
            run.step(n)
            assert pool.stats().pool_bytes == plan.span
        assert pool.plan_stats()["agreement"] == 1.0
        run.end()
    before = plan_of(policy, keeps=False)
    assert plan.planned / plan.online == pytest.approx(before.planned / before.online)
    assert plan.budget > before.budget


def test_what_is_no_length_is_refused():
    plan = plan_of("caching")
    for kind, size, text in (
        ("train", 1281, "tell no length: a length of the kind 'train' is a multiple of 16 bytes"),
        ("train", 16 << 20, "cannot be planned"),
        ("eval", 160, "no lengths for steps of the kind 'eval'"),
    ):
        with pytest.raises(bfc.PlanError, match=text):
            plan.stretched(kind, size)
    assert plan.stretched("train:400", "50 KiB").span == plan.stretched("train", 50 << 10).span


def test_sizes_beyond_64_bits_are_refused():
    growth = np.array([[0, 1 << 22, 0], [0, 0, (1 << 30) + 1]])
    sizes = [[n << 22, n * n * ((1 << 30) + 1)] for n in (1, 3, 2, 1)]
    trace = bfc.Trace([0, 0, 1, 1] * 4, [0, 1] * 8, [it for two in sizes for it in (*two, 0, 0)])
    plan = bfc.Plan.from_trace(trace, marks=range(0, 16, 4))
    assert plan.parts[1].lengths.growth.tolist() == growth.tolist()
    for length in (1 << 15, 1 << 17):
        with pytest.raises(bfc.PlanError, match="cannot be planned"):
            plan.stretched("train", length << 22)


@pytest.mark.parametrize(
    ("told", "growth", "fault"),
    [
        ([[10**6, 16, 2080, 2080, 0, 0, 0, 1]], None, "no requests that tell them"),
        ([[0, 16, 2080, 2080, 1, 0, 0, 1]], None, "no requests that tell them"),
        ([[0, 32, 2080, 2080, 0, 0, 0, 1]], None, "no requests that tell them"),
        ([[0, 16, 2080, 2080, 0, 0, 0, 3]], None, "no requests that tell them"),
        ([[0, 16, 2080, 2080, 0, 0, 0, 1]] * 2, None, "no requests that tell them"),
        ([[0, 16, 2080]], None, "not 8 numbers"),
        ([0, 16, 2080, 2080, 0, 0, 0, 1], None, "not 8 numbers"),
        ([], None, "not a list of up to 256"),
        ([[0, 16, 2080, 0, 0, 0, 0, 1]], None, "no requests that tell them"),
        ([[0, 16, 2080, 1 << 41, 0, 0, 0, 1]], None, "no requests that tell them"),
        ([[0, 16, 2080, 1 << 30, 0, 0, 0, 1]], None, "bytes or more"),
        ([[0, 0, 2080, 2080, 0, 0, 0, 1]], None, "no requests that tell them"),
        ([[0, 16.5, 2080, 2080, 0, 0, 0, 1]], None, "not whole"),
        (None, 1 << 62, "bytes or more"),
        (None, -(1 << 63), "bytes or more"),
        (None, ..., "growth is not an array"),
        (None, "follows", "follows is not an array"),
    ],
)
def test_files_with_impossible_lengths_are_refused(
    tmp_path: Path, told: Any, growth: Any, fault: str
):
    path = tmp_path / "plan.npz"
    plan_of("caching").save(path)
    with np.load(path) as file:
        arrays = dict(file)
    described = json.loads(str(arrays["plan"].item()))
    if told is not None:
        described["parts"][1]["lengths"] = told
    arrays["plan"] = np.array(json.dumps(described))
    if growth == "follows":
        del arrays["follows"]
    elif growth is ...:
        arrays["growth"] = arrays["growth"][1:]
    elif growth is not None:
        arrays["growth"][5] = growth
    np.savez(path, **arrays)
    with pytest.raises(bfc.PlanError, match=fault):
        bfc.Plan.load(path)


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_before_the_first_take_nothing_for_good(policy: str):
    """One that could tell a length makes the step a wrong one. The next steps are served."""
    plan = plan_of(policy, keeps=False)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB"), plan=plan) as pool:
        run = Played(pool, keeps=False)
        run.step(max(RECORDED))
        before = pool.stats().pool_bytes
        with pool.step("train"):
            other = pool.allocate(128 * 400)  # longer than all
            run.play(run.program.iteration(200))
            other.free()
        assert pool.check() is None
        run.step(260)
        run.step(120)
        assert pool.stats().pool_bytes == before
        agreed = pool.plan_stats()
        run.step(240)
        assert pool.plan_stats()["guests"] == agreed["guests"]
        assert pool.plan_stats()["side"] == agreed["side"]
        run.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_lives_on_keeps_no_room_from_a_plan(policy: str):
    """It lay in the region of the bodies, which had then the room of a short step for good."""
    plan = plan_of(policy, keeps=False)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB"), plan=plan) as pool:
        run = Played(pool, keeps=False)
        run.step(100)
        counter = pool.allocate(512)
        run.step(max(RECORDED))
        agreed = pool.plan_stats()["side"]
        run.step(max(RECORDED))
        stats = pool.plan_stats()
        assert (stats["span"], stats["side"]) == (plan.span, agreed)
        counter.free()
        run.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_lengths_that_rise_need_few_layouts(policy: str, monkeypatch):
    """Each has its room, and no step asks the device for memory without need."""
    made_room = []
    stretched = bfc.Plan._stretched

    def noting(*args: object, **options: object) -> bfc.Plan:
        made_room.append(args)
        return stretched(*args, **options)

    monkeypatch.setattr(bfc.Plan, "_stretched", noting)
    plan = plan_of(policy, keeps=False)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB"), plan=plan) as pool:
        run = Played(pool, keeps=False)
        for n in range(2, max(RECORDED) + 1, 2):
            run.step(n)
        assert pool.plan_stats()["agreement"] == 1.0
        assert pool.plan_stats()["span"] == plan.span
        assert len(made_room) < 40
        run.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_without_room_is_served_by_the_policy(policy: str):
    """Something lives in the region of the bodies; as soon as it is gone there is room."""
    plan = plan_of(policy, keeps=False)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB"), plan=plan) as pool:
        run = Played(pool, keeps=False)
        run.step(200)
        held = pool.allocate(2 * MIB)  # lies in the region of the bodies
        run.step(400)
        assert pool.plan_stats()["agreement"] < 1
        held.free()
        run.step(150)  # before it there is room for the step that had none
        assert pool.stats().pool_bytes == plan.stretched("train", 128 * 400).span
        agreed = pool.plan_stats()["side"]
        run.step(400)
        assert pool.plan_stats()["side"] == agreed
        run.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_that_is_refused_leaves_all_as_it_was(policy: str):
    plan = plan_of(policy, keeps=False)
    with made(policy, bfc.SimulatedSubAllocator(plan.span + 40 * MIB), plan=plan) as pool:
        run = Played(pool, keeps=False)
        run.step(200)
        for _ in range(2):
            with pytest.raises(bfc.OutOfMemoryError), pool.step("train"):
                run.play(run.program.iteration(500))
            for block in list(run.live)[2 * LAYERS :]:
                run.free(block)
            assert pool.check() is None
        hits = pool.plan_stats()
        run.step(260)
        after = pool.plan_stats()
        assert (after["side"], after["guests"]) == (hits["side"], hits["guests"])
        run.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_finaliser_that_allocates_while_a_plan_grows(policy: str):
    """As the device is asked for the longer region, which once came twice then."""

    plan = plan_of(policy, keeps=False)
    source = Misbehaving("1 GiB")
    for inner in (300, 400, 500, 600):
        with made(policy, source, plan=plan) as pool:
            run = Played(pool, keeps=False)
            run.step(200)
            kept: list[bfc.Buffer] = []
            late = partial(pool.allocate, 128 * inner)
            source.on("alloc", 1, first=lambda late=late, kept=kept: kept.append(late()))
            run.step(400)
            assert len(kept) == 1
            kept.pop().free()
            assert pool.check() is None
            run.step(600)
            run.end()
            pool.use_plan(None)
            pool.release_free_regions()
            assert pool.stats().pool_bytes == 0
        assert not source.live_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_a_longer_region_that_was_refused_is_asked_for_again(policy: str):
    """Another library had the memory for a moment."""
    plan = plan_of(policy, keeps=False)
    longer = plan.stretched("train", 128 * 280).span
    source = bfc.SimulatedSubAllocator(3 * longer)
    with made(policy, source, plan=plan) as pool:
        run = Played(pool, keeps=False)
        run.step(max(RECORDED))
        others = source.alloc(256, source.total_bytes - source.live_bytes - longer // 8)
        run.step(280)
        source.free(*others)
        for _ in range(17):
            run.step(280)
        before = pool.plan_stats()
        run.step(280)
        after = pool.plan_stats()
        assert (after["side"], after["guests"]) == (before["side"], before["guests"])
        run.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_call_of_the_source_may_fail(policy: str):
    """Whatever call fails, nothing is lost, and later steps are served."""

    plan = plan_of(policy, keeps=False)
    for failing in range(1, 8):
        source = Misbehaving("1 GiB")
        with made(policy, source, plan=plan) as pool:
            run = Played(pool, keeps=False)
            run.step(200)
            kept = set(run.live)
            fail_at_call(source, failing)
            for n in (400, 100, 420, 300):
                try:
                    run.step(n)
                except bfc.SubAllocatorError:
                    for block in set(run.live) - kept:
                        run.free(block)
                assert pool.check() is None, f"call {failing}, length {n}"
            source.off()
            before = pool.plan_stats()
            run.step(250)
            after = pool.plan_stats()
            assert after["hits"] > before["hits"]
            assert (after["side"], after["guests"]) == (before["side"], before["guests"])
            run.end()
        assert not source.live_bytes


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", POLICIES)
def test_disturbed_runs_keep_their_contents(policy: str, seed: int):
    """Requests put in, left out and changed, at lengths that vary."""
    dice = random.Random(f"{policy} {seed}")
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(plan_of(policy))
        run = Played(pool, writes=True)
        play_disturbed(run, dice, wrong=0.05)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_first_request_tells_the_sizes_of_all_streams(policy: str):
    """A copy on another stream, whose sizes follow, too."""
    ops: list[int] = []
    ids: list[int] = []
    sizes: list[int] = []
    streams: list[int] = []
    marks = []
    for number, n in enumerate(RECORDED):
        marks.append(len(ops))
        one, other = 2 * number, 2 * number + 1
        ops += [0, 0, 1, 1]
        ids += [one, other, one, other]
        sizes += [n * 16384, n * n * 64, 0, 0]
        streams += [0, 1, 0, 1]
    trace = bfc.Trace(ops, ids, sizes, streams)
    plan = bfc.Plan.from_trace(trace, marks=marks, fallback=policy)
    with made(policy, bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(plan, gate=None)
        for n in (120, 300, 222):
            with pool.step("train"):
                first = pool.allocate(n * 16384, stream=0)
                second = pool.allocate(n * n * 64, stream=7)
                first.free()
                second.free()
            assert pool.check() is None
        assert pool.plan_stats()["agreement"] == 1.0
        assert pool.stats().peak_pool_bytes <= 1.005 * (300 * 16384 + 300 * 300 * 64)


def test_a_capture_meanwhile_asks_for_no_memory():
    """A longer step in a capture is served by the policy, and has room the next time."""
    plan = plan_of("caching", keeps=False)
    source = bfc.SimulatedSubAllocator("1 GiB")
    with bfc.CachingAllocator(source, plan=plan) as pool:
        run = Played(pool, keeps=False)
        run.step(max(RECORDED))
        pool.mark_capture_begin()
        run.step(400)
        assert pool.plan_stats()["span"] == plan.span
        pool.mark_capture_end()
        run.step(300)
        assert pool.plan_stats()["span"] > plan.span
        run.end()


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_threads_beside_steps_that_grow(policy: str):
    """Another thread has guests and blocks of the policy, and captures begin and end."""
    ended = threading.Event()
    faults: list[BaseException] = []
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(plan_of(policy, keeps=False))

        def beside() -> None:
            dice = random.Random(1)
            try:
                while not ended.is_set():
                    held = [pool.allocate(dice.choice((4096, 2 * MIB))) for _ in range(3)]
                    for number, each in enumerate(held):
                        ctypes.memset(each.ptr, number, each.nbytes)
                    pool.mark_capture_begin()
                    pool.mark_capture_end()
                    for number, each in enumerate(held):
                        assert (
                            ctypes.string_at(each.ptr, each.nbytes) == bytes([number]) * each.nbytes
                        )
                        each.free()
            except BaseException as error:
                faults.append(error)

        thread = threading.Thread(target=beside)
        thread.start()
        try:
            run = Played(pool, writes=True, keeps=False)
            for n in (200, 280, 150, 330, 400, 90, 450, 500):
                run.step(n)
        finally:
            ended.set()
            thread.join()
        assert not faults
        run.end()
        assert pool.check() is None
        assert pool.stats().bytes_in_use == 0


def test_a_forked_child_grows_by_itself():
    with bfc.CachingAllocator(bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(plan_of("caching", keeps=False))
        run = Played(pool, writes=True, keeps=False)
        run.step(200)
        child = os.fork()
        if child == 0:  # pytest must not go on here, whatever happens
            code = 1
            try:
                run.step(400)
                code = int(pool.plan_stats()["side"] > 0)
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        run.step(300)
        assert pool.plan_stats()["side"] == 0
        run.end()
