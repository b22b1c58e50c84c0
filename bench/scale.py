"""What grows and what does not: `python -m bench.scale`.

An event around more and more live blocks; a bin crowded with chunks just too small; an 80 GiB
region; the host memory that a chunk costs. Both policies of ours, and TensorFlow where one call at
a time can be timed: PyTorch's allocator runs in a process of its own.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable

import bfc
from bench.histories import POLICIES, Maker, churn
from bench.peers.tensorflow import PeerUnavailable, TensorFlowBFC, build
from bench.report import machine, resident_bytes, say, spread

MANY = 1 << 44
CROWD = 100_000


def main() -> None:
    say(machine())
    slope_of_replay()
    slope_of_calls()
    crowded_bin()
    large_region()
    bookkeeping()


def slope_of_replay() -> None:
    say(
        "\nns an event of a replay, by the blocks live "
        "(min / median / max over quarter millions of events)"
    )
    first: dict[str, float] = {}
    for live in (1_000, 10_000, 100_000, 1_000_000):
        trace = churn(live, 2_000_000)
        for policy, make in POLICIES.items():
            samples = [
                (after[1] - before[1]) * 1e9 / (after[0] - before[0])
                for before, after in itertools.pairwise(marks_of(trace, make))
                if before[0] >= live
            ]
            say_slope(policy, live, samples, first)


def say_slope(policy: str, live: int, samples: list[float], first: dict[str, float]) -> None:
    """With how many times the first figure of this policy it is."""
    middle = statistics.median(samples)
    times = middle / first.setdefault(policy, middle)
    say(f"  {policy:8}{live:>9} live {spread(samples)}   {times:.2f} times")


def marks_of(trace: bfc.Trace, make: Maker) -> list[tuple[int, float]]:
    """How many events of a replay were done after how many seconds."""
    marks: list[tuple[int, float]] = []
    begun = time.perf_counter()
    with make(bfc.SimulatedSubAllocator(MANY)) as allocator:
        trace.replay(
            allocator, progress=lambda done: marks.append((done, time.perf_counter() - begun))
        )
    return marks


def slope_of_calls() -> None:
    say(
        "\nns an event of Python calls in random order, which nothing can look ahead in "
        "(bare loop taken off)"
    )
    first: dict[str, float] = {}
    for live in (1_000, 1_000_000):
        for policy, make in POLICIES.items():
            with make(bfc.SimulatedSubAllocator(MANY)) as allocator:
                addresses = allocator.allocate_many(
                    [256 * random.randrange(1, 4096) for _ in range(live)]
                ).tolist()
                samples = [time_calls(allocator, addresses) for _ in range(9)]
            say_slope(policy, live, samples, first)


def time_calls(allocator: bfc.Allocator, addresses: list[int], pairs: int = 50_000) -> float:
    picks, others = ([random.randrange(len(addresses)) for _ in range(pairs)] for _ in range(2))
    sizes = [256 * random.randrange(1, 4096) for _ in range(pairs)]
    allocate, deallocate = allocator.allocate_raw, allocator.deallocate_raw
    begun = time.perf_counter()
    for pick, size in zip(picks, sizes, strict=True):
        deallocate(addresses[pick])
        addresses[pick] = allocate(size)
    taken = time.perf_counter() - begun
    # The list of a million ints misses the cache too: the same walk, elsewhere, without the calls.
    begun = time.perf_counter()
    for pick, _size in zip(others, sizes, strict=True):
        addresses[pick] = addresses[pick] + 0
    return (taken - (time.perf_counter() - begun)) * 1e9 / (2 * pairs)


def crowded_bin() -> None:
    say(
        f"\nus a pair (allocate, free) with {CROWD} free chunks just too small in its bin, "
        "and with none"
    )
    limit = 64 << 30
    for policy, make in POLICIES.items():
        with make(bfc.SimulatedSubAllocator(limit)) as allocator:
            quiet = time_pairs(allocator.allocate_raw, allocator.deallocate_raw, 20_000)
            crowd(allocator.allocate_raw, allocator.deallocate_raw)
            crowded = time_pairs(allocator.allocate_raw, allocator.deallocate_raw, 20_000)
            say(f"  {policy:10} {spread(quiet)}   crowded {spread(crowded)}")
    try:
        build()
    except PeerUnavailable as error:
        say(f"  without TensorFlow: {error}")
        return
    with TensorFlowBFC(memory_limit=limit, capacity=limit) as peer:
        quiet = time_pairs(peer.allocate_raw, peer.deallocate_raw, 2_000)
        crowd(peer.allocate_raw, peer.deallocate_raw)
        crowded = time_pairs(peer.allocate_raw, peer.deallocate_raw, 200)
        say(f"  TensorFlow {spread(quiet)}   crowded {spread(crowded)}")


def crowd(allocate: Callable[[int], int], deallocate: Callable[[int], None]) -> None:
    """Fills the request's bin with chunks one granule smaller than it."""
    small = []
    for _ in range(CROWD):
        small.append(allocate(300_000))
        allocate(256)
    for address in small:
        deallocate(address)


def time_pairs(
    allocate: Callable[[int], int], deallocate: Callable[[int], None], pairs: int
) -> list[float]:
    samples = []
    for _ in range(9):
        begun = time.perf_counter()
        for _ in range(pairs):
            deallocate(allocate(300_300))
        samples.append((time.perf_counter() - begun) * 1e6 / pairs)
    return samples


def large_region() -> None:
    say("\nan 80 GiB region: the first allocation")
    for label, make in makers(80 << 30):
        before, begun = resident_bytes(), time.perf_counter()
        close = make()
        taken = time.perf_counter() - begun
        grown = max(0, resident_bytes() - before) / (1 << 20)
        say(f"  {label:10} {taken * 1e3:9.3f} ms {grown:9.2f} MiB")
        close()


def makers(limit: int) -> list[tuple[str, Callable[[], Callable[[], None]]]]:
    def ours() -> Callable[[], None]:
        allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator(limit))
        allocator.allocate_raw(1)
        return allocator.close

    def theirs() -> Callable[[], None]:
        peer = TensorFlowBFC(memory_limit=limit, capacity=limit)
        peer.allocate_raw(1)
        return peer.close

    try:
        build()
    except PeerUnavailable:
        return [("bfc", ours)]
    return [("bfc", ours), ("TensorFlow", theirs)]


def bookkeeping() -> None:
    say("\nhost memory of the bookkeeping, bytes a live chunk (records, table of starts, bins)")
    for live in (100_000, 700_000, 1_000_000, 1_400_000):
        for policy, make in POLICIES.items():
            with make(bfc.SimulatedSubAllocator(MANY)) as allocator:
                allocator.allocate_many([4096] * live)
                say_bytes_a_live_chunk(policy, allocator)
    churned = churn(1_000_000, 1_000_000)
    for policy, make in POLICIES.items():
        with make(bfc.SimulatedSubAllocator(MANY)) as allocator:
            churned.replay(allocator)
            say_bytes_a_live_chunk(policy, allocator)
    for policy, make in POLICIES.items():
        with make(bfc.SimulatedSubAllocator(MANY)) as allocator:
            addresses = allocator.allocate_many([4096] * 2_000_000)
            allocator.deallocate_many(addresses[::2].tolist())
            say_bytes_a_live_chunk(policy, allocator)


def say_bytes_a_live_chunk(policy: str, allocator: bfc.Allocator) -> None:
    snapshot = allocator.snapshot()
    live, free = len(snapshot.live_chunks()), len(snapshot.free_chunks())
    bytes_each = allocator.bookkeeping_bytes / live
    say(f"  {policy:8}{live:>9} live, {free:>7} free   {bytes_each:6.1f}")


if __name__ == "__main__":
    main()
