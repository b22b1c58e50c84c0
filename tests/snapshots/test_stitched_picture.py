"""What is to be seen of memory that is stitched: views, holes, pages, and what PyTorch's viewer
gets of it. Each page is in one region, however many addresses it has."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20


@pytest.fixture
def allocator() -> Iterator[bfc.BFCAllocator]:
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), virtual_memory=True) as made:
        yield made


def with_a_view(allocator: bfc.BFCAllocator) -> tuple[list[int], int]:
    """Twelve chunks of 5 MiB end to end, of which every other one is freed, so that each leaves two
    whole pages; then one of 20 MiB, for which ten of these pages are stitched."""
    addresses = [allocator.allocate_raw(5 * MIB) for _ in range(12)]
    for address in addresses[::2]:
        allocator.deallocate_raw(address)
    return addresses, allocator.allocate_raw(20 * MIB - 512)


def assert_each_page_counts_once(snapshot: bfc.Snapshot, page_size: int = 2 * MIB) -> None:
    stats = snapshot.stats
    assert sum(region.size for region in snapshot.regions) == stats.pool_bytes
    assert sum(chunk.size for chunk in snapshot.chunks()) == stats.pool_bytes
    assert sum(chunk.size for chunk in snapshot.live_chunks()) == stats.bytes_in_use
    pages = [page for region in snapshot.regions for page in region.pages]
    assert len(set(pages)) == len(pages) == stats.pool_bytes // page_size
    for region in snapshot.regions:
        assert region.size == page_size * len(region.pages)
        assert sum(chunk.size for chunk in region.chunks) == region.size
    for left, right in pairwise(snapshot.regions):
        assert left.end <= right.ptr


def test_a_view_is_a_region_of_its_own_and_its_pages_are_nowhere_else(allocator):
    addresses, view = with_a_view(allocator)
    snapshot = allocator.snapshot()
    assert_each_page_counts_once(snapshot)
    *ranges, stitched = snapshot.regions
    assert (stitched.ptr, stitched.size, stitched.is_view) == (view, 20 * MIB, True)
    assert stitched.reserved == (view, 20 * MIB)
    (chunk,) = stitched.chunks
    assert (chunk.state, chunk.requested_size) == ("in use", 20 * MIB - 512)
    # The holes are where its pages were: page 2 is the first one that is used at home.
    assert [region.pages for region in ranges][:3] == [(2, 3, 4), (7, 8, 9), (12, 13, 14)]
    assert stitched.pages[:4] == (0, 1, 5, 6)
    assert {region.is_view for region in ranges} == {False}
    ((start, nbytes),) = {region.reserved for region in ranges}
    assert start == addresses[0]
    assert nbytes >= 64 * MIB


def test_a_view_that_is_kept_is_not_seen_and_its_pages_are_at_home_again(allocator):
    addresses, view = with_a_view(allocator)
    allocator.deallocate_raw(view)
    snapshot = allocator.snapshot()
    assert allocator.page_stats()["views"] == 1
    assert_each_page_counts_once(snapshot)
    (region,) = snapshot.regions
    assert (region.ptr, region.pages, region.is_view) == (addresses[0], tuple(range(30)), False)


def test_the_picture_has_holes_and_a_line_for_the_view(allocator):
    _, view = with_a_view(allocator)
    first, free, *rows, legend = str(allocator.snapshot()).splitlines()
    in_use, reserved, limit, addresses, pages, views = first.split(", ")
    assert in_use == "simulated:0  50.00 MiB in use (7 chunks)"
    assert (reserved, limit) == ("60.00 MiB reserved", "limit 64.00 MiB")
    assert addresses.endswith(" MiB of addresses reserved")
    assert (pages, views) == ("30 pages of 2.00 MiB", "1 view in use")
    assert free == "free 10.00 MiB in 6 chunks, the largest 5.00 MiB, fragmentation 50.0%"
    upper, lower, stitched = rows
    # Five times two pages that are used elsewhere, the rest of the third, and 5 MiB in use.
    holes, pair = "." * 9 + "_" * 3 + "*" * 12, "_" * 12 + "*" * 12
    assert upper == f"0x100000000000   40.00 MiB |{holes * 3}|"
    assert lower == f"0x100001e00000             |{holes * 2}{pair}|"
    assert stitched == f"{view:#x}   20.00 MiB |{'*' * 72}| view"
    assert legend.endswith("_ free   . unmapped, or used at other addresses")


def test_a_picture_without_views_says_nothing_of_them(allocator):
    allocator.allocate_raw(5 * MIB)
    first, *_ = str(allocator.snapshot()).splitlines()
    assert first.endswith(" of addresses reserved, 3 pages of 2.00 MiB")
    assert "view" not in str(allocator.snapshot())


def test_pages_that_were_given_back_leave_holes(allocator):
    addresses, view = with_a_view(allocator)
    allocator.deallocate_raw(view)
    assert allocator.trim() > 0
    snapshot = allocator.snapshot()
    assert_each_page_counts_once(snapshot)
    assert len(snapshot.regions) == 6
    assert all(region.ptr != view for region in snapshot.regions)
    assert "." in str(snapshot).splitlines()[2].split("|")[1]
    assert addresses[1] in {chunk.ptr for chunk in snapshot.live_chunks()}


def test_pages_that_other_streams_took_over_are_theirs():
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("16 MiB"), virtual_memory=True) as allocator:
        for stream in (1, 2, 1, 3):
            address = allocator.allocate_raw(10 * MIB, stream=stream)
            small = allocator.allocate_raw(1000, stream=stream)
            snapshot = allocator.snapshot()
            assert_each_page_counts_once(snapshot)
            assert {chunk.ptr for chunk in snapshot.live_chunks()} == {address, small}
            for region in snapshot.regions:
                if any(chunk.in_use for chunk in region.chunks):
                    assert region.stream == stream
            allocator.deallocate_raw(address)
            allocator.deallocate_raw(small)


def test_a_page_that_is_on_its_way_counts_once_too():
    """A snapshot is taken in the middle of every change of what is mapped."""
    source, snapshots = Misbehaving("64 MiB"), 0

    def watch() -> None:
        nonlocal snapshots
        snapshot = allocator.snapshot()
        assert snapshot.stats.pool_bytes == sum(region.size for region in snapshot.regions)
        pages = [page for region in snapshot.regions for page in region.pages]
        assert len(set(pages)) == len(pages)
        assert all(page < 32 for page in pages)
        assert "limit 64.00 MiB" in str(snapshot)
        snapshots += 1

    with bfc.BFCAllocator(source, virtual_memory=True) as allocator:
        for call in ("map", "unmap", "release"):
            source.on(call, first=watch, then=watch)
        addresses, view = with_a_view(allocator)
        allocator.deallocate_raw(view)
        allocator.trim()
        allocator.deallocate_many(addresses[1::2])
        allocator.trim()
        assert snapshots > 60
        source.off()


def test_what_sleeps_has_no_pages_and_gets_others():
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("64 MiB"), virtual_memory=True) as allocator:
        with allocator.tag("weights"):
            addresses = [allocator.allocate_raw(5 * MIB) for _ in range(8)]
            allocator.deallocate_many(addresses[::2])
            view = allocator.allocate_raw(12 * MIB)
        awake = allocator.allocate_raw(3 * MIB)
        allocator.sleep()
        snapshot = allocator.snapshot()
        assert {region.is_view for region in snapshot.regions if region.ptr == view} == {True}
        *asleep, other = snapshot.regions
        assert {(region.asleep, region.pages) for region in asleep} == {(True, ())}
        assert (other.ptr, other.asleep, len(other.pages)) == (awake, False, 2)
        assert "view" not in str(snapshot)
        with pytest.raises(bfc.OutOfMemoryError) as refused:
            allocator.allocate_raw(62 * MIB)
        assert refused.value.pages == (2 * MIB, 2, 2, 0)
        allocator.wake()
        snapshot = allocator.snapshot()
        assert_each_page_counts_once(snapshot)
        assert sum(region.is_view for region in snapshot.regions) == 1
        live = {chunk.ptr for chunk in snapshot.live_chunks()}
        assert live == {*addresses[1::2], view, awake}


@pytest.mark.parametrize("page_size", [2 * MIB, 8 * MIB])
def test_each_page_counts_once_at_any_time(page_size):
    dice = random.Random(page_size)
    source = bfc.SimulatedSubAllocator("160 MiB")
    live: list[int] = []
    views = 0
    with bfc.BFCAllocator(source, virtual_memory=True, page_size=page_size) as allocator:
        for _ in range(600):
            if live and dice.random() < 0.45:
                allocator.deallocate_raw(live.pop(dice.randrange(len(live))))
            else:
                nbytes = dice.choice([1000, 300_000, 3 * MIB, 7 * MIB, 20 * MIB, 33 * MIB])
                try:
                    live.append(allocator.allocate_raw(nbytes, stream=dice.randrange(3)))
                except bfc.OutOfMemoryError:
                    allocator.deallocate_raw(live.pop())
            snapshot = allocator.snapshot()
            views += sum(region.is_view for region in snapshot.regions)
            assert_each_page_counts_once(snapshot, page_size)
            assert {chunk.ptr for chunk in snapshot.live_chunks()} == set(live)
            if dice.random() < 0.05:
                allocator.trim(dice.randrange(160 * MIB))
    assert views > 100


def test_the_dict_names_views_and_pages(allocator):
    _, view = with_a_view(allocator)
    plain = json.loads(json.dumps(allocator.snapshot().as_dict()))
    *_, last = plain["regions"]
    assert (last["ptr"], last["is_view"], last["pages"][:4]) == (view, True, [0, 1, 5, 6])
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB")) as other:
        other.allocate_raw(1000)
        (region,) = other.snapshot().as_dict()["regions"]
    assert (region["pages"], region["is_view"], region["reserved"]) == ([], False, None)


def test_in_the_occupancy_a_view_is_used_and_its_pages_are_left_out_elsewhere(allocator):
    with_a_view(allocator)
    line = allocator.snapshot().occupancy(60)
    assert line == ("_" + "*" * 5) * 5 + "_" * 5 + "*" * 5 + "*" * 20


def test_pytorchs_viewer_gets_views_as_expandable_segments(allocator, tmp_path):
    _, view = with_a_view(allocator)
    path = tmp_path / "memory.pickle"
    allocator.snapshot().dump(path)
    read = pickle.loads(path.read_bytes())
    assert read == allocator.snapshot().to_torch()
    segments = read["segments"]
    assert {segment["is_expandable"] for segment in segments} == {True}
    assert sum(segment["total_size"] for segment in segments) == 60 * MIB
    assert sum(segment["active_size"] for segment in segments) == 50 * MIB
    for segment in segments:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
    (stitched,) = [segment for segment in segments if segment["address"] == view]
    assert [block["state"] for block in stitched["blocks"]] == ["active_allocated"]
    assert (stitched["total_size"], stitched["requested_size"]) == (20 * MIB, 20 * MIB - 512)


def test_what_was_dumped_is_read_as_a_trace(allocator, tmp_path):
    with_a_view(allocator)
    allocator.allocate_raw(1000)
    allocator.snapshot().dump(tmp_path / "memory.pickle")
    trace = bfc.Trace.from_torch(tmp_path / "memory.pickle")
    with bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True) as again:
        assert trace.replay(again).failed == 0
        live = again.snapshot().live_chunks()
    sizes = sorted(chunk.requested_size for chunk in live)
    assert sizes == [1000, *[5 * MIB] * 6, 20 * MIB - 512]
