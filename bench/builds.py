"""Another build of bfc next to this one: `python -m bench.builds ../before`.

The argument is the folder of a checkout in which `python setup.py build_ext --inplace` was run,
with the same Python.

Each build runs in processes of its own, in turn, and a process reports the least of its times: a
busy machine only adds to them. The ratio is of the medians over all processes, this build's to the
other's. Replays are of a settled allocator, and, in the rows that say "first", of a new one, which
takes all of its memory.

`--instructions` counts the instructions of the calls instead, loop and interpreter included:
valgrind does, which has to be installed. How busy the machine is changes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import timeit
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parents[1]
TURNS = 15
CALLS = {
    "a raw pair": "deallocate_raw(allocate_raw(1000))",
    "a Buffer made and dropped": "allocate(1000)",
}
REPEATS, NUMBER = 15, 20_000
POLICIES = {"bfc": "BFCAllocator", "caching": "CachingAllocator"}
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
    parser.add_argument(
        "--instructions",
        action="store_true",
        help="count instructions of the calls; takes valgrind",
    )
    parsed = parser.parse_args(arguments)
    say(machine())
    if parsed.instructions:
        say(f"{'instructions':36}{'other build':>14}{'this build':>14}   ratio")
        for policy, label in itertools.product(POLICIES, CALLS):
            other = instructions_of(policy, label, parsed.other.resolve())
            this = instructions_of(policy, label, HERE)
            say(f"{policy + ': ' + label:36}{other:14.1f}{this:14.1f}   {this / other:5.3f}")
        return
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
    times: dict[str, float] = json.loads(run_child(checkout, [], "--child"))
    return times


def instructions_of(policy: str, label: str, checkout: Path) -> float:
    """Instructions of a pair: what a long loop takes more than a short one."""
    counted = []
    for number in (NUMBER, 2 * NUMBER):
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder) / "counts"
            valgrind = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={found}"]
            run_child(checkout, valgrind, "--loop", policy, label, str(number))
            total = re.search(r"^(?:summary|totals): (\d+)", found.read_text(), re.MULTILINE)
            assert total is not None
            counted.append(int(total[1]))
    return (counted[1] - counted[0]) / NUMBER


def run_child(checkout: Path, under: list[str], mode: str, *arguments: str) -> str:
    """Runs this file on a build, with hashes that are the same in each process."""
    done = subprocess.run(
        [*under, sys.executable, Path(__file__).resolve(), mode, str(checkout), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=checkout,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def import_from(checkout: Path) -> ModuleType:
    sys.path.insert(0, str(checkout))
    bfc = importlib.import_module("bfc")
    if Path(str(bfc.__file__)).resolve().parents[1] != checkout:
        raise SystemExit(f"bfc was imported from {bfc.__file__}, not from {checkout}")
    return bfc


def timer_of(allocator: Any, label: str) -> timeit.Timer:
    methods = ("allocate_raw", "deallocate_raw", "allocate")
    return timeit.Timer(CALLS[label], globals={name: getattr(allocator, name) for name in methods})


def loop(checkout: Path, policy: str, label: str, number: int) -> None:
    bfc = import_from(checkout)
    allocator = getattr(bfc, POLICIES[policy])(bfc.SimulatedSubAllocator("1 GiB"))
    timer = timer_of(allocator, label)
    timer.timeit(1000)  # as it goes on from here
    timer.timeit(number)


def measure(checkout: Path) -> dict[str, float]:
    """The least times of a build, in ns: by call, and by event of each trace."""
    bfc = import_from(checkout)
    times: dict[str, float] = {}
    for policy, name in POLICIES.items():
        make = getattr(bfc, name)
        allocator = make(bfc.SimulatedSubAllocator("1 GiB"))
        kept = [allocator.allocate_raw(1000) for _ in range(3)]
        for label in CALLS:
            timer = timer_of(allocator, label)
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
    elif sys.argv[1:2] == ["--loop"]:
        loop(Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
    else:
        main()
