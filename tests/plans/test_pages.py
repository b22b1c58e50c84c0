"""Plans in memory that is mapped page by page: next to an account of every page, and next to a slow
model of which request is for which place; contents are written and read back."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from mapping_faults import FAULT, fail_every_call
from page_ledger import PageLedger
from plan_model import SlowPlan
from planned_pages import MIB, PAGE, World, fork_in_every_call, made, one_step, simple, world_with
from repeated_runs import DisturbedProgram, Run, events_of, some_run

import bfc

POLICIES = ("caching", "bfc")


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_come_when_a_place_is_first_touched(policy: str) -> None:
    plan = simple(policy)
    world = World(policy, plan=plan)
    pool = world.allocator
    assert world.device.live_bytes == 0
    weights = pool.allocate(4 * MIB)
    assert world.device.live_bytes == 4 * MIB
    with pool.step("train"):
        first = pool.allocate(8 * MIB)
        assert world.device.live_bytes == 12 * MIB
        del first
    for _ in range(3):
        one_step(pool)
        assert pool.check() is None
    assert world.device.live_bytes == pool.stats().pool_bytes == 16 * MIB  # 15 MiB in whole pages
    assert pool.plan_stats()["agreement"] == 1.0
    assert pool.plan_stats()["side_bytes_reserved"] == 0
    assert pool.page_stats()["views"] == 0
    calls = len(world.device.calls)
    one_step(pool)
    assert len(world.device.calls) == calls
    del weights
    world.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_finds_no_gap_is_put_together_from_idle_pages(policy: str) -> None:
    """Two blocks lie so that no gap has 7 MiB: eight pages are enough all the same."""
    world = World(policy, plan=simple(policy))
    weights = world.take(4 * MIB)
    with world.allocator.step("train"):
        blocks = [world.take(size * MIB) for size in (8, 2)]
        world.drop(blocks[1])
        blocks[1] = world.take(3 * MIB)
        world.drop(*blocks)
    with world.allocator.step("other"):  # 11 MiB are idle
        guest = world.take(5 * MIB)
        middle = world.take(1536 << 10)
        world.drop(guest)
        large = world.take(7 * MIB + 512)
        world.ledger.examine()
        assert world.device.live_bytes == 16 * MIB
        world.drop(middle, large)
    with world.allocator.step("train"):
        again = world.take(8 * MIB)
        world.ledger.examine()
        world.drop(again)
    assert world.device.live_bytes == 16 * MIB
    world.drop(weights)
    world.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_place_whose_pages_are_lent_is_a_view_and_then_a_place_again(policy: str) -> None:
    world = World(policy, plan=simple(policy))
    world.take(4 * MIB)
    pool = world.allocator
    with pool.step("train"):
        world.drop(world.take(8 * MIB), world.take(2 * MIB))
    with pool.step("train"):
        place = world.take(8 * MIB)
        world.drop(place)
        world.take(2 * MIB)
    before = pool.plan_stats()["hits"]
    with pool.step("other"):
        lent = world.take(9 * MIB)
    with pool.step("train"):
        displaced = world.take(8 * MIB)
        assert displaced != place
        assert pool.plan_stats()["moved"] == 1
        world.examine()
        world.drop(lent, displaced)
    with pool.step("train"):
        assert world.take(8 * MIB) == place
        assert pool.plan_stats()["hits"] == before + 1
        world.examine()
    world.end()


@dataclass(kw_only=True)
class Program(DisturbedProgram):
    """A run, disturbed, with an account of what it has."""

    model: SlowPlan
    unit: int
    ledger: PageLedger | None = None
    held: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    begins: dict[int, int] = field(default_factory=dict)
    #: What a block takes of a plan: a smaller one the whole place.
    reach: dict[int, int] = field(default_factory=dict)

    def allocate(self, key: int, size: int) -> None:
        rounded = max(self.unit, -(-size // self.unit) * self.unit)
        slot = self.model.place_of(rounded, PAGE)
        before = self.pool.plan_stats()["hits"]
        ptr = self.pool.allocate_raw(size)
        is_hit = self.pool.plan_stats()["hits"] > before
        self.number += 1
        assert not (is_hit and slot is None), f"request {self.number} has no place"
        if is_hit and slot is not None:  # all places of a region are equally far from its begin
            region = int(slot[0] >= self.model.plan.base)
            assert self.begins.setdefault(region, ptr - slot[0]) == ptr - slot[0]
        elif slot is not None and self.ledger is not None:
            self.require_taken(*slot)
        if self.ledger is None:
            ctypes.memset(ptr, self.number % 251, size)
        else:
            self.ledger.take(ptr)
        self.held[key] = ptr, size, self.number % 251
        self.reach[ptr] = slot[1] if is_hit and slot is not None else rounded

    def require_taken(self, offset: int, size: int) -> None:
        """A page of a place that a request did not get is away, or something lives there."""
        region = int(offset >= self.model.plan.base)
        assert self.ledger is not None
        if region not in self.begins:
            return
        begin = self.begins[region] + offset
        ends = [(ptr, ptr + self.reach[ptr]) for ptr, _, _ in self.held.values()]
        if any(begin < end and ptr < begin + size for ptr, end in ends):
            return
        pages = self.ledger._under(begin, size)
        covered = sum(min(p.end, begin + size) - max(p.start, begin) for p in pages)
        lent = any(
            it.block.is_live and it.block.ptr not in range(self.begins[region], begin + size)
            for page in pages
            for it in self.ledger._pieces.get(page.page, ())
        )
        assert covered < size or lent, f"request {self.number}: its place is free"

    def free(self, key: int) -> None:
        if key not in self.held:
            return  # was never asked for
        ptr, size, value = self.held.pop(key)
        if self.ledger is None:
            contents = np.frombuffer((ctypes.c_char * size).from_address(ptr), np.uint8)
            assert (contents == value).all(), f"key {key}: its contents have changed"
        else:
            self.ledger.give_back(ptr)
        self.pool.deallocate_raw(ptr)

    def run(self, run: Run) -> None:
        events = events_of(run.trace)
        self.play(events[: run.marks[0][0]])
        for kind, part in run.iterations():
            self.model.step(kind)
            with self.pool.step(kind):
                self.play(events[part])
            self.model.step(None)
            if self.dice.random() < 0.3:  # something between the steps
                self.allocate(-self.number - 1, self.dice.randrange(1, 9 * MIB))
                self.late.append((5, -self.number))
            if self.ledger is not None:
                self.ledger.examine()
        for key in list(self.held):
            self.free(key)


def some_program(policy: str, seed: int, pool: Any) -> tuple[Program, Run]:
    dice = random.Random(f"{policy} {seed}")
    run = some_run(dice, iterations=4)
    trace = run.trace
    run = Run(
        bfc.Trace(trace.op, trace.id, trace.size * np.uint64(1 + seed % 10), trace.stream),
        run.marks,
    )
    plan = bfc.Plan.from_trace(run.trace, marks=run.marks, fallback=policy)
    pool.use_plan(plan)
    unit = 512 if policy == "caching" else 256
    wrong = (0, 0.02, 0.1, 0.3)[seed % 4]
    model = SlowPlan(plan)
    program = Program(pool=pool, dice=dice, wrong=wrong, most=8 * MIB, model=model, unit=unit)
    return program, run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("policy", POLICIES)
def test_disturbed_runs_by_an_account_of_every_page(policy: str, seed: int) -> None:
    world = World(policy, "1 GiB")
    program, run = some_program(policy, seed, world.allocator)
    program.ledger = world.ledger
    program.run(run)
    world.end()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("policy", POLICIES)
def test_disturbed_runs_keep_their_contents(policy: str, seed: int) -> None:
    with made(policy, bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        program, run = some_program(policy, seed, pool)
        program.run(run)
        assert pool.check() is None
        assert pool.stats().bytes_in_use == 0


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_another_training_gets_the_pages_of_the_first(policy: str, is_kept: bool) -> None:
    """They are lent meanwhile. If what has them is kept, the weights are put together elsewhere."""
    world = World(policy, "64 MiB", simple(policy))
    pool = world.allocator
    places = set()
    for turn in range(3):
        weights = world.take(4 * MIB)
        places.add(weights)
        one_step(pool)
        world.examine()
        assert pool.plan_stats()["hits"] == 4 * (turn + 1)
        world.drop(weights)
        world.drop(world.take(14 * MIB))  # of all that the plan has
        world.examine()
    assert len(places) == 1
    assert pool.page_stats()["pages"] * PAGE == 16 * MIB
    if is_kept:
        wide = world.take(14 * MIB)
        weights = world.take(4 * MIB)
        one_step(pool)
        world.examine()
        assert pool.plan_stats()["moved"] > 0
        world.drop(wide, weights)
        weights = world.take(4 * MIB)
        assert weights in places
        world.examine()
    world.end()


# -- what goes wrong -------------------------------------------------------------------------------


def disturbed_steps(world: World) -> None:
    """Views of a plan's pages, small chunks on them, places again, and a change of plans."""
    pool = world.allocator
    weights = world.take(4 * MIB)
    with pool.step("train"):
        world.drop(*[world.take(size * MIB) for size in (8, 2, 3)])
    with pool.step("train"):
        held = [world.take(5 * MIB), world.take(300 << 10)]
        held += [world.take(8 * MIB), world.take(7 * MIB)]
        world.drop(*held[::2])
        world.take(3 * MIB)
    with pool.step("train"):
        world.drop(*[world.take(size * MIB) for size in (8, 2, 3)])
    world.drop(weights)
    pool.use_plan(None)
    pool.release_free_regions()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kinds", [("reserve", "create", "map"), ("access", "unmap", "release"), ("unreserve", "wait")]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_call_of_the_source_may_fail(policy: str, kinds: Any) -> None:
    plan = simple(policy)

    fail_every_call(lambda: world_with(plan, policy), disturbed_steps, kinds)


@pytest.mark.parametrize("policy", POLICIES)
def test_memory_that_runs_out_in_a_step_takes_what_the_plan_leaves(policy: str) -> None:
    world = World(policy, "20 MiB", simple(policy))
    pool = world.allocator
    weights = world.take(4 * MIB)
    with pool.step("train"):
        held = [world.take(8 * MIB), world.take(6 * MIB)]
        with pytest.raises(bfc.OutOfMemoryError):
            world.take(8 * MIB)
        world.examine()
        world.drop(*held)
        large = world.take(16 * MIB)
        world.examine()
        world.drop(large)
    with pool.step("train"):
        world.drop(*[world.take(size * MIB) for size in (8, 2, 3)])
    world.drop(weights)
    world.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exception_in_a_step_leaves_what_lives(policy: str) -> None:
    world = World(policy, plan=simple(policy))
    pool = world.allocator
    kept = []
    for _ in range(3):
        with suppress(KeyError), pool.step("train"):
            kept.append(world.take(8 * MIB))
            kept.append(world.take(2 * MIB))
            raise KeyError
        world.ledger.examine()
    world.drop(*kept)
    one_step(pool)
    world.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_plans_change_while_blocks_live_in_lent_pages(policy: str) -> None:
    """The old plan's region goes back when nothing lives in it, and nobody uses its pages."""
    world = World(policy, plan=simple(policy))
    pool = world.allocator
    weights = world.take(4 * MIB)
    with pool.step("train"):
        world.drop(world.take(8 * MIB), world.take(2 * MIB))
    with pool.step("other"):
        lent = world.take(9 * MIB)
    pool.use_plan(simple(policy, steps=4))
    world.examine()
    with pool.step("train"):
        world.drop(world.take(8 * MIB), world.take(2 * MIB))
    world.examine()
    world.drop(lent)
    with pool.step("train"):
        world.drop(world.take(8 * MIB), world.take(2 * MIB))
    world.examine()
    world.drop(weights)
    pool.release_free_regions()
    world.examine()
    assert world.device.live_bytes <= 12 * MIB
    world.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_longer_step_gets_pages_for_its_places(policy: str) -> None:
    rows: list[tuple[int, int, int]] = []
    marks = []
    for number, length in enumerate((100, 300, 200, 100)):
        marks.append(len(rows))
        rows += [(0, 2 * number, length * 4096), (0, 2 * number + 1, length * length * 512)]
        rows += [(1, 2 * number, 0), (1, 2 * number + 1, 0)]
    plan = bfc.Plan.from_trace(bfc.Trace(*zip(*rows, strict=True)), marks=marks, fallback=policy)
    world = World(policy, "1 GiB", plan)
    for length in (150, 251, 400, 77, 300, 700):
        with world.allocator.step("train"):
            blocks = [world.take(length * 4096), world.take(length * length * 512)]
            world.examine()
            world.drop(*blocks)
    assert world.allocator.plan_stats()["agreement"] == 1.0
    world.end()


def test_streams_share_no_page_unordered() -> None:
    """Places of two streams meet on one page; each lends its own pages to its own requests."""
    plan = simple("caching", streams=(0, 5, 0))
    world = World("caching", "256 MiB", plan)
    dice = random.Random(11)
    world.device.is_late = True
    pool = world.allocator
    for stream in (0, 5):
        world.device.hold(stream)
    for _ in range(60):
        held = []
        with pool.step("train"):
            for size, stream in ((8, 0), (2, 5), (3, 0)):
                if dice.random() < 0.3:
                    held.append(world.take(dice.randrange(1, 9 * MIB), dice.choice((0, 5))))
                held.append(world.take(size * MIB, stream))
                if dice.random() < 0.5:
                    world.drop(held.pop(dice.randrange(len(held))))
                if dice.random() < 0.2:
                    world.device.finish(dice.choice((0, 5)))
                    world.device.hold(0)
                    world.device.hold(5)
                world.ledger.examine()
        world.drop(*held)
    for stream in (0, 5):
        world.device.finish(stream)
    world.device.is_late = False
    assert pool.plan_stats()["hits"] > 40  # places whose pages lie with the other stream stay away
    world.end()


@pytest.mark.parametrize("policy", POLICIES)
def test_what_must_be_one_piece_lies_in_no_page(policy: str) -> None:
    world = World(policy, plan=simple(policy))
    with world.allocator.step("train"):
        world.drop(world.take(8 * MIB))
    with world.allocator.step("train"):
        whole = world.allocator.allocate(8 * MIB, contiguous=True)
        assert any(at <= whole.ptr < at + size for at, size in world.device.live.items())
        whole.free()
    world.end()


def test_a_plan_of_streams_that_share_memory_is_refused_in_pages() -> None:
    plan = simple("bfc", streams=(0, 5, 0))
    with made("bfc", bfc.SimulatedSubAllocator("1 GiB")) as pool:
        with pytest.raises(bfc.PlanError, match="streams"):
            pool.use_plan(plan)
        pool.allocate(MIB).free()
        assert pool.check() is None


def test_a_forked_child_has_a_plan_of_its_own() -> None:
    with made("caching", bfc.HostSubAllocator(), memory_limit="1 GiB") as pool:
        pool.use_plan(simple("caching"))
        weights = pool.allocate(4 * MIB)
        with pool.step("train"):
            first = pool.allocate(8 * MIB)
            lent = pool.allocate(9 * MIB)
            child = os.fork()
            if child == 0:  # pytest must not go on here, whatever happens
                code = 1
                try:
                    second = pool.allocate(2 * MIB)
                    del second, lent, first
                    code = int(pool.check() is not None)
                finally:
                    os._exit(code)
            second = pool.allocate(2 * MIB)
            assert os.waitpid(child, 0)[1] == 0
            assert pool.check() is None
            del first, second, lent
        del weights


def all_of_it(pool: Any, plan: bfc.Plan) -> None:
    """What `disturbed_steps` does, without an account."""
    pool.use_plan(plan)
    weights = pool.allocate(4 * MIB)
    one_step(pool)
    with pool.step("train"):
        held = [pool.allocate(size) for size in (5 * MIB, 300 << 10, 8 * MIB, 7 * MIB)]
        del held[::2]
        held.append(pool.allocate(3 * MIB))
        held.clear()
    one_step(pool)
    del weights
    pool.use_plan(None)
    pool.release_free_regions()


@pytest.mark.long
@pytest.mark.parametrize("policy", POLICIES)
def test_a_child_forked_in_any_call_of_another_thread_has_all_of_it(policy: str) -> None:
    plan = simple(policy)
    fork_in_every_call(policy, "64 MiB", lambda pool: all_of_it(pool, plan))


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_keep_their_contents_while_plans_change_and_memory_runs_out(policy: str) -> None:
    with made(policy, bfc.HostSubAllocator(), memory_limit="64 MiB") as pool:
        plans = [simple(policy), simple(policy, steps=4)]
        pool.use_plan(plans[0])
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            dice = random.Random(seed)
            held: list[tuple[int, int, int]] = []
            try:
                for value in range(6000):
                    size = dice.choice(
                        (8 * MIB, 2 * MIB, 3 * MIB, dice.randrange(1, 9 * MIB), 5000)
                    )
                    try:
                        ptr = pool.allocate_raw(size)
                    except bfc.OutOfMemoryError:
                        size = 0
                    if size:
                        for at in (ptr, ptr + size // 2, ptr + size - 1):
                            ctypes.c_ubyte.from_address(at).value = value % 251
                        held.append((ptr, size, value % 251))
                    while held and (not size or len(held) > 3):
                        ptr, its, expected = held.pop(dice.randrange(len(held)))
                        for at in (ptr, ptr + its // 2, ptr + its - 1):
                            assert ctypes.c_ubyte.from_address(at).value == expected
                        pool.deallocate_raw(ptr)
                for ptr, _, _ in held:
                    pool.deallocate_raw(ptr)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        turn = 0
        while any(thread.is_alive() for thread in threads):
            turn += 1
            with pool.step("train" if turn % 3 else "eval"):
                assert pool.check() is None
            if turn % 8 == 0:
                pool.use_plan(plans[turn // 8 % 2])
                pool.release_free_regions()
        for thread in threads:
            thread.join()
        assert not failures
        assert pool.check() is None
        assert pool.stats().bytes_in_use == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_and_finalisers(policy: str) -> None:
    with made(policy, bfc.SimulatedSubAllocator("8 GiB")) as pool:
        pool.use_plan(simple(policy))
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            dice = random.Random(seed)
            try:
                for _ in range(150):
                    held = [pool.allocate(dice.choice((8, 2, 3, 5)) * MIB)]
                    held.append(held)
                    if dice.random() < 0.1:
                        gc.collect()
            except BaseException as error:
                failures.append(error)

        for _ in range(2):
            with pool.step("train"):
                threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        gc.collect()
        assert not failures
        assert pool.check() is None
        assert pool.stats().bytes_in_use == 0
        one_step(pool)
        before = pool.plan_stats()["departed_steps"]
        one_step(pool)
        assert pool.plan_stats()["departed_steps"] == before


@pytest.mark.parametrize("policy", POLICIES)
def test_a_snapshot_shows_only_pages_that_are_there(policy: str) -> None:
    with made(policy, bfc.SimulatedSubAllocator("1 GiB")) as pool:
        pool.use_plan(simple(policy))
        with pool.step("train"):
            held = pool.allocate(8 * MIB)
            lent = pool.allocate(5 * MIB)
            snapshot = pool.snapshot()
            assert sum(region.size for region in snapshot.regions) == pool.stats().pool_bytes
            blocks = [chunk for chunk in snapshot.chunks() if chunk.state == "in use"]
            assert sorted(chunk.requested_size // MIB for chunk in blocks) == [5, 8]
            assert "8" in str(snapshot)
            del held, lent


@pytest.mark.parametrize("policy", POLICIES)
def test_a_region_goes_back_after_a_mapping_that_could_not_be_undone(policy: str) -> None:
    """Free pages beside the plan are to move to a place: that fails, and fails to be undone."""
    world = World(policy, plan=simple(policy))
    pool = world.allocator
    world.drop(world.take(9 * MIB))
    world.device.fail_at((1,), "access", error=FAULT)
    world.device.fail_at((1,), "unmap", error=FAULT)
    with pool.step("train"):
        with suppress(bfc.SubAllocatorError):
            world.take(8 * MIB)
        assert pool.page_stats()["lost_slots"] > 0
        world.drop(world.take(8 * MIB), world.take(2 * MIB))  # the region has pages, too
    world.end()


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    yield
    gc.collect()
