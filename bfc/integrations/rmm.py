"""RAPIDS (cudf, cuml) and bfc: a bfc pool under RMM, or an RMM resource under a bfc pool.

    bfc.use(a, "rmm")                                            # the device's current resource
    rmm.mr.set_current_device_resource(bfc.integrations.rmm.resource(a))         # or by hand

The other way round: `bfc.BFCAllocator(bfc.integrations.rmm.RMMSubAllocator(mr))`.

`log_csv(allocator, path)` writes what an allocator has recorded as RMM's log.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, SupportsIndex, cast

from bfc.allocators._allocator import Allocator
from bfc.devices import Availability
from bfc.errors import SubAllocatorError
from bfc.integrations._shared import (
    Allocators,
    Blocks,
    OneOrMore,
    by_device,
    client,
    require_runtime,
)
from bfc.pytorch.words import ALLOC, FREE_COMPLETED, OOM
from bfc.suballocators.cuda import CUDASubAllocator
from bfc.trace.rmm_log import ALLOCATE, FAILURE, FREE, write
from bfc.units import format_bytes

INSTALL = "rmm-cu13   (rmm-cu12 for CUDA 12)"


def resource(allocator: OneOrMore) -> Any:
    """Make an `rmm.mr.CallbackMemoryResource` over an allocator.

    Parameters
    ----------
    allocator : Allocator
        Of one device.

    Returns
    -------
    rmm.mr.CallbackMemoryResource
        A free is ordered on the stream that RMM passes to it.

    Raises
    ------
    DeviceUnavailableError
        If RMM is missing.

    Notes
    -----
    Out of memory is RMM's own MemoryError, with our text in it, as it passes through C++. Cost: RMM
    takes the GIL for each call.
    """
    [pool] = by_device(allocator).values()
    blocks = Blocks(pool)
    return client("rmm", INSTALL).mr.CallbackMemoryResource(blocks.allocate, blocks.free)


def log_csv(allocator: Allocator, path: str | os.PathLike[str]) -> None:
    """Write what an allocator has recorded as a log of RMM.

    Parameters
    ----------
    allocator : Allocator
        One that records its history (`record_history`).
    path : str or os.PathLike
        The file. One that exists is replaced once the new one is whole.

    Raises
    ------
    ValueError
        If the allocator has recorded nothing.
    OSError
        If it cannot be written. A file that existed is unchanged then.

    Notes
    -----
    The columns are RMM's: Thread (always 0), Time (of the day, in UTC), Action, Pointer, Size and
    Stream. A seventh, Owner, has the name that `bfc.owner` gave, and RMM's tools pass over it. A
    free has the time at which it was completed. `Trace.from_rmm_log` reads the file.

    Examples
    --------
    >>> import pathlib, tempfile, bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> allocator.record_history()
    >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "log.csv")
    ...     bfc.integrations.rmm.log_csv(allocator, path)
    ...     bfc.Trace.from_rmm_log(path).size.tolist()
    [1000, 0]
    """
    history = allocator.snapshot().history
    if not history:
        raise ValueError("this allocator has recorded nothing: call record_history() beforehand")
    actions = {ALLOC: ALLOCATE, FREE_COMPLETED: FREE, OOM: FAILURE}
    rows = (
        (
            entry.time_us,
            actions[entry.action],
            0 if entry.action == OOM else entry.addr,
            entry.size,
            entry.stream,
            entry.owner,
        )
        for entry in history
        if entry.action in actions
    )
    write(path, rows, any(entry.owner for entry in history))


def serve(allocators: Allocators) -> Callable[[], None]:
    """Lets RMM allocate from these allocators, one for each device. The result puts the previous
    resources back, unless others were set meanwhile. Raises DeviceUnavailableError if RMM is
    missing, or its CUDA runtime refuses the driver, as it does the emulated one."""
    mr = client("rmm", INSTALL).mr
    require_runtime("rmm", lookup(mr), allocators)
    with ExitStack() as undo:
        for ordinal, pool in allocators.items():
            undo.callback(_install_on(mr, ordinal, resource(pool)))
        return undo.pop_all().close


def lookup(mr: Any) -> Callable[[], Any]:
    """The function of RMM that asks the CUDA runtime for the current device. `mr` is rmm.mr."""
    return cast(Callable[[], Any], mr.get_current_device_resource)


def _install_on(mr: Any, ordinal: int, ours: Any) -> Callable[[], None]:
    before = mr.get_per_device_resource(ordinal)
    mr.set_per_device_resource(ordinal, ours)

    def put_back() -> None:
        if mr.get_per_device_resource(ordinal) is ours:
            mr.set_per_device_resource(ordinal, before)

    return put_back


class RMMSubAllocator(CUDASubAllocator):
    """Regions from an RMM resource of one device.

    Parameters
    ----------
    mr : rmm.mr.DeviceMemoryResource
        Where they come from.
    device : int, optional
        The device's ordinal.

    Raises
    ------
    DeviceUnavailableError
        If there is no driver or no such device, or a package is missing.

    Notes
    -----
    RMM's memory is ordered on a stream, and that of an allocator is not bound to one. So this waits
    for RMM's default stream after it takes a region, and for all work on the device before it gives
    one back.
    """

    def __init__(self, mr: Any, device: SupportsIndex = 0) -> None:
        super().__init__(device)
        self.native = None  # direct calls of the driver would bypass RMM
        self._mr = mr
        self._blocks: dict[int, tuple[int, int, int]] = {}  # address -> RMM's, its bytes, ours
        self._cuda = client("cuda.bindings.driver", "cuda-bindings")
        _error, self._context = self._cuda.cuDevicePrimaryCtxRetain(self.device.ordinal)
        self._cuda.cuDevicePrimaryCtxRelease(self.device.ordinal)  # the base class retains it

    def __repr__(self) -> str:
        live = format_bytes(self.live_bytes)
        return f"RMM {type(self._mr).__name__}({self.device.ordinal}: {live} live)"

    @property
    def supports_virtual_memory(self) -> Availability:  # type: ignore[override]
        """False: RMM gives whole blocks."""
        return Availability(False, "RMM gives whole blocks")

    @property
    def live_bytes(self) -> int:
        return sum(nbytes for _base, _taken, nbytes in list(self._blocks.values()))

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Makes the device current, since RMM uses the current device."""
        (failed,) = self._cuda.cuCtxPushCurrent(self._context)
        if failed:
            raise SubAllocatorError(f"{self!r}: {failed.name}")
        try:
            yield
        finally:
            self._cuda.cuCtxPopCurrent()

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        taken = nbytes + max(0, alignment - 256)  # RMM aligns to 256
        try:
            with self._on_device():
                base = self._mr.allocate(taken)
        except (MemoryError, OverflowError):
            return None
        block = base, taken, nbytes
        try:
            if (fence := self.fence(0)) is not None:
                fence.wait()
        except BaseException:
            self._give(block)
            raise
        address = -(-base // alignment) * alignment
        self._blocks[address] = block
        return address, nbytes

    def free(self, address: int, nbytes: int) -> None:
        block = self._blocks.get(address)
        if block is None or block[2] != nbytes or self._blocks.pop(address, None) is None:
            raise SubAllocatorError(f"free({address:#x}, {nbytes}) is not a live block")
        try:
            self.synchronize()
            self._give(block)
        except BaseException:
            self._blocks[address] = block
            raise

    def free_idle(self, address: int, nbytes: int) -> None:
        self.free(address, nbytes)  # the driver knows no block of RMM's

    def _give(self, block: tuple[int, int, int]) -> None:
        with self._on_device():
            self._mr.deallocate(block[0], block[1])
