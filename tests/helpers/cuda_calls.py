"""Short forms of driver calls for tests. Importing this loads the emulator, then cuda.bindings."""

from __future__ import annotations

import ctypes

from bfc.testing import cuda_emulator

cuda_emulator.load()

from cuda.bindings import driver as cu  # noqa: E402 - it looks for the driver once


def ok(result: tuple) -> object:
    """What a call gave besides its success."""
    assert int(result[0]) == 0, result
    return result[1] if len(result) == 2 else result[1:]


def code(result: tuple) -> int:
    return int(result[0])


def enter(device: int = 0) -> object:
    """Retains the device's primary context and makes it current."""
    ok(cu.cuInit(0))
    context = ok(cu.cuDevicePrimaryCtxRetain(device))
    ok(cu.cuCtxPushCurrent(context))
    return context


def alloc(nbytes: int) -> int:
    return int(ok(cu.cuMemAlloc(nbytes)))


def stream(flags: int = 0) -> object:
    return ok(cu.cuStreamCreate(flags))


def event(flags: int = 2) -> object:
    return ok(cu.cuEventCreate(flags))


def fill(address: int, value: int, on: object = 0, nbytes: int = 8) -> None:
    ok(cu.cuMemsetD8Async(address, value, nbytes, on))


def peek(address: int, nbytes: int = 1) -> bytes:
    """What is there now, without a call that would wait."""
    return ctypes.string_at(address, nbytes)
