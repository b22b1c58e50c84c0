"""Copies on the host, `bfc.copy` beside memcpy and numpy.copyto in turn:
`python -m bench.copies`. The loop around the calls is in no figure."""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np

import bfc
from bench.report import machine, say
from bfc.units import format_bytes

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB << shift for shift in range(0, 19, 2)]
#: Copies of one figure, by bytes: enough of them that the clock's own cost is small.
ROUNDS, LEAST_SECONDS = 15, 0.004

Run = Callable[[], object]


def contiguous(nbytes: int) -> dict[str, Run]:
    to, source = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    addresses = to.ctypes.data, source.ctypes.data
    move = ctypes.memmove
    return {
        "bfc.copy": lambda: bfc.copy(to, source),
        "memcpy": lambda: move(*addresses, nbytes),
        "copyto": lambda: np.copyto(to, source),
    }


def strided(nbytes: int) -> dict[str, Run]:
    side = int((nbytes / 4) ** 0.5)
    to, source = np.zeros((side, side), "f4"), np.ones((side, side), "f4")
    return of_numpy(to, source.T)


def casting(nbytes: int) -> dict[str, Run]:
    return of_numpy(np.zeros(nbytes // 8), np.ones(nbytes // 8, "f4"))


def of_numpy(to: np.ndarray, source: np.ndarray) -> dict[str, Run]:
    return {
        "bfc.copy": lambda: bfc.copy(to, source),
        "copyto": lambda: np.copyto(to, source, casting="unsafe"),
    }


def seconds(run: Run, number: int) -> float:
    start = time.perf_counter()
    for _ in range(number):
        run()
    return (time.perf_counter() - start) / number


def measure(runs: dict[str, Run]) -> dict[str, list[float]]:
    """Seconds a call. The runs take turns, so that other load on the machine affects all of
    them."""
    number = 1
    while seconds(runs["bfc.copy"], number) * number < LEAST_SECONDS:
        number *= 2
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(ROUNDS):
        for name in names if turn % 2 else names[::-1]:
            times[name].append(seconds(runs[name], number))
    return times


def table(title: str, make: Callable[[int], dict[str, Run]], sizes: list[int]) -> None:
    say(f"\n{title}: us a copy, median (least); ratio of medians, ours to theirs")
    for nbytes in sizes:
        times = measure(make(nbytes))
        ours = statistics.median(times["bfc.copy"])
        cells = []
        for name, all_times in times.items():
            middle = statistics.median(all_times)
            ratio = "" if name == "bfc.copy" else f"  {ours / middle:5.2f}"
            cells.append(f"{name} {middle * 1e6:10.2f} ({min(all_times) * 1e6:10.2f}){ratio}")
        say(f"{format_bytes(nbytes):>8}  " + "   ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--largest", type=int, default=256, help="MiB")
    largest = parser.parse_args().largest * MIB
    sizes = [nbytes for nbytes in SIZES if nbytes <= largest]
    say(machine())
    table("contiguous, one dtype", contiguous, sizes)
    table("a transposed matrix", strided, sizes)
    table("float32 to float64", casting, sizes)


if __name__ == "__main__":
    main()
