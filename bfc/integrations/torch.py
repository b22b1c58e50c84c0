"""PyTorch over an allocator: as a memory pool under its caching allocator, or instead of it.

A memory pool (`mem_pool`, and what `bfc.use(allocator, "torch")` installs) is the one to begin
with: PyTorch's own allocator stays in charge, with its statistics, snapshots and CUDA graphs, and
takes its segments from ours. It works at any time, in the thread that enters it.

`replace` lets every tensor of the process come from ours. PyTorch allows it only before it has
used CUDA, once, and without a way back; `torch.cuda.memory_stats()` and snapshots then raise,
`Tensor.record_stream` does nothing, and `torch.compile` cannot use CUDA graphs.

Both call ours from C, without the GIL: an allocator over a `CUDASubAllocator` is needed. Memory
that others freed behind a fence comes back with the next call from Python (`stats()` is one).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.errors import DeviceUnavailableError
from bfc.integrations import _torch
from bfc.integrations._shared import Allocators, OneOrMore, by_device, client

_kept: list[Any] = []  # PyTorch may call them for as long as the process lives
_pools: dict[int, Any] = {}  # those of `install`, by the allocator, which is kept as long


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
        If 32 allocators serve pools in this process already, or this one is not over memory of a
        CUDA device.

    Notes
    -----
    A segment is 2 MiB, 20 MiB or a multiple of 2 MiB. It is freed when PyTorch empties its cache,
    which waits for the device, as cudaFree does. Out of memory is PyTorch's own error.
    """
    torch = _torch_with_cuda()
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
    Out of memory is a RuntimeError or a MemoryError of PyTorch, with our figures in its text.
    """
    torch = _torch_with_cuda()
    with ExitStack() as undo:
        for ordinal, allocator in by_device(allocators).items():
            _torch.serve_device(allocator, ordinal)
            undo.callback(_torch.serve_device, None, ordinal)
        ours = _pluggable(torch, "bfc_torch_alloc", "bfc_torch_free")
        torch.cuda.memory.change_current_allocator(ours)
        undo.pop_all()


def install(allocators: Allocators) -> Callable[[], None]:
    """Enter a memory pool for each device in this thread.

    Parameters
    ----------
    allocators : dict of int to Allocator
        By device.

    Returns
    -------
    callable
        It leaves them again.
    """
    torch = _torch_with_cuda()
    with ExitStack() as entered:
        for ordinal, allocator in allocators.items():
            pool = _pools.get(id(allocator)) or _pools.setdefault(
                id(allocator), mem_pool(allocator)
            )
            entered.enter_context(torch.cuda.use_mem_pool(pool, ordinal))
        return entered.pop_all().close
