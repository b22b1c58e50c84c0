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
from bfc.interpreter._forks import ForkSafeLock
from bfc.policies._bfc import BFCAllocator
from bfc.suballocators.cuda import CUDASubAllocator

pools: dict[int, Allocator] = {}
_lock = ForkSafeLock()


def allocator(device: int = 0) -> Allocator:
    """The pool of a device under NUMBA_CUDA_MEMORY_MANAGER=bfc.integrations.numba. A closed one, or
    one that was lost in a reset of the device, is made anew."""
    with _lock:
        found = pools.get(device)
        if found is None or found.closed or fault_of(found):
            source = CUDASubAllocator(device)
            found = BFCAllocator(source, memory_limit=limit(), allow_growth=True)
            pools[device] = found
        return found


def limit() -> str | float | None:
    text = os.environ.get("BFC_LIMIT", "").strip()
    return float(text) if re.fullmatch(r"0?\.\d+|1\.0*", text) else text or None


@functools.cache
def manager(driver: Any) -> type:
    return make_manager(driver, allocator, {}, True)


def memory_manager(*, context: Any) -> Any:
    """What both numbas look for in the module that NUMBA_CUDA_MEMORY_MANAGER names. Which of them
    asks shows in the context."""
    if context is None:
        return SimpleNamespace(interface_version=1)  # made once, to be asked for its version
    return manager(sys.modules[type(context).__module__])(context=context)
