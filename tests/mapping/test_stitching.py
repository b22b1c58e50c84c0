"""Stitching, from outside: random histories through an account of every page, what is refused, and
the least that a reader expects of it.

A failing history prints the line that repeats it.
"""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from page_ledger import LedgerDevice, PageLedger

import bfc
from bfc.testing import IntegerSource, Misbehaving

MIB = 1 << 20
PAGE = 2 * MIB
SEED = int(os.environ.get("BFC_SEED", "0"))
HISTORIES = int(os.environ.get("BFC_HISTORIES", "60"))
STEPS = 500


Make = Callable[..., Any]


def bfc_made(device: bfc.SubAllocator, page_size: int | str | None = "2 MiB", **more: Any) -> Any:
    return bfc.BFCAllocator(device, virtual_memory=True, page_size=page_size, **more)


def caching_made(
    device: bfc.SubAllocator, page_size: int | str | None = "2 MiB", **more: Any
) -> Any:
    more.pop("headroom", None)  # it has none
    return bfc.CachingAllocator(device, stitch=True, page_size=page_size, **more)


@pytest.fixture(params=[bfc_made, caching_made])
def made(request: pytest.FixtureRequest) -> Make:
    """Makes an allocator that stitches, with one of the policies."""
    maker: Make = request.param
    return maker


# -- random histories ------------------------------------------------------------------------------


class History:
    """A random program, and the account of it."""

    def __init__(self, made: Make, seed: int, streams: int) -> None:
        self.dice = random.Random(seed)
        choose = self.dice.choice
        self.streams = [0, 3, 5, 8][:streams]
        capacity = choose((40 * MIB, 64 * MIB, 300 * MIB, 1001 * MIB))
        self.device = LedgerDevice(capacity, is_late=streams > 1)
        self.allocator = made(
            self.device,
            page_size=choose((PAGE, PAGE, 4 * MIB)),
            headroom=choose((0.0, 0.0, 0.05, 0.5)),
            memory_limit=choose((None, None, capacity * 3 // 4)),
        )
        self.ledger = PageLedger(self.device, self.allocator)
        self.live: list[int] = []
        self.sizes = [self.draw_size() for _ in range(choose((4, 20, 300)))]
        self.largest = capacity
        self.wanted = 0.6
        self.waits: list[tuple[str, int, int | None]] = []
        if streams > 1:
            for stream in self.streams:
                self.device.hold(stream)

    def draw_size(self) -> int:
        kind = self.dice.random()
        if kind < 0.3:
            return int(2 ** self.dice.uniform(0, 20))
        if kind < 0.45:
            return PAGE * self.dice.randrange(1, 6) + self.dice.choice((-1, 0, 0, 1, 512))
        return int(2 ** self.dice.uniform(18, 25))

    def step(self) -> None:
        kind = self.dice.random()
        if kind < 0.02:
            self.wanted = self.dice.choice((0.3, 0.5, 0.8))
        elif kind < 0.04:
            self.allocator.release_free_regions()
        elif kind < 0.06:
            self.allocator.trim(self.dice.randrange(0, self.largest), wait=kind < 0.05)
        elif kind < 0.14 and len(self.streams) > 1:
            self.dice.choice((self.device.hold, self.device.finish))(self.draw_stream())
        elif kind < 0.16:
            self.device.fail_at(self.dice.randrange(1, 6), "create")
        elif self.live and self.dice.random() > self.wanted:
            self.free(self.live.pop(self.dice.randrange(len(self.live))))
        else:
            self.allocate(self.dice.choice(self.sizes))

    def draw_stream(self) -> int:
        return self.dice.choice(self.streams)

    def allocate(self, nbytes: int) -> None:
        stream = self.draw_stream()
        try:
            ptr = self.allocator.allocate_raw(nbytes, stream)
        except bfc.OutOfMemoryError:
            if self.live:
                self.free(self.live.pop(0))
            return
        self.ledger.take(ptr, stream)
        self.live.append(ptr)

    def free(self, ptr: int) -> None:
        if len(self.streams) > 1 and self.dice.random() < 0.2:
            stream = self.draw_stream()
            self.allocator.record_stream(ptr, stream)
            self.ledger.record(ptr, stream)
        self.ledger.give_back(ptr)
        self.allocator.deallocate_raw(ptr)

    def run(self) -> None:
        for step in range(STEPS):
            self.step()
            if step % 10 == 0:
                self.ledger.examine()
        for kind in ("create", "map"):
            self.device.fail_at(0, kind)
        self.ledger.examine_counters()

    def end(self) -> None:
        while self.live:
            self.free(self.live.pop())
        for stream in self.streams:
            self.device.finish(stream)
        self.allocator.release_free_regions()
        self.ledger.examine()
        self.ledger.examine_counters()
        assert self.allocator.stats().bytes_in_use == 0
        assert self.allocator.stats().bytes_reserved == 0
        self.allocator.close()
        self.ledger.examine_closed()


def play(made: Make, seed: int, streams: int) -> History:
    history = History(made, seed, streams)
    try:
        history.run()
        history.end()
    except BaseException as error:
        error.add_note(f"repeat it by: BFC_SEED={seed} BFC_HISTORIES=1 pytest {__file__}")
        raise
    return history


@pytest.mark.sampled(12)
@pytest.mark.parametrize("streams", [1, 4])
@pytest.mark.parametrize("seed", range(SEED, SEED + HISTORIES))
def test_every_byte_has_one_owner_and_a_page_behind_it(made: Make, seed: int, streams: int) -> None:
    play(made, seed, streams)


def test_the_histories_stitch(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would say little."""
    total: Counter[str] = Counter()
    monkeypatch.setattr(History, "end", lambda it: total.update(it.allocator.page_stats()))
    for seed in range(12):
        play(made, seed, 1 if seed % 2 else 4)
    assert total["stitches"] > 100
    assert total["stream_waits"] > 5
    assert total["unmaps"] > 20


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(SEED, SEED + 3))
def test_what_nobody_has_read_for_long_is_as_if_it_were_read_each_time(
    made: Make, seed: int
) -> None:
    """Which slots are free is written down when somebody reads it. `check` reads it after each call
    of one allocator, and a replay by another hardly ever."""
    dice = random.Random(seed)
    op, number, size, live = [], [], [], []
    for event in range(2500):
        if live and dice.random() < len(live) / 40:
            op.append(1)
            number.append(live.pop(dice.randrange(len(live))))
            size.append(0)
        else:
            op.append(0)
            number.append(event)
            size.append(int(2 ** dice.uniform(14, 25)))
            live.append(event)
    trace = bfc.Trace(op, number, size).closed()
    with (
        made(bfc.SimulatedSubAllocator("1 GiB")) as one,
        made(bfc.SimulatedSubAllocator("1 GiB")) as other,
    ):
        for _ in range(2):
            replayed = trace.replay(one)
            one.check()
            ptrs: dict[int, int] = {}
            for event in range(len(trace)):
                ident = int(trace.id[event])
                if trace.op[event] == 0:
                    ptrs[ident] = other.allocate_raw(int(trace.size[event]))
                    assert ptrs[ident] == replayed.addresses[event], f"BFC_SEED={seed}, {event}"
                else:
                    other.deallocate_raw(ptrs.pop(ident))
                other.check()
        assert one.page_stats()["stitches"] > 5


def test_one_stream_is_never_waited_for(made: Make) -> None:
    device = LedgerDevice("64 MiB", is_late=True)
    device.hold(0)
    with made(device) as allocator:
        dice = random.Random(5)
        live: list[int] = []
        for _ in range(2000):
            if live and dice.random() < 0.5:
                allocator.deallocate_raw(live.pop(dice.randrange(len(live))))
            else:
                with suppress(bfc.OutOfMemoryError):
                    live.append(allocator.allocate_raw(int(2 ** dice.uniform(10, 24))))
        assert allocator.page_stats()["stitches"] > 10
        assert allocator.page_stats()["stream_waits"] == 0
        assert not [call for call in device.calls if call[0] == "wait"]
        assert device.is_held(0)


# -- what it is for --------------------------------------------------------------------------------


def holes(allocator: Any, count: int, nbytes: int = 4 * MIB) -> list[int]:
    """Free blocks of so many bytes, each between two that are live: what is live, returned."""
    blocks = [allocator.allocate_raw(nbytes) for _ in range(2 * count)]
    for ptr in blocks[::2]:
        allocator.deallocate_raw(ptr)
    return blocks[1::2]


def test_what_no_free_block_can_hold_is_stitched(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with made(device) as allocator:
        kept = holes(allocator, 8)
        before = allocator.page_stats()
        ptr = allocator.allocate_raw(32 * MIB)
        after = allocator.page_stats()
        assert after["stitches"] == before["stitches"] + 1
        assert after["creates"] == before["creates"] == 32
        assert after["views"] == 1
        assert allocator.stats().bytes_reserved == 64 * MIB == device.live_bytes
        assert allocator.allocated_size(ptr) == 32 * MIB
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(1)
        allocator.check()
        for block in (*kept, ptr):
            allocator.deallocate_raw(block)


def test_a_view_that_is_free_is_taken_again_without_a_call(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with made(device) as allocator:
        holes(allocator, 8)
        first = allocator.allocate_raw(32 * MIB)
        allocator.deallocate_raw(first)
        calls = len(device.calls)
        assert allocator.allocate_raw(32 * MIB) == first
        assert len(device.calls) == calls


def test_the_holes_can_be_used_again_when_a_view_is_free(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with made(device) as allocator:
        holes(allocator, 8)
        allocator.deallocate_raw(allocator.allocate_raw(32 * MIB))
        calls = len(device.calls)
        again = [allocator.allocate_raw(4 * MIB) for _ in range(8)]
        assert len(set(again)) == 8
        assert len(device.calls) == calls
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(1)


def test_small_requests_share_pages(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with made(device) as allocator:
        for _ in range(2048):
            allocator.allocate_raw(1000)
        assert allocator.stats().bytes_reserved == PAGE == device.live_bytes


def test_reserved_is_what_the_pages_have(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    with made(device, page_size="8 MiB") as allocator:
        allocator.allocate_raw(9 * MIB)
        stats = allocator.page_stats()
        assert stats["page_size"] == 8 * MIB
        assert stats["pages"] == 2
        assert allocator.stats().bytes_reserved == 16 * MIB == device.live_bytes


@pytest.mark.parametrize(
    ("limit", "page"),
    [
        ("64 MiB", 2),
        ("16 GiB", 2),
        ("17 GiB", 4),
        ("32 GiB", 4),
        ("33 GiB", 8),
        ("80 GiB", 16),
        ("128 GiB", 16),
        ("141 GiB", 32),
        ("1 TiB", 32),
    ],
)
def test_the_page_size_follows_the_limit(limit: str, page: int) -> None:
    with bfc_made(bfc.SimulatedSubAllocator(limit), page_size=None) as allocator:
        assert allocator.page_stats()["page_size"] == page * MIB
    with bfc_made(bfc.SimulatedSubAllocator("2 TiB"), None, memory_limit=limit) as allocator:
        assert allocator.page_stats()["page_size"] == page * MIB


def test_the_limit_counts_pages(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    with made(device, memory_limit="11 MiB") as allocator:
        for _ in range(5):
            allocator.allocate_raw(2 * MIB)
        with pytest.raises(bfc.OutOfMemoryError) as caught:
            allocator.allocate_raw(1)
        assert caught.value.reserved == device.live_bytes == 10 * MIB


# -- growing in place -----------------------------------------------------------------------------


def test_a_buffer_grows_where_it_is(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with made(device) as allocator:
        buffer = allocator.allocate("3 MiB")
        ptr = buffer.ptr
        for mebibytes in range(4, 64):
            assert allocator.try_extend(buffer, mebibytes * MIB) is True
            assert (buffer.ptr, buffer.nbytes) == (ptr, mebibytes * MIB)
        assert allocator.try_extend(buffer, 65 * MIB) is False
        assert buffer.nbytes == 63 * MIB
        allocator.check()
        buffer.free()


def test_a_buffer_does_not_grow_into_another(made: Make) -> None:
    with made(bfc.SimulatedSubAllocator("64 MiB")) as allocator:
        first = allocator.allocate("3 MiB")
        second = allocator.allocate("3 MiB")
        assert second.ptr > first.ptr
        assert allocator.try_extend(first, 9 * MIB) is False
        assert (first.nbytes, second.nbytes) == (3 * MIB, 3 * MIB)
        allocator.check()


# -- giving back -------------------------------------------------------------------------------


def test_trimming_gives_pages_back_and_keeps_addresses(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("64 MiB")
    with made(device) as allocator:
        kept = allocator.allocate_raw(4 * MIB)
        allocator.deallocate_raw(allocator.allocate_raw(20 * MIB))
        reservations = device.reservations
        assert allocator.trim(keep=10 * MIB) == 14 * MIB
        assert allocator.stats().bytes_reserved == device.live_bytes == 10 * MIB
        assert allocator.trim() == 6 * MIB
        assert device.live_bytes == 4 * MIB
        assert device.reservations == reservations
        assert allocator.trim() == 0
        allocator.check()
        allocator.deallocate_raw(allocator.allocate_raw(20 * MIB))
        allocator.deallocate_raw(kept)


def test_trimming_waits_for_a_stream_only_if_asked(made: Make) -> None:
    device = LedgerDevice("64 MiB", is_late=True)
    allocator = made(device)
    ledger = PageLedger(device, allocator)
    device.hold(5)
    ptr = allocator.allocate_raw(8 * MIB, 5)
    ledger.take(ptr, 5)
    ledger.give_back(ptr)
    allocator.deallocate_raw(ptr)
    allocator.trim()
    assert device.is_held(5)
    assert device.live_bytes == 8 * MIB
    assert allocator.trim(wait=True) == 8 * MIB
    assert not device.is_held(5)
    assert device.live_bytes == 0
    allocator.close()
    ledger.examine_closed()


@pytest.mark.parametrize("pages", [24, 25, 26, 28])
def test_pages_that_move_to_and_fro_are_the_same_in_each_pass(made: Make, pages: int) -> None:
    """One stream needs nearly the whole device while the other has nothing. Pages used to be picked
    by the size of the chunk they lay in: other ones moved each time, and views were made again."""
    device = LedgerDevice(pages * PAGE)
    allocator = made(device)
    ledger = PageLedger(device, allocator)

    def allocate(count: int, stream: int) -> int:
        ptr: int = allocator.allocate_raw(count * PAGE, stream)
        ledger.take(ptr, stream)
        return ptr

    def free(blocks: list[int]) -> None:
        for ptr in blocks:
            ledger.give_back(ptr)
            allocator.deallocate_raw(ptr)

    calls = []
    for _ in range(6):
        before = allocator.page_stats()
        first = [allocate(count, 0) for count in (3, 5, 2, 4, 6)]
        free(first[1::2])
        other = [allocate(count, 3) for count in (4, 3)]
        free(first[2:3])
        last = [first[0], first[4], allocate(8, 0)]
        free(other)
        last.append(allocate(7, 0))
        ledger.examine()
        free(last)
        after = allocator.page_stats()
        assert after["stream_waits"] > before["stream_waits"]
        calls.append(sum(after[kind] - before[kind] for kind in ("maps", "unmaps", "stitches")))
    assert calls[2:] == [0] * 4
    allocator.close()
    ledger.examine_closed()


def test_many_pages_move_at_once_in_a_young_pool(made: Make) -> None:
    """Each needs a record of a chunk, and the table of records grew only once, by a half: the heap
    was overrun."""
    with made(bfc.SimulatedSubAllocator("2 GiB")) as allocator:
        for stream in (1, 2):
            allocator.deallocate_raw(allocator.allocate_raw(2000 * MIB, stream))
        allocator.check()


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [3 * MIB, 2 * MIB + 1, 4096, 1, 0, "5 MiB"])
def test_a_page_size_that_is_no_multiple_of_the_granularity(page_size: int | str) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    with pytest.raises(ValueError, match="page_size"):
        bfc_made(device, page_size=page_size)
    assert device.calls == []


@pytest.mark.parametrize(
    "page_size", [2.5 * MIB, b"2 MiB", [2 * MIB], float("nan"), -2 * MIB, "-2M"], ids=repr
)
def test_a_page_size_that_is_no_size(page_size: Any) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    with pytest.raises((TypeError, ValueError)):
        bfc_made(device, page_size=page_size)
    assert device.calls == []


@pytest.mark.parametrize("headroom", [-0.01, float("nan"), float("inf"), -float("inf")])
def test_a_headroom_that_is_no_share(headroom: float) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    with pytest.raises(ValueError, match="headroom"):
        bfc_made(device, headroom=headroom)
    assert device.calls == []


def test_strict_has_no_virtual_memory() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    with pytest.raises(ValueError, match="strict"):
        bfc_made(device, strict=True)
    assert device.calls == []


def test_a_source_without_mapping_is_refused_with_its_own_words() -> None:
    device = IntegerSource(1 << 30)
    with pytest.raises((ValueError, bfc.SubAllocatorError), match="no reserve, create and map"):
        bfc_made(device)
    assert device.calls == []


@pytest.mark.parametrize("page_size", [None, "2 MiB", "1 GiB"])
def test_a_device_smaller_than_a_page(page_size: str | None) -> None:
    nbytes = MIB if page_size != "1 GiB" else 500 * MIB
    for device, limit in (
        (bfc.SimulatedSubAllocator(nbytes), None),
        (bfc.SimulatedSubAllocator("2 GiB"), nbytes),
    ):
        with pytest.raises((ValueError, bfc.OutOfMemoryError), match="page"):
            bfc_made(device, page_size, memory_limit=limit).allocate_raw(1)
        assert device.live_bytes == 0


def test_a_reservation_that_is_refused_speaks_of_addresses(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    device.fail_at(range(1, 20), "reserve")
    with pytest.raises((bfc.SubAllocatorError, bfc.OutOfMemoryError), match="address"):
        made(device).allocate_raw(3 * MIB)
    device.fail_at(0, "reserve")
    assert device.live_bytes == 0


def test_a_reservation_that_is_refused_later_changes_nothing(made: Make) -> None:
    device = LedgerDevice("1 GiB")
    allocator = made(device)
    ledger = PageLedger(device, allocator)
    ledger.take(allocator.allocate_raw(3 * MIB, 1), 1)
    device.fail_at(range(1, 20), "reserve")
    with suppress(bfc.SubAllocatorError, bfc.OutOfMemoryError):
        ledger.take(allocator.allocate_raw(3 * MIB, 2), 2)
    ledger.examine()
    device.fail_at(0, "reserve")
    ledger.take(allocator.allocate_raw(3 * MIB, 2), 2)
    ledger.examine()
    for ptr in list(ledger.live):
        ledger.give_back(ptr)
        allocator.deallocate_raw(ptr)
    allocator.close()
    ledger.examine_closed()


@pytest.mark.parametrize("keep", [-1, "-1 MiB"])
def test_trimming_to_a_negative_size(made: Make, keep: int | str) -> None:
    with made(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        allocator.deallocate_raw(allocator.allocate_raw(3 * MIB))
        with pytest.raises(ValueError, match="size"):
            allocator.trim(keep)
        assert allocator.stats().bytes_reserved == 4 * MIB


@pytest.mark.parametrize("option", [{"page_size": "2 MiB"}, {"headroom": 0.1}])
def test_options_of_virtual_memory_without_it(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="virtual_memory"):
        bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), **option)


def test_the_error_names_pages_that_little_of_them_pins(made: Make) -> None:
    device = bfc.SimulatedSubAllocator("32 MiB")
    with made(device) as allocator:
        pinned = []
        for _ in range(4):  # a page each, of which a block of 1 KiB stays
            blocks = [allocator.allocate_raw(nbytes) for nbytes in (1000, MIB - 1024, MIB)]
            pinned.append(blocks.pop(0))
            for ptr in blocks:
                allocator.deallocate_raw(ptr)
            allocator.allocate_raw(MIB - 1024)
            allocator.allocate_raw(MIB)
        for chunk in allocator.snapshot().live_chunks():
            if chunk.ptr not in pinned:
                allocator.deallocate_raw(chunk.ptr)
        with pytest.raises(bfc.OutOfMemoryError, match="less than a tenth") as caught:
            allocator.allocate_raw(32 * MIB)
        assert "8.00 MiB, in pages of which less than a tenth is in use" in str(caught.value)


def test_a_stream_of_another_thread_is_waited_for_through_stream_0(made: Make) -> None:
    """Its handle would name this thread's own: memory was reused, and unmapped, too early."""
    device = Misbehaving("16 MiB", asynchronous=True, thread_streams=frozenset({2}))
    asked: list[tuple[str, int]] = []
    for call in ("order", "fence", "wait"):
        device.on(call, instead=lambda ask, *streams, call=call: asked.append((call, streams[0])))
    allocator = made(device)

    def use() -> None:
        allocator.deallocate_raw(allocator.allocate_raw(12 * MIB, 2))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    allocator.deallocate_raw(allocator.allocate_raw(12 * MIB, 2))
    assert asked == [("order", 0)]
    allocator.trim(wait=True)
    allocator.close()
    assert {stream for _call, stream in asked} == {0}
