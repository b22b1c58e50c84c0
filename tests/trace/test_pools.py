"""Traces of captured programs: events carry their pools, and replay in pools of their own."""

from __future__ import annotations

import contextlib
import io
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bfc
from bfc.pytorch.words import CAPTURE_BEGINS, CAPTURE_ENDS, LET_GO, POOL_MARKS
from bfc_tools.browser.data import data_of
from bfc_tools.study.recorded_settings import with_the_last_refusal

KIB, MIB = 1 << 10, 1 << 20
STREAM, JOINED = 1, 2  # the numbers that a trace gives them, too
KINDS: dict[str, dict[str, Any]] = {
    "2.15": {},
    "2.15 strict": {"strict": True},
    "2.11": {"torch": "2.11", "strict": True},
    "expandable": {"settings": "expandable_segments:True"},
    "max_split": {"settings": "max_split_size_mb:21"},
    "stitched": {"stitch": True},
}
BFC_KINDS: dict[str, dict[str, Any]] = {
    "bfc": {"allow_growth": True},
    "bfc with pages": {"virtual_memory": True},
}
#: What a trace does not have: waits, and requests that were refused.
UNTOLD = ("num_sync_all_streams", "num_ooms", "num_alloc_retries")


def marks_of(trace: bfc.Trace) -> list[tuple[int, str, int]]:
    return [(event, POOL_MARKS[mark], pool) for event, mark, pool, _ in trace.pool_marks.tolist()]


def stats_of(allocator: bfc.CachingAllocator) -> dict[str, int]:
    found = allocator.memory_stats()
    return {name: value for name, value in found.items() if name not in UNTOLD}


def regions_of(allocator: bfc.CachingAllocator) -> list[tuple[Any, ...]]:
    return [
        (it.ptr, it.size, it.stream, it.kind, it.pool_id, tuple((c.ptr, c.size) for c in it.chunks))
        for it in allocator.snapshot().regions
    ]


class Program:
    """Random calls on an allocator, with captures of graphs that share pools or do not, scopes, and
    graphs that go."""

    def __init__(self, seed: int, kind: str, capacity: int = 1 << 40) -> None:
        self.rng = random.Random(seed)
        self.device = bfc.SimulatedSubAllocator(capacity)
        self.allocator: Any = allocator_of(kind, self.device)
        self.live: list[tuple[int, int]] = []
        self.graphs: list[Any] = []
        self.mem_pools: list[Any] = []

    def run(self, steps: int) -> None:
        self.live += [(self.allocator.allocate_raw(1, stream=on), on) for on in (STREAM, JOINED)]
        for _ in range(steps):
            chance = self.rng.random()
            if chance < 0.1:
                self.capture()
            elif chance < 0.14 and self.graphs:
                self.graphs.pop(self.rng.randrange(len(self.graphs))).release()
            elif chance < 0.18 and isinstance(self.allocator, bfc.CachingAllocator):
                self.mem_pools.append(bfc.MemPool(self.allocator))
            elif chance < 0.21 and self.mem_pools:
                self.mem_pools.pop(self.rng.randrange(len(self.mem_pools))).release()
            elif chance < 0.3 and self.mem_pools:
                with bfc.use_mem_pool(self.rng.choice(self.mem_pools)):
                    self.work(4)
            elif chance < 0.34:
                self.allocator.empty_cache()
            else:
                self.work(3)

    def capture(self) -> None:
        shared = self.rng.choice([None, *self.graphs])
        with self.allocator.capture(STREAM, pool=shared) as graph:
            self.device.captures.begin(STREAM)
            self.work(self.rng.randrange(8), STREAM)
            if self.rng.random() < 0.3:
                self.device.captures.wait(JOINED, on=STREAM)
                self.work(2, JOINED)
            if self.rng.random() < 0.2:
                with bfc.use_stream(self.rng.choice((0, STREAM, JOINED))):
                    self.allocator.empty_cache()
            self.device.captures.end(STREAM)
        self.graphs.append(graph)

    def work(self, steps: int, stream: int | None = None) -> None:
        for _ in range(steps):
            mine = [at for at, (_, on) in enumerate(self.live) if stream in (None, on)]
            if mine and self.rng.random() < 0.5:
                self.allocator.deallocate_raw(self.live.pop(self.rng.choice(mine))[0])
                continue
            on = self.rng.choice((0, STREAM, JOINED)) if stream is None else stream
            most = self.rng.choice((4 * KIB, MIB, 12 * MIB, 40 * MIB))
            with contextlib.suppress(bfc.OutOfMemoryError):
                address = self.allocator.allocate_raw(self.rng.randrange(1, most), stream=on)
                self.live.append((address, on))

    def close(self) -> None:
        for it in (*self.graphs, *self.mem_pools):
            it.release()
        self.allocator.close()


@contextlib.contextmanager
def recorded(seed: int, kind: str, steps: int = 60) -> Iterator[tuple[Program, bfc.Trace]]:
    program = Program(seed, kind)
    try:
        program.allocator.record_history()
        program.run(steps)
        yield program, bfc.Trace.from_snapshot(program.allocator.snapshot())
    finally:
        program.close()


def allocator_of(kind: str, device: bfc.SimulatedSubAllocator | None = None) -> Any:
    device = device or bfc.SimulatedSubAllocator(1 << 40)
    if kind in BFC_KINDS:
        return bfc.BFCAllocator(device, **BFC_KINDS[kind])
    return bfc.CachingAllocator(device, **KINDS[kind])


def from_file(snapshot: bfc.Snapshot) -> bfc.Trace:
    return bfc.Trace.from_torch(io.BytesIO(pickle.dumps(snapshot.to_torch(), protocol=4)))


# -- what a trace holds ---------------------------------------------------------------------------


def test_a_capture_is_recorded_with_its_pool_and_its_marks() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    allocator = bfc.CachingAllocator(device)
    allocator.record_history()
    allocator.allocate_raw(1000)
    with allocator.capture(STREAM) as graph:
        inside = allocator.allocate_raw(3 * MIB, stream=STREAM)
    allocator.deallocate_raw(inside)
    graph.release()
    allocator.allocate_raw(1000)
    trace = bfc.Trace.from_snapshot(allocator.snapshot())
    assert trace.pools.tolist() == [[0, 0], list(graph.id)]
    assert trace.pool is not None
    assert trace.pool.tolist() == [0, 1, 1, 0]
    assert marks_of(trace) == [(1, CAPTURE_BEGINS, 1), (2, CAPTURE_ENDS, 1), (3, LET_GO, 1)]
    assert not any(name.startswith("bfc:") for name in trace.owners)  # marks are no owners


def test_a_program_without_pools_has_none() -> None:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    allocator.record_history()
    allocator.allocate_raw(1000)
    trace = bfc.Trace.from_snapshot(allocator.snapshot())
    assert trace.pool is None
    assert trace.pools.tolist() == [[0, 0]]
    assert len(trace.pool_marks) == 0


def test_pools_are_kept_in_a_file_in_a_copy_and_in_a_part(tmp_path: Path) -> None:
    with recorded(4, "2.15") as (_, trace):
        trace.save(tmp_path / "run.npz")
    others = {
        "file": bfc.Trace.load(tmp_path / "run.npz"),
        "copy": pickle.loads(pickle.dumps(trace)),
        "anonymised": trace.anonymised(),
        "with a refusal": with_the_last_refusal(trace)[0],
    }
    assert len(trace.pools) > 3
    for name, other in others.items():
        assert np.array_equal(trace.pool, other.pool), name  # type: ignore[arg-type]
        assert trace.pools.tolist() == other.pools.tolist(), name
        assert trace.pool_marks.tolist() == other.pool_marks.tolist(), name
    half = trace[: len(trace) // 2]
    assert half.pool_marks.tolist() == [
        row for row in trace.pool_marks.tolist() if row[0] < len(half)
    ]
    assert len(trace.closed().pool) == len(trace.closed())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"pool": [1]}, "pool holds 1"),
        ({"pool": [0, 0]}, "2 numbers for 1 events"),
        ({"pools": [(1, 0)]}, "pool 0 is the default one"),
        ({"pools": [(0, 0), (1, 0), (1, 0)]}, "the others differ"),
        ({"pools": [(0, 0, 0)]}, "rows of two"),
        ({"pools": [(0, 0), (1 << 62, 1)]}, "of tags"),
        ({"pools": [(0, 0), (1, 1 << 64)]}, "from 0 to 2"),
        ({"pools": [(0, 0), (-1, 0)]}, "from 0 to 2"),
        ({"pools": [(0, 0), (1.5, 0)]}, "rows of two"),
        ({"pool_marks": [(0, 0, 1)]}, "not there"),
        ({"pools": [(0, 0), (1, 0)], "pool_marks": [(2, 0, 1)]}, "not there"),
        ({"pools": [(0, 0), (1, 0)], "pool_marks": [(0, 7, 1)]}, "not there"),
        ({"pools": [(0, 0), (1, 0)], "pool_marks": [(0, 0, 0)]}, "not there"),
        ({"pools": [(0, 0), (1, 0)], "pool_marks": [(0, 5, 1, -1)]}, "not there"),
        ({"pool_marks": [(0, 0)]}, "rows of integers"),
    ],
)
def test_pools_that_are_none_are_refused(columns: dict[str, Any], fault: str) -> None:
    with pytest.raises(bfc.TraceError, match=fault):
        bfc.Trace([0], [0], [512], **columns)


# -- replays --------------------------------------------------------------------------------------


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_recorded_program_replays_to_the_same_addresses_and_statistics(
    seed: int, kind: str, tmp_path: Path
) -> None:
    with recorded(seed, kind) as (program, trace), allocator_of(kind) as allocator:
        trace.save(tmp_path / "run.npz")
        trace = bfc.Trace.load(tmp_path / "run.npz")
        result = trace.replay(allocator)
        assert result.failed == 0
        placed = np.array(trace.meta["torch"]["addresses"], np.uint64)
        elsewhere = np.flatnonzero(result.addresses != placed).tolist()
        assert elsewhere == []
        ours, theirs = stats_of(allocator), stats_of(program.allocator)
        assert {
            name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]
        } == {}
        assert regions_of(allocator) == regions_of(program.allocator)


@pytest.mark.parametrize("kind", BFC_KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_a_program_of_a_bfc_allocator_replays_to_the_same_addresses(seed: int, kind: str) -> None:
    with recorded(seed, kind) as (program, trace), allocator_of(kind) as allocator:
        result = trace.replay(allocator)
        placed = np.array(trace.meta["torch"]["addresses"], np.uint64)
        assert np.flatnonzero(result.addresses != placed).tolist() == []
        assert regions_of(allocator) == regions_of(program.allocator)
        assert allocator.next_region_size == program.allocator.next_region_size


@pytest.mark.parametrize("kind", [*KINDS, *BFC_KINDS])
def test_pages_of_a_stream_that_captures_stay_in_a_replay_too(kind: str) -> None:
    """No page of a stream that captures is unmapped, since nobody can wait for it: when it had
    joined the capture, and when it had left, is in the history."""
    device = bfc.SimulatedSubAllocator(1 << 40)
    with allocator_of(kind, device) as allocator, allocator_of(kind) as other:
        allocator.record_history()
        outside = [allocator.allocate_raw(30 * MIB, stream=on) for on in (STREAM, JOINED)]
        for address in outside:
            allocator.deallocate_raw(address)
        with allocator.capture(STREAM) as graph:
            device.captures.begin(STREAM)
            device.captures.wait(JOINED, on=STREAM)
            allocator.allocate_raw(MIB, stream=STREAM)
            allocator.empty_cache()
            device.captures.end(STREAM)
            allocator.allocate_raw(MIB, stream=STREAM)
            allocator.empty_cache()
        allocator.allocate_raw(30 * MIB, stream=JOINED)
        graph.release()
        trace = bfc.Trace.from_snapshot(allocator.snapshot())
        assert from_file(allocator.snapshot()).pool_marks.tolist() == trace.pool_marks.tolist()
        found = trace.replay(other)
        assert (found.addresses == trace.meta["torch"]["addresses"]).all()
        assert regions_of(other) == regions_of(allocator)


def test_a_recording_that_tells_only_of_segments_replays_with_its_pools() -> None:
    """What PyTorch does not write, and what some versions do not: the marks, and the pools of
    entries. A graph that is kept keeps its memory, and one that is gone gives it back."""
    device = bfc.SimulatedSubAllocator(1 << 40)
    allocator = bfc.CachingAllocator(device)
    allocator.record_history()
    graphs = []
    for _ in range(2):
        with allocator.capture(STREAM) as graph:
            inside = allocator.allocate_raw(12 * MIB, stream=STREAM)
        allocator.deallocate_raw(inside)
        graphs.append(graph)
    graphs[0].release()
    allocator.empty_cache()
    allocator.allocate_raw(12 * MIB, stream=STREAM)
    content = allocator.snapshot().to_torch()
    entries = [it for it in content["device_traces"][0] if it["action"] != "annotate"]
    for with_pools in (True, False):
        for entry in () if with_pools else entries:
            del entry["pool_id"]
        content["device_traces"] = [entries]
        trace = bfc.Trace.from_torch(io.BytesIO(pickle.dumps(content, protocol=4)))
        assert trace.pool is not None
        kept = trace.pools.tolist().index(list(graphs[1].id))
        assert trace.pool.tolist() == (
            [1, 1, 2, 2, 0, 0] if with_pools else [0, 0, kept, kept, 0, 0]
        )
        expected = [(4, LET_GO, 1)] if with_pools else []
        assert marks_of(trace) == expected
        with bfc.CachingAllocator(bfc.SimulatedSubAllocator(1 << 40)) as other:
            found = trace.replay(other)
            assert found.addresses.tolist() == trace.meta["torch"]["addresses"]
            assert graphs[1].id in [region.pool_id for region in other.snapshot().regions]
    graphs[1].release()


def test_a_file_keeps_the_pools() -> None:
    with recorded(4, "2.15") as (program, trace):
        read = from_file(program.allocator.snapshot())
    for name, values in trace._columns().items():
        assert np.array_equal(values, read._columns()[name]), name


def test_pools_of_an_allocator_and_of_a_replay_stay_apart() -> None:
    """Also twice in one allocator, and after both."""
    trace = bfc.Trace(
        [0, 1, 0], [0, 0, 1], [3 * MIB, 0, MIB], pool=[1, 1, 0], pools=[(0, 0), (5, 0)]
    )
    device = bfc.SimulatedSubAllocator("1 GiB")
    with bfc.CachingAllocator(device) as allocator:
        allocator.begin_allocate_to_pool((5, 0))
        mine = allocator.allocate_raw(3 * MIB)
        allocator.end_allocate_to_pool((5, 0))
        allocator.deallocate_raw(mine)
        first, second = (trace.replay(allocator).addresses[0] for _ in range(2))
        assert mine not in (first, second)
        assert first == second  # its pool was let go at the end of the first
        allocator.empty_cache()
        assert (5, 0) in [region.pool_id for region in allocator.snapshot().regions]
        allocator.release_pool((5, 0))


def test_a_replay_never_joins_two_recorded_pools() -> None:
    """The second is called as the first could be renamed; and ids may be as large as they come."""
    apart = 1 << 32
    ids = [(0, 0), (5, 0), (apart, 0), (0, 2**64 - 1), (2**64 - 1, 2**64 - 1), (1 << 63, 0)]
    trace = bfc.Trace([0] * 5, range(5), [1000] * 5, pool=range(1, 6), pools=ids)
    assert trace.pools.tolist() == [list(it) for it in ids]
    with allocator_of("2.15") as allocator:
        held = [ids[1], *ids[3:5]]
        for pool in held:
            allocator.begin_allocate_to_pool(pool, "none")
        trace.replay(allocator)
        found = [it.pool_id for it in allocator.snapshot().regions]
        assert len(set(found)) == 5
        assert set(found).isdisjoint(held)
        assert {ids[2], ids[5]} < set(found)


def test_large_ids_of_a_file_are_read(tmp_path: Path) -> None:
    allocator = allocator_of("2.15")
    allocator.record_history()
    ids = [(0, 7), (1 << 63, 0), (2**64 - 1, 2**64 - 1)]
    for pool in ids:
        allocator.begin_allocate_to_pool(pool)
        allocator.allocate_raw(1000)
        allocator.end_allocate_to_pool(pool)
    for trace in (bfc.Trace.from_snapshot(allocator.snapshot()), from_file(allocator.snapshot())):
        trace.save(tmp_path / "run.npz")
        assert [tuple(row) for row in bfc.Trace.load(tmp_path / "run.npz").pools.tolist()] == [
            (0, 0),
            *ids,
        ]
        data_of([("run", trace)], [])  # the report takes them, too


def test_a_plan_leaves_private_pools_out() -> None:
    ops, sizes = [0, 0, 1, 1] * 3, [3 * MIB, 50 * MIB, 0, 0] * 3
    with_pool = bfc.Trace(
        ops, [0, 1, 0, 1] * 3, sizes, pool=[0, 1, 0, 1] * 3, pools=[(0, 0), (1, 0)]
    )
    without = bfc.Trace([0, 1] * 3, [0] * 6, [3 * MIB, 0] * 3)
    found = bfc.Plan.from_trace(with_pool, marks=[0, 4, 8])
    other = bfc.Plan.from_trace(without, marks=[0, 2, 4])
    assert (found.span, found.peak, found.online) == (other.span, other.peak, other.online)
    assert str(found) == str(other)


def test_a_report_says_which_pool_a_segment_belongs_to() -> None:
    with recorded(4, "2.15") as (_, trace):
        recorded_run = data_of([("run", trace)], [])["runs"][0]
    with allocator_of("2.15") as allocator:
        trace[: trace.fullest_event() + 1].replay(allocator)
        regions = allocator.snapshot().regions
    expected = {
        it.ptr: "" if it.pool_id == (0, 0) else ".".join(map(str, it.pool_id)) for it in regions
    }
    segments = recorded_run["segments"]
    assert dict(zip(segments["address"], segments["pool"], strict=True)) == expected
    sums = {pool: (count, size) for pool, count, size, *_ in segments["by_pool"]}
    assert set(sums) == set(expected.values())
    for pool, (count, size) in sums.items():
        mine = [it.size for it in regions if expected[it.ptr] == pool]
        assert (count, size) == (len(mine), sum(mine))


def test_a_capture_that_allocates_nothing_replays() -> None:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    allocator.record_history()
    with allocator.capture(STREAM) as graph:
        pass
    outside = allocator.allocate_raw(1000)
    graph.release()
    trace = bfc.Trace.from_snapshot(allocator.snapshot())
    assert len(trace.pool_marks) == 3
    with allocator_of("2.15") as other:
        assert trace.replay(other).addresses.tolist() == [outside]


@pytest.mark.parametrize("options", [{"allow_growth": True}, {"virtual_memory": True}])
def test_captures_of_tensorflows_policy_replay_too(options: dict[str, Any]) -> None:
    rng = random.Random(1)
    device = bfc.SimulatedSubAllocator("2 GiB")
    allocator = bfc.BFCAllocator(device, **options)
    allocator.record_history()
    live: list[int] = []
    graphs: list[Any] = []

    def work(stream: int) -> None:
        for _ in range(4):
            if live and rng.random() < 0.5:
                allocator.deallocate_raw(live.pop(rng.randrange(len(live))))
            else:
                most = rng.choice((4 * KIB, MIB, 12 * MIB))
                live.append(allocator.allocate_raw(rng.randrange(1, most), stream=stream))

    for _ in range(40):
        if rng.random() < 0.3:
            with allocator.capture(STREAM, pool=rng.choice([None, *graphs])) as graph:
                device.captures.begin(STREAM)
                work(STREAM)
                device.captures.end(STREAM)
            graphs.append(graph)
        elif rng.random() < 0.1 and graphs:
            graphs.pop(rng.randrange(len(graphs))).release()
        else:
            work(0)
    trace = bfc.Trace.from_snapshot(allocator.snapshot())
    assert len(trace.pools) > 3
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("2 GiB"), **options) as other:
        found = trace.replay(other)
        assert found.addresses.tolist() == trace.meta["torch"]["addresses"]
        other.check()
    for graph in graphs:
        graph.release()
    allocator.close()
