"""What a hit costs in a capture, beside one outside: `python -m bench.captures`.

One call is an allocation and its free on the captured stream; rounds of the two take turns. It runs
on the simulated device: a hit calls no driver. The stream is a BFCAllocator's own: a hit for
another one is slow outside of captures.
"""

from __future__ import annotations

import argparse
import timeit
from collections.abc import Callable

import bfc
from bench.report import say, spread

ROUNDS, CALLS, NBYTES, STREAM = 201, 1_000, 1000, 7


def compare(
    name: str,
    device: bfc.SimulatedSubAllocator,
    allocator: bfc.Allocator,
    once: Callable[[], object],
) -> None:
    """Measures `once` in turn outside and inside of a capture of the stream."""
    outside, inside = [], []
    for _ in range(ROUNDS):
        outside.append(timeit.timeit(once, number=CALLS) / CALLS * 1e9)
        with allocator.capture(STREAM) as pool:
            device.captures.begin(STREAM)
            once()
            inside.append(timeit.timeit(once, number=CALLS) / CALLS * 1e9)
            device.captures.end(STREAM)
        pool.release()
    ratios = [within / without for within, without in zip(inside, outside, strict=True)]
    say(f"{name:34} outside  {spread(outside)} ns")
    say(f"{'':34} captured {spread(inside)} ns")
    say(f"{'':34} ratio    {spread(ratios)}")


def compare_calls(name: str, device: bfc.SimulatedSubAllocator, allocator: bfc.Allocator) -> None:
    """Measures both ways to allocate."""
    compare(
        f"{name}, raw",
        device,
        allocator,
        lambda: allocator.deallocate_raw(allocator.allocate_raw(NBYTES, stream=STREAM)),
    )
    compare(
        f"{name}, Buffer",
        device,
        allocator,
        lambda: allocator.allocate(NBYTES, stream=STREAM),
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    device = bfc.SimulatedSubAllocator("1 GiB")
    compare_calls("CachingAllocator", device, bfc.CachingAllocator(device))
    device = bfc.SimulatedSubAllocator("1 GiB")
    grows = bfc.BFCAllocator(device, allow_growth=True, stream=STREAM)
    compare_calls("BFCAllocator", device, grows)
    device = bfc.SimulatedSubAllocator("1 GiB")
    maps = bfc.BFCAllocator(device, virtual_memory=True, stream=STREAM)
    compare_calls("BFCAllocator, virtual_memory", device, maps)


if __name__ == "__main__":
    main()
