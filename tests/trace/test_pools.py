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
from bfc.study.recorded_settings import with_the_last_refusal

KIB, MIB = 1 << 10, 1 << 20
STREAM = 1  # the number that a trace gives it, too
KINDS: dict[str, dict[str, Any]] = {
    "2.15": {},
    "2.15 strict": {"strict": True},
    "2.11": {"torch": "2.11", "strict": True},
    "expandable": {"settings": "expandable_segments:True"},
    "max_split": {"settings": "max_split_size_mb:21"},
    "stitched": {"stitch": True},
}
#: What a trace does not have: waits, and requests that were refused.
UNTOLD = ("num_sync_all_streams", "num_ooms", "num_alloc_retries")


def marks_of(trace: bfc.Trace) -> list[tuple[int, str, int]]:
    return [(event, POOL_MARKS[mark], pool) for event, mark, pool in trace.pool_marks.tolist()]


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

    def __init__(self, seed: int, options: dict[str, Any], capacity: int = 1 << 40) -> None:
        self.rng = random.Random(seed)
        self.device = bfc.SimulatedSubAllocator(capacity)
        self.allocator = bfc.CachingAllocator(self.device, **options)
        self.live: list[tuple[int, int]] = []
        self.graphs: list[Any] = []
        self.mem_pools: list[Any] = []
        # Pages of a stream that captures stay where they are, and no trace says when one does.
        self.empties_inside = not {"settings", "stitch"} & set(options)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            chance = self.rng.random()
            if chance < 0.1:
                self.capture()
            elif chance < 0.14 and self.graphs:
                self.graphs.pop(self.rng.randrange(len(self.graphs))).release()
            elif chance < 0.18:
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
            if self.empties_inside and self.rng.random() < 0.1:
                self.allocator.empty_cache()
            self.device.captures.end(STREAM)
        self.graphs.append(graph)

    def work(self, steps: int, stream: int | None = None) -> None:
        for _ in range(steps):
            mine = [at for at, (_, on) in enumerate(self.live) if stream in (None, on)]
            if mine and self.rng.random() < 0.5:
                self.allocator.deallocate_raw(self.live.pop(self.rng.choice(mine))[0])
                continue
            on = self.rng.choice((0, STREAM)) if stream is None else stream
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
    program = Program(seed, KINDS[kind])
    try:
        program.allocator.record_history()
        program.run(steps)
        yield program, bfc.Trace.from_snapshot(program.allocator.snapshot())
    finally:
        program.close()


def allocator_of(kind: str) -> bfc.CachingAllocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator(1 << 40), **KINDS[kind])


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
        ({"pools": [(0, 0), (-1, 0)]}, "below 2"),
        ({"pools": [(0, 0), (1.5, 0)]}, "rows of two"),
        ({"pool_marks": [(0, 0, 1)]}, "not there"),
        ({"pools": [(0, 0), (1, 0)], "pool_marks": [(2, 0, 1)]}, "not there"),
        ({"pools": [(0, 0), (1, 0)], "pool_marks": [(0, 5, 1)]}, "not there"),
        ({"pools": [(0, 0), (1, 0)], "pool_marks": [(0, 0, 0)]}, "not there"),
        ({"pool_marks": [(0, 0)]}, "rows of three"),
    ],
)
def test_pools_that_are_none_are_refused(columns: dict[str, Any], fault: str) -> None:
    with pytest.raises(bfc.TraceError, match=fault):
        bfc.Trace([0], [0], [512], **columns)


# -- replays --------------------------------------------------------------------------------------


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
