"""The driver as a user of raw pointers calls it: through cuda-python, each result checked."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

LEGACY, PER_THREAD = 1, 2
NON_BLOCKING = 1
#: Numbers of CUdevice_attribute.
COMPUTE_CAPABILITY_MAJOR = 75
HAS_MANAGED_MEMORY = 83
HAS_CONCURRENT_MANAGED_ACCESS = 89
HAS_VIRTUAL_MEMORY = 102
HAS_DESCRIPTORS = 103
HAS_RDMA = 110
HAS_MEMORY_POOLS = 115
HAS_FABRIC_HANDLES = 128
#: The calls that map memory, from the first to the last of a page's life.
MAPPING = [
    "cuMemAddressReserve",
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemRelease",
    "cuMemAddressFree",
]


def call(name: str, *arguments: object) -> object:
    """A driver call's value, or None. A failure is a RuntimeError with the driver's name for it."""
    from cuda.bindings import driver

    result, *values = getattr(driver, name)(*arguments)
    if result != 0:
        raise RuntimeError(f"{name}: {result.name}")
    return values[0] if values else None


def begin_capture(stream: int) -> None:
    """Begins a capture that minds only calls of the thread it is in."""
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    call("cuStreamBeginCapture", stream, mode)


@contextmanager
def current(device: int = 0) -> Iterator[None]:
    """The device's primary context is current inside of the block."""
    call("cuInit", 0)
    context = call("cuDevicePrimaryCtxRetain", device)
    call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")
        call("cuDevicePrimaryCtxRelease", device)


@contextmanager
def stream(device: int = 0, flags: int = NON_BLOCKING) -> Iterator[int]:
    """A stream of the device, as its handle."""
    with current(device):
        made = call("cuStreamCreate", flags)
        yield int(made)
        call("cuStreamDestroy", made)


def fill(ptr: int, value: int, nbytes: int, on: int = LEGACY, device: int = 0) -> None:
    """Queues a memset."""
    with current(device):
        call("cuMemsetD8Async", ptr, value, nbytes, on)


class Seen:
    """Pinned host memory: a copy to pageable memory would wait for the stream."""

    def __init__(self, nbytes: int, device: int) -> None:
        self._device, self._nbytes = device, nbytes
        with current(device):
            self.address = int(call("cuMemHostAlloc", nbytes, 0))
        ctypes.memset(self.address, 0, nbytes)

    def __bytes__(self) -> bytes:
        return ctypes.string_at(self.address, self._nbytes)

    def free(self) -> None:
        with current(self._device):
            call("cuMemFreeHost", self.address)


@contextmanager
def queued_read(ptr: int, nbytes: int, on: int = LEGACY, device: int = 0) -> Iterator[Seen]:
    """Queues a copy to the host. What it yields has the bytes once the stream has come to it."""
    seen = Seen(nbytes, device)
    with current(device):
        call("cuMemcpyDtoHAsync", seen.address, ptr, nbytes, on)
    yield seen
    synchronize(on, device)
    seen.free()


def read(ptr: int, nbytes: int, device: int = 0) -> bytes:
    """The bytes there now, all earlier work done."""
    seen = (ctypes.c_ubyte * nbytes)()
    with current(device):
        call("cuCtxSynchronize")
        call("cuMemcpyDtoH", ctypes.addressof(seen), ptr, nbytes)
    return bytes(seen)


def synchronize(on: int, device: int = 0) -> None:
    with current(device):
        call("cuStreamSynchronize", on)
