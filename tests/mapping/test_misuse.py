"""Mapped memory on sources that misbehave, among threads, and with finalisers."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import waiting
from faulty_sources import (
    INSIDE,
    KINDS,
    NO_ADDRESSES,
    assert_empty,
    fill,
    holds,
    on_threads,
)
from mapping_users import EACH_USER, USERS, User

import bfc
from bfc.testing.sources import Misbehaving

MIB = 1 << 20


def nothing_left(device: bfc.SimulatedSubAllocator, allocator: Any) -> None:
    """All goes back: on request, and at the end."""
    allocator.check()
    allocator.release_free_regions()
    assert device.live_bytes == allocator.stats().bytes_reserved == 0
    allocator.close()
    assert_empty(device)


@EACH_USER
def test_the_work_makes_each_kind_of_call(user: User) -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = user.made(device, memory_limit="70 MiB")
    with suppress(bfc.OutOfMemoryError):
        user.work(allocator)
    allocator.close()
    made_calls = {{"access": "set_access"}.get(kind, kind) for kind, _, _ in device.calls}
    assert set(KINDS) - {"wait"} <= made_calls


# -- wrong answers ---------------------------------------------------------------------------------


@EACH_USER
@pytest.mark.parametrize("answer", NO_ADDRESSES, ids=repr)
def test_an_answer_that_is_no_address_is_refused_in_words(user: User, answer: Any) -> None:
    device = Misbehaving("400 MiB")
    allocator = user.made(device)
    device.on("reserve", 1, returns=answer)
    with pytest.raises(bfc.SubAllocatorError, match="reserve returned"):
        allocator.allocate_raw(MIB)
    allocator.check()
    user.work(allocator)
    nothing_left(device, allocator)


@EACH_USER
@pytest.mark.parametrize("answer", ["page", 0.5, b"", [1], (), object], ids=repr)
def test_an_answer_that_is_no_page_is_refused_in_words(user: User, answer: Any) -> None:
    device = Misbehaving("400 MiB")
    allocator = user.made(device)
    device.on("create", 1, returns=answer)
    with pytest.raises(bfc.SubAllocatorError, match="create returned"):
        allocator.allocate_raw(25 * MIB)
    allocator.check()
    assert allocator.stats().bytes_reserved == device.live_bytes == 0
    user.work(allocator)
    nothing_left(device, allocator)


@EACH_USER
@pytest.mark.parametrize("page", [-1, 0, 99, 1 << 200])
def test_a_page_that_does_not_exist_is_an_error_and_is_offered_again(user: User, page: int) -> None:
    device = Misbehaving("400 MiB")
    allocator = user.made(device)
    device.on("create", 1, returns=page)
    with pytest.raises(bfc.SubAllocatorError, match="there is no page"):
        allocator.allocate_raw(25 * MIB)
    allocator.check()
    assert allocator.stats().bytes_reserved == user.stitches * user.page  # what is offered again
    assert device.live_bytes == 0
    allocator.deallocate_raw(allocator.allocate_raw(25 * MIB))
    with pytest.raises(bfc.SubAllocatorError, match="there is no such page"):
        allocator.close()
    assert_empty(device)


@EACH_USER
def test_addresses_that_are_in_use_are_refused_and_not_given_back(user: User) -> None:
    device = Misbehaving("400 MiB")
    allocator = user.made(device)
    address = allocator.allocate_raw(25 * MIB)
    for overlapping in (*device.reservations, next(iter(device.reservations)) + 40 * MIB):
        device.on("reserve", 1, returns=overlapping)
        with pytest.raises(bfc.SubAllocatorError, match="which is in use"):
            allocator.allocate_raw(25 * MIB, 1)
        allocator.check()
    assert len(device.reservations) == 1
    assert allocator.allocated_size(address) == 25 * MIB
    allocator.close()
    assert_empty(device)


# -- calls that go wrong from inside ---------------------------------------------------------------


@pytest.mark.sampled(32)
@EACH_USER
@pytest.mark.parametrize(("kind", "n", "after"), INSIDE)
def test_a_source_that_uses_its_own_allocator(user: User, kind: str, n: int, after: bool) -> None:
    """It is served, or refused: it never waits for itself."""
    device = Misbehaving("400 MiB")
    allocator = user.made(device)
    got: list[int] = []

    def use() -> None:
        for nbytes, stream in ((45 * MIB, 3), (1000, 0), (14 * MIB, 0)):
            with suppress(bfc.OutOfMemoryError, bfc.SubAllocatorError):
                got.append(allocator.allocate_raw(nbytes, stream))
        user.give_back(allocator)
        allocator.page_stats()

    device.on(kind, n, **{"then" if after else "first": use})
    with suppress(bfc.OutOfMemoryError):
        user.work(allocator)
    allocator.check()
    for address in got:
        allocator.deallocate_raw(address)
    user.work(allocator)
    nothing_left(device, allocator)


@pytest.mark.sampled(32)
@EACH_USER
@pytest.mark.parametrize(("kind", "n", "after"), INSIDE)
def test_a_source_that_closes_its_allocator(user: User, kind: str, n: int, after: bool) -> None:
    device = Misbehaving("400 MiB")
    allocator = user.made(device)
    closed = []

    def close() -> None:
        allocator.close()
        closed.append(True)

    device.on(kind, n, **{"then" if after else "first": close})
    with suppress(bfc.ClosedError, bfc.InvalidPointerError, bfc.OutOfMemoryError):
        user.work(allocator)
    allocator.close()
    assert_empty(device)
    assert closed or kind in ("reserve", "wait", "unreserve")


@pytest.mark.sampled(32)
@EACH_USER
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_out_of_a_source(user: User, kind: str, n: int) -> None:
    """The caller gets what is not an Exception as it is, and nothing is lost."""
    device = Misbehaving("400 MiB")
    allocator = user.made(device)
    raised = []

    def interrupt() -> None:
        raised.append(True)
        raise KeyboardInterrupt

    device.on(kind, n, first=interrupt)
    steps: list[Callable[[], Any]] = [
        lambda: user.work(allocator), allocator.check, allocator.release_free_regions,
        allocator.close,
    ]  # fmt: skip
    for step in steps:
        before = len(raised)
        try:
            step()
        except KeyboardInterrupt:
            assert raised
        else:
            assert len(raised) == before
    allocator.close()
    assert_empty(device)


@EACH_USER
@pytest.mark.parametrize("kind", KINDS)
def test_any_error_of_a_source_is_one_that_a_program_expects(user: User, kind: str) -> None:
    """What a source raises arrives as it is, or as the cause of a SubAllocatorError."""
    device = bfc.SimulatedSubAllocator("400 MiB")
    source = Misbehaving(device)
    allocator = user.made(source)
    source.on(kind, 1, raises=OSError("unplugged"))
    heard = ""
    try:
        user.work(allocator)
        allocator.close()
    except (OSError, bfc.SubAllocatorError) as error:
        heard = str(error)
    # stitching does not wait for one stream alone
    assert "unplugged" in heard or (user.stitches and kind == "wait")
    if not allocator.closed:
        allocator.check()
    allocator.close()
    assert_empty(device)


SEGMENTS = pytest.mark.parametrize("user", USERS[:2], ids=lambda user: user.name)


@SEGMENTS
def test_a_wait_that_fails_leaves_the_block_free(user: User) -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = user.made(device)
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


@EACH_USER
def test_a_page_whose_release_fails_counts_and_is_released_later(user: User) -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = user.made(device, memory_limit="40 MiB")
    allocator.deallocate_raw(allocator.allocate_raw(25 * MIB))
    device.fail_at(1, "release")
    with pytest.raises(bfc.SubAllocatorError, match="release"):
        allocator.release_free_regions()
    assert device.live_bytes == user.page_bytes(allocator) > 0
    assert not user.has_lost(allocator)
    device.fail_at(range(1, 9), "release")
    with pytest.raises((bfc.OutOfMemoryError, bfc.SubAllocatorError)):
        allocator.allocate_raw(40 * MIB)
    device.fail_at(0, "release")
    allocator.release_free_regions()
    assert user.page_bytes(allocator) == device.live_bytes == 0
    assert allocator.allocate_raw(40 * MIB)


@EACH_USER
def test_what_a_failed_map_leaves_mapped_is_not_handed_out(user: User) -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = user.made(device)
    device.fail_at(3, "map")
    device.fail_at(1, "unmap")
    with pytest.raises(bfc.SubAllocatorError, match="still mapped"):
        allocator.allocate_raw(60 * MIB)
    assert device.live_bytes == allocator.stats().bytes_reserved == 2 * user.page
    assert allocator.page_stats()["lost_slots"] == 2
    lost = next(iter(device.reservations))
    # before it takes more, stitching tries again to unmap what is lost
    address = allocator.allocate_raw(60 * MIB)
    assert address == lost if user.stitches else address >= lost + 2 * user.page
    allocator.deallocate_raw(address)
    nothing_left(device, allocator)


# -- threads ---------------------------------------------------------------------------------------


def use_memory(user: User, allocator: Any, number: int, sizes: list[int], steps: int) -> None:
    """Writes what it got, and reads it back: none is given to two, or unmapped."""
    dice = np.random.default_rng(number)
    live: list[tuple[int, int, int]] = []
    for step in range(steps):
        if len(live) > 4 or (live and dice.random() < 0.4):
            address, nbytes, value = live.pop(int(dice.integers(len(live))))
            assert holds(address, nbytes, value)
            allocator.deallocate_raw(address)
        elif dice.random() < 0.1:
            allocator.release_free_regions() if dice.random() < 0.5 else user.give_back(allocator)
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


@pytest.mark.sampled(1)
@pytest.mark.skipif(sys.platform != "linux", reason="host memory is mapped on Linux")
@EACH_USER
@pytest.mark.parametrize("is_short", [False, True], ids=["room", "short"])
def test_threads_that_allocate_free_and_give_back_at_once(user: User, is_short: bool) -> None:
    capacity = ("48 MiB" if user.stitches else "200 MiB") if is_short else "2 GiB"
    host = bfc.HostSubAllocator(capacity)
    allocator = user.made(host)
    sizes = [700, 300_000, 3 * MIB, 4 * MIB, 7 * MIB, 15 * MIB]
    if not user.stitches:
        sizes.append(25 * MIB)
    on_threads(lambda number: use_memory(user, allocator, number, sizes, 150))
    allocator.check()
    if user.stitches:
        assert allocator.page_stats()["stitches"] > 0
    allocator.release_free_regions()
    assert host.live_bytes == allocator.stats().bytes_reserved == 0
    allocator.close()
    assert host.live_bytes == 0


@EACH_USER
def test_a_thread_closes_while_others_map(user: User) -> None:
    for _ in range(10):
        device = Misbehaving(inner := bfc.SimulatedSubAllocator("4 GiB"))
        allocator = user.made(device)
        ready = threading.Barrier(4)

        def use(number: int, allocator: Any = allocator, ready: Any = ready) -> None:
            ready.wait()
            if number == 0:
                allocator.close()
                return
            with suppress(bfc.ClosedError, bfc.InvalidPointerError):
                for _ in range(50):
                    address = allocator.allocate_raw(25 * MIB * number, number)
                    allocator.deallocate_raw(address)
                    allocator.release_free_regions()

        on_threads(use)
        assert_empty(inner)


def started(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


@EACH_USER
@pytest.mark.parametrize("kind", ["create", "unmap"])
def test_a_thread_waits_for_the_mapping_of_another(user: User, kind: str) -> None:
    device, halt = Misbehaving("400 MiB"), waiting.Halt()
    device.on(kind, first=halt)
    allocator = user.made(device)
    if kind == "unmap":
        allocator.deallocate_raw(allocator.allocate_raw(25 * MIB))
    first = started(
        allocator.release_free_regions
        if kind == "unmap"
        else lambda: allocator.allocate_raw(25 * MIB)
    )
    assert halt.inside.wait(waiting.DEADLINE)
    got: list[int] = []
    second = started(lambda: got.append(allocator.allocate_raw(300 * MIB, 1)))
    second.join(0.05)
    assert second.is_alive()
    assert not got
    allocator.check()
    allocator.release_free_regions()  # comes back, and leaves what is being unmapped alone
    halt.go.set()
    waiting.joined(first)
    waiting.joined(second)
    assert got
    allocator.check()
    allocator.close()
    assert_empty(device)


# -- finalisers ------------------------------------------------------------------------------------


class Cycle:
    """Refers to itself, so that only the garbage collector can end it."""

    def __init__(self, held: object) -> None:
        self.held = held
        self.itself = self


@EACH_USER
def test_buffers_that_are_collected_while_memory_is_mapped(user: User) -> None:
    """Finalisers free inside the calls of a source, wherever the collector runs: without a GIL it
    waits for a quarter of all objects to be new, so the device has room for all blocks."""
    device = bfc.SimulatedSubAllocator("16 GiB")
    allocator = user.made(device)
    limits = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for step in range(300):
            Cycle(allocator.allocate((step % 7 * 9 + 1) * MIB, step % 3))
            if step % 20 == 0:
                allocator.release_free_regions()
    finally:
        gc.set_threshold(*limits)
    gc.collect()
    nothing_left(device, allocator)


@pytest.mark.parametrize("user", [USERS[0], *USERS[2:]], ids=lambda user: user.name)
def test_running_out_of_memory_collects_garbage_first(user: User) -> None:
    """But not where `strict` asks for what PyTorch does."""
    device = bfc.SimulatedSubAllocator("64 MiB")
    with user.made(device) as allocator:
        gc.disable()
        try:
            for _ in range(8 if user.stitches else 3):
                Cycle(allocator.allocate((8 if user.stitches else 20) * MIB))
            assert allocator.allocate(30 * MIB).nbytes == 30 * MIB
        finally:
            gc.enable()


@pytest.mark.sampled(6)
@EACH_USER
@pytest.mark.parametrize("kind", KINDS)
def test_a_collection_in_the_middle_of_a_call_frees_buffers(user: User, kind: str) -> None:
    """A finaliser that comes while pages are mapped: its memory is free afterwards."""
    device = Misbehaving("400 MiB")
    allocator = user.made(device)
    cycles = [Cycle(allocator.allocate(nbytes, 1)) for nbytes in (1000, 5 * MIB, 9 * MIB) * 3]

    def collect() -> None:
        cycles.clear()
        gc.collect()

    device.on(kind, 1, first=collect)
    user.work(allocator)
    cycles.clear()
    gc.collect()
    assert allocator.stats().bytes_in_use == 0
    nothing_left(device, allocator)


@EACH_USER
def test_an_allocator_and_its_buffers_in_one_cycle_go_together(user: User) -> None:
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = user.made(device)
    Cycle([allocator, *(allocator.allocate(size * MIB) for size in (1, 5, 9))])
    del allocator
    gc.collect()
    assert_empty(device)


@EACH_USER
def test_an_error_that_holds_buffers_lets_them_go(user: User) -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with user.made(device) as allocator:

        def fail() -> None:
            kept = [allocator.allocate(8 * MIB) for _ in range(7)]
            allocator.allocate(30 * MIB)
            del kept

        for _ in range(3):
            with pytest.raises(bfc.OutOfMemoryError):
                fail()
            assert allocator.stats().bytes_in_use == 0
            allocator.check()
