"""PyTorch's device "opencl": `bfc.integrations.torch_opencl` is its public name, and describes it.

The extension is compiled against the PyTorch that is installed, when `enable` is first called. In
order:

    runtime.hpp
    guard.hpp, hooks.hpp
    operators.hpp
    recurrent.hpp
    extension.cpp
    building.py         compiles it, once
    places.py           where tensors have their memory
    arithmetic.py       the source of the kernels
    copies.py, kernels.py
    runtime.py          what the extension asks of Python
    device_module.py    torch.opencl
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsIndex

from bfc.errors import DeviceUnavailableError
from bfc.interpreter._process import ForkSafeLock
from bfc.policies.device_allocator import DeviceAllocator, Policy

if TYPE_CHECKING:
    import torch

__all__ = ["enable", "fallbacks"]

NAME = "opencl"
#: How long a thread of PyTorch's needs to finish what it is doing, and how long a kernel may take.
A_MOMENT_SECONDS, LONGEST_SECONDS = 0.05, 1.0
_lock = ForkSafeLock()
_extension: ModuleType | None = None
_enabled_with: tuple[Any, ...] = ()


def enable(
    memory: SupportsIndex | str | float | None = None,
    *,
    policy: Policy = "caching",
    settings: str = "",
    torch: str | None = None,
    devices: Sequence[Any] | None = None,
) -> torch.device:
    """Make "opencl" a device of PyTorch, for the rest of the process.

    Parameters
    ----------
    memory : int, str, float or None, optional
        The most that the pool of a device may take: bytes, a text such as "1 GiB", or a fraction of
        the device's memory. None is all of it.
    policy : {"caching", "bfc"}, optional
        PyTorch's policy, or TensorFlow's.
    settings : str, optional
        The settings of PyTorch's policy, as in PYTORCH_CUDA_ALLOC_CONF.
    torch : str, optional
        The version of PyTorch whose rules that policy follows, as in `bfc.CachingAllocator`. None
        is the newest that bfc has.
    devices : sequence of pyopencl.Device or pyopencl.Context, optional
        The devices, in the order of their numbers; a part of a device will do. None is every device
        that there is.

    Returns
    -------
    torch.device
        "opencl": its current device.

    Raises
    ------
    DeviceUnavailableError
        If PyTorch is missing or older than 2.11, if there is no OpenCL device, or no C++ compiler
        where the extension was not compiled yet.
    RuntimeError
        If it was enabled with other arguments, or another package has taken PyTorch's place for
        further devices: a process can have one. Also if the extension does not compile, or cannot
        be kept in the user's cache.
    ValueError, SettingsError
        If an argument is wrong.

    Notes
    -----
    The first call compiles the extension, for about 20 seconds, and keeps it for the next process
    with the same PyTorch, Python and compiler.

    A request that a free block serves takes no GIL and calls no driver: it costs about as much as
    on the CPU. Source: `c10::DeviceAllocator`, PyTorch 2.11 and 2.13.

    Examples
    --------
    >>> from bfc.integrations import torch_opencl
    >>> device = torch_opencl.enable("1 GiB")  # doctest: +SKIP
    >>> torch.ones(3, device=device) + 1  # doctest: +SKIP
    tensor([2., 2., 2.], device='opencl:0')
    """
    global _extension, _enabled_with
    given = memory, policy, settings, torch, None if devices is None else tuple(devices)
    with _lock:
        if _extension is None:
            _extension = _start(memory, policy, settings, torch, devices)
            _enabled_with = given
        elif given != _enabled_with:
            raise RuntimeError(
                "opencl was enabled with other arguments, and PyTorch keeps an allocator for good: "
                "call enable() once, or start another process"
            )
    from torch import device

    return device(NAME)


def fallbacks() -> dict[str, int]:
    """Which operators ran on the host, and how often.

    Returns
    -------
    dict of str to int
        By the operator's name, such as "aten::_softmax", the most frequent first.

    Raises
    ------
    RuntimeError
        If `enable` was not called.
    """
    if _extension is None:
        raise RuntimeError("nothing has run yet: call enable() first")
    calls: dict[str, int] = _extension.fallbacks()
    return dict(sorted(calls.items(), key=lambda call: (-call[1], call[0])))


def _start(
    memory: SupportsIndex | str | float | None,
    policy: Policy,
    settings: str,
    version: str | None,
    devices: Sequence[Any] | None,
) -> ModuleType:
    from bfc_torch_opencl import building

    pools = DeviceAllocator(
        policy,
        settings=settings,
        torch=version,
        devices=devices,
        profiling=True,
        memory_limit=memory,
    )
    torch = building.supported_torch()
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", NAME):
        raise RuntimeError(
            f'another package has made PyTorch\'s further device "{taken}" in this process, and '
            f"there is room for one: enable opencl in a process without it"
        )
    if pools.device_count() == 0:
        import bfc.opencl

        raise DeviceUnavailableError(str(bfc.opencl.is_available()))
    pools.allocator(0)  # which refuses a wrong argument, before PyTorch is changed for good
    extension = building.load()

    from bfc_torch_opencl import device_module
    from bfc_torch_opencl.runtime import Runtime

    runtime = Runtime(pools, extension)
    torch.utils.rename_privateuse1_backend(NAME)
    extension.start(runtime, runtime.table.capsule(), pools.device_count())
    torch._register_device_module(NAME, device_module.make(runtime, extension))
    torch.utils.generate_methods_for_privateuse1_backend()
    device_module.refuse_dlpack()
    atexit.register(_let_threads_end, extension)
    return extension


def _let_threads_end(extension: ModuleType) -> None:
    """Lets go of the GIL for a moment. PyTorch's thread for the device may still drop what
    `backward()` has used, and daemon threads may still work. If one asks for the GIL while the
    interpreter shuts down, Python unwinds it, up to 3.13, and that aborts the process. So they rest
    before they ask (`runtime.hpp`)."""
    extension.end()
    time.sleep(A_MOMENT_SECONDS)
    deadline = time.monotonic() + LONGEST_SECONDS
    while extension.threads_inside() and time.monotonic() < deadline:
        time.sleep(A_MOMENT_SECONDS / 50)
