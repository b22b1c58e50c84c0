"""The table of docs/behaviour/index.md: what the allocators do that people do not expect.

Each row with figures in bold is run on ours, in strict mode, and gives these figures.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import bfc
from bfc.snapshots.snapshot import bin_index

TABLE = Path(__file__).parents[2] / "docs" / "behaviour" / "index.md"
BASE, SIDE = 1 << 40, 2
MIB, GIB = 1 << 20, 1 << 30
Figures = list[int]

FOUND: dict[str, Callable[[], Figures]] = {}


def rows() -> dict[str, Figures]:
    """The figures in bold of each row that has some."""
    table = {}
    for row in re.findall(
        r"^\| ([TP]\d+) \| .*? \| (.*) \| .*? \|$", TABLE.read_text(), re.MULTILINE
    ):
        bold = ", ".join(re.findall(r"\*\*(.*?)\*\*", row[1]))
        table[row[0]] = [int(figure) for figure in bold.split(", ") if figure]
    return {number: figures for number, figures in table.items() if figures}


def row(number: str) -> Callable[[Callable[[], Figures]], Callable[[], Figures]]:
    def note(find: Callable[[], Figures]) -> Callable[[], Figures]:
        FOUND[number] = find
        return find

    return note


@pytest.mark.parametrize("number", rows())
def test_the_figures_of_a_row_are_found(number: str) -> None:
    assert FOUND[number]() == rows()[number]


def test_each_row_is_numbered_once_and_nothing_is_run_for_none() -> None:
    numbers = re.findall(r"^\| ([TP]\d+) \|", TABLE.read_text(), re.MULTILINE)
    assert len(numbers) == len(set(numbers)) > 30
    assert set(FOUND) == set(rows())


# -- TensorFlow -----------------------------------------------------------------------------------


def pool(
    limit: int, capacity: int = 1 << 50, collects: bool = True, growth: bool = False, **device: Any
) -> bfc.BFCAllocator:
    return bfc.BFCAllocator(
        bfc.SimulatedSubAllocator(capacity, alignment=256, **device),
        memory_limit=limit,
        allow_growth=growth,
        garbage_collection=collects,
        strict=True,
    )


def growing(limit: int = GIB, **options: Any) -> bfc.BFCAllocator:
    return pool(limit, growth=True, **options)


def refuses(allocator: bfc.BFCAllocator | bfc.CachingAllocator, nbytes: int) -> bool:
    try:
        allocator.allocate_raw(nbytes)
    except bfc.OutOfMemoryError:
        return True
    return False


def calls(allocator: bfc.BFCAllocator | bfc.CachingAllocator, kind: str) -> Figures:
    return [nbytes for name, nbytes, _ in allocator.sub_allocator.calls if name == kind]


def sizes(allocator: bfc.BFCAllocator | bfc.CachingAllocator) -> Figures:
    return [region.size for region in allocator.snapshot().regions]


@row("T1")
def attempts_of_two_backpedals() -> Figures:
    allocator = growing(max_bytes=10 * MIB)
    assert refuses(allocator, 100 * MIB)
    first = len(calls(allocator, "alloc"))
    allocator.allocate_raw(MIB)
    return [first, len(calls(allocator, "alloc")) - first]


@row("T2")
def mebibytes_of_a_first_region() -> Figures:
    allocator = growing()
    allocator.allocate_raw(1)
    return [size // MIB for size in sizes(allocator)]


@row("T3")
def mebibytes_of_regions() -> Figures:
    allocator = growing(gap=4096)
    for _ in range(8):
        allocator.allocate_raw(4 * MIB)
    return [size // MIB for size in sizes(allocator)]


@row("T4")
def attempts_that_jump_over_the_request() -> Figures:
    allocator = growing(max_bytes=2 * MIB)
    allocator.allocate_raw(2 * MIB)
    assert refuses(allocator, 2 * MIB)
    return calls(allocator, "alloc")[1:]


@row("T5")
def an_attempt_in_single_precision() -> Figures:
    allocator = pool(2 * GIB, capacity=2 * 10**9)
    allocator.allocate_raw(256)
    return calls(allocator, "alloc")[1:]


@row("T6")
def bytes_before_and_after_a_first_request() -> Figures:
    allocator = pool(GIB)
    before = allocator.stats().pool_bytes
    allocator.allocate_raw(1)
    return [before, allocator.stats().pool_bytes]


@row("T7")
def bins_around_256_mebibytes() -> Figures:
    return [bin_index(256 * MIB), bin_index(256 * MIB - 1)]


@row("T8")
def mebibytes_of_the_best_fit() -> Figures:
    allocator = pool(2 * GIB)
    blocks = [allocator.allocate_raw(size) for size in (600 * MIB, 256, 300 * MIB, 256)]
    for block in blocks[::2]:
        allocator.deallocate_raw(block)
    return [allocator.allocated_size(allocator.allocate_raw(257 * MIB)) // MIB]


@row("T9")
def mebibytes_of_a_chunk_that_is_not_split() -> Figures:
    allocator = growing()
    return [allocator.allocated_size(allocator.allocate_raw(5 * MIB)) // MIB]


@row("T10")
def bytes_of_a_region_under_an_odd_limit() -> Figures:
    allocator = pool(1000)
    allocator.allocate_raw(100)
    return sizes(allocator)


@row("T11")
def offset_of_an_aligned_request() -> Figures:
    allocator = growing(MIB)
    allocator.allocate_raw(256)
    return [allocator.allocate_raw(256, alignment=4096) - BASE]


@row("T12")
def mebibytes_collected() -> Figures:
    allocator = growing(16 * MIB, gap=4096)
    blocks = [allocator.allocate_raw(size * MIB) for size in (2, 4, 8, 2)]
    for block in (blocks[0], blocks[1], blocks[3]):
        allocator.deallocate_raw(block)
    allocator.allocate_raw(5 * MIB)
    return [size // MIB for size in calls(allocator, "free")]


@row("T13")
def mebibytes_refused_though_free() -> Figures:
    allocator = growing(8 * MIB, collects=False)
    blocks = [allocator.allocate_raw(size * MIB) for size in (2, 4, 2)]
    for block in blocks:
        allocator.deallocate_raw(block)
    free = allocator.stats().pool_bytes - allocator.stats().bytes_in_use
    return [free // MIB] if refuses(allocator, free) else []


# -- PyTorch --------------------------------------------------------------------------------------


def caching(mebibytes: int = 1024, settings: str = "", **options: Any) -> bfc.CachingAllocator:
    device = bfc.SimulatedSubAllocator(mebibytes * MIB)
    return bfc.CachingAllocator(device, settings=settings, strict=True, **options)


def cache(allocator: bfc.CachingAllocator, *nbytes: int) -> None:
    """Leave blocks of these sizes free."""
    for block in [allocator.allocate_raw(size) for size in nbytes]:
        allocator.deallocate_raw(block)


def current(allocator: bfc.CachingAllocator, group: str) -> int:
    return allocator.memory_stats()[f"{group}.all.current"]


def rounded(divisions: str, nbytes: int) -> int:
    settings = bfc.CachingSettings().apply(f"roundup_power2_divisions:{divisions}", strict=True)
    allocator = caching(settings=f"roundup_power2_divisions:{divisions}")
    block = allocator.allocate_raw(nbytes)
    chunks = {chunk.ptr: chunk.size for chunk in allocator.snapshot().chunks()}
    assert chunks[block] == settings.round_size(nbytes)
    return chunks[block]


@row("P1")
def bytes_by_four_divisions() -> Figures:
    return [rounded("4", 1200)]


@row("P2")
def bytes_by_one_division() -> Figures:
    return [rounded("1", 5 * MIB + 1)]


@row("P3")
def mebibytes_of_pieces_and_of_segments() -> Figures:
    split, kept = caching(), caching(settings="max_split_size_mb:200")
    for allocator in (split, kept):
        cache(allocator, 300 * MIB)
        allocator.allocate_raw(100 * MIB)
    pieces = [chunk.size // MIB for chunk in split.snapshot().chunks()]
    return pieces + [size // MIB for size in sizes(kept)]


@row("P4")
def mebibytes_reserved_without_and_with_a_fraction() -> Figures:
    found = []
    for fraction in ("", ",per_process_memory_fraction:0.99"):
        allocator = caching(400, f"garbage_collection_threshold:0.15{fraction}")
        cache(allocator, 40 * MIB, 40 * MIB)
        allocator.allocate_raw(80 * MIB)
        found.append(current(allocator, "reserved_bytes") // MIB)
    return found


@row("P5")
def mebibytes_collected_for_twenty() -> Figures:
    allocator = caching(400, "garbage_collection_threshold:0.5", memory_limit=120 * MIB)
    cache(allocator, 40 * MIB, 40 * MIB)
    allocator.allocate_raw(80 * MIB)
    return [size // MIB for size in calls(allocator, "free")]


@row("P6")
def blocks_that_wait() -> Figures:
    device = bfc.SimulatedSubAllocator(GIB)
    allocator = bfc.CachingAllocator(device, strict=True)
    block = allocator.allocate_raw(4 * MIB)
    device.hold(SIDE)
    allocator.record_stream(block, SIDE)
    allocator.deallocate_raw(block)
    device.finish(SIDE)
    found = [current(allocator, "active") - current(allocator, "allocation")]
    other = allocator.allocate_raw(1)
    found.append(current(allocator, "active") - current(allocator, "allocation"))
    allocator.deallocate_raw(other)
    return found


@row("P7")
def bytes_of_max_split_before_another_text() -> Figures:
    settings = bfc.CachingSettings().apply("max_split_size_mb:40", strict=True)
    assert settings.apply("expandable_segments:False", strict=True).max_split_size is None
    return [settings.max_split_size or 0]


@row("P8")
def a_split_size_refused_and_one_accepted() -> Figures:
    with pytest.raises(bfc.SettingsError):
        bfc.CachingSettings().apply("max_split_size_mb:19", strict=True)
    accepted = bfc.CachingSettings().apply("max_split_size_mb:20", strict=True).max_split_size
    assert accepted
    return [accepted // MIB - 1, accepted // MIB]


@row("P9")
def mebibytes_of_minus_one() -> Figures:
    size = bfc.CachingSettings().apply("max_split_size_mb:-1", strict=True).max_split_size
    assert size
    return [size // MIB]


@row("P10")
def bytes_in_the_gap_of_a_list() -> Figures:
    return [rounded("[64:8,256:4]", 150 * MIB + 1)]


@row("P11")
def bytes_of_the_segment_that_is_refused() -> Figures:
    allocator = caching(16)
    assert refuses(allocator, 4 * MIB)
    return sorted(set(calls(allocator, "alloc")))


@row("P12")
def bytes_counted_for_eleven_mebibytes() -> Figures:
    allocator = caching()
    allocator.allocate_raw(11 * MIB)
    return [current(allocator, "allocated_bytes")]


@row("P13")
def bytes_that_one_block_keeps() -> Figures:
    allocator = caching()
    allocator.allocate_raw(512)
    cache(allocator, MIB, 30 * MIB)
    allocator.release_free_regions()
    return [current(allocator, "reserved_bytes")]


@row("P14")
def refusals_of_two_like_requests() -> Figures:
    device = bfc.SimulatedSubAllocator(20 * MIB)
    allocator = bfc.CachingAllocator(device, strict=True)
    allocator.allocate_raw(9 * MIB)
    waiting = allocator.allocate_raw(9 * MIB)
    device.hold(SIDE)
    allocator.record_stream(waiting, SIDE)
    allocator.deallocate_raw(waiting)
    return [sum(refuses(allocator, 8 * MIB) for _ in range(2))]


@row("P15")
def segments_for_two_requests_in_turn() -> Figures:
    allocator = caching(settings="max_split_size_mb:20")
    for _ in range(2):
        cache(allocator, 4 * MIB)
    return [current(allocator, "segment")]


@row("P21")
def what_splits_leave() -> Figures:
    small = caching()
    for nbytes in (*[MIB // 2] * 3, MIB // 2 - 512):
        small.allocate_raw(nbytes)
    found = [small.stats().largest_free_block_bytes]
    for nbytes in (11 * MIB, 11 * MIB - 512):
        large = caching()
        large.allocate_raw(nbytes)
        found.append(current(large, "allocated_bytes"))
    return found
