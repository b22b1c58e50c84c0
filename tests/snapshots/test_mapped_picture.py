"""The picture of expandable segments: holes, unmapped addresses, memory that does not go back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import bfc

MIB = 1 << 20
ON = "expandable_segments:True"


@pytest.fixture
def source() -> bfc.SimulatedSubAllocator:
    return bfc.SimulatedSubAllocator("1 GiB")


@pytest.fixture
def allocator(source: bfc.SimulatedSubAllocator) -> Iterator[bfc.CachingAllocator]:
    with bfc.CachingAllocator(source, settings=ON) as made:
        yield made


def with_holes(allocator: bfc.CachingAllocator, holes: tuple[int, ...]) -> list[int]:
    """The addresses of twelve chunks of 20 MiB, of which some have been unmapped."""
    addresses = [allocator.allocate_raw(20 * MIB) for _ in range(12)]
    for hole in holes:
        allocator.deallocate_raw(addresses[hole])
    allocator.release_free_regions()
    return addresses


def drawn(allocator: bfc.CachingAllocator) -> list[str]:
    return str(allocator.snapshot()).splitlines()


def test_the_runs_of_a_reservation_are_drawn_together(allocator):
    addresses = with_holes(allocator, (2, 3, 6, 7, 8))
    allocator.deallocate_raw(addresses[10])
    assert len(allocator.snapshot().regions) == 3
    # A chunk has 6 of the 72 cells.
    figures = "simulated:0  120.00 MiB in use (6 chunks), 140.00 MiB reserved, limit 1.00 GiB"
    cells = "*" * 12 + "." * 12 + "*" * 12 + "." * 18 + "*" * 6 + "_" * 6 + "*" * 6
    assert drawn(allocator) == [
        f"{figures}, 1.13 GiB of addresses reserved",
        "free 20.00 MiB in 1 chunk, the largest 20.00 MiB, fragmentation 0.0%",
        f"0x100000000000  140.00 MiB |{cells}|",
        "                          * asked for   x slack   _ free   . unmapped",
    ]


def test_a_hole_at_the_beginning_is_drawn_and_what_was_never_mapped_is_not(allocator):
    with_holes(allocator, (0, 11))
    (row,) = [line for line in drawn(allocator) if line.startswith("0x")]
    assert row.startswith("0x100000000000  200.00 MiB |......******")
    assert row.endswith("******|")
    assert row.count(".") == 1 + 6  # 1 is the size's


def test_memory_that_the_source_fails_to_take_back_has_a_sign_of_its_own(allocator, source):
    addresses = with_holes(allocator, ())
    allocator.deallocate_raw(addresses[1])
    source.fail_at(1, "unmap")
    with pytest.raises(bfc.SubAllocatorError):
        allocator.release_free_regions()
    row, legend = drawn(allocator)[-2:]
    assert row.endswith(f"|{'*' * 6}{'~' * 6}{'*' * 60}|")
    assert legend.endswith("_ free   . unmapped   ~ on its way back")
    assert allocator.snapshot().occupancy(12) == "*~**********"


def test_two_reservations_and_an_ordinary_segment_have_lines_of_their_own(allocator):
    with_holes(allocator, (5,))
    allocator.allocate_raw(1000)
    allocator.set_settings("expandable_segments:False")
    allocator.allocate_raw(50 * MIB)
    lines = drawn(allocator)
    assert lines[0].endswith("2.26 GiB of addresses reserved")
    rows = [line for line in lines if line.startswith("0x")]
    assert [line.split()[1:3] for line in rows] == [
        ["50.00", "MiB"],
        ["220.00", "MiB"],
        ["2.00", "MiB"],
    ]
    assert rows[0].count("*") == 72


def test_without_reservations_nothing_is_said_of_them():
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        allocator.allocate_raw(1000)
        first, *_, legend = drawn(allocator)
        assert first.endswith("limit 1.00 GiB")
        assert legend.endswith("_ free")


def test_many_reservations_are_one_line_beyond_sixteen(source):
    with bfc.CachingAllocator(source, settings=ON) as allocator:
        for stream in range(20):
            allocator.allocate_raw(2 * MIB, stream=2 * stream)
        lines = drawn(allocator)
        assert sum(line.startswith("0x") for line in lines) == 16
        (others,) = [line for line in lines if line.startswith("       4 more")]
        assert others.split()[2:4] == ["80.00", "MiB"]


def test_the_dict_says_where_a_run_lies(allocator):
    with_holes(allocator, (5,))
    regions = allocator.snapshot().as_dict()["regions"]
    assert [region["reserved"] for region in regions] == [[1 << 44, 1160 * MIB]] * 2
