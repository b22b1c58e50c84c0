"""BFCAllocator from outside: what it hands out, takes back, refuses and counts."""

from __future__ import annotations

import enum
import gc
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from waiting import called_by_others, until

import bfc
from bfc.testing import Misbehaving

BASE = 1 << 40
MIB = 1 << 20
Case = Callable[[bfc.BFCAllocator], object]


def test_what_was_split_grows_back_together() -> None:
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    a = allocator.allocate(1000)  # rounded to 1024, cut from the front
    b = allocator.allocate(1000)
    assert b.ptr == a.ptr + 1024

    b.free()
    a.free()
    assert [chunk.size for chunk in allocator.snapshot().free_chunks()] == [1 << 20]


# -- sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "chunk"),
    [(1, 256), (255, 256), (256, 256), (257, 512), (MIB, MIB), (MIB + 1, MIB + 256)],
)
def test_sizes_are_rounded_up_to_256(make_allocator, nbytes: int, chunk: int) -> None:
    allocator = make_allocator()
    ptr = allocator.allocate_raw(nbytes)
    assert (ptr, allocator.requested_size(ptr), allocator.allocated_size(ptr)) == (
        BASE,
        nbytes,
        chunk,
    )
    assert allocator.allocate_raw(1) == BASE + chunk


def test_zero_bytes_are_address_zero_and_count_nothing(make_allocator) -> None:
    allocator = make_allocator()
    assert allocator.allocate_raw(0) == 0
    buffer = allocator.allocate(0)
    assert (buffer.ptr, buffer.nbytes) == (0, 0)
    allocator.deallocate_raw(0)
    buffer.free()
    assert allocator.stats() == bfc.Stats(bytes_limit=64 * MIB)
    assert allocator.sub_allocator.calls == []


@pytest.mark.parametrize("nbytes", [-1, -(2**63), 2**63, 2**64, 2**64 + 256, 10**100])
def test_sizes_outside_63_bits_are_value_errors(make_allocator, nbytes: int) -> None:
    allocator = make_allocator()
    for refuse in (
        allocator.allocate_raw,
        allocator.allocate,
        lambda n: allocator.allocate_many([1, n]),
    ):
        with pytest.raises(ValueError, match="between 0 and 2"):
            refuse(nbytes)
    assert allocator.stats().bytes_in_use == 0


@pytest.mark.parametrize("nbytes", [None, 1.0, 2.5, np.float32(3), b"12", [4], (), object(), 1j])
def test_sizes_that_are_no_integers_are_type_errors(make_allocator, nbytes: object) -> None:
    allocator = make_allocator()
    for refuse in (
        allocator.allocate_raw,
        allocator.allocate,
        lambda n: allocator.allocate_many([1, n]),
    ):
        with pytest.raises(TypeError):
            refuse(nbytes)
    assert allocator.stats().bytes_in_use == 0


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64, np.uint64])
def test_numpy_integers_are_sizes_and_addresses(make_allocator, dtype: type) -> None:
    allocator = make_allocator()
    ptr = allocator.allocate_raw(dtype(100))
    assert allocator.requested_size(np.uint64(ptr)) == 100
    allocator.deallocate_raw(np.uint64(ptr))
    assert allocator.allocate(dtype(100)).nbytes == 100


def test_an_int_by_another_name_is_a_size(make_allocator) -> None:
    class Size(enum.IntEnum):
        SMALL = 300

    allocator = make_allocator()
    assert allocator.requested_size(allocator.allocate_raw(Size.SMALL)) == 300


def test_a_size_may_be_a_text_in_allocate_only(make_allocator) -> None:
    allocator = make_allocator()
    assert allocator.allocate("3 MiB").nbytes == 3 * MIB
    for refuse in (allocator.allocate_raw, lambda text: allocator.allocate_many([text])):
        with pytest.raises(TypeError, match="allocate"):
            refuse("3 MiB")
    with pytest.raises(ValueError, match="is not a size"):
        allocator.allocate("3 apples")


def test_the_largest_size_there_is_runs_out_of_memory_and_of_nothing_else(make_allocator) -> None:
    for options in ({}, {"allow_growth": True}, {"strict": True}, {"garbage_collection": False}):
        with pytest.raises(bfc.OutOfMemoryError):
            make_allocator(2**63 - 1 - MIB, memory_limit="1 GiB", **options).allocate_raw(2**63 - 1)


def test_a_device_of_2_to_the_62_bytes_grows_without_end(make_allocator) -> None:
    allocator = make_allocator(2**62, allow_growth=True)
    assert allocator.allocate_raw(2**61 + 1) == BASE
    assert allocator.allocate_raw(1) > 0
    assert allocator.next_region_size >= 2**62


# -- limits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory_limit", "expected"),
    [
        (None, 64 * MIB),
        (1 * MIB, MIB),
        (np.int32(4096), 4096),
        ("3 MiB", 3 * MIB),
        (0.5, 32 * MIB),
        (1.0, 64 * MIB),
        (2.0, 128 * MIB),
        (np.float64(0.25), 16 * MIB),
        (1000, 1000),
    ],
)
def test_a_memory_limit_is_bytes_a_text_or_a_fraction(
    make_allocator, memory_limit, expected: int
) -> None:
    allocator = make_allocator(memory_limit=memory_limit)
    assert allocator.memory_limit == allocator.stats().bytes_limit == expected


@pytest.mark.parametrize(
    "memory_limit", [-1, 2**63, "much", "-1 MiB", "", 0.0, -0.5, float("nan"), float("inf"), 1e300]
)
def test_a_memory_limit_that_is_none_is_a_value_error(simulated, memory_limit: object) -> None:
    with pytest.raises(ValueError, match=r"size|fraction"):
        bfc.BFCAllocator(simulated(), memory_limit=memory_limit)


@pytest.mark.parametrize("memory_limit", [[], b"1 MiB", object(), 1j])
def test_a_memory_limit_of_another_type_is_a_type_error(simulated, memory_limit: object) -> None:
    with pytest.raises(TypeError):
        bfc.BFCAllocator(simulated(), memory_limit=memory_limit)


@pytest.mark.parametrize("limit", [1, 255])
def test_a_limit_below_one_chunk_refuses_everything(make_allocator, limit: int) -> None:
    allocator = make_allocator(memory_limit=limit)
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(1)
    assert allocator.allocate_raw(0) == 0


@pytest.mark.parametrize("growth", [False, True])
@pytest.mark.parametrize("limit", [256, 300, 511, 512, 1000, 2 * MIB + 1, 5 * MIB - 1])
def test_an_odd_limit_is_never_passed(make_allocator, limit: int, growth: bool) -> None:
    allocator = make_allocator(memory_limit=limit, allow_growth=growth)
    for _ in range(limit // 256):
        allocator.allocate_raw(256)
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(256)
    stats = allocator.stats()
    assert stats.bytes_in_use == stats.pool_bytes == limit // 256 * 256


def test_a_limit_above_the_device_asks_for_less_until_it_fits(make_allocator) -> None:
    allocator = make_allocator("1 MiB", memory_limit="2 MiB")
    allocator.allocate_raw(256)
    assert 0 < allocator.stats().pool_bytes <= MIB
    assert len(allocator.sub_allocator.calls) > 2


def test_several_allocators_share_a_device(simulated, make_allocator) -> None:
    device = simulated("8 MiB")
    first, second = (make_allocator(device, memory_limit=0.5) for _ in range(2))
    a, b = first.allocate_raw(4 * MIB), second.allocate_raw(4 * MIB)
    assert abs(a - b) >= 4 * MIB
    with pytest.raises(bfc.InvalidPointerError):
        first.deallocate_raw(b)
    assert second.requested_size(b) == 4 * MIB


@pytest.mark.parametrize(
    "options",
    [
        {"fragmentation_fraction": -0.1},
        {"fragmentation_fraction": 1.1},
        {"fragmentation_fraction": float("nan")},
        {"retry_seconds": -1},
        {"retry_seconds": float("inf")},
        {"retry_seconds": float("nan")},
        {"stream": -1},
        {"stream": 2**64},
    ],
)
def test_options_out_of_range_are_value_errors(simulated, options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        bfc.BFCAllocator(simulated(), **options)


@pytest.mark.parametrize("source", [None, 1 << 30, "cuda", object(), bfc.SimulatedSubAllocator])
def test_only_a_sub_allocator_is_a_source(source: object) -> None:
    with pytest.raises(TypeError, match="sub-allocator"):
        bfc.BFCAllocator(source)


def test_an_allocator_is_set_up_once(simulated, make_allocator) -> None:
    allocator = make_allocator()
    ptr = allocator.allocate_raw(1000)
    with pytest.raises((RuntimeError, TypeError)):
        allocator.__init__(simulated("1 MiB"))
    assert allocator.memory_limit == 64 * MIB
    allocator.deallocate_raw(ptr)


# -- addresses -------------------------------------------------------------------------------------


def test_allocation_ids_count_up_and_are_never_used_twice(make_allocator) -> None:
    allocator = make_allocator()
    first = allocator.allocate_raw(1)
    assert allocator.allocation_id(first) == 1
    allocator.deallocate_raw(first)
    assert allocator.allocate_raw(1) == first
    assert allocator.allocation_id(first) == 2
    allocator.reset_accumulated_stats()
    assert allocator.allocation_id(allocator.allocate_raw(1)) == 3


def live_interior_and_freed(allocator: bfc.BFCAllocator) -> tuple[int, list[int]]:
    live, freed = allocator.allocate_raw(1000), allocator.allocate_raw(1000)
    allocator.deallocate_raw(freed)
    interior = [live + 1, live + 256, live + 1023]
    foreign = [1, 255, BASE - 1, BASE - 256, BASE + 64 * MIB, 2**63, 2**64 - 1, 2**64, 10**30, -1]
    return live, [*interior, freed, freed + 256, *foreign]


QUESTIONS: list[Callable] = [
    lambda allocator, ptr: allocator.deallocate_raw(ptr),
    lambda allocator, ptr: allocator.deallocate_many([ptr]),
    lambda allocator, ptr: allocator.requested_size(ptr),
    lambda allocator, ptr: allocator.allocated_size(ptr),
    lambda allocator, ptr: allocator.allocation_id(ptr),
    lambda allocator, ptr: allocator.record_stream(ptr, 3),
]


@pytest.mark.parametrize("ask", QUESTIONS)
def test_an_address_that_is_no_allocation_changes_nothing(make_allocator, ask: Callable) -> None:
    allocator = make_allocator()
    live, wrong = live_interior_and_freed(allocator)
    before = allocator.snapshot()
    for ptr in wrong:
        with pytest.raises(bfc.InvalidPointerError):
            ask(allocator, ptr)
        allocator.check()
    assert allocator.snapshot() == before
    assert allocator.requested_size(live) == 1000


@pytest.mark.parametrize("ask", QUESTIONS)
@pytest.mark.parametrize("ptr", [None, 1.5, "0x100", b"1", [], int, object()])
def test_an_address_of_another_type_is_a_type_error(
    make_allocator, ask: Callable, ptr: object
) -> None:
    allocator = make_allocator()
    allocator.allocate_raw(1)
    before = allocator.snapshot()
    with pytest.raises(TypeError):
        ask(allocator, ptr)
    assert allocator.snapshot() == before


@pytest.mark.parametrize(
    ("offset", "text"),
    [
        (256, "256 bytes inside the allocation"),
        (1024, "freed already"),
        (-4096, "in no region"),
    ],
)
def test_the_error_says_what_is_at_the_address(make_allocator, offset: int, text: str) -> None:
    allocator = make_allocator()
    ptr = allocator.allocate_raw(1000)
    with pytest.raises(bfc.InvalidPointerError, match=text):
        allocator.deallocate_raw(ptr + offset)


def test_a_double_free_hits_nobody_who_came_after(make_allocator) -> None:
    allocator = make_allocator()
    low, high = allocator.allocate_raw(256), allocator.allocate_raw(256)
    allocator.deallocate_raw(high)
    allocator.deallocate_raw(low)
    wide = allocator.allocate_raw(512)
    assert wide == low
    with pytest.raises(bfc.InvalidPointerError):
        allocator.deallocate_raw(high)  # its address is inside the new block now
    assert allocator.requested_size(wide) == 512


# -- placement -------------------------------------------------------------------------------------


def test_the_best_fit_is_the_smallest_and_then_the_lowest(make_allocator) -> None:
    allocator = make_allocator()
    sizes = [1024, 256, 512, 256, 512, 256, 768, 256]
    ptrs = [allocator.allocate_raw(size) for size in sizes]
    for index in (0, 2, 4, 6):
        allocator.deallocate_raw(ptrs[index])
    assert allocator.allocate_raw(400) == ptrs[2]
    assert allocator.allocate_raw(300) == ptrs[4]
    assert allocator.allocate_raw(300) == ptrs[6]
    assert allocator.allocated_size(ptrs[6]) == 768, "less than twice the request: not split"
    assert allocator.allocate_raw(512) == ptrs[0]
    assert allocator.allocated_size(ptrs[0]) == 512, "twice the request: split"


@pytest.mark.parametrize("holes", [30, 301, 1000, 3000])
def test_many_holes_of_one_size_are_filled_from_the_lowest(make_allocator, holes: int) -> None:
    allocator = make_allocator("1 GiB")
    ptrs = allocator.allocate_many([512] * (2 * holes)).tolist()
    allocator.deallocate_many(ptrs[::2])
    for hole in ptrs[::2]:
        assert allocator.allocate_raw(256) == hole, "split: the rest is free"
        allocator.deallocate_raw(hole)
        assert allocator.allocate_raw(512) == hole
        assert allocator.stats().largest_free_block_bytes > 512
    allocator.check()


def test_a_fragmentation_fraction_bounds_the_slack(make_allocator) -> None:
    allocator = make_allocator("1 GiB", fragmentation_fraction=0.01)
    ptr = allocator.allocate_raw(100 * MIB)
    allocator.allocate_raw(256)
    allocator.deallocate_raw(ptr)
    assert allocator.allocated_size(allocator.allocate_raw(95 * MIB)) == 100 * MIB
    allocator.deallocate_raw(ptr)
    assert allocator.allocated_size(allocator.allocate_raw(80 * MIB)) == 80 * MIB


def test_regions_double_when_memory_may_grow(make_allocator) -> None:
    allocator = make_allocator("1 GiB", allow_growth=True)
    assert allocator.next_region_size == 2 * MIB
    for _ in range(8):
        allocator.allocate_raw(2 * MIB)
    assert [region.size for region in allocator.snapshot().regions] == [
        2 * MIB,
        4 * MIB,
        8 * MIB,
        16 * MIB,
    ]
    assert allocator.next_region_size == 32 * MIB


def test_one_large_request_doubles_the_next_region_past_it(make_allocator) -> None:
    allocator = make_allocator("1 GiB", allow_growth=True)
    allocator.allocate_raw(33 * MIB)
    assert [region.size for region in allocator.snapshot().regions] == [64 * MIB]
    assert allocator.next_region_size == 64 * MIB


def test_without_growth_the_first_allocation_takes_everything(make_allocator) -> None:
    allocator = make_allocator()
    assert allocator.next_region_size == 64 * MIB
    assert allocator.sub_allocator.calls == []
    allocator.allocate_raw(1)
    assert allocator.sub_allocator.calls == [("alloc", 64 * MIB, BASE)]


# -- release, close --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["release_free_regions", "empty_cache"])
def test_regions_without_an_allocation_are_given_back(make_allocator, name: str) -> None:
    allocator = make_allocator("1 GiB", allow_growth=True)
    ptrs = [allocator.allocate_raw(2 * MIB) for _ in range(3)]
    for ptr in ptrs[1:]:
        allocator.deallocate_raw(ptr)
    assert getattr(allocator, name)() == 4 * MIB
    assert [region.ptr for region in allocator.snapshot().regions] == [ptrs[0]]
    assert getattr(allocator, name)() == 0
    assert allocator.next_region_size == 2 * MIB
    assert allocator.stats().pool_bytes == allocator.sub_allocator.live_bytes == 2 * MIB


def test_garbage_collection_makes_room_for_a_larger_region(make_allocator) -> None:
    for collects in (True, False):
        allocator = make_allocator("8 MiB", allow_growth=True, garbage_collection=collects)
        small = [allocator.allocate_raw(2 * MIB) for _ in range(2)]
        for ptr in small:
            allocator.deallocate_raw(ptr)
        if collects:
            allocator.deallocate_raw(allocator.allocate_raw(7 * MIB))
        else:
            with pytest.raises(bfc.OutOfMemoryError):
                allocator.allocate_raw(7 * MIB)


def test_close_gives_everything_back_live_or_not(make_allocator) -> None:
    allocator = make_allocator("1 GiB", allow_growth=True)
    live, buffer = allocator.allocate_raw(3 * MIB), allocator.allocate(9 * MIB)
    allocator.close()
    allocator.close()
    assert allocator.closed
    assert allocator.sub_allocator.live == {}
    assert allocator.snapshot().regions == ()
    stats = allocator.stats()
    assert (stats.bytes_in_use, stats.pool_bytes, stats.largest_free_block_bytes) == (0, 0, 0)
    buffer.free()
    with pytest.raises(bfc.InvalidPointerError):
        allocator.deallocate_raw(live)


def test_with_closes_at_the_end_even_after_an_error(simulated) -> None:
    device = simulated()
    allocator = bfc.BFCAllocator(device)

    def fail() -> None:
        with allocator:
            allocator.allocate_raw(1)
            assert device.live_bytes == 64 * MIB
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert allocator.closed
    assert device.live_bytes == 0


@pytest.mark.parametrize(
    "use",
    [
        lambda allocator: allocator.allocate_raw(1),
        lambda allocator: allocator.allocate(1),
        lambda allocator: allocator.allocate("1 KiB", stream=4),
        lambda allocator: allocator.allocate_many([1, 2]),
        lambda allocator: allocator.allocate_raw(2**40),
    ],
)
def test_a_closed_allocator_allocates_nothing(make_allocator, use: Case) -> None:
    allocator = make_allocator()
    allocator.close()
    with pytest.raises(bfc.ClosedError):
        use(allocator)
    assert allocator.sub_allocator.calls == []


def test_a_closed_allocator_can_still_be_asked_about(make_allocator) -> None:
    allocator = make_allocator()
    allocator.allocate_raw(1)
    allocator.close()
    assert allocator.release_free_regions() == 0
    assert "limit" in str(allocator.snapshot())
    assert allocator.snapshot().occupancy()
    assert repr(allocator)
    allocator.check()
    allocator.reset_peak_stats()


def test_an_allocator_that_is_dropped_gives_its_regions_back(simulated) -> None:
    device = simulated()
    allocator = bfc.BFCAllocator(device)
    allocator.allocate_raw(1)
    gone = weakref.ref(allocator)
    del allocator
    gc.collect()
    assert gone() is None
    assert device.live == {}


def test_an_allocator_in_a_cycle_is_collected(simulated) -> None:
    class Holder(bfc.BFCAllocator):
        pass

    device = simulated()
    allocator = Holder(device)
    allocator.myself = allocator
    allocator.allocate_raw(1)
    del allocator
    gc.collect()
    assert device.live == {}


def three_free_regions(faults: list[BaseException]) -> bfc.BFCAllocator:
    device = Misbehaving(bfc.SimulatedSubAllocator("1 GiB"))
    allocator = bfc.BFCAllocator(device, allow_growth=True)
    for ptr in [allocator.allocate_raw(2 * MIB) for _ in range(7)]:
        allocator.deallocate_raw(ptr)
    for number, fault in enumerate(reversed(faults), 1):
        device.on("free", number, raises=fault)
    assert len(device.live) == 3
    return allocator


def test_a_region_that_could_not_be_freed_is_tried_again() -> None:
    allocator = three_free_regions([RuntimeError("busy"), ValueError("no")])
    with pytest.raises(bfc.SubAllocatorError, match="2 of 3"):
        allocator.release_free_regions()
    allocator.check()
    assert len(allocator.sub_allocator.live) == 2
    allocator.release_free_regions()
    assert allocator.sub_allocator.live == {}


def test_close_tries_again_what_could_not_be_freed() -> None:
    allocator = three_free_regions([RuntimeError("busy")])
    with pytest.raises(bfc.SubAllocatorError):
        allocator.close()
    assert allocator.closed
    allocator.close()
    assert allocator.sub_allocator.live == {}


def test_an_interrupt_while_regions_are_given_back_loses_none() -> None:
    allocator = three_free_regions([KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        allocator.release_free_regions()
    allocator.close()
    assert allocator.sub_allocator.live == {}


# -- figures ---------------------------------------------------------------------------------------


def test_stats_mean_what_they_say(make_allocator) -> None:
    allocator = make_allocator("1 GiB", allow_growth=True)
    a, b = allocator.allocate_raw(MIB - 100), allocator.allocate_raw(2 * MIB)
    allocator.deallocate_raw(a)
    stats = allocator.stats()
    assert stats.num_allocs == 2
    assert stats.bytes_in_use == 2 * MIB
    assert stats.peak_bytes_in_use == 3 * MIB
    assert stats.largest_alloc_size == 2 * MIB
    assert stats.bytes_limit == 1 << 30
    assert stats.pool_bytes == stats.peak_pool_bytes == 6 * MIB
    assert stats.largest_free_block_bytes == 2 * MIB
    assert stats.fragmentation == pytest.approx(1 / 2)
    assert stats.bytes_reservable_limit is None
    allocator.deallocate_raw(b)
    assert allocator.stats().bytes_in_use == 0


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", [bfc.BFCAllocator, bfc.CachingAllocator])
def test_what_is_reserved_is_what_the_source_has_given(make, strict: bool) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    options = {"allow_growth": True} if make is bfc.BFCAllocator else {}
    allocator = make(device, strict=strict, **options)
    small, large = allocator.allocate_raw(1000), allocator.allocate_raw(40 * MIB)
    allocator.deallocate_raw(large)
    taken = device.live_bytes
    assert allocator.stats().bytes_reserved == allocator.stats().pool_bytes == taken > 40 * MIB
    allocator.release_free_regions()
    stats = allocator.stats()
    assert (stats.bytes_reserved, stats.peak_bytes_reserved) == (device.live_bytes, taken)
    assert stats.bytes_reserved < taken
    allocator.deallocate_raw(small)


def test_resets_touch_what_they_name_only(make_allocator) -> None:
    def figures() -> tuple[int, ...]:
        stats = allocator.stats()
        return (
            stats.num_allocs,
            stats.peak_bytes_in_use,
            stats.largest_alloc_size,
            stats.peak_pool_bytes,
        )

    def fill_and_keep_one() -> None:
        kept = [allocator.allocate_raw(size) for size in (MIB, 2 * MIB, 8 * MIB)]
        allocator.deallocate_many(kept[1:])
        allocator.release_free_regions()

    allocator = make_allocator("1 GiB", allow_growth=True)
    fill_and_keep_one()
    assert figures() == (3, 11 * MIB, 8 * MIB, 14 * MIB)
    allocator.reset_accumulated_stats()
    assert figures() == (0, 11 * MIB, 8 * MIB, 14 * MIB)
    allocator.reset_peak_stats()
    assert figures() == (0, MIB, 0, 2 * MIB)
    fill_and_keep_one()
    assert figures() == (3, 12 * MIB, 8 * MIB, 12 * MIB)
    assert allocator.clear_stats() is True
    assert figures() == (0, 2 * MIB, 0, 12 * MIB)


def test_a_failed_allocation_is_not_counted(make_allocator) -> None:
    allocator = make_allocator("1 MiB")
    allocator.allocate_raw(256)
    before = allocator.stats()
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(MIB)
    assert allocator.stats() == before


def test_repr_names_the_limit_and_the_source(make_allocator) -> None:
    assert repr(make_allocator()) == (
        "<bfc.BFCAllocator, limit 64.00 MiB, on SimulatedSubAllocator(64.00 MiB, 0 B live)>"
    )


# -- waiting for memory ----------------------------------------------------------------------------


def on_a_miss(allocator: bfc.Allocator, work: Callable[[], object]) -> threading.Thread:
    """Starts a thread that does the work once the next request has looked for memory."""
    has_looked = called_by_others(allocator)

    def run() -> None:
        until(has_looked)
        work()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_retry_waits_for_another_thread_to_free(make_allocator) -> None:
    # the region stays: the free may come where the request would give it back, and ask for another
    allocator = make_allocator("1 MiB", retry_seconds=60.0, garbage_collection=False)
    ptr = allocator.allocate_raw(MIB)
    freeing = on_a_miss(allocator, lambda: allocator.deallocate_raw(ptr))
    assert allocator.allocate_raw(MIB) == ptr
    freeing.join()


def test_a_retry_sees_a_buffer_that_another_thread_drops(make_allocator) -> None:
    allocator = make_allocator("1 MiB", retry_seconds=60.0)
    held = [allocator.allocate(MIB)]
    dropping = on_a_miss(allocator, held.clear)
    assert allocator.allocate_raw(MIB)
    dropping.join()


def test_a_retry_gives_up_after_its_time(make_allocator) -> None:
    allocator = make_allocator("1 MiB", retry_seconds=0.1)
    allocator.allocate_raw(MIB)
    begun = time.monotonic()
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(256)
    assert time.monotonic() - begun >= 0.1


def test_a_retry_ends_when_the_allocator_is_closed(make_allocator) -> None:
    allocator = make_allocator("1 MiB", retry_seconds=60.0)
    ptr = allocator.allocate_raw(MIB)
    closing = on_a_miss(allocator, lambda: (allocator.close(), allocator.deallocate_raw(0)))
    with pytest.raises(bfc.ClosedError):
        allocator.allocate_raw(MIB)
    closing.join()
    assert ptr


# -- sources that break their contract -------------------------------------------------------------


class Bare(bfc.SubAllocator):
    """Only what Python itself asks for."""

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        return None

    def free(self, address: int, nbytes: int) -> None:
        pass


MAKERS = [
    lambda source: bfc.BFCAllocator(source, memory_limit=MIB),
    bfc.CachingAllocator,
    bfc.PinnedAllocator,
]


@pytest.mark.parametrize("make", MAKERS, ids=["bfc", "caching", "pinned"])
def test_a_source_without_what_is_asked_of_it_later_is_refused_at_once(make) -> None:
    with pytest.raises(TypeError, match=r"Bare has no total_bytes: set it .* all the bytes"):
        make(Bare())
    wrong = {
        "total_bytes": [None, "1 GiB", 1e9, -1, True, 2**64],
        "device": ["cpu", None],
        "largest_block": [0, "4 MiB"],
        "default_stream_alias": [None, -1],
        "thread_streams": [None, 2, {"two"}],
    }
    for member, values in wrong.items():
        for value in values:
            source = Bare()
            source.total_bytes = MIB
            setattr(source, member, value)
            with pytest.raises(TypeError, match=rf"^Bare\.{member} must be .*, not "):
                make(source)


@pytest.mark.parametrize(
    "make",
    [
        lambda source: bfc.BFCAllocator(source, virtual_memory=True),
        lambda source: bfc.CachingAllocator(source, stitch=True),
        lambda source: bfc.CachingAllocator(source, settings="expandable_segments:True"),
        lambda source: bfc.CachingAllocator(source).set_settings("expandable_segments:True"),
    ],
)
def test_a_source_that_only_says_that_it_maps_memory_is_refused_at_once(make) -> None:
    source = Bare()
    source.total_bytes = 64 * MIB
    source.supports_virtual_memory = True
    with pytest.raises(TypeError, match=r"does not define reserve\(\): it needs reserve, unres"):
        make(source)
    device = bfc.SimulatedSubAllocator("64 MiB")
    for granularity, error in ((0, ValueError), (3 << 20, ValueError), (None, TypeError)):
        device.mapping_granularity = granularity
        with pytest.raises(error, match="mapping_granularity must be a power of two"):
            make(device)


def answering(answer: Callable[[int], object]) -> Misbehaving:
    """A source that answers so, and takes everything back."""
    source = Misbehaving("64 MiB")
    source.on("alloc", instead=lambda ask, alignment, nbytes: answer(nbytes))
    source.on("free", returns=None)
    return source


def raise_(error: BaseException) -> object:
    raise error


@pytest.mark.parametrize(
    "answer",
    [
        lambda n: (0, n),
        lambda n: (BASE + 1, n),
        lambda n: (BASE + 128, n),
        lambda n: (-256, n),
        lambda n: (BASE, 0),
        lambda n: (BASE, -n),
        lambda n: (2**64 - 256, n),
        lambda n: (BASE, 2**64),
        lambda n: BASE,
        lambda n: (BASE,),
        lambda n: (BASE, n, 1),
        lambda n: "ab",
        lambda n: (float(BASE), n),
        lambda n: (None, n),
        lambda n: raise_(RuntimeError("driver")),
        lambda n: raise_(OSError(5, "io")),
        lambda n: raise_(bfc.SubAllocatorError("said so")),
        lambda n: (BASE, n - 256),
    ],
)
def test_a_source_that_breaks_its_contract_is_named(answer: Callable[[int], object]) -> None:
    allocator = bfc.BFCAllocator(answering(answer))
    for _ in range(2):
        with pytest.raises(bfc.SubAllocatorError):
            allocator.allocate_raw(64 * MIB)
        allocator.check()
    assert allocator.stats().bytes_in_use == 0
    allocator.close()


def test_a_source_that_raises_memory_error_is_out_of_memory() -> None:
    allocator = bfc.BFCAllocator(answering(lambda n: raise_(MemoryError())))
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(1)


def test_an_interrupt_inside_a_source_leaves_the_allocator_usable() -> None:
    answers = [lambda: raise_(KeyboardInterrupt()), lambda: (BASE, 64 * MIB)]
    allocator = bfc.BFCAllocator(answering(lambda n: answers.pop(0)()))
    with pytest.raises(KeyboardInterrupt):
        allocator.allocate_raw(1)
    assert allocator.allocate_raw(64 * MIB) == BASE


@pytest.mark.parametrize("shift", [0, 256, -256])
def test_a_block_that_overlaps_another_is_refused(shift: int) -> None:
    addresses = [BASE, BASE + shift]
    allocator = bfc.BFCAllocator(answering(lambda n: (addresses.pop(0), n)), allow_growth=True)
    allocator.allocate_raw(2 * MIB)
    with pytest.raises(bfc.SubAllocatorError, match="overlaps"):
        allocator.allocate_raw(2 * MIB)
    allocator.check()
    assert allocator.stats().pool_bytes == 2 * MIB


def test_more_than_was_asked_for_is_used_and_given_back_whole() -> None:
    source, freed = answering(lambda n: (BASE, n + 1000)), []
    source.on("free", instead=lambda ask, *block: freed.append(block))
    allocator = bfc.BFCAllocator(source, memory_limit="1 MiB")
    allocator.allocate_raw(1)
    assert allocator.stats().pool_bytes == MIB + 1000
    allocator.check()
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(2 * MIB)
    assert allocator.stats().pool_bytes == MIB + 1000
    allocator.close()
    assert freed == [(BASE, MIB + 1000)]


def test_adjacent_blocks_become_one_region_where_the_source_allows_it(
    make_allocator, simulated
) -> None:
    for joins in (True, False):
        device = simulated("1 GiB", supports_coalescing=joins)
        allocator = make_allocator(device, allow_growth=True)
        ptrs = [allocator.allocate_raw(2 * MIB) for _ in range(3)]
        assert len(allocator.snapshot().regions) == (1 if joins else 2)
        allocator.deallocate_many(ptrs)
        allocator.check()
        assert allocator.stats().largest_free_block_bytes == (6 if joins else 4) * MIB
        assert allocator.release_free_regions() == 6 * MIB
