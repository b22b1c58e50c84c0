"""PyTorch's memory from an allocator of bfc: in a memory pool of PyTorch's, or everywhere.

Begin with a memory pool: `mem_pool`, which `bfc.use(allocator, "torch")` uses too. PyTorch's own
allocator stays in charge, with its statistics, snapshots and CUDA graphs, and takes its segments
from the allocator of bfc. This works at any time, in the thread that enters the pool.

With `replace` every tensor of the process comes from the allocator of bfc. PyTorch allows it only
once, before it has used CUDA, and it cannot be undone. `torch.cuda.memory_stats()` and snapshots
then raise errors, and `torch.compile` cannot use CUDA graphs. `torch.cuda.graph` and
`make_graphed_callables` get private pools of the allocator.

PyTorch calls the allocator from C, without the GIL, so it must be over a `CUDASubAllocator`.

Memory is mapped and unmapped with the GIL held, and PyTorch asks a memory pool for segments while
it holds locks of its own. So if a `CachingAllocator` under `mem_pool` has expandable segments,
PyTorch's requests use mapped memory that is free, but where there is none they take an ordinary
segment. `allocator.allocate(nbytes).free()` maps memory for them beforehand. A request of PyTorch's
that runs out of memory gives back ordinary segments alone: call `allocator.empty_cache()` for the
rest. Memory that was freed behind a fence is only looked at by calls from Python (`stats()` is
one). Under `replace` a request that no free block serves takes the GIL, and is served as one from
Python: it maps, stitches, follows a plan and belongs to the tag of its thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.errors import DeviceUnavailableError
from bfc.integrations import _torch
from bfc.integrations._shared import Allocators, OneOrMore, by_device, client

#: What else PyTorch calls: the methods of its class that take our functions.
_HOOKS = {
    "set_reset_fn": "bfc_torch_empty_cache",
    "set_begin_allocate_to_pool": "bfc_torch_begin_pool",
    "set_end_allocate_to_pool_fn": "bfc_torch_end_pool",
    "set_release_pool": "bfc_torch_release_pool",
    "set_record_stream_fn": "bfc_torch_record_stream",
}

_kept: list[Any] = []  # for ever: PyTorch may call them for as long as the process lives
_pools: dict[int, Any] = {}  # of `install`, by the id of the allocator, which is kept for ever too


def _torch_with_cuda() -> Any:
    torch = client("torch", "torch   (a build with CUDA)")
    if not torch.cuda.is_available():
        raise DeviceUnavailableError(
            f"this PyTorch ({torch.__version__}) sees no CUDA device, or was built without CUDA"
        )
    return torch


def _pluggable(torch: Any, alloc: str, free: str) -> Any:
    """A `CUDAPluggableAllocator` over two functions of ours."""
    pluggable = torch.cuda.memory.CUDAPluggableAllocator(_torch.__file__, alloc, free)
    _kept.append(pluggable)
    return pluggable


def _hand_over_hooks(pluggable: Any) -> None:
    """Hands over the functions that empty the cache, and give a graph a private pool."""
    functions = ctypes.CDLL(_torch.__file__)
    for method, name in _HOOKS.items():
        address = ctypes.cast(getattr(functions, name), ctypes.c_void_p).value
        getattr(pluggable.allocator(), method)(address)


def mem_pool(allocator: Allocator, **options: Any) -> Any:
    """Make a `torch.cuda.MemPool` whose segments come from an allocator.

    Use it with `torch.cuda.use_mem_pool(pool)`, in each thread that is to allocate from it.

    Parameters
    ----------
    allocator : Allocator
        Over CUDA memory. It is kept alive.
    **options : object
        Arguments of `torch.cuda.MemPool`.

    Returns
    -------
    torch.cuda.MemPool
        A new one.

    Raises
    ------
    DeviceUnavailableError
        If PyTorch is missing, or sees no CUDA device.
    ValueError
        If 32 allocators serve pools in this process already, this one is not over memory of a
        CUDA device, or it serves a plan, which has places for blocks and not for segments.

    Notes
    -----
    A segment is 2 MiB, 20 MiB or a multiple of 2 MiB. It is freed when PyTorch empties its cache,
    which waits for the device, as cudaFree does. Out of memory is PyTorch's own error.
    """
    torch = _torch_with_cuda()
    if allocator.plan_stats()["state"] not in ("none", "declined", "switched off"):
        raise ValueError(
            "this allocator serves a plan, and PyTorch asks a MemPool for segments, which a plan "
            "does not know: use bfc.integrations.torch.replace, or end the plan with use_plan(None)"
        )
    number = _torch.serve_pool(allocator)
    pair = f"bfc_torch_pool_alloc_{number}", f"bfc_torch_pool_free_{number}"
    pool = torch.cuda.MemPool(_pluggable(torch, *pair).allocator(), **options)
    _kept.append(pool)
    return pool


def replace(allocators: OneOrMore) -> None:
    """Let every tensor of this process come from allocators, for good.

    Parameters
    ----------
    allocators : Allocator, list of Allocator, or dict of int to Allocator
        One for each device.

    Raises
    ------
    ValueError
        If the memory is not that of CUDA devices, one allocator for each.
    DeviceUnavailableError
        If PyTorch is missing, or sees no CUDA device.
    RuntimeError
        If PyTorch has used CUDA already, or another allocator serves a device.

    Notes
    -----
    On the allocator's own stream an allocation makes no driver call. On another stream, that stream
    waits for the allocator's at an allocation, and the reverse at a free: two driver calls each.
    Out of memory is a RuntimeError or a MemoryError of PyTorch, with our figures in its text. A
    request that a free block serves takes no GIL; any other does, but one for a graph's pool.

    `Tensor.record_stream(s)` makes the stream of the tensor's memory wait at its free for what is
    queued on `s` then, two driver calls. In a capture the free is put off until that is over.

    `torch.cuda.empty_cache()` calls `empty_cache` of each allocator, and waits as that does.
    `torch.cuda.graph` works: its graph has a private pool, shared as PyTorch shares it (`pool=`),
    which goes back when the last graph is gone. Source: `CUDAPluggableAllocator` of PyTorch 2.15.
    """
    torch = _torch_with_cuda()
    with ExitStack() as undo:
        for ordinal, allocator in by_device(allocators).items():
            _torch.serve_device(allocator, ordinal)
            undo.callback(_torch.serve_device, None, ordinal)
        ours = _pluggable(torch, "bfc_torch_alloc", "bfc_torch_free")
        _hand_over_hooks(ours)
        torch.cuda.memory.change_current_allocator(ours)
        undo.pop_all()


def install(allocators: Allocators) -> Callable[[], None]:
    """Enters a memory pool for each device in this thread. The result leaves them again."""
    torch = _torch_with_cuda()
    with ExitStack() as entered:
        for ordinal, allocator in allocators.items():
            pool = _pools.get(id(allocator)) or _pools.setdefault(
                id(allocator), mem_pool(allocator)
            )
            entered.enter_context(torch.cuda.use_mem_pool(pool, ordinal))
        return entered.pop_all().close
