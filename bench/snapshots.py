"""What a snapshot costs: `python -m bench.snapshots`.

Under both policies the regions and chunks alone, and under PyTorch's 100,000 entries of history,
without Python frames and with them: the snapshot, its dict for PyTorch's viewer, its file, and its
objects, which are made when they are looked at.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import bfc
from bench.histories import POLICIES
from bench.report import machine, say

BLOCKS = 500
ENTRIES = 100_000
REPEATS = 30
LONG_REPEATS = 7


def main() -> None:
    say(machine())
    say("ms, min / median / max")
    for name, make in POLICIES.items():
        with make(bfc.SimulatedSubAllocator("8 GiB")) as allocator:
            fill(allocator, BLOCKS)
            blocks = len(list(allocator.snapshot().chunks()))
            samples = timed(lambda: allocator.snapshot(history=False), REPEATS)
            report(f"{name}: snapshot(history=False), {blocks} blocks", samples)
    for context in (None, "all"):
        report_history(context)


def fill(allocator: bfc.Allocator, blocks: int) -> None:
    """Leaves about so many blocks, every second one of them free."""
    addresses = [allocator.allocate_raw(3000 * (1 + i % 50)) for i in range(blocks)]
    for address in addresses[::2]:
        allocator.deallocate_raw(address)


def record(allocator: bfc.CachingAllocator, context: str | None) -> None:
    """Fills a history of ENTRIES entries, with some hundred blocks live."""
    allocator.record_history(context=context, max_entries=ENTRIES)
    live: list[int] = []
    for i in range(ENTRIES // 2):
        live.append(allocator.allocate_raw(1000 + i * 7919 % 100_000))
        if len(live) > BLOCKS:
            allocator.deallocate_raw(live.pop(i * 31 % BLOCKS))


def report_history(context: str | None) -> None:
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("8 GiB")) as allocator:
        record(allocator, context)
        snapshot = allocator.snapshot()
        kind = f"{ENTRIES} entries {'without frames' if context is None else 'with frames'}"
        report(f"{kind}: snapshot()", timed(allocator.snapshot, LONG_REPEATS))
        report(f"{kind}: to_torch()", timed(snapshot.to_torch, LONG_REPEATS))
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "memory.pickle")
            report(f"{kind}: dump()", timed(lambda: snapshot.dump(path), LONG_REPEATS))
        fresh = [allocator.snapshot() for _ in range(LONG_REPEATS)]
        report(f"{kind}: the first look at them", timed(lambda: fresh.pop().history, LONG_REPEATS))


def timed(work: Callable[[], object], repeats: int) -> list[float]:
    """Milliseconds of each repeat. What the work returns is dropped outside the time."""
    samples = []
    for _ in range(repeats):
        gc.collect()
        begun = time.perf_counter()
        made = work()
        samples.append((time.perf_counter() - begun) * 1e3)
        del made
    return samples


def report(what: str, samples: list[float]) -> None:
    low, middle, high = min(samples), statistics.median(samples), max(samples)
    say(f"{what:52} {low:9.4f} /{middle:9.4f} /{high:9.4f}")


if __name__ == "__main__":
    main()
