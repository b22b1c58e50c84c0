"""What other threads and forked children do while an allocator maps memory for one thread."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import own_interpreter
import pytest
from page_ledger import LedgerDevice, PageLedger
from stopped_thread import STOPPED
from waiting import DEADLINE, Halt

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20

Make = Callable[[bfc.SubAllocator], Any]
MAKES = {
    "bfc": lambda device: bfc.BFCAllocator(device, virtual_memory=True, page_size="2 MiB"),
    "caching": lambda device: bfc.CachingAllocator(device, stitch=True),
    "expandable": lambda device: bfc.CachingAllocator(device, settings="expandable_segments:True"),
}


def of_one_allocation(allocator: Any) -> object:
    return allocator.allocate("5 MiB", contiguous=True)


def of_a_private_pool(allocator: Any) -> object:
    with bfc.use_mem_pool(bfc.MemPool(allocator)):
        return allocator.allocate("5 MiB")


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (MAKES["bfc"], of_one_allocation),
        (MAKES["caching"], of_one_allocation),
        (MAKES["caching"], of_a_private_pool),
        (MAKES["expandable"], of_one_allocation),
    ],
)
def test_what_another_thread_takes_while_addresses_are_reserved(
    make: Make, other: Callable[[Any], object]
) -> None:
    """It is not mixed up with the lane that gets them."""
    device, halt = Misbehaving("1 GiB"), Halt()
    device.on("reserve", first=halt)
    with make(device) as allocator:
        mapped: list[Any] = []
        thread = threading.Thread(target=lambda: mapped.append(allocator.allocate("10 MiB")))
        thread.start()
        assert halt.inside.wait(DEADLINE)
        region: Any = other(allocator)
        halt.go.set()
        thread.join()
        allocator.check()
        apart = {mapped[0].ptr, region.ptr}
        del region
        more = [allocator.allocate("3 MiB") for _ in range(20)]
        allocator.check()
        assert apart.isdisjoint(block.ptr for block in more[1:])
        mapped.clear()
        del more
        allocator.check()
    assert not device.live_bytes
    assert not device.reservations


@pytest.mark.parametrize("name", MAKES)
def test_a_history_says_which_thread_has_emptied_the_cache(name: str) -> None:
    """Another thread empties it, too, while the first one is in the driver, and finds nothing."""
    device, halt = Misbehaving("1 GiB"), Halt()
    device.on("unmap", first=halt)
    with MAKES[name](device) as allocator:
        allocator.record_history()
        for block in [allocator.allocate("5 MiB", stream) for stream in range(3)]:
            block.free()

        def first() -> None:
            allocator.release_free_regions()

        thread = threading.Thread(target=first)
        thread.start()
        assert halt.inside.wait(DEADLINE)
        allocator.release_free_regions()
        halt.go.set()
        thread.join()
        gone = [entry for entry in allocator.history() if entry.action == "segment_unmap"]
        assert len(gone) == 3
        for entry in gone:
            assert [frame.name for frame in entry.frames[:2]] == ["empty_cache", "first"]


@pytest.mark.parametrize("name", MAKES)
def test_two_streams_that_begin_at_once_stay_apart(name: str) -> None:
    device, halt = Misbehaving("1 GiB"), Halt()
    device.on("reserve", first=halt)
    with MAKES[name](device) as allocator:
        found: dict[int, int] = {}

        def begin(stream: int) -> None:
            found[stream] = allocator.allocate_raw(5 * MIB, stream=stream)

        threads = [threading.Thread(target=begin, args=(stream,)) for stream in (0, 6)]
        threads[0].start()
        assert halt.inside.wait(DEADLINE)
        threads[1].start()
        threads[1].join(0.2)  # most probably it waits by now for the thread that maps
        halt.go.set()
        for thread in threads:
            thread.join()
        allocator.check()
        assert {chunk.stream for chunk in allocator.snapshot().live_chunks()} == {0, 6}
        device.hold(0)
        allocator.deallocate_raw(found[0])
        assert allocator.allocate_raw(5 * MIB, stream=6) != found[0]


@pytest.mark.parametrize("name", ["bfc", "caching"])
def test_a_child_stitches_after_a_fork_while_another_thread_stitches(name: str) -> None:
    """The view that the thread had begun is nobody's there."""
    own_interpreter.run(
        STOPPED
        + f"""
made = {{
    "bfc": lambda it: bfc.BFCAllocator(it, virtual_memory=True, page_size="2 MiB"),
    "caching": lambda it: bfc.CachingAllocator(it, stitch=True),
}}[{name!r}]
"""
        + """
for kind in ("reserve", "map", "set_access"):
    for is_after in (False, True):
        device = Stopped("64 MiB")
        allocator = made(device)
        blocks = [allocator.allocate_raw(4 << 20) for _ in range(16)]
        for block in blocks[::2]:
            allocator.deallocate_raw(block)
        Stopped.kind, Stopped.is_after = kind, is_after
        Stopped.inside, Stopped.go = threading.Event(), threading.Event()
        thread = threading.Thread(target=allocator.allocate_raw, args=(20 << 20,))
        thread.start()
        assert device.inside.wait(30)

        def in_the_child():
            stitched = allocator.page_stats()["stitches"]
            live = [allocator.allocate_raw(size << 20) for size in (6, 10, 3)]
            assert allocator.page_stats()["stitches"] > stitched
            allocator.check()
            for block in live + blocks[1::2]:
                allocator.deallocate_raw(block)
            allocator.check()
            allocator.close()

        wait = in_child(in_the_child)
        wait()
        device.go.set()
        thread.join()
        allocator.check()
        allocator.close()
"""
    )


@pytest.mark.parametrize("settings", ["stitch=True", "settings='expandable_segments:True'"])
def test_a_child_closes_what_was_to_get_addresses_at_the_fork(settings: str) -> None:
    own_interpreter.run(
        STOPPED
        + f"""
device = Stopped("64 MiB")
allocator = bfc.CachingAllocator(device, {settings})
Stopped.kind = "reserve"
"""
        + """
thread = threading.Thread(target=allocator.allocate_raw, args=(20 << 20,))
thread.start()
assert device.inside.wait(30)

def in_the_child():
    allocator.deallocate_raw(allocator.allocate_raw(5 << 20))
    allocator.check()
    allocator.close()
    assert not device.live_bytes and not device.reservations

wait = in_child(in_the_child)
wait()
device.go.set()
thread.join()
allocator.close()
"""
    )


def test_live_memory_of_other_ranges_stays_after_a_fork_while_one_grows() -> None:
    own_interpreter.run(
        """
class Stopped(bfc.HostSubAllocator):
    armed, inside, go = False, threading.Event(), threading.Event()

    def set_access(self, *arguments):
        if self.armed:
            Stopped.armed = False
            self.inside.set()
            self.go.wait(30)
        return super().set_access(*arguments)

import numpy as np
device = Stopped("256 MiB")
allocator = bfc.CachingAllocator(device, settings="expandable_segments:True")
small, large = allocator.allocate(1000), allocator.allocate("5 MiB")
for buffer in (small, large):
    np.asarray(buffer)[:] = 7
Stopped.armed = True
thread = threading.Thread(target=allocator.allocate, args=("50 MiB",))
thread.start()
assert device.inside.wait(30)

def in_the_child():
    allocator.check()
    more = allocator.allocate("30 MiB")
    allocator.release_free_regions()
    allocator.check()
    assert all((np.asarray(buffer) == 7).all() for buffer in (small, large))

wait = in_child(in_the_child)
wait()
device.go.set()
thread.join()
"""
    )


# -- what others free, take and close between two calls of the device ------------------------------


def use_and_free(allocator: Any, ledger: PageLedger, nbytes: int) -> None:
    """Queues work on stream 5 that lasts, in memory that is free already before the work is done.

    Inside of a call of the device nothing is mapped for it, and nothing is waited for.
    """
    with suppress(bfc.OutOfMemoryError):
        ptr = allocator.allocate_raw(nbytes, 5)
        ledger.take(ptr, 5)
        ledger.device.hold(5)
        ledger.give_back(ptr)
        allocator.deallocate_raw(ptr)


@pytest.mark.parametrize("name", ["bfc", "caching"])
def test_memory_that_is_freed_while_trim_runs_stays_until_its_work_is_done(name: str) -> None:
    """That its stream was idle when another range of it was trimmed says nothing of this memory."""
    device = Misbehaving(LedgerDevice("1 GiB", is_late=True))
    allocator = MAKES[name](device)
    ledger = PageLedger(device.inner, allocator)
    small, large = allocator.allocate_raw(1000, 5), allocator.allocate_raw(20 * MIB, 5)
    for ptr in (small, large):
        allocator.deallocate_raw(ptr)
    device.on("unmap", 1, then=lambda: use_and_free(allocator, ledger, 20 * MIB))
    allocator.trim()
    ledger.read()
    assert device.is_held(5)
    assert device.live_bytes == 20 * MIB
    allocator.trim(wait=True)
    ledger.read()
    assert device.live_bytes == 0
    allocator.close()
    ledger.examine_closed()


@pytest.mark.parametrize("name", ["bfc", "caching"])
@pytest.mark.parametrize("number", range(1, 6))
def test_a_view_that_is_used_again_after_its_fence_stays(name: str, number: int) -> None:
    device = Misbehaving(LedgerDevice("1 GiB", is_late=True))
    allocator = MAKES[name](device)
    ledger = PageLedger(device.inner, allocator)
    blocks = [allocator.allocate_raw(4 * MIB, 5) for _ in range(8)]
    for ptr in blocks[::2]:
        allocator.deallocate_raw(ptr)
    allocator.deallocate_raw(allocator.allocate_raw(12 * MIB, 5))
    assert allocator.page_stats()["views"] == 1
    device.on("fence", number, then=lambda: use_and_free(allocator, ledger, 12 * MIB))
    allocator.trim()
    ledger.read()
    allocator.check()
    device.inner.finish(5)
    allocator.close()
    ledger.examine_closed()


def sleepers(device: Misbehaving) -> tuple[Any, list[Any], list[Any]]:
    """Views of one tag: some that are live, and then one that nothing lives in."""
    allocator = MAKES["bfc"](device)
    with allocator.tag("a"):
        blocks = [allocator.allocate(4 * MIB) for _ in range(20)]
        for block in blocks[::2]:
            block.free()
        views = [allocator.allocate(size * MIB) for size in (12, 9, 8)]
        allocator.allocate(7 * MIB).free()
    assert allocator.page_stats()["views"] == 4
    return allocator, views, blocks[1::2]


def test_a_view_whose_buffer_is_freed_while_its_tag_falls_asleep_sleeps_too() -> None:
    """Its pages were released, and it stayed mapped."""
    device = Misbehaving(LedgerDevice("1 GiB", is_late=True))
    allocator, views, _blocks = sleepers(device)
    device.on("unmap", 1, then=views.pop(0).free)
    allocator.sleep()
    assert (device.live_bytes, device.mappings) == (0, {})
    allocator.check()
    allocator.wake()
    assert all(view.ptr in device.mappings for view in views)
    allocator.check()
    allocator.close()
    assert (device.live_bytes, device.reservations) == (0, {})


def test_a_view_whose_buffer_is_freed_while_its_tag_wakes_has_memory() -> None:
    """It was handed out again, and had none."""
    device = Misbehaving(LedgerDevice("1 GiB", is_late=True))
    allocator, views, _blocks = sleepers(device)
    allocator.sleep()
    views.pop(1).free()
    device.on("unreserve", 1, then=views.pop(0).free)
    allocator.wake()
    with allocator.tag("a"):
        again = allocator.allocate(12 * MIB)
    mapped = device.mappings
    assert all(again.ptr + done in mapped for done in range(0, 12 * MIB, 2 * MIB))
    allocator.check()
    allocator.close()
    assert (device.live_bytes, device.reservations) == (0, {})


@pytest.mark.parametrize("name", ["bfc", "caching"])
def test_a_signal_handler_closes_just_when_the_mapping_is_over(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the memory goes as well. The handler runs while Python's handlers are put back."""
    device = Misbehaving(LedgerDevice("1 GiB", is_late=True))
    allocator = MAKES[name](device)
    allocator.allocate(5 * MIB).free()

    def handle() -> None:
        signal.signal(signal.SIGUSR2, lambda *_: allocator.close())
        # the last call of the device runs no Python after the signal has come
        strike = partial(getattr(ctypes.CDLL(None), "raise"), int(signal.SIGUSR2))
        monkeypatch.setattr(device, "release", strike)

    before = signal.getsignal(signal.SIGUSR2)
    try:
        device.on("unmap", 1, then=handle)
        allocator.trim()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert allocator.closed
    assert not device.reservations
