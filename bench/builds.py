"""Another build of bfc next to this one: `python -m bench.builds ../before`.

The argument is the folder of a checkout in which `python setup.py build_ext --inplace` was run,
with the same Python.

Each build runs in processes of its own, in turn, and a process reports the least of its times: a
busy machine only adds to them. The ratio is of the medians over all processes, this build's to the
other's. Replays are of a settled allocator, and, in the rows that say "first", of a new one, which
takes all of its memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import timeit
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
TURNS = 15
CALLS = {
    "a raw pair": "deallocate_raw(allocate_raw(1000))",
    "a Buffer made and dropped": "allocate(1000)",
}
REPEATS, NUMBER = 15, 20_000
PASSES, FEWEST_EVENTS = 6, 400_000  # of a trace: more passes of a short one
FEWEST_FIRST = 50_000


def main(arguments: list[str] | None = None) -> None:
    from bench.report import machine, say, spread

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", type=Path, help="the checkout of the other build")
    parser.add_argument(
        "--turns", type=int, default=TURNS, help="processes of each build (default: 15)"
    )
    parsed = parser.parse_args(arguments)
    say(machine())
    found = take_turns(parsed.other.resolve(), parsed.turns)
    say(f"{'ns, min / median / max':36}{'other build':>22}{'this build':>24}   ratio")
    for name, (before, now) in found.items():
        ratio = statistics.median(now) / statistics.median(before)
        say(f"{name:36}{spread(before):>22}{spread(now):>24}   {ratio:5.3f}")


def take_turns(other: Path, turns: int) -> dict[str, tuple[list[float], list[float]]]:
    """The times of both builds, by what was timed."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for turn in range(turns):
        builds = ((0, other), (1, HERE))
        for which, checkout in builds if turn % 2 == 0 else reversed(builds):
            for name, ns in times_of(checkout).items():
                found.setdefault(name, ([], []))[which].append(ns)
    return found


def times_of(checkout: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, Path(__file__).resolve(), "--child", str(checkout)],
        capture_output=True,
        text=True,
        check=False,
        cwd=checkout,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    times: dict[str, float] = json.loads(done.stdout)
    return times


def measure(checkout: Path) -> dict[str, float]:
    """The least times of a build, in ns: by call, and by event of each trace."""
    sys.path.insert(0, str(checkout))
    import bfc

    if Path(bfc.__file__).resolve().parents[1] != checkout:
        raise SystemExit(f"bfc was imported from {bfc.__file__}, not from {checkout}")
    times: dict[str, float] = {}
    for policy, make in (("bfc", bfc.BFCAllocator), ("caching", bfc.CachingAllocator)):
        allocator = make(bfc.SimulatedSubAllocator("1 GiB"))
        kept = [allocator.allocate_raw(1000) for _ in range(3)]
        methods = ("allocate_raw", "deallocate_raw", "allocate")
        names = {name: getattr(allocator, name) for name in methods}
        for label, statement in CALLS.items():
            timer = timeit.Timer(statement, globals=names)
            times[f"{policy}: {label}"] = min(timer.repeat(REPEATS, NUMBER)) / NUMBER * 1e9
        allocator.deallocate_many(kept)
        for path in sorted((HERE / "bench" / "traces").glob("*.npz")):
            trace = bfc.Trace.load(path).closed()
            settled = make(bfc.SimulatedSubAllocator(80 << 30))
            trace.replay(settled)
            passes = max(PASSES, FEWEST_EVENTS // len(trace))
            times[f"{policy}: {path.stem}"] = min(
                trace.replay(settled).ns_per_event for _ in range(passes)
            )
            times[f"{policy}: {path.stem}, first"] = min(
                trace.replay(make(bfc.SimulatedSubAllocator(80 << 30))).ns_per_event
                for _ in range(max(PASSES, FEWEST_FIRST // len(trace)))
            )
    return times


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(Path(sys.argv[2]))))
    else:
        main()
