"""numba's contexts, and which memory manager they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def install_in(driver: Any, ours: type) -> Callable[[], None]:
    """Sets the memory manager of one numba, given by its driver module, for the contexts that exist
    and for those to come; `set_memory_manager` alone only does the latter. Returns a function that
    puts back what was there, unless another manager was set meanwhile."""
    before = driver._memory_manager
    replaced: list[tuple[Any, Any]] = []

    def put_back() -> None:
        if driver._memory_manager is ours:
            driver._memory_manager = before
        for context in contexts(driver):
            if type(context.memory_manager) is ours:
                old = next((old for known, old in replaced if known is context), None)
                if old is None:  # a context that was made meanwhile
                    driver._ensure_memory_manager()
                    old = driver._memory_manager(context=context)
                swap(context, old).retire()

    driver.set_memory_manager(ours)
    try:
        for context in contexts(driver):
            replaced.append((context, swap(context, ours(context=context))))
    except BaseException:
        put_back()
        raise
    return put_back


def contexts(driver: Any) -> list[Any]:
    """The contexts that numba has made so far."""
    devices = driver.driver.devices.values()
    return [device.primary_context for device in devices if device.primary_context is not None]


def swap(context: Any, manager: Any) -> Any:
    """Gives a context another manager, and returns the old one. Arrays that exist are still freed
    by the manager that they came from."""
    old = context.memory_manager
    pending = getattr(old, "deallocations", None)
    context.push()
    try:
        if pending is not None:  # nobody would flush it after this
            pending.memory_capacity = 0
            pending.clear()
    finally:
        context.pop()
    context.memory_manager = manager
    return old
