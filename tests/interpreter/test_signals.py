"""Signals that arrive while a source is called: nothing is lost, and no Ctrl-C is swallowed.

A handler in Python runs in the main thread, between two lines of whatever runs there: also of a
source that has just taken memory which nobody else knows of yet. That lost a region for good, or
made every later release fail.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20


class Interrupt(BaseException):
    """What the tests' handlers raise."""


POLICIES: dict[str, Callable[[bfc.SubAllocator], Any]] = {
    "bfc": lambda source: bfc.BFCAllocator(source, allow_growth=True),
    "caching": bfc.CachingAllocator,
    "pinned": bfc.PinnedAllocator,
}


@pytest.fixture(params=POLICIES)
def make(request: pytest.FixtureRequest) -> Callable[[bfc.SubAllocator], Any]:
    return POLICIES[request.param]


def raise_interrupt(number: int, frame: object) -> None:
    raise Interrupt(number)


@contextlib.contextmanager
def handled(number: int, handler: Any = raise_interrupt) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def taken(allocator: Any) -> int:
    if isinstance(allocator, bfc.PinnedAllocator):
        allocator.check()
        return int(allocator.host_memory_stats()["allocated_bytes.current"])
    allocator.check()
    return int(allocator.stats().pool_bytes)


def agrees(allocator: Any, source: bfc.SimulatedSubAllocator) -> None:
    """Pool and source know the same blocks, and later calls work."""
    assert taken(allocator) == source.live_bytes
    allocator.deallocate_raw(allocator.allocate_raw(100 * MIB))
    allocator.empty_cache()
    assert taken(allocator) == source.live_bytes == 0
    allocator.close()
    assert source.live == {}


def by_raising() -> None:
    signal.raise_signal(signal.SIGUSR1)


def by_another_thread() -> None:
    """The system gives a signal of the process to a thread that does not block it; Python runs the
    handler here."""
    receiver, sender = os.pipe()
    os.set_blocking(sender, False)
    before = signal.set_wakeup_fd(sender)
    over = threading.Event()
    second = threading.Thread(target=over.wait)
    second.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert os.read(receiver, 1) == bytes([signal.SIGUSR1]), "it has arrived"
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
        signal.set_wakeup_fd(before)
        over.set()
        second.join()
        os.close(receiver)
        os.close(sender)


WAYS = {"raised": by_raising, "of the process": by_another_thread}


# -- as the call returns ---------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_as_alloc_returns_loses_no_region(make, way: str) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    source.on("alloc", 1, then=WAYS[way])
    with handled(signal.SIGUSR1), pytest.raises(Interrupt):
        allocator.allocate_raw(64 * MIB)
    if not isinstance(allocator, bfc.PinnedAllocator):
        assert allocator.stats().bytes_in_use == 0, "nobody knows the address"
    agrees(allocator, source)


@pytest.mark.parametrize("way", WAYS)
def test_a_signal_as_free_returns_leaves_nothing_to_free_again(make, way: str) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    allocator.deallocate_raw(allocator.allocate_raw(64 * MIB))
    source.on("free", 1, then=WAYS[way])
    with handled(signal.SIGUSR1), pytest.raises(Interrupt):
        allocator.empty_cache()
    agrees(allocator, source)


def test_a_signal_while_a_miss_gives_memory_back_loses_none(make) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    allocator.deallocate_raw(allocator.allocate_raw(300 * MIB))
    source.on("free", 1, then=by_raising)
    with handled(signal.SIGUSR1), pytest.raises(Interrupt):
        allocator.allocate_raw(1000 * MIB)
    agrees(allocator, source)


def test_a_signal_as_a_reserve_comes_loses_none_of_it() -> None:
    source = Misbehaving("1 GiB")
    allocator = bfc.PinnedAllocator(source, "pinned_reserve_segment_size_mb:64")
    source.on("alloc", 1, then=by_raising)
    with handled(signal.SIGUSR1), pytest.raises(Interrupt):
        allocator.allocate_raw(MIB)
    allocator.close()
    assert source.live == {}


def test_ctrl_c_itself(make) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    source.on("alloc", 1, then=_thread.interrupt_main)
    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        allocator.allocate(64 * MIB)
    agrees(allocator, source)


def test_a_replay_hears_a_signal_that_waited() -> None:
    source = Misbehaving("1 GiB")
    allocator = bfc.BFCAllocator(source, allow_growth=True)
    source.on("alloc", 1, then=by_raising)
    with handled(signal.SIGUSR1), pytest.raises(Interrupt):
        bfc.Trace([0, 0], [0, 1], [64 * MIB, 1000]).replay(allocator)
    assert allocator.stats().bytes_in_use == 0
    agrees(allocator, source)


def test_nothing_is_put_off_longer_than_the_call(make) -> None:
    """What is raised for a signal in the middle of a long call comes when it returns."""
    source = Misbehaving("1 GiB")
    allocator = make(source)
    reached = []

    def long() -> None:
        by_raising()
        time.sleep(0.01)  # which looks for signals, too
        reached.append(True)

    source.on("alloc", 1, then=long)
    with handled(signal.SIGUSR1):
        with pytest.raises(Interrupt):
            allocator.allocate_raw(64 * MIB)
        assert reached
        allocator.allocate_raw(64 * MIB)
        assert signal.getsignal(signal.SIGUSR1) is raise_interrupt
        with pytest.raises(Interrupt):
            by_raising()


# -- whose handler ---------------------------------------------------------------------------------


def test_each_handler_runs_once_with_its_number_and_a_frame(make) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    ran: list[tuple[int, object]] = []

    def note(number: int, frame: object) -> None:
        ran.append((number, frame))

    def several() -> None:
        for number in (signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR2):
            signal.raise_signal(number)
        assert ran == []

    source.on("alloc", 1, then=several)
    with handled(signal.SIGUSR1, note), handled(signal.SIGUSR2, note):
        allocator.allocate_raw(64 * MIB)
        assert [number for number, _ in ran] == [signal.SIGUSR1, signal.SIGUSR2]
        assert [frame for _, frame in ran] == [sys._getframe()] * 2


@pytest.mark.usefixtures("quiet_collector")  # or a listener of the collector hears the second
def test_of_two_handlers_that_raise_both_are_heard(make) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)

    def both() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)

    heard: list[int] = []

    def note(number: int, frame: object) -> None:
        heard.append(number)
        raise Interrupt

    source.on("alloc", 1, then=both)
    with handled(signal.SIGUSR1, note), handled(signal.SIGUSR2, note):
        try:
            try:
                allocator.allocate_raw(64 * MIB)
            finally:
                sum([1, 2])
        except Interrupt:
            pass
        assert heard == [signal.SIGUSR1, signal.SIGUSR2]
    agrees(allocator, source)


def test_a_source_may_allocate_elsewhere(make) -> None:
    source, other = Misbehaving("1 GiB"), Misbehaving("1 GiB")
    allocator, inner = make(source), make(other)
    kept = []

    def nest() -> None:
        other.on("alloc", 1, then=by_raising)
        kept.append(inner.allocate_raw(64 * MIB))

    source.on("alloc", 1, then=nest)
    with handled(signal.SIGUSR1), pytest.raises(Interrupt):
        allocator.allocate_raw(64 * MIB)
    assert kept, "it came before the outer call had returned"
    inner.deallocate_raw(kept.pop())
    agrees(inner, other)
    agrees(allocator, source)


def test_a_handler_that_the_source_installs_is_obeyed_and_stays(make) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    ran = []

    def install() -> None:
        signal.signal(signal.SIGUSR1, lambda number, frame: ran.append(number))
        by_raising()
        assert ran

    source.on("alloc", 1, then=install)
    with handled(signal.SIGUSR1):
        allocator.allocate_raw(64 * MIB)
        by_raising()
        assert len(ran) == 2


def test_a_handler_that_calls_the_one_before_it_reaches_the_users(make) -> None:
    """A library that wraps a handler for good may do so while a source is called."""
    source = Misbehaving("1 GiB")
    allocator = make(source)

    def wrap() -> None:
        before = signal.getsignal(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, lambda number, frame: before(number, frame))

    source.on("alloc", 1, then=wrap)
    with handled(signal.SIGUSR1):
        allocator.allocate_raw(64 * MIB)
        with pytest.raises(Interrupt):
            by_raising()


@pytest.mark.parametrize("kind", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_without_a_handler_in_python_are_left_alone(make, kind) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    seen = []
    source.on("alloc", 1, then=lambda: seen.append(signal.getsignal(signal.SIGUSR1)))
    with handled(signal.SIGUSR1, kind):
        allocator.allocate_raw(64 * MIB)
    assert seen == [kind]


def test_a_handler_in_c_that_stands_before_pythons_stays_there(make, tmp_path) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    with handled(signal.SIGUSR1), (tmp_path / "dump").open("w+") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=False, chain=True)
        try:
            for round_ in (1, 2):
                source.on("alloc", 1, then=by_raising)
                with pytest.raises(Interrupt):
                    allocator.allocate_raw(64 * MIB)
                allocator.empty_cache()
                file.seek(0)
                assert file.read().count("most recent call first") == round_
        finally:
            faulthandler.unregister(signal.SIGUSR1)


def test_an_event_loop_is_told_once(make) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    receiver, sender = os.pipe()
    for end in (receiver, sender):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(sender)
    source.on("alloc", 1, then=by_raising)
    try:
        with handled(signal.SIGUSR1, lambda number, frame: None):
            allocator.allocate_raw(64 * MIB)
        assert os.read(receiver, 10) == bytes([signal.SIGUSR1])
    finally:
        signal.set_wakeup_fd(before)
        os.close(receiver)
        os.close(sender)


# -- threads and forks -----------------------------------------------------------------------------


def test_a_call_in_another_thread_does_not_keep_the_main_one_from_its_signals(make) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    inside, heard = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert heard.wait(60)

    source.on("alloc", 1, then=wait)
    done: list[int] = []
    thread = threading.Thread(target=lambda: done.append(allocator.allocate_raw(64 * MIB)))
    with handled(signal.SIGUSR1):
        thread.start()
        assert inside.wait(60)
        with pytest.raises(Interrupt):
            by_raising()
    heard.set()
    thread.join()
    allocator.deallocate_raw(done.pop())
    agrees(allocator, source)


def exit_code_of(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def hears(number: int) -> bool:
    try:
        signal.raise_signal(number)
        sum([1, 2])
    except Interrupt:
        return True
    return False


def test_a_fork_inside_a_source_leaves_both_processes_whole(make) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    children = []
    source.on("alloc", 1, then=lambda: children.append(os.fork()))
    with handled(signal.SIGUSR1):
        allocator.allocate_raw(64 * MIB)
        if children == [0]:
            os._exit(0 if hears(signal.SIGUSR1) else 1)
        assert hears(signal.SIGUSR1)
    assert exit_code_of(children[0]) == 0


def test_a_child_of_another_thread_has_the_handlers_that_were_put_aside(make) -> None:
    source = Misbehaving("1 GiB")
    allocator = make(source)
    children: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            ok = signal.getsignal(signal.SIGUSR1) is raise_interrupt and hears(signal.SIGUSR1)
            os._exit(0 if ok else 1)
        children.append(child)

    def fork_elsewhere() -> None:
        by_raising()  # is the parent's alone
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    source.on("alloc", 1, then=fork_elsewhere)
    with handled(signal.SIGUSR1), pytest.raises(Interrupt):
        allocator.allocate_raw(64 * MIB)
    assert exit_code_of(children[0]) == 0


# -- at any moment ---------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("kind", [bfc.SimulatedSubAllocator, bfc.HostSubAllocator])
def test_signals_at_random_moments_lose_nothing(make, kind) -> None:
    source = kind("4 GiB")
    allocator = make(source)
    seed = random.randrange(1 << 32)
    print(f"random.Random({seed})")
    rng = random.Random(seed)
    live: list[bfc.Buffer] = []
    armed = [False]

    def strike(number: int, frame: object) -> None:
        if armed[0]:
            armed[0] = False
            raise Interrupt

    def some_calls() -> None:
        for _ in range(30):
            live.append(allocator.allocate(rng.choice([3 * MIB, 30 * MIB, 1000, 5000])))
            if len(live) > 8:
                live.pop(rng.randrange(len(live))).free()
            if rng.random() < 0.4:
                allocator.empty_cache()

    with handled(signal.SIGALRM, strike):
        for _ in range(1500):
            armed[0] = True
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 3e-4))
                some_calls()
                armed[0] = False
            except Interrupt:
                pass
        armed[0] = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    live.clear()
    allocator.empty_cache()
    assert taken(allocator) == source.live_bytes == 0
    allocator.close()


# -- no Ctrl-C is swallowed ------------------------------------------------------------------------


def test_an_interrupt_while_frees_of_a_scope_are_made_is_raised_and_they_are_made_later() -> None:
    """Only PyTorch before 2.13 puts frees off in a scope that is no capture."""
    source = Misbehaving("1 GiB", asynchronous=True)
    allocator = bfc.CachingAllocator(source, strict=True, torch="2.11")
    first, second = allocator.allocate(1000), allocator.allocate(1000)
    for buffer in (first, second):
        allocator.record_stream(buffer, 7)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        first.free()
        second.free()
    source.on("fence", 1, raises=Interrupt)
    with pytest.raises(Interrupt):
        allocator.allocate_raw(10)
    allocator.deallocate_raw(allocator.allocate_raw(10))
    assert allocator.stats().bytes_in_use == 0


@pytest.mark.parametrize("policy", ["bfc", "caching"])
def test_an_interrupt_while_an_orphan_is_freed_is_raised_and_it_is_freed_later(policy: str) -> None:
    source = Misbehaving("1 GiB")
    allocator = POLICIES[policy](source)
    buffer = allocator.allocate(1000)
    source.hold(7)
    allocator.record_stream(buffer, 7)
    source.finish(7)
    del buffer  # its free is left to the next caller
    source.hold(7)
    source.on("fence", 1, raises=Interrupt)
    with pytest.raises(Interrupt):
        allocator.stats()
    source.finish(7)
    allocator.deallocate_raw(allocator.allocate_raw(10))
    assert allocator.stats().bytes_in_use == 0


def test_an_interrupt_while_a_stream_is_settled_leaves_its_queue_for_the_next() -> None:
    class Fence:
        interrupts = 1

        def done(self) -> bool:
            if self.interrupts:
                self.interrupts -= 1
                raise Interrupt
            return True

        def wait(self) -> None:
            pass

    source = Misbehaving("1 GiB", asynchronous=True)
    source.on("fence", instead=lambda ask, stream: Fence())
    allocator = bfc.CachingAllocator(source)
    address = allocator.allocate_raw(1000)
    allocator.record_stream(address, 7)
    allocator.deallocate_raw(address)
    with pytest.raises(Interrupt):
        allocator.allocate_raw(10)
    allocator.deallocate_raw(allocator.allocate_raw(10))
    assert allocator.stats().bytes_in_use == 0


@pytest.mark.parametrize("policy", ["bfc", "caching"])
def test_an_interrupt_in_a_finaliser_is_raised_a_little_later(policy: str) -> None:
    source = Misbehaving("1 GiB", asynchronous=True)
    allocator = POLICIES[policy](source)
    held = [allocator.allocate(1000)]
    allocator.record_stream(held[0], 7)
    source.on("fence", 1, first=lambda: signal.raise_signal(signal.SIGINT))
    with handled(signal.SIGINT, signal.default_int_handler), pytest.raises(KeyboardInterrupt):
        held.clear()
    allocator.release_free_regions()
    assert allocator.stats().bytes_in_use == 0


def test_what_a_source_raises_in_a_finaliser_is_reported(monkeypatch) -> None:
    reported: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(report.exc_value))
    source = Misbehaving("1 GiB", asynchronous=True)
    allocator = bfc.CachingAllocator(source)
    held = [allocator.allocate(1000)]
    allocator.record_stream(held[0], 7)
    source.on("fence", 1, raises=Interrupt)
    held.clear()
    assert [type(error) for error in reported] == [Interrupt]
    allocator.release_free_regions()
    assert allocator.stats().bytes_in_use == 0


def test_a_second_interrupt_during_a_replay_leaves_nothing_in_use() -> None:
    source = Misbehaving("1 GiB", asynchronous=True)
    allocator = bfc.BFCAllocator(source, allow_growth=True)
    trace = bfc.Trace([0] * 5, range(5), [1000] * 5, [3] * 5)

    def progress(events: int) -> None:
        source.on("fence", 1, raises=Interrupt)
        raise Interrupt

    with pytest.raises(Interrupt):
        trace.replay(allocator, progress=progress)
    allocator.release_free_regions()
    assert allocator.stats().bytes_in_use == 0


def test_a_replay_that_fails_on_a_device_that_fails_leaves_nothing_in_use() -> None:
    source = Misbehaving("1 GiB", asynchronous=True)
    allocator = bfc.BFCAllocator(source, allow_growth=True)

    def progress(events: int) -> None:
        source.on("fence", raises=bfc.SubAllocatorError("no"))
        raise Interrupt

    with pytest.raises(Interrupt):
        bfc.Trace([0] * 5, range(5), [1000] * 5, [3] * 5).replay(allocator, progress=progress)
    source.off()
    allocator.release_free_regions()
    assert allocator.stats().bytes_in_use == 0


def test_an_interrupt_while_frames_are_kept_leaves_nothing_in_use(monkeypatch) -> None:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    allocator.record_history()

    def interrupted() -> None:
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "_getframe", interrupted)
        with pytest.raises(Interrupt):
            allocator.allocate_raw(1000)
    assert allocator.stats().bytes_in_use == 0
