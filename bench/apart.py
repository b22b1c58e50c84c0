"""What it costs to keep a script's files apart: `python -m bench.apart`, about a minute.

A program without PyTorch that writes one file is run in turn in five ways: with its files apart in
a namespace of root's, in one of an ordinary user, under Landlock, on the real files
(`--real-files`, which has a process outside, too), and without any of that. It is to be run by
root: for anybody else both namespaces are an ordinary user's. A run is timed from the start of
Python until its process has ended, in milliseconds, and in parts: until the program runs, and from
its end on.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.report import machine, say

ROOT = Path(__file__).parents[1]
WAYS = ("without", "real files", "landlock", "user", "namespace")
#: It imports the same in all ways.
PROGRAM = """
import sys, time
from kept_apart import give_up_rights
from bfc_tools.predicting import outside
way = sys.argv[1]
if way == "landlock":
    def refused(*_):
        raise PermissionError(1, "as in a container")
    outside.kernel.lay_over = refused
if way == "user":
    give_up_rights()
if way != "without":
    outside.begin(real_files=way == "real files")
began = time.clock_gettime(time.CLOCK_MONOTONIC)
with open("new", "w") as file:
    file.write("new")
ended = time.clock_gettime(time.CLOCK_MONOTONIC)
if outside.link is not None:
    outside.link.answered(0)
print(began, ended)
"""


def run(way: str, folder: str) -> tuple[float, float, float]:
    """Seconds in all, until the program runs, and from its end on."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests/helpers'}"}
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, way],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    ended = time.clock_gettime(time.CLOCK_MONOTONIC)
    runs, ends = map(float, done.stdout.split())
    return ended - began, runs - began, ended - ends


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.apart", description=__doc__)
    parser.add_argument("--turns", type=int, default=20, help="how often each way is run (20)")
    turns = parser.parse_args(arguments).turns
    say(machine())
    found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            for way in WAYS:
                found[way].append(run(way, folder))
    say(f"{'ms':14}{'min':>8}{'median':>8}{'max':>8}{'later':>8}{'before':>8}{'after':>8}")
    least = statistics.median(each[0] for each in found["without"])
    for way in WAYS:
        whole, before, after = (sorted(parts) for parts in zip(*found[way], strict=True))
        middle = statistics.median(whole)
        figures = (
            *(whole[0], middle, whole[-1], middle - least),
            *(statistics.median(before), statistics.median(after)),
        )
        say(f"{way:14}" + "".join(f"{figure * 1000:8.0f}" for figure in figures))


if __name__ == "__main__":
    main()
