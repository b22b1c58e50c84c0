"""cuda.core buffers in a bfc pool.

    bfc.use(a, "cuda_core")            # Device(i).memory_resource of this thread
    resource = bfc.integrations.cuda_core.MemoryResource(a)      # or by hand

A `cuda.core.Device` object belongs to one thread, and its memory resource with it: every other
thread that allocates calls `bfc.integrations.cuda_core.install_in_thread()` once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.integrations._core_resource import INSTALL, resource_class
from bfc.integrations._shared import Allocators, OneOrMore, by_device, client

_in_use: Allocators = {}  # what `use` has installed, for other threads


def _resource_of(device: Any) -> Any:
    """The device's memory resource; None if it has none yet. Asking the property would make one,
    which also tells the driver's default pool to keep what is freed."""
    known = hasattr(device, "_memory_resource")
    return device._memory_resource if known else device.memory_resource


def is_ours(device: Any) -> bool:
    """Whether a device allocates from a pool of bfc.

    Parameters
    ----------
    device : cuda.core.Device
        The device.

    Returns
    -------
    bool
        False if it has no memory resource yet.
    """
    return isinstance(_resource_of(device), resource_class())


def put(device: Any, allocator: Allocator) -> Callable[[], None]:
    """Give a device a memory resource over an allocator.

    Parameters
    ----------
    device : cuda.core.Device
        The device.
    allocator : Allocator
        The allocator.

    Returns
    -------
    callable
        It puts back what was there. If another allocator was put on top meanwhile, that one stays,
        and what was there comes back when that one is put back.
    """
    kind: Any = resource_class()
    ours = kind(allocator)
    ours.before = _resource_of(device)
    device.memory_resource = ours

    def put_back() -> None:
        top: Any = _resource_of(device)
        if top is ours and ours.before is None:
            device._memory_resource = None
        elif top is ours:
            device.memory_resource = ours.before
        while isinstance(top, kind):
            if top.before is ours:
                top.before = ours.before
            top = top.before

    return put_back


def install_in_thread(allocators: OneOrMore | None = None) -> Callable[[], None]:
    """Set `cuda.core.Device(i).memory_resource` in the calling thread.

    Parameters
    ----------
    allocators : Allocator, list of Allocator, or dict of int to Allocator, optional
        None is what `bfc.use` has installed.

    Returns
    -------
    callable
        It puts back what was there; the end of `bfc.use` does not.

    Raises
    ------
    ValueError
        If it is None, and `bfc.use` has installed no allocator.
    """
    if allocators is None and not _in_use:
        raise ValueError("no allocator is in use: call bfc.use(allocator, 'cuda_core') first")
    pools = by_device(_in_use if allocators is None else allocators)
    core = client("cuda.core", INSTALL)
    with ExitStack() as undo:
        for ordinal, pool in pools.items():
            undo.callback(put(core.Device(ordinal), pool))
        return undo.pop_all().close


def serve(allocators: Allocators) -> Callable[[], None]:
    """Calls `install_in_thread`, and offers the same allocators to other threads that call it. The
    result undoes both."""
    with ExitStack() as undo:
        undo.callback(install_in_thread(allocators))
        _in_use.update(allocators)
        undo.callback(_in_use.clear)
        return undo.pop_all().close


def __getattr__(name: str) -> Any:
    """`MemoryResource`, which needs cuda.core to be made."""
    if name == "MemoryResource":
        return resource_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
