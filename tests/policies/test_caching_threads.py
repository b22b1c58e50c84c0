"""PyTorch's policy under threads, forks, finalisers, and at the interpreter's end."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import pytest
from waiting import DEADLINE, called_by_others, joined, run_all, until

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20
SIDE = 3


class Gate:
    """A fence whose wait ends when the test lets it, and which says that it is being waited for."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def done(self) -> bool:
        return self.opened.is_set()

    def wait(self) -> None:
        self.entered.release()
        assert self.opened.wait(DEADLINE)


def gated() -> tuple[Misbehaving, list[Gate]]:
    """A device, and the fence of each mark that it has been asked for on other streams than 0."""
    device, gates = Misbehaving("1 GiB", asynchronous=True), []

    def fence(ask: object, stream: int) -> Gate | None:
        if stream == 0:
            return None
        gates.append(Gate())
        return gates[-1]

    device.on("fence", instead=fence)
    return device, gates


def queue_free(allocator: bfc.CachingAllocator, nbytes: int) -> None:
    ptr = allocator.allocate_raw(nbytes)
    allocator.record_stream(ptr, SIDE)
    allocator.deallocate_raw(ptr)


def test_a_release_and_an_emptying_may_wait_for_one_stream() -> None:
    """Each takes the entries that it has waited for out of the queue, and no other's."""
    device, gates = gated()
    allocator = bfc.CachingAllocator(device)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        queue_free(allocator, 30 * MIB)
    queue_free(allocator, 40 * MIB)
    first, second = gates
    releasing = threading.Thread(target=pool.release)
    releasing.start()
    assert first.entered.acquire(timeout=DEADLINE)
    emptying = threading.Thread(target=allocator.empty_cache)
    has_looked = called_by_others(allocator)
    emptying.start()
    until(has_looked)  # it has come to the fence that the other waits for, or will
    first.opened.set()
    joined(releasing)
    second.opened.set()
    joined(emptying)
    allocator.empty_cache()
    assert allocator.stats().bytes_waiting_for_streams == 0
    assert device.live_bytes == 0
    allocator.check()
    allocator.close()


def test_a_release_waits_where_another_thread_waits_already() -> None:
    device, gates = gated()
    allocator = bfc.CachingAllocator(device)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        ptr = allocator.allocate_raw(30 * MIB)
    allocator.record_stream(ptr, SIDE)
    allocator.deallocate_raw(ptr)
    (gate,) = gates
    emptying = threading.Thread(target=allocator.empty_cache)
    emptying.start()
    assert gate.entered.acquire(timeout=DEADLINE)
    threading.Timer(0.05, gate.opened.set).start()
    pool.release()
    assert device.live_bytes == 0
    joined(emptying)
    allocator.close()


@pytest.mark.parametrize("policy", [bfc.BFCAllocator, bfc.CachingAllocator])
def test_a_stream_may_be_settled_by_another_while_the_one_before_it_is_asked(policy) -> None:
    class Fence:
        def __init__(self, stream: int) -> None:
            self.stream = stream

        def done(self) -> bool:
            if self.stream == SIDE and not asked:
                asked.append(self.stream)
                allocator.deallocate_raw(allocator.allocate_raw(512))  # settles the other stream
            return ready

        def wait(self) -> None:
            raise AssertionError("nobody has to wait")

    asked = [0]  # not at the frees
    ready = False
    device = Misbehaving("1 GiB", asynchronous=True)
    device.on("fence", instead=lambda ask, stream: Fence(stream))
    allocator = policy(device)
    for stream in (SIDE, SIDE + 1):
        ptr = allocator.allocate_raw(1000)
        allocator.record_stream(ptr, stream)
        allocator.deallocate_raw(ptr)
    ready = True
    asked.clear()
    allocator.deallocate_raw(allocator.allocate_raw(512))
    assert asked == [SIDE]
    assert allocator.stats().bytes_waiting_for_streams == 0
    allocator.close()


def test_a_scope_that_a_thread_has_left_open_diverts_no_later_thread() -> None:
    """The system gives a new thread the number of one that has ended."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    pool = bfc.MemPool(allocator)
    scope = bfc.use_mem_pool(pool)
    idents = []

    def enter() -> None:
        idents.append(threading.get_ident())
        scope.__enter__()

    def allocate() -> None:
        idents.append(threading.get_ident())
        allocator.allocate_raw(512)

    for work in (enter, *[allocate] * 5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert {region.pool_id for region in allocator.snapshot().regions} == {(0, 0)}
    with pytest.raises(RuntimeError, match="in use"):
        pool.release()
    allocator.close()
    pool.release()


SHARED = [0, 2, SIDE]


def hammer(allocator: bfc.CachingAllocator, device: bfc.SimulatedSubAllocator, seed: int) -> None:
    """Everything that a thread may do, in random order; what it has at the end is freed."""
    rng = random.Random(seed)
    live: list[bfc.Buffer] = []
    raw: list[int] = []
    pool = bfc.MemPool(allocator, use_on_oom=seed % 2 == 0)
    for step in range(400):
        action = rng.randrange(12)
        if action < 5:
            nbytes = rng.choice([1, 512, 5000, MIB + 1, 3 * MIB, 11 * MIB])
            try:
                if action == 0:
                    with bfc.use_mem_pool(pool):
                        live.append(allocator.allocate(nbytes))
                elif action == 1:
                    raw.append(allocator.allocate_raw(nbytes, rng.choice(SHARED)))
                else:
                    live.append(allocator.allocate(nbytes, rng.choice(SHARED)))
            except bfc.OutOfMemoryError:
                live.clear()
        elif action < 7 and live:
            allocator.record_stream(rng.choice(live), rng.choice(SHARED))
        elif action < 9 and live:
            live.pop(rng.randrange(len(live))).free()
        elif action == 9 and raw:
            allocator.deallocate_raw(raw.pop())
        elif action == 10 and live:
            del live[rng.randrange(len(live))]  # its finaliser frees it
        elif action == 11:
            rng.choice([device.hold, device.finish])(rng.choice(SHARED[1:]))
        if step % 100 == 99:
            rng.choice([allocator.empty_cache, allocator.memory_stats, allocator.history])()
        if step == 200:
            live.clear()
            pool.release()
            pool = bfc.MemPool(allocator)
    live.clear()
    for ptr in raw:
        allocator.deallocate_raw(ptr)
    pool.release()


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"max_split_size_mb": 24}], ids=str)
def test_many_threads_leave_the_books_in_order(options: dict[str, object]) -> None:
    device = bfc.SimulatedSubAllocator(200 * MIB)
    allocator = bfc.CachingAllocator(device, memory_limit=180 * MIB, **options)
    allocator.record_history(max_entries=100)
    works = [partial(hammer, allocator, device, seed) for seed in range(6)]
    assert run_all(works) == []
    for stream in SHARED[1:]:
        device.finish(stream)
    allocator.empty_cache()
    allocator.check()
    stats = allocator.memory_stats()
    assert stats["reserved_bytes.all.peak"] <= 180 * MIB
    current = {name: value for name, value in stats.items() if name.endswith(".current")}
    assert set(current.values()) == {0}, current
    assert device.live_bytes == 0
    allocator.close()


def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not() -> None:
    """Another thread was asking a fence at the fork: it is nobody's in the child."""
    device, gates = gated()
    allocator = bfc.CachingAllocator(device)
    queue_free(allocator, 30 * MIB)
    (gate,) = gates
    emptying = threading.Thread(target=allocator.empty_cache)
    emptying.start()
    assert gate.entered.acquire(timeout=DEADLINE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            gate.opened.set()
            allocator.deallocate_raw(allocator.allocate_raw(512))
            if allocator.empty_cache() == 32 * MIB:
                allocator.check()
                allocator.close()
                code = 0
        finally:
            os._exit(code)
    status = wait_for_child(child)
    gate.opened.set()
    joined(emptying)
    assert status == 0
    assert device.live_bytes == 0
    allocator.close()


def wait_for_child(child: int, seconds: float = 60) -> int:
    """Its exit code; it is ended where it does not end."""
    timer = threading.Timer(seconds, os.kill, [child, 9])
    timer.start()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    timer.cancel()
    return status


def test_a_child_inside_a_scope_goes_on_in_it() -> None:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), strict=True)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        allocator.allocate_raw(512)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                allocator.allocate_raw(30 * MIB)
                allocator.check()
                regions = allocator.snapshot().regions
                code = len(regions) - 2 + sum(region.pool_id != pool.id for region in regions)
            finally:
                os._exit(code)
        assert wait_for_child(child) == 0
    allocator.close()


# -- finalisers -----------------------------------------------------------------------------------


class Cycle:
    def __init__(self, *held: object) -> None:
        self.held, self.me = held, self


@pytest.mark.parametrize("where", ["callback", "observer"])
@pytest.mark.parametrize("how", ["dropped", "a cycle"])
def test_a_buffer_may_end_inside_a_callback_or_an_observer(where: str, how: str) -> None:
    device = bfc.SimulatedSubAllocator(40 * MIB)
    allocator = bfc.CachingAllocator(device, strict=True)
    held: list[object] = [allocator.allocate(30 * MIB)]
    if how == "a cycle":
        held[0] = Cycle(held[0])

    def end(*facts: int) -> bool:
        held.clear()
        gc.collect()
        return True

    if where == "callback":
        allocator.add_free_memory_callback(end)
        assert allocator.allocate(25 * MIB).ptr
    else:
        allocator.attach_oom_observer(end)
        with pytest.raises(bfc.OutOfMemoryError):  # it comes too late for this request
            allocator.allocate(25 * MIB)
        assert allocator.allocate(25 * MIB).ptr
    assert allocator.stats().num_allocs == 2
    allocator.check()
    allocator.close()
    assert device.live_bytes == 0


def test_a_buffer_with_a_held_stream_that_ends_inside_a_callback_waits() -> None:
    device = bfc.SimulatedSubAllocator(80 * MIB)
    allocator = bfc.CachingAllocator(device)
    device.hold(SIDE)
    held = [allocator.allocate(30 * MIB)]
    first = held[0].ptr
    allocator.record_stream(held[0], SIDE)
    allocator.add_free_memory_callback(lambda: bool(held) and held.clear() is None)
    assert allocator.allocate(30 * MIB).ptr != first
    assert allocator.stats().bytes_waiting_for_streams == 30 * MIB
    device.finish(SIDE)
    assert allocator.empty_cache() == 60 * MIB
    allocator.close()


# -- the interpreter's end ------------------------------------------------------------------------

SETUP = """
import atexit, builtins, gc, sys, threading
import bfc
device = bfc.SimulatedSubAllocator("1 GiB")
a = bfc.CachingAllocator(device, strict=STRICT)
a.record_history()
pool = bfc.MemPool(a)
def queued(n):
    ptr = a.allocate_raw(n)
    a.record_stream(ptr, 3)
    device.hold(3)
    a.deallocate_raw(ptr)
"""
ENDINGS = {
    "live buffers": "b = [a.allocate(1000, s) for s in range(9)]",
    "an open scope": """
        scope = bfc.use_mem_pool(pool)
        scope.__enter__()
        b = a.allocate(30 << 20)
    """,
    "a scope of another thread": """
        scope = bfc.use_mem_pool(pool)
        thread = threading.Thread(target=scope.__enter__)
        thread.start()
        thread.join()
    """,
    "queued frees": "queued(1000)\nqueued(30 << 20)",
    "queued frees inside a scope": """
        scope = bfc.use_mem_pool(pool)
        scope.__enter__()
        queued(30 << 20)
        b = a.allocate(9)
        a.record_stream(b, 3)
    """,
    "pools in sys and builtins": """
        sys.kept, builtins.kept = pool, bfc.MemPool(a)
        with bfc.use_mem_pool(pool):
            queued(30 << 20)
    """,
    "a pool in a cycle": """
        class C: pass
        c = C()
        c.me, c.pool, c.scope = c, pool, bfc.use_mem_pool(pool)
        c.scope.__enter__()
        c.buffer = a.allocate(5)
    """,
    "a callback and an observer": """
        a.attach_oom_observer(lambda *facts: a.allocate(9))
        a.add_free_memory_callback(pool.snapshot)
        b = a.allocate(9)
    """,
    "a release at exit": "atexit.register(pool.release)\natexit.register(a.close)",
    "a pool whose allocator is gone": "b = a.allocate(9)\ndel a",
    "no module left": "b = a.allocate(9)\nsys.modules.clear()",
    "daemon threads": """
        def work():
            pool = bfc.MemPool(a)
            while True:
                with bfc.use_mem_pool(pool):
                    x = a.allocate(1000)
                queued(600)
        for _ in range(3): threading.Thread(target=work, daemon=True).start()
    """,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "strict"),
    [*((name, False) for name in ENDINGS), *((name, True) for name in ENDINGS if "scope" in name)],
)
def test_the_interpreter_ends_in_silence_with(name: str, strict: bool) -> None:
    script = SETUP.replace("STRICT", str(strict)) + textwrap.dedent(ENDINGS[name])
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE,
        check=False,
        cwd=Path(bfc.__file__).parents[1],
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
