"""The corner cases of TensorFlow's behaviour, CC-01 to CC-56, by number.

Offsets are from 2**40, where the simulated device starts. `strict` is on unless the case is one
where TensorFlow hangs, aborts or corrupts itself. TensorFlow's handles are not public: what their
reuse implies is tested through the layout.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable

import pytest

import bfc
from bfc.snapshots.snapshot import bin_index
from bfc.testing import Misbehaving

BASE = 1 << 40
KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
ENOUGH = 1 << 50
#: Seconds that a test waits to the end, and seconds that it fails if it waits to the end.
WAIT, AGES = 0.3, 60.0


def device(capacity: int = ENOUGH, **options) -> bfc.SimulatedSubAllocator:
    return bfc.SimulatedSubAllocator(capacity, alignment=256, **options)


def pool(limit: int, source: bfc.SubAllocator | None = None, **options) -> bfc.BFCAllocator:
    """A strict allocator of fixed size without garbage collection, unless told otherwise."""
    options = {"strict": True, "garbage_collection": False} | options
    return bfc.BFCAllocator(source or device(), memory_limit=limit, **options)


def growing(limit: int, source: bfc.SubAllocator | None = None, **options) -> bfc.BFCAllocator:
    return pool(limit, source, allow_growth=True, **options)


def take(allocator: bfc.BFCAllocator, *sizes: int) -> list[int]:
    return [allocator.allocate_raw(size) for size in sizes]


def offset(allocator: bfc.BFCAllocator, size: int, **options) -> int:
    return allocator.allocate_raw(size, **options) - BASE


def release(allocator: bfc.BFCAllocator, *ptrs: int) -> None:
    for ptr in ptrs:
        allocator.deallocate_raw(ptr)


def refused(allocator: bfc.BFCAllocator, size: int, **options) -> bool:
    try:
        allocator.allocate_raw(size, **options)
    except bfc.OutOfMemoryError:
        return True
    return False


def asked(allocator: bfc.BFCAllocator) -> list[int]:
    return [nbytes for kind, nbytes, _ in allocator.sub_allocator.calls if kind == "alloc"]


def regions(allocator: bfc.BFCAllocator) -> list[int]:
    return [region.size for region in allocator.snapshot().regions]


def layout(allocator: bfc.BFCAllocator) -> list[tuple[int, int, bool]]:
    """(offset, size, in use) of every chunk, in address order."""
    return [(chunk.ptr - BASE, chunk.size, chunk.in_use) for chunk in allocator.snapshot().chunks()]


def stamps(allocator: bfc.BFCAllocator) -> list[tuple[int, int, int]]:
    """(offset, size, timestamp) of every chunk, in address order."""
    return [(c.ptr - BASE, c.size, c.freed_at_count) for c in allocator.snapshot().chunks()]


def backpedalled(first: int, last: int) -> list[int]:
    """TensorFlow's attempts from one size down to another, in exact decimals (below 16 MiB the same
    as in floats)."""
    sizes = [first]
    while sizes[-1] > last:
        smaller = -(-(sizes[-1] * 9 // 10) // 256) * 256
        sizes.append(smaller if smaller < sizes[-1] else sizes[-1] - 256)
    return sizes


# -- sizes, splits, bins --------------------------------------------------------------------------


def test_cc_01_zero_bytes_are_address_zero_and_count_nothing():
    allocator = pool(1024)
    assert allocator.allocate_raw(0) == 0
    assert allocator.stats().num_allocs == 0
    assert allocator.stats().pool_bytes == 0
    assert asked(allocator) == []
    assert allocator.allocation_id(allocator.allocate_raw(1)) == 1


def test_cc_02_the_first_byte_takes_two_mebibytes():
    allocator = growing(GIB)
    ptr = allocator.allocate_raw(1)
    assert ptr == BASE
    assert asked(allocator) == [2097152]
    assert allocator.requested_size(ptr) == 1
    assert allocator.allocated_size(ptr) == 256
    assert allocator.allocation_id(ptr) == 1
    assert layout(allocator) == [(0, 256, True), (256, 2096896, False)]
    assert [chunk.bin_num for chunk in allocator.snapshot().free_chunks()] == [12]
    assert allocator.stats().pool_bytes == 2 * MIB
    assert allocator.next_region_size == 4 * MIB


def test_cc_03_a_byte_more_than_256_takes_512():
    allocator = growing(GIB)
    allocator.allocate_raw(1)
    ptr = allocator.allocate_raw(257)
    assert ptr == BASE + 256
    assert allocator.allocated_size(ptr) == 512
    assert allocator.stats().largest_alloc_size == 512


def test_cc_04_a_chunk_of_exactly_twice_the_request_is_split():
    allocator = pool(1024)
    allocator.allocate_raw(512)
    assert layout(allocator) == [(0, 512, True), (512, 512, False)]


def test_cc_05_a_chunk_of_less_than_twice_the_request_is_not_split():
    allocator = pool(1024)
    ptr = allocator.allocate_raw(513)
    assert allocator.allocated_size(ptr) == 1024
    assert allocator.requested_size(ptr) == 513


def test_cc_06_a_slack_of_exactly_128_mebibytes_is_split_off():
    allocator = pool(428 * MIB)
    assert allocator.allocated_size(allocator.allocate_raw(300 * MIB)) == 314572800


def test_cc_07_a_slack_below_128_mebibytes_is_kept():
    allocator = pool(428 * MIB - 256)
    assert allocator.allocated_size(allocator.allocate_raw(300 * MIB)) == 448790272


@pytest.mark.parametrize(
    ("size", "allocated"), [(1020054528, 1020054528), (1020054784, 1073741824)]
)
def test_cc_08_the_slack_cap_is_a_fraction_of_the_limit(size, allocated):
    allocator = pool(GIB, fragmentation_fraction=0.05)
    assert allocator.allocated_size(allocator.allocate_raw(size)) == allocated


def test_cc_09_within_the_last_bin_the_smaller_chunk_wins():
    allocator = pool(2 * GIB)
    a, _, b, _ = take(allocator, 600 * MIB, 256, 300 * MIB, 256)
    release(allocator, a, b)
    ptr = allocator.allocate_raw(257 * MIB)
    assert ptr == b
    assert allocator.allocated_size(ptr) == 300 * MIB


def test_cc_10_best_fit_takes_the_smallest_chunk_then_the_lowest_address():
    allocator = pool(MIB)
    ptrs = take(allocator, 1024, 256, 768, 256, 1024, 256, 768, 256)
    release(allocator, ptrs[0], ptrs[2], ptrs[4], ptrs[6])
    assert take(allocator, 700, 700, 700) == [ptrs[2], ptrs[6], ptrs[0]]
    assert allocator.allocated_size(ptrs[0]) == 1024


def test_cc_11_bins_are_powers_of_two_from_256():
    sizes = [0, 232, 255, 256, 511, 512, 2 * MIB - 256, 256 * MIB - 256, 256 * MIB, 1 << 40]
    assert [bin_index(size) for size in sizes] == [0, 0, 0, 0, 0, 1, 12, 19, 20, 20]


# -- growth and limits ----------------------------------------------------------------------------


def test_cc_12_a_request_that_grew_the_region_size_does_not_double_it_again():
    allocator = growing(GIB)
    assert allocator.allocated_size(allocator.allocate_raw(5 * MIB)) == 8 * MIB
    assert regions(allocator) == [8 * MIB]
    assert allocator.next_region_size == 8 * MIB
    allocator.allocate_raw(256)
    assert regions(allocator) == [8 * MIB, 8 * MIB]
    assert allocator.next_region_size == 16 * MIB


def test_cc_13_a_failed_growth_keeps_the_larger_region_size():
    allocator = growing(GIB, device(max_bytes=10 * MIB))
    assert refused(allocator, 100 * MIB)
    assert asked(allocator) == [134217728, 120796160, 108716544]
    assert allocator.next_region_size == 128 * MIB
    allocator.allocate_raw(MIB)
    second = asked(allocator)[3:]
    assert (len(second), second[0], second[-1]) == (26, 134217728, 9636352)
    assert allocator.next_region_size == 256 * MIB


def test_cc_14_backpedalling_is_done_in_single_precision():
    allocator = pool(2 * GIB, device(10**9))
    allocator.allocate_raw(256)
    assert asked(allocator) == [
        2147483648, 1932735232, 1739461632, 1565515520, 1408964096,
        1268067840, 1141261056, 1027134976, 924421632,
    ]  # fmt: skip
    assert allocator.stats().pool_bytes == 924421632
    assert allocator.next_region_size == 4 * GIB


def test_cc_15_the_size_of_the_request_itself_is_not_tried():
    allocator = growing(GIB, device(max_bytes=2 * MIB))
    allocator.allocate_raw(2 * MIB)
    assert refused(allocator, 2 * MIB)
    assert asked(allocator)[1:] == [4194304, 3774976, 3397632, 3057920, 2752256, 2477056, 2229504]


def test_cc_15_the_size_of_the_request_itself_is_tried_last_where_not_strict():
    allocator = growing(GIB, device(max_bytes=2 * MIB), strict=False)
    assert take(allocator, 2 * MIB, 2 * MIB) == [BASE, BASE + 2 * MIB]
    assert asked(allocator)[-2:] == [2229504, 2097152]


def test_cc_16_small_requests_double_the_regions():
    allocator = growing(2 * GIB)
    take(allocator, *[MIB] * 40)
    assert regions(allocator) == [size * MIB for size in (2, 4, 8, 16, 32)]
    assert allocator.next_region_size == 64 * MIB


def test_cc_17_doubling_regions_fill_the_limit_exactly():
    allocator = growing(512 * MIB, device(gap=4096))
    take(allocator, *[4 * MIB] * 128)
    assert regions(allocator) == [size * MIB for size in (4, 4, 8, 16, 32, 64, 128, 256)]
    assert allocator.stats().pool_bytes == 512 * MIB
    assert allocator.next_region_size == 512 * MIB


def test_cc_18_the_last_region_is_what_the_limit_leaves():
    allocator = growing(3 * MIB, device(gap=4096))
    assert [offset(allocator, MIB) for _ in range(3)] == [0, MIB, 2 * MIB + 4096]
    assert refused(allocator, MIB)
    assert regions(allocator) == [2 * MIB, MIB]
    assert allocator.next_region_size == 8 * MIB


def test_cc_19_a_limit_is_rounded_down_to_256():
    allocator = pool(1000)
    assert offset(allocator, 100) == 0
    assert asked(allocator) == [768]
    assert layout(allocator) == [(0, 256, True), (256, 512, False)]
    assert allocator.next_region_size == 2048
    assert refused(allocator, 800)


@pytest.mark.parametrize("make", [pool, growing])
def test_cc_20_a_limit_below_256_holds_nothing(make):
    allocator = make(100)
    assert refused(allocator, 1)
    assert allocator.next_region_size == 256
    assert asked(allocator) == []


def test_cc_21_construction_takes_nothing():
    allocator = pool(GIB)
    assert asked(allocator) == []
    assert allocator.stats().pool_bytes == 0


# -- free, coalesce, regions ----------------------------------------------------------------------


def test_cc_22_a_free_merges_with_both_neighbours():
    allocator = pool(MIB)
    ptrs = take(allocator, 256, 256, 256, 256)
    release(allocator, ptrs[0], ptrs[2])
    assert allocator.snapshot().bins[0].total_chunks_in_bin == 4
    assert allocator.snapshot().bins[0].total_chunks_in_use == 2
    release(allocator, ptrs[1])
    assert layout(allocator)[0] == (0, 768, False)
    assert [chunk.bin_num for chunk in allocator.snapshot().free_chunks()] == [1, 11]


def test_cc_23_the_merged_chunk_is_cut_from_its_start():
    # That the number of records stays at 5 cannot be seen from outside; check() counts the records.
    allocator = pool(MIB)
    ptrs = take(allocator, 256, 256, 256, 256)
    release(allocator, ptrs[0], ptrs[2], ptrs[1])
    ptr = allocator.allocate_raw(256)
    assert ptr == BASE
    assert allocator.allocation_id(ptr) == 5
    assert layout(allocator)[:3] == [(0, 256, True), (256, 512, False), (768, 256, True)]
    allocator.check()


def test_cc_24_adjoining_regions_stay_apart_without_coalescing():
    allocator = growing(8 * MIB)
    release(allocator, *take(allocator, 2 * MIB, 4 * MIB, 2 * MIB))
    assert layout(allocator) == [
        (0, 2 * MIB, False),
        (2 * MIB, 4 * MIB, False),
        (6 * MIB, 2 * MIB, False),
    ]
    assert len(regions(allocator)) == 3
    assert refused(allocator, 8 * MIB)


def test_cc_25_adjoining_regions_become_one_with_coalescing():
    allocator = growing(GIB, device(supports_coalescing=True))
    allocator.allocate_raw(256)
    ptr = allocator.allocate_raw(3 * MIB)
    assert ptr == BASE + 256
    assert regions(allocator) == [6 * MIB]
    assert allocator.allocated_size(ptr) == 6291200


@pytest.mark.parametrize("coalescing", [True, False])
def test_cc_26_coalescing_regions_hold_what_separate_ones_cannot(coalescing):
    allocator = growing(512 * MIB, device(supports_coalescing=coalescing), garbage_collection=True)
    ptrs = take(allocator, *[4 * MIB] * 128)
    release(allocator, *ptrs[:-1])
    if coalescing:
        assert offset(allocator, 508 * MIB) == 0
    else:
        assert refused(allocator, 508 * MIB)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_cc_27_neighbours_merge_in_whatever_order_they_are_freed(order):
    allocator = pool(MIB)
    _, *middle, _ = take(allocator, 256, 256, 512, 768, 256)
    release(allocator, *(middle[index] for index in order))
    assert layout(allocator)[:3] == [(0, 256, True), (256, 1536, False), (1792, 256, True)]


def test_cc_28_freeing_nothing_changes_nothing():
    allocator = pool(MIB)
    allocator.allocate_raw(256)
    before = (allocator.stats(), layout(allocator))
    allocator.deallocate_raw(0)
    assert (allocator.stats(), layout(allocator)) == before


def test_cc_28_freeing_nothing_wakes_a_waiting_thread():
    allocator = pool(1024, retry_seconds=AGES)
    ptr = allocator.allocate_raw(1024)
    with Waiter(allocator, 256) as waiter:
        waiter.until_attempts(1)
        allocator.deallocate_raw(0)
        waiter.until_attempts(2)
        allocator.deallocate_raw(ptr)
    assert waiter.ptr == BASE


def test_cc_29_a_second_free_of_an_isolated_chunk_raises():
    allocator = pool(MIB)
    ptr, _ = take(allocator, 256, 256)
    release(allocator, ptr)
    check_invalid(allocator, ptr)


def test_cc_29_a_second_free_of_a_chunk_merged_left_raises():
    allocator = pool(MIB)
    left, ptr, _ = take(allocator, 256, 256, 256)
    release(allocator, left, ptr)
    check_invalid(allocator, ptr)


def test_cc_29_a_second_free_of_a_chunk_that_absorbed_its_right_neighbour_raises():
    allocator = pool(MIB)
    ptr, right, _ = take(allocator, 256, 256, 256)
    release(allocator, right, ptr)
    check_invalid(allocator, ptr)


@pytest.mark.parametrize("inside", [1, 100, 255, 256, MIB, -1, -256])
def test_cc_30_a_pointer_into_or_past_a_chunk_raises(inside):
    allocator = pool(MIB)
    ptr = allocator.allocate_raw(1024)
    check_invalid(allocator, ptr + inside)
    assert allocator.requested_size(ptr) == 1024


def test_cc_30_a_pointer_before_the_first_region_exists_raises():
    check_invalid(pool(MIB), BASE)


def test_cc_30_a_pointer_into_the_gap_between_regions_raises():
    allocator = growing(64 * MIB, device(gap=4096))
    take(allocator, 2 * MIB, 2 * MIB)
    check_invalid(allocator, BASE + 2 * MIB + 256)


def check_invalid(allocator: bfc.BFCAllocator, ptr: int) -> None:
    before = (allocator.stats(), layout(allocator))
    with pytest.raises(bfc.InvalidPointerError):
        allocator.deallocate_raw(ptr)
    allocator.check()
    assert (allocator.stats(), layout(allocator)) == before


def test_cc_31_the_sizes_of_a_freed_pointer_raise():
    # TensorFlow answers with a stale request, the merged size and id -1; the snapshot shows the
    # last two here.
    allocator = pool(1024)
    ptr = allocator.allocate_raw(100)
    release(allocator, ptr)
    for ask in (allocator.requested_size, allocator.allocated_size, allocator.allocation_id):
        with pytest.raises(bfc.InvalidPointerError):
            ask(ptr)
    (chunk,) = allocator.snapshot().chunks()
    assert (chunk.ptr, chunk.size, chunk.allocation_id) == (ptr, 1024, -1)


# -- alignment, sub-allocator quirks --------------------------------------------------------------


def test_cc_32_blocks_are_aligned_to_256_and_no_more():
    # A request carries no alignment here: the row's TensorFlow 2.21 half.
    allocator = growing(MIB)
    assert [offset(allocator, size) for size in (256, 256, 256, 1024)] == [0, 256, 512, 768]


def test_cc_33_an_address_that_is_aligned_to_256_alone_serves_a_whole_pool():
    allocator = pool(4096, device(base=BASE + 256))
    assert offset(allocator, 4096) == 256
    assert allocator.stats().pool_bytes == 4096


def test_cc_34_no_prefix_is_cut_off_a_region():
    allocator = pool(MIB, device(base=BASE + 256))
    assert offset(allocator, 4096) == 256
    assert layout(allocator) == [(256, 4096, True), (4352, MIB - 4096, False)]


def padded(extra: int) -> Misbehaving:
    """Hands out `extra` bytes more than it was asked for, fewer where that is negative."""
    source = Misbehaving(bfc.SimulatedSubAllocator(ENOUGH, alignment=256))
    source.on("alloc", instead=lambda ask, alignment, nbytes: ask(alignment, nbytes + extra))
    return source


def test_cc_35_a_pool_past_its_limit_does_not_grow():
    allocator = growing(MIB, padded(MIB))
    allocator.allocate_raw(256)
    assert allocator.stats().pool_bytes == 2 * MIB
    assert refused(allocator, 4 * MIB)
    assert refused(allocator, 64 * MIB)
    assert asked(allocator) == [2 * MIB]
    assert offset(allocator, MIB) == 256


def test_cc_36_a_region_that_is_no_multiple_of_256_ends_in_an_odd_chunk():
    allocator = pool(1024, padded(-24))
    ptrs = take(allocator, 256, 256, 256)
    assert [allocator.allocated_size(ptr) for ptr in ptrs] == [256, 256, 488]
    assert refused(allocator, 256)
    allocator.check()


# -- garbage collection ---------------------------------------------------------------------------


@pytest.mark.parametrize("collecting", [False, True])
def test_cc_37a_free_regions_make_room_for_a_larger_one(collecting):
    allocator = growing(8 * MIB, device(gap=4096), garbage_collection=collecting)
    two, four, _ = take(allocator, 2 * MIB, 4 * MIB, 2 * MIB)
    release(allocator, two, four)
    assert allocator.next_region_size == 16 * MIB
    if not collecting:
        assert refused(allocator, 6 * MIB)
        return
    allocator.allocate_raw(6 * MIB)
    calls = allocator.sub_allocator.calls
    assert [call for call in calls if call[0] == "free"] == [
        ("free", 2 * MIB, two),
        ("free", 4 * MIB, four),
    ]
    assert regions(allocator) == [2 * MIB, 6 * MIB]
    assert allocator.stats().pool_bytes == allocator.stats().peak_pool_bytes == 8 * MIB
    assert allocator.next_region_size == 32 * MIB


def test_cc_37b_every_free_region_is_given_back_not_just_enough():
    allocator = growing(16 * MIB, device(gap=4096), garbage_collection=True)
    a, b, _, d = take(allocator, 2 * MIB, 4 * MIB, 8 * MIB, 2 * MIB)
    release(allocator, a, b, d)
    allocator.allocate_raw(5 * MIB)
    assert regions(allocator) == [8 * MIB, 8 * MIB]
    assert allocator.stats().pool_bytes == 16 * MIB


def test_cc_37c_nothing_is_given_back_where_it_would_not_be_enough():
    allocator = growing(8 * MIB, device(gap=4096), garbage_collection=True)
    _, four, _ = take(allocator, 2 * MIB, 4 * MIB, 2 * MIB)
    release(allocator, four)
    assert refused(allocator, 6 * MIB)
    assert regions(allocator) == [2 * MIB, 4 * MIB, 2 * MIB]


# -- arithmetic hazards ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [2**64 - 1, 2**64 - 255, 2**64 - 256, 2**64, 2**63, 2**63 - 1, 2**63 - 256]
)
def test_cc_38_a_size_that_rounds_past_the_end_raises(size):
    allocator = pool(MIB)
    first = allocator.allocate_raw(256)
    with pytest.raises((MemoryError, ValueError)):
        allocator.allocate_raw(size)
    assert allocator.allocate_raw(256) != first
    allocator.check()


def test_cc_39_the_slack_cap_is_at_least_256():
    allocator = pool(MIB, fragmentation_fraction=1e-7)
    assert allocator.allocated_size(allocator.allocate_raw(MIB)) == MIB
    allocator.check()


def test_cc_39_an_exact_fit_inside_a_region_is_not_split():
    allocator = pool(MIB, fragmentation_fraction=1e-7)
    _, ptr, neighbour = take(allocator, 256, 512, 256)
    release(allocator, ptr)
    assert allocator.allocate_raw(512) == ptr
    assert allocator.allocated_size(ptr) == 512
    assert allocator.allocated_size(neighbour) == 256
    allocator.check()


def test_cc_40_backpedalling_ends_where_every_attempt_fails():
    allocator = pool(2048, device(0))
    assert refused(allocator, 100)
    assert asked(allocator) == [2048, 1792, 1536, 1280, 1024, 768, 512, 256]


@pytest.mark.parametrize(("size", "last"), [(2305, 2560), (2000, 2048)])
def test_cc_41_backpedalling_from_two_mebibytes_ends_above_the_request(size, last):
    allocator = growing(GIB, device(0))
    assert refused(allocator, size)
    assert asked(allocator) == backpedalled(2 * MIB, last)
    assert asked(allocator).index(2560) == 69
    assert asked(allocator)[66:70] == [3328, 3072, 2816, 2560]


def test_cc_42_the_region_size_never_wraps():
    allocator = growing(GIB, device(max_bytes=2 * MIB))
    take(allocator, *[MIB] * 44)  # the first region holds two
    assert len(regions(allocator)) == 43
    assert len(asked(allocator)) == 2294
    while not refused(allocator, MIB):
        pass
    assert len(regions(allocator)) > 500
    assert allocator.stats().pool_bytes > GIB - MIB
    assert allocator.next_region_size >= GIB


# -- timestamps -----------------------------------------------------------------------------------


def counted(limit: int, *sizes: int) -> tuple[bfc.BFCAllocator, list[int]]:
    """A pool with a timing counter, and the addresses of these sizes."""
    allocator = pool(limit)
    allocator.set_timing_counter(bfc.SharedCounter())
    return allocator, take(allocator, *sizes)


def with_x_freed_thrice() -> bfc.BFCAllocator:
    """The state after CC-44."""
    allocator, (x, y, _z) = counted(MIB, 256, 256, 256)
    release(allocator, x, y)
    release(allocator, allocator.allocate_raw(256, freed_before=1))
    return allocator


def test_cc_43_a_counted_free_is_stamped_and_not_merged():
    # The queue [x, y] cannot be seen: CC-45 shows what is in it.
    allocator, (x, y, _z) = counted(MIB, 256, 256, 256)
    release(allocator, x, y)
    assert stamps(allocator)[:3] == [(0, 256, 1), (256, 256, 2), (512, 256, 0)]
    assert layout(allocator)[:3] == [(0, 256, False), (256, 256, False), (512, 256, True)]


def test_cc_44_a_chunk_freed_just_before_may_be_taken_again():
    allocator, (x, y, _z) = counted(MIB, 256, 256, 256)
    release(allocator, x, y)
    ptr = allocator.allocate_raw(256, freed_before=1)
    assert ptr == x
    release(allocator, ptr)
    assert stamps(allocator)[:2] == [(0, 256, 3), (256, 256, 2)]


def test_cc_45_only_what_lies_strictly_before_the_frontier_is_safe():
    allocator = with_x_freed_thrice()
    allocator.set_safe_frontier(3)
    assert offset(allocator, 512) == 768
    assert stamps(allocator)[:3] == [(0, 256, 3), (256, 256, 0), (512, 256, 0)]
    assert layout(allocator)[:2] == [(0, 256, False), (256, 256, False)]


def test_cc_46_a_forced_merge_serves_a_request_without_a_constraint():
    # That the survivor stays queued, once, cannot be seen: it is in use when the next pass comes
    # by.
    allocator, ptrs = counted(1024, 256, 256, 512)
    release(allocator, *ptrs)
    assert offset(allocator, 1024, freed_before=0) == 0
    assert stamps(allocator) == [(0, 1024, 3)]
    allocator.check()


def test_cc_46_a_request_with_a_constraint_forces_no_merge():
    allocator, ptrs = counted(1024, 256, 256, 512)
    release(allocator, *ptrs)
    before = stamps(allocator)
    assert refused(allocator, 1024, freed_before=1)
    assert stamps(allocator) == before == [(0, 256, 1), (256, 256, 2), (512, 512, 3)]


def test_cc_47_a_forced_merge_stops_at_the_first_chunk_that_is_large_enough():
    allocator, ptrs = counted(2048, *[256] * 7)
    last = allocator.allocate_raw(256)  # what the seven left
    release(allocator, *(ptrs[number - 1] for number in (1, 2, 4, 5, 7)))
    assert offset(allocator, 512, freed_before=0) == 0
    assert stamps(allocator)[:6] == [
        (0, 512, 2), (512, 256, 0), (768, 256, 3), (1024, 256, 4), (1280, 256, 0), (1536, 256, 5),
    ]  # fmt: skip
    allocator.set_safe_frontier(6)
    release(allocator, last)  # stamp 6: the next pass finds #4, #5 and #7 still queued
    allocator.allocate_raw(256, freed_before=5)
    assert (768, 512, 0) in [(at, 512, stamp) for at, _size, stamp in stamps(allocator)]
    assert all(stamp in (0, 2, 6) for _at, _size, stamp in stamps(allocator))


# -- statistics, reports, retry -------------------------------------------------------------------


def test_cc_48_statistics_count_whole_chunks():
    allocator = growing(GIB)
    _, large = take(allocator, 1000, 2 * MIB)
    stats = allocator.stats()
    assert (stats.num_allocs, stats.bytes_in_use, stats.peak_bytes_in_use) == (2, 2098176, 2098176)
    assert (stats.largest_alloc_size, stats.pool_bytes) == (2097152, 6291456)
    release(allocator, large)
    stats = allocator.stats()
    assert (stats.bytes_in_use, stats.peak_bytes_in_use) == (1024, 2098176)
    assert stats.fragmentation == pytest.approx(0.33322480872, abs=1e-11)


def test_cc_49_a_full_pool_and_an_empty_one_have_no_fragmentation():
    allocator = pool(1024)
    assert math.isnan(allocator.stats().fragmentation)
    allocator.allocate_raw(1024)
    assert math.isnan(allocator.stats().fragmentation)


def test_cc_50_clearing_keeps_what_is_in_use():
    allocator = pool(MIB)
    ptrs = take(allocator, 1024, 1024, 1024)
    release(allocator, *ptrs[1:])
    allocator.clear_stats()
    stats = allocator.stats()
    assert (stats.num_allocs, stats.peak_bytes_in_use) == (0, 1024)
    assert (stats.largest_alloc_size, stats.bytes_in_use) == (0, 1024)
    assert allocator.allocation_id(allocator.allocate_raw(1)) == 4


def test_cc_51_a_thousand_sizes_come_and_go():
    allocator = pool(GIB)
    ptrs = take(allocator, *range(1, 1024))
    assert len(set(ptrs)) == 1023
    assert allocator.stats().bytes_in_use == 654336
    assert allocator.stats().largest_alloc_size == 1024
    release(allocator, *ptrs)
    assert layout(allocator) == [(0, GIB, False)]


def test_cc_52_a_thousand_rounds_leave_no_fragments():
    allocator = pool(GIB)
    first = allocator.allocate_raw(4 * KIB)
    release(allocator, first)
    for _ in range(1024):
        release(allocator, *take(allocator, 4 * KIB, 8 * MIB, 16 * KIB, 40 * MIB))
    assert allocator.stats().num_allocs == 4097
    assert allocator.stats().peak_bytes_in_use == 50352128
    assert allocator.allocate_raw(4 * KIB) == first


def test_cc_53_the_occupancy_line_has_a_hundred_cells():
    allocator = pool(25600)
    _, middle, _ = take(allocator, 2560, 300, 5000)
    release(allocator, middle)
    assert allocator.snapshot().occupancy() == "*" * 10 + "_" * 2 + "*" * 20 + "_" * 68


class Waiter:
    """A thread that asks for memory and may have to wait. `attempts` counts how often its
    constraint was looked at, which is once for each attempt."""

    def __init__(self, allocator: bfc.BFCAllocator, size: int) -> None:
        self.attempts = 0
        self.ptr: int | None = None
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, args=(allocator, size))

    def _run(self, allocator: bfc.BFCAllocator, size: int) -> None:
        start = time.monotonic()
        try:
            self.ptr = allocator.allocate_raw(size, freed_before=self._constraint)
        except bfc.OutOfMemoryError:
            pass
        self.seconds = time.monotonic() - start

    def _constraint(self) -> int:
        self.attempts += 1
        return 0

    def until_attempts(self, number: int) -> None:
        wait_until(lambda: self.attempts >= number)
        time.sleep(0.01)  # the attempt itself comes after its constraint

    def waits(self) -> bool:
        return self._thread.is_alive()

    def __enter__(self) -> Waiter:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._thread.join(2 * AGES)
        assert not self._thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + AGES
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_cc_54_a_request_that_may_wait_is_refused_when_the_time_is_up():
    # TensorFlow's four inner attempts are its own affair; that the last one comes after the wait is
    # what matters.
    allocator = pool(1024, retry_seconds=WAIT)
    allocator.allocate_raw(1024)
    with Waiter(allocator, 256) as waiter:
        pass
    assert waiter.ptr is None
    assert WAIT <= waiter.seconds < AGES / 2
    assert waiter.attempts >= 2


def test_cc_54_a_request_that_waits_is_served_by_a_free():
    allocator = pool(1024, retry_seconds=AGES)
    ptr = allocator.allocate_raw(1024)
    with Waiter(allocator, 256) as waiter:
        waiter.until_attempts(1)
        allocator.deallocate_raw(ptr)
    assert waiter.ptr == BASE
    assert waiter.seconds < AGES / 2


def test_cc_54_a_free_between_the_attempt_and_the_wait_is_not_missed():
    source = Misbehaving(2 * MIB)
    allocator = growing(8 * MIB, source, retry_seconds=AGES)
    victim = allocator.allocate_raw(2 * MIB)
    source.on("alloc", 1, first=lambda: allocator.deallocate_raw(victim))
    start = time.monotonic()
    assert allocator.allocate_raw(2 * MIB) == BASE
    assert time.monotonic() - start < AGES / 2


def test_cc_55_a_free_of_too_little_does_not_move_the_deadline():
    allocator = pool(1024, retry_seconds=2 * WAIT)
    ptr, _ = take(allocator, 256, 768)
    with Waiter(allocator, 512) as waiter:
        waiter.until_attempts(1)
        start = time.monotonic()
        while waiter.waits() and time.monotonic() - start < AGES / 2:
            allocator.deallocate_raw(ptr)
            time.sleep(WAIT / 4)
            ptr = allocator.allocate_raw(256)
    assert waiter.ptr is None
    assert waiter.attempts > 2
    assert 2 * WAIT <= waiter.seconds < AGES / 2


def test_cc_56_bin_totals_count_chunks_in_use_by_their_size():
    allocator = pool(GIB)
    for power in range(5):
        take(allocator, 256 << power, 256 << power)
    snapshot = allocator.snapshot()
    assert len(list(snapshot.chunks())) == 11
    for power, entry in enumerate(snapshot.bins[:5]):
        assert entry.total_chunks_in_use == entry.total_chunks_in_bin == 2
        assert entry.total_bytes_in_use == entry.total_bytes_in_bin == 2 * (256 << power)
    assert all(entry.total_chunks_in_bin == 0 for entry in snapshot.bins[5:20])
    assert (snapshot.bins[20].total_chunks_in_bin, snapshot.bins[20].total_chunks_in_use) == (1, 0)
