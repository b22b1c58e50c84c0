"""PyTorch's memory from an allocator of bfc: everywhere, or in a memory pool of PyTorch's.

Begin with `install`: a `CachingAllocator` takes the place of PyTorch's own in all that PyTorch
does, with statistics, snapshots, private pools and CUDA graphs. It is compiled when first used.

A memory pool, `mem_pool`, which `bfc.use(allocator, "torch")` uses too, leaves PyTorch's own
allocator in charge, which takes its segments from the allocator of bfc. This works at any time, in
the thread that enters the pool, and compiles nothing.

`replace` compiles nothing either, and works with every version of PyTorch and either policy. Every
tensor of the process comes from the allocator of bfc. PyTorch allows it only once, before it has
used CUDA, and it cannot be undone. `torch.cuda.memory_stats()` and snapshots then raise errors, and
`torch.compile` cannot use CUDA graphs. `torch.cuda.graph` and `make_graphed_callables` get private
pools of the allocator.

PyTorch calls from C, without the GIL, so an allocator must be over a `CUDASubAllocator`.

Memory is mapped and unmapped with the GIL held, and PyTorch asks a memory pool for segments while
it holds locks of its own. So if a `CachingAllocator` under `mem_pool` has expandable segments,
PyTorch's requests use mapped memory that is free, but where there is none they take an ordinary
segment. `allocator.allocate(nbytes).free()` maps memory for them beforehand. A request of PyTorch's
that runs out of memory gives back ordinary segments alone: call `allocator.empty_cache()` for the
rest. Memory that was freed behind a fence is only looked at by calls from Python (`stats()` is
one). Under `replace` and `install` a request that no free block serves takes the GIL, and is
served as one from Python: it maps, stitches, follows a plan and belongs to the tag of its thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.errors import DeviceUnavailableError
from bfc.integrations import _torch, _torch_cuda, torch_memory_saver
from bfc.integrations._shared import Allocators, OneOrMore, by_device, client
from bfc.integrations._torch_cuda import PoolMaker
from bfc.policies._caching import CachingAllocator
from bfc.suballocators.cuda import CUDASubAllocator

#: What else PyTorch calls: the methods of its class that take our functions.
_HOOKS = {
    "set_reset_fn": "bfc_torch_empty_cache",
    "set_begin_allocate_to_pool": "bfc_torch_begin_pool",
    "set_end_allocate_to_pool_fn": "bfc_torch_end_pool",
    "set_release_pool": "bfc_torch_release_pool",
    "set_record_stream_fn": "bfc_torch_record_stream",
}

_kept: list[Any] = []  # for ever: PyTorch may call them for as long as the process lives
_pools: dict[int, Any] = {}  # of `serve`, by the id of the allocator, which is kept for ever too


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
    RuntimeError
        If `install` has put allocators in the place of PyTorch's own.
    ValueError
        If 32 allocators serve pools in this process already, this one is not over memory of a
        CUDA device, its class overrides `alloc`, `free` or `order`, or it serves a plan, which has
        places for blocks and not for segments.

    Notes
    -----
    A segment is 2 MiB, 20 MiB or a multiple of 2 MiB. It is freed when PyTorch empties its cache,
    which waits for the device, as cudaFree does. Out of memory is PyTorch's own error.
    """
    torch = _torch_with_cuda()
    if _torch_cuda.serving() is not None:
        raise RuntimeError(
            "bfc has taken the place of PyTorch's allocator in this process, which serves no "
            "MemPool over another one: bfc.integrations.torch.pool() is the pool that serves it"
        )
    if allocator.plan_stats()["state"] not in ("none", "declined", "switched off"):
        raise ValueError(
            "this allocator serves a plan, and PyTorch asks a MemPool for segments, which a plan "
            "does not know: use bfc.integrations.torch.replace, or end the plan with use_plan(None)"
        )
    _refuse_overrides(allocator.sub_allocator)
    number = _torch.serve_pool(allocator)
    pair = f"bfc_torch_pool_alloc_{number}", f"bfc_torch_pool_free_{number}"
    pool = torch.cuda.MemPool(_pluggable(torch, *pair).allocator(), **options)
    _kept.append(pool)
    return pool


def _refuse_overrides(source: object) -> None:
    """Raises ValueError for a subclass some calls of which PyTorch would never make."""
    names = ("alloc", "free", "order")
    changed = [it for it in names if getattr(type(source), it) is not getattr(CUDASubAllocator, it)]
    if isinstance(source, CUDASubAllocator) and source.native is not None and changed:
        raise ValueError(
            f"{type(source).__name__} overrides {', '.join(changed)}, and PyTorch asks a MemPool "
            "for segments without the GIL, which passes over that: use "
            "bfc.integrations.torch.install, or a CUDASubAllocator as it is"
        )


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


def install(pools: OneOrMore | PoolMaker | None = None) -> None:
    """Put allocators in the place of PyTorch's own, for good and for all that PyTorch asks of it.

    Parameters
    ----------
    pools : CachingAllocator, list, dict of int to CachingAllocator, or callable, optional
        One for each device, or a function that makes the allocator of a device, by its number, when
        PyTorch first uses that. None makes such that stitch, with the settings of
        PYTORCH_CUDA_ALLOC_CONF.

    Raises
    ------
    RuntimeError
        If PyTorch has used CUDA already, this was called before, or another allocator has taken the
        place of PyTorch's own.
    DeviceUnavailableError
        If PyTorch or a C++ compiler is missing, PyTorch was built without CUDA, or its version is
        not known: then `replace` is left.
    ValueError
        If the memory is not that of CUDA devices, one allocator for each, or
        PYTORCH_CUDA_ALLOC_CONF names another back end.
    TypeError
        If one is no CachingAllocator.
    SettingsError
        If PYTORCH_CUDA_ALLOC_CONF has settings that cannot be followed.

    Notes
    -----
    `torch.cuda.memory_stats()`, snapshots and histories, out-of-memory errors and observers,
    private pools, `torch.cuda.graph` and the graphs of `torch.compile` work as with PyTorch's own.
    Settings that are changed later go to every pool. A `MemPool` over another allocator is not
    served. Mapped memory is shared with other processes if it was made with `handle_type="posix"`,
    as is that of None. The first call compiles for half a minute; the result is kept. A hit takes
    no GIL; a request that needs new memory does. Source: `CUDAAllocator` of PyTorch 2.11 to 2.15.

    From then on `import torch_memory_saver` finds `bfc.integrations.torch_memory_saver`, and the
    plugin of `bfc.integrations.vllm` serves vLLM's sleep mode: their own allocators could not work.
    """
    torch = _torch_cuda.checked_torch()
    if _torch_cuda.serving() is not None:
        raise RuntimeError(
            "bfc serves PyTorch in this process already, by `bfc run` or an earlier install(): "
            "bfc.integrations.torch.pool() is its pool"
        )
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "PyTorch has used CUDA already, and its allocator cannot be exchanged any more: call "
            "install() before the first tensor on a GPU"
        )
    make = _maker(torch, pools)
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise RuntimeError(
            f"another allocator ({backend}) has the place of PyTorch's own here already, by "
            "replace() or another library: run without the one or the other"
        )
    _torch_cuda.take_over(torch, make)
    torch_memory_saver.stand_in()


def pool(device: int | None = None) -> CachingAllocator:
    """The allocator that serves a device of PyTorch's, after `install` or under `bfc run`.

    Parameters
    ----------
    device : int, optional
        The number that PyTorch has for it; None is PyTorch's current device.

    Returns
    -------
    CachingAllocator
        It is made if the device was not used before. It stays for as long as the process lives: do
        not close it.

    Raises
    ------
    RuntimeError
        If PyTorch's own allocator serves it.
    DriverError
        If there is no such device.

    Examples
    --------
    >>> with bfc.use(bfc.integrations.torch.pool(), "cupy", "numba"):  # doctest: +SKIP
    ...     train()  # their arrays and PyTorch's tensors lie in one pool
    """
    books = _torch_cuda.serving()
    if books is None:
        raise RuntimeError(
            "no pool of bfc serves PyTorch here: call bfc.integrations.torch.install() before CUDA "
            "is used, or start the program with `bfc run`"
        )
    return books.open(client("torch", "torch").cuda.current_device() if device is None else device)


def _maker(torch: Any, pools: OneOrMore | PoolMaker | None) -> PoolMaker:
    """The function that makes the pool of a device."""
    if pools is None:
        return _torch_cuda.stitching(torch, _torch_cuda.settings_of_environment())
    if callable(pools):
        return pools
    given = by_device(pools)

    def pool_of(device: int) -> CachingAllocator:
        if device not in given:
            raise ValueError(f"no allocator serves device {device}: pass one for it to install")
        return given[device]  # type: ignore[return-value]  # `Books` looks

    return pool_of


def serve(allocators: Allocators) -> Callable[[], None]:
    """Enters a memory pool for each device in this thread. The result leaves them again."""
    torch = _torch_with_cuda()
    books = _torch_cuda.serving()
    if books is not None and all(it in books.pools.values() for it in allocators.values()):
        return lambda: None  # they serve it already
    with ExitStack() as entered:
        for ordinal, allocator in allocators.items():
            pool = _pools.get(id(allocator)) or _pools.setdefault(
                id(allocator), mem_pool(allocator)
            )
            entered.enter_context(torch.cuda.use_mem_pool(pool, ordinal))
        return entered.pop_all().close
