"""Recorded runs on the memory of a GPU: `python -m bench.gpu_replay`. The first pass takes memory
from the driver, and later ones find it. Each trace is replayed under every policy on ordinary and
on mapped memory. Where a run repeats, its iteration with the highest peak follows on one stream,
with and without a plan, each time on fresh memory: six times ("first"), and twenty-four times.
`--emulated` does so on the emulated driver, whose calls cost next to nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import bfc
from bench import gpu
from bench.plans import one_stream
from bench.repeated import ROUNDS, history, repeated
from bench.report import say, spread
from bfc.testing import cuda_emulator

TRACES = Path(__file__).parent / "traces"
PASSES = 5
TURNS = 3
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
#: With plans for the policy they fall back to.
PLANNED = {
    "caching": "caching",
    "caching, stitch": "caching",
    "BFC": "bfc",
    "BFC, virtual memory": "bfc",
}


def measure(source: bfc.CUDASubAllocator, trace: bfc.Trace, make: Make) -> str:
    with make(source) as allocator:
        passes = [trace.replay(allocator) for _ in range(PASSES + 1)]
        reserved = allocator.stats().peak_pool_bytes
    first, *later = [found.ns_per_event for found in passes]
    row = shown(first, later, reserved, trace)
    refused = passes[0].failed
    return f"{row}  {refused} refused" if refused else row


def shown(first: float, later: list[float], reserved: int, trace: bfc.Trace) -> str:
    return (
        f"{first / 1000:9.2f}{spread([ns / 1000 for ns in later]):>27}"
        f"{reserved / MIB:12.1f}{reserved / trace.peak_bytes_live():8.3f}"
    )


def measure_repeated(
    source: bfc.CUDASubAllocator, traces: Sequence[bfc.Trace], make: Make, plan: bfc.Plan | None
) -> str:
    few, many = traces
    later, reserved = [], 0
    for trace in [few, *[many] * TURNS]:
        with make(source) as allocator:
            allocator.use_plan(plan, gate=None)
            later.append(trace.replay(allocator).ns_per_event)
            reserved = allocator.stats().peak_pool_bytes
    return shown(later[0], later[1:], reserved, many)


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
        show_repeated(source, trace)


def show_repeated(source: bfc.CUDASubAllocator, trace: bfc.Trace) -> None:
    run = repeated(trace)
    if run is None:
        return
    traces = [one_stream(history(run, [run.iteration] * n)) for n in (ROUNDS, 4 * ROUNDS)]
    say("  one iteration, 6 and 24 times")
    for name, fallback in PLANNED.items():
        plan = bfc.Plan.from_trace(traces[0], fallback=fallback)
        for label, used in ((name, None), (f"{name}, planned", plan)):
            say(f"    {label:30}{measure_repeated(source, traces, POLICIES[name], used)}")


if __name__ == "__main__":
    main()
