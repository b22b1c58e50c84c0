"""What PyTorch's policy gives back to the device before it tries again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import bfc

MIB = 1 << 20


TRACES = Path(__file__).parents[2] / "bench" / "traces"


@pytest.mark.parametrize("seed", range(30))
def test_what_a_retry_gives_back_is_the_smallest_that_is_enough(seed):
    """The choice, beside the obvious one; it took a second for 10,000 regions."""

    random.seed(seed)
    sizes = [random.randrange(10, 60) * 2 * MIB for _ in range(random.randrange(1, 8))]
    wanted = random.randrange(10, 90) * 2 * MIB
    device = bfc.SimulatedSubAllocator(sum(sizes))
    allocator = bfc.CachingAllocator(device, release_only_what_is_needed=True)
    for address in [allocator.allocate_raw(size, 3) for size in sizes]:
        allocator.deallocate_raw(address)
    chosen, left, needed = [], sorted(sizes), wanted
    while needed > 0 and left:
        size = next((size for size in left if size >= needed), left[-1])
        left.remove(size)
        chosen.append(size)
        needed -= size
    try:
        allocator.allocate_raw(wanted)
    except bfc.OutOfMemoryError:
        chosen = sizes
    freed = [nbytes for kind, nbytes, _ in device.calls if kind == "free"]
    assert sorted(freed) == sorted(chosen), f"seed {seed}"


def test_a_default_retry_is_never_worse_than_upstreams():
    """A cache kept in pieces refused what PyTorch serves."""
    trace = bfc.Trace.load(TRACES / "gpt2s_varlen.npz")
    refused = [
        trace.replay(
            bfc.CachingAllocator(bfc.SimulatedSubAllocator("40 GiB"), strict=strict)
        ).failed
        for strict in (True, False)
    ]
    assert refused == [0, 0]
