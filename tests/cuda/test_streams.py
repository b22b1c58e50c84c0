"""Fences, orders, and what is not reused too early."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator

import pytest
import raw_cuda

import bfc
from bfc.testing import Misbehaving

LEGACY, PER_THREAD = 1, 2


@pytest.fixture
def allocator(make_cuda) -> bfc.BFCAllocator:
    return make_cuda()


@pytest.fixture
def blocking() -> Iterator[int]:
    """A stream that the default stream waits for, as CuPy, numba and PyTorch make them."""
    with raw_cuda.stream(flags=0) as stream:
        yield stream


# -- no driver call where none is needed -----------------------------------------------------------


def test_memory_of_one_stream_costs_no_driver_call(allocator, emulated) -> None:
    allocator.allocate(1000).free()
    with emulated.counting() as calls:
        for n in range(100):
            allocator.allocate(100 + n).free()
            allocator.deallocate_raw(allocator.allocate_raw(200 + n))
            allocator.deallocate_many(allocator.allocate_many([n + 1, 1000]))
            allocator.allocate(300, stream=LEGACY).free()
    assert calls == {}


@pytest.mark.skipif(os.environ.get("BFC_DEBUG") == "2", reason="it checks after each change")
def test_an_allocation_and_a_free_take_the_lock_once_each(allocator) -> None:
    allocator.allocate(1000).free()
    before = allocator._lock_acquisitions
    for _ in range(100):
        allocator.allocate(1000).free()
        allocator.deallocate_raw(allocator.allocate_raw(1000))
    assert allocator._lock_acquisitions - before == 400 + 1, "and one to ask"


@pytest.mark.parametrize("name", ["llm_decode_kv", "unet_buckets", "resnet50_multiscale"])
def test_a_recorded_run_calls_the_driver_for_regions_only(emulated, name: str) -> None:
    trace = bfc.Trace.load(f"bench/traces/{name}.npz")
    source = bfc.CUDASubAllocator()
    with bfc.BFCAllocator(source, memory_limit="60 GiB", allow_growth=True) as allocator:
        with emulated.counting() as calls:
            result = trace.replay(allocator)
        regions = len(allocator.snapshot().regions)
        assert result.failed == 0
        assert calls["cuMemAlloc"] == regions
        around = ("cuCtxGetId", "cuCtxPushCurrent", "cuCtxPopCurrent")
        around += ("cuThreadExchangeStreamCaptureMode",)
        assert set(calls) <= {"cuMemAlloc", *around}
        assert sum(calls.values()) == 6 * regions
        with emulated.counting() as calls:
            trace.closed().replay(allocator)
        assert calls == {}, "the second time everything is there"


def test_importing_and_asking_nothing_calls_nothing(emulated) -> None:
    with emulated.counting() as calls:
        assert bfc.CUDASubAllocator.asynchronous
        assert bfc.cuda is not None
    assert calls == {}


# -- record_stream ---------------------------------------------------------------------------------


def test_memory_is_not_reused_before_the_other_stream_has_finished(
    allocator, emulated, side
) -> None:
    buffer = allocator.allocate(4)
    first = buffer.ptr
    raw_cuda.fill(first, 5, 4)
    raw_cuda.synchronize(LEGACY)
    allocator.record_stream(buffer, side)
    emulated.hold(side)
    with raw_cuda.queued_read(first, 4, side) as seen:
        buffer.free()
        assert allocator.stats().bytes_waiting_for_streams == 256
        other = allocator.allocate(4)
        assert other.ptr != first, "it is still read there"
        raw_cuda.fill(other.ptr, 9, 4)
        emulated.release(side)
        assert bytes(seen) == bytes([5] * 4)
    assert allocator.allocate(4).ptr == first
    assert allocator.stats().bytes_waiting_for_streams == 0


def test_running_out_waits_for_the_other_stream(make_cuda, emulated, side) -> None:
    """The call blocks in cuEventSynchronize without the GIL: another thread lets it go on."""
    allocator = make_cuda(memory_limit="4 MiB")
    buffer = allocator.allocate("3 MiB")
    allocator.record_stream(buffer, side)
    emulated.hold(side)
    raw_cuda.fill(buffer.ptr, 1, 4, side)
    buffer.free()
    release = emulated.release_once_waited_for(side)
    allocator.allocate("3 MiB").free()
    release.join()
    assert emulated.count("cuEventSynchronize") == 1


def test_the_stream_that_a_view_of_the_default_stream_names_is_the_default(allocator, emulated):
    buffer = allocator.allocate(4)
    for same in (0, LEGACY, None):
        allocator.record_stream(buffer, same)
    with emulated.counting() as calls:
        buffer.free()
    assert calls == {}


def test_a_per_thread_stream_is_fenced_for_all_threads(allocator, emulated, blocking) -> None:
    """Which thread's it is cannot be known at the free; the default stream waits for every one."""
    buffer = allocator.allocate(4)
    allocator.record_stream(buffer, PER_THREAD)
    emulated.hold(blocking)
    raw_cuda.fill(buffer.ptr, 1, 4, blocking)
    ptr = buffer.ptr
    buffer.free()
    assert allocator.allocate(4).ptr != ptr
    emulated.release(blocking)
    assert allocator.allocate(4).ptr == ptr


def test_events_are_used_again(allocator, emulated, side) -> None:
    for _ in range(50):
        buffer = allocator.allocate(100)
        allocator.record_stream(buffer, side)
        buffer.free()
    assert emulated.count("cuEventCreate") <= 1


def test_a_poll_stops_at_the_first_unfinished_fence_of_a_stream(allocator, emulated, side) -> None:
    emulated.hold(side)
    buffers = [allocator.allocate(100) for _ in range(20)]
    for buffer in buffers:
        allocator.record_stream(buffer, side)
        raw_cuda.fill(buffer.ptr, 1, 4, side)
        buffer.free()
    with emulated.counting() as calls:
        allocator.allocate(50).free()
    assert calls["cuEventQuery"] == 1
    emulated.release(side)
    allocator.allocate(50).free()
    assert allocator.stats().bytes_in_use == 0


def test_a_stream_object_lives_as_long_as_its_fence(allocator, emulated, side) -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, side

    stream = Stream()
    gone = weakref.ref(stream)
    buffer = allocator.allocate(100, stream=stream)
    del stream
    gc.collect()
    assert gone() is not None, "its handle will be asked for a fence"
    buffer.free()
    gc.collect()
    assert gone() is None


def test_a_stream_of_another_device_is_refused_and_nothing_is_lost(make_cuda, emulated) -> None:
    """The driver lets streams of two devices wait for each other, but marks no foreign one."""
    allocator = make_cuda(0)
    with raw_cuda.stream(device=1) as foreign:
        recorded = allocator.allocate(100)
        allocator.record_stream(recorded, foreign)
        made = allocator.allocate(100, stream=foreign)
        for buffer in (recorded, made):
            with pytest.raises(bfc.DriverError, match="belongs to another device"):
                buffer.free()
            assert allocator.requested_size(buffer.ptr) == 100
        allocator.allocate(100).free()
        assert allocator.stats().bytes_in_use == 512
        allocator.close()
    assert "wrong context" in emulated.complaints[0]
    emulated.clear()


def test_a_stream_may_be_destroyed_once_its_buffers_are_dropped(allocator, emulated) -> None:
    """A finaliser puts its free off, but not the mark in the stream's queue."""
    with raw_cuda.stream() as stream:
        buffer = allocator.allocate(100, stream=stream)
        ptr = buffer.ptr
        del buffer
    with emulated.counting() as calls:
        assert allocator.allocate(100).ptr == ptr
    assert calls["cuEventRecord"] == 0


def test_a_finaliser_that_the_device_fails_reports_it_and_is_tried_again(
    allocator, emulated, side, monkeypatch
) -> None:
    reports: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", reports.append)
    buffer = allocator.allocate(100, stream=side)
    emulated.fail("cuEventRecord", "CUDA_ERROR_UNKNOWN")
    del buffer
    assert [report.exc_value.name for report in reports] == ["CUDA_ERROR_UNKNOWN"]
    allocator.allocate(100).free()
    assert allocator.stats().bytes_in_use == 256
    allocator.release_free_regions()
    assert allocator.stats().bytes_in_use == 0


def test_a_consumers_stream_may_be_destroyed_once_it_has_let_go(allocator, emulated) -> None:
    """Its use is marked when the last view goes, not when the memory is freed."""
    buffer = allocator.allocate(100)
    with raw_cuda.stream() as stream:
        capsule = buffer.__dlpack__(stream=stream, max_version=(1, 0))
        emulated.hold(stream)
        raw_cuda.fill(buffer.ptr, 1, 4, stream)
        del capsule
        ptr = buffer.ptr
        buffer.free()
        assert allocator.allocate(100).ptr != ptr
        emulated.release(stream)
    assert allocator.allocate(100).ptr == ptr
    second = allocator.allocate(100)
    with raw_cuda.stream() as one, raw_cuda.stream() as two:
        capsules = [second.__dlpack__(stream=on, max_version=(1, 0)) for on in (one, two)]
        del capsules[0]
    with raw_cuda.stream() as late:
        third = second.__dlpack__(stream=late, max_version=(1, 0))
    assert emulated.complaints == []
    capsules.clear()  # after its stream, against the rules: the device is waited for
    del third
    emulated.clear()
    second.free()
    assert allocator.stats().bytes_in_use == 0


def test_memory_that_is_handed_out_again_and_again_collects_no_events(allocator, emulated, side):
    buffer = allocator.allocate(100)
    before = emulated.live_events()
    for _ in range(50):
        buffer.__dlpack__(stream=side, max_version=(1, 0))
    assert emulated.live_events() - before <= 3
    buffer.free()


def test_a_stream_object_that_an_allocator_belongs_to_is_kept(make_cuda, side) -> None:
    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, side

    stream = Stream()
    gone = weakref.ref(stream)
    allocator = make_cuda(stream=stream)
    del stream
    gc.collect()
    assert gone() is not None
    assert allocator.stream == side


@pytest.mark.parametrize("memory_of", ["home", "side"])
def test_a_capture_is_not_joined_and_not_broken(make_cuda, emulated, side, memory_of) -> None:
    """What waits for a capturing stream would join its graph; what it waits for would end it."""
    from cuda.bindings import driver

    with raw_cuda.stream() as other:
        allocator = make_cuda(stream=side if memory_of == "side" else other)
        allocator.allocate(100).free()
        buffer = allocator.allocate(100)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        raw_cuda.call("cuStreamBeginCapture", side, mode)
        refused = {
            "side": (lambda: buffer.__dlpack__(stream=other, max_version=(1, 0)), buffer.to_host),
            "home": (
                lambda: allocator.allocate(100, stream=side),
                lambda: buffer.__dlpack__(stream=side, max_version=(1, 0)),
            ),
        }
        for action in refused[memory_of]:
            with pytest.raises(bfc.DriverError, match="graph is being captured"):
                action()
        status = raw_cuda.call("cuStreamIsCapturing", side)
        assert status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        raw_cuda.call("cuStreamEndCapture", side)
        buffer.free()
        allocator.close()


def test_the_streams_of_a_trace_are_no_handles(allocator, emulated) -> None:
    trace = bfc.Trace(op=[0, 0, 1], id=[0, 1, 0], size=[100, 100, 0], stream=[0, 3, 0])
    result = trace.replay(allocator)
    assert emulated.count("cuEventRecord") == 0
    allocator.deallocate_raw(int(result.addresses[1]))
    assert allocator.stats().bytes_in_use == 0


# -- memory for another stream ---------------------------------------------------------------------


def test_another_stream_waits_for_the_last_use_on_the_allocators(allocator, emulated, side):
    """A freed block may still be read on the home stream: who gets it on another one must wait."""
    old = allocator.allocate(4)
    ptr = old.ptr
    raw_cuda.fill(ptr, 5, 4)
    raw_cuda.synchronize(LEGACY)
    emulated.hold(0)
    with raw_cuda.queued_read(ptr, 4, LEGACY) as seen:
        old.free()
        new = allocator.allocate(4, stream=side)
        assert new.ptr == ptr
        raw_cuda.fill(ptr, 9, 4, side)
        assert bytes(seen) == bytes(4)
        emulated.release(0)
        assert bytes(seen) == bytes([5] * 4), "the side stream did not wait"
    raw_cuda.synchronize(side)
    assert raw_cuda.read(ptr, 4) == bytes([9] * 4)


def test_one_wait_covers_all_that_was_freed_before(allocator, emulated, side) -> None:
    held = [allocator.allocate(100) for _ in range(10)]
    held.clear()
    buffers = [allocator.allocate(100, stream=side) for _ in range(10)]
    assert emulated.count("cuStreamWaitEvent") == 1
    buffers.clear()
    allocator.allocate(100, stream=side).free()
    assert emulated.count("cuStreamWaitEvent") == 1, "fenced frees leave nothing to wait for"
    allocator.allocate(100).free()
    allocator.allocate(100, stream=side).free()
    assert emulated.count("cuStreamWaitEvent") == 2


def test_a_new_stream_with_an_old_handle_waits_too(emulated, side) -> None:
    """The driver may give a handle again, to a stream that has waited for nothing."""

    source = Misbehaving(bfc.CUDASubAllocator())
    with bfc.BFCAllocator(source, memory_limit="2 MiB") as allocator:
        allocator.allocate(100).free()
        for age in (0, 0, 1, 1):
            source.on("stream_id", instead=lambda ask, stream, age=age: ask(stream) + age)
            allocator.allocate(100, stream=side).free()
    assert emulated.count("cuStreamWaitEvent") == 2


def test_streams_have_ids_that_are_never_used_again(emulated) -> None:
    source = bfc.CUDASubAllocator()
    ids = []
    for _ in range(3):
        with raw_cuda.stream() as stream:
            ids.append(source.stream_id(stream))
    assert len({*ids, source.stream_id(0), source.stream_id(PER_THREAD)}) == 5


def test_memory_for_another_stream_can_be_said_to_be_used_at_home(allocator, emulated, side):
    """On another stream's block the home stream is one more stream, with a fence of its own."""
    buffer = allocator.allocate(4, stream=side)
    allocator.record_stream(buffer, 0)
    emulated.hold(0)
    raw_cuda.fill(buffer.ptr, 1, 4, LEGACY)
    ptr = buffer.ptr
    buffer.free()
    assert allocator.allocate(4).ptr != ptr
    emulated.release(0)
    assert allocator.allocate(4).ptr == ptr


def test_an_order_that_fails_gives_the_memory_back(allocator, emulated, side) -> None:
    allocator.allocate(100).free()
    emulated.fail("cuStreamWaitEvent", "CUDA_ERROR_UNKNOWN")
    with pytest.raises(bfc.DriverError, match=r"making stream 0x[0-9a-f]+ wait for stream 0x0"):
        allocator.allocate(100, stream=side)
    assert allocator.stats().bytes_in_use == 0
    allocator.allocate(100, stream=side).free()


def test_an_allocator_of_another_stream(make_cuda, emulated, side) -> None:
    allocator = make_cuda(stream=side)
    assert allocator.stream == side
    allocator.allocate(100).free()
    with emulated.counting() as calls:
        allocator.allocate(100).free()
        allocator.allocate(100, stream=side).free()
    assert calls == {}
    with emulated.counting() as calls:
        allocator.allocate(100, stream=0).free()
    assert calls["cuEventRecord"] == 2, "an order, and a fence"


def test_an_allocator_belongs_to_no_per_thread_stream(make_cuda) -> None:
    with pytest.raises(ValueError, match="another one in each thread"):
        make_cuda(stream=PER_THREAD)


# -- pinned memory ---------------------------------------------------------------------------------


def test_pinned_memory_belongs_to_the_host(make_cuda, emulated, side) -> None:
    """The host uses it in no stream's order: each stream that copies is fenced, the default too."""
    allocator = make_cuda(kind="pinned")
    assert allocator.stream is None
    buffer = allocator.allocate(4)
    assert buffer.stream is None
    with emulated.counting() as calls:
        buffer.free()
    assert calls == {}
    for stream in (0, side):
        buffer = allocator.allocate(4)
        allocator.record_stream(buffer, stream)
        emulated.hold(stream)
        raw_cuda.fill(buffer.ptr, 1, 4, stream or LEGACY)
        ptr = buffer.ptr
        buffer.free()
        assert allocator.allocate(4).ptr != ptr
        emulated.release(stream)
        assert allocator.allocate(4).ptr == ptr


def test_pinned_memory_takes_no_stream_of_its_own(make_cuda) -> None:
    with pytest.raises(ValueError, match="belongs to the host"):
        make_cuda(kind="pinned", stream=7)


def test_raw_pinned_memory_is_taken_to_be_used_on_the_stream_named(make_cuda, emulated) -> None:
    allocator = make_cuda(kind="pinned")
    ptr = allocator.allocate_raw(100)
    with emulated.counting() as calls:
        allocator.deallocate_raw(ptr)
    assert calls["cuEventRecord"] == 1


def test_a_queue_of_opencls_is_no_stream_of_cudas(make_cuda) -> None:
    """The driver would take it for one of its own."""

    class CommandQueue:
        int_ptr = 1 << 20

        def finish(self) -> None: ...

    queue, allocator = CommandQueue(), make_cuda()
    message = "takes CUDA streams, not a CommandQueue"
    with bfc.use_stream(queue):
        for allocate in (allocator.allocate, allocator.allocate_raw):
            with pytest.raises(TypeError, match=message):
                allocate(100)
        with pytest.raises(TypeError, match=message):
            allocator.allocate_many([100])
        buffer = allocator.allocate(100, 0)
    with pytest.raises(TypeError, match=message):
        allocator.record_stream(buffer, queue)
    with pytest.raises(TypeError, match=message):
        make_cuda(stream=queue)
