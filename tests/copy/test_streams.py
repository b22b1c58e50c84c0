"""Which stream a CUDA copy is queued on, and which it comes after."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from copy_memory import H2D, Memory, memory, new_stream, values

import bfc
from bfc.copy import _cuda


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
    lane = _cuda.Lane(_cuda.device(device), stream)
    lane._call("cuMemsetD8Async", address, 7, 96, stream)


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
def test_a_dlpack_producer_is_told_a_stream_of_its_own_device(emulated, device: int):
    stream = new_stream(device)
    with (
        bfc.BFCAllocator(bfc.CUDASubAllocator(0), memory_limit="4 MiB") as first,
        bfc.BFCAllocator(bfc.CUDASubAllocator(1), memory_limit="4 MiB") as second,
    ):
        source, to = Exporter(first.allocate(96)), Exporter(second.allocate(96))
        bfc.copy(source, bytes(range(96)))
        bfc.copy(to, bytes(96))
        source.told.clear()
        to.told.clear()
        emulated.hold(stream, device)
        bfc.copy(to, source, stream=stream)
        assert [source.told, to.told] == ([[stream], [1]] if device == 0 else [[1], [stream]])
        assert ctypes.string_at(to.buffer.ptr, 96) == bytes(96)
        emulated.release(stream, device)
        assert ctypes.string_at(to.buffer.ptr, 96) == bytes(range(96))
        source.buffer.free()
        to.buffer.free()


def test_an_interface_that_is_no_dict(emulated):
    with pytest.raises(TypeError, match="of a SimpleNamespace is no dict but a int"):
        bfc.copy(values(), SimpleNamespace(__cuda_array_interface__=3))
