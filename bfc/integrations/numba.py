"""numba's device memory in a bfc pool: an External Memory Manager, for numba-cuda and for
numba-cuda-mlir.

    bfc.use(a, "numba")
    NUMBA_CUDA_MEMORY_MANAGER=bfc.integrations.numba python program.py

The second makes a pool for each device when numba first uses it: `bfc.integrations.numba.
allocator(0)` is that of device 0. It grows as needed, up to BFC_LIMIT: bytes, a text ("4 GiB"), or
a fraction of the device (0.5); where that is unset, up to what `BFCAllocator` takes by default.

numba names no stream, neither when it allocates nor when it frees. So a block comes back behind a
fence on the default stream, which waits for every stream that numba makes. For a stream made
elsewhere as non-blocking, say `a.record_stream(array.device_ctypes_pointer.value, stream)`.

`cuda.close()` resets the device, and all memory is lost with it, the pool's too: make another.
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
    """The driver module of each numba that is installed. Raises DeviceUnavailableError for none."""
    names = [name for name in DRIVERS if importlib.util.find_spec(name.partition(".")[0])]
    return [client(name, INSTALL) for name in names or DRIVERS[:1]]


def manager(
    allocators: OneOrMore,
    driver_module: Any = None,
    *,
    managed: OneOrMore | None = None,
    fenced: bool = True,
) -> type:
    """The class that `numba.cuda.set_memory_manager` takes.

    `driver_module` is numba's `cudadrv.driver`, of numba-cuda where it is None. `managed` are
    allocators of kind "managed" for `cuda.managed_array`, which otherwise asks the driver, as do
    pinned and mapped arrays. `fenced=False` spares two driver calls a free, for programs that use
    no stream but the default one.

    Raises as `bfc.use` does. Allocations raise what `Allocator.allocate` does.
    """
    pools = by_device(allocators)
    given = pools if managed is None else by_device(managed)
    for_managed = {n: a for n, a in given.items() if a.device.kind == "cuda_managed"}
    if managed is not None and for_managed != given:
        raise ValueError("managed= takes allocators over CUDASubAllocator(kind='managed')")

    def find(device: int) -> Allocator:
        return pools.get(device) or no_allocator(pools, device)

    return make_manager(driver_module or drivers()[0], find, for_managed, fenced)


def install(allocators: Allocators) -> Callable[[], None]:
    """Installs it in every numba that is here, and in the contexts that they have. The function
    returned puts the managers before it back, unless others were set meanwhile."""
    with ExitStack() as undo:
        for driver in drivers():
            undo.callback(install_in(driver, manager(allocators, driver)))
        return undo.pop_all().close
