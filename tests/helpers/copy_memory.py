"""Memory of a CUDA device for the tests of `bfc.copy`, real or emulated."""

from __future__ import annotations

import ctypes

import numpy as np
from copy_cases import Case, Side
from cuda_machine import ON_GPU

import bfc
from bfc.drivers.cuda import calls as driver_calls
from bfc.testing import cuda_emulator as emulator

SHAPE = (4, 6)


class Memory:
    """A block of a device's memory, and a side of a copy in it."""

    def __init__(self, side: Side, device: int = 0, stream: int | None = None) -> None:
        self.side, self.stream = side, stream
        self.device = driver_calls.device(device)
        mode = self.device.context.push()
        self.address = int(driver_calls.call("cuMemAlloc", side.block.nbytes))
        self.device.context.pop(mode)
        self._transfer(self.address, side.block.ctypes.data)

    def _transfer(self, to: int, source: int) -> None:
        """Without a call on the emulator, whose memory is the host's: nothing is waited for."""
        if not ON_GPU:
            ctypes.memmove(to, source, self.side.block.nbytes)
            return
        mode = self.device.context.push()
        driver_calls.call("cuCtxSynchronize")
        driver_calls.call("cuMemcpy", to, source, self.side.block.nbytes)
        self.device.context.pop(mode)

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
        mode = self.device.context.push()
        driver_calls.call("cuMemFree", self.address)
        self.device.context.pop(mode)


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


def odd(dtype) -> Memory:
    """Items at no multiple of their size."""
    size = np.dtype(dtype).itemsize
    strides = (6 * size, size)
    return Memory(Side(np.zeros(256, "u1"), np.dtype(dtype), SHAPE, strides, 1))


def packed(**options):
    return memory(**options)


def gaps(**options):
    return memory(strides=(48, 8), **options)


def turned(**options):
    return memory(strides=(4, 16), **options)


def there(**options):
    return memory(device=1, **options)


# -- the calls of the driver -----------------------------------------------------------------------

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
    mode = driver_calls.device(device).context.push()
    stream = int(driver_calls.call("cuStreamCreate", 1))
    driver_calls.device(device).context.pop(mode)
    return stream


ROWS = "cuMemcpy2DAsync"
EXCHANGE = "cuThreadExchangeStreamCaptureMode"
#: What makes a context current.
ENTER = ("cuCtxGetId", "cuCtxPushCurrent", EXCHANGE)
