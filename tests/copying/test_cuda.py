"""Copies of CUDA devices on the emulated driver: the calls that are made, in their order, and for
all that needs no kernel the bytes. What a launch would have written is not there."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import raw_cuda
from copy_cases import Side, case, seeds
from copy_memory import (
    ALLOC,
    D2H,
    FREE,
    H2D,
    LAUNCH,
    ORDER,
    ROWS,
    SHAPE,
    SYNC,
    Memory,
    calls,
    gaps,
    memory,
    new_stream,
    packed,
    run,
    there,
    turned,
    values,
)

import bfc
from bfc.copying import cuda_stream, kernels
from bfc.drivers.cuda import calls as driver_calls

pytestmark = pytest.mark.filterwarnings(
    "ignore:the imaginary part", "ignore:overflow encountered", "ignore:invalid value"
)

# -- bytes -----------------------------------------------------------------------------------------


def test_random_copies_that_need_no_kernel(emulated, monkeypatch):
    """Blocking or not, over every pair of places, with and without peer access. A copy that asks
    for a launch ends there, and does not count."""

    class LaunchError(Exception):
        pass

    def stop(*_arguments):
        raise LaunchError

    monkeypatch.setattr(cuda_stream.CUDACopyStream, "launch", stop)
    monkeypatch.setattr(cuda_stream.CUDACopyStream, "_function", stop)
    done = 0
    for peers in (True, False):
        emulated.reset(devices=2, total=1 << 30, peers=peers)
        cuda_stream.forget()
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
    with pytest.raises(TypeError, match="takes a CUDA stream"):
        bfc.copy(to, values(), stream=opencl)


# -- the order of calls ----------------------------------------------------------------------------


PEER = "cuMemcpyPeerAsync"  # what a pool gave as a temporary belongs to no context
#: (destination, source, calls when blocking, calls when not), by the rows of
#: PyTorch's behaviour, 5.3 and 5.5.
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


#: (destination on device 1, source on device 0, calls with peer access, calls without: blocking,
#: non-blocking), by PyTorch's behaviour, 5.3 and 5.4.
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
        cuda_stream.forget()
        for asked in (False, True):
            ends = to(), source()
            bfc.copy(*ends, non_blocking=asked)
            found = calls(emulated, lambda ends=ends, n=asked: bfc.copy(*ends, non_blocking=n))
            assert found == wanted[asked], (peers, asked)
            assert SYNC not in found


@pytest.mark.parametrize("peers", [True, False])
def test_what_is_asked_for_besides_the_copy_is_done_once(emulated, monkeypatch, peers: bool):
    """Conjugated and negated by one launch, with all the others plain: the driver that is emulated
    runs no kernel, so that the bytes cannot tell."""
    driver_calls.peers.update({(0, 1): peers, (1, 0): peers})
    launched = []
    launch = cuda_stream.CUDACopyStream.launch

    def noted(on_stream, to, source, change):
        launched.append((on_stream.device.ordinal, change))
        launch(on_stream, to, source, change)

    monkeypatch.setattr(cuda_stream.CUDACopyStream, "launch", noted)
    both = kernels.CONJUGATE | kernels.NEGATE
    for to, source, non_blocking, where in (
        (memory("c8"), memory("c8"), False, 0),
        (memory("c8"), memory("c16"), False, 0),
        (memory("c8"), values("c8"), False, 0),
        (memory("c8"), values("c16"), True, 0),
        (values("c8"), memory("c16"), True, 0),
        (memory("c8", 1), memory("c8"), False, 0 if peers else 1),
        (memory("c8", 1), memory("c16"), True, 0),
        (memory("c8", 1, strides=(8, 32)), memory("c16"), False, 0 if peers else 1),
    ):
        launched.clear()
        bfc.copy(to, source, conj=True, neg=True, non_blocking=non_blocking)
        asked = [(device, change) for device, change in launched if change]
        assert asked == [(where, both)], (to, source, launched)


def test_slices_with_gaps_between_them_go_by_the_driver(emulated):
    """Three dimensions, of other pitches and heights on either side."""
    shape = (3, 2, 70)
    array = np.arange(420, dtype="f4").reshape(shape)
    sides = [
        Side(np.zeros(8192, "u1"), array.dtype, shape, strides, 0)
        for strides in ((1600, 320, 4), (1480, 296, 4), (1776, 296, 4))
    ]
    for to, source in itertools.permutations(sides, 2):
        source.array[...] = array
        ends = Memory(to.twin()), Memory(source)
        assert calls(emulated, lambda ends=ends: bfc.copy(*ends)) == ["cuMemcpy3DAsync"]
        assert np.array_equal(ends[0].array, array)
        on_host = to.twin()
        assert calls(emulated, lambda a=on_host, b=ends[1]: bfc.copy(a.array, b)) == [
            "cuMemcpy3DAsync", SYNC
        ]  # fmt: skip
        assert np.array_equal(on_host.array, array)


def test_rows_of_a_longer_pitch_than_the_driver_takes_go_by_a_kernel(emulated):
    for limit, wanted in ((8, [ROWS]), (7, [LAUNCH])):
        emulated.set_attribute(0, cuda_stream.MAX_PITCH, limit)
        cuda_stream.forget()
        for ends in ((packed(), gaps()), (gaps(), packed())):
            assert calls(emulated, lambda ends=ends: bfc.copy(*ends)) == wanted


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
    cuda_stream.forget()
    a, b = memory(), there()
    assert asked(lambda: bfc.copy(b, a)) == ["cuDeviceCanAccessPeer"]
    assert asked(lambda: bfc.copy(b, a)) == []


def test_another_library_may_have_enabled_peer_access(emulated):
    device, other = driver_calls.device(0), driver_calls.device(1)
    device.call("cuCtxEnablePeerAccess", other.context.handle, 0)
    to = there()
    bfc.copy(to, memory())
    assert to.array[1, 0] == 6


def test_mapped_memory_without_peer_access_takes_the_peer_copy(emulated):
    """As PyTorch's expandable segments, it belongs to no context; so does memory of a pool."""
    emulated.reset(devices=2, total=1 << 30, peers=False)
    cuda_stream.forget()
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
    cuda_stream.CUDACopyStream(driver_calls.device(0), stream).synchronize()
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
        cuda_stream.CUDACopyStream(driver_calls.device(device), stream)._call(
            "cuMemsetD8Async", side.address, value, 96, stream
        )
    bfc.copy(to, source)
    cuda_stream.CUDACopyStream(driver_calls.device(1), second)._call(
        "cuMemsetD8Async", to.address, 5, 4, second
    )
    emulated.release(first)
    assert to.block[5] != 1, "it did not wait for what the destination's stream had queued"
    emulated.release(second, 1)
    assert emulated.pending == 0
    assert to.block.tolist() == [5] * 4 + [1] * 92


def test_100_a_stream_that_nobody_names_is_not_waited_for(emulated):
    other = new_stream(1)
    to = there()
    emulated.hold(other, 1)
    cuda_stream.CUDACopyStream(driver_calls.device(1), other)._call(
        "cuMemsetD8Async", to.address, 9, 96, other
    )
    bfc.copy(to, memory())
    assert to.block.tolist() == memory().block.tolist()
    emulated.release(other, 1)
    assert to.block.tolist() == [9] * 96


def test_101_strided_between_devices_without_peer_access(emulated):
    emulated.reset(devices=2, total=1 << 30, peers=False)
    cuda_stream.forget()
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
    bfc.copy(there, values("c8") + 1j)
    assert calls(emulated, lambda: bfc.copy(host, there, conj=True)) == [D2H, SYNC]
    assert np.array_equal(host, values("c8") - 1j)
    assert calls(emulated, lambda: bfc.copy(there, host, conj=True)) == [H2D, LAUNCH, SYNC]
    # The host would change what has not arrived: the device does it first.
    found = calls(emulated, lambda: bfc.copy(host, there, conj=True, non_blocking=True))
    assert found == [ALLOC, LAUNCH, D2H, FREE]


def test_104_a_capture_takes_pinned_memory_only_and_nothing_that_waits(emulated):
    stream = new_stream()
    on_stream = cuda_stream.CUDACopyStream(driver_calls.device(0), stream)
    to, other, host = memory(), memory(), values()
    with bfc.BFCAllocator(bfc.CUDASubAllocator(kind="pinned"), memory_limit="4 MiB") as allocator:
        pinned = allocator.allocate(96).view("f4", SHAPE)
        bfc.copy(pinned, host)
        raw_cuda.begin_capture(stream)
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
        on_stream._call("cuStreamEndCapture", stream)  # it is as good as before
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
    queue = SimpleNamespace(int_ptr=5, finish=lambda: None)  # as OpenCL's are
    with bfc.use_stream(queue):
        assert used() == own
        with pytest.raises(TypeError, match="takes a CUDA stream"):
            bfc.copy(a, host, stream=queue)
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
        driver_calls.peers[0, 1] = peers
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
    cuda_stream.CUDACopyStream(driver_calls.device(0), own)._call(
        "cuMemsetD8Async", a.address, 7, 96, own
    )
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


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"data": None}, "'data'"),
        ({"data": 4096}, "TypeError"),
        ({"data": (None, False)}, "TypeError"),
        ({"data": (-5, False)}, "-5 is not an address"),
        ({"typestr": "bogus"}, "bogus"),
        ({"shape": (4.0, 6)}, "float"),
        ({"shape": (-1, 6)}, "negative"),
        ({"strides": (4,)}, "1 strides for 2 dimensions"),
        ({"stream": "fast"}, "a stream is"),
        ({"stream": -1}, "a stream handle"),
    ],
)
def test_an_interface_that_says_no_sense(emulated, entries, words: str):
    good = memory().__cuda_array_interface__
    named = {name: value for name, value in (good | entries).items() if name == "stream" or value}
    thing, out = SimpleNamespace(__cuda_array_interface__=named), values()
    for ends in ((out, thing), (thing, out)):
        with pytest.raises((TypeError, ValueError), match=words) as caught:
            bfc.copy(*ends)
        assert "SimpleNamespace" in str(caught.value) or "stream" in entries
    assert np.array_equal(out, values())


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


def test_memory_that_the_device_reads_in_place_is_kept_until_it_has(emulated):
    emulated.set_attribute(0, cuda_stream.PAGEABLE_ACCESS, 1)
    stream = new_stream()
    to, host = memory(), values()
    references = sys.getrefcount(host)
    emulated.hold(stream)
    cuda_stream.CUDACopyStream(driver_calls.device(0), stream)._call(
        "cuMemsetD8Async", to.address, 9, 96, stream
    )
    bfc.copy(to, host, non_blocking=True, stream=stream)
    assert sys.getrefcount(host) > references
    emulated.release(stream)
    bfc.copy(to, values(), non_blocking=True, stream=stream)
    assert sys.getrefcount(host) == references
