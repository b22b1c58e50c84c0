"""Snapshots: plain values that agree with the allocator, and their drawings."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bfc
from bfc.snapshots.snapshot import BIN_COUNT, bin_index

MIB = 1 << 20
BASE = 1 << 40


@pytest.fixture
def allocator(make_allocator) -> bfc.BFCAllocator:
    """1000 bytes in use, 1024 free, 300 in use, the rest of 2 MiB free; a second region full."""
    allocator = make_allocator("1 GiB", allow_growth=True)
    ptrs = [allocator.allocate_raw(size) for size in (1000, 1000, 300)]
    allocator.allocate_raw(4 * MIB)
    allocator.deallocate_raw(ptrs[1])
    return allocator


def test_a_snapshot_of_nothing(make_allocator) -> None:
    snapshot = make_allocator().snapshot()
    assert (snapshot.regions, list(snapshot.chunks()), snapshot.free_chunks()) == ((), [], [])
    assert all(row.total_chunks_in_bin == 0 for row in snapshot.bins)
    assert snapshot.occupancy() == "The allocator contains no memory."
    assert str(snapshot) == "simulated:0  0 B in use (0 chunks), 0 B reserved, limit 64.00 MiB"


def test_chunks_tile_their_regions_in_address_order(allocator) -> None:
    snapshot = allocator.snapshot()
    assert [region.size for region in snapshot.regions] == [2 * MIB, 4 * MIB]
    for region in snapshot.regions:
        assert region.chunks[0].ptr == region.ptr
        assert sum(chunk.size for chunk in region.chunks) == region.size
        ends = [chunk.ptr + chunk.size for chunk in region.chunks]
        assert [chunk.ptr for chunk in region.chunks[1:]] == ends[:-1]
        assert ends[-1] == region.end


def test_chunks_say_what_they_are(allocator) -> None:
    first, second, third, rest, full = allocator.snapshot().chunks()
    assert first == bfc.ChunkInfo(BASE, 1024, 1000, 1, "in use")
    assert second == bfc.ChunkInfo(BASE + 1024, 1024, 0, -1, "free")
    assert (third.requested_size, third.size, third.in_use, third.bin_num) == (300, 512, True, -1)
    assert (rest.in_use, rest.bin_num, rest.size) == (False, 12, 2 * MIB - 2560)
    assert (full.size, full.allocation_id) == (4 * MIB, 4)


def test_figures_and_chunks_agree(allocator) -> None:
    snapshot = allocator.snapshot()
    assert snapshot.stats == allocator.stats()
    assert sum(chunk.size for chunk in snapshot.live_chunks()) == snapshot.stats.bytes_in_use
    assert (
        max(chunk.size for chunk in snapshot.free_chunks())
        == snapshot.stats.largest_free_block_bytes
    )
    assert sum(region.size for region in snapshot.regions) == snapshot.stats.pool_bytes


def test_bins_count_chunks_in_use_by_their_size_too(allocator) -> None:
    bins = allocator.snapshot().bins
    assert len(bins) == BIN_COUNT == 21
    assert bins[2] == bfc.BinInfo(2, 1024, 2048, 1, 2, total_requested_bytes_in_use=1000)
    assert bins[1] == bfc.BinInfo(1, 512, 512, 1, 1, 300)
    assert bins[14] == bfc.BinInfo(14, 4 * MIB, 4 * MIB, 1, 1, 4 * MIB)
    assert sum(row.total_bytes_in_bin for row in bins) == 6 * MIB


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0),
        (1, 0),
        (256, 0),
        (511, 0),
        (512, 1),
        (1 << 28, 20),
        ((1 << 28) - 1, 19),
        (2**63 - 1, 20),
    ],
)
def test_bins_are_tensorflows(size: int, expected: int) -> None:
    assert bin_index(size) == expected


@given(st.integers(256, 2**63 - 1))
def test_a_size_is_at_least_its_bins_own(size: int) -> None:
    assert 256 << bin_index(size) <= size
    assert bin_index(size) == BIN_COUNT - 1 or size < 256 << (bin_index(size) + 1)


def test_a_snapshot_outlives_its_allocator_and_never_changes(allocator) -> None:
    before = allocator.snapshot()
    kept = copy.deepcopy(before)
    allocator.allocate_raw(10_000)
    allocator.close()
    assert before == kept
    assert before != allocator.snapshot()
    for value in (
        before,
        before.stats,
        before.regions[0],
        before.regions[0].chunks[0],
        before.bins[0],
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(value)[0].name, 5)
    assert isinstance(hash(before), int)


def test_a_snapshot_is_json_and_pickles(allocator) -> None:
    snapshot = allocator.snapshot()
    text = json.dumps(snapshot.as_dict())
    assert json.loads(text) == snapshot.as_dict()
    assert json.loads(text)["regions"][0]["chunks"][0]["requested_size"] == 1000
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot


def test_fragmentation_of_nothing_is_nan_and_none_in_json(make_allocator) -> None:
    allocator = make_allocator("1 MiB")
    assert math.isnan(allocator.stats().fragmentation)
    assert allocator.stats().as_dict()["fragmentation"] is None
    allocator.allocate_raw(256)
    assert allocator.stats().fragmentation == 0
    json.dumps(allocator.stats().as_dict(), allow_nan=False)


# -- drawings --------------------------------------------------------------------------------------


def test_the_picture_is_what_it_was(make_allocator) -> None:
    allocator = make_allocator("64 KiB")
    first = allocator.allocate_raw(20_000)
    allocator.allocate_raw(9_000)
    allocator.deallocate_raw(first)
    assert str(allocator.snapshot()).splitlines() == [
        "simulated:0  9.0 KiB in use (1 chunk), 64.0 KiB reserved, limit 64.0 KiB",
        "free 55.0 KiB in 2 chunks, the largest 35.2 KiB, fragmentation 35.9%",
        "0x10000000000    64.0 KiB |" + "_" * 22 + "*" * 11 + "_" * 39 + "|",
        "                          * asked for   x slack   _ free",
    ]


def test_slack_is_drawn_where_it_is(make_allocator) -> None:
    allocator = make_allocator("4 KiB")
    hole, _kept = allocator.allocate_raw(1024), allocator.allocate_raw(512)
    allocator.deallocate_raw(hole)
    allocator.allocate_raw(600)  # takes the hole of 1024 bytes whole
    assert allocator.snapshot().occupancy(16) == "***x**__________"
    assert allocator.snapshot().occupancy(4) == "**__", (
        "what was asked for hides slack, slack hides free memory"
    )
    assert allocator.snapshot().occupancy(4096).count("x") == 1024 - 600


def test_an_occupancy_is_as_wide_as_asked(allocator) -> None:
    for width in (1, 7, 100, 1000):
        assert len(allocator.snapshot().occupancy(width)) == width
    assert set(allocator.snapshot().occupancy(10_000)) == set("*x_")


@pytest.mark.parametrize("count", [1, 16, 17, 40])
def test_many_regions_still_fit_one_screen(make_allocator, count: int) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB", max_bytes="2 MiB")
    allocator = make_allocator(device, allow_growth=True)
    for _ in range(count):
        allocator.allocate_raw(2 * MIB)
    lines = str(allocator.snapshot()).splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 120
    assert any(f"{count - 16} more" in line for line in lines) == (count > 16)


@pytest.mark.parametrize("small", [1, 16, 30])
def test_what_is_live_is_shown_where_the_largest_regions_are_free(small: int) -> None:
    """As in PyTorch's cache: large segments with nothing in them, and small ones in use."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("8 GiB"))
    large = [allocator.allocate_raw(100 * MIB) for _ in range(30)]
    kept = [allocator.allocate_raw(1000, stream=stream) for stream in range(small)]
    allocator.deallocate_many(large)
    lines = str(allocator.snapshot()).splitlines()
    rows = [line for line in lines if "|" in line]
    shown = [row for row in rows if int(row.split()[0], 16) in kept] if small <= 16 else rows
    assert sum("*" in row for row in rows) == min(small, 17)
    assert sum("*" in row for row in shown) == min(small, 17)
    assert len(lines) <= 24
    free = 30 - max(0, 16 - small)
    assert lines[-2] == f"and {free * 100 / 1024:.2f} GiB in {free} regions with nothing in use"
    if small > 16:
        (rest,) = (row for row in rows if row.split()[:2] == ["14", "more"])
        assert rest.count("*") == 14, "each of the others has its place on the line"


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=30), st.randoms(), st.integers(1, 300))
def test_a_picture_can_be_drawn_of_anything(sizes: list[int], dice, width: int) -> None:
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("4 MiB")) as allocator:
        ptrs = [allocator.allocate_raw(size) for size in sizes]
        dice.shuffle(ptrs)
        allocator.deallocate_many(ptrs[len(ptrs) // 2 :])
        snapshot = allocator.snapshot()
        assert len(snapshot.occupancy(width)) == width
        assert set(snapshot.occupancy(width)) <= set("*x_")
        assert max(map(len, str(snapshot).splitlines())) <= 120


def test_the_largest_addresses_can_be_drawn(make_allocator) -> None:
    device = bfc.SimulatedSubAllocator(2**62, base=2**63)
    allocator = make_allocator(device)
    allocator.allocate_raw(2**61)
    assert f"{2**63:#x}" in str(allocator.snapshot())
    assert allocator.snapshot().occupancy(4) == "**__"
