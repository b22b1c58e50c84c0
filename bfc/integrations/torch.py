"""PyTorch over an allocator: as a memory pool under its caching allocator, or instead of it.

A memory pool (`mem_pool`, and what `bfc.use(allocator, "torch")` installs) is the one to begin
with: PyTorch's own allocator stays in charge, with its statistics, snapshots and CUDA graphs, and
takes its segments from ours. It works at any time, in the thread that enters it.

`replace` lets every tensor of the process come from ours. PyTorch allows it only before it has
used CUDA, once, and without a way back; `torch.cuda.memory_stats()` and snapshots then raise,
`Tensor.record_stream` does nothing, and `torch.compile` cannot use CUDA graphs.

Both call ours from C, without the GIL: an allocator over a `CUDASubAllocator` is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from bfc._allocator import Allocator
from bfc.errors import DeviceUnavailableError
from bfc.integrations import _torch

_kept: list[Any] = []  # PyTorch may call them for as long as the process lives


def _torch_with_cuda() -> Any:
    try:
        import torch
    except ImportError as error:
        raise DeviceUnavailableError(
            "PyTorch is not installed: pip install torch (a build with CUDA)"
        ) from error
    if not torch.cuda.is_available():
        raise DeviceUnavailableError(
            f"this PyTorch ({torch.__version__}) sees no CUDA device, or was built without CUDA"
        )
    return torch


def pluggable_allocator(allocator: Allocator, *, in_pool: bool) -> Any:
    """A `torch.cuda.memory.CUDAPluggableAllocator` that is served by an allocator on its device.

    `in_pool` says which pair of functions it has. Under a `torch.cuda.MemPool` (True) memory that
    has run out is NULL, which PyTorch takes for a failed cudaMalloc; instead of PyTorch's allocator
    (False) it is thrown, since nobody looks at the result there.
    """
    torch = _torch_with_cuda()
    _torch.serve(allocator, allocator.device.ordinal)
    name = "bfc_torch_pool" if in_pool else "bfc_torch"
    pluggable = torch.cuda.memory.CUDAPluggableAllocator(
        _torch.__file__, f"{name}_alloc", f"{name}_free"
    )
    _kept.append(pluggable)
    return pluggable


def mem_pool(allocator: Allocator, **options: Any) -> Any:
    """A `torch.cuda.MemPool` whose segments come from the allocator; `options` are MemPool's.

    Use it with `torch.cuda.use_mem_pool(pool)`, in each thread that is to allocate from it. A
    segment is 2 MiB, 20 MiB or a multiple of 2 MiB, and comes back when PyTorch empties its cache;
    ours waits for the device then, as cudaFree does.
    """
    torch = _torch_with_cuda()
    pluggable = pluggable_allocator(allocator, in_pool=True)
    pool = torch.cuda.MemPool(pluggable.allocator(), **options)
    _kept.append(pool)
    return pool


def replace(allocators: Mapping[int, Allocator] | Allocator) -> None:
    """Lets every tensor of this process come from ours, for good: one allocator for each device.

    Raises RuntimeError (PyTorch's) where PyTorch has used CUDA already. An allocation on a stream
    that is not the allocator's makes that stream wait for the allocator's, and its free the
    reverse: two driver calls each. On the allocator's own stream there are none.
    """
    torch = _torch_with_cuda()
    chosen = (
        {allocators.device.ordinal: allocators} if isinstance(allocators, Allocator) else allocators
    )
    pluggable = [pluggable_allocator(allocator, in_pool=False) for allocator in chosen.values()]
    torch.cuda.memory.change_current_allocator(pluggable[0])


def install(allocators: Mapping[int, Allocator]) -> Callable[[], None]:
    """Enters a memory pool for each device in this thread. Returns what leaves them again."""
    torch = _torch_with_cuda()
    with ExitStack() as entered:
        for ordinal, allocator in allocators.items():
            entered.enter_context(torch.cuda.use_mem_pool(mem_pool(allocator), ordinal))
        return entered.pop_all().close
