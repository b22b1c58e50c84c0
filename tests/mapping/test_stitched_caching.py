"""`CachingAllocator(stitch=True)`: what stays PyTorch's, what takes segments all the same, and what
cannot be combined. That pages, views and failures are in order is tested for both policies in
`test_stitching*.py`."""

from __future__ import annotations

from typing import Any

import pytest

import bfc
from bench.histories import traces
from bench.stitching import GIB, on_one_stream
from bfc.testing import IntegerSource

MIB = 1 << 20
PAGE = 2 * MIB
#: Those that take a second or less.
QUICK = ("gpu_decomfl", "gpu_lm_small", "gpt2m_adam", "resnet50_multiscale")


def made(capacity: str = "1 GiB", **more: Any) -> bfc.CachingAllocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator(capacity), stitch=True, **more)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name, _trace in traces()
    ],
)
def test_what_is_reserved(name: str) -> None:
    trace = on_one_stream(dict(traces())[name]).closed()
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator(80 * GIB), stitch=True) as allocator:
        for _ in range(6):
            before = allocator.page_stats()
            result = trace.replay(allocator)
        assert result.failed == 0
        assert result.peak_bytes_reserved <= 1.02 * result.peak_bytes_live
        after = allocator.page_stats()
        for kind in ("creates", "maps", "set_accesses", "unmaps", "releases", "stream_waits"):
            assert after[kind] == before[kind], "the sixth pass leaves the driver alone"
        allocator.check()


def test_sizes_are_rounded_and_counted_as_in_pytorch() -> None:
    with made(settings="roundup_power2_divisions:4") as allocator:
        ptr = allocator.allocate_raw(84 * MIB)
        assert allocator.allocated_size(ptr) == 96 * MIB
        small = allocator.allocate_raw(1)
        assert allocator.allocated_size(small) == 512
        stats = allocator.memory_stats()
        assert stats["requested_bytes.all.current"] == 84 * MIB + 1
        assert stats["active_bytes.large_pool.current"] == 96 * MIB
        assert stats["reserved_bytes.all.current"] == 98 * MIB
        assert stats["segment.all.current"] == 0, "a range counts as no segment"
        allocator.deallocate_raw(ptr)
        assert allocator.memory_stats()["active_bytes.all.current"] == 512


def test_a_view_is_counted_and_recorded_like_any_block() -> None:
    with made("64 MiB") as allocator:
        allocator.record_history()
        blocks = [allocator.allocate_raw(4 * MIB) for _ in range(16)]
        for ptr in blocks[::2]:
            allocator.deallocate_raw(ptr)
        view = allocator.allocate_raw(30 * MIB)
        assert allocator.page_stats()["stitches"] == 1
        assert allocator.memory_stats()["allocated_bytes.all.current"] == 62 * MIB
        allocator.deallocate_raw(view)
        assert [
            (entry.action, entry.size) for entry in allocator.history() if entry.addr == view
        ] == [
            ("alloc", 30 * MIB),
            ("free_requested", 30 * MIB),
            ("free_completed", 30 * MIB),
        ]
        allocator.check()


def test_a_private_pool_takes_segments() -> None:
    """A captured graph needs its addresses: nothing in its pool is mapped elsewhere or unmapped."""
    device = bfc.SimulatedSubAllocator("64 MiB")
    with bfc.CachingAllocator(device, stitch=True) as allocator:
        pool = bfc.MemPool(allocator)
        with bfc.use_mem_pool(pool):
            inside = allocator.allocate_raw(5 * MIB)
        assert device.live_bytes == 20 * MIB
        assert allocator.page_stats()["pages"] == 0
        allocator.deallocate_raw(allocator.allocate_raw(40 * MIB))
        with bfc.use_mem_pool(pool):
            more = allocator.allocate_raw(30 * MIB)  # free pages make room for its segment
        assert allocator.page_stats()["pages"] <= 7
        allocator.check()
        for ptr in (inside, more):
            allocator.deallocate_raw(ptr)


def test_free_segments_of_a_released_pool_make_room_for_pages() -> None:
    with made("64 MiB") as allocator:
        pool = bfc.MemPool(allocator)
        with bfc.use_mem_pool(pool):
            allocator.deallocate_raw(allocator.allocate_raw(40 * MIB))
        del pool
        allocator.deallocate_raw(allocator.allocate_raw(60 * MIB))
        allocator.check()


def test_a_changed_limit_counts_at_once() -> None:
    with made("1 GiB", memory_limit=0.5) as allocator:
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(600 * MIB)
        allocator.set_memory_fraction(1.0)
        allocator.deallocate_raw(allocator.allocate_raw(600 * MIB))
        allocator.check()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"stitch": True, "strict": True}, ValueError, "leave strict or stitch out"),
        (
            {"stitch": True, "settings": "expandable_segments:True"},
            bfc.SettingsError,
            "leave one out",
        ),
        ({"page_size": "2 MiB"}, ValueError, "page_size is for stitch=True"),
        ({"stitch": True, "page_size": "3 MiB"}, ValueError, "power of two"),
        ({"stitch": 1}, TypeError, "stitch is True or False"),
    ],
)
def test_what_cannot_be_combined(arguments: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), **arguments)


def test_expandable_segments_cannot_be_turned_on_later() -> None:
    with made() as allocator:
        with pytest.raises(bfc.SettingsError, match="leave one out"):
            allocator.set_settings("expandable_segments:True")
        allocator.deallocate_raw(allocator.allocate_raw(5 * MIB))
        allocator.check()


def test_a_source_without_mapping_is_refused_with_its_own_words() -> None:
    with pytest.raises(ValueError, match="stitch needs a sub-allocator that maps memory"):
        bfc.CachingAllocator(IntegerSource(1 << 30), stitch=True)


# -- one physical allocation ---------------------------------------------------------------------

MAKERS = {
    "bfc": lambda it: bfc.BFCAllocator(it, virtual_memory=True, page_size="2 MiB"),
    "caching": lambda it: bfc.CachingAllocator(it, stitch=True),
    "expandable": lambda it: bfc.CachingAllocator(it, settings="expandable_segments:True"),
    "plain caching": bfc.CachingAllocator,
}


@pytest.mark.parametrize("policy", MAKERS)
def test_contiguous_memory_is_one_block_of_the_device(policy: str) -> None:
    device = bfc.SimulatedSubAllocator("256 MiB")
    with MAKERS[policy](device) as allocator:
        allocator.allocate("30 MiB").free()  # what is mapped and free is not taken
        buffer = allocator.allocate("25 MiB", contiguous=True)
        inside = [
            address
            for address, nbytes in device.live.items()
            if address <= buffer.ptr and buffer.ptr + buffer.nbytes <= address + nbytes
        ]
        assert len(inside) == 1
        allocator.check()
        at = buffer.ptr
        buffer.free()
        again = allocator.allocate("25 MiB", contiguous=True)
        assert again.ptr == at
        again.free()
        allocator.release_free_regions()
        assert device.live_bytes == 0


@pytest.mark.parametrize("policy", ["bfc", "caching"])
def test_free_pages_make_room_for_contiguous_memory(policy: str) -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with MAKERS[policy](device) as allocator:
        allocator.allocate("60 MiB").free()
        buffer = allocator.allocate("40 MiB", contiguous=True)
        assert allocator.page_stats()["pages"] <= 12
        buffer.free()
        allocator.allocate("60 MiB").free()  # and the other way round
        allocator.check()


def test_contiguous_memory_cannot_sleep() -> None:
    with (
        made() as allocator,
        allocator.tag("weights"),
        pytest.raises(ValueError, match="outside of it"),
    ):
        allocator.allocate(1000, contiguous=True)


def test_joined_regions_are_not_one_physical_allocation() -> None:
    with (
        bfc.BFCAllocator(
            bfc.SimulatedSubAllocator("1 GiB", supports_coalescing=True), allow_growth=True
        ) as allocator,
        pytest.raises(ValueError, match="may lie in two"),
    ):
        allocator.allocate(1000, contiguous=True)


# -- growing in place ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["bfc", "caching"])
def test_a_thousand_growths_without_a_copy(policy: str) -> None:
    device = bfc.SimulatedSubAllocator("2 GiB")
    with MAKERS[policy](device) as allocator:
        buffer = allocator.allocate("2 MiB")
        ptr = buffer.ptr
        for step in range(1, 1001):
            assert allocator.try_extend(buffer, 2 * MIB + step * MIB) is True
            assert buffer.ptr == ptr
        assert buffer.nbytes == 1002 * MIB
        assert allocator.stats().bytes_in_use == 1002 * MIB
        assert allocator.stats().bytes_reserved == device.live_bytes == 1002 * MIB
        allocator.check()
        buffer.free()


# -- found in review -------------------------------------------------------------------------------


def test_a_raised_limit_can_be_used() -> None:
    with made(per_process_memory_fraction=0.1) as allocator:
        first = allocator.allocate("10 MiB")
        allocator.set_memory_fraction(1.0)
        second = allocator.allocate("900 MiB")
        allocator.check()
        del first, second


def test_a_pool_lends_to_a_request_for_one_physical_allocation() -> None:
    with made("64 MiB") as allocator:
        pool = bfc.MemPool(allocator, use_on_oom=True)
        with bfc.use_mem_pool(pool):
            lent = allocator.allocate("40 MiB")
        ptr = lent.ptr
        lent.free()
        borrowed = allocator.allocate("30 MiB", contiguous=True)
        assert borrowed.ptr == ptr
        allocator.check()
        del borrowed


def test_reserved_bytes_follow_pages_from_kind_to_kind() -> None:
    """A page that was made for large requests is lent to small ones, and released there."""
    with made("64 MiB") as allocator:
        for _ in range(3):
            allocator.deallocate_raw(allocator.allocate_raw(10 * MIB))
            small = allocator.allocate_raw(1000)
            assert reserved_by_kind(allocator) == (1, 4)
            allocator.trim(0)
            assert reserved_by_kind(allocator) == (1, 0)
            allocator.deallocate_raw(small)
            allocator.trim(0)
            assert reserved_by_kind(allocator) == (0, 0)


def reserved_by_kind(allocator: bfc.CachingAllocator) -> tuple[int, int]:
    """Pages, for small and for large requests."""
    stats = allocator.memory_stats()
    both = [stats[f"reserved_bytes.{kind}_pool.current"] // PAGE for kind in ("small", "large")]
    assert stats["reserved_bytes.all.current"] == sum(both) * PAGE
    return both[0], both[1]


def test_growth_beyond_the_largest_size_that_is_split_counts_as_oversize() -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with bfc.CachingAllocator(device, settings="max_split_size_mb:22") as allocator:
        ptr = allocator.allocate_raw(20 * MIB + MIB // 2)
        assert allocator.try_extend(ptr, 22 * MIB)
        assert allocator.memory_stats()["oversize_allocations.current"] == 1
        allocator.deallocate_raw(ptr)
        assert allocator.memory_stats()["oversize_allocations.current"] == 0


def test_a_closed_allocator_has_nothing_to_release() -> None:
    allocator = made("64 MiB")
    allocator.deallocate_raw(allocator.allocate_raw(MIB))
    allocator.close()
    assert allocator.release_free_regions() == 0
