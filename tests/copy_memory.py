"""Memory of a CUDA device for the tests of `bfc.copy`, real or emulated."""

from __future__ import annotations

import ctypes
import os

import numpy as np
from copy_cases import Case, Side

import bfc
from bfc.copy import _cuda

ON_GPU = os.environ.get("BFC_TEST_GPU") == "1"
SHAPE = (4, 6)


class Memory:
    """A block of a device's memory, and a side of a copy in it."""

    def __init__(self, side: Side, device: int = 0, stream: int | None = None) -> None:
        self.side, self.stream = side, stream
        self.device = _cuda.device(device)
        mode = self.device.enter()
        self.address = int(_cuda.call("cuMemAlloc", side.block.nbytes))
        self.device.leave(mode)
        self._transfer(self.address, side.block.ctypes.data)

    def _transfer(self, to: int, source: int) -> None:
        """Without a call on the emulator, whose memory is the host's: nothing is waited for."""
        if not ON_GPU:
            ctypes.memmove(to, source, self.side.block.nbytes)
            return
        mode = self.device.enter()
        _cuda.call("cuCtxSynchronize")
        _cuda.call("cuMemcpy", to, source, self.side.block.nbytes)
        self.device.leave(mode)

    @property
    def __cuda_array_interface__(self) -> dict:
        return {
            "shape": self.side.shape,
            "typestr": self.side.dtype.str,
            "descr": self.side.dtype.descr,
            "data": (self.address + self.side.offset, False),
            "strides": self.side.strides,
            "version": 3,
            "stream": self.stream,
        }

    @property
    def block(self) -> np.ndarray:
        found = np.empty_like(self.side.block)
        self._transfer(found.ctypes.data, self.address)
        return found

    @property
    def array(self) -> np.ndarray:
        side = self.side
        return np.ndarray(side.shape, side.dtype, self.block, side.offset, side.strides)

    def free(self) -> None:
        mode = self.device.enter()
        _cuda.call("cuMemFree", self.address)
        self.device.leave(mode)


def memory(dtype="f4", device: int = 0, *, shape=SHAPE, strides=None, stream=None) -> Memory:
    """Items 0, 1, 2... on a device."""
    array = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    if strides is None:
        side = Side(array.view("u1").ravel(), array.dtype, shape, array.strides, 0)
    else:
        block = np.zeros(1024, "u1")
        side = Side(block, array.dtype, shape, strides, 0)
        side.array[...] = array
    return Memory(side, device, stream)


def run(made: Case, to_device: int | None, from_device: int | None, **options) -> np.ndarray:
    """The destination's block after a copy between the host (None) and devices."""
    to, source = made.to.twin(), made.source.twin()
    target = to if to_device is None else Memory(to, to_device)
    given = source if from_device is None else Memory(source, from_device)
    bfc.copy(
        to.array if to_device is None else target,
        source.array if from_device is None else given,
        conj=made.conj,
        neg=made.neg,
        **options,
    )
    block = target.block if to_device is not None else to.block
    for used in (target, given):
        if isinstance(used, Memory):
            used.free()
    return block
