"""Whether the quick search finds what the full grid finds: `python -m bench.advise`, ten minutes.

Each recorded trace is to fit on a device of 1.03 times what is live at most. `bfc advise` looks for
PyTorch's settings, one key at a time and then in pairs. The grid is some 1,400 combinations: each
is replayed on the smallest size that any has completed on so far, and bisected where it completes
there. The advice may be 1 % above the smallest, where the calls of the driver decide. "of grid" is
its smallest device over the smallest of the grid, and is to be at most 1.01.

Times are CPU seconds of one process, which other work on the machine changes little, and the wall
time of two processes.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import bfc
from bench.histories import TRACES, chosen
from bench.report import machine, say
from bfc_tools.study import candidates
from bfc_tools.study.candidates import Point, replay
from bfc_tools.study.search import GRAIN

#: The device, as a part of what is live at most.
PART = 1.03
PASSES = 3
JOBS = 2
#: How near the quick choice is to come to the best of the grid, and the seconds that it may take.
NEAR, SECONDS = 1.01, 60.0
ROOM = 1 << 62


@dataclass(frozen=True)
class Result:
    """What both searches came to."""

    quick: bfc.Advice
    #: The smallest device of the grid, the settings, and what it took.
    grid: tuple[int, str]
    grid_replays: int
    grid_cpu: float
    #: CPU seconds of the quick search in one process, a pass each; wall seconds in two.
    cpu: list[float]
    wall: list[float]

    @property
    def ratio(self) -> float:
        """The smallest device of the quick choice over the smallest of the grid."""
        best = row_of(self.quick)
        size = None if best is None else best.smallest_device
        return float("inf") if size is None else size / self.grid[0]


def row_of(advice: bfc.Advice) -> bfc.AdviceRow | None:
    return None if advice.best is None else advice.rows[advice.best]


def traces() -> dict[str, bfc.Trace]:
    """As they were recorded: what they leave live is not freed."""
    return {path.stem: bfc.Trace.load(path) for path in sorted(TRACES.glob("*.npz"))}


def whole_grid(trace: bfc.Trace, device: int, live: int) -> tuple[tuple[int, str], int]:
    """The smallest device of the grid with its settings, and how many replays that took."""
    best, replays = (device, "nothing fits"), 0
    for point in candidates.grid():
        replays += 1
        if not replay(trace, point, best[0]).completes:
            continue
        low, high = (live - 1) // GRAIN, best[0] // GRAIN
        while high - low > 1:
            replays += 1
            middle = (low + high) // 2
            if replay(trace, point, middle * GRAIN).completes:
                high = middle
            else:
                low = middle
        if high * GRAIN < best[0]:
            best = (high * GRAIN, point.settings)
    return best, replays


def measure(trace: bfc.Trace, passes: int = PASSES) -> Result:
    live = replay(trace, Point("caching", ""), ROOM).peak_live
    device = int(live * PART)
    cpu, wall = [], []
    for _ in range(passes):
        begun = time.process_time()
        quick = bfc.advise(trace, device, jobs=1)
        cpu.append(time.process_time() - begun)
        begun = time.perf_counter()
        bfc.advise(trace, device, jobs=JOBS)
        wall.append(time.perf_counter() - begun)
    begun = time.process_time()
    grid, replays = whole_grid(trace, device, live)
    return Result(quick, grid, replays, time.process_time() - begun, cpu, wall)


HEADINGS = (
    *("trace", "", "calls", "smallest", "of grid"),
    *("replays", "CPU s min/med", "wall s min/med", "settings"),
)
WIDTHS = (20, 8, -7, -8, -7, -7, -13, -14, 1)


def line(texts: tuple[str, ...]) -> str:
    padded = (
        text.ljust(width) if width > 0 else text.rjust(-width)
        for text, width in zip(texts, WIDTHS, strict=True)
    )
    return "  ".join(padded).rstrip()


def cells(advice: bfc.Advice, row: bfc.AdviceRow | None) -> tuple[str, ...]:
    """Calls on the device, and the smallest device as a part of what is live."""
    if row is None:
        return "-", "-"
    part = "-" if row.smallest_device is None else f"{row.smallest_device / advice.live_peak:.4f}"
    return str(row.driver_calls) if row.fits else "refused", part


def times(seconds: list[float]) -> str:
    return f"{min(seconds):.1f} / {statistics.median(seconds):.1f}"


def report(name: str, result: Result) -> None:
    quick = result.quick
    default = next(row for row in quick.rows if row.is_pytorch and not row.settings)
    say(line((name, "default", *cells(quick, default), *[""] * 4, default.name)))
    best = row_of(quick)
    cost = (str(quick.replays), times(result.cpu), times(result.wall))
    settings = "nothing fits" if best is None else best.name
    say(line(("", "quick", *cells(quick, best), f"{result.ratio:.4f}", *cost, settings)))
    size, settings = result.grid
    cost = (str(result.grid_replays), f"{result.grid_cpu:.1f}", "")
    say(line(("", "grid", "", f"{size / quick.live_peak:.4f}", "", *cost, settings)))


def main(arguments: list[str] | None = None) -> None:
    listed = chosen(traces(), __doc__, arguments)
    say(machine())
    say(f"devices of {PART} times what is live at most")
    say(line(HEADINGS))
    results = []
    for name, trace in listed.items():
        results.append(measure(trace))
        report(name, results[-1])
    near = sum(result.ratio <= NEAR for result in results)
    slowest = max(statistics.median(result.wall) for result in results)
    say(f"{near} of {len(results)} within 1 % of the grid's smallest")
    say(f"the slowest took {slowest:.1f} s on {JOBS} cores, of {SECONDS:.0f} allowed")


if __name__ == "__main__":
    main()
