"""Stitching on sources that misbehave, among threads, and with finalisers."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from wayward import INSIDE, KINDS, NO_ADDRESSES, Inside, Liar, assert_empty, fill, holds, on_threads

import bfc
from bfc.testing.sources import Misbehaving

MIB = 1 << 20


def made(device: bfc.SubAllocator, **more: Any) -> Any:
    return bfc.BFCAllocator(device, virtual_memory=True, page_size="2 MiB", **more)


def work(allocator: Any) -> None:
    """Makes each kind of call."""
    kept = [allocator.allocate_raw(25 * MIB), allocator.allocate_raw(1000)]
    allocator.deallocate_raw(allocator.allocate_raw(50 * MIB, 1))
    blocks = [allocator.allocate_raw(4 * MIB) for _ in range(8)]
    for ptr in blocks[::2]:
        allocator.deallocate_raw(ptr)
    allocator.deallocate_raw(allocator.allocate_raw(14 * MIB))
    for ptr in [*kept, *blocks[1::2]]:
        allocator.deallocate_raw(ptr)
    allocator.release_free_regions()


def nothing_left(device: bfc.SimulatedSubAllocator, allocator: Any) -> None:
    """All goes back: on request, and at the end."""
    allocator.check()
    allocator.release_free_regions()
    assert device.live_bytes == allocator.stats().bytes_reserved == 0
    allocator.close()
    assert_empty(device)


def test_the_work_makes_each_kind_of_call() -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = made(device, memory_limit="70 MiB")
    with suppress(bfc.OutOfMemoryError):
        work(allocator)
    allocator.close()
    made_calls = {{"access": "set_access"}.get(kind, kind) for kind, _, _ in device.calls}
    assert set(KINDS) - {"wait"} <= made_calls


# -- wrong answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", NO_ADDRESSES, ids=repr)
def test_an_answer_that_is_no_address_is_refused_in_words(answer: Any) -> None:
    device = Liar("400 MiB")
    allocator = made(device)
    device.answers = {"reserve": answer}
    with pytest.raises(bfc.SubAllocatorError, match="reserve returned"):
        allocator.allocate_raw(MIB)
    allocator.check()
    work(allocator)
    nothing_left(device, allocator)


@pytest.mark.parametrize("answer", ["page", 0.5, b"", [1], (), object], ids=repr)
def test_an_answer_that_is_no_page_is_refused_in_words(answer: Any) -> None:
    device = Liar("400 MiB")
    allocator = made(device)
    device.answers = {"create": answer}
    with pytest.raises(bfc.SubAllocatorError, match="create returned"):
        allocator.allocate_raw(25 * MIB)
    allocator.check()
    assert allocator.stats().bytes_reserved == device.live_bytes == 0
    work(allocator)
    nothing_left(device, allocator)


@pytest.mark.parametrize("page", [-1, 0, 99, 1 << 200])
def test_a_page_that_does_not_exist_is_an_error(page: int) -> None:
    device = Liar("400 MiB")
    allocator = made(device)
    device.answers = {"create": page}
    with pytest.raises(bfc.SubAllocatorError):
        allocator.allocate_raw(25 * MIB)
    allocator.check()
    assert device.live_bytes == 0
    with suppress(bfc.SubAllocatorError):
        work(allocator)
    allocator.check()
    with suppress(bfc.SubAllocatorError):
        allocator.close()
    assert_empty(device)


# -- calls that go wrong from inside ---------------------------------------------------------------


@pytest.mark.parametrize(("kind", "n", "after"), INSIDE)
def test_a_source_that_uses_its_own_allocator(kind: str, n: int, after: bool) -> None:
    """It is served, or refused: it never waits for itself."""
    device = Inside("400 MiB", after)
    allocator = made(device)
    got: list[int] = []

    def use() -> None:
        for nbytes, stream in ((45 * MIB, 3), (1000, 0), (14 * MIB, 0)):
            with suppress(bfc.OutOfMemoryError, bfc.SubAllocatorError):
                got.append(allocator.allocate_raw(nbytes, stream))
        allocator.release_free_regions()
        allocator.trim()
        allocator.page_stats()

    device.order(kind, n, use)
    with suppress(bfc.OutOfMemoryError):
        work(allocator)
    allocator.check()
    for address in got:
        allocator.deallocate_raw(address)
    work(allocator)
    nothing_left(device, allocator)


@pytest.mark.parametrize(("kind", "n", "after"), INSIDE)
def test_a_source_that_closes_its_allocator(kind: str, n: int, after: bool) -> None:
    device = Inside("400 MiB", after)
    allocator = made(device)
    device.order(kind, n, allocator.close)
    with suppress(bfc.ClosedError, bfc.InvalidPointerError, bfc.OutOfMemoryError):
        work(allocator)
    allocator.close()
    assert_empty(device)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_out_of_a_source(kind: str, n: int) -> None:
    """The caller gets what is not an Exception as it is, and nothing is lost."""
    device = Inside("400 MiB", after=False)
    allocator = made(device)
    raised = []

    def interrupt() -> None:
        raised.append(True)
        raise KeyboardInterrupt

    device.order(kind, n, interrupt)
    for step in (work, lambda allocator: allocator.check(), lambda allocator: allocator.close()):
        before = len(raised)
        try:
            step(allocator)
        except KeyboardInterrupt:
            assert raised
        else:
            assert len(raised) == before
    allocator.close()
    assert_empty(device)


@pytest.mark.parametrize("kind", KINDS)
def test_any_error_of_a_source_is_one_that_a_program_expects(kind: str) -> None:
    """What a source raises arrives as it is, or as the cause of a SubAllocatorError."""
    device = bfc.SimulatedSubAllocator("400 MiB")
    source = Misbehaving(device)
    allocator = made(source)
    source.raise_at(1, OSError("unplugged"), kind)
    heard = ""
    try:
        work(allocator)
        allocator.close()
    except (OSError, bfc.SubAllocatorError) as error:
        heard = str(error)
    assert "unplugged" in heard or kind == "wait"  # which is not called on one stream
    if not allocator.closed:
        allocator.check()
    allocator.close()
    assert_empty(device)


# -- threads ---------------------------------------------------------------------------------------


def use_memory(allocator: Any, number: int, sizes: list[int], steps: int) -> None:
    """Writes what it got, and reads it back: none is given to two, or unmapped."""
    dice = np.random.default_rng(number)
    live: list[tuple[int, int, int]] = []
    for step in range(steps):
        if len(live) > 4 or (live and dice.random() < 0.4):
            address, nbytes, value = live.pop(int(dice.integers(len(live))))
            assert holds(address, nbytes, value)
            allocator.deallocate_raw(address)
        elif dice.random() < 0.1:
            allocator.release_free_regions() if dice.random() < 0.5 else allocator.trim(8 * MIB)
        else:
            nbytes = int(dice.choice(sizes))
            try:
                address = allocator.allocate_raw(nbytes, int(dice.integers(2)))
            except bfc.OutOfMemoryError:
                continue
            value = (number * 60 + step) % 251
            fill(address, nbytes, value)
            live.append((address, nbytes, value))
    for address, nbytes, value in live:
        assert holds(address, nbytes, value)
        allocator.deallocate_raw(address)


@pytest.mark.skipif(sys.platform != "linux", reason="host memory is mapped on Linux")
@pytest.mark.parametrize("capacity", ["48 MiB", "1 GiB"])
def test_threads_that_allocate_free_and_trim_at_once(capacity: str) -> None:
    host = bfc.HostSubAllocator(capacity)
    allocator = made(host)
    sizes = [700, 300_000, 3 * MIB, 4 * MIB, 7 * MIB, 15 * MIB]
    on_threads(lambda number: use_memory(allocator, number, sizes, 200))
    allocator.check()
    assert allocator.page_stats()["stitches"] > 0
    allocator.release_free_regions()
    assert host.live_bytes == allocator.stats().bytes_reserved == 0
    allocator.close()
    assert host.live_bytes == 0


def test_a_thread_closes_while_others_map() -> None:
    for _ in range(10):
        device = Misbehaving(inner := bfc.SimulatedSubAllocator("4 GiB"))
        allocator = made(device)

        def use(number: int, allocator: Any = allocator) -> None:
            if number == 0:
                allocator.close()
                return
            with suppress(bfc.ClosedError, bfc.InvalidPointerError):
                for _ in range(50):
                    address = allocator.allocate_raw(9 * MIB * number, number)
                    allocator.deallocate_raw(address)
                    allocator.release_free_regions()

        on_threads(use)
        assert_empty(inner)


# -- finalisers ------------------------------------------------------------------------------------


class Cycle:
    """Refers to itself, so that only the garbage collector can end it."""

    def __init__(self, held: object) -> None:
        self.held = held
        self.itself = self


def test_running_out_of_memory_collects_garbage_first() -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with made(device) as allocator:
        gc.disable()
        try:
            for _ in range(8):
                Cycle(allocator.allocate(8 * MIB))
            assert allocator.allocate(30 * MIB).nbytes == 30 * MIB
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", KINDS)
def test_a_collection_in_the_middle_of_a_call_frees_buffers(kind: str) -> None:
    """A finaliser that comes while pages are mapped: its memory is free afterwards."""
    device = Inside("400 MiB", after=False)
    allocator = made(device)
    cycles = [Cycle(allocator.allocate(nbytes, 1)) for nbytes in (1000, 5 * MIB, 9 * MIB) * 3]

    def collect() -> None:
        cycles.clear()
        gc.collect()

    device.order(kind, 1, collect)
    work(allocator)
    cycles.clear()
    gc.collect()
    assert allocator.stats().bytes_in_use == 0
    nothing_left(device, allocator)


def test_an_allocator_and_its_buffers_in_one_cycle_go_together() -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = made(device)
    Cycle([allocator, *(allocator.allocate(size * MIB) for size in (1, 5, 9))])
    del allocator
    gc.collect()
    assert_empty(device)


def test_an_error_that_holds_buffers_lets_them_go() -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with made(device) as allocator:

        def fail() -> None:
            kept = [allocator.allocate(8 * MIB) for _ in range(7)]
            allocator.allocate(30 * MIB)
            del kept

        for _ in range(3):
            with pytest.raises(bfc.OutOfMemoryError):
                fail()
            assert allocator.stats().bytes_in_use == 0
            allocator.check()
