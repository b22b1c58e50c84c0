"""Copies of CUDA devices on the emulated driver: the calls that are made, in their order, and for
all that needs no kernel the bytes. What a launch would have written is not there."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import emulator
import numpy as np
import pytest
from copy_cases import Side, case, seeds
from copy_memory import SHAPE, Memory, memory, run

import bfc
from bfc.copy import _cuda, engine

pytestmark = pytest.mark.filterwarnings(
    "ignore:the imaginary part", "ignore:overflow encountered", "ignore:invalid value"
)

#: What has no part in the order of things.
UNSAID = {
    "cuCtxPushCurrent", "cuCtxPopCurrent", "cuCtxGetId", "cuThreadExchangeStreamCaptureMode",
    "cuPointerGetAttributes", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuDeviceGetAttribute",
    "cuStreamIsCapturing", "cuLibraryLoadData", "cuLibraryGetKernel", "cuKernelGetFunction",
    "cuInit", "cuGetExportTable", "cuEventDestroy", "cuStreamGetId",
}  # fmt: skip
H2D = D2H = "cuMemcpyAsync"
SYNC, ALLOC, FREE, LAUNCH = (
    "cuStreamSynchronize", "cuMemAllocAsync", "cuMemFreeAsync", "cuLaunchKernel"
)  # fmt: skip
#: One stream waits for another.
ORDER = ["cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"]


def calls(driver: emulator.Driver, run) -> list[str]:
    """The driver's calls that a copy makes, those of `UNSAID` left out."""
    driver.clear()
    run()
    return [call.name for call in driver.calls if call.name not in UNSAID]


def values(dtype="f4") -> np.ndarray:
    return np.arange(100, 124, dtype=dtype).reshape(SHAPE)


def new_stream(device: int = 0) -> int:
    mode = _cuda.device(device).enter()
    stream = int(_cuda.call("cuStreamCreate", 1))
    _cuda.device(device).leave(mode)
    return stream


# -- bytes -----------------------------------------------------------------------------------------


def test_random_copies_that_need_no_kernel(emulated, monkeypatch):
    """Blocking or not, over every pair of places, with and without peer access. A copy that asks
    for a launch ends there, and does not count."""

    class LaunchError(Exception):
        pass

    def stop(*_arguments):
        raise LaunchError

    monkeypatch.setattr(_cuda.Lane, "launch", stop)
    monkeypatch.setattr(_cuda.Lane, "_function", stop)
    done = 0
    for peers in (True, False):
        emulated.reset(devices=2, total=1 << 30, peers=peers)
        _cuda.forget()
        for seed in range(120):
            dtype = np.dtype(("f4", "u1", "i8", "c16", "f2", "g", "M8[s]")[seed % 7])
            made = case(f"cuda {seed}")
            if seed % 2:
                made = case(f"cuda {seed}", dtype, dtype, (False, False), seed % 5 > 0)
            for places in ((0, None), (None, 0), (0, 0), (0, 1), (1, 0)):
                for non_blocking in (False, True):
                    try:
                        block = run(made, *places, non_blocking=non_blocking)
                    except LaunchError:
                        continue
                    made.check(block, (peers, places, non_blocking))
                    done += 1
    assert done > 600


@seeds(20)
def test_buffers_of_ours_and_pinned_memory(emulated, seed: int):
    rng = np.random.default_rng(seed)
    with (
        bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB") as there,
        bfc.BFCAllocator(bfc.CUDASubAllocator(kind="pinned"), memory_limit="4 MiB") as pinned,
        bfc.BFCAllocator(bfc.CUDASubAllocator(kind="managed"), memory_limit="4 MiB") as managed,
    ):
        source = rng.integers(0, 99, (3, 5))
        chain = [source]
        for number in rng.permutation(6):
            allocator = (there, pinned, managed)[number % 3]
            to = allocator.allocate(120).view("i8", (3, 5))
            bfc.copy(to, chain[-1], non_blocking=bool(rng.integers(2)))
            chain.append(to)
        assert np.array_equal(bfc.copy(np.zeros((3, 5), "f8"), chain[-1]), source)
        assert np.array_equal(bfc.copy(np.zeros((3, 5), "f8"), chain[1]), source)
        del chain, to


def test_between_cuda_and_opencl_by_way_of_the_host(emulated, opencl):
    import pyopencl.array

    there = pyopencl.array.to_device(opencl, values("i2"))
    to = memory(strides=(48, 8))
    assert calls(emulated, lambda: bfc.copy(to, there)) == [ALLOC, H2D, ROWS, FREE, SYNC]
    assert np.array_equal(to.array, values())
    stream = new_stream()
    emulated.clear()
    bfc.copy(there, to, stream=stream, neg=True)
    assert {c.stream for c in emulated.calls if c.name in (SYNC, H2D)} == {stream}
    assert np.array_equal(there.get(), -values())
    bfc.copy(to, there, stream=opencl)
    assert np.array_equal(to.array, -values())
    with pytest.raises(TypeError, match="a stream is"):
        bfc.copy(to, values(), stream=opencl)


# -- the order of calls ----------------------------------------------------------------------------


def packed(**options):
    return memory(**options)


def gaps(**options):
    return memory(strides=(48, 8), **options)


def turned(**options):
    return memory(strides=(4, 16), **options)


ROWS = "cuMemcpy2DAsync"
PEER = "cuMemcpyPeerAsync"  # what a pool gave as a temporary belongs to no context
#: (destination, source, calls when blocking, calls when not), by the rows of spec 5.3 and 5.5.
TABLE = [
    (packed, values, [H2D, SYNC], [H2D]),
    (values, packed, [D2H, SYNC], [D2H]),
    # Blocking casts on the host, non-blocking on the device.
    (packed, lambda: values("f8"), [H2D, SYNC], [ALLOC, H2D, LAUNCH, FREE]),
    (lambda: values("f8"), packed, [D2H, SYNC], [ALLOC, LAUNCH, D2H, FREE]),
    # What has gaps goes by way of packed memory.
    (gaps, values, [ALLOC, H2D, ROWS, FREE, SYNC], [ALLOC, H2D, ROWS, FREE]),
    (values, gaps, [ALLOC, ROWS, D2H, FREE, SYNC], [ALLOC, ROWS, D2H, FREE]),
    (turned, values, [ALLOC, H2D, LAUNCH, FREE, SYNC], [ALLOC, H2D, LAUNCH, FREE]),
    (values, turned, [ALLOC, LAUNCH, D2H, FREE, SYNC], [ALLOC, LAUNCH, D2H, FREE]),
    (packed, lambda: np.zeros((6, 4), "f4").T, [H2D, SYNC], [H2D]),
    # The host has to spread what arrives, and waits for it.
    (lambda: np.zeros((6, 4), "f4").T, packed, [D2H, SYNC], [D2H, SYNC]),
    # Both sides alike, though turned: one run of bytes.
    (turned, lambda: np.zeros((6, 4), "f4").T, [H2D, SYNC], [H2D]),
    # On one device.
    (packed, packed, [H2D], [H2D]),
    (packed, gaps, [ROWS], [ROWS]),
    (turned, packed, [LAUNCH], [LAUNCH]),
    (packed, lambda: memory("i8"), [LAUNCH], [LAUNCH]),
]


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_host_and_device_by_the_table(emulated, row: int):
    to, source, *wanted = TABLE[row]
    for non_blocking in (False, True):
        ends = to(), source()
        bfc.copy(*ends, non_blocking=non_blocking)  # compiles what it needs
        found = calls(emulated, lambda ends=ends, n=non_blocking: bfc.copy(*ends, non_blocking=n))
        assert found == wanted[non_blocking], non_blocking


def there(**options):
    return memory(device=1, **options)


#: (destination on device 1, source on device 0, calls with peer access, calls without: blocking,
#: non-blocking), by spec 5.3 and 5.4.
BETWEEN = [
    (there, packed, [*ORDER, H2D, *ORDER], [*ORDER, H2D, *ORDER], [*ORDER, H2D, *ORDER]),
    (
        lambda: memory("f8", 1),
        packed,
        [*ORDER, LAUNCH, *ORDER],
        [ALLOC, *ORDER, PEER, *ORDER, LAUNCH, FREE],  # cast where it arrives
        [ALLOC, LAUNCH, *ORDER, PEER, *ORDER, FREE],  # cast where it leaves
    ),
    (
        lambda: memory(device=1, strides=(48, 8)),
        gaps,
        [*ORDER, ROWS, *ORDER],
        [ALLOC, ALLOC, ROWS, *ORDER, PEER, *ORDER, ROWS, FREE, FREE],
        [ALLOC, ALLOC, ROWS, *ORDER, PEER, *ORDER, ROWS, FREE, FREE],
    ),
    (
        there,
        turned,
        [*ORDER, LAUNCH, *ORDER],
        [ALLOC, LAUNCH, *ORDER, PEER, *ORDER, FREE],
        [ALLOC, LAUNCH, *ORDER, PEER, *ORDER, FREE],
    ),
]


@pytest.mark.parametrize("row", range(len(BETWEEN)))
def test_between_devices_by_the_table(emulated, row: int):
    to, source, with_peers, blocking, non_blocking = BETWEEN[row]
    for peers, wanted in ((True, (with_peers, with_peers)), (False, (blocking, non_blocking))):
        emulated.reset(devices=2, total=1 << 30, peers=peers)
        _cuda.forget()
        for asked in (False, True):
            ends = to(), source()
            bfc.copy(*ends, non_blocking=asked)
            found = calls(emulated, lambda ends=ends, n=asked: bfc.copy(*ends, non_blocking=n))
            assert found == wanted[asked], (peers, asked)
            assert SYNC not in found


EXCHANGE = "cuThreadExchangeStreamCaptureMode"
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


def odd(dtype) -> Memory:
    """Items at no multiple of their size."""
    size = np.dtype(dtype).itemsize
    strides = (6 * size, size)
    return Memory(Side(np.zeros(256, "u1"), np.dtype(dtype), SHAPE, strides, 1))


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_call_that_fails_leaves_everything_as_it_was(emulated, way: int, peers: bool):
    """Each call of each kind in turn: the error is ours, the context and the capture mode are those
    of before, no temporary and no event is left, and the same copy works then. What runs out of
    memory has not touched the destination."""
    emulated.reset(devices=3, total=1 << 30, peers=peers)
    _cuda.forget()
    make_to, make_source, options = WAYS[way]
    to, source = make_to(), make_source()
    bfc.copy(to, source, **options)
    emulated.clear()
    bfc.copy(to, source, **options)
    made = [call.name for call in emulated.calls]
    events, allocations = emulated.live_events(), sorted(emulated.live())
    for name, at in faults(made):
        # Without a context nothing can be freed either.
        frees = name in (FREE, "cuEventDestroy", "cuCtxPushCurrent", EXCHANGE)
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
        assert int(_cuda.call("cuCtxGetCurrent")) == 0, (name, at)
        mode = _cuda.call(EXCHANGE, _cuda.driver().CUstreamCaptureMode(0))
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
        often = name in ("cuCtxPushCurrent", EXCHANGE)
        if name not in ("cuCtxPopCurrent", "cuGetExportTable", "cuInit"):
            yield from ((name, at) for at in sorted({1, min(2, count), count} if often else range(1, count + 1)))


def scratch(side: Memory | np.ndarray, value: int) -> None:
    """Other bytes than any copy here writes."""
    if isinstance(side, Memory):
        ctypes.memset(side.address, 200 + value, side.side.block.nbytes)
    else:
        side.base.view("u1")[...] = 200 + value


def bytes_of(side: Memory | np.ndarray) -> bytes:
    return (side.block if isinstance(side, Memory) else side).tobytes()


def test_peer_access_is_asked_once_a_pair_and_enabled_in_one_direction(emulated):
    a, b = memory(), there()
    asks = ("cuDeviceCanAccessPeer", "cuCtxEnablePeerAccess")

    def asked(run) -> list[str]:
        return [name for name in calls(emulated, run) if name in asks]

    assert asked(lambda: bfc.copy(b, a)) == list(asks)
    assert asked(lambda: bfc.copy(b, a)) == []
    assert asked(lambda: bfc.copy(a, b)) == list(asks)
    assert asked(lambda: bfc.copy(memory(), a)) == []
    emulated.reset(devices=2, total=1 << 30, peers=False)
    _cuda.forget()
    a, b = memory(), there()
    assert asked(lambda: bfc.copy(b, a)) == ["cuDeviceCanAccessPeer"]
    assert asked(lambda: bfc.copy(b, a)) == []


def test_another_library_may_have_enabled_peer_access(emulated):
    mode = _cuda.device(0).enter()
    _cuda.call("cuCtxEnablePeerAccess", _cuda.device(1).context(), 0)
    _cuda.device(0).leave(mode)
    to = there()
    bfc.copy(to, memory())
    assert to.array[1, 0] == 6


def test_mapped_memory_without_peer_access_takes_the_peer_copy(emulated):
    """As PyTorch's expandable segments, it belongs to no context; so does memory of a pool."""
    emulated.reset(devices=2, total=1 << 30, peers=False)
    _cuda.forget()
    with bfc.BFCAllocator(bfc.CUDASubAllocator(0, kind="async"), memory_limit="4 MiB") as pool:
        source = pool.allocate(96).view("f4", SHAPE)
        bfc.copy(source, values())
        to = there()
        assert PEER in calls(emulated, lambda: bfc.copy(to, source))
        assert np.array_equal(to.array, values())


def test_a_kernel_does_not_reach_memory_that_is_mapped_on_another_device(emulated):
    """Enabling peer access covers what belongs to a context, and nothing else."""
    with bfc.BFCAllocator(bfc.CUDASubAllocator(1, kind="async"), memory_limit="4 MiB") as pool:
        to, source = pool.allocate(96).view("f4", SHAPE), memory("i8")
        bfc.copy(to, source)
        found = calls(emulated, lambda: bfc.copy(to, source))
        assert found == [ALLOC, *ORDER, PEER, *ORDER, LAUNCH, FREE]


# -- the peer's corner cases, by number ------------------------------------------------------------


def test_94_the_same_view_calls_nothing(emulated):
    a = memory()
    twin = Memory.__new__(Memory)
    twin.__dict__.update(a.__dict__)
    assert calls(emulated, lambda: bfc.copy(a, a)) == []
    assert calls(emulated, lambda: bfc.copy(a, twin)) == []
    assert calls(emulated, lambda: bfc.copy(a, twin, neg=True)) == [LAUNCH]


def test_95_no_items_call_nothing(emulated):
    empty = SimpleNamespace(
        __cuda_array_interface__={
            "shape": (0, 3),
            "typestr": "<f4",
            "data": (0, False),
            "version": 3,
        }
    )
    there = memory(shape=(1, 3), device=1)
    assert calls(emulated, lambda: bfc.copy(empty, there)) == []
    assert calls(emulated, lambda: bfc.copy(np.zeros((0, 3)), empty)) == []


def test_96_pageable_memory_may_be_copied_without_waiting(emulated):
    stream = new_stream()
    to, host = memory(), values()
    bfc.copy(to, host, non_blocking=True, stream=stream)
    back = bfc.copy(np.zeros(SHAPE, "f4"), to, non_blocking=True, stream=stream)
    _cuda.Lane(_cuda.device(0), stream).synchronize()
    assert np.array_equal(back, values())


@pytest.mark.parametrize("direction", ["to", "from"])
def test_97_a_blocking_copy_waits_for_its_stream_once_and_for_no_other(emulated, direction: str):
    stream, other = new_stream(), new_stream()
    emulated.hold(other)
    a, host = memory(), values()
    emulated.clear()
    bfc.copy(*((a, host) if direction == "to" else (host, a)), stream=stream)
    waits = [(c.name, c.stream) for c in emulated.calls if "Synchronize" in c.name]
    assert waits == [(SYNC, stream)]


def test_98_on_one_device_nothing_waits(emulated):
    stream = new_stream()
    a, b = memory(), memory()
    b.array  # noqa: B018 - reads the memory
    emulated.hold(stream)
    bfc.copy(b, a, stream=stream)
    bfc.copy(b, a, neg=True, stream=stream)
    assert emulated.pending == 2
    emulated.release(stream)


def test_99_work_that_is_queued_on_either_side_comes_first_or_last(emulated):
    first, second = new_stream(0), new_stream(1)
    source, to = memory(stream=first), there(stream=second)
    fills = [(0, source, 1, first), (1, to, 9, second)]
    for device, side, value, stream in fills:
        emulated.hold(stream, device)
        _cuda.Lane(_cuda.device(device), stream)._call(
            "cuMemsetD8Async", side.address, value, 96, stream
        )
    bfc.copy(to, source)
    _cuda.Lane(_cuda.device(1), second)._call("cuMemsetD8Async", to.address, 5, 4, second)
    emulated.release(first)
    assert to.block[5] != 1, "it did not wait for what the destination's stream had queued"
    emulated.release(second, 1)
    assert emulated.pending == 0
    assert to.block.tolist() == [5] * 4 + [1] * 92


def test_100_a_stream_that_nobody_names_is_not_waited_for(emulated):
    other = new_stream(1)
    to = there()
    emulated.hold(other, 1)
    _cuda.Lane(_cuda.device(1), other)._call("cuMemsetD8Async", to.address, 9, 96, other)
    bfc.copy(to, memory())
    assert to.block.tolist() == memory().block.tolist()
    emulated.release(other, 1)
    assert to.block.tolist() == [9] * 96


def test_101_strided_between_devices_without_peer_access(emulated):
    emulated.reset(devices=2, total=1 << 30, peers=False)
    _cuda.forget()
    to = memory(device=1, strides=(96, 16))
    before = to.block
    bfc.copy(to, memory(strides=(48, 8)))
    assert np.array_equal(to.array, memory().array)
    assert np.array_equal(np.delete(before, _bytes(to)), np.delete(to.block, _bytes(to)))


def _bytes(of: Memory) -> list[int]:
    steps = itertools.product(range(SHAPE[0]), range(SHAPE[1]), range(4))
    return [i * of.side.strides[0] + j * of.side.strides[1] + k for i, j, k in steps]


def test_102_a_cast_happens_on_the_host_or_the_device_by_blocking(emulated):
    """The transfer's bytes tell: of the destination's dtype, or of the source's."""
    source = values("i2")
    for non_blocking, nbytes in ((False, 24 * 4), (True, 24 * 2)):
        to = memory()
        emulated.clear()
        bfc.copy(to, source, non_blocking=non_blocking)
        assert [c.nbytes for c in emulated.calls if c.name == H2D] == [nbytes]
        if not non_blocking:
            assert np.array_equal(to.array, source)


def test_103_what_is_conjugated_is_so_after_the_transfer(emulated):
    there, host = memory("c8"), np.zeros(SHAPE, "c8")
    assert calls(emulated, lambda: bfc.copy(host, there, conj=True)) == [D2H, SYNC]
    assert np.array_equal(host, np.conj(there.array))
    assert calls(emulated, lambda: bfc.copy(there, host, conj=True)) == [H2D, LAUNCH, SYNC]
    # The host would change what has not arrived: the device does it first.
    found = calls(emulated, lambda: bfc.copy(host, there, conj=True, non_blocking=True))
    assert found == [ALLOC, LAUNCH, D2H, FREE]


def test_104_a_capture_takes_pinned_memory_only_and_nothing_that_waits(emulated):
    stream = new_stream()
    lane = _cuda.Lane(_cuda.device(0), stream)
    to, other, host = memory(), memory(), values()
    with bfc.BFCAllocator(bfc.CUDASubAllocator(kind="pinned"), memory_limit="4 MiB") as allocator:
        pinned = allocator.allocate(96).view("f4", SHAPE)
        bfc.copy(pinned, host)
        lane._call("cuStreamBeginCapture", stream, 1)
        turned, half = np.asarray(pinned).reshape(6, 4).T, memory(shape=(4, 3))
        for ends, options, words in (
            ((to, host), {"non_blocking": True}, "pinned memory"),
            ((host, to), {"non_blocking": True}, "pinned memory"),
            ((to, pinned), {}, "non_blocking=True"),
            ((to, turned), {"non_blocking": True}, "what the host does"),
            ((turned, to), {"non_blocking": True}, "what the host does"),
            ((half, turned[:, :3]), {"non_blocking": True}, "what the host does"),
            ((memory("g"), pinned), {"non_blocking": True}, "what the host does"),
            ((memory("g"), to), {}, "what the host does"),
            ((memory("g", 1), to), {}, "what the host does"),
        ):
            with pytest.raises(bfc.DriverError, match=words) as caught:
                bfc.copy(*ends, stream=stream, **options)
            assert caught.value.name == "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"
            del caught, ends  # its traceback has views of the memory
        bfc.copy(to, pinned, non_blocking=True, stream=stream)
        bfc.copy(pinned, to, non_blocking=True, stream=stream)
        bfc.copy(other, to, stream=stream)
        lane._call("cuStreamEndCapture", stream)  # it is as good as before
        del pinned, turned


def test_105_views_that_overlap_on_a_device_are_an_ordinary_copy(emulated):
    a = memory(shape=(24,))
    ends = []
    for offset in (0, 16):
        end = Memory.__new__(Memory)
        end.__dict__.update(a.__dict__)
        end.side = Side(a.side.block, np.dtype("f4"), (20,), (4,), offset)
        ends.append(end)
    assert calls(emulated, lambda: bfc.copy(*ends)) == [H2D]


# -- streams, pinned memory, freed memory ----------------------------------------------------------


def test_the_stream_is_the_one_named_then_chosen_then_of_the_memory(emulated):
    named, chosen, own = new_stream(), new_stream(), new_stream()
    a, host = memory(stream=own), values()

    def used(**options) -> int:
        emulated.clear()
        bfc.copy(a, host, **options)
        return next(c.stream for c in emulated.calls if c.name == H2D)

    assert used() == own
    with bfc.use_stream(chosen):
        assert used() == chosen
        assert used(stream=named) == named
    protocol = SimpleNamespace(__cuda_stream__=lambda: (0, named))
    assert used(stream=protocol) == named
    a.stream = None
    assert used() == used(stream=0) == 1
    for stream in ("fast", -1):
        with pytest.raises((TypeError, ValueError)):
            bfc.copy(a, host, stream=stream)


def test_a_stream_of_the_other_device_is_the_destinations(emulated):
    stream = new_stream(1)
    source, to = memory(), there()
    emulated.clear()
    bfc.copy(to, source, stream=stream)
    streams = [c.stream for c in emulated.calls if c.name in ("cuEventRecord", H2D)]
    assert streams == [stream, 1, 1]


def test_a_cast_by_way_of_the_host_stays_on_the_streams_of_both_sides(emulated):
    """No kernel has arithmetic for the source's dtype."""
    first, second = new_stream(0), new_stream(1)
    for peers in (True, False):
        _cuda.peers[0, 1] = peers
        for ends, streams in (
            ((memory("f8"), memory("g")), [first, first]),
            ((memory("f8", 1, stream=second), memory("g")), [first, second]),
        ):
            emulated.clear()
            bfc.copy(*ends, stream=first)
            for name in (H2D, SYNC):
                assert [c.stream for c in emulated.calls if c.name == name] == streams
            assert np.array_equal(ends[0].array, memory("g").array)


def test_the_stream_that_memory_names_is_waited_for(emulated):
    own, stream = new_stream(), new_stream()
    a = memory(stream=own)
    emulated.hold(own)
    _cuda.Lane(_cuda.device(0), own)._call("cuMemsetD8Async", a.address, 7, 96, own)
    out = memory("u1", shape=(96,))
    whole = SimpleNamespace(
        __cuda_array_interface__={
            "shape": (96,),
            "typestr": "|u1",
            "data": (a.address, True),
            "version": 3,
            "stream": own,
        }
    )
    bfc.copy(out, whole, stream=stream)
    assert out.block[0] == 0
    assert out.block[50] == 50
    emulated.release(own)
    assert out.block.tolist() == [7] * 96


def test_memory_of_ours_is_not_used_again_before_the_copys_stream_is_done(emulated):
    stream = new_stream()
    with bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB") as allocator:
        source = allocator.allocate(1024)
        to = allocator.allocate(1024)
        emulated.hold(stream)
        bfc.copy(to, source, stream=stream)
        address = source.ptr
        source.free()
        assert address not in [allocator.allocate(1024).ptr for _ in range(3)]
        emulated.release(stream)
        kept = [allocator.allocate(1024) for _ in range(8)]
        assert address in [buffer.ptr for buffer in kept]


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
        _cuda.Lane(_cuda.device(0), own)._call("cuMemsetD8Async", source.ptr, 7, 96, own)
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


def test_memory_that_the_device_reads_in_place_is_kept_until_it_has(emulated):
    emulated.set_attribute(0, _cuda.PAGEABLE_ACCESS, 1)
    stream = new_stream()
    to, host = memory(), values()
    references = sys.getrefcount(host)
    emulated.hold(stream)
    _cuda.Lane(_cuda.device(0), stream)._call("cuMemsetD8Async", to.address, 9, 96, stream)
    bfc.copy(to, host, non_blocking=True, stream=stream)
    assert sys.getrefcount(host) > references
    emulated.release(stream)
    bfc.copy(to, values(), non_blocking=True, stream=stream)
    assert sys.getrefcount(host) == references


def test_what_is_let_go_may_copy_in_its_finaliser(emulated):
    """The thread that lets it go is inside of a copy."""
    emulated.set_attribute(0, _cuda.PAGEABLE_ACCESS, 1)
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
    thread.join(20)
    assert not thread.is_alive(), "it waits for itself"
    assert done == [values().tolist()]


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
    context = _cuda.call("cuCtxCreate", None, 0, _cuda.device(0).handle)
    address = int(_cuda.call("cuMemAlloc", 96))
    foreign = memory()
    foreign.address, kept = address, foreign.address
    with pytest.raises(bfc.InvalidPointerError, match="another context"):
        bfc.copy(foreign, values())
    _cuda.call("cuMemFree", address)
    _cuda.call("cuCtxDestroy", context)
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
        _cuda.peers[1, 0] = peers
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
    emulated.set_attribute(0, _cuda.MEMORY_POOLS, 0)
    to = memory(strides=(48, 8))
    found = calls(emulated, lambda: bfc.copy(to, values()))
    assert found == ["cuMemAlloc", H2D, ROWS, "cuMemFree", SYNC]
    assert np.array_equal(to.array, values())


def test_a_graph_captures_no_temporary_of_a_device_without_memory_pools(emulated):
    emulated.set_attribute(0, _cuda.MEMORY_POOLS, 0)
    stream = new_stream()
    lane = _cuda.Lane(_cuda.device(0), stream)
    to, source = odd("f4"), memory()
    lane._call("cuStreamBeginCapture", stream, 1)
    with pytest.raises(bfc.DriverError, match="temporary"):
        bfc.copy(to, source, stream=stream, neg=True)
    lane._call("cuStreamEndCapture", stream)


def test_without_nvrtc_the_error_says_what_to_install(emulated, monkeypatch):
    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError("Failure finding libnvrtc.so.13\nat length")

    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    to = memory()
    before = to.block
    for source in (memory("i8"), values("i8")):
        with pytest.raises(bfc.DeviceUnavailableError, match="pip install nvidia-cuda-nvrtc"):
            bfc.copy(to, source, non_blocking=True)
    assert np.array_equal(to.block, before)
    bfc.copy(to, values("i8"))
    assert np.array_equal(to.array, values()), "what needs no kernel goes on"


def test_the_callers_context_is_as_it_was(emulated):
    before = int(_cuda.call("cuCtxGetCurrent"))
    bfc.copy(there(), memory())
    freed = memory()
    freed.free()
    with pytest.raises(bfc.InvalidPointerError):
        bfc.copy(freed, values())
    assert int(_cuda.call("cuCtxGetCurrent")) == before


def test_a_context_that_was_reset_is_taken_anew(emulated):
    bfc.copy(memory(), values())
    _cuda.call("cuDevicePrimaryCtxReset", _cuda.device(0).handle)
    to = memory()
    assert emulated.complaints == ["cuCtxPushCurrent: the context was destroyed"]
    emulated.clear()
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
    handle = _cuda.device(reset).handle
    _cuda.call("cuDevicePrimaryCtxReset", handle)
    if not seen:
        _cuda.call("cuDevicePrimaryCtxRetain", handle)
    ends = there(), memory()
    emulated.clear()
    bfc.copy(*ends)
    assert emulated.count("cuCtxEnablePeerAccess") == 1
    with bfc.PinnedAllocator() as allocator:
        address = allocator.allocate_raw(96)
        bfc.copy(ends[0], shown(address), non_blocking=True)
        allocator.deallocate_raw(address)
    assert emulated.complaints == []


def test_when_temporaries_are_needed():
    """The rows of PyTorch's table."""
    for same_device, alike, peers in itertools.product((False, True), repeat=3):
        wanted = not (same_device or alike or peers)
        facts = {"same_device": same_device, "alike": alike, "peers": peers}
        assert engine.requires_temporaries(**facts) == wanted
