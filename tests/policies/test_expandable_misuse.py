"""Expandable segments on sources that misbehave, among threads, signals and forks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import waiting
from wayward import INSIDE, KINDS, NO_ADDRESSES, Inside, Liar, assert_empty, holds, on_threads
from wayward import fill as fill_memory

import bfc
from bfc.testing.sources import Misbehaving

MIB = 1 << 20
SETTINGS = "expandable_segments:True"
BOTH = pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])


def made(device: bfc.SubAllocator, strict: bool = False, **more: Any) -> bfc.CachingAllocator:
    return bfc.CachingAllocator(device, settings=SETTINGS, strict=strict, **more)


def work(allocator: bfc.CachingAllocator) -> None:
    """Makes each kind of call."""
    kept = allocator.allocate_raw(25 * MIB)
    allocator.deallocate_raw(allocator.allocate_raw(50 * MIB, 1))
    allocator.deallocate_raw(allocator.allocate_raw(45 * MIB))
    allocator.empty_cache()
    allocator.deallocate_raw(allocator.allocate_raw(1000))
    allocator.deallocate_raw(kept)
    allocator.empty_cache()


# -- wrong answers ---------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("answer", NO_ADDRESSES, ids=repr)
def test_an_answer_that_is_no_address_is_refused_in_words(answer: Any, strict: bool) -> None:
    device = Liar("400 MiB")
    allocator = made(device, strict)
    device.answers = {"reserve": answer}
    with pytest.raises(bfc.SubAllocatorError, match="reserve returned"):
        allocator.allocate_raw(MIB)
    allocator.check()
    work(allocator)
    allocator.close()
    assert_empty(device)


@BOTH
@pytest.mark.parametrize("answer", ["page", 0.5, b"", [1], (), object], ids=repr)
def test_an_answer_that_is_no_page_is_refused_in_words(answer: Any, strict: bool) -> None:
    device = Liar("400 MiB")
    allocator = made(device, strict)
    device.answers = {"create": answer}
    with pytest.raises(bfc.SubAllocatorError, match="create returned"):
        allocator.allocate_raw(25 * MIB)
    allocator.check()
    assert allocator.stats().bytes_reserved == device.live_bytes == 0
    work(allocator)
    allocator.close()
    assert_empty(device)


@BOTH
@pytest.mark.parametrize("page", [-1, 0, 99, 1 << 200])
def test_a_page_that_does_not_exist_is_an_error_and_is_offered_again(
    page: int, strict: bool
) -> None:
    device = Liar("400 MiB")
    allocator = made(device, strict)
    device.answers = {"create": page}
    with pytest.raises(bfc.SubAllocatorError, match="there is no page"):
        allocator.allocate_raw(25 * MIB)
    allocator.check()
    assert allocator.stats().bytes_reserved == device.live_bytes == 0
    address = allocator.allocate_raw(25 * MIB)
    allocator.deallocate_raw(address)
    with pytest.raises(bfc.SubAllocatorError, match="there is no such page"):
        allocator.close()
    assert_empty(device)


@BOTH
def test_addresses_that_are_in_use_are_refused_and_not_given_back(strict: bool) -> None:
    device = Liar("400 MiB")
    allocator = made(device, strict)
    address = allocator.allocate_raw(25 * MIB)
    for overlapping in (*device.reservations, next(iter(device.reservations)) + 40 * MIB):
        device.answers = {"reserve": overlapping}
        with pytest.raises(bfc.SubAllocatorError, match="which is in use"):
            allocator.allocate_raw(25 * MIB, 1)
        allocator.check()
    assert len(device.reservations) == 1
    assert allocator.allocated_size(address) == 25 * MIB
    allocator.close()
    assert_empty(device)


# -- calls that go wrong from inside ---------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("kind", "n", "after"), INSIDE)
def test_a_source_that_uses_its_own_allocator(kind: str, n: int, after: bool, strict: bool) -> None:
    """It is served, or refused: it never waits for itself."""
    device = Inside("400 MiB", after)
    allocator = made(device, strict)
    got: list[int] = []

    def use() -> None:
        with suppress(bfc.OutOfMemoryError, bfc.SubAllocatorError):
            got.append(allocator.allocate_raw(45 * MIB, 3))
        with suppress(bfc.OutOfMemoryError, bfc.SubAllocatorError):
            got.append(allocator.allocate_raw(1000))
        allocator.empty_cache()
        allocator.release_free_regions()
        allocator.page_stats()

    device.order(kind, n, use)
    with suppress(bfc.OutOfMemoryError):
        work(allocator)
    allocator.check()
    for address in got:
        allocator.deallocate_raw(address)
    work(allocator)
    assert device.live_bytes == allocator.stats().bytes_reserved == 0
    allocator.close()
    assert_empty(device)


@BOTH
@pytest.mark.parametrize(("kind", "n", "after"), INSIDE)
def test_a_source_that_closes_its_allocator(kind: str, n: int, after: bool, strict: bool) -> None:
    device = Inside("400 MiB", after)
    allocator = made(device, strict)
    closed = []

    def close() -> None:
        allocator.close()
        closed.append(True)

    device.order(kind, n, close)
    with suppress(bfc.ClosedError, bfc.InvalidPointerError, bfc.OutOfMemoryError):
        work(allocator)
    allocator.close()
    assert_empty(device)
    assert closed or kind in ("reserve", "wait", "unreserve")


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_out_of_a_source(kind: str, strict: bool) -> None:
    """The caller gets what is not an Exception as it is, and nothing is lost."""
    device = Inside("400 MiB", after=False)
    allocator = made(device, strict)

    def interrupt() -> None:
        raise KeyboardInterrupt

    device.order(kind, 1, interrupt)
    with pytest.raises(KeyboardInterrupt):
        work(allocator)
    allocator.check()
    allocator.release_free_regions()
    allocator.close()
    assert_empty(device)


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_any_error_of_a_source_is_one_that_a_program_expects(kind: str, strict: bool) -> None:
    """What a source raises arrives as it is, or as the cause of a SubAllocatorError."""
    device = bfc.SimulatedSubAllocator("400 MiB")
    source = Misbehaving(device)
    allocator = made(source, strict)
    source.raise_at(1, OSError("unplugged"), kind)
    with pytest.raises((OSError, bfc.SubAllocatorError), match="unplugged"):
        work(allocator)
    allocator.check()
    allocator.close()
    assert_empty(device)


@BOTH
def test_a_wait_that_fails_leaves_the_block_free(strict: bool) -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = made(device, strict)
    address = allocator.allocate_raw(25 * MIB)
    allocator.deallocate_raw(address)
    device.fail_at(1, "wait")
    with pytest.raises(bfc.SubAllocatorError, match="wait"):
        allocator.empty_cache()
    assert allocator.stats().bytes_reserved == device.live_bytes == 40 * MIB
    assert allocator.page_stats()["lost_slots"] == 0
    before = len(device.calls)
    assert allocator.allocate_raw(25 * MIB) == address
    assert device.calls[before:] == []


@BOTH
def test_a_page_whose_release_fails_counts_and_is_released_later(strict: bool) -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = made(device, strict, memory_limit="40 MiB")
    allocator.deallocate_raw(allocator.allocate_raw(25 * MIB))
    device.fail_at(1, "release")
    with pytest.raises(bfc.SubAllocatorError, match="release"):
        allocator.empty_cache()
    stats = allocator.page_stats()
    assert (stats["pages"], stats["lost_slots"], stats["lost_bytes"]) == (1, 0, 20 * MIB)
    device.fail_at(range(1, 9), "release")
    with pytest.raises((bfc.OutOfMemoryError, bfc.SubAllocatorError)):
        allocator.allocate_raw(40 * MIB)
    device.fail_at(0, "release")
    allocator.release_free_regions()
    assert allocator.page_stats()["lost_bytes"] == device.live_bytes == 0
    assert allocator.allocate_raw(40 * MIB)


@BOTH
def test_what_a_failed_map_leaves_mapped_is_not_handed_out(strict: bool) -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = made(device, strict)
    device.fail_at(3, "map")
    device.fail_at(1, "unmap")
    with pytest.raises(bfc.SubAllocatorError, match="still mapped"):
        allocator.allocate_raw(60 * MIB)
    assert device.live_bytes == allocator.stats().bytes_reserved == 40 * MIB
    assert allocator.page_stats()["lost_slots"] == 2
    lost = next(iter(device.reservations))
    address = allocator.allocate_raw(60 * MIB)
    assert address >= lost + 40 * MIB
    assert allocator.release_free_regions() == 40 * MIB
    assert allocator.page_stats()["lost_slots"] == 0
    allocator.close()
    assert_empty(device)


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.skipif(sys.platform != "linux", reason="host memory is mapped on Linux")
@BOTH
def test_threads_that_allocate_free_and_empty_at_once(strict: bool) -> None:
    """Each writes what it got, and reads it back: none is given to two, or unmapped."""
    host = bfc.HostSubAllocator("2 GiB")
    allocator = made(host, strict)

    def use(number: int) -> None:
        dice = np.random.default_rng(number)
        live: list[tuple[int, int, int]] = []
        for step in range(150):
            if len(live) > 4 or (live and dice.random() < 0.4):
                address, nbytes, value = live.pop(int(dice.integers(len(live))))
                assert holds(address, nbytes, value)
                allocator.deallocate_raw(address)
            elif dice.random() < 0.15:
                allocator.empty_cache()
            else:
                nbytes = int(dice.choice([700, 300_000, 3 * MIB, 25 * MIB]))
                address = allocator.allocate_raw(nbytes, int(dice.integers(2)))
                value = (number * 60 + step) % 251
                fill_memory(address, nbytes, value)
                live.append((address, nbytes, value))
        for address, nbytes, value in live:
            assert holds(address, nbytes, value)
            allocator.deallocate_raw(address)

    on_threads(use)
    allocator.check()
    allocator.release_free_regions()
    assert host.live_bytes == allocator.stats().bytes_reserved == 0
    allocator.close()


@BOTH
def test_a_thread_closes_while_others_map(strict: bool) -> None:
    for _ in range(10):
        device = Misbehaving(inner := bfc.SimulatedSubAllocator("4 GiB"))
        allocator = made(device, strict)
        ready = threading.Barrier(4)

        def use(number: int, allocator=allocator, ready=ready) -> None:
            ready.wait()
            if number == 0:
                allocator.close()
                return
            with suppress(bfc.ClosedError, bfc.InvalidPointerError):
                for _ in range(50):
                    address = allocator.allocate_raw(25 * MIB * number, number)
                    allocator.deallocate_raw(address)
                    allocator.empty_cache()

        on_threads(use)
        assert_empty(inner)


class Stopped(bfc.SimulatedSubAllocator):
    """Stops in its first call of a kind until it is let go."""

    def __init__(self, capacity: str, kind: str) -> None:
        super().__init__(capacity)
        self.kind = kind
        self.inside, self.go = threading.Event(), threading.Event()

    def _stop(self, kind: str) -> None:
        if kind == self.kind and not self.inside.is_set():
            self.inside.set()
            assert self.go.wait(waiting.DEADLINE)

    def create(self, nbytes: int) -> int | None:
        self._stop("create")
        return super().create(nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        self._stop("unmap")
        super().unmap(address, nbytes)


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@BOTH
@pytest.mark.parametrize("kind", ["create", "unmap"])
def test_a_thread_waits_for_the_mapping_of_another(kind: str, strict: bool) -> None:
    device = Stopped("400 MiB", kind)
    allocator = made(device, strict)
    if kind == "unmap":
        allocator.deallocate_raw(allocator.allocate_raw(25 * MIB))
    first = started(
        allocator.empty_cache if kind == "unmap" else lambda: allocator.allocate_raw(25 * MIB)
    )
    assert device.inside.wait(waiting.DEADLINE)
    got: list[int] = []
    second = started(lambda: got.append(allocator.allocate_raw(300 * MIB, 1)))
    second.join(0.05)
    assert second.is_alive()
    assert not got
    allocator.check()
    allocator.empty_cache()  # comes back, and leaves what is being unmapped alone
    device.go.set()
    waiting.joined(first)
    waiting.joined(second)
    assert got
    allocator.check()
    allocator.close()
    assert_empty(device)


def test_buffers_that_are_collected_while_memory_is_mapped() -> None:
    """Finalisers free inside the calls of a source, wherever the collector runs."""
    import gc

    device = bfc.SimulatedSubAllocator("4 GiB")
    allocator = made(device)
    limits = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for step in range(300):
            cycle: list[object] = [allocator.allocate((step % 7 * 9 + 1) * MIB, step % 3)]
            cycle.append(cycle)
            del cycle
            if step % 20 == 0:
                allocator.empty_cache()
    finally:
        gc.set_threshold(*limits)
    gc.collect()
    allocator.check()
    allocator.release_free_regions()
    assert allocator.stats().bytes_reserved == device.live_bytes == 0
