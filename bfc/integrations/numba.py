"""numba's device memory in a bfc pool: an External Memory Manager, for numba-cuda and for
numba-cuda-mlir.

    bfc.use(a, "numba")
    NUMBA_CUDA_MEMORY_MANAGER=bfc.integrations.numba python program.py

The second makes a pool for each device when numba first uses the device;
`bfc.integrations.numba.allocator(0)` returns that of device 0. It grows as needed, up to BFC_LIMIT:
bytes, a text ("4 GiB"), or a fraction of the device (0.5). If that is not set, the pool has the
default limit of a `BFCAllocator`.

numba names no stream, neither when it allocates nor when it frees. So a freed block waits for a
fence on the default stream, which waits for every stream that numba makes. For a non-blocking
stream that numba did not make, call `a.record_stream(array.device_ctypes_pointer.value, stream)`.

`cuda.close()` resets the device. All memory is lost then, including the pool's: make a new pool.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.integrations import _numba_default
from bfc.integrations._emm import make_manager
from bfc.integrations._numba_contexts import install_in
from bfc.integrations._shared import Allocators, OneOrMore, by_device, client, no_allocator

INSTALL = "'numba-cuda[cu13]'   (or numba-cuda-mlir)"
DRIVERS = ("numba.cuda.cudadrv.driver", "numba_cuda_mlir.numba_cuda.cudadrv.driver")

_numba_memory_manager = _numba_default.memory_manager  # where numba looks for it
allocator = _numba_default.allocator


def drivers() -> list[Any]:
    """The driver module of each numba that is installed: numba-cuda, numba-cuda-mlir, or both.
    Raises DeviceUnavailableError if neither is."""
    names = [name for name in DRIVERS if importlib.util.find_spec(name.partition(".")[0])]
    return [client(name, INSTALL) for name in names or DRIVERS[:1]]


def manager(
    allocators: OneOrMore,
    driver_module: Any = None,
    *,
    managed: OneOrMore | None = None,
    fenced: bool = True,
) -> type:
    """Make the class that `numba.cuda.set_memory_manager` takes.

    Parameters
    ----------
    allocators : Allocator, list of Allocator, or dict of int to Allocator
        One, or one for each device.
    driver_module : module, optional
        numba's `cudadrv.driver`; None is that of numba-cuda.
    managed : Allocator, list of Allocator, or dict of int to Allocator, optional
        Allocators of managed memory, for `cuda.managed_array`. Without them it asks the driver, as
        pinned and mapped arrays do.
    fenced : bool, optional
        False saves two driver calls a free, for programs that use the default stream only.

    Returns
    -------
    type
        The class.

    Raises
    ------
    ValueError
        If an allocator is not of the right kind of memory.
    """
    pools = by_device(allocators)
    given = pools if managed is None else by_device(managed)
    for_managed = {n: a for n, a in given.items() if a.device.kind == "cuda_managed"}
    if managed is not None and for_managed != given:
        raise ValueError("managed= takes allocators over CUDASubAllocator(kind='managed')")

    def find(device: int) -> Allocator:
        return pools.get(device) or no_allocator(pools, device)

    return make_manager(driver_module or drivers()[0], find, for_managed, fenced)


def serve(allocators: Allocators) -> Callable[[], None]:
    """Lets each numba that is installed allocate from these allocators, in its contexts too. The
    result puts the previous memory managers back, unless others were set meanwhile."""
    with ExitStack() as undo:
        for driver in drivers():
            undo.callback(install_in(driver, manager(allocators, driver)))
        return undo.pop_all().close
