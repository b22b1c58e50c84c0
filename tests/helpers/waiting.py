"""Waiting for a condition, as long as a loaded machine may need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import bfc

#: Seconds. Whatever takes longer hangs.
DEADLINE = 60


def until(condition: Callable[[], object]) -> None:
    """Comes back once the condition holds."""
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"not within {DEADLINE} s"
        time.sleep(0.0005)


def joined(thread: threading.Thread) -> None:
    """Waits for the end of a thread, which must come."""
    thread.join(DEADLINE)
    assert not thread.is_alive(), f"it is not at its end after {DEADLINE} s"


def called_by_others(allocator: bfc.Allocator) -> Callable[[], bool]:
    """Asks whether another thread has taken the allocator's lock since it was asked last."""
    last = allocator._lock_acquisitions

    def ask() -> bool:
        nonlocal last
        before, last = last, allocator._lock_acquisitions
        return last > before + 1  # asking takes it, too

    return ask
