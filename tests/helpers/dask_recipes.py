"""What workers of Dask are told to run: they import this file by name."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

import bfc
from bfc.integrations import dask as pools
from bfc.testing import Misbehaving
from bfc_tools.study import cluster

MIB = 1 << 20


def simulated() -> bfc.Allocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB"))


def two_devices() -> list[bfc.Allocator]:
    second = Misbehaving("32 MiB", device=bfc.Device("simulated", 1))
    return [
        bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB")),
        bfc.BFCAllocator(second, allow_growth=True),
    ]


def one_device_twice() -> list[bfc.Allocator]:
    return [simulated(), simulated()]


def no_allocator() -> Any:
    return {"simulated:0": "64 MiB"}


def raises() -> bfc.Allocator:
    raise OSError("the disk is full")


def raises_on_late_workers(dask_worker: Any) -> bfc.Allocator:
    if dask_worker.name == "late":
        raise OSError("too late")
    return simulated()


def emulated() -> bfc.Allocator:
    """A pool of a CUDA device, on the emulated driver."""
    from bfc.testing import cuda_emulator

    cuda_emulator.load()
    return bfc.BFCAllocator(bfc.CUDASubAllocator(0), memory_limit="64 MiB")


_held: list[Any] = []


def hold(nbytes: int) -> str:
    """A task that leaves memory allocated."""
    _held.append(pools.pool().allocate(nbytes))
    return str(_held[-1].device)


def hold_on(device: str, nbytes: int) -> None:
    _held.append(pools.pool(device).allocate(nbytes))


def drop() -> None:
    _held.clear()


def keep_pool(dask_worker: Any) -> None:
    """Remembers the worker's pools after the plugin has gone."""
    _held[:] = dask_worker.plugins["bfc"].pools.values()


def are_closed() -> list[bool]:
    return [pool.closed for pool in _held]


def metrics_of(dask_worker: Any) -> list[str]:
    return sorted(dask_worker.metrics)


def devices_of(dask_worker: Any) -> list[str]:
    """What a function of `client.run` sees, which is no task."""
    with pytest.raises(LookupError, match=r"in dask_worker.plugins\['bfc'\].pools"):
        pools.pool()
    return list(dask_worker.plugins["bfc"].pools)


def pid() -> int:
    return os.getpid()


def end_at_once() -> None:
    os._exit(1)


def numba_array(nbytes: int) -> tuple[int, int]:
    """Lets numba allocate, and says what the pool has in use meanwhile and then."""
    import numpy as np
    from numba import cuda

    array = cuda.device_array(nbytes, np.uint8)
    during = pools.pool().stats().bytes_in_use
    del array
    return during, pools.pool().stats().bytes_in_use


def core_buffer(nbytes: int) -> tuple[str, int]:
    """The same with cuda.core, which is served by thread."""
    import threading

    from cuda.core import Device

    device = Device(0)
    device.set_current()
    buffer = device.allocate(nbytes, stream=device.default_stream)
    during = pools.pool().stats().bytes_in_use
    buffer.close()
    return threading.current_thread().name, during


def complaints() -> list[str]:
    from bfc.testing import cuda_emulator

    return cuda_emulator.load().complaints


def another_version() -> None:
    cluster.__version__ = "0.0.1"


def the_version() -> None:
    cluster.__version__ = bfc.__version__


def whose_memory() -> bool:
    """Whether cuda.core allocates from a pool of ours in this thread."""
    from cuda.core import Device

    from bfc.integrations.cuda_core import is_ours

    return is_ours(Device(0))


def churn(seed: int, rounds: int = 300) -> int:
    """Takes and gives back, and says how many calls that was: no two blocks may share a byte."""
    dice, live, calls = random.Random(seed), [], 0
    for _ in range(rounds):
        buffer = pools.pool().allocate(dice.randrange(1, 100_000))
        first, last = buffer.ptr, buffer.ptr + buffer.nbytes
        assert not [
            other for other in live if other.ptr < last and first < other.ptr + other.nbytes
        ]
        live.append(buffer)
        while len(live) > dice.randrange(20):
            live.pop(dice.randrange(len(live))).free()
            calls += 1
        calls += 1
    for buffer in live:
        buffer.free()
    return calls + len(live)
