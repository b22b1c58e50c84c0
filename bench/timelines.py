"""What it costs to see a replay over time: `python -m bench.timelines`.

Each history of 50,000 events and more is replayed as it is and with `samples=400`, in turns, after
one pass that is not counted. The figures are the least of several passes, of the whole call and of
the compiled loop alone. The map of addresses (1200 by 512 cells) is a pass of its own; beside it
stands how many times a replay it takes.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import bfc
from bench.replay import histories, our_bfc, our_caching
from bench.report import machine, say

SAMPLES = 400
FEWEST_EVENTS = 50_000
PASSES = 9
POLICIES: dict[str, Callable[[], bfc.Allocator]] = {"bfc": our_bfc, "caching": our_caching}


def main() -> None:
    say(machine())
    say("ns an event, the least of several passes, of the loop and of the whole call")
    say(
        f"{'':24}{'':10}{'loop':>8}{'with':>8}{'more':>8}{'call':>8}{'with':>8}{'more':>8}{'rows':>6}"
        f"{'map':>8}{'times':>7}"
    )
    for name, trace in histories():
        if len(trace) >= FEWEST_EVENTS:
            for policy, make in POLICIES.items():
                with make() as allocator:
                    say(f"{name:24}{policy:10}{row(trace.closed(), allocator)}")


def row(trace: bfc.Trace, allocator: bfc.Allocator) -> str:
    loops: dict[int | None, list[float]] = {None: [], SAMPLES: []}
    calls: dict[int | None, list[float]] = {None: [], SAMPLES: []}
    rows, maps = 0, []
    trace.replay(allocator)
    for _ in range(PASSES):
        for samples in loops:
            gc.collect()
            begun = time.perf_counter()
            result = trace.replay(allocator, samples=samples)
            calls[samples].append(time.perf_counter() - begun)
            loops[samples].append(result.seconds)
            rows = 0 if result.timeline is None else len(result.timeline)
        begun = time.perf_counter()
        trace.occupancy(result.addresses)
        maps.append(time.perf_counter() - begun)
    times = min(maps) / min(calls[None])
    figures = pair(loops, len(trace)) + pair(calls, len(trace))
    return f"{figures}{rows:6}{min(maps) * 1e9 / len(trace):8.1f}{times:7.2f}"


def pair(samples: dict[int | None, list[float]], events: int) -> str:
    plain, watched = (min(found) * 1e9 / events for found in samples.values())
    return f"{plain:8.1f}{watched:8.1f}{watched / plain - 1:8.1%}"


if __name__ == "__main__":
    main()
