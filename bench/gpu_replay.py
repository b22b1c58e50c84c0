"""Recorded runs on the memory of a GPU: `python -m bench.gpu_replay`. The first pass takes memory
from the driver, and later ones find it. Each trace is replayed under every policy on ordinary and
on mapped memory; `--emulated` does so on the emulated driver, whose calls cost next to nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import bfc
from bench import gpu
from bench.report import say, spread
from bfc.testing import cuda_emulator

TRACES = Path(__file__).parent / "traces"
PASSES = 5
MIB = 1 << 20
Make = Callable[[bfc.CUDASubAllocator], bfc.Allocator]
POLICIES: dict[str, Make] = {
    "caching": bfc.CachingAllocator,
    "caching, expandable segments": lambda source: bfc.CachingAllocator(
        source, settings="expandable_segments:True"
    ),
    "caching, stitch": lambda source: bfc.CachingAllocator(source, stitch=True),
    "BFC": lambda source: bfc.BFCAllocator(source, allow_growth=True),
    "BFC, virtual memory": lambda source: bfc.BFCAllocator(source, virtual_memory=True),
}


def measure(source: bfc.CUDASubAllocator, trace: bfc.Trace, make: Make) -> str:
    with make(source) as allocator:
        passes = [trace.replay(allocator) for _ in range(PASSES + 1)]
        reserved = allocator.stats().peak_pool_bytes
    first, *later = [found.ns_per_event for found in passes]
    refused = passes[0].failed
    return (
        f"{first / 1000:9.2f}{spread([ns / 1000 for ns in later]):>27}"
        f"{reserved / MIB:12.1f}{reserved / trace.peak_bytes_live():8.3f}"
        + (f"  {refused} refused" if refused else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_replay", description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="without a GPU: no measure of one")
    parser.add_argument("traces", nargs="*", type=Path, help="(default: those of bench/traces)")
    options = parser.parse_args()
    if options.emulated:
        cuda_emulator.load().reset(devices=1, total=[128 << 30])
    source = gpu.start("bench.gpu_replay", emulated=options.emulated)
    heads = f"{'first':>9}{'later, min / median / max':>27}{'MiB':>12}{'/ live':>8}"
    say(f"{'us an event':34}{heads}")
    for path in options.traces or sorted(TRACES.glob("*.npz")):
        trace = bfc.Trace.load(path)
        if trace.peak_bytes_live() > 0.6 * source.total_bytes:
            say(f"{path.stem}: needs more memory than this GPU has")
            continue
        say(path.stem)
        for name, make in POLICIES.items():
            say(f"  {name:32}{measure(source, trace, make)}")


if __name__ == "__main__":
    main()
