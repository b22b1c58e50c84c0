"""`PinnedAllocator` on the CUDA driver: PyTorch's rows 85 to 93, and each call that may fail."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pinned_rows
import pytest
import raw_cuda
from cuda_machine import ON_GPU

import bfc
from bfc.drivers.cuda import _device
from bfc.testing import Misbehaving
from bfc.testing import cuda_emulator as emulator

KIB, MIB = 1 << 10, 1 << 20
WAITS = ("cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize")
REGISTERED = "pinned_use_cuda_host_register:True,pinned_num_register_threads:4"


class DriverLane:
    def __init__(self, driver: emulator.Driver, streams: ExitStack) -> None:
        self.source = bfc.CUDASubAllocator(kind="pinned")
        self._driver = driver
        self._streams = streams

    def stream(self) -> int:
        return self._streams.enter_context(raw_cuda.stream())

    def hold(self, stream: int) -> None:
        self._driver.hold(stream)

    def finish(self, stream: int) -> None:
        self._driver.release(stream)


@pytest.fixture
def lane(emulated: emulator.Driver) -> Iterator[DriverLane]:
    with ExitStack() as streams:
        yield DriverLane(emulated, streams)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    found: list[BaseException] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: found.append(args.exc_value))
    return found


# -- the rows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", pinned_rows.ROWS, ids=lambda row: row.__name__)
def test_row(row: Callable[[pinned_rows.Lane], None], lane: DriverLane) -> None:
    row(lane)
    assert lane.source.live_bytes == 0


def test_row_90_waits_for_nothing(lane: DriverLane, emulated: emulator.Driver) -> None:
    allocator = bfc.PinnedAllocator(lane.source)
    pending, cached = allocator.allocate_raw(64 * KIB), allocator.allocate_raw(64 * KIB)
    stream = lane.stream()
    emulated.hold(stream)
    raw_cuda.fill(pending, 7, 64, on=stream)
    allocator.record_stream(pending, stream)
    allocator.deallocate_raw(pending)
    allocator.deallocate_raw(cached)
    with emulated.counting() as calls:
        allocator.empty_cache()
    assert [calls[name] for name in WAITS] == [0, 0, 0]
    assert (calls["cuMemFreeHost"], calls["cuEventQuery"]) == (1, 1)
    emulated.release(stream)
    allocator.close()


def test_row_93(lane: DriverLane, emulated: emulator.Driver) -> None:
    start = len(emulated.calls)
    pinned_rows.row_93(lane)
    calls = Counter(call.name for call in emulated.calls[start:])
    assert (calls["cuMemHostRegister"], calls["cuMemHostUnregister"]) == (2, 2)
    assert (calls["cuMemHostAlloc"], calls["cuMemFreeHost"]) == (1, 1)


# -- what the driver is asked ----------------------------------------------------------------------


def test_a_hit_calls_no_driver_and_one_query_where_a_stream_is_waited_for(
    lane: DriverLane, emulated: emulator.Driver
) -> None:
    with bfc.PinnedAllocator(lane.source) as allocator:
        assert allocator.is_pinned
        kept, used = allocator.allocate_raw(5000), allocator.allocate_raw(9000)
        allocator.deallocate_raw(kept)
        with emulated.counting() as calls:
            for nbytes in (5000, 8192, 4097):
                allocator.allocate(nbytes).free()
        assert calls == {}
        stream = lane.stream()
        emulated.hold(stream)
        allocator.record_event(used, None, stream)
        allocator.record_event(used, None, stream)
        with emulated.counting() as calls:
            allocator.deallocate_raw(used)
        assert calls["cuEventRecord"] == 1, "one event a stream"
        with emulated.counting() as calls:
            allocator.allocate_raw(5000)
        assert calls["cuEventQuery"] == 1
        assert [calls[name] for name in WAITS] == [0, 0, 0]
        emulated.release(stream)


def test_a_stream_of_another_device_is_marked_by_its_own_source(emulated: emulator.Driver) -> None:
    """An event and its stream must be of one context."""
    other = bfc.CUDASubAllocator(1)
    with bfc.PinnedAllocator() as allocator, raw_cuda.stream(1) as stream:
        ptr = allocator.allocate_raw(64)
        emulated.hold(stream, 1)
        assert allocator.record_event(ptr, None, stream, source=other)
        allocator.deallocate_raw(ptr)
        assert allocator.allocate_raw(64) != ptr
        emulated.release(stream, 1)
        assert allocator.allocate_raw(64) == ptr


def test_a_consumers_stream_holds_the_memory_after_it_has_let_go(
    lane: DriverLane, emulated: emulator.Driver
) -> None:
    with bfc.PinnedAllocator(lane.source) as allocator:
        stream, buffer = lane.stream(), allocator.allocate(64)
        assert buffer.__dlpack_device__() == (3, 0)
        assert buffer.__cuda_array_interface__["stream"] is None
        ptr = buffer.ptr
        emulated.hold(stream)
        capsule = buffer.__dlpack__(stream=stream)
        with pytest.raises(BufferError):
            allocator.deallocate_raw(ptr)
        del capsule
        del buffer
        assert allocator.allocate(64).ptr != ptr
        emulated.release(stream)
        assert allocator.allocate(64).ptr == ptr


def test_two_consumers_may_let_go_at_the_same_time(
    lane: DriverLane, emulated: emulator.Driver
) -> None:
    """The second one does while the first one's marks are gone through."""

    source = Misbehaving(bfc.CUDASubAllocator(kind="pinned"))
    source.meanwhile = lambda: None

    class Mark:
        def __init__(self, fence: Any) -> None:
            self.wait, self.fence = fence.wait, fence

        def done(self) -> bool:
            source.meanwhile()
            return self.fence.done()

    source.on("fence", instead=lambda ask, stream: Mark(ask(stream)))
    with bfc.PinnedAllocator(source) as allocator:
        first, second, third = lane.stream(), lane.stream(), lane.stream()
        buffer = allocator.allocate(64)
        ptr = buffer.ptr
        emulated.hold(third)
        capsules = [buffer.__dlpack__(stream=stream) for stream in (third, second, first)]
        source.meanwhile = lambda: capsules.pop() if len(capsules) == 1 else None
        capsules.pop()
        emulated.hold(second)
        capsules.pop()
        assert capsules == []
        emulated.release(second)
        del buffer
        assert allocator.allocate(64).ptr != ptr
        emulated.release(third)
        assert allocator.allocate(64).ptr == ptr


def test_registered_memory_works_as_pinned_memory_does() -> None:
    with bfc.PinnedAllocator(bfc.CUDASubAllocator(kind="pinned"), REGISTERED) as allocator:
        for nbytes in (1, 4096, 5 * MIB + 1):
            buffer = allocator.allocate(nbytes)
            assert bytes(buffer.to_host()[:1]) == b"\0"
            buffer.from_host(b"x" * nbytes)
            assert raw_cuda.read(buffer.ptr, nbytes) == b"x" * nbytes
            assert bfc.pinned.is_pinned(buffer.ptr + nbytes - 1)
            assert _device.is_host_memory(buffer.ptr)
        with pytest.raises(ValueError, match="only pinned memory"):
            bfc.CUDASubAllocator().alloc_registered(256, 4096)


def test_a_large_alignment_is_kept_by_registered_memory() -> None:
    source = bfc.CUDASubAllocator(kind="pinned")
    for alignment in (256, 4096, 1 << 16, 2 << 20):
        address, nbytes = source.alloc_registered(alignment, 5000, 0)
        assert (address % alignment, nbytes) == (0, 5000)
        source.free(address, nbytes)
    assert source.alloc_registered(256, 2**62, 1) is None
    assert source.live_bytes == 0


# -- None, and whose memory an address is ----------------------------------------------------------


def test_is_pinned_knows_memory_of_others_and_of_no_one() -> None:
    source = bfc.CUDASubAllocator(kind="pinned")
    address, nbytes = source.alloc(256, 4096)
    device = bfc.CUDASubAllocator()
    elsewhere, _ = device.alloc(256, 4096)
    assert bfc.pinned.is_pinned(address + 100)
    assert bfc.pinned.find(address) is None
    assert not bfc.pinned.is_pinned(elsewhere)
    assert not bfc.pinned.is_pinned(id(source))
    source.free(address, nbytes)
    device.free(elsewhere, 4096)


def test_asking_makes_no_context() -> None:
    ran = emulator.script(
        "import bfc\n"
        "driver = cuda_emulator.load()\n"
        "with bfc.PinnedAllocator(bfc.HostSubAllocator('64 MiB')) as allocator:\n"
        "    assert not bfc.pinned.is_pinned(allocator.allocate_raw(64))\n"
        "    assert not bfc.pinned.is_pinned(id(driver))\n"
        "assert [driver.retained(device) for device in range(2)] == [0, 0]\n"
        "assert driver.count('cuDevicePrimaryCtxRetain') == 0\n"
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_none_takes_the_device_that_is_in_use() -> None:
    ran = emulator.script(
        "import bfc, raw_cuda\n"
        "with bfc.PinnedAllocator() as allocator:\n"
        "    print(allocator.device, allocator.is_pinned)\n"
        "del allocator\n"
        "kept = bfc.CUDASubAllocator(1)\n"
        "print(bfc.PinnedAllocator().device, '-', 'an active context')\n"
        "with raw_cuda.current(0):\n"
        "    print(bfc.PinnedAllocator().device, '-', 'the current context')\n"
    )
    expected = (
        "cuda_host:0 True\ncuda_host:1 - an active context\ncuda_host:0 - the current context\n"
    )
    assert (ran.stdout, ran.stderr) == (expected, "")


@pytest.mark.skipif(ON_GPU, reason="there is CUDA")
def test_without_cuda_none_is_pageable_memory_and_says_so() -> None:
    """A machine whose driver shows no device."""
    ran = emulator.script(
        "import bfc\n"
        "cuda_emulator.load().reset(devices=0)\n"
        "allocator = bfc.PinnedAllocator(settings='pinned_use_cuda_host_register:True')\n"
        "allocator.set_settings('pinned_num_register_threads:4')\n"
        "print(allocator.device, allocator.is_pinned, allocator)\n"
        "buffer = allocator.allocate(4).from_host(b'abcd')\n"
        "print(bytes(buffer), bfc.pinned.is_pinned(buffer.ptr))\n"
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith(
        "cpu:0 False <bfc.PinnedAllocator, 0 B taken: pageable, since CUDA"
    )
    assert ran.stdout.endswith("b'abcd' False\n")


def test_memory_of_a_device_is_refused() -> None:
    with pytest.raises(ValueError, match="needs memory of the host"):
        bfc.PinnedAllocator(bfc.CUDASubAllocator())


# -- calls that fail -------------------------------------------------------------------------------

FAILING = (
    "cuMemHostAlloc",
    "cuMemHostRegister",
    "cuMemFreeHost",
    "cuMemHostUnregister",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamIsCapturing",
    "cuCtxPushCurrent",
    "cuCtxSynchronize",
)


class Shop:
    """An allocator, and what a user does with it, each step caught by itself."""

    def __init__(self, stream: int) -> None:
        self.allocator = bfc.PinnedAllocator(bfc.CUDASubAllocator(kind="pinned"))
        self.stream = stream
        self.raw: list[int] = []
        self.buffers: list[bfc.Buffer] = []
        self.raised: list[Exception] = []

    def step(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (bfc.DriverError, bfc.SubAllocatorError, bfc.OutOfMemoryError) as error:
            self.raised.append(error)
        self.allocator.check()

    def run(self) -> None:
        for text in ("False", "True"):
            self.allocator.set_settings(f"pinned_use_cuda_host_register:{text}")
            for nbytes in (5000, 5000, 70_000):
                self.step(lambda n=nbytes: self.raw.append(self.allocator.allocate_raw(n)))
                self.step(lambda n=nbytes: self.buffers.append(self.allocator.allocate(n)))
            for ptr in self.raw[-2:]:
                self.step(lambda p=ptr: self.allocator.record_stream(p, self.stream))
            for buffer in self.buffers[-2:]:
                self.step(lambda b=buffer: self.allocator.record_stream(b, self.stream))
            for ptr in list(self.raw):
                self.step(lambda p=ptr: (self.allocator.deallocate_raw(p), self.raw.remove(p)))
            while self.buffers:
                del self.buffers[0]
                gc.collect(0)
                self.allocator.check()
            self.step(lambda: self.raw.append(self.allocator.allocate_raw(6000)))
            self.step(self.allocator.empty_cache)
            self.step(lambda: [self.allocator.deallocate_raw(p) for p in self.raw[:1]])
            self.raw[:1] = []

    def end(self) -> None:
        for _attempt in range(3):
            self.step(self.allocator.close)
            if self.allocator.closed and self.allocator.sub_allocator.live_bytes == 0:
                return
        raise AssertionError("closing does not give the memory back")


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("error", ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_UNKNOWN"])
def test_each_call_may_fail_wherever_it_stands(
    emulated: emulator.Driver, reports: list[BaseException], name: str, error: str
) -> None:
    """The books stay right, nothing is used too early or lost, and the error is heard of, unless it
    is a lack of memory that more memory was found for."""
    with raw_cuda.stream() as stream:
        start = len(emulated.calls)
        shop = Shop(stream)
        shop.run()
        shop.end()
        places = sum(call.name == name for call in emulated.calls[start:])
        assert (shop.raised, reports) == ([], [])
        assert places > 0
        for place in range(1, places + 1):
            emulated.clear()
            del reports[:]
            shop = Shop(stream)
            emulated.fail(name, error, at=place)
            shop.run()
            shop.end()
            heard = [*shop.raised, *reports]
            assert heard or "OUT_OF_MEMORY" in error, f"{name} number {place} failed unheard"
            assert emulated.complaints == [], f"{name} number {place}"
            del shop, heard
            gc.collect()  # without a GIL any collection ends it, too: no call of that counts below


def test_out_of_memory_half_way_is_met_by_giving_back(emulated: emulator.Driver) -> None:
    with bfc.PinnedAllocator(bfc.CUDASubAllocator(kind="pinned")) as allocator:
        allocator.allocate(5000).free()
        emulated.fail("cuMemHostAlloc", times=1)
        with emulated.counting() as calls:
            ptr = allocator.allocate_raw(MIB)
        assert (calls["cuMemHostAlloc"], calls["cuMemFreeHost"]) == (2, 1)
        emulated.fail("cuMemHostAlloc", times=3)
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(MIB)
        assert allocator.find(ptr) is not None
        allocator.check()


def test_closing_waits_for_the_work_on_live_blocks(emulated: emulator.Driver) -> None:
    allocator = bfc.PinnedAllocator(bfc.CUDASubAllocator(kind="pinned"))
    allocator.allocate_raw(64)
    with emulated.counting() as calls:
        allocator.close()
    assert calls["cuCtxSynchronize"] == 1


def test_a_forked_child_and_an_ending_interpreter_say_nothing() -> None:
    ran = emulator.script(
        "import bfc, os\n"
        "allocator = bfc.PinnedAllocator()\n"
        f"registered = bfc.PinnedAllocator(settings={REGISTERED!r})\n"
        "buffer, other = allocator.allocate(64), registered.allocate(64)\n"
        "waiting = allocator.allocate(64, stream=1)\n"
        "waiting.free()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    buffer.free(); other.free()\n"
        "    allocator.allocate(64).free()\n"
        "    assert not bfc.pinned.is_pinned(12345)\n"
        "    allocator.check(); allocator.close(); registered.close()\n"
        "    os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    assert (ran.stdout, ran.stderr) == ("7\n", "")
