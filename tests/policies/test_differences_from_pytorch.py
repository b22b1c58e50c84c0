"""The corner cases where ours differs from PyTorch on purpose, by number, and bad input."""

from __future__ import annotations

import contextlib
import gc
import itertools
import pickle
import pickletools
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from closing import close_all
from torch_corners import MIB, OTHER, SIDE

import bfc
from bench.peers.torch import REJECTIONS, STATS
from bfc.devices import Availability
from bfc.pytorch.rules import VERSIONS
from bfc.testing import Misbehaving

Make = Callable[..., "bfc.CachingAllocator"]
HOW = pytest.mark.parametrize("strict", [False, True], ids=["relaxed", "strict"])


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes allocators, each over a simulated device of that many MiB. After the test each one is
    checked and closed, and the device must have everything back."""
    allocators = []

    def start(mebibytes: int = 1024, device: Any = None, **options: Any) -> bfc.CachingAllocator:
        device = device or bfc.SimulatedSubAllocator(mebibytes * MIB)
        allocators.append(bfc.CachingAllocator(device, **options))
        return allocators[-1]

    yield start
    close_all(allocators)


def taken(allocator: bfc.CachingAllocator, *sizes: int, stream: int = 0) -> list[int]:
    return [allocator.allocate_raw(size, stream) for size in sizes]


def cached(allocator: bfc.CachingAllocator, *sizes: int, stream: int = 0) -> list[int]:
    """Blocks of these sizes that are free again."""
    ptrs = taken(allocator, *sizes, stream=stream)
    for ptr in ptrs:
        allocator.deallocate_raw(ptr)
    return ptrs


def deferred(allocator: bfc.CachingAllocator, ptr: int, stream: int = SIDE) -> None:
    """Free a block that the stream uses."""
    allocator.record_stream(ptr, stream)
    allocator.deallocate_raw(ptr)


def given(allocator: bfc.CachingAllocator, kind: str) -> list[int]:
    """The bytes of each call to the device; "alloc" counts those refused."""
    return [nbytes for name, nbytes, _ in allocator.sub_allocator.calls if name == kind]


def counted(allocator: bfc.CachingAllocator, *names: str) -> list[int]:
    stats = allocator.memory_stats()
    return [stats[name] for name in names]


def pool_ids(allocator: bfc.CachingAllocator) -> list[tuple[int, int]]:
    return [region.pool_id for region in allocator.snapshot().regions]


def falling() -> Misbehaving:
    """A device whose every address lies a GiB below the last."""
    device, taken = Misbehaving("1 TiB"), itertools.count()
    device.on("alloc", instead=lambda ask, _, nbytes: ((1 << 40) - (next(taken) << 30), nbytes))
    device.on("free", returns=None)
    return device


@HOW
@pytest.mark.parametrize("private", [False, True], ids=["default", "private"])
@pytest.mark.parametrize("torch", VERSIONS)
def test_row_18_ours_orders_equal_sizes_as_the_version_does(make, strict, private, torch):
    allocator = make(device=falling(), strict=strict, torch=torch)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool) if private else contextlib.nullcontext():
        blocks = taken(allocator, *[4 * MIB] * 10)
        for number in (7, 2):
            allocator.deallocate_raw(blocks[number])
        assert blocks[7] < blocks[2]
        assert taken(allocator, 4 * MIB) == [blocks[7 if torch == "2.11" else 2]]


@HOW
def test_row_20_ours_asks_nobody_for_far_too_much(make, strict):
    allocator = make(strict=strict)
    before = allocator.memory_stats()
    for nbytes in (1 << 60, (1 << 63) - 1):
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(nbytes)
    assert allocator.sub_allocator.calls == []
    assert allocator.memory_stats() == before


@HOW
def test_row_21_ours_says_which_pointer_is_none(make, strict):
    allocator = make(strict=strict)
    gone, live = taken(allocator, 4096, 4096)
    allocator.deallocate_raw(gone)
    before = allocator.snapshot().regions
    for wrong in (gone, live + 512, 12345):
        with pytest.raises(bfc.InvalidPointerError):
            allocator.deallocate_raw(wrong)
    assert allocator.snapshot().regions == before


def test_row_24_ours_does_not_read_the_switch(make, monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    allocator = make()
    taken(allocator, 1000)
    assert given(allocator, "alloc") == [2 * MIB]


def test_row_53_ours_reads_no_variable_of_pytorch(make, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:40")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "no_such_key:1")
    allocator = make()
    assert allocator.settings == ""
    assert counted(allocator, "max_split_size") == [-1]


def test_row_34_ours_reuses_inside_a_scope_where_it_would_refuse(make):
    allocator = make(60, torch="2.11")
    allocator.sub_allocator.hold(SIDE)
    with bfc.use_mem_pool(bfc.MemPool(allocator)):
        (block,) = taken(allocator, 30 * MIB)
        deferred(allocator, block)
        allocator.sub_allocator.finish(SIDE)
        assert taken(allocator, 30 * MIB) != [block]
        assert taken(allocator, 30 * MIB) == [block]
        assert counted(allocator, "num_ooms", "num_sync_all_streams") == [0, 1]


@HOW
def test_row_34b_ours_never_forgets_a_use(make, strict):
    allocator = make(strict=strict)
    allocator.sub_allocator.hold(SIDE)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        (block,) = taken(allocator, 30 * MIB)
        deferred(allocator, block)
    taken(allocator, 512)
    with bfc.use_mem_pool(pool):
        assert taken(allocator, 30 * MIB) != [block]
    allocator.sub_allocator.finish(SIDE)
    taken(allocator, 512)
    with bfc.use_mem_pool(pool):
        assert taken(allocator, 30 * MIB) == [block]


def test_row_34c_ours_is_not_gated_by_another_threads_scope(make):
    allocator = make(100)
    cached(allocator, 80 * MIB, stream=SIDE)
    with bfc.use_mem_pool(bfc.MemPool(allocator)), ThreadPoolExecutor(1) as other:
        other.submit(taken, allocator, 60 * MIB, stream=OTHER).result()
    assert counted(allocator, "num_alloc_retries", "num_ooms") == [1, 0]


def no_search(make: Make, **options: object) -> bool:
    """Row 40: is the block that the wait has freed overlooked?"""
    allocator = make(20, **options)
    block, _ = taken(allocator, 8 * MIB, 9 * MIB)
    allocator.sub_allocator.hold(SIDE)
    deferred(allocator, block)
    try:
        assert taken(allocator, 8 * MIB) == [block]
    except bfc.OutOfMemoryError:
        assert taken(allocator, 8 * MIB) == [block]
        return True
    assert counted(allocator, "num_ooms", "num_sync_all_streams") == [0, 1]
    assert counted(allocator, "num_alloc_retries") == [1]  # the device was asked again first
    return False


@pytest.mark.parametrize(
    ("options", "overlooked"),
    [
        ({}, False),
        ({"strict": True}, True),
        ({"search_again": False}, True),
        ({"strict": True, "search_again": True}, False),
    ],
    ids=str,
)
def test_row_40_ours_searches_again(make, options, overlooked):
    assert no_search(make, **options) == overlooked


@pytest.mark.parametrize(
    ("options", "overlooked"),
    [({}, False), ({"search_again": False}, True), ({"strict": True}, True)],
    ids=str,
)
def test_row_40_is_the_same_for_buffers(make, options, overlooked):
    allocator = make(20, **options)
    block, rest = allocator.allocate(8 * MIB), allocator.allocate(12 * MIB)
    allocator.sub_allocator.hold(SIDE)
    allocator.record_stream(block, SIDE)
    block.free()
    if overlooked:
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate(8 * MIB)
    allocator.allocate(8 * MIB).free()
    rest.free()


def test_buffers_in_a_cycle_make_room_without_a_second_search(make):
    allocator = make(20, search_again=False)
    cycle = [allocator.allocate(8 * MIB)]
    cycle.append(cycle)
    rest = allocator.allocate(12 * MIB)
    del cycle
    allocator.allocate(8 * MIB).free()
    rest.free()


@HOW
@pytest.mark.parametrize("first_is_free", [False, True])
def test_row_45d_ours_never_gives_back_part_of_a_segment(make, strict, first_is_free):
    allocator = make(120, strict=strict)
    cached(allocator, 120 * MIB)
    if first_is_free:  # its address is the segment's
        hole, live = taken(allocator, 80 * MIB, 40 * MIB)
        allocator.deallocate_raw(hole)
    else:
        (live,) = taken(allocator, 40 * MIB)
    allocator.set_settings("max_split_size_mb:32")
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(50 * MIB)
    assert given(allocator, "free") == []
    allocator.deallocate_raw(live)
    assert allocator.empty_cache() == 120 * MIB


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, 80),
        ({"strict": True}, 160),
        ({"collect_without_limit": False}, 160),
        ({"strict": True, "collect_without_limit": True}, 80),
        ({"strict": True, "memory_limit": 400 * MIB}, 80),
        ({"strict": True, "per_process_memory_fraction": 0.99}, 80),
    ],
    ids=str,
)
def test_row_47_ours_collects_without_a_fraction(make, options, left):
    allocator = make(400, settings="garbage_collection_threshold:0.15", **options)
    cached(allocator, 40 * MIB, 40 * MIB)
    taken(allocator, 80 * MIB)
    assert counted(allocator, "reserved_bytes.all.current") == [left * MIB]
    assert counted(allocator, "num_alloc_retries") == [0]


@pytest.mark.parametrize(
    "bound", [{"mebibytes": 100}, {"memory_limit": 100 * MIB}], ids=["device", "limit"]
)
@pytest.mark.parametrize(
    ("options", "freed"),
    [
        ({}, [20, 30, 40]),
        ({"strict": True}, [20, 30, 40]),
        ({"release_only_what_is_needed": True}, [20]),
        ({"strict": True, "release_only_what_is_needed": True}, [20]),
    ],
    ids=str,
)
def test_a_retry_of_ours_gives_back_what_is_needed(make, bound, options, freed):
    allocator = make(**bound, **options)
    cached(allocator, 40 * MIB, 30 * MIB, 20 * MIB, stream=SIDE)
    taken(allocator, 12 * MIB)
    assert sorted(given(allocator, "free")) == [size * MIB for size in freed]
    assert counted(allocator, "num_alloc_retries", "num_ooms") == [1, 0]


def test_a_retry_of_ours_gives_back_all_if_it_must(make):
    allocator = make(100, release_only_what_is_needed=True)
    cached(allocator, 40 * MIB, 30 * MIB, 20 * MIB, stream=SIDE)
    taken(allocator, 98 * MIB)
    assert sorted(given(allocator, "free")) == [20 * MIB, 30 * MIB, 40 * MIB]


@HOW
def test_row_50_ours_shows_what_is_in_force(make, strict):
    allocator = make(strict=strict)
    allocator.set_settings("max_split_size_mb:40")
    shown = allocator.snapshot().to_torch()["allocator_settings"]
    assert shown["max_split_size"] == 40 * MIB
    allocator.set_settings("garbage_collection_threshold:0.5")
    shown = allocator.snapshot().to_torch()["allocator_settings"]
    assert shown["max_split_size"] == -1
    assert shown["PYTORCH_CUDA_ALLOC_CONF"] == "garbage_collection_threshold:0.5"


def test_row_52_ours_changes_nothing_when_it_refuses(make):
    allocator = make(settings="roundup_power2_divisions:4")
    for text in ("max_split_size_mb:40,no_such_key:1", "roundup_power2_divisions:3"):
        with pytest.raises(bfc.SettingsError):
            allocator.set_settings(text)
    assert allocator.settings == "roundup_power2_divisions:4"
    taken(allocator, 84 * MIB)
    assert given(allocator, "alloc") == [96 * MIB]


@HOW
def test_expandable_segments_are_refused_where_memory_cannot_be_mapped(strict):
    no = Availability(False, "it is a plain one")
    device = Misbehaving(1 << 30, supports_virtual_memory=no)
    with pytest.raises(bfc.SettingsError, match="it is a plain one"):
        bfc.CachingAllocator(device, strict=strict, settings="expandable_segments:True")
    allocator = bfc.CachingAllocator(device, strict=strict)
    with pytest.raises(bfc.SettingsError, match="expandable_segments"):
        allocator.set_settings("expandable_segments:True")
    allocator.set_settings("expandable_segments:False")


@HOW
@pytest.mark.parametrize("torch", VERSIONS)
def test_case_ex_19_ranges_that_never_held_memory_go_back(strict, torch):
    source = bfc.SimulatedSubAllocator("100 MiB")
    options = {"settings": "expandable_segments:True", "strict": strict, "torch": torch}
    with bfc.CachingAllocator(source, **options) as allocator:
        for _ in range(2):
            with pytest.raises(bfc.OutOfMemoryError):
                allocator.allocate_raw(200 * MIB)
        allocator.release_free_regions()
        assert len(source.reservations) == (4 if strict and torch == "2.11" else 0)
    assert source.reservations == {}


@HOW
def test_chunks_end_to_end_are_unmapped_one_by_one_as_upstream_does_or_at_once(strict):
    source = bfc.SimulatedSubAllocator("1 GiB")
    settings = "expandable_segments:True"
    with bfc.CachingAllocator(source, strict=strict, settings=settings) as allocator:
        allocator.deallocate_raw(allocator.allocate_raw(50 * MIB))
        assert allocator.release_free_regions() == 60 * MIB
    unmapped = [nbytes for kind, nbytes, _ in source.calls if kind == "unmap"]
    assert unmapped == ([20 * MIB] * 3 if strict else [60 * MIB])


@HOW
def test_row_55_a_released_pool_of_ours(make, strict):
    allocator = make(strict=strict)
    pool = bfc.MemPool(allocator)
    assert pool.use_count() == 1
    with bfc.use_mem_pool(pool):
        assert pool.use_count() == 2
        (live,) = taken(allocator, 30 * MIB)
    pool.release()
    allocator.deallocate_raw(live)
    assert counted(allocator, "reserved_bytes.all.current") == [30 * MIB]
    assert allocator.empty_cache() == 30 * MIB


def test_row_56_ours_empties_the_default_pools_inside_a_scope(make):
    allocator = make()
    cached(allocator, 30 * MIB)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        cached(allocator, 40 * MIB)
        assert allocator.empty_cache() == 30 * MIB
    assert pool_ids(allocator) == [pool.id]


@HOW
def test_row_56b_a_pool_of_ours_may_go_inside_another_scope(make, strict):
    allocator = make(strict=strict)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        cached(allocator, 30 * MIB)
    with bfc.use_mem_pool(bfc.MemPool(allocator)):
        pool.release()
        allocator.empty_cache()
    assert pool_ids(allocator) == []


@HOW
def test_row_57_a_scope_of_ours_is_for_one_thread(make, strict):
    allocator = make(strict=strict)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool), ThreadPoolExecutor(1) as other:
        other.submit(taken, allocator, 30 * MIB).result()
        taken(allocator, 30 * MIB)
    assert pool_ids(allocator) == [(0, 0), pool.id]


@HOW
def test_row_58_an_exception_leaves_a_scope_of_ours(make, strict):
    allocator = make(strict=strict)
    outer, inner = bfc.MemPool(allocator), bfc.MemPool(allocator)
    with bfc.use_mem_pool(outer):
        with pytest.raises(ZeroDivisionError), bfc.use_mem_pool(inner):
            raise ZeroDivisionError
        taken(allocator, 30 * MIB)
    taken(allocator, 30 * MIB)
    assert pool_ids(allocator) == [outer.id, (0, 0)]
    assert outer.id != inner.id


@HOW
def test_row_60d_a_lender_of_ours_may_be_in_use_elsewhere(make, strict):
    allocator = make(40, strict=strict)
    pool = bfc.MemPool(allocator, use_on_oom=True)
    with bfc.use_mem_pool(pool):
        (block,) = cached(allocator, 40 * MIB)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(taken, allocator, 30 * MIB).result() == [block]
        assert pool.use_count() == 2


@HOW
def test_row_81_ours_leaves_actions_out(make, strict):
    allocator = make(strict=strict)
    allocator.record_history("all", skip_actions=["free_requested"])
    cached(allocator, 30 * MIB)
    seen = [entry.action for entry in allocator.history()]
    assert seen == ["segment_alloc", "alloc", "free_completed"]
    with pytest.raises(ValueError, match="no such"):
        allocator.record_history("all", skip_actions=["no such"])


@HOW
def test_row_82_a_dump_of_ours_is_seen_in_the_next(make, strict):
    allocator = make(strict=strict)
    taken(allocator, 30 * MIB)
    allocator.record_history("all")
    first, second = (allocator.snapshot().to_torch()["device_traces"][0] for _ in range(2))
    assert [entry["action"] for entry in first] == []
    assert [(entry["action"], entry["size"]) for entry in second] == [("snapshot", 30 * MIB)]


@HOW
def test_row_83_a_dump_of_ours_is_a_pickle_of_protocol_4(make, strict, tmp_path):
    allocator = make(strict=strict)
    allocator.record_history("all", context="all")
    taken(allocator, 30 * MIB, 512)
    allocator.dump(tmp_path / "dump.pickle")
    data = (tmp_path / "dump.pickle").read_bytes()
    operations = list(pickletools.genops(data))
    assert operations[0][:2] == (operations[0][0], 4)
    assert not [code.name for code, _, _ in operations if code.proto > 4]
    # Built-in types alone: nothing is imported when it is read.
    assert not {"GLOBAL", "STACK_GLOBAL"} & {code.name for code, _, _ in operations}
    dump = pickle.loads(data)
    assert [segment["total_size"] for segment in dump["segments"]] == [30 * MIB, 2 * MIB]
    assert [entry["action"] for entry in dump["device_traces"][0]] == ["segment_alloc", "alloc"] * 2
    assert {"allocator_settings", "external_annotations"} <= dump.keys()


@HOW
@pytest.mark.parametrize(("torch", "more"), [("2.11", []), ("2.15", [REJECTIONS])])
def test_row_84_the_statistics_of_ours_before_any_allocation(make, strict, torch, more):
    stats = make(strict=strict, torch=torch).memory_stats()
    assert list(stats) == sorted([*STATS, *more])
    assert stats.pop("max_split_size") == -1
    assert set(stats.values()) == {0}


# -- bad input ------------------------------------------------------------------------------------


def test_a_scope_left_twice_or_never_entered(make):
    allocator = make()
    pool = bfc.MemPool(allocator)
    with pytest.raises(RuntimeError):
        bfc.use_mem_pool(pool).__exit__(None, None, None)
    context = bfc.use_mem_pool(pool)
    with context:
        taken(allocator, 30 * MIB)
    with pytest.raises(RuntimeError):
        context.__exit__(None, None, None)
    taken(allocator, 30 * MIB)
    assert pool_ids(allocator) == [pool.id, (0, 0)]
    assert pool.use_count() == 1


def test_scopes_left_in_the_wrong_order(make):
    allocator = make()
    outer, inner = bfc.MemPool(allocator), bfc.MemPool(allocator)
    first, second = bfc.use_mem_pool(outer), bfc.use_mem_pool(inner)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    taken(allocator, 30 * MIB)  # the inner one still holds
    second.__exit__(None, None, None)
    taken(allocator, 30 * MIB)
    assert pool_ids(allocator) == [inner.id, (0, 0)]
    assert outer.use_count() == inner.use_count() == 1


def test_a_scope_left_on_another_thread(make):
    allocator = make()
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool) as _, ThreadPoolExecutor(1) as other:
        context = bfc.use_mem_pool(pool)
        other.submit(context.__enter__).result()
        with pytest.raises(RuntimeError):
            context.__exit__(None, None, None)
        other.submit(context.__exit__, None, None, None).result()
    assert pool.use_count() == 1


def test_a_pool_used_after_its_release(make):
    allocator = make()
    pool = bfc.MemPool(allocator)
    pool.release()
    pool.release()  # once more does nothing
    with pytest.raises(RuntimeError, match="make another"):
        bfc.use_mem_pool(pool).__enter__()
    assert pool.use_count() == 0
    assert pool.snapshot().regions == ()
    taken(allocator, 30 * MIB)
    assert pool_ids(allocator) == [(0, 0)]


def test_a_pool_released_inside_its_scope(make):
    allocator = make()
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        with pytest.raises(RuntimeError, match="in use"):
            pool.release()
        cached(allocator, 30 * MIB)
    pool.release()
    assert pool_ids(allocator) == []


def test_a_pool_that_is_collected_while_its_blocks_live(make):
    allocator = make()
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        (live,) = taken(allocator, 30 * MIB)
    del pool
    gc.collect()
    assert counted(allocator, "allocated_bytes.all.current") == [30 * MIB]
    allocator.deallocate_raw(live)
    assert allocator.empty_cache() == 30 * MIB


def test_a_pool_is_of_one_allocator(make):
    ours, other = make(), make()
    pool = bfc.MemPool(other)
    with bfc.use_mem_pool(pool):
        taken(ours, 30 * MIB)
        taken(other, 30 * MIB)
    assert pool_ids(ours) == [(0, 0)]
    assert pool_ids(other) == [pool.id]


def test_what_is_no_pool(make):
    with pytest.raises(TypeError):
        bfc.use_mem_pool((0, 1)).__enter__()
    with pytest.raises(TypeError):
        bfc.MemPool(bfc.BFCAllocator(bfc.SimulatedSubAllocator(MIB)))


def test_a_pool_outlives_its_allocator(make):
    allocator = make()
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        taken(allocator, 30 * MIB)
    allocator.close()
    with pytest.raises(bfc.ClosedError), bfc.use_mem_pool(pool):
        pass
    pool.release()


def test_what_an_observer_is_told(make):
    seen: list[tuple[int, ...]] = []
    for options, total in (({}, 16 * MIB), ({"memory_limit": 10 * MIB}, 10 * MIB)):
        allocator = make(16, **options)
        observer = lambda *facts: seen.append(facts)  # noqa: E731 - one object, to detach
        allocator.attach_oom_observer(observer)
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(4 * MIB)
        assert seen.pop() == (0, 20 * MIB, total, 16 * MIB)
        allocator.detach_oom_observer(observer)
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(4 * MIB)
        assert seen == []


@pytest.fixture
def reported(monkeypatch) -> list[type[BaseException]]:
    """What `sys.unraisablehook` was told."""
    kinds: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda entry: kinds.append(entry.exc_type))
    return kinds


def fails(*facts: int) -> bool:
    raise ZeroDivisionError


def test_an_observer_that_raises(make, reported):
    allocator = make(16)
    seen: list[int] = []
    allocator.attach_oom_observer(fails)
    allocator.attach_oom_observer(lambda *facts: seen.append(facts[1]))
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(4 * MIB)
    assert reported == [ZeroDivisionError]
    assert seen == [20 * MIB]  # the others are told all the same
    assert counted(allocator, "num_ooms") == [1]
    taken(allocator, 512)


def test_an_observer_that_allocates(make):
    allocator = make(16)
    blocks: list[int] = []
    allocator.attach_oom_observer(lambda *facts: blocks.extend(taken(allocator, 512)))
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(4 * MIB)
    assert counted(allocator, "num_ooms", "allocation.all.current") == [1, 1]
    allocator.deallocate_raw(*blocks)


def test_an_observer_whose_allocation_fails_too(make):
    allocator = make(16)
    calls: list[int] = []

    def again(*facts: int) -> None:
        calls.append(1)
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(4 * MIB)

    allocator.attach_oom_observer(again)
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_raw(4 * MIB)
    assert calls == [1]  # the second refusal calls no observer
    assert counted(allocator, "num_ooms") == [2]


@HOW
def test_a_callback_that_frees(make, strict):
    allocator = make(40, strict=strict)
    blocks = taken(allocator, 40 * MIB)

    def give_up() -> bool:
        if not blocks:
            return False
        allocator.deallocate_raw(blocks.pop())
        return True

    allocator.add_free_memory_callback(give_up)
    assert taken(allocator, 30 * MIB)
    assert counted(allocator, "num_alloc_retries", "num_device_alloc") == [0, 1]
    allocator.remove_free_memory_callback(give_up)


@HOW
def test_every_callback_runs_on_a_miss_and_none_on_a_hit(make, strict):
    allocator = make(strict=strict)
    runs: list[str] = []
    allocator.add_free_memory_callback(lambda: runs.append("first") is None)
    allocator.add_free_memory_callback(lambda: bool(runs.append("second")))
    cached(allocator, 30 * MIB)
    assert runs == ["first", "second"]
    cached(allocator, 30 * MIB)
    assert runs == ["first", "second"]


def test_a_callback_that_raises(make, reported):
    allocator = make()
    allocator.add_free_memory_callback(fails)
    taken(allocator, 30 * MIB)
    assert reported == [ZeroDivisionError]
    allocator.remove_free_memory_callback(fails)
    taken(allocator, 30 * MIB)
    assert len(reported) == 1


def test_a_callback_that_allocates(make):
    allocator = make()
    runs: list[int] = []
    allocator.add_free_memory_callback(lambda: bool(runs.extend(taken(allocator, 512))))
    taken(allocator, 30 * MIB)
    assert len(runs) == 1  # its own miss calls no callback
    assert counted(allocator, "allocation.all.current") == [2]


def test_what_was_never_attached_is_not_detached(make):
    allocator = make()
    with pytest.raises(ValueError, match="not"):
        allocator.detach_oom_observer(print)
    with pytest.raises(ValueError, match="not"):
        allocator.remove_free_memory_callback(print)


# -- peaks ----------------------------------------------------------------------------------------


def test_memory_that_a_failed_free_leaves_to_its_owner_is_in_the_peak(make):
    """Its device takes memory from its own allocator when it is asked for a fence, and fails."""
    device = Misbehaving("1 GiB", asynchronous=True)
    allocator = make(device=device)
    ptr = allocator.allocate_raw(5 * MIB)
    allocator.record_stream(ptr, SIDE)
    fault = bfc.SubAllocatorError("no fence")
    device.on("fence", first=lambda: allocator.allocate_raw(3 * MIB), raises=fault)
    with pytest.raises(bfc.SubAllocatorError):
        allocator.deallocate_raw(ptr)
    stats = allocator.memory_stats()
    assert stats["allocated_bytes.all.peak"] == stats["allocated_bytes.large_pool.peak"] == 8 * MIB
    assert stats["allocation.all.peak"] == stats["allocation.large_pool.peak"] == 2


def test_what_closes_keeps_its_peaks(make):
    allocator = make()
    pieces = [allocator.allocate_raw(size) for size in (1 * MIB, 1000, 3 * MIB, 5 * MIB, 3 * MIB)]
    for ptr in pieces[::2]:
        allocator.deallocate_raw(ptr)
    before = allocator.memory_stats()
    assert before["inactive_split.all.peak"] == before["inactive_split.all.current"] > 3
    allocator.close()
    after = allocator.memory_stats()
    for name in STATS:
        if name.endswith(".peak"):
            assert after[name] == before[name], name
    assert after["inactive_split.all.current"] == after["inactive_split_bytes.all.current"] == 0
