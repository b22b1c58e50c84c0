"""CUDASubAllocator, and an allocator over it: memory, limits, errors, contexts."""

from __future__ import annotations

import gc
import pickle

import pytest
import raw_cuda
from memory_hooks import call_without_memory

import bfc

MIB, GIB = 1 << 20, 1 << 30
KINDS = ["device", "managed", "pinned", "async"]
ALLOCS = {
    "device": "cuMemAlloc",
    "managed": "cuMemAllocManaged",
    "pinned": "cuMemHostAlloc",
    "async": "cuMemAllocAsync",
}
FREES = {
    "device": "cuMemFree",
    "managed": "cuMemFree",
    "pinned": "cuMemFreeHost",
    "async": "cuMemFreeAsync",
}


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_memory_of_each_kind_can_be_written_and_read(make_cuda, kind: str) -> None:
    allocator = make_cuda(kind=kind)
    first, second = allocator.allocate(1000), allocator.allocate(1000)
    raw_cuda.fill(first.ptr, 1, 1000)
    raw_cuda.fill(second.ptr, 2, 1000)
    assert raw_cuda.read(first.ptr, 1000) == bytes([1] * 1000)
    assert raw_cuda.read(second.ptr, 1000) == bytes([2] * 1000)


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_asks_the_driver_for_what_it_says(make_cuda, emulated, kind: str) -> None:
    allocator = make_cuda(kind=kind, memory_limit="4 MiB")
    buffer = allocator.allocate(1000)
    assert [call.nbytes for call in emulated.calls if call.name == ALLOCS[kind]] == [4 * MIB]
    buffer.free()
    assert allocator.release_free_regions() == 4 * MIB
    assert emulated.count(FREES[kind]) == 1


@pytest.mark.usefixtures("quiet_collector")
@pytest.mark.parametrize("kind", KINDS)
def test_an_alloc_that_finds_no_host_memory_keeps_nothing(make_cuda, kind: str) -> None:
    """Where there was none for its answer, the block was nobody's."""
    source = make_cuda(kind=kind).sub_allocator
    for n in range(30):
        _, block = call_without_memory(n, source.alloc, 256, MIB)
        assert source.live_bytes == (MIB if block else 0)
        if block:
            source.free(*block)


@pytest.mark.parametrize("kind", ["pinned", "managed"])
def test_memory_that_the_host_reaches_speaks_the_buffer_protocol(make_cuda, kind: str) -> None:
    allocator = make_cuda(kind=kind)
    buffer = allocator.allocate(4)
    if not allocator.host_accessible:
        pytest.skip("this device's managed memory is not for the host while a kernel runs")
    memoryview(buffer)[:] = b"host"
    assert raw_cuda.read(buffer.ptr, 4) == b"host"


def test_device_memory_is_not_for_the_host(make_cuda) -> None:
    with pytest.raises(BufferError, match="cuda:0"):
        memoryview(make_cuda().allocate(4))


def test_a_large_region_costs_one_call(make_cuda, emulated) -> None:
    allocator = make_cuda(memory_limit="40 GiB")
    allocator.deallocate_raw(allocator.allocate_raw(30 * GIB))
    assert emulated.count("cuMemAlloc") == 1


def test_free_and_total_memory_are_the_drivers(emulated) -> None:
    source = bfc.CUDASubAllocator(1)
    emulated.set_free(1, 3 * GIB)
    try:
        assert source.memory_info() == (3 * GIB, 8 * GIB)
        assert source.total_bytes == 8 * GIB
    finally:
        emulated.set_others(1, 0)


@pytest.mark.parametrize(
    ("free", "capability", "expected"),
    [
        (GIB, 9, GIB - 225 * MIB),
        (2 * GIB - 1, 6, 2 * GIB - 1 - 225 * MIB),
        (2 * GIB, 6, 2 * GIB - 500 * MIB),
        (4 * GIB, 5, 4 * GIB - 500 * MIB),
        (4 * GIB, 7, 4 * GIB - 1050 * MIB),
        (4 * GIB, 8, 4 * GIB - 1536 * MIB),
        (4 * GIB, 9, 4 * GIB - 1800 * MIB),
        (4 * GIB, 12, 4 * GIB - 1800 * MIB),
        (225 * MIB, 9, 225 * MIB),
        (226 * MIB, 9, MIB),
    ],
)
def test_the_default_limit_is_tensorflows(emulated, free, capability, expected) -> None:
    source = bfc.CUDASubAllocator(1)
    emulated.set_free(1, free)
    emulated.set_attribute(1, raw_cuda.COMPUTE_CAPABILITY_MAJOR, capability)
    try:
        assert source.allocation_limit() == expected
        assert bfc.BFCAllocator(source).memory_limit == expected
    finally:
        emulated.set_others(1, 0)
        emulated.set_attribute(1, raw_cuda.COMPUTE_CAPABILITY_MAJOR, 9)


def test_a_fraction_is_of_the_devices_memory(emulated) -> None:
    allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(1), memory_limit=0.5)
    assert allocator.memory_limit == 4 * GIB


def test_no_more_than_the_driver_has(make_cuda, emulated) -> None:
    """Out of memory in the middle of growth: less is asked for, then the error says who refused."""
    emulated.set_free(1, 10 * MIB)
    try:
        allocator = make_cuda(1, memory_limit="1 GiB", allow_growth=True)
        held = [allocator.allocate(2 * MIB) for _ in range(4)]
        with pytest.raises(bfc.OutOfMemoryError, match=r"refused by.*CUDASubAllocator\(1"):
            allocator.allocate(4 * MIB)
        allocator.check()
        held.clear()
        allocator.allocate(4 * MIB).free()
    finally:
        emulated.set_others(1, 0)


# -- devices ---------------------------------------------------------------------------------------


def test_each_device_has_its_own_memory(make_cuda, emulated) -> None:
    buffers = [make_cuda(device).allocate(1000) for device in (0, 1)]
    assert [emulated.device_of(buffer.ptr) for buffer in buffers] == [0, 1]
    assert [str(buffer.device) for buffer in buffers] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("device", [-1, 1000])
def test_a_device_that_is_not_there_is_told(device: int) -> None:
    with pytest.raises(bfc.DeviceUnavailableError, match=f"no device {device}: the driver shows"):
        bfc.CUDASubAllocator(device)


@pytest.mark.parametrize("device", ["0", 1.0, None])
def test_an_ordinal_is_an_int(device: object) -> None:
    with pytest.raises(TypeError):
        bfc.CUDASubAllocator(device)


def test_a_kind_is_one_of_four() -> None:
    with pytest.raises(ValueError, match="'device', 'managed', 'pinned', 'async', not 'unified'"):
        bfc.CUDASubAllocator(0, kind="unified")


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [("async", raw_cuda.HAS_MEMORY_POOLS), ("managed", raw_cuda.HAS_MANAGED_MEMORY)],
)
def test_a_device_without_such_memory_says_what_to_take(emulated, kind, attribute) -> None:
    before = emulated.retained(1)
    emulated.set_attribute(1, attribute, 0)
    try:
        with pytest.raises(bfc.DeviceUnavailableError, match='take kind="device"'):
            bfc.CUDASubAllocator(1, kind=kind)
        assert emulated.retained(1) == before
    finally:
        emulated.set_attribute(1, attribute, 1)


def test_the_context_is_let_go_with_the_last_reference(emulated) -> None:
    before = emulated.retained(0), emulated.live_events(), emulated.live_streams()
    for kind in KINDS:
        allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(kind=kind), memory_limit="2 MiB")
        buffer = allocator.allocate(100, stream=2)
        assert emulated.retained(0) == before[0] + 1
        del allocator
        gc.collect()
        assert emulated.retained(0) == before[0] + 1, "a buffer keeps its memory"
        del buffer
        gc.collect()
        assert (emulated.retained(0), emulated.live_events(), emulated.live_streams()) == before


def test_an_allocator_that_is_dropped_keeps_the_memory_of_live_buffers(make_cuda) -> None:
    allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="2 MiB")
    buffer = allocator.allocate(4)
    del allocator
    gc.collect()
    raw_cuda.fill(buffer.ptr, 7, 4)
    assert raw_cuda.read(buffer.ptr, 4) == bytes([7] * 4)


# -- errors ----------------------------------------------------------------------------------------


def test_a_driver_error_has_the_drivers_name_and_says_what_to_do(make_cuda, emulated) -> None:
    allocator = make_cuda()
    emulated.fail("cuMemAlloc", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(bfc.DriverError) as caught:
        allocator.allocate(1000)
    error = caught.value
    assert (error.name, error.code) == ("CUDA_ERROR_ILLEGAL_ADDRESS", 700)
    assert error.call.startswith("cuMemAlloc(67108864 bytes) on device 0")
    assert "compute-sanitizer" in str(error)
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied)) == (bfc.DriverError, str(error))
    allocator.allocate(1000).free()


def test_a_driver_error_is_a_sub_allocators() -> None:
    assert issubclass(bfc.DriverError, bfc.SubAllocatorError)
    assert issubclass(bfc.SubAllocatorError, RuntimeError)


def test_a_block_that_the_driver_does_not_take_back_can_be_offered_again(emulated) -> None:
    source = bfc.CUDASubAllocator()
    address, received = source.alloc(256, MIB)
    emulated.fail("cuMemFree", "CUDA_ERROR_UNKNOWN")
    with pytest.raises(bfc.DriverError, match="CUDA_ERROR_UNKNOWN"):
        source.free(address, received)
    assert source.live_bytes == MIB
    source.free(address, received)
    assert source.live_bytes == 0


def a_life(allocator: bfc.BFCAllocator) -> None:
    """Every way in which an allocator calls the driver."""
    first = allocator.allocate(1 * MIB)
    second = allocator.allocate(3 * MIB, stream=2)
    allocator.record_stream(first, 2)
    first.free()
    second.free()
    third = allocator.allocate(100, stream=2)
    allocator.allocate(8 * MIB).free()
    del third
    allocator.allocate(200).free()
    allocator.release_free_regions()


CALLS = [
    "cuCtxGetId",
    "cuCtxPushCurrent",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemAllocManaged",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuStreamIsCapturing",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuStreamWaitEvent",
]


@pytest.mark.sampled(64)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("error", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_each_call_fails_at_each_place(emulated, name, kind, error, recwarn, monkeypatch) -> None:
    """A clear error or none, nothing lost, and the allocator usable after."""
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)
    before = emulated.live()
    place = 0
    while True:
        place += 1
        source = bfc.CUDASubAllocator(kind=kind)
        allocator = bfc.BFCAllocator(source, memory_limit="64 MiB", allow_growth=True)
        emulated.clear()
        emulated.fail(name, error, at=place)
        try:
            a_life(allocator)
        except (bfc.SubAllocatorError, bfc.OutOfMemoryError):
            pass
        reached = emulated.count(name) >= place
        emulated.clear()
        allocator.check()
        gc.collect()
        a_life(allocator)
        allocator.check()
        assert allocator.stats().bytes_in_use == 0
        allocator.close()
        assert source.live_bytes == 0
        if not reached:
            break
        assert place < 60
    assert emulated.live() == before


# -- the context -----------------------------------------------------------------------------------


def test_a_context_that_is_reset_under_us_is_told_and_can_be_closed(emulated) -> None:
    source = bfc.CUDASubAllocator(1)
    allocator = bfc.BFCAllocator(source, memory_limit="64 MiB", allow_growth=True)
    buffer = allocator.allocate(1000)
    used = allocator.allocate(1000, stream=2)
    raw_cuda.call("cuDevicePrimaryCtxReset", 1)
    with pytest.raises(bfc.DriverError, match=r"was reset.*make another"):
        allocator.allocate(8 * MIB)
    buffer.free()
    used.free()
    allocator.close()
    assert source.live_bytes == 0


def test_a_context_that_is_reset_and_used_anew_by_others_is_told_too(emulated) -> None:
    """The new context has the old one's handle: its memory and events are not ours."""
    source = bfc.CUDASubAllocator(1)
    allocator = bfc.BFCAllocator(source, memory_limit="64 MiB", allow_growth=True)
    allocator.allocate(1000, stream=2).free()
    raw_cuda.call("cuDevicePrimaryCtxReset", 1)
    with raw_cuda.current(1):
        with pytest.raises(bfc.DriverError, match="CUDA_ERROR_CONTEXT_IS_DESTROYED"):
            allocator.allocate(8 * MIB)
        allocator.close()
        del allocator, source
        gc.collect()
        with bfc.BFCAllocator(bfc.CUDASubAllocator(1), memory_limit="2 MiB") as another:
            another.allocate(1000).free()


def test_the_callers_own_context_stays_current(make_cuda, emulated) -> None:
    with raw_cuda.current(1):
        before = raw_cuda.call("cuCtxGetCurrent")
        allocator = make_cuda(0)
        allocator.allocate(100, stream=2).free()
        emulated.fail("cuMemAlloc", "CUDA_ERROR_UNKNOWN")
        assert int(raw_cuda.call("cuCtxGetCurrent")) == int(before)


# -- graphs ----------------------------------------------------------------------------------------


def test_memory_grows_while_another_thread_captures_a_graph(make_cuda) -> None:
    allocator = make_cuda(allow_growth=True)
    with raw_cuda.stream() as stream:
        from cuda.bindings import driver

        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        raw_cuda.call("cuStreamBeginCapture", stream, mode)
        try:
            allocator.allocate(1000).free()
            allocator.allocate(8 * MIB).free()
            assert allocator.release_free_regions() > 0
        finally:
            raw_cuda.call("cuStreamEndCapture", stream)
    assert allocator.stats().pool_bytes == 0


def test_memory_of_a_stream_that_captures_is_kept_until_after(make_cuda) -> None:
    from cuda.bindings import driver

    allocator = make_cuda()
    with raw_cuda.stream() as stream:
        buffer = allocator.allocate(1000)
        allocator.record_stream(buffer, stream)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        raw_cuda.call("cuStreamBeginCapture", stream, mode)
        try:
            with pytest.raises(bfc.DriverError, match="graph is being captured"):
                buffer.free()
            assert allocator.requested_size(buffer.ptr) == 1000
        finally:
            raw_cuda.call("cuStreamEndCapture", stream)
        buffer.free()
    assert allocator.stats().bytes_in_use == 0
