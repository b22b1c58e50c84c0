"""The history of PyTorch's policy with its frames: bounded, whole, and each the caller's own."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

import bfc

MIB = 1 << 20
RING = 50
LET_BE = 1 << 14  # sets of frames that may be there before the unwanted ones are looked for


def frames_kept() -> int:
    """How many frames there are in this process."""
    gc.collect()
    return sum(type(one) is bfc.snapshots.snapshot.Frame for one in gc.get_objects())


def on_a_thread(work: Callable[[], None]) -> None:
    """Runs it where the stack is shallow, so that a set of frames is small."""
    faults: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised again below
            faults.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if faults:
        raise faults[0]


def cycle(allocator: bfc.CachingAllocator) -> None:
    allocator.deallocate_raw(allocator.allocate_raw(1000))


def drop(allocator: bfc.CachingAllocator) -> None:
    allocator.allocate(1000)


def fill_and_empty(allocator: bfc.CachingAllocator) -> None:
    """Regions come and go, each with frames of its own."""
    allocator.allocate(30 * MIB).free()
    allocator.empty_cache()


def be_refused(allocator: bfc.CachingAllocator) -> None:
    try:
        allocator.allocate_raw(1 << 40)
    except bfc.OutOfMemoryError:
        return
    raise AssertionError("there is no such memory")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("enabled", "work"),
    [("all", cycle), ("state", drop), ("all", fill_and_empty), ("all", be_refused)],
)
def test_a_full_ring_keeps_the_frames_of_what_it_shows(enabled, work) -> None:
    """Those that nothing refers to are dropped now and then, however long it goes on."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), strict=True)

    def run() -> None:
        allocator.record_history(enabled, max_entries=RING)
        before = frames_kept()
        live = allocator.allocate_raw(7 * MIB)
        deep = frames_kept() - before
        assert deep > 0
        for _ in range(LET_BE * 3 // 2):
            work(allocator)
        assert frames_kept() - before < (LET_BE + 3 * RING) * (deep + 2), "one call deeper"
        seen = allocator.history()
        assert len(seen) == (RING if enabled == "all" else 1)
        if work is not drop:  # nobody calls for the free of what is dropped
            assert all(one.frames for one in seen if one.action != "segment_free")
        (chunk,) = (one for one in allocator.snapshot().chunks() if one.ptr == live)
        assert chunk.frames, "what is live keeps its frames, however long ago it came"
        del seen, chunk
        allocator.record_history(None)
        assert allocator.history() == []
        assert frames_kept() == before

    on_a_thread(run)
    allocator.close()


def test_recording_may_be_turned_on_and_off_at_any_time() -> None:
    """A free whose allocation was not recorded is shown; what was recorded before is not."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    early = allocator.allocate_raw(1000)
    allocator.record_history(context="alloc")
    late = allocator.allocate_raw(1000)
    allocator.deallocate_raw(early)
    first = allocator.history()
    assert [(one.action, one.addr) for one in first] == [
        ("alloc", late),
        ("free_requested", early),
        ("free_completed", early),
    ]
    assert first[0].frames
    assert first[1].frames == first[2].frames == ()
    allocator.record_history(None)
    allocator.deallocate_raw(late)
    assert allocator.history() == []
    assert [chunk.frames for chunk in allocator.snapshot().chunks()] == [()]
    allocator.record_history(context="all")
    assert allocator.history() == []
    allocator.deallocate_raw(allocator.allocate_raw(1000))
    assert all(entry.frames for entry in allocator.history())
    allocator.close()


def test_the_frames_are_those_of_the_thread_that_allocated() -> None:
    """While the ring wraps, frames are dropped, and recording begins anew, under five threads."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("4 GiB"))
    allocator.record_history(max_entries=500)
    faults: list[str] = []
    live: dict[str, int] = {}
    begun = threading.Barrier(5)

    def allocate(namespace: dict[str, object], name: str) -> None:
        exec(f"def {name}():\n return allocator.allocate_raw(1000)", namespace)
        call = namespace[name]
        assert callable(call)
        begun.wait()
        live[name] = call()
        for _ in range(6000):
            allocator.deallocate_raw(call())

    names = [f"caller_{number}" for number in range(4)]
    spaces = [{"allocator": allocator} for _ in names]
    threads = [
        threading.Thread(target=allocate, args=both) for both in zip(spaces, names, strict=True)
    ]
    for thread in threads:
        thread.start()
    begun.wait()
    while any(thread.is_alive() for thread in threads):
        for entry in allocator.history():
            callers = [frame.name for frame in entry.frames if frame.name.startswith("caller_")]
            if entry.action == "alloc" and len(callers) > 1:
                faults.append(f"{entry}")
    for thread in threads:
        thread.join()
    assert faults == []
    chunks = [chunk for chunk in allocator.snapshot().chunks() if chunk.in_use]
    assert {chunk.frames[0].name: chunk.ptr for chunk in chunks} == live
    allocator.check()
    allocator.close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("depth", range(4))
def test_frames_that_find_no_room_lose_no_allocation(depth):
    """The block was handed out, then RecursionError raised: nobody had its address. The depth at
    which it begins says where the stack ends."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    allocator.record_history()
    got = []

    def deeper() -> None:
        got.append(allocator.allocate_raw(1000))
        deeper()

    def begin(depth: int) -> None:
        if depth:
            begin(depth - 1)
        else:
            deeper()

    with pytest.raises(RecursionError):
        begin(depth)
    assert allocator.memory_stats()["allocation.all.current"] == len(got)


@pytest.mark.parametrize("entries", [-1, 2**70])
def test_a_history_has_a_count_of_entries(entries):
    with pytest.raises(ValueError, match="max_entries is a count"):
        bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")).record_history(max_entries=entries)


@pytest.mark.parametrize("entries", ["7", 1.5])
def test_a_count_of_entries_is_an_integer(entries):
    with pytest.raises(TypeError):
        bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")).record_history(max_entries=entries)


def test_a_closed_allocator_records_nothing():
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    allocator.close()
    with pytest.raises(bfc.ClosedError):
        allocator.record_history()
    gc.collect()
