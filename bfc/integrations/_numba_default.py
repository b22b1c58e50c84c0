"""The pools of NUMBA_CUDA_MEMORY_MANAGER=bfc.integrations.numba."""

from __future__ import annotations

import functools
import os
import re
import sys
from types import SimpleNamespace
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.integrations._emm import make_manager
from bfc.integrations._shared import fault_of
from bfc.interpreter._process import ForkSafeLock
from bfc.policies._bfc import BFCAllocator
from bfc.suballocators.cuda import CUDASubAllocator
from bfc.units import parse_bytes

pools: dict[int, Allocator] = {}
_lock = ForkSafeLock()


def allocator(device: int = 0) -> Allocator:
    """The pool that a device has under NUMBA_CUDA_MEMORY_MANAGER=bfc.integrations.numba. If it was
    closed, or lost in a reset of the device, a new one is made."""
    with _lock:
        found = pools.get(device)
        if found is None or found.closed or fault_of(found):
            source = CUDASubAllocator(device)
            found = BFCAllocator(source, memory_limit=limit(), allow_growth=True)
            pools[device] = found
        return found


def limit() -> str | float | None:
    """The limit that BFC_LIMIT sets, or None. A number with a point and no unit is a fraction."""
    text = os.environ.get("BFC_LIMIT", "").strip()
    if not text:
        return None
    fraction = float(text) if re.fullmatch(r"\d+\.\d*|\.\d+", text) else None
    if fraction is not None and 0 < fraction <= 1:
        return fraction
    try:
        parse_bytes(text)
    except ValueError:
        fraction = 0
    if fraction is not None:
        raise ValueError(
            f"BFC_LIMIT: {text!r} is not a limit: write a size such as '4 GiB', or a fraction of "
            "the device's memory such as '0.5'"
        )
    return text


@functools.cache
def manager(driver: Any) -> type:
    return make_manager(driver, allocator, {}, True)


def memory_manager(*, context: Any) -> Any:
    """Both numbas look for this in the module that NUMBA_CUDA_MEMORY_MANAGER names. The context
    shows which of them asks."""
    if context is None:
        return SimpleNamespace(interface_version=1)  # made once, to be asked for its version
    return manager(sys.modules[type(context).__module__])(context=context)
