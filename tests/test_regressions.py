"""Faults that were found once and must not come back.

What could crash or hang runs in an interpreter of its own.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import bfc

SECONDS = 90

SETUP = """
import contextlib, gc, os, signal, sys, threading, time
import numpy as np
import bfc

def long_trace(rounds, live=50_000, leave=0):
    '''Rounds of allocations of many sizes, freed in random order, but for the last `leave`.'''
    dice = np.random.default_rng(1)
    op = np.tile(np.repeat(np.array([0, 1], np.uint8), live), rounds)
    ids = np.tile(np.r_[np.arange(live), dice.permutation(live)].astype(np.uint32), rounds)
    size = np.r_[dice.integers(1, 10_000, live), np.zeros(live, np.int64)].astype(np.uint64)
    size = np.tile(size, rounds)
    end = len(op) - leave
    return bfc.Trace(op[:end], ids[:end], size[:end])

def assert_usable(allocator):
    allocator.check()
    allocator.deallocate_raw(allocator.allocate_raw(1000))
    allocator.check()

def in_child(work):
    '''Forks a child that does the work. Returns a function that waits for it.'''
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)     # what hangs is killed
        try:
            work()
            os._exit(0)
        except BaseException as fault:
            print("in the child:", repr(fault), file=sys.stderr, flush=True)
        finally:
            os._exit(1)

    def wait():
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert status == 0, "the child hangs" if status == -signal.SIGALRM else "the child fails"

    return wait
"""


def run(code: str) -> None:
    """Runs a script, which must come to its end in time."""
    script = SETUP + textwrap.dedent(code) + "\nprint('at the end')\n"
    try:
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", "-W", "ignore", "-c", script],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            cwd=Path(bfc.__file__).parent.parent,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"it hangs: not at its end after {SECONDS} s")
    said = done.stdout[-1000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"exit status {done.returncode}: {said}"
    assert done.stdout.endswith("at the end\n"), said


# -- the pool --------------------------------------------------------------------------------------


def test_merging_many_sizes_at_once_has_room_for_every_new_size() -> None:
    run("""
        a = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        a.set_timing_counter(bfc.SharedCounter())
        ptrs = []
        for k in range(17, 64):
            for _ in range(2):
                ptrs += [a.allocate_raw(k * 256), a.allocate_raw(k * 256)]
                a.allocate_raw(256)
        for ptr in ptrs:
            a.deallocate_raw(ptr)
        a.set_safe_frontier(10**9)
        assert_usable(a)
        a.close()
    """)


def test_a_counter_shared_by_two_threads_loses_no_count(make_allocator) -> None:
    frees = 1 << 19
    op = np.tile(np.array([0, 1], np.uint8), frees)
    ids = np.zeros(2 * frees, np.uint32)
    trace = bfc.Trace(op, ids, np.where(op == 0, 256, 0).astype(np.uint64))
    counter = bfc.SharedCounter()
    start = threading.Barrier(2)

    def work(allocator: bfc.BFCAllocator) -> None:
        start.wait(SECONDS)
        trace.replay(allocator)

    allocators = [make_allocator("64 MiB") for _ in range(2)]
    for allocator in allocators:
        allocator.set_timing_counter(counter)
        allocator.set_safe_frontier(1 << 40)
    threads = [threading.Thread(target=work, args=(allocator,)) for allocator in allocators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.next() == 2 * frees + 1


# -- closing ---------------------------------------------------------------------------------------

CLOSERS = {
    "in the progress callback": """
        progress = lambda done: a.close()
    """,
    "in another thread between two batches": """
        def progress(done):
            closer = threading.Thread(target=a.close)
            closer.start()
            closer.join()
    """,
    "inside the sub-allocator": """
        progress = None
        device.close_at = 4
    """,
}


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "asynchronous"])
@pytest.mark.parametrize("closer", CLOSERS)
def test_closing_during_a_replay_ends_it_with_closed_error(closer: str, asynchronous: bool) -> None:
    run(
        """
        class Device(bfc.SimulatedSubAllocator):
            close_at = 0
            def alloc(self, alignment, nbytes):
                self.close_at -= 1
                if self.close_at == 0:
                    a.close()
                return super().alloc(alignment, nbytes)

        device = Device("1 GiB")
        a = bfc.BFCAllocator(device, allow_growth=True)
        """
        + ("\n        device.hold(9)\n" if asynchronous else "")
        + CLOSERS[closer]
        + """
        try:
            long_trace(4).replay(a, progress=progress)
        except bfc.ClosedError:
            pass
        else:
            raise AssertionError("no ClosedError")
        assert a.closed
        a.check()
        assert device.live == {}, device.live
        assert a.stats().bytes_in_use == a.stats().pool_bytes == 0
        """
    )


def test_no_view_outlives_a_close_that_waited_for_a_fence() -> None:
    run("""
        class Fence:
            finished = False
            def done(self):
                return self.finished
            def wait(self):
                self.finished = True
                try:
                    views.append(memoryview(b))   # stands for a thread that takes it meanwhile
                except (bfc.ClosedError, BufferError):
                    pass

        class Device(bfc.HostSubAllocator):
            asynchronous = True
            def fence(self, stream):
                return Fence()

        views = []
        device = Device("64 MiB")
        a = bfc.BFCAllocator(device)
        b = a.allocate(1 << 20)
        used = a.allocate(10)
        a.record_stream(used, 7)
        used.free()
        try:
            a.close()
        except BufferError:
            assert views and not a.closed
        if views:
            assert not a.closed, "closed, and a view is still out"
            views[0][0] = 1
            views.pop().release()
            a.close()
        assert device.live_bytes == 0
        a.check()
    """)


def test_no_view_outlives_a_free_that_races_with_it() -> None:
    run("""
        n = 1 << 18
        op = np.tile(np.array([0, 1], np.uint8), n // 2)
        trace = bfc.Trace(op, np.zeros(n, np.uint32), np.where(op == 0, 256, 0).astype(np.uint64))
        a = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"))
        stop = threading.Event()

        def load():     # so that both have to wait for the lock
            while not stop.is_set():
                trace.replay(a)

        def view():
            barrier.wait()
            with contextlib.suppress(bfc.ClosedError):
                got.append(memoryview(b))

        def free():
            barrier.wait()
            with contextlib.suppress(BufferError):
                b.free()

        loader = threading.Thread(target=load)
        loader.start()
        bad = 0
        until = time.monotonic() + 2
        while time.monotonic() < until and not bad:
            b, got, barrier = a.allocate(1000), [], threading.Barrier(2)
            threads = [threading.Thread(target=work) for work in (free, view)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            bad += bool(got) and b.freed
            for view_taken in got:
                view_taken.release()
        stop.set()
        loader.join()
        assert not bad, "a view of freed memory"
        del b
        a.check()
        assert a.stats().bytes_in_use == 0
        a.close()
    """)


class Box:
    """Something that a reference cycle can go through."""


@pytest.mark.parametrize("allow_growth", [False, True])
@pytest.mark.parametrize("order", ["allocator first", "view first", "cycle first"])
def test_an_allocator_in_a_cycle_with_a_view_gives_its_regions_back(
    order: str, allow_growth: bool
) -> None:
    host = bfc.HostSubAllocator("4 MiB")

    def make() -> None:
        box = Box()
        box.me = box
        allocator = bfc.BFCAllocator(host, allow_growth=allow_growth)
        if order == "cycle first":
            box.allocator = allocator
            box.view = memoryview(allocator.allocate(1000))
            return
        view = memoryview(allocator.allocate(1000))
        both = [allocator, view] if order == "allocator first" else [view, allocator]
        late = Box()
        late.me, late.both = late, both

    make()
    gc.collect()
    gc.collect()
    assert host.live_bytes == 0


# -- views and buffers -----------------------------------------------------------------------------


def test_buffers_can_be_used_while_a_replay_grows_the_table() -> None:
    run("""
        n = 1_500_000
        ids = np.arange(n, dtype=np.uint32)
        trace = bfc.Trace(np.zeros(n, np.uint8), ids, np.full(n, 256, np.uint64))
        until = time.monotonic() + 2.5
        rounds = 0
        while time.monotonic() < until:
            a = bfc.BFCAllocator(bfc.HostSubAllocator("1 GiB"))
            b = a.allocate(100)
            replay = threading.Thread(target=trace.replay, args=(a,))
            replay.start()
            while replay.is_alive():
                if rounds % 2:
                    for _ in range(2000):
                        a.record_stream(b, 0)
                else:
                    memoryview(b).release()
            replay.join()
            rounds += 1
            b.free()
            a.close()
    """)


def test_a_view_cannot_be_set_up_a_second_time(make_allocator) -> None:
    allocator = make_allocator(bfc.HostSubAllocator("4 MiB"))
    buffer, other = allocator.allocate(64), allocator.allocate(8)
    view = buffer.view("u1")
    for arguments in [(buffer, "u1", 4), (other, "u1"), (buffer, "u1", (1 << 40,))]:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            view.__init__(*arguments)
        assert len(view) == 64
        with memoryview(view) as memory:
            assert (memory.nbytes, memory.shape) == (64, (64,))
    other.free()
    bytes(view)


def test_freeing_many_changes_nothing_where_one_of_them_is_viewed(make_allocator) -> None:
    allocator = make_allocator(bfc.HostSubAllocator("4 MiB"))
    ptr, buffer = allocator.allocate_raw(1000), allocator.allocate(10)
    view = memoryview(buffer)
    for ptrs in ([ptr, buffer.ptr], [buffer.ptr, ptr]):
        with pytest.raises(BufferError):
            allocator.deallocate_many(ptrs)
        assert allocator.requested_size(ptr) == 1000
        assert allocator.stats().bytes_in_use == 1024 + 256
    view.release()
    allocator.deallocate_many([ptr, buffer.ptr])
    assert allocator.stats().bytes_in_use == 0


# -- Python that runs during an out of memory ------------------------------------------------------


def test_a_collection_during_an_out_of_memory_may_free_views() -> None:
    run("""
        a = bfc.BFCAllocator(bfc.HostSubAllocator("4 MiB"), allow_growth=True)
        keep = a.allocate_raw(100)
        allocate = a.allocate_raw

        class Box: pass

        for later in range(1, 60):
            gc.disable()
            gc.collect()
            box = Box()
            box.me, box.view = box, memoryview(a.allocate(100))
            del box
            gc.set_threshold(gc.get_count()[0] + later)
            gc.enable()
            try:
                allocate(1 << 30)
            except bfc.OutOfMemoryError:
                pass
        gc.collect()
        a.deallocate_raw(keep)
        assert_usable(a)
        a.close()
    """)


def test_a_signal_handler_may_ask_for_the_stats_during_an_out_of_memory() -> None:
    run("""
        a = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        full = a.allocate_raw(1 << 20)
        handled = 0

        def handler(*_):
            global handled
            handled += 1
            a.stats()

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0003)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            try:
                a.allocate_raw(1 << 20)
            except bfc.OutOfMemoryError:
                pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert handled
        a.deallocate_raw(full)
        assert_usable(a)
        a.close()
    """)


def test_the_repr_of_a_sub_allocator_may_ask_its_allocator() -> None:
    run("""
        class Device(bfc.SimulatedSubAllocator):
            def __repr__(self):
                return f"<a device with {a.stats().pool_bytes} bytes in the pool>"

        a = bfc.BFCAllocator(Device("1 MiB", max_bytes=256))
        try:
            a.allocate_raw(1 << 20)
        except bfc.OutOfMemoryError:
            pass
        else:
            raise AssertionError("no OutOfMemoryError")
        a.check()
        a.close()
    """)


# -- forks -----------------------------------------------------------------------------------------


def test_a_child_forked_during_a_replay_can_use_its_allocator() -> None:
    run("""
        trace = long_trace(10)
        device = bfc.SimulatedSubAllocator("1 GiB")
        a = bfc.BFCAllocator(device)
        faults, stop = [], threading.Event()

        def load():
            try:
                while not stop.is_set():
                    trace.replay(a)
            except BaseException as fault:
                faults.append(fault)

        def use():
            a.stats()
            assert_usable(a)
            a.close()

        def drop():
            b.pop()
            gc.collect()
            a.stats()

        b = [a.allocate(100)]
        loader = threading.Thread(target=load)
        loader.start()
        time.sleep(0.1)
        children = []
        for work in [use, drop] * 4:
            children.append(in_child(work))
            time.sleep(0.02)
        try:
            for wait in children:
                wait()
        finally:
            stop.set()
            loader.join()
        assert not faults, faults
        b.pop().free()
        assert a.stats().bytes_in_use == 0
        assert_usable(a)
        a.close()
        assert device.live == {}
    """)


def test_a_child_forked_while_another_thread_allocates_does_not_wait_for_that_thread() -> None:
    run("""
        class Slow(bfc.SimulatedSubAllocator):
            def alloc(self, alignment, nbytes):
                if threading.current_thread() is not threading.main_thread():
                    inside.set()
                    go_on.wait(15)
                return super().alloc(alignment, nbytes)

        inside, go_on = threading.Event(), threading.Event()
        device = Slow("1 GiB")
        a = bfc.BFCAllocator(device, allow_growth=True)
        small = a.allocate_raw(100)
        got = []
        other = threading.Thread(target=lambda: got.append(a.allocate_raw(900 << 20)))
        other.start()
        assert inside.wait(5)

        def use():
            with contextlib.suppress(bfc.OutOfMemoryError):
                a.deallocate_raw(a.allocate_raw(600 << 20))
            a.deallocate_raw(small)
            assert_usable(a)
            a.close()

        def drop():
            a.close()
            assert device.live == {}

        try:
            for work in (use, drop):
                in_child(work)()
        finally:
            go_on.set()
            other.join()
        a.deallocate_many([small, *got])
        assert a.stats().bytes_in_use == 0
        assert_usable(a)
        a.close()
        assert device.live == {}
    """)


# -- long replays ----------------------------------------------------------------------------------

HELD = {
    "an address": ("a.allocate_raw(100)", "a.deallocate_raw(held.pop())", 8),
    "a buffer": ("a.allocate(100)", "held.pop()", 20),
    "a view": ("memoryview(a.allocate(100))", "held.pop()", 20),
}


@pytest.mark.parametrize("what", HELD)
def test_a_free_does_not_wait_for_the_end_of_a_replay(what: str) -> None:
    take, drop, count = HELD[what]
    run(f"""
        trace = long_trace(80)
        a = bfc.BFCAllocator(bfc.HostSubAllocator("1 GiB"))
        held = [{take} for _ in range({count})]
        order, begun = [], threading.Event()

        def load():
            begun.set()
            trace.replay(a)
            order.append("replay")

        loader = threading.Thread(target=load)
        loader.start()
        begun.wait()
        time.sleep(0.1)
        assert not order, "the replay was too short to test anything"
        while held:
            {drop}
            order.append("free")
        loader.join()
        assert order == ["free"] * {count} + ["replay"], order
        assert_usable(a)
        assert a.stats().bytes_in_use == 0
        a.close()
    """)


def test_an_interrupt_stops_a_long_replay_and_frees_what_it_had() -> None:
    run("""
        largest = 600 << 20     # what the last event asks for
        trace = long_trace(80, leave=100)
        trace = bfc.Trace(np.r_[trace.op, 0].astype(np.uint8), np.r_[trace.id, 10**6],
                          np.r_[trace.size, largest].astype(np.uint64))
        device = bfc.HostSubAllocator("2 GiB")
        a = bfc.BFCAllocator(device)
        before = a.allocate_raw(1000)

        def interrupt():
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=interrupt)
        try:
            thread.start()
            trace.replay(a)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("no KeyboardInterrupt")
        thread.join()
        assert a.stats().largest_alloc_size < largest, "it was played to its end"
        assert a.stats().bytes_in_use == 1024, a.stats()
        a.deallocate_raw(before)
        assert_usable(a)
        a.close()
        assert device.live_bytes == 0
    """)


# -- streams and failing devices -------------------------------------------------------------------


class DeadStream(bfc.SimulatedSubAllocator):
    """A device on which some streams were destroyed."""

    asynchronous = True
    dead = frozenset({7})

    def fence(self, stream: int) -> None:
        if stream in self.dead:
            raise RuntimeError(f"stream {stream} was destroyed")


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What went to sys.unraisablehook."""
    reports: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reports.append(repr(args.exc_value)))
    return reports


@pytest.fixture
def device() -> Iterator[DeadStream]:
    device = DeadStream("64 MiB")
    yield device
    device.dead = frozenset()  # so that an allocator of a failed test can go in peace


def test_a_fence_that_always_fails_stops_no_other_call(
    device: DeadStream, reported: list[str]
) -> None:
    allocator = bfc.BFCAllocator(device)
    ptr = allocator.allocate_raw(1000)
    buffer = allocator.allocate(100)
    allocator.record_stream(buffer, 7)
    del buffer
    calls: list[Callable[[], object]] = [
        lambda: allocator.deallocate_raw(allocator.allocate_raw(10)),
        lambda: allocator.deallocate_raw(ptr),
        lambda: allocator.allocate(10).free(),
        allocator.release_free_regions,
        allocator.check,
    ]
    for call in calls:
        call()
    with pytest.raises(bfc.InvalidPointerError):
        allocator.deallocate_raw(ptr)
    assert any("stream 7 was destroyed" in fault for fault in reported)
    try:
        allocator.close()
    except (RuntimeError, bfc.SubAllocatorError):
        pass  # it may tell of the stream once more
    assert allocator.closed
    assert device.live == {}
    allocator.check()


def test_a_replay_that_fails_leaves_nothing_that_nobody_can_free(
    device: DeadStream, reported: list[str]
) -> None:
    allocator = bfc.BFCAllocator(device)
    trace = bfc.Trace([0, 0, 0, 0, 1], [0, 1, 2, 3, 0], [1000] * 4 + [0], [7, 0, 0, 0, 7])
    with pytest.raises(RuntimeError, match="stream 7 was destroyed"):
        trace.replay(allocator)
    allocator.check()
    assert allocator.stats().bytes_in_use <= 1024  # at most what the dead stream has used
    device.dead = frozenset()
    allocator.release_free_regions()
    allocator.deallocate_many([chunk.ptr for chunk in allocator.snapshot().live_chunks()])
    assert allocator.stats().bytes_in_use == 0
    allocator.check()
    allocator.close()
    assert device.live == {}


def test_a_replay_forgets_the_streams_of_the_chunks_that_it_frees(
    simulated, make_allocator
) -> None:
    device = simulated("64 MiB")
    allocator = make_allocator(device)
    pairs = 1 << 17
    op = np.r_[0, np.tile([0, 1], pairs), 1].astype(np.uint8)
    ids = np.r_[pairs, np.repeat(np.arange(pairs), 2), pairs].astype(np.uint32)
    stream = np.zeros(len(op), np.uint16)
    stream[[0, -1]] = 5
    trace = bfc.Trace(op, ids, np.where(op == 0, 256, 0).astype(np.uint64), stream)
    device.hold(5)
    trace.replay(allocator, progress=lambda done: device.finish(5))
    ptr = allocator.allocate_raw(256)
    allocator.record_stream(ptr, 6)
    device.hold(5)
    device.hold(6)
    allocator.deallocate_raw(ptr)
    device.finish(6)
    allocator.deallocate_raw(allocator.allocate_raw(256))
    assert allocator.stats().bytes_waiting_for_streams == 0  # nothing of this was on stream 5


def test_recording_a_stream_for_no_bytes_does_nothing(simulated, make_allocator) -> None:
    device = simulated("64 MiB")
    allocator = make_allocator(device)
    device.hold(7)
    buffer = allocator.allocate(0)
    for nothing in (buffer, 0, buffer.view("u1")):
        assert allocator.record_stream(nothing, 7) is None
    buffer.free()
    assert allocator.stats().bytes_waiting_for_streams == 0


def test_an_error_of_a_finaliser_is_reported_by_pythons_own_hook() -> None:
    """The default hook takes its own kind of arguments only: the report itself was an error."""
    script = """
        import bfc
        class Failing(bfc.SimulatedSubAllocator):
            asynchronous = True
            def fence(self, stream):
                raise bfc.SubAllocatorError("the device is gone")
        allocator = bfc.BFCAllocator(Failing("1 MiB"))
        allocator.allocate(100, stream=7)
        allocator.allocate(100).free()
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert "Exception ignored in: 'a free that was put off" in ran.stderr
    assert ran.stderr.endswith("SubAllocatorError: the device is gone\n")


class Asked(bfc.SimulatedSubAllocator):
    """A device whose one fence is done when told, and which calls back while it is asked."""

    asynchronous = True
    finished = False

    def __init__(self, capacity: str) -> None:
        super().__init__(capacity)
        self.when_asked: Callable[[], object] = lambda: None

    def fence(self, stream: int) -> Asked:
        return self

    def done(self) -> bool:
        self.when_asked()
        return self.finished

    def wait(self) -> None:
        self.finished = True


def test_a_fence_that_two_threads_ask_is_not_lost() -> None:
    """The second found an empty queue and deleted it; the first put its fence back into that."""
    device = Asked("64 MiB")
    with bfc.BFCAllocator(device) as allocator:
        allocator.allocate(1000, stream=7).free()
        asked, go_on = threading.Event(), threading.Event()

        def slowly() -> None:
            device.when_asked = lambda: None
            asked.set()
            go_on.wait()

        device.when_asked = slowly
        thread = threading.Thread(target=allocator.allocate, args=[10])
        thread.start()
        asked.wait()
        allocator.allocate(10).free()
        go_on.set()
        thread.join()
        device.finished = True
        assert allocator.stats().bytes_waiting_for_streams == 0


def test_memory_is_waited_for_while_another_thread_asks_its_fence() -> None:
    device = Asked("2 MiB")
    with bfc.BFCAllocator(device) as allocator:
        allocator.allocate("1500 KiB", stream=7).free()
        asked, go_on = threading.Event(), threading.Event()

        def slowly() -> None:
            device.when_asked = lambda: None
            asked.set()
            go_on.wait()

        device.when_asked = slowly
        thread = threading.Thread(target=allocator.stats)
        thread.start()
        asked.wait()
        timer = threading.Timer(0.05, go_on.set)
        timer.start()
        allocator.allocate("1500 KiB").free()
        thread.join()
        timer.join()


def test_a_fence_of_a_dropped_buffer_survives_an_error() -> None:
    """Asking again must not mark the stream again: it may be gone."""
    device = Asked("2 MiB")
    marks: list[int] = []
    with bfc.BFCAllocator(device) as allocator:
        device.fence = lambda stream: marks.append(stream) or device  # type: ignore[method-assign]
        buffer = allocator.allocate(1000, stream=7)
        del buffer
        assert marks == [7]

        def fail() -> None:
            device.when_asked = lambda: None
            raise bfc.SubAllocatorError("busy")

        device.when_asked = fail
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "unraisablehook", lambda fault: None)
            allocator.allocate(10).free()
        device.finished = True
        allocator.release_free_regions()
        assert marks == [7]
        assert allocator.stats().bytes_in_use == 0


def test_a_stream_that_finishes_ends_the_wait_for_memory() -> None:
    device = Asked("2 MiB")
    with bfc.BFCAllocator(device, retry_seconds=60) as allocator:
        device.wait = lambda: None  # type: ignore[method-assign]
        allocator.allocate("1500 KiB", stream=7).free()
        timer = threading.Timer(0.05, lambda: setattr(device, "finished", True))
        timer.start()
        begun = time.monotonic()
        allocator.allocate("1500 KiB").free()
        timer.join()
        assert time.monotonic() - begun < 30, "it waited to the end"


def test_a_block_that_came_after_the_close_and_is_not_taken_back_is_offered_again() -> None:
    class Late(bfc.SimulatedSubAllocator):
        fails = True

        def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
            block = super().alloc(alignment, nbytes)
            allocator.close()
            return block

        def free(self, address: int, nbytes: int) -> None:
            if self.fails:
                self.fails = False
                raise bfc.SubAllocatorError("busy")
            super().free(address, nbytes)

    device = Late("64 MiB")
    allocator = bfc.BFCAllocator(device)
    with pytest.raises(bfc.SubAllocatorError, match="busy"):
        allocator.allocate(10)
    allocator.close()
    assert device.live_bytes == 0


def test_a_view_that_goes_while_a_fork_holds_the_locks_does_not_hang() -> None:
    """Hooks of a fork that were registered before ours run after it, with every lock held."""
    script = """
        import gc, os, faulthandler
        armed = []
        os.register_at_fork(before=lambda: armed and gc.collect())
        faulthandler.dump_traceback_later(20, exit=True)
        import bfc
        allocator = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"))
        class Cycle: pass
        cycle = Cycle()
        cycle.me, cycle.view = cycle, memoryview(allocator.allocate(100))
        del cycle
        gc.disable()
        armed.append(1)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        allocator.allocate(10).free()
        print(allocator.stats().bytes_in_use)
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert (ran.stdout, ran.stderr) == ("0\n", "")
