"""A snapshot holds rows of numbers and makes objects when they are looked at; nobody sees which."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bfc
from bfc.snapshots import snapshot as values
from bfc.snapshots.columns import (
    CHUNK,
    RECORD,
    REGION,
    HistoryColumns,
    columns_of_history,
    columns_of_regions,
)

MIB = 1 << 20


def a_run(steps: list[int], **options) -> bfc.CachingAllocator:
    """Allocations of these sizes on two streams; every third is freed at once."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), **options)
    allocator.record_history()
    for number, size in enumerate(steps):
        address = allocator.allocate_raw(size, stream=number % 2)
        if number % 3 == 0:
            allocator.deallocate_raw(address)
    return allocator


def stitched() -> bfc.BFCAllocator:
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), virtual_memory=True)
    addresses = [allocator.allocate_raw(5 * MIB) for _ in range(12)]
    for address in addresses[::2]:
        allocator.deallocate_raw(address)
    allocator.allocate_raw(20 * MIB)
    return allocator


def plain() -> bfc.BFCAllocator:
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), allow_growth=True)
    allocator.set_timing_counter(bfc.SharedCounter())
    addresses = [allocator.allocate_raw(1000 * n) for n in range(1, 9)]
    allocator.deallocate_many(addresses[::3])
    return allocator


def expandable() -> bfc.CachingAllocator:
    return a_run([3 * MIB, 30 * MIB, 5000, 40 * MIB], settings="expandable_segments:True")


KINDS = {"caching": lambda: a_run([1000, 3 * MIB, 700] * 5), "plain": plain, "stitched": stitched}
KINDS["expandable"] = expandable


@pytest.fixture(params=KINDS)
def taken(request) -> values.Snapshot:
    with KINDS[request.param]() as allocator:
        return allocator.snapshot()


def unseen(snapshot: values.Snapshot) -> bool:
    return not {"regions", "history"} & set(vars(snapshot))


def rebuilt(snapshot: values.Snapshot) -> values.Snapshot:
    """The same of objects alone."""
    return bfc.Snapshot(
        snapshot.device,
        snapshot.stats,
        snapshot.regions,
        snapshot.history,
        snapshot.settings,
        snapshot.torch,
        snapshot.tags,
    )


def test_objects_are_made_when_they_are_looked_at() -> None:
    with a_run([1000, 3 * MIB, 700]) as allocator:
        snapshot = allocator.snapshot()
    assert unseen(snapshot)
    snapshot.to_torch()
    assert unseen(snapshot), "it is written from the rows"
    assert snapshot.history is snapshot.history
    assert "regions" not in vars(snapshot)
    assert type(snapshot.regions) is tuple
    assert snapshot.regions is snapshot.regions


def test_a_picture_and_a_pools_part_make_no_entries() -> None:
    with a_run([1000, 3 * MIB, 700]) as allocator:
        snapshot = allocator.snapshot()
        print(snapshot)
        part = snapshot.of_pool((0, 0))
        assert "history" not in vars(snapshot)
        assert "history" not in vars(part)
        assert (part, part.history) == (snapshot, snapshot.history)
        assert snapshot.of_pool((7, 7)).regions == ()
        assert snapshot.of_pool((7, 7)).bins != snapshot.bins


def test_nobody_can_tell_rows_from_objects(taken) -> None:
    """Equality, hashes, copies, pickles, pictures and files are the same."""
    objects = rebuilt(taken)
    for other in (
        objects,
        copy.copy(taken),
        copy.deepcopy(taken),
        pickle.loads(pickle.dumps(taken)),
        dataclasses.replace(taken),
    ):
        assert other == taken
        assert hash(other) == hash(taken)
        assert repr(other) == repr(taken)
        assert str(other) == str(taken)
        assert other.as_dict() == taken.as_dict()
        assert other.to_torch() == taken.to_torch()
    assert dataclasses.asdict(objects) == dataclasses.asdict(taken)


def test_rows_of_objects_are_those_of_the_allocator(taken) -> None:
    """But for numbers that no object holds: of regions, and whose allocation an entry is about."""
    rows, made = vars(taken)["_regions"], columns_of_regions(taken.regions)
    assert made.chunks == rows.chunks
    assert made.pages == rows.pages
    for mine, theirs in zip(
        REGION.iter_unpack(made.regions), REGION.iter_unpack(rows.regions), strict=True
    ):
        assert mine[:5] + mine[8:] == theirs[:5] + theirs[8:]
    history = vars(taken).get("_history") or HistoryColumns(b"")
    entries = columns_of_history(taken.history)
    for mine, theirs in zip(
        RECORD.iter_unpack(entries.records), RECORD.iter_unpack(history.records), strict=True
    ):
        assert mine[:6] + mine[7:] == theirs[:6] + theirs[7:]


@given(st.lists(st.integers(1, 40 * MIB), max_size=30), st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_run_is_the_same_in_rows_and_in_objects(sizes: list[int], maps: bool) -> None:
    options = {"settings": "expandable_segments:True"} if maps else {}
    with a_run(sizes, **options) as allocator:
        snapshot, history = allocator.snapshot(), allocator.history()
        without = allocator.snapshot(history=False)
        assert [(r.ptr, r.end) for r in snapshot.regions] == [
            (r.chunks[0].ptr, r.chunks[-1].ptr + r.chunks[-1].size) for r in snapshot.regions
        ]
    assert [*snapshot.history] == history[: len(snapshot.history)]
    assert [entry.action for entry in history[len(snapshot.history) :]] == ["snapshot"]
    assert rebuilt(snapshot).to_torch() == snapshot.to_torch()
    assert (without.regions, without.history) == (snapshot.regions, ())


def test_a_snapshot_without_history_is_noted_in_the_history_all_the_same() -> None:
    with a_run([1000]) as allocator:
        before = allocator.snapshot()
        assert allocator.snapshot(history=False).history == ()
        actions = [entry.action for entry in allocator.history()]
        assert actions[len(before.history) :] == ["snapshot", "snapshot"]


def test_frames_are_those_of_the_moment() -> None:
    """The allocator forgets them; a snapshot that was taken before does not."""
    with a_run([1000, 3 * MIB]) as allocator:
        snapshot = allocator.snapshot()
        allocator.record_history(None)
        assert all(entry.frames for entry in snapshot.history)
        (chunk,) = snapshot.live_chunks()
        assert chunk.frames[0].name == "a_run"
        assert all(region.frames for region in snapshot.regions)


def test_attributes_that_do_not_exist_are_missing(taken) -> None:
    for name in ("chunk", "_regoins", "__array__"):
        assert not hasattr(taken, name)
    with pytest.raises(AttributeError, match="'Snapshot' object has no attribute 'chunk'"):
        _ = taken.chunk
    with pytest.raises(dataclasses.FrozenInstanceError):
        taken.regions = ()


@pytest.mark.parametrize("fault", [{"ptr": -1}, {"size": 1 << 64}])
def test_a_number_that_no_row_holds_is_refused(fault) -> None:
    numbers = {"ptr": 256, "size": 256, "requested_size": 200, "allocation_id": 1}
    chunk = bfc.ChunkInfo(**(numbers | fault), state="in use")
    snapshot = bfc.Snapshot("host", bfc.Stats(), (bfc.RegionInfo(256, 256, (chunk,)),))
    with pytest.raises(struct.error):
        snapshot.to_torch()


def test_names_that_somebody_has_made_up_are_kept() -> None:
    region = bfc.RegionInfo(0, 256, (), kind="huge")
    entry = bfc.HistoryEntry("annotate", 5, 6, 7, 8)
    made = bfc.Snapshot("host", bfc.Stats(), (region,), (entry,)).to_torch()
    assert made["segments"][0]["segment_type"] == "huge"
    assert made["device_traces"][0][0]["action"] == "annotate"


def test_rows_have_the_size_that_compiled_code_gives_them() -> None:
    with a_run([1000, 2000]) as allocator:
        snapshot = allocator.snapshot()
    rows = vars(snapshot)["_regions"]
    assert len(rows.regions) == len(snapshot.regions) * REGION.size
    assert len(rows.chunks) == len(list(snapshot.chunks())) * CHUNK.size
    assert len(vars(snapshot)["_history"].records) == len(snapshot.history) * RECORD.size
