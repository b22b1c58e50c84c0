"""No memory is used again while work that was queued for its last owner is unfinished, through
whichever address: random programs over four streams, on real memory, whose work runs late.

A failing program prints the line that repeats it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from delayed_host import LateHost, LateProgram, without

import bfc

SEED = int(os.environ.get("BFC_SEED", "0"))
PROGRAMS = int(os.environ.get("BFC_HISTORIES", "8"))
STEPS = 400
MAKE: dict[str, Callable[[bfc.SubAllocator], bfc.Allocator]] = {
    "bfc": lambda source: bfc.BFCAllocator(source, allow_growth=True),
    "caching": lambda source: bfc.CachingAllocator(source),
    "expandable": lambda source: bfc.CachingAllocator(source, settings="expandable_segments:True"),
    "stitching": lambda source: bfc.BFCAllocator(source, virtual_memory=True, page_size="2 MiB"),
    "stitched caching": lambda source: bfc.CachingAllocator(source, stitch=True),
}

if not bfc.HostSubAllocator("4 MiB").supports_virtual_memory:
    pytest.skip("the source maps no memory", allow_module_level=True)


def run_program(source: LateHost, policy: str, seed: int) -> tuple[list[str], dict[str, Any]]:
    """Its faults, and what the allocator has counted."""
    allocator = MAKE[policy](source)
    program = LateProgram(allocator, source, random.Random(seed))
    program.run(STEPS)
    counted = allocator.page_stats() if policy == "stitching" else {}
    return program.end(), counted


def capacity_of(policy: str, seed: int) -> int:
    """The small ones run out of memory, so that streams take memory of each other."""
    mebibytes = (16, 24, 64)[seed % 3]
    return mebibytes * (4 << 20 if policy == "expandable" else 1 << 20)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", MAKE)
@pytest.mark.parametrize("seed", range(SEED, SEED + PROGRAMS))
def test_every_block_has_what_was_written_to_it(seed: int, policy: str) -> None:
    source = LateHost(capacity_of(policy, seed))
    faults, _counted = run_program(source, policy, seed)
    repeat = f"BFC_SEED={seed} BFC_HISTORIES=1 pytest {__file__} -k {policy}"
    assert faults == [], repeat
    assert source.live_bytes == 0


@pytest.mark.long
def test_the_programs_stitch_and_pass_pages_between_streams() -> None:
    """Else the test above would say little."""
    total: Counter[str] = Counter()
    for seed in range(6):
        _faults, counted = run_program(LateHost(capacity_of("stitching", seed)), "stitching", seed)
        total.update({name: int(count) for name, count in counted.items()})
    assert total["stitches"] > 50
    assert total["stream_waits"] > 10
    assert total["unmaps"] > 10


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("policy", "broken"),
    [
        ("bfc", ("order",)),
        ("bfc", ("fence", "wait")),
        ("caching", ("fence", "wait")),
        ("expandable", ("fence", "wait")),
        ("expandable", ("wait",)),
        ("stitching", ("order",)),
        ("stitching", ("fence", "wait")),
        ("stitching", ("wait",)),
        ("stitched caching", ("order",)),
        ("stitched caching", ("fence", "wait")),
        ("stitched caching", ("wait",)),
    ],
)
def test_a_source_that_leaves_something_out_is_found(policy: str, broken: tuple[str, ...]) -> None:
    """The first test above can fail."""
    programs = (
        run_program(without(*broken)(capacity_of(policy, at)), policy, at)[0] for at in range(20)
    )
    assert any(programs)
