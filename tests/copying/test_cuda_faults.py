"""Copies of CUDA devices where something goes wrong, and pinned memory while a copy uses it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import raw_cuda
from copy_memory import (
    ALLOC,
    D2H,
    ENTER,
    EXCHANGE,
    FREE,
    H2D,
    ROWS,
    SHAPE,
    SYNC,
    Memory,
    calls,
    gaps,
    memory,
    new_stream,
    odd,
    packed,
    there,
    turned,
    values,
)
from waiting import joined

import bfc
from bfc.copying import cuda_stream
from bfc.drivers.cuda import calls as driver_calls

# -- calls that fail -------------------------------------------------------------------------------

#: Copies that take every way there is: (destination, source, options).
WAYS = [
    (packed, values, {}),
    (values, packed, {}),
    (packed, lambda: values("f8"), {"non_blocking": True}),
    (lambda: values("f8"), packed, {"non_blocking": True}),
    (gaps, values, {}),
    (values, gaps, {"non_blocking": True}),
    (packed, packed, {}),
    (packed, gaps, {}),
    (turned, packed, {"neg": True}),
    (packed, lambda: memory("g"), {}),
    (packed, lambda: odd("i8"), {"neg": True}),
    (lambda: odd("f4"), values, {"neg": True}),
    (lambda: odd("f4"), values, {"neg": True, "non_blocking": True}),
    (there, packed, {}),
    (there, gaps, {}),
    (there, lambda: memory("i8"), {"non_blocking": True}),
    (there, lambda: memory("i8"), {}),
    (there, lambda: memory("g"), {}),
    (lambda: memory(device=1, strides=(48, 8)), turned, {}),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_call_that_fails_leaves_everything_as_it_was(emulated, way: int, peers: bool):
    """Each call of each kind in turn: the error is ours, the context and the capture mode are those
    of before, no temporary and no event is left, and the same copy works then. What runs out of
    memory has not touched the destination."""
    emulated.reset(devices=3, total=1 << 30, peers=peers)
    cuda_stream.forget()
    make_to, make_source, options = WAYS[way]
    to, source = make_to(), make_source()
    bfc.copy(to, source, **options)
    emulated.clear()
    bfc.copy(to, source, **options)
    made = [call.name for call in emulated.calls]
    events, allocations = emulated.live_events(), sorted(emulated.live())
    for name, at in faults(made):
        # Without a context nothing can be freed either.
        frees = name in (FREE, "cuEventDestroy", *ENTER)
        code = "CUDA_ERROR_OUT_OF_MEMORY" if name == ALLOC else "CUDA_ERROR_UNKNOWN"
        scratch(to, at)
        before = bytes_of(to)
        emulated.clear()
        emulated.fail(name, code, at=at)
        with pytest.raises((bfc.DriverError, bfc.OutOfMemoryError)) as caught:
            bfc.copy(to, source, **options)
        del caught
        if name == ALLOC:
            assert bytes_of(to) == before, (name, at)
        assert int(driver_calls.call("cuCtxGetCurrent")) == 0, (name, at)
        mode = driver_calls.call(EXCHANGE, driver_calls.driver().CUstreamCaptureMode(0))
        assert int(mode) == 0 or name == EXCHANGE, (name, at)
        if not frees:
            assert emulated.live_events() == events, (name, at)
            assert sorted(emulated.live()) == allocations, (name, at)
        bfc.copy(to, source, **options)
        if frees:  # what could not be freed is still there
            events, allocations = emulated.live_events(), sorted(emulated.live())
    emulated.reset(devices=3, total=1 << 30)


def faults(made: list[str]) -> Iterator[tuple[str, int]]:
    """Which call of which name is to fail. One that would leave a context cannot be mended."""
    for name in dict.fromkeys(made):
        count = made.count(name)
        often = name in ENTER
        if name not in ("cuCtxPopCurrent", "cuGetExportTable", "cuInit"):
            yield from (
                (name, at)
                for at in sorted({1, min(2, count), count} if often else range(1, count + 1))
            )


def scratch(side: Memory | np.ndarray, value: int) -> None:
    """Other bytes than any copy here writes."""
    if isinstance(side, Memory):
        ctypes.memset(side.address, 200 + value, side.side.block.nbytes)
    else:
        side.base.view("u1")[...] = 200 + value


def bytes_of(side: Memory | np.ndarray) -> bytes:
    return (side.block if isinstance(side, Memory) else side).tobytes()


# -- pinned memory ---------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [0, 1])
def test_pinned_memory_of_ours_is_not_used_again_before_the_transfer_is_done(emulated, device: int):
    memory()  # makes the context of the first device, whose memory the allocator has
    stream = new_stream(device)
    with bfc.BFCAllocator(bfc.CUDASubAllocator(kind="pinned"), memory_limit="4 MiB") as allocator:
        for show in (lambda buffer: buffer, lambda buffer: np.asarray(buffer)[16:]):
            source = allocator.allocate(96)
            emulated.hold(stream, device)
            seen = show(source)
            to = memory("u1", device, shape=(len(seen),))
            bfc.copy(to, seen, non_blocking=True, stream=stream)
            del seen
            address = source.ptr
            source.free()
            assert address not in [allocator.allocate(96).ptr for _ in range(3)]
            emulated.release(stream, device)


def test_what_is_queued_for_pinned_memory_on_another_device_comes_first(emulated):
    """The buffer's own stream is of the device that its memory was made on."""
    own, stream, to = new_stream(0), new_stream(1), there()
    with bfc.BFCAllocator(bfc.CUDASubAllocator(kind="pinned"), memory_limit="4 MiB") as allocator:
        source = allocator.allocate(96, stream=own)
        emulated.hold(own)
        cuda_stream.CUDACopyStream(driver_calls.device(0), own)._call(
            "cuMemsetD8Async", source.ptr, 7, 96, own
        )
        bfc.copy(to, source.view("f4", SHAPE), non_blocking=True, stream=stream)
        emulated.release(own)
        assert to.block.tolist() == [7] * 96
        source.free()


@pytest.fixture
def pinned(emulated):
    """The caching host allocator, on memory of the first device's driver."""
    memory()
    with bfc.PinnedAllocator() as allocator:
        assert allocator.is_pinned
        yield allocator


def shown(address: int, nbytes: int = 96) -> np.ndarray:
    """Memory that is known by its address alone."""
    memory = (ctypes.c_char * nbytes).from_address(address)
    return np.frombuffer(memory, "f4").reshape(-1, 6)


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("ours", ["address", "buffer", "array"])
@pytest.mark.parametrize("direction", ["to", "from"])
def test_87_a_pinned_block_is_not_handed_out_before_the_transfer_is_done(
    emulated, pinned, ours: str, direction: str, device: int
):
    """Whichever device the transfer is of: the allocator's memory was made on the first."""
    stream, there = new_stream(device), memory(device=device)
    emulated.hold(stream, device)
    if ours == "address":
        address = pinned.allocate_raw(96)
        host, free = shown(address), lambda: pinned.deallocate_raw(address)
    else:
        buffer = pinned.allocate(96)
        address, free = buffer.ptr, buffer.free
        host = buffer.view("f4", SHAPE)
        host = np.asarray(host) if ours == "array" else host
    ends = (there, host) if direction == "to" else (host, there)
    bfc.copy(*ends, non_blocking=True, stream=stream)
    del host, ends
    free()
    others = [pinned.allocate_raw(96) for _ in range(2)]
    assert address not in others
    emulated.release(stream, device)
    assert pinned.allocate_raw(96) == address
    for other in (*others, address):
        pinned.deallocate_raw(other)


def test_a_blocking_copy_leaves_no_event_for_its_pinned_block(emulated, pinned):
    stream, there, address = new_stream(), memory(), pinned.allocate_raw(96)
    bfc.copy(there, shown(address), stream=stream)
    emulated.clear()
    pinned.deallocate_raw(address)
    assert pinned.allocate_raw(96) == address
    assert emulated.count("cuEventRecord") == 0
    pinned.deallocate_raw(address)


def test_an_interior_part_of_a_pinned_block_holds_all_of_it(emulated, pinned):
    stream, address = new_stream(), pinned.allocate_raw(4096)
    emulated.hold(stream)
    part = shown(address + 1024)[::-1]
    bfc.copy(memory(shape=SHAPE, strides=(24, 4)), part[::-1], non_blocking=True, stream=stream)
    pinned.deallocate_raw(address)
    other = pinned.allocate_raw(4096)
    assert other != address
    emulated.release(stream)
    pinned.deallocate_raw(other)


def test_a_pinned_block_is_kept_from_others_after_an_error_too(emulated, pinned):
    """The transfer is queued by then."""
    stream, there, address = new_stream(), gaps(), pinned.allocate_raw(96)
    emulated.hold(stream)
    emulated.fail(FREE, "CUDA_ERROR_UNKNOWN")
    with pytest.raises(bfc.DriverError):
        bfc.copy(shown(address), there, non_blocking=True, stream=stream)
    pinned.deallocate_raw(address)
    other = pinned.allocate_raw(96)
    assert other != address
    emulated.release(stream)
    pinned.deallocate_raw(other)
    emulated.reset(devices=3, total=1 << 30)


def test_a_blocking_copy_that_fails_waits_for_what_it_has_queued(emulated):
    there, host = gaps(), values()

    def fails() -> None:
        emulated.fail(FREE, "CUDA_ERROR_UNKNOWN")
        with pytest.raises(bfc.DriverError, match=FREE):
            bfc.copy(host, there)

    assert calls(emulated, fails) == [ALLOC, ROWS, D2H, FREE, SYNC]
    emulated.reset(devices=3, total=1 << 30)


def test_what_is_let_go_may_copy_in_its_finaliser(emulated):
    """The thread that lets it go is inside of a copy."""
    emulated.set_attribute(0, cuda_stream.PAGEABLE_ACCESS, 1)
    to, done = memory(), []

    class Bytes(bytearray):
        """Takes part in weak references."""

    def copies() -> None:
        bfc.copy(to, values(), non_blocking=True)
        done.append(to.array.tolist())

    def run() -> None:
        stream, owner = new_stream(), Bytes(96)
        weakref.finalize(owner, copies)
        emulated.hold(stream)
        bfc.copy(to, np.frombuffer(owner, "f4").reshape(SHAPE), non_blocking=True, stream=stream)
        del owner
        assert done == []
        emulated.release(stream)
        bfc.copy(to, values(), non_blocking=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    joined(thread)
    assert done == [values().tolist()]


# -- freed memory, no room, resets -----------------------------------------------------------------


def test_memory_that_was_freed_or_belongs_to_others(emulated):
    a = memory()
    a.free()
    for ends in ((a, values()), (values(), a)):
        with pytest.raises(bfc.InvalidPointerError, match="freed"):
            bfc.copy(*ends)
    allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB")
    buffer = allocator.allocate(96)
    view = buffer.view("f4", SHAPE)
    buffer.free()
    for gone in (buffer, view):
        with pytest.raises(bfc.ClosedError):
            bfc.copy(np.zeros(SHAPE, "f4"), gone)
    allocator.close()
    context = driver_calls.call("cuCtxCreate", None, 0, 0)
    address = int(driver_calls.call("cuMemAlloc", 96))
    foreign = memory()
    foreign.address, kept = address, foreign.address
    with pytest.raises(bfc.InvalidPointerError, match="another context"):
        bfc.copy(foreign, values())
    driver_calls.call("cuMemFree", address)
    driver_calls.call("cuCtxDestroy", context)
    foreign.address = kept


def test_a_device_without_room_for_the_temporary(emulated):
    to, wide = memory(strides=(48, 8)), memory("f8", 1)
    before = to.block
    for peers, source, non_blocking in (
        (True, values(), False),
        (True, values("f8"), True),
        (False, wide, False),
        (False, wide, True),
    ):
        driver_calls.peers[1, 0] = peers
        emulated.fail(ALLOC)
        with pytest.raises(bfc.OutOfMemoryError, match="for a temporary") as caught:
            bfc.copy(to, source, non_blocking=non_blocking)
        assert caught.value.requested in (96, 192)
        assert np.array_equal(to.block, before), "an error, and still written"


def test_a_host_without_room(emulated, monkeypatch):
    """What arrives is changed in its place, whichever way its items lie; what needs memory of the
    host asks for it before anything is written."""
    turned = memory("c8", strides=(8, 32))
    host, source = (np.zeros(SHAPE, "c8", "F") for _ in range(2))
    source[...] = values("c8") + 1j
    bfc.copy(turned, source)
    asked = []

    def refuse(*arguments, **options):
        asked.append(arguments)
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    bfc.copy(host, turned, conj=True)
    assert np.array_equal(host, np.conj(source))
    assert asked == []
    before = host.copy()
    for ends in ((host, memory("c16")), (host[:, ::2], memory("c8", shape=(4, 3)))):
        with pytest.raises(MemoryError):
            bfc.copy(*ends)
    assert len(asked) == 2
    assert np.array_equal(host, before)


def test_a_device_without_memory_pools_takes_plain_memory(emulated):
    emulated.set_attribute(0, cuda_stream.MEMORY_POOLS, 0)
    to = memory(strides=(48, 8))
    found = calls(emulated, lambda: bfc.copy(to, values()))
    assert found == ["cuMemAlloc", H2D, ROWS, "cuMemFree", SYNC]
    assert np.array_equal(to.array, values())


def test_a_graph_captures_no_temporary_of_a_device_without_memory_pools(emulated):
    emulated.set_attribute(0, cuda_stream.MEMORY_POOLS, 0)
    stream = new_stream()
    on_stream = cuda_stream.CUDACopyStream(driver_calls.device(0), stream)
    to, source = odd("f4"), memory()
    raw_cuda.begin_capture(stream)
    with pytest.raises(bfc.DriverError, match="temporary"):
        bfc.copy(to, source, stream=stream, neg=True)
    on_stream._call("cuStreamEndCapture", stream)


def test_a_driver_that_does_not_say_whether_memory_is_pinned_fails_the_capture(emulated):
    stream = new_stream()
    on_stream = cuda_stream.CUDACopyStream(driver_calls.device(0), stream)
    to, host = memory(), values()
    raw_cuda.begin_capture(stream)
    for code, words in (("CUDA_ERROR_UNKNOWN", "UNKNOWN"), ("CUDA_ERROR_INVALID_VALUE", "pinned")):
        emulated.fail("cuPointerGetAttribute", code)
        with pytest.raises(bfc.DriverError, match=words):
            bfc.copy(to, host, stream=stream, non_blocking=True)
    on_stream._call("cuStreamEndCapture", stream)
    emulated.fail("cuPointerGetAttribute", "CUDA_ERROR_UNKNOWN")
    assert not bfc.pinned.is_pinned(host.ctypes.data)


@pytest.mark.parametrize(
    ("bindings", "advice"),
    [
        ("12.9.4", r"'nvidia-cuda-nvrtc-cu12==12\.\*', which 'bfc-allocator\[cuda12\]' brings"),
        ("13.5.0", r"'nvidia-cuda-nvrtc==13\.\*', which 'bfc-allocator\[cuda\]' brings"),
    ],
)
def test_without_nvrtc_the_error_says_what_to_install(emulated, monkeypatch, bindings, advice):
    from importlib import metadata

    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError("Failure finding libnvrtc.so.13\nat length")

    monkeypatch.setattr(metadata, "version", {"cuda-bindings": bindings}.__getitem__)
    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    to = memory()
    before = to.block
    for source in (memory("i8"), values("i8")):
        with pytest.raises(bfc.DeviceUnavailableError, match=f"pip install {advice}"):
            bfc.copy(to, source, non_blocking=True)
    assert np.array_equal(to.block, before)
    bfc.copy(to, values("i8"))
    assert np.array_equal(to.array, values()), "what needs no kernel goes on"


def test_the_callers_context_is_as_it_was(emulated):
    before = int(driver_calls.call("cuCtxGetCurrent"))
    bfc.copy(there(), memory())
    freed = memory()
    freed.free()
    with pytest.raises(bfc.InvalidPointerError):
        bfc.copy(freed, values())
    assert int(driver_calls.call("cuCtxGetCurrent")) == before


def test_a_context_that_was_reset_is_taken_anew(emulated):
    bfc.copy(memory(), values())
    driver_calls.call("cuDevicePrimaryCtxReset", 0)
    to = memory()
    bfc.copy(to, values())
    assert np.array_equal(to.array, values())


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("reset", [0, 1])
def test_a_reset_ends_peer_access_and_the_stream_that_follows_others(
    emulated, pinned, reset: int, seen: bool
):
    """Whether the context is seen dead, or another library has made it anew meanwhile."""
    bfc.copy(there(), memory())
    bfc.copy(there(), shown(address := pinned.allocate_raw(96)), non_blocking=True)
    pinned.deallocate_raw(address)
    pinned.close()
    driver_calls.call("cuDevicePrimaryCtxReset", reset)
    if not seen:
        driver_calls.call("cuDevicePrimaryCtxRetain", reset)
    ends = there(), memory()
    emulated.clear()
    bfc.copy(*ends)
    assert emulated.count("cuCtxEnablePeerAccess") == 1
    with bfc.PinnedAllocator() as allocator:
        address = allocator.allocate_raw(96)
        bfc.copy(ends[0], shown(address), non_blocking=True)
        allocator.deallocate_raw(address)
    assert emulated.complaints == []
