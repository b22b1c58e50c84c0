"""Many threads on one allocator."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from waiting import DEADLINE, Halt, joined, run_all

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20
THREADS = 6


@pytest.fixture(autouse=True)
def restless() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def hammer_raw(allocator: bfc.BFCAllocator, seed: int, steps: int) -> None:
    dice = random.Random(seed)
    live: dict[int, int] = {}
    for _ in range(steps):
        if live and (dice.random() < 0.5 or len(live) > 40):
            ptr, size = live.popitem()
            assert allocator.requested_size(ptr) == size
            allocator.deallocate_raw(ptr)
        else:
            size = dice.choice([1, 256, 1000, 5000, 100_000])
            ptr = allocator.allocate_raw(size)
            assert ptr not in live
            live[ptr] = size
    for ptr in live:
        allocator.deallocate_raw(ptr)


def hammer_buffers(allocator: bfc.BFCAllocator, seed: int, steps: int) -> None:
    dice = random.Random(seed)
    live: list[bfc.Buffer] = []
    for _ in range(steps):
        if live and (dice.random() < 0.5 or len(live) > 40):
            buffer = live.pop(dice.randrange(len(live)))
            if dice.random() < 0.5:
                buffer.free()
        else:
            live.append(allocator.allocate(dice.choice([1, 256, 1000, 5000, 100_000])))
            assert not live[-1].freed


def hammer_questions(allocator: bfc.BFCAllocator, seed: int, steps: int) -> None:
    for step in range(steps // 20):
        allocator.check()
        stats = allocator.stats()
        assert 0 <= stats.bytes_in_use <= stats.pool_bytes <= stats.bytes_limit
        if step % 10 == seed % 10:
            allocator.release_free_regions()


def assert_empty(allocator: bfc.BFCAllocator) -> None:
    """Nothing in use to the byte, and everything whole again."""
    allocator.release_free_regions()  # also takes in what finalisers left behind
    allocator.check()
    stats = allocator.stats()
    assert (stats.bytes_in_use, stats.pool_bytes) == (0, 0)
    assert allocator.snapshot().regions == ()


@pytest.mark.parametrize("hammers", ["raw", "buffers", "mixed"])
def test_many_threads_leave_the_books_in_order(make_allocator, hammers: str) -> None:
    allocator = make_allocator(Misbehaving("256 MiB"), allow_growth=True)
    kinds = {
        "raw": [hammer_raw],
        "buffers": [hammer_buffers],
        "mixed": [hammer_raw, hammer_buffers, hammer_questions],
    }[hammers]
    works = [
        lambda seed=seed: kinds[seed % len(kinds)](allocator, seed, 15_000)
        for seed in range(THREADS)
    ]
    assert run_all(works) == []
    assert allocator.stats().num_allocs > 5000 * THREADS // 2
    assert_empty(allocator)


def test_one_thread_frees_what_another_allocated(make_allocator) -> None:
    allocator = make_allocator("256 MiB")
    handed: list[int] = []
    total = 5000

    def produce() -> None:
        for number in range(total):
            handed.append(allocator.allocate_raw(number % 3000 + 1))

    def consume() -> None:
        for _ in range(total):
            while not handed:
                time.sleep(0)
            allocator.deallocate_raw(handed.pop())

    assert run_all([produce, consume]) == []
    assert allocator.stats().num_allocs == total
    assert_empty(allocator)


def test_no_two_threads_are_given_the_same_memory(make_allocator) -> None:
    allocator = make_allocator(Misbehaving("64 MiB"), allow_growth=True)
    spans: list[tuple[int, int]] = []

    def take() -> None:
        spans.extend((allocator.allocate_raw(size), size) for size in range(256, 100_000, 999))

    assert run_all([take] * THREADS) == []
    spans.sort()
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
    assert allocator.stats().num_allocs == len(spans)


def test_allocation_ids_are_unique_across_threads(make_allocator) -> None:
    allocator = make_allocator("256 MiB")
    ids: list[int] = []

    def take() -> None:
        ids.extend(allocator.allocation_id(allocator.allocate_raw(1)) for _ in range(2000))

    assert run_all([take] * THREADS) == []
    assert sorted(ids) == list(range(1, 2000 * THREADS + 1))


def test_a_double_free_in_two_threads_frees_once(make_allocator) -> None:
    allocator = make_allocator("64 MiB")
    ptrs = [allocator.allocate_raw(256) for _ in range(3000)]
    freed: list[int] = []

    def free_all() -> None:
        for ptr in ptrs:
            try:
                allocator.deallocate_raw(ptr)
            except bfc.InvalidPointerError:
                continue
            freed.append(ptr)

    assert run_all([free_all] * 3) == []
    assert sorted(freed) == sorted(ptrs)
    assert_empty(allocator)


def test_a_buffer_freed_in_two_threads_is_freed_once(make_allocator) -> None:
    allocator = make_allocator("64 MiB")
    buffers = [allocator.allocate(256) for _ in range(3000)]
    assert run_all([lambda: [buffer.free() for buffer in buffers]] * 3) == []
    assert_empty(allocator)


# -- while the device is asked ---------------------------------------------------------------------


def test_the_limit_holds_while_many_regions_are_asked_for_at_once(make_allocator) -> None:
    device, books = Misbehaving("1 GiB"), threading.Lock()
    most_live = 0

    def alloc(ask: Callable[[int, int], object], *arguments: int) -> object:
        nonlocal most_live
        time.sleep(0.002)
        with books:
            block = ask(*arguments)
            most_live = max(most_live, device.live_bytes)
        return block

    device.on("alloc", instead=alloc)
    allocator = make_allocator(device, memory_limit="16 MiB", allow_growth=True)

    def take_and_give() -> None:
        for size in (2 * MIB, 3 * MIB, MIB, 5 * MIB, 256) * 4:
            try:
                allocator.deallocate_raw(allocator.allocate_raw(size))
            except bfc.OutOfMemoryError:
                allocator.release_free_regions()

    assert run_all([take_and_give] * THREADS) == []
    assert most_live <= 16 * MIB
    assert allocator.stats().peak_pool_bytes <= 16 * MIB
    assert_empty(allocator)


@pytest.mark.parametrize("growth", [False, True])
def test_first_allocations_at_the_same_time_all_succeed(make_allocator, growth: bool) -> None:
    device = Misbehaving("64 MiB")
    device.on("alloc", first=lambda: time.sleep(0.05))
    allocator = make_allocator(device, memory_limit="8 MiB", allow_growth=growth)
    faults = run_all([lambda: allocator.allocate_raw(MIB)] * THREADS)
    assert faults == [], "6 of 8 MiB were asked for in all"
    assert allocator.stats().bytes_in_use == THREADS * MIB


def test_an_allocation_while_regions_are_released_is_not_out_of_memory(make_allocator) -> None:
    device, asked = Misbehaving("8 MiB"), threading.Event()
    allocator = make_allocator(device)
    allocator.deallocate_raw(allocator.allocate_raw(MIB))
    device.on("free", first=lambda: asked.set() or time.sleep(0.1))
    release = threading.Thread(target=allocator.release_free_regions)
    release.start()
    assert asked.wait(DEADLINE)
    try:
        assert allocator.allocate_raw(MIB), "nothing at all is in use"
    finally:
        release.join()


def test_what_another_thread_gives_back_is_waited_for_while_a_third_is_refused() -> None:
    """The third one's calls end meanwhile, and none of the memory has come back yet."""
    device, halt, asked = Misbehaving("8 MiB"), Halt(), threading.Semaphore(0)
    allocator = bfc.CachingAllocator(device)
    allocator.deallocate_many(allocator.allocate_many([MIB] * 8).tolist())
    device.on("free", first=halt)
    found: list[object] = []

    def ask(stream: int) -> None:
        try:
            found.append(allocator.allocate_raw(1000, stream=stream))
        except bfc.OutOfMemoryError as fault:
            found.append(fault)

    threads = [threading.Thread(target=ask, args=(stream,), daemon=True) for stream in (1, 2, 3)]
    threads[0].start()
    assert halt.inside.wait(DEADLINE), "what is cached goes back"
    device.on("alloc", first=asked.release)
    try:
        for thread in threads[1:]:
            thread.start()
            for _ in range(2):
                assert asked.acquire(timeout=DEADLINE), "it asks, gives back what it can, and asks"
        time.sleep(0.05)
        assert found == []
    finally:
        halt.go.set()
        for thread in threads:
            joined(thread)
    assert all(isinstance(each, int) for each in found)


class Asking:
    """An allocator with one full region, while a thread waits for the device to give another."""

    def __init__(self, make_allocator: Callable[..., bfc.BFCAllocator]) -> None:
        self.device, self.halt = Misbehaving("64 MiB"), Halt()
        self.allocator = make_allocator(self.device, allow_growth=True)
        self.buffers = [self.allocator.allocate(MIB) for _ in range(2)]
        self.ptr = self.buffers[0].ptr
        self.device.on("alloc", first=self.halt)
        self.outcome: list[object] = []
        self.thread = threading.Thread(target=self.ask, daemon=True)
        self.thread.start()
        assert self.halt.inside.wait(DEADLINE)

    def ask(self) -> None:
        try:
            self.outcome.append(self.allocator.allocate_raw(3 * MIB))
        except Exception as fault:
            self.outcome.append(fault)

    def answer(self) -> object:
        self.halt.go.set()
        joined(self.thread)
        return self.outcome[0]


@pytest.fixture
def under_way(make_allocator) -> Iterator[Asking]:
    asking = Asking(make_allocator)
    yield asking
    asking.halt.go.set()
    joined(asking.thread)


DURING = {
    "a free": lambda state: state.allocator.deallocate_raw(state.ptr),
    "a buffer's free": lambda state: state.buffers[0].free(),
    "a dropped buffer": lambda state: state.buffers.clear(),
    "an allocation": lambda state: state.buffers.clear() or state.allocator.allocate_raw(MIB),
    "stats": lambda state: state.allocator.stats(),
    "a snapshot": lambda state: state.allocator.snapshot(),
    "a check": lambda state: state.allocator.check(),
    "a size": lambda state: state.allocator.requested_size(state.ptr),
}


@pytest.mark.parametrize("name", DURING)
def test_nothing_waits_for_a_call_to_the_device(under_way: Asking, name: str) -> None:
    done = threading.Thread(target=DURING[name], args=(under_way,), daemon=True)
    done.start()
    joined(done)
    assert under_way.thread.is_alive()
    assert isinstance(under_way.answer(), int)
    under_way.allocator.check()


def test_closing_during_a_call_to_the_device_leaks_no_region(under_way: Asking) -> None:
    under_way.allocator.close()
    assert isinstance(under_way.answer(), bfc.ClosedError)
    assert under_way.device.live == {}, "a region came after close, and nobody gave it back"
    under_way.allocator.check()


def test_closing_inside_a_call_to_the_device_leaks_no_region(make_allocator) -> None:
    device = Misbehaving("1 MiB")
    allocator = make_allocator(device)
    device.on("alloc", first=allocator.close)
    with pytest.raises(bfc.ClosedError):
        allocator.allocate_raw(1)
    assert allocator.sub_allocator.live == {}


def test_closing_while_threads_allocate_ends_in_closed_errors_only(make_allocator) -> None:
    for attempt in range(10):
        device = Misbehaving("64 MiB")
        device.on("alloc", first=lambda: time.sleep(0.001))
        allocator = make_allocator(device, allow_growth=True)

        def work(allocator: bfc.BFCAllocator = allocator) -> None:
            for _ in range(300):
                buffer = allocator.allocate(100_000)
                kept = allocator.allocate(50_000)
                del buffer, kept

        def close(allocator: bfc.BFCAllocator = allocator, attempt: int = attempt) -> None:
            time.sleep(attempt * 0.0005)
            allocator.close()

        faults = run_all([work, work, work, close])
        assert all(isinstance(fault, bfc.ClosedError) for fault in faults), faults
        assert device.live == {}
        allocator.check()


# -- what is seen ----------------------------------------------------------------------------------


class NosyDevice(bfc.Device):
    """A device that something happens on whenever anybody writes its name."""

    happen = staticmethod(lambda: None)

    def __str__(self) -> str:
        type(self).happen()
        return super().__str__()


def test_a_snapshot_is_of_one_moment(make_allocator) -> None:
    class Device(NosyDevice):
        pass

    source = bfc.SimulatedSubAllocator("64 MiB")
    source.device = Device("simulated")
    allocator = make_allocator(source)
    allocator.allocate_raw(1000)
    Device.happen = lambda: allocator.allocate_raw(1000)
    snapshot = allocator.snapshot()
    del Device.happen
    in_use = sum(chunk.size for chunk in snapshot.live_chunks())
    assert in_use == snapshot.stats.bytes_in_use, (
        "the figures are of another moment than the chunks"
    )
    assert len(snapshot.live_chunks()) == snapshot.stats.num_allocs


def test_what_is_dropped_while_the_lock_is_taken_is_not_lost(make_allocator) -> None:
    allocator = make_allocator("64 MiB", allow_growth=True)
    kept = [allocator.allocate_raw(256) for _ in range(20_000)]
    done = threading.Event()

    def hold_the_lock_often() -> None:
        while not done.is_set():
            allocator.check()

    def drop() -> None:
        for _ in range(2000):
            allocator.allocate(256)
        done.set()

    assert run_all([hold_the_lock_often, drop]) == []
    allocator.deallocate_many(kept)
    assert_empty(allocator)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [bfc.BFCAllocator, bfc.CachingAllocator])
def test_long_lists_let_others_on_that_want_the_gil_too(policy: type[bfc.Allocator]) -> None:
    """A replay keeps the lock without the GIL, so that both of the others wait for it at once."""
    allocator = policy(bfc.SimulatedSubAllocator("64 MiB"))
    events = 50_000
    numbers = np.repeat(np.arange(events, dtype=np.uint32), 2)
    trace = bfc.Trace(np.tile([0, 1], events), numbers, np.full(2 * events, 256))
    is_over = threading.Event()

    def replay() -> None:
        for _ in range(30):
            trace.replay(allocator)
        is_over.set()

    def many() -> None:
        while not is_over.is_set():
            allocator.deallocate_many(allocator.allocate_many(np.full(5000, 256)))

    def one() -> None:
        while not is_over.is_set():
            allocator.deallocate_raw(allocator.allocate_raw(256))

    assert run_all([replay, many, one, one]) == []
    assert allocator.stats().bytes_in_use == 0
    allocator.check()


def test_who_waited_for_the_lock_is_not_waited_for_in_a_child() -> None:
    """Long lists let others on, if there are any: a thread that was left behind is none."""
    code = (
        "import os, threading, time\n"
        "os.register_at_fork(before=lambda: (thread.start(), time.sleep(0.2)))\n"
        "import bfc\n"
        "allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator('1 MiB'))\n"
        "allocator.deallocate_raw(allocator.allocate_raw(256))\n"
        "thread = threading.Thread(target=allocator.allocate_raw, args=[256])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    before = allocator._lock_acquisitions\n"
        "    allocator.allocate_many([256] * 1000)\n"
        "    os._exit(allocator._lock_acquisitions - before)\n"
        "thread.join()\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (answer.stdout, answer.stderr) == ("2\n", "")
