"""Streams that share the pages of one plan: each waits for the other whose pages it takes."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from delayed_host import LateHost, without
from mapping_faults import fail_every_call
from page_ledger import RuleError
from planned_pages import MIB, PAGE, World, fork_in_every_call, made, simple, world_with
from repeated_runs import DisturbedProgram, Run, events_of, some_run

import bfc


def one_block(stream: int = 0) -> bfc.Plan:
    """A plan of 40 MiB in each step."""
    rows = [row for a in range(3) for row in ((0, a, 40 * MIB, stream), (1, a, 0, stream))]
    return bfc.Plan.from_trace(bfc.Trace(*zip(*rows, strict=True)), marks=[0, 2, 4])


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_takes_idle_pages_of_a_plan_before_it_is_refused(waits: bool) -> None:
    """Stream 7 waits for stream 0, and the place waits for stream 7 once its pages are back."""
    world = World("caching", "64 MiB", one_block())
    pool = world.allocator
    world.device.is_late = True
    if not waits:  # then the ledger finds that, in the same history
        world.device.order = lambda first, then: None  # type: ignore[method-assign]
    raises: Any = nullcontext() if waits else pytest.raises(RuleError, match="does not wait")
    with pool.step("train"):
        place = world.take(40 * MIB)
        world.drop(place)
        for stream in (0, 7):
            world.device.hold(stream)
        world.drop(world.take(MIB), world.take(4 * MIB))
        with raises:
            world.take(40 * MIB, 7)
        if not waits:
            return
        world.examine()
        with pytest.raises(bfc.OutOfMemoryError):
            world.take(40 * MIB)
        world.examine()
        world.drop(*list(world.ledger.live))
    assert pool.page_stats()["stream_waits"] == 1
    with pool.step("train"):
        assert world.take(40 * MIB) == place
        world.examine()
        assert pool.page_stats()["stream_waits"] == 2
    for stream in (0, 7):
        world.device.finish(stream)
    world.device.is_late = False
    world.end()


def test_a_region_goes_back_and_the_pages_that_others_have_stay() -> None:
    world = World("caching", "64 MiB", one_block())
    pool = world.allocator
    with pool.step("train"):
        world.drop(world.take(40 * MIB))
    taken = world.take(40 * MIB, 7)
    small = world.take(300 << 10)
    pool.use_plan(None)
    assert len(world.ledger.reservations) == 2  # those of the streams: of the region nothing
    world.examine()
    world.drop(taken, small)
    with pytest.raises(bfc.OutOfMemoryError):
        world.take(66 * MIB)
    world.take(60 * MIB)
    world.end()


def test_a_captured_stream_keeps_its_idle_pages_and_the_error_says_so() -> None:
    world = World("caching", "64 MiB", one_block(stream=5))
    pool = world.allocator
    with pool.step("train"):
        world.drop(world.take(40 * MIB, 5))
    with pool.capture(5) as graph:
        world.device.captures.begin(5)
        with pytest.raises(bfc.OutOfMemoryError, match="memory that others keep: 20 pages"):
            world.take(40 * MIB, 7)
        world.device.captures.end(5)
    graph.release()
    world.drop(world.take(40 * MIB, 7))
    world.end()


@pytest.mark.parametrize("stitch", [False, True])
def test_stream_0_gets_no_place_of_an_allocators_own_stream(stitch: bool) -> None:
    """The plan's stream 0 is the allocator's own, and what that has used stream 0 would not wait
    for."""
    device = bfc.SimulatedSubAllocator("256 MiB")
    with bfc.CachingAllocator(device, stream=9, stitch=stitch) as pool:
        pool.use_plan(one_block(), gate=None)
        with pool.step("train"):
            own = pool.allocate(40 * MIB)
            at = own.ptr
            del own
            other = pool.allocate(40 * MIB, stream=0)
            again = pool.allocate(40 * MIB, stream=9)
            assert pool.plan_stats()["hits"] == 1
            assert at == again.ptr != other.ptr
            del other, again


def several_streams(dice: random.Random) -> tuple[Run, bfc.Plan]:
    run = some_run(dice, iterations=4, streams=3)
    trace = run.trace
    sizes = trace.size * np.uint64(dice.choice((4, 10, 20)))
    run = Run(bfc.Trace(trace.op, trace.id, sizes, trace.stream), run.marks)
    return run, bfc.Plan.from_trace(run.trace, marks=run.marks)


@dataclass(kw_only=True)
class LateRun(DisturbedProgram):
    """A run on three streams, disturbed, whose work runs late. Each block is written and read."""

    source: LateHost
    streams: dict[int, int]
    held: dict[int, tuple[bfc.Buffer, int, int]] = field(default_factory=dict)
    refused: int = 0

    def allocate(self, key: int, size: int) -> None:
        self.number += 1
        stream = self.streams.get(key, self.number % 3)
        try:
            buffer = self.pool.allocate(size, stream=stream)
        except bfc.OutOfMemoryError:
            self.refused += 1
            return
        self.source.write(stream, buffer.ptr, buffer.nbytes, self.number)
        self.held[key] = buffer, self.number, stream
        self.source.run_one(self.dice.randrange(3))

    def free(self, key: int) -> None:
        if key not in self.held:
            return
        buffer, number, stream = self.held.pop(key)
        self.source.read(stream, buffer.ptr, buffer.nbytes, number)
        if self.dice.random() < 0.1:
            other = self.dice.randrange(3)
            self.source.make_wait(other, stream)
            self.source.read(other, buffer.ptr, buffer.nbytes, number)
            self.pool.record_stream(buffer, other)
        buffer.free()
        self.source.run_one(self.dice.randrange(3))

    def run(self, run: Run) -> None:
        events = events_of(run.trace)
        self.play(events[: run.marks[0][0]])
        for kind, part in run.iterations():
            with self.pool.step(kind):
                self.play(events[part])
            if self.dice.random() < 0.2:
                self.pool.trim(self.dice.randrange(self.most), wait=self.dice.random() < 0.5)
        for key in list(self.held):
            self.free(key)


def late_run(kind: Callable[[int], Any], seed: int) -> tuple[LateHost, LateRun, dict[str, Any]]:
    """Under a limit that the plan just fits, and now and then one above it."""
    dice = random.Random(f"late {seed}")
    run, plan = several_streams(dice)
    pages = -(-plan.span // PAGE) + dice.choice((0, 1, 2, 8))
    source = kind(pages * PAGE)
    pool = made("caching", source)
    pool.use_plan(plan)
    program = LateRun(
        pool=pool,
        dice=dice,
        wrong=(0, 0.02, 0.1, 0.3)[seed % 4],
        most=plan.span,
        source=source,
        streams=dict(zip(run.trace.id.tolist(), run.trace.stream.tolist(), strict=True)),
    )
    program.run(run)
    stats = pool.page_stats()
    pool.use_plan(None)
    pool.release_free_regions()
    assert pool.check() is None
    assert pool.stats().bytes_in_use == 0
    pool.close()
    source.run_all()
    return source, program, stats


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(48))
def test_disturbed_runs_on_several_streams_keep_their_contents(seed: int) -> None:
    source, _program, _stats = late_run(LateHost, seed)
    assert source.faults == []
    assert source.live_bytes == 0


@pytest.mark.sampled
def test_a_wait_that_is_forgotten_is_found() -> None:
    """The test above can fail."""
    assert any(late_run(without("order"), seed)[0].faults for seed in range(48))


def to_and_fro() -> list[tuple[int, int, int, int]]:
    """A step. Two streams in turn have nearly all that the other had."""
    rows: list[tuple[int, int, int, int]] = []
    for stream, sizes in ((0, (24, 10)), (3, (18, 14)), (0, (16, 18)), (3, (30, 2))):
        keys = range(len(rows), len(rows) + len(sizes))
        rows += [(0, key, nbytes * MIB, stream) for key, nbytes in zip(keys, sizes, strict=True)]
        rows += [(1, key, 0, stream) for key in keys]
    return rows


@pytest.mark.parametrize("capacity", ["1 GiB", "52 MiB"])
def test_streams_do_not_go_on_taking_pages_of_each_other_where_there_is_room(capacity: str) -> None:
    """They did in each step, since there were to be no more pages than were live at once. Only the
    limit may hold them to that."""
    step = to_and_fro()
    rows = [(op, 100 * at + key, *rest) for at in range(3) for op, key, *rest in step]
    marks = range(0, len(rows), len(step))
    plan = bfc.Plan.from_trace(bfc.Trace(*zip(*rows, strict=True)), marks=marks)
    assert plan.peak < 52 * MIB < plan.span
    world = World("caching", capacity, plan)
    pool = world.allocator
    passed = []
    for _ in range(12):
        before = pool.page_stats()
        held = {}
        with pool.step("train"):
            for op, key, nbytes, stream in step:
                if op == 0:
                    held[key] = world.take(nbytes, stream)
                else:
                    world.drop(held.pop(key))
            world.examine()
        after = pool.page_stats()
        passed.append(sum(after[kind] - before[kind] for kind in ("maps", "stream_waits")))
    assert passed[1] > 0
    assert (passed[-1] == 0) == (capacity == "1 GiB")
    world.end()


def test_a_plan_that_has_ended_costs_later_steps_nothing_while_it_holds_weights() -> None:
    """Each step asked whether its region can go, for which all views were unmapped first."""
    pool = made("caching", bfc.SimulatedSubAllocator("1 GiB"))
    pool.use_plan(simple("caching"))
    pool.allocate_raw(4 * MIB)  # the weights
    pool.use_plan(None)
    calls = []
    for _ in range(4):
        before = pool.page_stats()
        with pool.step("train"):
            pieces = [pool.allocate_raw(nbytes * MIB) for nbytes in (6, 4, 6, 4, 6, 4)]
            for piece in pieces[::2]:
                pool.deallocate_raw(piece)
            pool.deallocate_raw(pool.allocate_raw(18 * MIB))
            for piece in pieces[1::2]:
                pool.deallocate_raw(piece)
        after = pool.page_stats()
        calls.append(sum(after[kind] - before[kind] for kind in ("maps", "unmaps", "stitches")))
    assert calls[0] > 0
    assert calls[1:] == [0, 0, 0]


@pytest.mark.parametrize("capacity", ["1 GiB", "32 MiB"])
def test_streams_share_what_was_live_at_once(capacity: str) -> None:
    """Each stream's area is full while the others' are not: the plan takes 96 MiB of addresses, 32
    of memory, and from the second step on no more calls of the driver than waits."""
    rows: list[tuple[int, int, int, int]] = []
    marks = []
    for step in range(3):
        marks.append(len(rows))
        for stream in range(3):
            key = 3 * step + stream
            rows += [(0, key, 32 * MIB, stream), (1, key, 0, stream)]
    trace = bfc.Trace(*zip(*rows, strict=True))
    plan = bfc.Plan.from_trace(trace, marks=marks)
    assert plan.span == 96 * MIB
    world = World("caching", capacity, plan)
    pool = world.allocator
    world.device.is_late = True
    for step in range(4):
        waits, calls = pool.page_stats()["stream_waits"], len(world.device.calls)
        with pool.step("train"):
            for stream in range(3):
                for other in range(3):
                    if not world.device.is_held(other):
                        world.device.hold(other)
                world.drop(world.take(32 * MIB, stream))
                world.examine()
        assert pool.page_stats()["stream_waits"] - waits <= 3
        assert step < 2 or len(world.device.calls) == calls
    assert world.device.live_bytes == 32 * MIB
    for stream in range(3):
        world.device.finish(stream)
    world.device.is_late = False
    world.end()


def shared_steps(world: World) -> None:
    """A stream takes pages of a plan, which takes them back; pages from beside the plan move into
    it; the plan goes while another stream has pages of it."""
    pool = world.allocator
    with pool.step("train"):
        world.drop(world.take(8 * MIB), world.take(2 * MIB, 5))
    world.drop(world.take(14 * MIB, 7))
    with pool.step("train"):
        world.drop(world.take(8 * MIB), world.take(2 * MIB, 5), world.take(3 * MIB))
    world.take(6 * MIB, 7)
    pool.use_plan(None)
    pool.release_free_regions()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "kinds", [("reserve", "create", "map"), ("access", "unmap", "release"), ("unreserve", "wait")]
)
def test_every_call_of_the_source_may_fail_where_streams_share(kinds: Any) -> None:
    plan = simple("caching", streams=(0, 5, 0))

    fail_every_call(lambda: world_with(plan, "caching", "18 MiB"), shared_steps, kinds)


@pytest.mark.long
def test_a_child_forked_in_any_call_has_what_streams_share() -> None:
    plan = simple("caching", streams=(0, 5, 0))

    def share(pool: Any) -> None:
        pool.use_plan(plan)
        with pool.step("train"):
            first, second = pool.allocate(8 * MIB), pool.allocate(2 * MIB, stream=5)
            del first, second
        large = pool.allocate(14 * MIB, stream=7)
        del large
        with pool.step("train"):
            first, second = pool.allocate(8 * MIB), pool.allocate(2 * MIB, stream=5)
            del first, second
        taken = pool.allocate(6 * MIB, stream=7)
        pool.use_plan(None)
        pool.release_free_regions()
        del taken

    fork_in_every_call("caching", "18 MiB", share)


def test_a_child_knows_what_is_mapped_where_streams_pass_pages_to_and_fro() -> None:
    """The slot that was mapped last was taken for one whose mapping was in flight at the fork."""

    def pass_pages(pool: Any) -> None:
        for stream, nbytes in ((3, 6), (0, 2), (3, 8), (3, 6), (0, 2), (0, 6), (3, 6), (5, 8)):
            pool.allocate(nbytes * MIB, stream=stream).free()

    fork_in_every_call("caching", "8 MiB", pass_pages, streams=(0, 3, 5))


@pytest.fixture(autouse=True)
def no_garbage() -> Iterator[None]:
    yield
    gc.collect()
