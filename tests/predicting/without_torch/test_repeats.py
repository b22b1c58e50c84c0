"""A step that is made again and again."""

from __future__ import annotations

import random

import pytest

import bfc
from bfc_tools.predicting.repeats import repeated


def steps(seed: int, count: int) -> tuple[bfc.Trace, list[int]]:
    """Equal steps, whose last blocks the next one frees; and where each ends."""
    rng = random.Random(seed)
    plan = [rng.choice([512, 4096, 3 << 20, 30 << 20]) for _ in range(30)]
    kept = rng.sample(range(30), 8)
    op, ids, sizes, ends = [], [], [], []
    for turn in range(count):
        for place, size in enumerate(plan):
            if turn and place < len(kept):
                op.append(1)
                ids.append((turn - 1) * 30 + kept[place])
                sizes.append(plan[kept[place]])
            op.append(0)
            ids.append(turn * 30 + place)
            sizes.append(size)
        for place in range(30):
            if place not in kept:
                op.append(1)
                ids.append(turn * 30 + place)
                sizes.append(plan[place])
        ends.append(len(op))
    return bfc.Trace(op, ids, sizes), ends


@pytest.mark.parametrize("seed", range(10))
def test_a_repeated_step_is_the_program_that_goes_on(seed: int) -> None:
    longer, _ = steps(seed, 12)
    short, ends = steps(seed, 3)
    found = repeated(short, ends[-2], ends[-1], 9)
    assert list(found.op) == list(longer.op)
    assert list(found.size) == list(longer.size)
    peaks = [
        one.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator(1 << 40))).peak_bytes_reserved
        for one in (found, longer)
    ]
    assert peaks[0] == peaks[1]


def test_what_a_step_leaves_in_another_size_is_freed_too() -> None:
    """The second step holds 20 bytes where the first held 10."""
    trace = bfc.Trace([0, 0, 1], [0, 1, 0], [10, 20, 10])
    found = repeated(trace, 1, 3, 2)
    assert list(found.op) == [0, 0, 1, 0, 1, 0, 1]
    assert list(found.size) == [10, 20, 10, 20, 20, 20, 20]
