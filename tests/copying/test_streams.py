"""Which stream a CUDA copy is queued on, and which it comes after."""

from __future__ import annotations

import ctypes
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import raw_cuda
from copy_memory import D2H, H2D, SYNC, Memory, memory, new_stream, values

import bfc
from bfc.copying import cuda_stream
from bfc.drivers.cuda import calls as driver_calls


class Exporter:
    """Memory that speaks DLPack alone."""

    def __init__(self, buffer: bfc.Buffer) -> None:
        self.buffer = buffer
        self.told: list[int | None] = []

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.buffer.__dlpack_device__()

    def __dlpack__(self, **options) -> object:
        self.told.append(options.get("stream"))
        return self.buffer.__dlpack__(**options)


def named(address: int, stream: int | None, nbytes: int = 96) -> SimpleNamespace:
    """Memory that names the stream it is used on."""
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    return SimpleNamespace(__cuda_array_interface__={**interface, "stream": stream})


def fill(address: int, stream: int, device: int = 0) -> None:
    """Queues sevens."""
    on_stream = cuda_stream.CUDACopyStream(driver_calls.device(device), stream)
    on_stream._call("cuMemsetD8Async", address, 7, 96, stream)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_stream_of_a_device_without_a_part_in_the_copy(emulated, non_blocking: bool):
    """Named for the copy it is an error before anything is written; of `use_stream` it is none that
    the memory can be on."""
    memory(device=1)
    foreign, host = new_stream(1), values()
    third = memory(device=2)
    for to, source in ((memory(), host), (host, memory()), (memory(), memory()), (third, memory())):
        before = to.block if isinstance(to, Memory) else to.copy()
        emulated.clear()
        with pytest.raises(ValueError, match="belongs to no device whose memory is copied"):
            bfc.copy(to, source, stream=foreign, non_blocking=non_blocking)
        assert not emulated.count(H2D)
        assert np.array_equal(to.block if isinstance(to, Memory) else to, before)
        with bfc.use_stream(foreign):
            bfc.copy(to, source, non_blocking=non_blocking)
        assert {call.stream for call in emulated.calls if call.name == H2D} == {1}


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("kind", ["device", "managed"])
def test_a_dlpack_producer_is_told_a_stream_of_its_own_device(emulated, kind: str, device: int):
    """Managed memory names the device 0, wherever it was made."""
    stream = new_stream(device)
    with (
        bfc.BFCAllocator(bfc.CUDASubAllocator(0), memory_limit="4 MiB") as first,
        bfc.BFCAllocator(bfc.CUDASubAllocator(1, kind=kind), memory_limit="4 MiB") as second,
    ):
        source, to = Exporter(first.allocate(96)), Exporter(second.allocate(96))
        bfc.copy(source, bytes(range(96)))
        bfc.copy(to, bytes(96))
        source.told.clear()
        to.told.clear()
        emulated.hold(stream, device)
        bfc.copy(to, source, stream=stream)
        assert [source.told[-1], to.told[-1]] == ([stream, 1] if device == 0 else [1, stream])
        assert ctypes.string_at(to.buffer.ptr, 96) == bytes(96)
        emulated.release(stream, device)
        assert ctypes.string_at(to.buffer.ptr, 96) == bytes(range(96))
        source.buffer.free()
        to.buffer.free()


@pytest.mark.parametrize("non_blocking", [False, True])
@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("kind", ["interface", "buffer", "cached"])
def test_pinned_memory_that_names_a_stream_is_copied_after_it(
    emulated, kind: str, device: int, non_blocking: bool
):
    """Blocking or not, and on whichever device the copy is."""
    memory()
    own = new_stream(0)
    to = memory("u1", device, shape=(96,))
    if kind == "cached":
        allocator = bfc.PinnedAllocator()
    else:
        allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(kind="pinned"), memory_limit="4 MiB")
    with allocator:
        buffer = allocator.allocate(96, stream=None if kind == "interface" else own)
        source = named(buffer.ptr, own) if kind == "interface" else buffer
        emulated.hold(own)
        fill(buffer.ptr, own)
        if non_blocking:
            bfc.copy(to, source, non_blocking=True)
            assert to.block.tolist() == list(range(96))
            emulated.release(own)
        else:
            waiter = emulated.release_once_waited_for(own)
            bfc.copy(to, source)
            waiter.join()
        assert to.block.tolist() == [7] * 96
        buffer.free()


@pytest.mark.parametrize("device", [0, 1])
def test_the_host_waits_for_the_stream_that_pinned_memory_names(emulated, device: int):
    """Of whichever device: the driver says only where the memory was made."""
    memory()
    memory(device=1)
    own = new_stream(device)
    with bfc.BFCAllocator(bfc.CUDASubAllocator(kind="pinned"), memory_limit="4 MiB") as allocator:
        buffer = allocator.allocate(96)
        for direction in ("from", "to"):
            host = np.zeros(96, "u1")
            ends = (host, named(buffer.ptr, own))
            emulated.clear()
            emulated.hold(own, device)
            fill(buffer.ptr, own, device)
            waiter = emulated.release_once_waited_for(own)
            bfc.copy(*(ends if direction == "from" else ends[::-1]))
            waiter.join()
            assert emulated.count(SYNC) == 1
            assert not emulated.count(D2H)
            found = host if direction == "from" else np.asarray(buffer)
            assert found.tolist() == [7 if direction == "from" else 0] * 96
            del found
        buffer.free()


@pytest.mark.parametrize("direction", ["to", "from"])
@pytest.mark.parametrize(
    ("call", "options"), [("cuMemHostAlloc", (0,)), ("cuMemAllocManaged", (1,))]
)
def test_an_array_on_memory_of_the_driver_is_kept_until_the_transfer_is_done(
    emulated, call: str, options: tuple[int], direction: str
):
    """As numba and CuPy have it: an array like any other, whose memory goes back to their pool."""
    stream, there = new_stream(), memory()
    address = int(driver_calls.device(0).call(call, 96, *options))
    held = (ctypes.c_char * 96).from_address(address)
    array = np.frombuffer(held, "f4").reshape(4, 6)
    gone = weakref.ref(held)
    emulated.hold(stream)
    fill(there.address, stream)
    ends = (there, array) if direction == "to" else (array, there)
    bfc.copy(*ends, non_blocking=True, stream=stream)
    del held, array, ends
    assert gone() is not None
    emulated.release(stream)
    bfc.copy(there, values(), non_blocking=True, stream=stream)  # asks nobody: it is pageable
    assert gone() is not None
    other = (ctypes.c_char * 96).from_address(address)
    bfc.copy(there, np.frombuffer(other, "f4").reshape(4, 6), non_blocking=True, stream=stream)
    assert gone() is None
    driver_calls.device(0).call(
        "cuMemFreeHost" if call == "cuMemHostAlloc" else "cuMemFree", address
    )


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("kind", ["buffer", "array", "address"])
def test_pinned_memory_is_freed_after_its_copys_stream_was_destroyed(
    emulated, kind: str, device: int
):
    """What was queued there goes on, and the block is not used again before it is done."""
    there, stream = memory("u1", device, shape=(96,)), new_stream(device)
    memory()
    with bfc.PinnedAllocator() as pinned:
        if kind == "address":
            address = pinned.allocate_raw(96)
            host = np.frombuffer((ctypes.c_char * 96).from_address(address), "u1")
            free = lambda: pinned.deallocate_raw(address)  # noqa: E731
        else:
            buffer = pinned.allocate(96)
            address, free = buffer.ptr, buffer.free
            host = np.frombuffer(buffer, "u1") if kind == "array" else buffer
        other = new_stream(device)
        emulated.hold(other, device)
        fill(there.address, other, device)
        on_stream = cuda_stream.CUDACopyStream(driver_calls.device(device), stream)
        on_stream.wait_for(cuda_stream.CUDACopyStream(on_stream.device, other))
        bfc.copy(there, host, non_blocking=True, stream=stream)
        del host
        on_stream._call("cuStreamDestroy", stream)
        free()
        assert pinned.allocate_raw(96) != address
        emulated.release(other, device)
        assert pinned.allocate_raw(96) == address


@pytest.mark.parametrize("direction", ["to", "from"])
def test_an_array_on_managed_memory_of_ours_is_not_used_again_too_early(emulated, direction: str):
    stream, there = new_stream(), memory("u1", shape=(96,))
    source = bfc.CUDASubAllocator(kind="managed")
    with bfc.BFCAllocator(source, memory_limit="4 MiB") as allocator:
        buffer = allocator.allocate(96)
        address, array = buffer.ptr, np.frombuffer(buffer, "u1")
        emulated.hold(stream)
        ends = (there, array) if direction == "to" else (array, there)
        bfc.copy(*ends, non_blocking=True, stream=stream)
        del array, ends
        buffer.free()
        assert address not in [allocator.allocate_raw(96) for _ in range(3)]
        emulated.release(stream)


def test_a_graph_is_not_spoiled_by_a_stream_that_it_cannot_wait_for(emulated):
    """The copy says so before the driver ends the capture."""
    stream, other = new_stream(), new_stream()
    on_stream = cuda_stream.CUDACopyStream(driver_calls.device(0), stream)
    to, second = memory("u1", shape=(96,)), memory("u1", 1, shape=(96,))
    with bfc.PinnedAllocator() as pinned:
        host = pinned.allocate(96)
        unnamed, early = named(to.address, None), named(to.address, other)
        late = named(to.address, stream)
        for first, copies in (
            (unnamed, {"to": early, "src": host, "stream": stream}),
            (unnamed, {"to": unnamed, "src": named(host.ptr, other), "stream": stream}),
            (unnamed, {"to": late, "src": host, "stream": other}),
            (unnamed, {"to": second, "src": unnamed, "stream": stream}),
            (unnamed, {"to": host, "src": named(host.ptr + 8, stream, 88), "stream": stream}),
        ):
            raw_cuda.begin_capture(stream)
            bfc.copy(first, host, non_blocking=True, stream=stream)
            if copies["to"] is host:
                copies["to"] = np.zeros(88, "u1")
            with pytest.raises(bfc.DriverError, match="capture"):
                bfc.copy(copies["to"], copies["src"], non_blocking=True, stream=copies["stream"])
            on_stream._call("cuStreamEndCapture", stream)
        host.free()


def test_an_interface_that_is_no_dict(emulated):
    with pytest.raises(TypeError, match="of a SimpleNamespace is not a dict but a int"):
        bfc.copy(values(), SimpleNamespace(__cuda_array_interface__=3))
