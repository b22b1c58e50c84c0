"""PyTorch's corner cases 85 to 93 on a simulated source, and random histories beside a slow model.

The same rows run on the driver in tests/cuda/test_pinned.py.
"""

from __future__ import annotations

import gc
import itertools
import random
import subprocess
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pinned_rows
import pytest
from pinned_model import Model

import bfc
from bfc import PinnedSettings, SettingsError
from bfc.testing import Misbehaving

MIB = 1 << 20


@pytest.mark.parametrize("row", pinned_rows.ROWS, ids=lambda row: row.__name__)
def test_row(row: Callable[[pinned_rows.Lane], None]) -> None:
    lane = pinned_rows.SimulatedLane()
    row(lane)
    gc.collect()
    assert lane.source.live == {}


def two_ways() -> tuple[Any, list[str]]:
    """A source with a second way to take memory, and a log of the ways by which memory goes back:
    it must be those by which it came."""
    source: Any = Misbehaving("1 GiB")
    way: dict[int, str] = {}
    log: list[str] = []

    def alloc_registered(alignment: int, nbytes: int, threads: int) -> tuple[int, int] | None:
        block: tuple[int, int] = source.alloc(alignment, nbytes)
        way[block[0]] = f"registered by {threads}"
        return block

    def free(ask: Callable[..., None], address: int, nbytes: int) -> None:
        log.append(way.pop(address, "plain"))
        ask(address, nbytes)

    source.alloc_registered = alloc_registered
    source.on("free", instead=free)
    return source, log


def test_row_93() -> None:
    lane = pinned_rows.SimulatedLane()
    lane.source, log = two_ways()
    pinned_rows.row_93(lane)
    assert log == ["registered by 1", "plain", "registered by 1"]


def test_the_threads_that_register_are_those_of_the_settings() -> None:
    source, log = two_ways()
    text = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
    bfc.PinnedAllocator(source, text).close()
    with bfc.PinnedAllocator(source, text) as allocator:
        allocator.allocate_raw(1)
    assert log == ["registered by 8"]


# -- beside a model --------------------------------------------------------------------------------

STREAMS = (7, 8, 9)
SETTINGS = (
    "",
    "pinned_max_round_threshold_mb:1",
    "pinned_max_cached_size_mb:2",
    "pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:2",
    "pinned_reserve_segment_size_mb:2",
)


def sizes(dice: random.Random) -> int:
    return dice.choice([1, 700, 4096, 5000, MIB, MIB + 1, dice.randrange(1, 3 * MIB)])


def play(seed: int, text: str, capacity: int) -> Counter[str]:
    """One history on both. Returns how often each thing happened."""
    dice, seen = random.Random(seed), Counter()
    source = bfc.SimulatedSubAllocator(capacity, alignment=256)
    allocator, model = bfc.PinnedAllocator(source, text), Model(text, capacity)
    live: list[tuple[int, object]] = []
    for step in range(300):
        where = f"play({seed}, {text!r}, {capacity}), step {step}"
        kind = dice.choices(
            ("allocate", "free", "record", "hold", "finish", "empty"), (40, 40, 14, 3, 5, 1)
        )[0]
        seen[kind] += 1
        if kind == "allocate":
            nbytes = sizes(dice)
            expected = model.allocate(nbytes)
            try:
                ptr = allocator.allocate_raw(nbytes)
            except bfc.OutOfMemoryError:
                seen["out of memory"] += 1
                assert expected is None, where
            else:
                assert expected is not None, where
                assert expected.place(ptr), f"{where}: another block"
                assert expected.size == allocator.allocated_size(ptr) >= nbytes, where
                live.append((ptr, expected))
        elif kind == "free" and live:
            ptr, block = live.pop(dice.randrange(len(live)))
            allocator.deallocate_raw(ptr)
            model.free(block)
        elif kind == "record" and live:
            ptr, block = dice.choice(live)
            stream = dice.choice(STREAMS)
            assert allocator.record_event(ptr, None, stream), where
            model.record(block, stream)
        elif kind in ("hold", "finish"):
            stream = dice.choice(STREAMS)
            getattr(source, kind)(stream)
            getattr(model, kind)(stream)
        elif kind == "empty":
            assert allocator.empty_cache() == model.empty_cache(), where
        stats = allocator.host_memory_stats()
        assert {key: stats[key] for key in model.stats()} == model.stats(), where
        assert source.live_bytes == model.taken, where
        allocator.check()
    for stream in STREAMS:
        source.finish(stream)
    allocator.close()
    assert source.live == {}
    return seen


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", SETTINGS, ids=lambda text: text or "defaults")
def test_a_random_history_equals_the_models(text: str) -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        seen += play(seed, text, 1 << 30 if seed % 2 else 12 * MIB)
    assert seen["out of memory"] > 3
    assert min(seen[kind] for kind in ("allocate", "free", "record", "hold", "empty")) > 20


# -- errors ----------------------------------------------------------------------------------------


def make(capacity: str = "64 MiB", text: str = "") -> tuple[bfc.PinnedAllocator, object]:
    source = bfc.SimulatedSubAllocator(capacity)
    return bfc.PinnedAllocator(source, text), source


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pinned_use_background_threads:True", "bfc starts no threads"),
        ("pinned_free_catch_all:True", "bfc drops no error of a free"),
        ("pinned_use_cuda_host_register:True", "cannot register memory with CUDA"),
        ("pinned_use_cuda_host_register:1", "neither True nor False"),
        ("pinned_num_register_threads:3", "out of range"),
        ("pinned_num_register_threads:256", "out of range"),
        ("pinned_reserve_segment_size_mb:0", "too small"),
        ("pinned_max_round_threshold_mb:-1", "has a sign"),
        ("pinned_max_round_threshold_mb:1,pinned_max_round_threshold_mb:2", "is given twice"),
        ("pinned_max_cached_size_mb:x", "not a whole number"),
        ("pinned_max_cached_size_mb", "a colon is missing"),
        ("max_split_size_mb:1", "too small"),
        ("pinned_max_cache_size_mb:1", "there is no setting"),
    ],
)
def test_a_setting_that_cannot_be_taken_says_why_and_changes_nothing(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make(text=text)
    with make(text="pinned_max_cached_size_mb:1")[0] as allocator:
        with pytest.raises(SettingsError, match=words):
            allocator.set_settings(text)
        assert allocator.settings == "pinned_max_cached_size_mb:1"
        ptr = allocator.allocate_raw(3 * MIB)
        allocator.deallocate_raw(ptr)
        assert allocator.host_memory_stats()["allocations.current"] == 0


def test_settings_of_the_device_allocator_are_read_and_change_nothing() -> None:
    text = (
        "max_split_size_mb:40,pinned_max_round_threshold_mb:8,pinned_use_background_threads:False"
    )
    with make(text=text)[0] as allocator:
        assert allocator.settings == text
    kept = PinnedSettings().apply(text).apply("pinned_max_cached_size_mb:0")
    assert (kept.pinned_max_round_threshold, kept.pinned_max_cached_size) == (8 * MIB, 0)
    assert kept.round_size(1) == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("64 MiB",), TypeError),
        ((bfc.SimulatedSubAllocator("1 GiB"), 7), TypeError),
        ((bfc.SimulatedSubAllocator("1 GiB"), None), TypeError),
    ],
)
def test_arguments_of_another_kind(arguments: tuple, error: type[Exception]) -> None:
    with pytest.raises(error):
        bfc.PinnedAllocator(*arguments)


def test_sizes_and_addresses_that_are_none() -> None:
    allocator, source = make()
    for wrong, error in ((-1, ValueError), (2**63, ValueError), ("4", TypeError), (1.5, TypeError)):
        with pytest.raises(error):
            allocator.allocate_raw(wrong)
    for huge in (65 * MIB, 2**62 + 1, 2**63 - 1):
        with pytest.raises(bfc.OutOfMemoryError, match="asked last for"):
            allocator.allocate_raw(huge)
    ptr = allocator.allocate_raw(5000)
    for wrong in (ptr + 1, ptr + 8191, ptr + 8192, 12345):
        with pytest.raises(bfc.InvalidPointerError):
            allocator.deallocate_raw(wrong)
    with pytest.raises(bfc.InvalidPointerError):
        allocator.record_stream(ptr + 1, 7)
    with pytest.raises(TypeError):
        allocator.record_stream(ptr, "seven")
    allocator.deallocate_raw(ptr)
    with pytest.raises(bfc.InvalidPointerError, match="freed already"):
        allocator.deallocate_raw(ptr)
    allocator.deallocate_raw(0)
    allocator.check()
    allocator.close()
    allocator.close()
    with pytest.raises(bfc.ClosedError):
        allocator.allocate(0)
    assert source.live == {}


def test_out_of_memory_takes_back_the_cache_and_waits_for_streams_before_it_is_raised() -> None:
    allocator, source = make("8 MiB")
    cached, used = allocator.allocate_raw(4 * MIB), allocator.allocate_raw(2 * MIB)
    source.hold(7)
    allocator.record_stream(used, 7)
    allocator.deallocate_raw(used)
    allocator.deallocate_raw(cached)
    whole = allocator.allocate(8 * MIB)
    assert (whole.nbytes, source.live_bytes) == (8 * MIB, 8 * MIB)
    with pytest.raises(bfc.OutOfMemoryError) as caught:
        allocator.allocate(1)
    error = caught.value
    assert (error.requested, error.in_use, error.reserved) == (1, 8 * MIB, 8 * MIB)
    whole.free()
    allocator.close()


def test_a_reserve_that_cannot_be_had_is_an_error_and_is_asked_for_again() -> None:
    allocator, source = make("64 MiB", "pinned_reserve_segment_size_mb:64")
    source.fail_at(1)
    with pytest.raises(bfc.OutOfMemoryError, match=r"a reserve of 64\.00 MiB"):
        allocator.allocate_raw(1)
    allocator.check()
    assert allocator.allocate_raw(1) > 0
    allocator.close()


class Mark:
    """The fence `fence`, if any, which meets what a test wants where it is asked."""

    def __init__(self, meet: Callable[[str], None], fence: Any) -> None:
        self.meet, self.fence = meet, fence

    def done(self) -> bool:
        self.meet("done")
        return self.fence is None or self.fence.done()

    def wait(self) -> None:
        self.meet("wait")
        if self.fence is not None:
            self.fence.wait()


def faulty(capacity: str = "64 MiB") -> Misbehaving:
    """Runs what `inside` has for a call, and raises where `fails` names it."""
    source = Misbehaving(capacity)
    source.fails, source.inside = set(), {}
    source.hold(7)

    def meet(call: str) -> None:
        if call in source.inside:
            source.inside[call]()
        if call in source.fails:
            raise bfc.SubAllocatorError(f"{call} fails")

    def fence(ask: Callable[[int], object], stream: int) -> Mark:
        meet("fence")
        return Mark(meet, ask(stream))

    source.on("alloc", first=partial(meet, "alloc"))
    source.on("free", first=partial(meet, "free"))
    source.on("fence", instead=fence)
    return source


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: found.append(str(args.exc_value)))
    return found


def test_a_source_that_fails_changes_nothing() -> None:
    source = faulty()
    allocator = bfc.PinnedAllocator(source)
    ptr = allocator.allocate_raw(100)
    source.fails = {"alloc"}
    with pytest.raises(bfc.SubAllocatorError, match="alloc fails"):
        allocator.allocate_raw(1000)
    allocator.record_stream(ptr, 7)
    source.fails = {"fence"}
    with pytest.raises(bfc.SubAllocatorError, match="fence fails"):
        allocator.deallocate_raw(ptr)
    allocator.check()
    assert allocator.find(ptr + 5).nbytes == 100, "it is live"
    source.fails = set()
    allocator.deallocate_raw(ptr)
    assert allocator.allocate_raw(100) != ptr, "the stream is remembered"
    source.fails = {"free"}
    source.finish(7)
    allocator.deallocate_raw(allocator.allocate_raw(100))
    with pytest.raises(bfc.SubAllocatorError, match="empty_cache"):
        allocator.empty_cache()
    allocator.check()
    source.fails = set()
    assert source.live_bytes > 0
    allocator.empty_cache()
    allocator.close()
    assert source.live == {}


@pytest.mark.usefixtures("quiet_collector")
def test_a_free_for_which_the_host_has_no_memory_changes_nothing() -> None:
    """It runs out at each place in turn, also between the two events of one block."""
    tools = pytest.importorskip("_testcapi")
    source = bfc.SimulatedSubAllocator("1 GiB")
    failures, held = 0, []
    for waiting, place in itertools.product(range(60, 66), range(20)):
        for stream in (7, 9):
            source.hold(stream)
        with bfc.PinnedAllocator(source) as allocator:
            for _ in range(waiting):
                allocator.allocate(128, 7).free()
            ptr = allocator.allocate_raw(64)
            for stream in (7, 9):
                allocator.record_stream(ptr, stream)
            held = [deque() for _ in range(40)]  # else Python has memory for a queue's next part
            tools.set_nomemory(place, place + 1)
            try:
                allocator.deallocate_raw(ptr)
            except MemoryError:
                failures += 1
                tools.remove_mem_hooks()
                allocator.check()
                allocator.deallocate_raw(ptr)
            finally:
                tools.remove_mem_hooks()
            source.finish(7)
            allocator.empty_cache()
            assert ptr in source.live, "the other stream still uses it"
            source.finish(9)
            allocator.empty_cache()
            assert source.live == {}
            allocator.check()
    assert failures >= 5
    assert held


@pytest.mark.usefixtures("quiet_collector")
@pytest.mark.parametrize("seed", range(40))
def test_without_host_memory_an_operation_is_done_or_not_begun(seed: int) -> None:
    """On hits, frees and records alone: a source that runs out of host memory may lose a block."""
    tools = pytest.importorskip("_testcapi")
    dice, source = random.Random(seed), bfc.SimulatedSubAllocator("1 GiB")
    allocator = bfc.PinnedAllocator(source)
    for ptr in [allocator.allocate_raw(5000) for _ in range(200)]:
        allocator.deallocate_raw(ptr)
    live: list[int] = []
    for _ in range(150):
        name = dice.choice(["allocate", "allocate", "free", "free", "record", "hold", "finish"])
        stream, ptr = dice.choice([7, 9]), dice.choice(live or [0])
        if name in ("hold", "finish"):
            getattr(source, name)(stream)
            continue
        if dice.random() < 0.4:
            place = dice.randrange(12)
            tools.set_nomemory(place, place + 1)
        try:
            if name == "allocate":
                ptr = allocator.allocate_raw(5000)
            elif name == "free":
                allocator.deallocate_raw(ptr)
            else:
                allocator.record_stream(ptr, stream)
        except MemoryError:
            name = "none"
        finally:
            tools.remove_mem_hooks()
        if name == "allocate":
            live.append(ptr)
        elif name == "free" and ptr:
            live.remove(ptr)
        allocator.check()
    for ptr in live:
        allocator.deallocate_raw(ptr)
    for stream in (7, 9):
        source.finish(stream)
    allocator.empty_cache()
    assert source.live == {}, f"seed {seed}"
    allocator.close()


def test_a_fence_that_raises_keeps_its_block_and_lets_the_others_pass(reports: list[str]) -> None:
    source = faulty()
    allocator = bfc.PinnedAllocator(source)
    first, second = allocator.allocate_raw(64), allocator.allocate_raw(4096)
    for ptr in (first, second):
        allocator.record_stream(ptr, 7)
        allocator.deallocate_raw(ptr)
    source.finish(7)
    turns = iter((True, False, False))
    source.inside["done"] = lambda: (
        source.fails.add("done") if next(turns) else source.fails.clear()
    )
    assert allocator.allocate_raw(4096) == second
    assert reports == ["done fails"]
    assert allocator.allocate_raw(64) != first
    source.inside.clear()
    allocator.check()
    allocator.empty_cache()
    assert first not in source.live
    allocator.close()
    assert source.live == {}


def test_a_fence_that_failed_is_asked_again_ahead_of_those_that_came_later(
    reports: list[str],
) -> None:
    source = faulty()
    source.hold(9)
    allocator = bfc.PinnedAllocator(source)
    first, second, third = (allocator.allocate_raw(64 << place) for place in range(3))
    for ptr, stream in ((first, 7), (second, 7), (third, 9)):
        allocator.record_stream(ptr, stream)
    allocator.deallocate_raw(first)
    allocator.deallocate_raw(second)
    source.finish(7)
    source.fails = {"done"}
    allocator.allocate_raw(4096)
    assert reports == ["done fails", "done fails"]
    source.fails = set()
    allocator.deallocate_raw(third)
    allocator.empty_cache()
    assert [ptr in source.live for ptr in (first, second, third)] == [False, False, True]
    source.finish(9)
    allocator.close()


def test_closing_waits_for_streams_of_others_though_one_of_its_own_fails() -> None:
    source, other = faulty(), faulty()
    allocator = bfc.PinnedAllocator(source)
    freed, live = allocator.allocate(64, stream=7), allocator.allocate(64)
    allocator.record_event(live.ptr, live, 9, source=other)
    freed.free()
    waits: list[int] = []
    source.fails, other.inside["wait"] = {"wait"}, lambda: waits.append(9)
    with pytest.raises(bfc.SubAllocatorError, match="wait fails"):
        allocator.close()
    assert waits == [9]
    assert allocator.closed
    assert source.live == {}


def test_a_finaliser_whose_stream_cannot_be_marked_keeps_the_block(reports: list[str]) -> None:
    source = faulty()
    allocator = bfc.PinnedAllocator(source)
    buffer = allocator.allocate(64, stream=7)
    ptr = buffer.ptr
    source.fails = {"fence"}
    del buffer
    assert reports == ["fence fails"]
    assert allocator.allocate_raw(64) != ptr
    source.fails = set()
    source.finish(7)
    allocator.empty_cache()
    assert ptr not in source.live
    allocator.close()


@pytest.mark.parametrize("call", ["alloc", "free", "fence", "done", "wait"])
def test_whatever_a_call_out_does_to_the_allocator_is_safe(call: str) -> None:
    """Buffers collected, allocations, frees and an emptied cache inside of each call."""
    source = faulty("1 MiB")
    allocator = bfc.PinnedAllocator(source)
    kept = [allocator.allocate(5000, stream=7) for _ in range(8)]
    depth = 0

    def inside() -> None:
        nonlocal depth
        if depth < 3:
            depth += 1
            if kept:
                kept.pop()
            allocator.allocate(300).free()
            allocator.empty_cache()
            allocator.check()
            depth -= 1

    source.inside[call] = inside
    for _ in range(6):
        if kept:
            kept.pop()
        allocator.allocate(5000, stream=7).free()
        allocator.check()
    source.finish(7)
    allocator.empty_cache()
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate(2 * MIB)
    source.inside.clear()
    kept.clear()
    allocator.check()
    allocator.close()
    assert source.live == {}


@pytest.mark.parametrize("call", ["alloc", "fence", "done"])
def test_closing_it_inside_of_a_call_out_loses_nothing(call: str) -> None:
    source = faulty()
    allocator = bfc.PinnedAllocator(source)
    ptr, waiting = allocator.allocate_raw(64), allocator.allocate_raw(64)
    for address in (ptr, waiting):
        allocator.record_stream(address, 7)
    allocator.deallocate_raw(waiting)

    def close() -> None:
        source.inside.clear()
        allocator.close()

    source.inside[call] = close
    if call == "fence":
        allocator.deallocate_raw(ptr)
    else:
        with pytest.raises(bfc.ClosedError):
            allocator.allocate_raw(1 * MIB)
    assert allocator.closed
    allocator.check()
    assert source.live == {}


# -- buffers, addresses, threads, processes --------------------------------------------------------


def test_buffers_speak_the_protocols_of_the_host() -> None:
    with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
        assert not allocator.is_pinned
        buffer = allocator.allocate("4 KiB").from_host(numpy.arange(512, dtype="i8"))
        array = numpy.from_dlpack(buffer.view("i8"))
        assert array[511] == 511 == numpy.frombuffer(buffer, "i8")[511]
        assert buffer.__dlpack_device__() == (1, 0)
        assert not hasattr(buffer, "__cuda_array_interface__")
        assert bfc.pinned.find(array.ctypes.data + 99)[0] is allocator
        assert not bfc.pinned.is_pinned(array.ctypes.data)
        assert bfc.pinned.find(id(array)) is None
        for viewed in (buffer.free, allocator.close, lambda: allocator.deallocate_raw(buffer.ptr)):
            with pytest.raises(BufferError):
                viewed()
        del array
        gc.collect()
        buffer.free()
        assert allocator.allocate(0).ptr == 0
        twin = allocator.allocate(8).from_host(b"12345678")
        assert numpy.from_dlpack(twin, copy=True).tobytes() == b"12345678"
        del twin
    assert bfc.pinned.find(12345) is None


def test_a_scope_names_the_stream() -> None:
    allocator, source = make()
    source.hold(7)
    with bfc.use_stream(7):
        buffer = allocator.allocate(64)
    assert buffer.stream == 7
    ptr = buffer.ptr
    buffer.free()
    assert allocator.allocate(64).ptr != ptr
    source.finish(7)
    allocator.close()


def test_a_stream_of_another_source_is_marked_there() -> None:
    allocator, source = make()
    elsewhere = bfc.SimulatedSubAllocator("1 MiB")
    elsewhere.hold(7)
    ptr = allocator.allocate_raw(64)
    assert allocator.record_event(ptr, None, 7, source=elsewhere)
    allocator.deallocate_raw(ptr)
    assert allocator.allocate_raw(64) != ptr
    elsewhere.finish(7)
    assert allocator.allocate_raw(64) == ptr
    allocator.close()
    assert source.live == {}


def test_a_queue_of_pyopencl_is_named_by_its_pointer_and_kept_alive() -> None:
    class Queue:
        int_ptr = 7

        def finish(self) -> None: ...

    allocator, source = make()
    source.hold(7)
    queue = Queue()
    alive = weakref.ref(queue)
    ptr = allocator.allocate_raw(64)
    allocator.record_stream(ptr, queue)
    del queue
    gc.collect()
    assert alive() is not None
    allocator.deallocate_raw(ptr)
    assert alive() is None
    assert allocator.allocate_raw(64) != ptr
    allocator.close()
    assert source.live == {}


def test_figures_start_again() -> None:
    allocator, _source = make()
    kept, freed = allocator.allocate_raw(1000), allocator.allocate_raw(3000)
    allocator.deallocate_raw(freed)
    allocator.empty_cache()
    allocator.reset_peak_stats()
    stats = allocator.host_memory_stats()
    assert (stats["active_bytes.peak"], stats["allocations.peak"]) == (1024, 1)
    assert (stats["host_alloc_time.max"], stats["host_alloc_time.count"]) == (0, 2)
    allocator.reset_accumulated_stats()
    stats = allocator.host_memory_stats()
    assert stats["host_alloc_time.total"] == stats["host_free_time.count"] == 0
    assert stats["host_free_time.avg"] == stats["num_host_alloc"] == stats["num_host_free"] == 0
    assert (stats["active_bytes.current"], stats["active_bytes.allocated"]) == (1024, 0)
    allocator.deallocate_raw(kept)
    assert allocator.host_memory_stats()["active_requests.freed"] == 1
    allocator.close()


def test_threads_never_share_a_block() -> None:
    """Each writes its mark all over its blocks, and finds it there when it frees them."""
    allocator = bfc.PinnedAllocator(bfc.HostSubAllocator("256 MiB"), "pinned_max_cached_size_mb:1")
    faults: list[str] = []

    def work(mark: int) -> None:
        dice, held = random.Random(mark), []
        for step in range(600):
            if dice.random() < 0.55 and len(held) < 40:
                buffer = allocator.allocate(dice.choice([1, 300, 5000, 70_000]))
                memoryview(buffer)[:] = bytes([mark]) * buffer.nbytes
                held.append(buffer)
            elif held:
                buffer = held.pop(dice.randrange(len(held)))
                if bytes(buffer) != bytes([mark]) * buffer.nbytes:
                    faults.append(f"work({mark}), step {step}: another thread wrote here")
                if dice.random() < 0.5:
                    buffer.free()
            if step % 97 == 0:
                allocator.empty_cache()

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert faults == []
    allocator.check()
    assert allocator.host_memory_stats()["active_requests.current"] == 0
    allocator.close()
    assert allocator.sub_allocator.live_bytes == 0


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60
    )


def test_an_interpreter_that_ends_frees_nothing_and_says_nothing() -> None:
    ran = run(
        "import bfc\n"
        "allocator = bfc.PinnedAllocator(bfc.HostSubAllocator('64 MiB'))\n"
        "buffer, ring = allocator.allocate(5000, stream=3), [allocator]\n"
        "ring += [ring, allocator.allocate(7)]\n"
        "view = memoryview(allocator.allocate(9))\n"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


def test_a_forked_child_goes_on_with_its_own_copy() -> None:
    ran = run(
        "import bfc, os\n"
        "allocator = bfc.PinnedAllocator(bfc.HostSubAllocator('64 MiB'))\n"
        "buffer = allocator.allocate(4).from_host(b'abcd')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    buffer.from_host(b'efgh')\n"
        "    allocator.allocate(4).free()\n"
        "    buffer.free(); allocator.check(); allocator.close()\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bytes(buffer))\n"
    )
    assert (ran.stdout, ran.stderr) == ("7 b'abcd'\n", "")
