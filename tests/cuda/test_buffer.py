"""Buffers of CUDA memory, and the libraries that take them: NumPy, numba, cuda.core.

Which rules the protocols follow is tested without CUDA, in tests/buffers/test_buffer.py.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import ModuleType

import numpy as np
import pytest
import raw_cuda

import bfc

KINDS = ["device", "async", "managed", "pinned"]
NUMBERS = np.arange(12, dtype="f4").reshape(3, 4)


# Before `make_cuda` among a test's arguments: memory goes before the streams that it is used on.
@pytest.fixture
def make_stream() -> Iterator[Callable[[], int]]:
    with ExitStack() as streams:
        yield lambda: streams.enter_context(raw_cuda.stream())


@pytest.fixture
def in_thread() -> Iterator[Callable[..., Future]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit


def fill(buffer: bfc.Buffer, value: int, on: int) -> None:
    """Queues it: each byte becomes `value`."""
    raw_cuda.fill(buffer.ptr, value, buffer.nbytes, on)


def blocks(future: Future) -> bool:
    """Whether it has still not finished after a while."""
    threading.Event().wait(0.05)
    return not future.done()


# -- from the host, and to it ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_array_goes_in_and_comes_out(make_cuda, kind: str) -> None:
    allocator = make_cuda(kind=kind)
    buffer = allocator.allocate(NUMBERS.nbytes).from_host(NUMBERS)
    view = buffer.view("f4", (3, 4))
    assert np.array_equal(view.to_host(), NUMBERS)
    view.from_host(NUMBERS.T.reshape(3, 4).astype("i8"))
    assert np.array_equal(view.to_host(), NUMBERS.T.reshape(3, 4))
    assert buffer.to_host().nbytes == NUMBERS.nbytes
    assert allocator.allocate(0).from_host(b"").to_host().shape == (0,)


def test_a_copy_waits_for_the_buffers_stream(emulated, make_stream, make_cuda, in_thread) -> None:
    stream = make_stream()
    buffer = make_cuda().allocate(64, stream)
    emulated.hold(stream)
    fill(buffer, 7, stream)
    copying = in_thread(buffer.to_host)
    assert blocks(copying)
    with pytest.raises(BufferError, match="in use"):
        buffer.free()
    emulated.release(stream)
    assert set(copying.result()) == {7}
    emulated.hold(stream)
    fill(buffer, 8, stream)
    copying = in_thread(buffer.from_host, bytes(64))
    assert blocks(copying)
    emulated.release(stream)
    assert copying.result() is buffer
    assert set(buffer.to_host()) == {0}


@pytest.mark.parametrize(
    "use",
    [
        bfc.Buffer.to_host,
        lambda buffer: buffer.from_host(bytes(64)),
        lambda buffer: buffer.__dlpack__(copy=True),
        lambda buffer: buffer.__dlpack__(dl_device=(1, 0)),
    ],
)
def test_a_copy_that_the_driver_refuses_holds_nothing(emulated, make_cuda, use: Callable) -> None:
    allocator = make_cuda()
    buffer = allocator.allocate(64)
    emulated.fail("cuMemcpyAsync", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(bfc.errors.DriverError, match="ILLEGAL_ADDRESS"):
        use(buffer)
    buffer.free()
    gc.collect()
    assert allocator.stats().bytes_in_use == 0


# -- the host in place -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["managed", "pinned"])
def test_numpy_shares_memory_that_the_host_reaches(make_cuda, kind: str) -> None:
    allocator = make_cuda(kind=kind)
    if not allocator.sub_allocator.host_accessible:
        pytest.skip("here the host cannot use managed memory while the device does")
    view = allocator.allocate(48).from_host(NUMBERS).view("f4", (3, 4))
    for array in (np.asarray(view), np.from_dlpack(view), np.from_dlpack(view, device="cpu")):
        assert np.array_equal(array, NUMBERS)
        assert array.ctypes.data == view.ptr
        array[1, 2] = 99
        assert view.to_host()[1, 2] == 99
        array[1, 2] = 6
    read_only = view.view("f4", read_only=True)
    assert not np.from_dlpack(read_only).flags.writeable
    assert not np.asarray(read_only).flags.writeable
    with pytest.raises(BufferError, match="in use"):
        view.base.free()
    del array
    view.base.free()


def test_device_memory_comes_to_numpy_as_a_copy(make_cuda) -> None:
    view = make_cuda().allocate(48).from_host(NUMBERS).view("f4", (3, 4))
    for take in (memoryview, np.asarray, np.array):
        with pytest.raises(BufferError, match="cuda:0, where the host cannot read"):
            take(view)
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(view)
    with pytest.raises(BufferError, match="copy"):
        np.from_dlpack(view, device="cpu", copy=False)
    copied = np.from_dlpack(view, device="cpu")
    copied[0] = 0
    assert np.array_equal(view.to_host(), NUMBERS)
    view.base.free()
    assert np.array_equal(copied[1:], NUMBERS[1:])


def test_managed_memory_that_the_host_may_not_touch_is_copied(emulated, make_cuda) -> None:
    emulated.set_attribute(0, raw_cuda.HAS_CONCURRENT_MANAGED_ACCESS, 0)
    try:
        view = make_cuda(kind="managed").allocate(48).from_host(NUMBERS).view("f4", (3, 4))
    finally:
        emulated.set_attribute(0, raw_cuda.HAS_CONCURRENT_MANAGED_ACCESS, 1)
    with pytest.raises(BufferError, match="cuda_managed:0, where the host cannot read"):
        np.asarray(view)
    with pytest.raises(BufferError):
        view.__dlpack__(dl_device=(1, 0), copy=False)
    assert np.array_equal(np.from_dlpack(view, device="cpu"), NUMBERS)
    assert np.array_equal(view.to_host(), NUMBERS)


def test_the_host_gets_managed_memory_when_its_stream_has_finished(
    emulated, make_stream, make_cuda, in_thread
) -> None:
    stream = make_stream()
    buffer = make_cuda(kind="managed").allocate(64, stream)
    emulated.hold(stream)
    fill(buffer, 7, stream)
    taking = in_thread(np.from_dlpack, buffer, device="cpu")
    assert blocks(taking)
    with pytest.raises(BufferError, match="in use"):
        buffer.free()
    emulated.release(stream)
    assert set(taking.result()) == {7}


# -- numba, by the CUDA Array Interface ------------------------------------------------------------


@pytest.fixture
def numba_cuda(machine) -> ModuleType:
    pytest.importorskip("numba_cuda")
    return pytest.importorskip("numba.cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_numba_reads_and_writes_the_memory(numba_cuda, make_cuda, kind: str) -> None:
    view = make_cuda(kind=kind).allocate(48).from_host(NUMBERS).view("f4", (3, 4))
    array = numba_cuda.as_cuda_array(view)
    assert (array.shape, array.dtype, array.device_ctypes_pointer.value) == (
        (3, 4),
        np.float32,
        view.ptr,
    )
    assert np.array_equal(array.copy_to_host(), NUMBERS)
    array.copy_to_device(NUMBERS * 2)
    assert np.array_equal(view.to_host(), NUMBERS * 2)
    numba_cuda.as_cuda_array(view.base)[:4].copy_to_device(np.zeros(4, "u1"))
    assert view.to_host().ravel().tolist() == [0, *(NUMBERS.ravel() * 2)[1:]]


def test_numba_keeps_the_buffer_alive(numba_cuda, make_cuda) -> None:
    allocator = make_cuda()
    array = numba_cuda.as_cuda_array(allocator.allocate(48).from_host(NUMBERS).view("f4"))
    gc.collect()
    assert allocator.stats().bytes_in_use == 256
    assert np.array_equal(array.copy_to_host(), NUMBERS.ravel())
    del array
    gc.collect()
    assert allocator.stats().bytes_in_use == 0


def test_numba_takes_nothing(numba_cuda, make_cuda) -> None:
    allocator = make_cuda()
    for view in (allocator.allocate(0), allocator.allocate(64).view("f4", (0, 3))):
        assert numba_cuda.as_cuda_array(view).size == 0


def test_numba_takes_a_structured_dtype(numba_cuda, make_cuda) -> None:
    fields = np.array([(1, 2.5), (3, 4.5)], [("a", "<i4"), ("b", "<f8")])
    view = make_cuda().allocate(fields.nbytes).from_host(fields).view(fields.dtype)
    assert numba_cuda.as_cuda_array(view).copy_to_host().tobytes() == fields.tobytes()


def test_numba_waits_for_the_stream_that_is_named(
    numba_cuda, emulated, make_stream, make_cuda
) -> None:
    """And where none is, for pinned memory, it waits for none."""
    stream = make_stream()
    for kind, made_on, waited_for in (
        ("device", None, [1]),
        ("device", stream, [stream]),
        ("pinned", None, []),
        ("pinned", stream, [stream]),
    ):
        buffer = make_cuda(kind=kind).allocate(64, made_on)
        before = len(emulated.calls)
        numba_cuda.as_cuda_array(buffer)
        named = [made.stream for made in emulated.calls[before:] if "Synchronize" in made.name]
        assert named == waited_for, kind


def test_numba_reads_what_the_buffers_stream_has_yet_to_write(
    numba_cuda, emulated, make_stream, make_cuda, in_thread
) -> None:
    stream = make_stream()
    buffer = make_cuda().allocate(64, stream)
    emulated.hold(stream)
    fill(buffer, 7, stream)
    reading = in_thread(lambda: numba_cuda.as_cuda_array(buffer).copy_to_host())
    assert blocks(reading)
    emulated.release(stream)
    assert set(reading.result()) == {7}


def test_the_interface_of_freed_memory_is_an_error_that_reaches_the_caller(
    numba_cuda, make_cuda
) -> None:
    allocator = make_cuda()
    freed, closed = allocator.allocate(64), allocator.allocate(64)
    freed.free()
    allocator.close()
    for buffer in (freed, closed, closed.view("f4")):
        with pytest.raises(bfc.ClosedError):
            numba_cuda.as_cuda_array(buffer)


def test_numba_on_the_second_device(numba_cuda, make_cuda) -> None:
    if bfc.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    view = make_cuda(1).allocate(48).from_host(NUMBERS).view("f4", (3, 4))
    assert view.__dlpack_device__() == (2, 1)
    with numba_cuda.gpus[1]:
        assert np.array_equal(numba_cuda.as_cuda_array(view).copy_to_host(), NUMBERS)


# -- cuda.core, by DLPack --------------------------------------------------------------------------


@pytest.fixture
def take(machine) -> Callable:
    """StridedMemoryView.from_dlpack of cuda.core: (object, stream_ptr)."""
    return pytest.importorskip("cuda.core.utils").StridedMemoryView.from_dlpack


@pytest.mark.parametrize(
    ("kind", "on_device"), [("device", 0), ("async", 0), ("managed", 0), ("pinned", 0)]
)
def test_cuda_core_takes_the_memory(make_stream, make_cuda, take, kind, on_device) -> None:
    buffer = make_cuda(kind=kind).allocate(48)
    taken = take(buffer.view("f4", (3, 4)), stream_ptr=make_stream())
    assert (taken.ptr, taken.shape, taken.dtype) == (buffer.ptr, (3, 4), np.float32)
    assert (taken.device_id, taken.is_device_accessible, taken.readonly) == (on_device, True, False)
    with pytest.raises(BufferError, match="1 view"):
        buffer.free()
    del taken
    gc.collect()
    buffer.free()
    assert buffer.freed


def test_cuda_core_hears_that_memory_is_read_only(make_cuda, take) -> None:
    view = make_cuda().allocate(48).view("f4", read_only=True)
    assert take(view, stream_ptr=-1).readonly


def test_cuda_core_takes_the_interface_too(make_stream, make_cuda) -> None:
    StridedMemoryView = pytest.importorskip("cuda.core.utils").StridedMemoryView  # noqa: N806
    view = make_cuda().allocate(48).view("f4", (3, 4), read_only=True)
    taken = StridedMemoryView.from_cuda_array_interface(view, stream_ptr=make_stream())
    assert (taken.ptr, taken.shape, taken.dtype) == (view.ptr, (3, 4), np.float32)
    assert taken.readonly


def test_a_consumer_outlives_every_name(make_cuda, take) -> None:
    allocator = make_cuda()
    taken = take(allocator.allocate(48).view("f4"), stream_ptr=-1)
    gc.collect()
    assert allocator.stats().bytes_in_use == 256
    with pytest.raises(BufferError, match="view"):
        allocator.deallocate_raw(taken.ptr)
    with pytest.raises(BufferError, match="in use"):
        allocator.close()
    assert not allocator.closed
    del taken
    gc.collect()
    assert allocator.stats().bytes_in_use == 0


# -- streams ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "seen"), [("consumer", 7), (-1, 5)])
def test_the_consumers_work_runs_after_the_producers(
    emulated, make_stream, make_cuda, asked: object, seen: int
) -> None:
    """Unless it says that it has seen to that itself."""
    producer, consumer = make_stream(), make_stream()
    buffer = make_cuda().allocate(64, producer).from_host(bytes([5]) * 64)
    emulated.hold(producer)
    fill(buffer, 7, producer)
    capsule = buffer.__dlpack__(stream=consumer if asked == "consumer" else asked)
    with raw_cuda.queued_read(buffer.ptr, 64, consumer) as landing:
        assert set(bytes(landing)) == {0 if seen == 7 else 5}
        emulated.release(producer)
        raw_cuda.synchronize(consumer)
        assert set(bytes(landing)) == {seen}
    del capsule


@pytest.mark.parametrize(("asked", "waits"), [("consumer", True), (-1, False)])
def test_memory_is_not_used_again_before_its_consumer_has_finished(
    emulated, make_stream, make_cuda, asked: object, waits: bool
) -> None:
    consumer = make_stream()
    allocator = make_cuda()
    buffer = allocator.allocate(64)
    address = buffer.ptr
    emulated.hold(consumer)
    capsule = buffer.__dlpack__(stream=consumer if asked == "consumer" else asked)
    fill(buffer, 7, consumer)
    del capsule
    buffer.free()
    assert allocator.stats().bytes_waiting_for_streams == (256 if waits else 0)
    meanwhile = allocator.allocate(64)
    assert (meanwhile.ptr != address) == waits
    meanwhile.free()
    emulated.release(consumer)
    gc.collect()
    assert address in {allocator.allocate(64).ptr, allocator.allocate(64).ptr}
    assert allocator.stats().bytes_waiting_for_streams == 0


def test_the_legacy_default_stream_waits_where_the_consumer_names_none(
    emulated, make_stream, make_cuda
) -> None:
    producer = make_stream()
    buffer = make_cuda().allocate(64, producer)
    for named in (None, 1):
        buffer.from_host(bytes(64))
        emulated.hold(producer)
        fill(buffer, 7, producer)
        capsule = buffer.__dlpack__(stream=named)
        fill(buffer, 9, 1)
        emulated.release(producer)
        assert set(buffer.to_host()) == {9}
        del capsule


def test_a_copy_is_the_consumers_too(emulated, make_stream, make_cuda, take) -> None:
    consumer = make_stream()
    allocator = make_cuda()
    buffer = allocator.allocate(48).from_host(NUMBERS)
    capsule = buffer.__dlpack__(stream=consumer, copy=True)
    buffer.free()
    emulated.hold(consumer)
    copied = allocator.snapshot().regions[0].chunks[1]
    assert (copied.state, copied.requested_size) == ("in use", 48)
    raw_cuda.fill(copied.ptr, 1, 48, consumer)
    del capsule
    gc.collect()
    allocator.allocate(64)
    assert allocator.stats().bytes_waiting_for_streams == 256
    emulated.release(consumer)


def test_what_needs_no_driver_calls_none(emulated, make_stream, make_cuda) -> None:
    stream = make_stream()
    allocator, other = make_cuda(), make_cuda(kind="pinned")
    on_default, on_stream, pinned = (
        allocator.allocate(64),
        allocator.allocate(64, stream),
        other.allocate(64),
    )
    with emulated.counting() as counts:
        for version in (None, (1, 0)):
            for consumer in (None, 1, -1):
                on_default.__dlpack__(stream=consumer, max_version=version)
            pinned.__dlpack__(stream=-1, max_version=version)
            for consumer in (stream, -1):
                on_stream.view("f4").__dlpack__(stream=consumer, max_version=version)
            pinned.__dlpack__(dl_device=(1, 0), max_version=version)
        for buffer in (on_default, on_stream, pinned):
            for _ in range(3):
                assert buffer.__cuda_array_interface__["version"] == 3
        np.asarray(pinned)
    assert counts == {}


def test_a_stream_that_was_destroyed_holds_nothing(emulated, make_cuda) -> None:
    buffer = make_cuda().allocate(64)
    with raw_cuda.stream() as stream:
        pass
    with pytest.raises(bfc.errors.DriverError, match="destroyed"):
        buffer.__dlpack__(stream=stream)
    emulated.clear()  # the driver complains of it
    buffer.free()
    assert buffer.freed
