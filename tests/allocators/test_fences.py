"""Fences that fail, that two threads ask, or that come too late; streams that were destroyed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import bfc
from bfc.testing import Misbehaving


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What went to sys.unraisablehook."""
    reports: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: reports.append(repr(args.exc_value)))
    return reports


@pytest.fixture
def device() -> Iterator[Misbehaving]:
    """Its stream 7 was destroyed."""
    device = Misbehaving("64 MiB", asynchronous=True)

    def fence(ask: Callable[[int], object], stream: int) -> None:
        if stream == 7:
            raise RuntimeError(f"stream {stream} was destroyed")

    device.on("fence", instead=fence)
    yield device
    device.off()  # so that an allocator of a failed test can go in peace


def test_a_fence_that_always_fails_stops_no_other_call(
    device: Misbehaving, reported: list[str]
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
    device: Misbehaving, reported: list[str]
) -> None:
    allocator = bfc.BFCAllocator(device)
    trace = bfc.Trace([0, 0, 0, 0, 1], [0, 1, 2, 3, 0], [1000] * 4 + [0], [7, 0, 0, 0, 7])
    with pytest.raises(RuntimeError, match="stream 7 was destroyed"):
        trace.replay(allocator)
    allocator.check()
    assert allocator.stats().bytes_in_use <= 1024  # at most what the dead stream has used
    device.off()
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
        from bfc.testing import Misbehaving
        source = Misbehaving("1 MiB", asynchronous=True)
        source.on("fence", raises=bfc.SubAllocatorError("the device is gone"))
        allocator = bfc.BFCAllocator(source)
        allocator.allocate(100, stream=7)
        allocator.allocate(100).free()
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False
    )
    assert "Exception ignored in: 'a free that was put off" in ran.stderr
    assert ran.stderr.endswith("SubAllocatorError: the device is gone\n")


class Fence:
    """It is done when told, and calls back while it is asked."""

    finished = False

    def __init__(self) -> None:
        self.when_asked: Callable[[], object] = lambda: None

    def answer_late(self) -> tuple[threading.Event, threading.Event]:
        """The next time it is asked, it sets the first event, and answers after the second."""
        asked, go_on = threading.Event(), threading.Event()

        def slowly() -> None:
            self.when_asked = lambda: None
            asked.set()
            go_on.wait()

        self.when_asked = slowly
        return asked, go_on

    def done(self) -> bool:
        self.when_asked()
        return self.finished

    def wait(self) -> None:
        self.finished = True


def one_fence(capacity: str) -> tuple[Misbehaving, Fence]:
    device, fence = Misbehaving(capacity, asynchronous=True), Fence()
    device.on("fence", returns=fence)
    return device, fence


def test_a_fence_that_two_threads_ask_is_not_lost() -> None:
    """The second found an empty queue and deleted it; the first put its fence back into that."""
    device, fence = one_fence("64 MiB")
    with bfc.BFCAllocator(device) as allocator:
        allocator.allocate(1000, stream=7).free()
        asked, go_on = fence.answer_late()
        thread = threading.Thread(target=allocator.allocate, args=[10])
        thread.start()
        asked.wait()
        allocator.allocate(10).free()
        go_on.set()
        thread.join()
        fence.finished = True
        assert allocator.stats().bytes_waiting_for_streams == 0


def test_memory_is_waited_for_while_another_thread_asks_its_fence() -> None:
    device, fence = one_fence("2 MiB")
    with bfc.BFCAllocator(device) as allocator:
        allocator.allocate("1500 KiB", stream=7).free()
        asked, go_on = fence.answer_late()
        thread = threading.Thread(target=allocator.stats)
        thread.start()
        asked.wait()
        timer = threading.Timer(0.05, go_on.set)  # it may come too early to test anything
        timer.start()
        allocator.allocate("1500 KiB").free()
        thread.join()
        timer.join()
        assert fence.finished, "the memory was given away before its stream was done"


def test_a_fence_of_a_dropped_buffer_survives_an_error() -> None:
    """Asking again must not mark the stream again: it may be gone."""
    device, fence = one_fence("2 MiB")
    marks: list[int] = []
    with bfc.BFCAllocator(device) as allocator:
        device.on("fence", instead=lambda ask, stream: marks.append(stream) or fence)
        buffer = allocator.allocate(1000, stream=7)
        del buffer
        assert marks == [7]

        def fail() -> None:
            fence.when_asked = lambda: None
            raise bfc.SubAllocatorError("busy")

        fence.when_asked = fail
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "unraisablehook", lambda fault: None)
            allocator.allocate(10).free()
        fence.finished = True
        allocator.release_free_regions()
        assert marks == [7]
        assert allocator.stats().bytes_in_use == 0


def test_a_stream_that_finishes_ends_the_wait_for_memory() -> None:
    device, fence = one_fence("2 MiB")
    with bfc.BFCAllocator(device, retry_seconds=60) as allocator:
        fence.wait = lambda: None  # type: ignore[method-assign]
        allocator.allocate("1500 KiB", stream=7).free()
        asked: list[int] = []

        def finish() -> None:
            asked.append(0)
            fence.finished = len(asked) == 5

        fence.when_asked = finish
        allocator.allocate("1500 KiB").free()
        assert len(asked) == 5, "it waited to the end, or asked no more"


def test_a_fence_that_allocates_as_it_goes_finds_its_chunk_free() -> None:
    got: list[int] = []

    class Fence:
        is_done = False

        def done(self) -> bool:
            return Fence.is_done

        def wait(self) -> None:
            pass

        def __del__(self) -> None:
            if Fence.is_done and not got:
                got.append(allocator.allocate_raw(900 << 10))

    device = Misbehaving("1 MiB", asynchronous=True)
    device.on("fence", instead=lambda ask, stream: Fence())
    allocator = bfc.BFCAllocator(device)
    address = allocator.allocate_raw(800 << 10)
    allocator.record_stream(address, 7)
    allocator.deallocate_raw(address)
    Fence.is_done = True
    allocator.stats()
    assert got == [address]


def test_a_dropped_buffer_whose_memory_was_freed_already_orders_no_stream() -> None:
    device = Misbehaving("1 GiB", asynchronous=True)
    allocator = bfc.BFCAllocator(device)
    buffers = [allocator.allocate(1000)]
    allocator.deallocate_raw(buffers[0].ptr)
    allocator.allocate_raw(256, stream=7)
    before = device.counts["order"]
    buffers.clear()
    allocator.allocate_raw(256, stream=7)
    assert device.counts["order"] == before
