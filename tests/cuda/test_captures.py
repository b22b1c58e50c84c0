"""Captures of CUDA graphs: the driver's rules are kept, and a graph's memory stays its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import raw_cuda

import bfc

MIB = 1 << 20
SPOT = 4096  # bytes that are looked at
GLOBAL, THREAD_LOCAL = 0, 1

BOTH = [bfc.CachingAllocator, bfc.BFCAllocator]
both = pytest.mark.parametrize("make_cuda", BOTH, indirect=True)
caching = pytest.mark.parametrize("make_cuda", [bfc.CachingAllocator], indirect=True)


def begin(stream: int, mode: int = GLOBAL) -> None:
    from cuda.bindings import driver

    raw_cuda.call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode(mode))


def end(stream: int) -> Any:
    return raw_cuda.call("cuStreamEndCapture", stream)


def is_capturing(stream: int) -> bool:
    """Whether it captures, and nothing has spoilt that."""
    return int(raw_cuda.call("cuStreamIsCapturing", stream)) == 1


@contextmanager
def instantiated(graph: Any) -> Iterator[Any]:
    with raw_cuda.current():
        made = raw_cuda.call("cuGraphInstantiate", graph, 0)
    yield made
    raw_cuda.call("cuGraphExecDestroy", made)
    raw_cuda.call("cuGraphDestroy", graph)


def follow(stream: int, after: int) -> None:
    """Makes a stream wait for all that is in another."""
    with raw_cuda.current():
        event = raw_cuda.call("cuEventCreate", 0)
        raw_cuda.call("cuEventRecord", event, after)
        raw_cuda.call("cuStreamWaitEvent", stream, event, 0)
        raw_cuda.call("cuEventDestroy", event)


@both
def test_a_graph_is_replayed_while_others_allocate(make_cuda) -> None:
    """Its bytes go to nobody else, whatever happens in between: frees, emptying, running out."""
    allocator = make_cuda(allow_growth=True)
    with raw_cuda.stream() as stream:
        out = allocator.allocate(SPOT, stream=stream)
        with allocator.capture(stream) as pool:
            begin(stream)
            work = allocator.allocate(12 * MIB, stream=stream)
            raw_cuda.fill(work.ptr, 5, SPOT, on=stream)
            with raw_cuda.current():
                raw_cuda.call("cuMemcpyDtoDAsync", out.ptr, work.ptr, SPOT, stream)
            inside = range(work.ptr, work.ptr + 12 * MIB)
            work.free()
            graph = end(stream)
        with instantiated(graph) as made:
            for turn in range(100):
                others = []
                while (block := allocator.try_allocate(7 * MIB, stream=stream)) is not None:
                    assert block.ptr not in inside
                    assert block.ptr + 7 * MIB - 1 not in inside
                    others.append(block)
                for block in others:
                    raw_cuda.fill(block.ptr, turn, SPOT, on=stream)
                raw_cuda.fill(out.ptr, 0, SPOT, on=stream)
                raw_cuda.call("cuGraphLaunch", made, stream)
                assert raw_cuda.read(out.ptr, SPOT) == bytes([5]) * SPOT
                for block in others:
                    assert raw_cuda.read(block.ptr, SPOT) == bytes([turn]) * SPOT
                for block in others:
                    block.free()
                allocator.empty_cache()
        pool.release()
        out.free()
        allocator.empty_cache()
        assert allocator.stats().pool_bytes == 0


@both
@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
def test_nothing_is_called_that_spoils_a_capture(make_cuda, mode: int) -> None:
    """Misses, frees of what other streams use, dropped buffers, emptying and refusals."""
    allocator = make_cuda(allow_growth=True)
    with raw_cuda.stream() as stream, raw_cuda.stream() as side, raw_cuda.stream() as outside:
        early = allocator.allocate(12 * MIB, stream=stream)
        allocator.record_stream(early, outside)
        waiting = allocator.allocate(MIB, stream=outside)
        allocator.record_stream(waiting, stream)
        waiting.free()  # a fence is queried at the next allocation that may
        with allocator.capture(stream) as pool, bfc.use_stream(stream):
            begin(stream, mode)
            follow(side, stream)
            for size in (1000, 3 * MIB, 12 * MIB):
                buffer = allocator.allocate(size)
                allocator.record_stream(buffer, side)
                raw_cuda.fill(buffer.ptr, 1, 100, on=side)
                buffer.free()
            buffer = allocator.allocate(1000)
            allocator.record_stream(buffer, side)
            del buffer
            allocator.record_stream(early, 0)
            early.free()
            allocator.empty_cache()
            with pytest.raises(bfc.OutOfMemoryError):
                allocator.allocate(60 * MIB)
            assert is_capturing(stream)
            follow(stream, side)
            raw_cuda.call("cuGraphDestroy", end(stream))
        pool.release()
        allocator.allocate(1000, stream=stream).free()
        allocator.empty_cache()
        assert allocator.stats().pool_bytes == 0


@both
def test_another_thread_may_allocate_and_free_meanwhile(make_cuda) -> None:
    allocator = make_cuda(allow_growth=True)
    errors: list[BaseException] = []
    with raw_cuda.stream() as stream, raw_cuda.stream() as outside:

        def elsewhere() -> None:
            try:
                for size in (1000, 3 * MIB, 12 * MIB):
                    buffer = allocator.allocate(size, stream=outside)
                    assert pool.snapshot().regions == ()
                    allocator.record_stream(buffer, stream)
                    buffer.free()
            except BaseException as error:
                errors.append(error)

        with allocator.capture(stream) as pool:
            begin(stream)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert is_capturing(stream)
            raw_cuda.call("cuGraphDestroy", end(stream))
        pool.release()
        allocator.allocate(1000, stream=outside).free()
    assert errors == []


@caching
def test_the_structure_of_a_graph_proves_what_is_safe(make_cuda) -> None:
    allocator = make_cuda(settings="graph_capture_record_stream_reuse:True")
    with raw_cuda.stream() as stream, raw_cuda.stream() as side:
        with allocator.capture(stream) as pool:
            begin(stream)
            first = allocator.allocate(12 * MIB, stream=stream)
            raw_cuda.fill(first.ptr, 1, 100, on=stream)
            follow(side, stream)
            raw_cuda.fill(first.ptr, 2, 100, on=side)
            allocator.record_stream(first, side)
            address = first.ptr
            first.free()
            second = allocator.allocate(12 * MIB, stream=stream)
            raw_cuda.fill(second.ptr, 3, 100, on=stream)
            assert second.ptr != address
            follow(stream, side)
            third = allocator.allocate(12 * MIB, stream=stream)
            assert third.ptr == address
            raw_cuda.call("cuGraphDestroy", end(stream))
        second.free()
        third.free()
        pool.release()


FAILING = ["cuMemAlloc", "cuCtxPushCurrent", "cuCtxGetId", "cuThreadExchangeStreamCaptureMode"]
ASKED = ["cuStreamGetCaptureInfo", "cuEventRecord", "cuEventCreate", "cuEventQuery", "cuMemFree"]


@both
@pytest.mark.parametrize("call", FAILING + ASKED)
def test_a_call_that_fails_in_a_capture_loses_nothing(
    emulated, make_cuda, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: reported.append(str(it.exc_value)))
    allocator = make_cuda(allow_growth=True)
    with raw_cuda.stream() as stream, raw_cuda.stream() as outside:
        shared = allocator.allocate(12 * MIB, stream=outside)
        with allocator.capture(stream) as pool:
            begin(stream)
            emulated.fail(call, "CUDA_ERROR_UNKNOWN")
            made = []
            for _ in range(2):
                try:
                    made.append(allocator.allocate(3 * MIB, stream=stream))
                    allocator.record_stream(made[-1], stream)
                    shared.free()
                    allocator.empty_cache()
                except (bfc.SubAllocatorError, bfc.OutOfMemoryError, bfc.InvalidPointerError):
                    pass
            emulated.clear()
            for buffer in made:
                buffer.free()
            assert is_capturing(stream)
            raw_cuda.call("cuGraphDestroy", end(stream))
        pool.release()
        allocator.check()
        allocator.allocate(3 * MIB, stream=stream).free()
        allocator.empty_cache()
    assert allocator.stats().bytes_in_use in (0, 12 * MIB)
    assert all(call in text for text in reported)  # of the fence of what was freed, at most


@pytest.mark.parametrize("make_cuda", [bfc.BFCAllocator], indirect=True)
@pytest.mark.parametrize("home_captures", [True, False])
def test_no_stream_is_made_to_wait_for_one_that_captures(make_cuda, home_captures: bool) -> None:
    """Memory of a BFCAllocator belongs to its own stream, which others wait for: not while that one
    captures, which would draw them into the graph."""
    errors: list[BaseException] = []
    with raw_cuda.stream() as stream, raw_cuda.stream() as outside:
        allocator = make_cuda(allow_growth=True, stream=stream if home_captures else 0)
        allocator.allocate(MIB).free()

        def elsewhere() -> None:
            try:
                allocator.allocate(MIB, stream=outside).free()
            except BaseException as error:
                errors.append(error)

        with allocator.capture(stream) as pool:
            begin(stream)
            inside = allocator.allocate(MIB, stream=stream)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert is_capturing(stream)
            assert not is_capturing(outside)
            raw_cuda.call("cuGraphDestroy", end(stream))
        assert ["is being captured" in str(error) for error in errors] == [True] * home_captures
        elsewhere()
        assert len(errors) == home_captures
        inside.free()
        pool.release()
        allocator.empty_cache()
        assert allocator.stats().pool_bytes == 0


@both
def test_after_a_capture_that_the_driver_spoilt_the_allocator_goes_on(make_cuda) -> None:
    allocator = make_cuda(allow_growth=True)
    with raw_cuda.stream() as stream:
        with allocator.capture(stream) as pool:
            begin(stream)
            buffer = allocator.allocate(3 * MIB, stream=stream)
            with pytest.raises(RuntimeError, match="CAPTURE_UNSUPPORTED"):
                raw_cuda.synchronize(stream)
            allocator.allocate(3 * MIB, stream=stream).free()
            with pytest.raises(RuntimeError, match="CAPTURE_INVALIDATED"):
                end(stream)
        pool.release()
        buffer.free()
        allocator.empty_cache()
        assert allocator.stats().pool_bytes == 0
        with allocator.capture(stream) as pool:
            begin(stream)
            allocator.allocate(3 * MIB, stream=stream).free()
            raw_cuda.call("cuGraphDestroy", end(stream))
        pool.release()


@both
def test_a_stream_of_another_device_is_refused(make_cuda) -> None:
    if bfc.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    allocator = make_cuda(allow_growth=True)
    with (
        raw_cuda.stream(1) as stream,
        pytest.raises(ValueError, match="belongs to another device"),
    ):
        allocator.capture(stream)


@both
def test_a_hit_in_a_capture_calls_no_driver(emulated, make_cuda) -> None:
    allocator = make_cuda(allow_growth=True)
    with raw_cuda.stream() as stream:
        with allocator.capture(stream) as pool:
            begin(stream)
            allocator.allocate(1000, stream=stream).free()
            with emulated.counting() as calls:
                allocator.allocate(1000, stream=stream).free()
            assert calls == {"cuStreamGetCaptureInfo": 0} or not calls
            raw_cuda.call("cuGraphDestroy", end(stream))
        pool.release()


MAPPED = {
    "stitch": (bfc.CachingAllocator, {"stitch": True}),
    "expandable": (bfc.CachingAllocator, {"settings": "expandable_segments:True"}),
    "virtual_memory": (bfc.BFCAllocator, {"virtual_memory": True}),
}
ACTIONS = ["empty_cache", "run out", "sleep", "wake"]


@pytest.mark.parametrize(
    ("make_cuda", "options", "action"),
    [
        pytest.param(policy, options, action, id=f"{action}-{name}")
        for name, (policy, options) in MAPPED.items()
        for action in (*ACTIONS, "trim")[: 4 if name == "expandable" else 5]
    ],
    indirect=["make_cuda"],
)
def test_mapped_memory_of_a_captured_stream_is_left_alone(
    make_cuda, options: dict[str, Any], action: str
) -> None:
    """Nobody can wait for the stream, so that what it has freed stays until the capture is over."""
    allocator = make_cuda(**options)
    with raw_cuda.stream() as stream, raw_cuda.stream() as outside:
        with allocator.tag("weights"):
            weights = allocator.allocate(4 * MIB, stream=outside)
        if action == "wake":
            allocator.sleep()
        allocator.allocate(12 * MIB, stream=stream).free()
        with allocator.capture(stream) as pool:
            begin(stream)
            work = allocator.allocate(3 * MIB, stream=stream)
            match action:
                case "trim":
                    allocator.trim()
                case "empty_cache":
                    allocator.empty_cache()
                case "run out":
                    assert allocator.try_allocate(1 << 40, stream=outside) is None
                case "sleep":
                    allocator.sleep()
                case "wake":
                    allocator.wake()
            assert not is_capturing(outside)
            assert is_capturing(stream)
            raw_cuda.call("cuGraphDestroy", end(stream))
        work.free()
        pool.release()
        weights.free()
        allocator.empty_cache()
        assert allocator.stats().pool_bytes == 0
        allocator.close()


@pytest.mark.parametrize(
    ("make_cuda", "options"),
    [MAPPED["stitch"], MAPPED["virtual_memory"]],
    indirect=["make_cuda"],
)
def test_pages_of_a_captured_stream_do_not_go_to_another(
    make_cuda, options: dict[str, Any]
) -> None:
    """That would have to wait for it, which the driver refuses. A thread that does not capture is
    refused the memory, and gets it afterwards."""
    allocator = make_cuda(**options, memory_limit="60 MiB")
    kept: list[bfc.Buffer] = []
    with raw_cuda.stream() as stream, raw_cuda.stream() as outside:

        def take_all() -> None:
            while (block := allocator.try_allocate(4 * MIB, stream=outside)) is not None:
                kept.append(block)

        allocator.allocate(40 * MIB, stream=stream).free()
        with allocator.capture(stream) as pool:
            begin(stream)
            thread = threading.Thread(target=take_all)
            thread.start()
            thread.join()
            assert len(kept) == 5
            assert is_capturing(stream)
            raw_cuda.call("cuGraphDestroy", end(stream))
        pool.release()
        take_all()
        assert len(kept) == 15
        for block in kept:
            block.free()
        allocator.empty_cache()
        allocator.close()
