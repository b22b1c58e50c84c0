"""Waiting for conditions and threads, as long as a loaded machine may need."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import bfc
from bfc.testing import Misbehaving

#: Seconds. Whatever takes longer hangs.
DEADLINE = 60
#: The same for fuzzers, which may run at the lowest priority.
PATIENCE = 600


def until(condition: Callable[[], object], seconds: float = DEADLINE) -> None:
    """Comes back once the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.0005)


def joined(thread: threading.Thread, seconds: float = DEADLINE) -> None:
    """Waits for the end of a thread, which must come."""
    thread.join(seconds)
    assert not thread.is_alive(), f"it is not at its end after {seconds} s"


def run_all(
    works: Sequence[Callable[[], object]], seconds: float = DEADLINE
) -> list[BaseException]:
    """Runs each piece of work in a thread of its own, all at once. Returns what they raised."""
    start = threading.Barrier(len(works))
    faults: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        start.wait()
        try:
            work()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        joined(thread, seconds)
    return faults


def called_by_others(allocator: bfc.Allocator) -> Callable[[], bool]:
    """Asks whether another thread has taken the allocator's lock since it was asked last."""
    last = allocator._lock_acquisitions

    def ask() -> bool:
        nonlocal last
        before, last = last, allocator._lock_acquisitions
        return last > before + 1  # asking takes it, too

    return ask


class Halt:
    """Holds its first caller until it may go: what a call of a device does `first`."""

    def __init__(self) -> None:
        self.inside, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        if not self.inside.is_set():
            self.inside.set()
            assert self.go.wait(DEADLINE)


def at_call(source: Misbehaving, n: int, calls: Iterable[str], do: Callable[[], object]) -> None:
    """Something is done before the n-th of the next calls, whichever of these it is."""
    left = itertools.count(n - 1, -1)

    def count() -> None:
        if next(left) == 0:
            do()

    for call in calls:
        source.on(call, first=count)
