"""The figures that monitoring shows, against what an allocator says of itself."""

from __future__ import annotations

import pytest

import bfc
from bfc.snapshots.figures import NOBODY, OTHERS, figures, largest_owners

MIB = 1 << 20


def test_figures_follow_the_allocator() -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with bfc.BFCAllocator(device, memory_limit="32 MiB", allow_growth=True) as allocator:
        kept = allocator.allocate_raw(3 * MIB)
        allocator.deallocate_raw(allocator.allocate_raw(MIB))
        found = figures(allocator.stats())
        free = [chunk.size for chunk in allocator.snapshot().free_chunks()]
        assert found == {
            "used": allocator.allocated_size(kept),
            "reserved": sum(region.size for region in allocator.snapshot().regions),
            "peak": allocator.allocated_size(kept) + MIB,
            "limit": 32 * MIB,
            "largest_free": max(free),
        }
        assert found["reserved"] > found["used"]


def test_reserved_is_what_sleep_leaves() -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with bfc.CachingAllocator(device, settings="expandable_segments:True") as allocator:
        with allocator.tag("weights"):
            allocator.allocate_raw(20 * MIB)
        allocator.sleep(drop=["weights"])
        found = figures(allocator.stats())
        assert found["reserved"] == 0
        assert found["used"] == 20 * MIB


@pytest.mark.parametrize("most", [0, 1, 2, 3, 9])
def test_the_listed_owners_add_up(most: int) -> None:
    by_owner = {"weights": 512, "": 300, "kv cache": 4096, "maps": 256}
    listed = largest_owners(by_owner, most)
    assert sum(listed.values()) == sum(by_owner.values())
    named = [name for name in listed if name not in (NOBODY, OTHERS)]
    assert named == ["kv cache", "weights", "maps"][:most]
    assert listed[NOBODY] == 300
    assert (OTHERS in listed) == (most < 3)


def test_an_owner_may_have_the_name_of_the_rest() -> None:
    assert largest_owners({OTHERS: 7, NOBODY: 5, "": 2, "a": 1}, 2) == {OTHERS: 8, NOBODY: 7}


def test_nothing_in_use_lists_nothing() -> None:
    assert largest_owners({}, 3) == {}
