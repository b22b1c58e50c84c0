"""What an allocation hit costs on an OpenCL device, ours beside pyopencl's own pools in one run:
`python -m bench.opencl`. Rounds of all cases take turns.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import bfc
from bench.report import machine, say, spread

ROUNDS, PAIRS, SLOTS, ARRAYS = 40, 4_096, 256, 500
BATCHES = (16, 256, 2048)
THEIRS = "MemoryPool"
POOL = "256 MiB"
LARGEST = 512 << 10

#: (what, one allocation, its free, or None where dropping the object frees).
Case = tuple[str, Callable[[int], Any], Callable[[Any], object] | None]
Pools = dict[str, bfc.Allocator]


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


def one_by_one(cases: list[Case]) -> None:
    measures = {
        "one size": one_size,
        f"churn: {SLOTS} live, 256 B to 512 KiB": churn,
    }
    for title, measure in measures.items():
        rounds = {
            name: functools.partial(measure, allocate, free) for name, allocate, free in cases
        }
        report(title, "ns a pair", rounds)


def batches(theirs: Callable[[int], Any], pools: Pools) -> None:
    """Blocks that are wanted together. MemoryPool has no call for it: a list is what its users
    write."""
    for count in BATCHES:
        sizes = np.full(count, 1000)
        turns = PAIRS // count

        def of_theirs(count: int = count, turns: int = turns) -> float:
            started = time.perf_counter()
            for _ in range(turns):
                [theirs(1000) for _ in range(count)]
            return (time.perf_counter() - started) * 1e9 / (turns * count)

        def of_ours(
            pool: bfc.Allocator, sizes: Any = sizes, count: int = count, turns: int = turns
        ) -> float:
            started = time.perf_counter()
            for _ in range(turns):
                pool.deallocate_many(pool.allocate_many(sizes))
            return (time.perf_counter() - started) * 1e9 / (turns * count)

        rounds = {THEIRS: of_theirs}
        for name, pool in pools.items():
            rounds[f"{name}, allocate_many"] = functools.partial(of_ours, pool)
        report(f"{count} blocks of one size together", "ns a pair", rounds)


def compiled(theirs: Callable[[int], Any], pools: Pools) -> None:
    """The same churn with no Python between the calls: what a compiled caller, or a replay, meets.
    pyopencl's pool can be called from Python only, so the two sides are not alike."""
    trace = churn_trace().closed()

    def of_ours(pool: bfc.Allocator) -> float:
        return trace.replay(pool).ns_per_event * 2

    rounds: dict[str, Callable[[], float]] = {THEIRS: functools.partial(churn, theirs, None)}
    for name, pool in pools.items():
        rounds[f"{name}, compiled replay"] = functools.partial(of_ours, pool)
    report("the same churn, ours compiled", "ns a pair", rounds)


def arrays(queue: Any, theirs: Callable[[int], Any], pools: Pools) -> None:
    """A whole pyopencl.array made and dropped."""
    import pyopencl.array as clarray

    def empty(allocator: Any) -> float:
        started = time.perf_counter()
        for _ in range(ARRAYS):
            clarray.empty(queue, 250, np.float32, allocator=allocator)
        return (time.perf_counter() - started) * 1e6 / ARRAYS

    rounds = {THEIRS: functools.partial(empty, theirs)}
    for name, pool in pools.items():
        ours = bfc.integrations.pyopencl.allocator(pool)
        rounds[f"{name}, for pyopencl.array"] = functools.partial(empty, ours)
    rounds["no pool"] = functools.partial(empty, None)
    report("pyopencl.array.empty", "us", rounds)


def report(title: str, unit: str, rounds: Mapping[str, Callable[[], float]]) -> None:
    """Plays the rounds in turns, and prints a row of each. MemoryPool's is the first."""
    times: dict[str, list[float]] = {name: [] for name in rounds}
    for turn in range(ROUNDS + 1):
        for name, play in rounds.items():
            took = play()
            if turn:  # the first warms up
                times[name].append(took)
    say(f"\n{f'{title}, {unit}':40}{'min / median / max':>24}   {THEIRS} / it: median, min")
    theirs = times[THEIRS]
    for name, samples in times.items():
        medians = statistics.median(theirs) / statistics.median(samples)
        say(f"{name:40}{spread(samples):>24}   {medians:5.2f} {min(theirs) / min(samples):5.2f}")


def main() -> None:
    say(machine())
    usable = bfc.opencl.is_available()
    say(str(usable))
    if not usable:
        return
    import pyopencl as cl
    import pyopencl.tools as tools

    source = bfc.OpenCLSubAllocator(capacity=POOL)
    context = source.context
    pools: Pools = {
        "bfc": bfc.BFCAllocator(source),
        "caching": bfc.CachingAllocator(bfc.OpenCLSubAllocator(context, capacity=POOL)),
    }
    theirs = tools.MemoryPool(tools.ImmediateAllocator(cl.CommandQueue(context)))
    cases: list[Case] = [(THEIRS, theirs, None)]
    for name, pool in pools.items():
        cases += [
            (f"{name}, allocate_raw", pool.allocate_raw, pool.deallocate_raw),
            (f"{name}, allocate: a Buffer", pool.allocate, None),
            (f"{name}, for pyopencl.array", bfc.integrations.pyopencl.allocator(pool), None),
        ]
    read_write = cl.mem_flags.READ_WRITE
    cases.append(("no pool: pyopencl.Buffer", lambda n: cl.Buffer(context, read_write, n), None))
    kept = [allocate(1000) for _name, allocate, _free in cases]
    one_by_one(cases)
    batches(theirs, pools)
    compiled(theirs, pools)
    arrays(source.queue, theirs, pools)
    del kept
    for pool in pools.values():
        pool.close()


if __name__ == "__main__":
    main()
