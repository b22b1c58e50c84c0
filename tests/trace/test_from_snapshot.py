"""`Trace.from_snapshot`: all that an allocator recorded, also what files do not hold."""

from __future__ import annotations

import copy
import io
import pickle
import random
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import bfc
from bfc_tools.browser.report import shown
from bfc_tools.study import recorded_settings

MIB = 1 << 20
Kind = tuple[type[bfc.Allocator], dict[str, Any]]
Call = tuple[int, int, int]

PLAIN: dict[str, Kind] = {
    "growing": (bfc.BFCAllocator, {"allow_growth": True}),
    "whole": (bfc.BFCAllocator, {}),
    "caching": (bfc.CachingAllocator, {}),
    "collecting": (
        bfc.CachingAllocator,
        {"settings": "max_split_size_mb:20,garbage_collection_threshold:0.7"},
    ),
    "expandable": (bfc.CachingAllocator, {"settings": "expandable_segments:True"}),
}
STITCHED: dict[str, Kind] = {
    "bfc": (bfc.BFCAllocator, {"virtual_memory": True}),
    "caching": (bfc.CachingAllocator, {"stitch": True}),
}
SLEEPING: dict[str, Kind] = {**STITCHED, "expandable": PLAIN["expandable"]}


def play(kind: Kind, seed: int, late: int) -> tuple[Any, list[Call]]:
    """An allocator after 400 random calls, recorded from one of them on; and these."""
    rng, (policy, options) = random.Random(seed), kind
    allocator: Any = policy(bfc.SimulatedSubAllocator("96 MiB"), **options)  # type: ignore[call-arg]
    live: list[int] = []
    calls: list[Call] = []
    for step in range(400):
        if step == late:
            allocator.record_history()
            calls.clear()
        chance = rng.random()
        if live and chance < 0.48:
            address = live.pop(rng.randrange(len(live)))
            allocator.deallocate_raw(address)
            calls.append((1, address, 0))
        elif chance < 0.5:
            allocator.release_free_regions()
        else:
            most = rng.choice([1, 12, 30]) * MIB
            nbytes = rng.randrange(1, most)
            with bfc.owner(rng.choice("abc")), suppress(bfc.OutOfMemoryError):
                live.append(allocator.allocate_raw(nbytes))
                calls.append((0, live[-1], nbytes))
    return allocator, calls


def from_file(snapshot: bfc.Snapshot) -> bfc.Trace:
    return bfc.Trace.from_torch(io.BytesIO(pickle.dumps(snapshot.to_torch(), protocol=4)))


def live_at_the_end(trace: bfc.Trace) -> list[tuple[int, int]]:
    live: dict[int, tuple[int, int]] = {}
    addresses = trace.meta["torch"]["addresses"]
    for op, number, size, address in zip(trace.op, trace.id, trace.size, addresses, strict=True):
        if op == 0:
            live[int(number)] = address, int(size)
        elif op == 1:
            del live[int(number)]
    return sorted(live.values())


def reserved_at_the_end(trace: bfc.Trace) -> int:
    torch = trace.meta["torch"]
    change = {"segment_alloc": 0, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    return sum(size for _, _, size in torch["segments"]) + sum(
        change[action] * size for action, _, _, size, _ in torch["segment_events"]
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("late", [0, 150])
@pytest.mark.parametrize("kind", PLAIN)
def test_it_is_what_would_be_read_from_a_file_where_that_loses_nothing(
    kind: str, late: int
) -> None:
    """All columns, tables and the meta: of a history that is whole, and of one that begins late."""
    allocator, _ = play(PLAIN[kind], 1, late)
    snapshot = allocator.snapshot()
    ours, read = bfc.Trace.from_snapshot(snapshot), from_file(snapshot)
    mine, theirs = ours._columns(), read._columns()
    assert mine.keys() == theirs.keys()
    for name, values in mine.items():
        assert np.array_equal(values, theirs[name]), name
    assert ours.meta["torch"] == read.meta["torch"]
    assert len(ours) > 100


@pytest.mark.parametrize("late", [0, 150])
@pytest.mark.parametrize("kind", STITCHED)
def test_it_has_every_call_where_memory_was_stitched(kind: str, late: int) -> None:
    """What was allocated and freed, in order; what is live; and how much was reserved. A file lost
    most of it."""
    allocator, calls = play(STITCHED[kind], 1, late)
    snapshot = allocator.snapshot()
    trace = bfc.Trace.from_snapshot(snapshot)
    start, torch = trace.beginning.events, trace.meta["torch"]
    assert (start > 0) == (late > 0)
    rows = zip(trace.op, torch["addresses"], trace.size, strict=True)
    found = [(int(op), address, int(size)) for op, address, size in list(rows)[start:] if op != 2]
    expected = [(op, address if op == 0 else 0, size) for op, address, size in calls]
    assert found == expected
    assert live_at_the_end(trace) == sorted(
        (chunk.ptr, chunk.requested_size) for chunk in snapshot.live_chunks()
    )
    assert reserved_at_the_end(trace) == snapshot.stats.pool_bytes
    assert torch["repairs"] == {}
    assert len(from_file(snapshot)) < len(trace)
    assert recorded_settings.read(trace).peak_reserved == snapshot.stats.peak_pool_bytes or late


@pytest.mark.parametrize("kind", SLEEPING)
def test_it_has_what_sleeps(kind: str) -> None:
    policy, options = SLEEPING[kind]
    with policy(bfc.HostSubAllocator("64 MiB"), **options) as allocator:  # type: ignore[call-arg]
        allocator.record_history()
        with allocator.tag("weights"), bfc.owner("weights"):
            kept, gone = allocator.allocate_raw(5 * MIB), allocator.allocate_raw(MIB)
        other = allocator.allocate_raw(3 * MIB)
        allocator.sleep()
        allocator.deallocate_raw(gone)
        snapshot = allocator.snapshot()
        trace = bfc.Trace.from_snapshot(snapshot)
        sizes = [(5 * MIB, "weights"), (MIB, "weights"), (3 * MIB, ""), (0, "weights")]
        assert trace.size.tolist() == [size for size, _ in sizes]
        assert trace.owner is not None
        owners = [trace.owners[number] for number in trace.owner]
        assert [name == "weights" for name in owners] == [True, True, False, True]
        assert live_at_the_end(trace) == sorted([(kept, 5 * MIB), (other, 3 * MIB)])
        assert reserved_at_the_end(trace) == sum(region.size for region in snapshot.regions)
        growth = bfc.diff(from_file(snapshot), allocator).end
        assert growth.total.bytes == 5 * MIB  # which the file lost
        assert any("sleep at the end" in remark for remark in shown(snapshot)["runs"][0]["remarks"])
        allocator.wake()


def test_of_one_pool_it_has_the_pool() -> None:
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        pool = bfc.MemPool(allocator)
        allocator.record_history(context=None)
        with bfc.use_mem_pool(pool):
            inside = [allocator.allocate_raw(size) for size in (1000, 3 * MIB)]
        outside = [allocator.allocate_raw(size) for size in (2000, 4 * MIB)]
        for address in (inside[0], outside[0]):
            allocator.deallocate_raw(address)
        allocator.release_free_regions()
        snapshot = pool.snapshot()
        for one in (snapshot, pickle.loads(pickle.dumps(snapshot)), copy.copy(snapshot)):
            trace = bfc.Trace.from_snapshot(one)
            assert trace.size.tolist() == [1000, 3 * MIB, 0]
            assert trace.meta["torch"]["private_pool_allocations"] == 2
        assert len(bfc.Trace.from_snapshot(allocator.snapshot()).size) == 6 + 1


@pytest.mark.parametrize("skipped", ["free_completed", "segment_alloc", "segment_free"])
def test_what_was_not_recorded_is_repaired(skipped: str) -> None:
    """A viewer could not follow such a history; a file of it holds a part."""
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        allocator.record_history(context=None, skip_actions=[skipped])
        for size in (30 * MIB, 40 * MIB):
            allocator.deallocate_raw(allocator.allocate_raw(size))
            allocator.release_free_regions()
        kept = allocator.allocate_raw(5 * MIB)
        trace = bfc.Trace.from_snapshot(allocator.snapshot())
        assert trace.size[trace.op == 0].tolist()[-3:] == [30 * MIB, 40 * MIB, 5 * MIB]
        assert live_at_the_end(trace) == [(kept, 5 * MIB)]


def test_without_a_history_it_is_what_is_live() -> None:
    allocator, _ = play(PLAIN["caching"], 2, 500)
    snapshot = allocator.snapshot()
    trace = bfc.Trace.from_snapshot(snapshot)
    live = sorted(snapshot.live_chunks(), key=lambda chunk: chunk.allocation_id)
    assert trace.size.tolist() == [chunk.requested_size for chunk in live]
    assert trace.owner is not None
    assert [trace.owners[number] for number in trace.owner] == [chunk.owner for chunk in live]


def test_a_snapshot_that_contradicts_itself_is_refused() -> None:
    entry = bfc.HistoryEntry("alloc", 4096, 100, 0, 7)
    chunk = bfc.ChunkInfo(4096, 8192, 100, 1, "in use")
    regions = tuple(bfc.RegionInfo(start, 8192, (chunk,)) for start in (4096, 8192))
    snapshot = bfc.Snapshot("cuda:0", bfc.Stats(), regions, (entry,))
    with pytest.raises(bfc.TraceError, match="0x1000 and 0x2000 overlap"):
        bfc.Trace.from_snapshot(snapshot)
    far = bfc.RegionInfo((1 << 64) - 4096, 8192, ())
    with pytest.raises(bfc.TraceError, match="beyond all addresses"):
        bfc.Trace.from_snapshot(bfc.Snapshot("cuda:0", bfc.Stats(), (far,), (entry,)))
