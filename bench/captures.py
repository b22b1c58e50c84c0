"""What a hit costs in a capture, beside one outside: `python -m bench.captures`.

One call is an allocation and its free on the captured stream; rounds of the two take turns. It runs
on the simulated device: a hit calls no driver.
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
    allocator: bfc.CachingAllocator,
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


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    device = bfc.SimulatedSubAllocator("1 GiB")
    allocator = bfc.CachingAllocator(device)
    compare(
        "allocate_raw, deallocate_raw",
        device,
        allocator,
        lambda: allocator.deallocate_raw(allocator.allocate_raw(NBYTES, stream=STREAM)),
    )
    compare(
        "a Buffer created and dropped",
        device,
        allocator,
        lambda: allocator.allocate(NBYTES, stream=STREAM),
    )


if __name__ == "__main__":
    main()
