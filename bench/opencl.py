"""What an allocation hit costs on an OpenCL device, ours beside pyopencl's own pools in one run:
`python -m bench.opencl`. Rounds of all cases take turns.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

import bfc
from bench.report import machine, say, spread

ROUNDS, PAIRS, SLOTS = 60, 4_000, 256
POOL = "256 MiB"
LARGEST = 512 << 10

#: (what, one allocation, its free, or None where dropping the object frees).
Case = tuple[str, Callable[[int], Any], Callable[[Any], object] | None]


def one_size(allocate: Callable[[int], Any], free: Callable[[Any], object] | None) -> float:
    """Nanoseconds a pair: one size, given back at once."""
    started = time.perf_counter()
    if free is None:
        for _ in range(PAIRS):
            allocate(1000)
    else:
        for _ in range(PAIRS):
            free(allocate(1000))
    return (time.perf_counter() - started) * 1e9 / PAIRS


def churn(allocate: Callable[[int], Any], free: Callable[[Any], object] | None) -> float:
    """Nanoseconds a pair: 256 blocks of any sizes up to 512 KiB live, a random one replaced."""
    live = [allocate(size) for size in SIZES[:SLOTS]]
    started = time.perf_counter()
    if free is None:
        for slot, size in TURNS:
            live[slot] = None
            live[slot] = allocate(size)
    else:
        for slot, size in TURNS:
            free(live[slot])
            live[slot] = allocate(size)
    took = (time.perf_counter() - started) * 1e9 / len(TURNS)
    if free is not None:
        for block in live:
            free(block)
    return took


_dice = np.random.default_rng(5)
SIZES: list[int] = np.exp(_dice.uniform(np.log(256), np.log(LARGEST), PAIRS)).astype(int).tolist()
TURNS = list(zip(_dice.integers(0, SLOTS, PAIRS).tolist(), SIZES, strict=True))


def churn_trace() -> bfc.Trace:
    """The same churn, as a trace."""
    op, number, size = [0] * SLOTS, list(range(SLOTS)), SIZES[:SLOTS]
    owner = list(range(SLOTS))
    for i, (slot, nbytes) in enumerate(TURNS):
        op += [1, 0]
        number += [owner[slot], SLOTS + i]
        size += [0, nbytes]
        owner[slot] = SLOTS + i
    return bfc.Trace(op, number, size)


def cases(source: bfc.OpenCLSubAllocator, context: Any) -> tuple[list[Case], list[bfc.Allocator]]:
    import pyopencl as cl
    import pyopencl.tools as tools

    pool = bfc.BFCAllocator(source)
    caching = bfc.CachingAllocator(bfc.OpenCLSubAllocator(context, capacity=POOL))
    theirs = tools.MemoryPool(tools.ImmediateAllocator(cl.CommandQueue(context)))
    found: list[Case] = [
        ("pyopencl.tools.MemoryPool", theirs, None),
        ("bfc, allocate_raw", pool.allocate_raw, pool.deallocate_raw),
        ("bfc, allocate: a Buffer", pool.allocate, None),
        ("caching, allocate_raw", caching.allocate_raw, caching.deallocate_raw),
        ("caching, allocate: a Buffer", caching.allocate, None),
        ("bfc, for pyopencl.array", bfc.integrations.pyopencl.allocator(pool), None),
        ("no pool: pyopencl.Buffer", lambda n: cl.Buffer(context, READ_WRITE, n), None),
    ]
    return found, [pool, caching]


READ_WRITE = 1


def main() -> None:
    say(machine())
    usable = bfc.opencl.is_available()
    say(str(usable))
    if not usable:
        return
    source = bfc.OpenCLSubAllocator(capacity=POOL)
    found, pools = cases(source, source.context)
    kept = [(allocate(1000), free) for _name, allocate, free in found]
    trace = churn_trace().closed()
    for title, measure in (("one size", one_size), ("churn: 256 live, 256 B to 512 KiB", churn)):
        times: dict[str, list[float]] = defaultdict(list)
        for turn in range(ROUNDS + 1):
            for name, allocate, free in found:
                took = measure(allocate, free)
                if turn:  # the first warms up
                    times[name].append(took)
            if measure is churn:
                replayed = trace.replay(pools[0])
                if turn:
                    times["bfc, compiled replay"].append(replayed.ns_per_event * 2)
        say(
            f"\n{title + ', ns a pair':40}{'min / median / max':>24}   MemoryPool / it: median, min"
        )
        theirs = times["pyopencl.tools.MemoryPool"]
        for name, samples in times.items():
            medians = statistics.median(theirs) / statistics.median(samples)
            say(
                f"{name:40}{spread(samples):>24}   {medians:5.2f} {min(theirs) / min(samples):5.2f}"
            )
    del kept
    for pool in pools:
        pool.close()


if __name__ == "__main__":
    main()
