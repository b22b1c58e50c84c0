"""Many allocations in one call: the same as one by one, or nothing at all."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from waiting import DEADLINE, called_by_others, joined, until

import bfc
from bfc.testing import Misbehaving

BASE = 1 << 40
MIB = 1 << 20
MAKERS: dict[str, Callable[[Any], bfc.Allocator]] = {
    "fixed": bfc.BFCAllocator,
    "growing": lambda source: bfc.BFCAllocator(source, allow_growth=True),
    "caching": bfc.CachingAllocator,
    "caching, strict": lambda source: bfc.CachingAllocator(source, strict=True),
}


def test_allocate_many_returns_an_array_of_addresses(make_allocator) -> None:
    allocator = make_allocator()
    ptrs = allocator.allocate_many([256, 0, 1000, np.int64(1)])
    assert ptrs.dtype == np.uint64
    assert ptrs.tolist() == [BASE, 0, BASE + 256, BASE + 256 + 1024]
    allocator.deallocate_many(ptrs)
    assert allocator.stats().bytes_in_use == 0


@pytest.mark.parametrize("sizes", [[], (), np.array([], np.int64), iter(())])
def test_allocate_many_of_nothing_is_empty(make_allocator, sizes: object) -> None:
    ptrs = make_allocator().allocate_many(sizes)
    assert (ptrs.dtype, ptrs.size) == (np.uint64, 0)


def test_allocate_many_takes_any_iterable(make_allocator) -> None:
    allocator = make_allocator()
    assert len(allocator.allocate_many(size for size in (1, 2, 3))) == 3
    assert len(allocator.allocate_many(np.array([1, 2], np.uint32))) == 2
    with pytest.raises(TypeError):
        allocator.allocate_many(5)


def test_allocate_many_is_all_or_nothing(make_allocator) -> None:
    allocator = make_allocator("1 MiB")
    kept = allocator.allocate_raw(256)
    before = allocator.snapshot().regions
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_many([MIB // 4] * 5)
    assert allocator.snapshot().regions == before
    assert allocator.requested_size(kept) == 256


def test_deallocate_many_frees_all_or_nothing(make_allocator) -> None:
    allocator = make_allocator()
    good = [int(ptr) for ptr in allocator.allocate_many([256] * 4)]
    for bad in ([*good, 12345], [*good, good[0]], [good[0] + 256 * 9], [*good, -1]):
        with pytest.raises(bfc.InvalidPointerError):
            allocator.deallocate_many(bad)
        assert [chunk.ptr for chunk in allocator.snapshot().live_chunks()] == good
    with pytest.raises(TypeError):
        allocator.deallocate_many([*good, "x"])
    allocator.deallocate_many([0, *good, 0])
    assert allocator.stats().bytes_in_use == 0


@pytest.mark.parametrize("method", ["allocate_many", "deallocate_many"])
@pytest.mark.parametrize("kind", [np.int8, np.int64, ">i4"])
def test_a_negative_number_in_an_array_is_refused(make_allocator, method: str, kind: Any) -> None:
    allocator = make_allocator()
    with pytest.raises((ValueError, bfc.InvalidPointerError)):
        getattr(allocator, method)(np.array([0, -1], kind))
    assert allocator.stats().num_allocs == 0


@pytest.mark.parametrize(
    "given", [np.array([256.0]), np.array([True]), np.array(["256"]), np.array([[256]])]
)
def test_an_array_of_what_is_no_number_of_bytes_is_refused(make_allocator, given: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        make_allocator().allocate_many(given)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, ">u4", np.uint64])
def test_arrays_of_any_ints_are_sizes(make_allocator, kind: Any) -> None:
    allocator = make_allocator()
    sizes = np.array([1, 0, 100, 1, 1, 7], kind)[::2]  # with gaps in memory
    assert allocator.allocate_many(sizes).tolist() == [BASE, BASE + 256, BASE + 512]
    found = [allocator.requested_size(BASE + 256 * i) for i in range(3)]
    assert found == sizes.tolist()


def test_what_another_object_views_keeps_all_of_them(make_allocator) -> None:
    allocator = bfc.BFCAllocator(bfc.HostSubAllocator("1 MiB"))
    buffer = allocator.allocate(1000)
    ptrs = [*allocator.allocate_many([256, 512]).tolist(), buffer.ptr]
    view = memoryview(buffer)
    with pytest.raises(BufferError, match="view"):
        allocator.deallocate_many(ptrs)
    assert allocator.stats().bytes_in_use == 1024 + 256 + 512
    view.release()
    allocator.deallocate_many(ptrs)
    assert allocator.stats().bytes_in_use == 0


def test_a_list_that_shrinks_while_it_is_read_counts_as_it_was(make_allocator) -> None:
    class Size:
        def __index__(self) -> int:
            sizes.clear()
            return 256

    sizes: list[Any] = [Size(), 256, 256]
    allocator = make_allocator()
    assert len(allocator.allocate_many(sizes)) == 3


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("make", MAKERS)
def test_many_are_placed_as_one_by_one(make: str, seed: int) -> None:
    """Runs that hit, grow and are refused, with memory that other streams use in between."""
    print(f"repeat: pytest -k 'test_many_are_placed_as_one_by_one and {make} and {seed}'")
    dice = random.Random(seed)
    at_once, one_by_one = (MAKERS[make](bfc.SimulatedSubAllocator("64 MiB")) for _ in range(2))
    live: list[int] = []
    for _ in range(60):
        sizes = [dice.choice((0, 1, 700, 5000, MIB, 3 * MIB)) for _ in range(dice.randrange(40))]
        stream = dice.choice((None, None, 7))
        try:
            got = at_once.allocate_many(np.array(sizes, np.int64), stream)
        except bfc.OutOfMemoryError:
            got = None
        try:
            made = [one_by_one.allocate_raw(size, stream) for size in sizes]
        except bfc.OutOfMemoryError:
            made = []
            assert got is None
            break  # what was given back meanwhile may have made regions differ from here on
        assert got is not None
        assert got.tolist() == made
        live += [ptr for ptr in made if ptr]
        for ptr in dice.sample(live, len(live) // 10):
            for allocator in (at_once, one_by_one):
                allocator.record_stream(ptr, 9)
        dice.shuffle(live)
        gone, live = live[: len(live) // 2], live[len(live) // 2 :]
        at_once.deallocate_many(dice.choice((list, np.array))(gone))
        for ptr in gone:
            one_by_one.deallocate_raw(ptr)
        assert at_once.stats() == one_by_one.stats()
    assert at_once.snapshot().regions == one_by_one.snapshot().regions or got is None
    at_once.check()


def test_a_history_has_every_one_of_many() -> None:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    allocator.record_history(context="all", stacks="python")
    allocator.deallocate_many(allocator.allocate_many([256, 0, 512]))
    actions = [entry.action for entry in allocator.snapshot().history]
    assert actions == ["segment_alloc", "alloc", "alloc", *["free_requested", "free_completed"] * 2]


def test_threads_that_free_the_same_list_free_it_once() -> None:
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    won: list[int] = []
    for _ in range(50):
        ptrs = allocator.allocate_many(np.full(300, 256))
        together = threading.Barrier(4)

        def free(ptrs: Any = ptrs, together: Any = together) -> None:
            together.wait()
            try:
                allocator.deallocate_many(ptrs)
            except bfc.InvalidPointerError:
                return
            won.append(1)

        threads = [threading.Thread(target=free) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(won) == 50
    assert allocator.stats().bytes_in_use == 0


def test_memory_that_a_replay_holds_is_nobodys_address(make_allocator) -> None:
    """One of the list is freed, and replayed into, while an earlier one's free asks the device."""

    def meanwhile() -> None:
        allocator.deallocate_raw(last)
        thread.start()
        placed.wait(DEADLINE)

    def replay() -> None:
        trace = bfc.Trace([0], [0], [256])
        trace.replay(allocator, progress=lambda done: (placed.set(), is_over.wait(DEADLINE)))

    device = Misbehaving("1 MiB", asynchronous=True)
    device.on("fence", then=meanwhile)
    allocator = bfc.BFCAllocator(device)
    placed, is_over = threading.Event(), threading.Event()
    thread = threading.Thread(target=replay)
    first, last = allocator.allocate_many([256, 256]).tolist()
    allocator.record_stream(first, 7)
    try:
        with pytest.raises(bfc.InvalidPointerError):
            allocator.deallocate_many([first, last])
    finally:
        is_over.set()
    thread.join()
    assert [chunk.ptr for chunk in allocator.snapshot().live_chunks()] == [last]
    allocator.check()


@pytest.mark.parametrize("make", ["many", "replay"])
def test_a_miss_counts_as_one_search_as_one_by_one(make: str) -> None:
    """The ages of free regions are counted in searches: what is as old as the average goes back."""
    trace = bfc.Trace(
        [0, 0, 0, 0, 1, 1, 0, 1, 0, 1, 0],
        [0, 1, 2, 3, 3, 0, 4, 1, 5, 2, 6],
        [size * MIB for size in (20, 22, 24, 40, 0, 0, 50, 0, 40, 0, 60)],
    )
    rows = []
    for how in ("one by one", make):
        allocator = bfc.CachingAllocator(
            bfc.SimulatedSubAllocator("350 MiB"), garbage_collection_threshold=0.4
        )
        if how == "replay":
            trace.replay(allocator)
        else:
            ptrs: dict[int, Any] = {}
            for op, number, size in zip(trace.op, trace.id, trace.size, strict=True):
                if op:
                    allocator.deallocate_many([ptrs[number]])
                elif how == "many":
                    ptrs[number] = allocator.allocate_many([size])[0]
                else:
                    ptrs[number] = allocator.allocate_raw(size)
        rows.append([region.size // MIB for region in allocator.snapshot().regions])
    assert rows[0] == rows[1]
    assert sorted(rows[0]) == [24, 40, 50, 60]


@pytest.mark.parametrize("place", [1, 3])
def test_an_interrupt_of_the_way_back_leaves_nothing_live(place: int) -> None:
    device = Misbehaving("1 MiB", asynchronous=True)
    device.on("fence", place, raises=KeyboardInterrupt)
    allocator = bfc.BFCAllocator(device)
    with pytest.raises(KeyboardInterrupt):
        allocator.allocate_many([MIB // 4] * 5, stream=7)
    assert allocator.stats().bytes_in_use == 0
    allocator.check()


def test_a_device_that_fails_on_the_way_back_keeps_no_block_for_ever() -> None:
    device = Misbehaving("1 MiB", asynchronous=True)
    allocator = bfc.BFCAllocator(device)
    device.on("fence", raises=OSError("the device fell over"))
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate_many([MIB // 4] * 5, stream=7)
    device.off()
    allocator.release_free_regions()
    assert allocator.stats().bytes_in_use == 0
    allocator.check()


def test_each_of_many_keeps_its_frames() -> None:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))
    allocator.deallocate_raw(allocator.allocate_raw(256))
    allocator.record_history(context="all")
    allocator.deallocate_many(allocator.allocate_many([256, 512]))
    history = allocator.history()
    assert [len(entry.frames) > 0 for entry in history] == [True] * 6


def test_who_waits_for_memory_sees_a_list_that_is_freed() -> None:
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"), retry_seconds=60)
    ptrs = allocator.allocate_many([MIB // 2] * 2)
    thread = threading.Thread(target=allocator.allocate_raw, args=[MIB], daemon=True)
    has_looked = called_by_others(allocator)
    thread.start()
    until(has_looked)
    allocator.deallocate_many(ptrs)
    joined(thread)
    assert allocator.stats().bytes_in_use == MIB
