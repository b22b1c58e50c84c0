"""Threads of C++ that allocate through the table of C functions: `python -m bench.threads`. And
threads of Python: `python -m bench.threads --pythons PYTHON PYTHON`.

A step frees the oldest of sixteen blocks and allocates one, so that nearly all are hits. One thread
alone, two on one allocator, and two on an allocator each (two devices of one table) take turns.
`together` is how many pairs all threads finish in the time in which one thread alone finishes one,
by the least times: 2 for two threads that do not disturb each other. It needs a C++ compiler, and
two processors.

Threads of Python do the same with raw blocks, or make and drop a Buffer. The interpreters, in each
of which this checkout is built, take turns, in processes of their own. Spans are of a few
milliseconds, and the cases take turns at them, so that the least times are of moments in which no
other program had a processor. `no bfc` is arithmetic with ints of each thread: what this machine
and this interpreter give two threads that share nothing. Where other programs never leave both
processors alone, `processor` says as much by the threads' own times on them: how many pairs all
threads finish in the time on processors in which one alone finishes one. What two threads do to
each other's caches, and how long they spin for a lock, is in it; what they sleep is not.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bfc
from bench.histories import POLICIES
from bench.report import machine, say, spread
from bfc.compiling import needed
from bfc.integrations.torch_backend import capsule

HERE = Path(__file__).resolve().parents[1]
TURNS, PAIRS, NBYTES = 15, 400_000, 1000
PYTHON_PAIRS, REPEATS, HELD = 20_000, 30, 16
CASES = {
    "1 thread, first device": [0],
    "1 thread, second device": [1],
    "2 threads, one allocator": [0, 0],
    "2 threads, two allocators": [0, 1],
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pythons", nargs="+", default=[], help="interpreters, for threads of Python"
    )
    parser.add_argument("--turns", type=int, default=TURNS, help="of each case (default: 15)")
    parser.add_argument("--one-turn", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.one_turn:
        print(json.dumps(turn_in_python()))
        return
    say(machine())
    if parsed.pythons:
        compare_pythons(parsed.pythons, parsed.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        play = compiled(Path(folder))
        for policy, make in POLICIES.items():
            pools = [make(bfc.HostSubAllocator("64 MiB")) for _ in range(2)]
            kept = capsule(pools)
            table = pointer_to(kept)
            found: dict[str, list[float]] = {case: [] for case in CASES}
            for _ in range(parsed.turns):
                for case, devices in CASES.items():
                    found[case].append(statistics.mean(run(play, table, devices)))
            report(f"{policy}, ns a pair", found)
            for pool in pools:
                pool.close()


def report(
    title: str, found: dict[str, list[float]], on_processors: dict[str, float] | None = None
) -> None:
    columns = "  together" + ("  processor" if on_processors else "")
    say(f"{title:52}{'min / median / max':>24}{columns}")
    first, *_ = CASES
    for case, devices in CASES.items():
        cells = f"{len(devices) * min(found[first]) / min(found[case]):10.2f}"
        if on_processors:
            cells += f"{len(devices) * on_processors[first] / on_processors[case]:11.2f}"
        say(f"{case:52}{spread(found[case]):>24}{cells}")


# -- threads of Python -----------------------------------------------------------------------------


def compare_pythons(pythons: list[str], turns: int) -> None:
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    on_processors: dict[tuple[str, str], dict[str, float]] = {}
    for _ in range(turns):
        for python in pythons:
            command = [python, "-m", "bench.threads", "--one-turn"]
            run = subprocess.run(command, check=True, cwd=HERE, capture_output=True, text=True)
            for row, times in json.loads(run.stdout).items():
                cases = found.setdefault((python, row), {case: [] for case in CASES})
                least = on_processors.setdefault((python, row), dict.fromkeys(CASES, math.inf))
                for case, (ns, ns_on_processors) in times.items():
                    cases[case].append(ns)
                    least[case] = min(least[case], ns_on_processors)
    for (python, row), cases in found.items():
        report(f"{row}, {python}, ns a pair", cases, on_processors[python, row])


def turn_in_python() -> dict[str, dict[str, tuple[float, float]]]:
    """The least nanoseconds of a pair in this interpreter, by what was timed and by case: by the
    clock, and on processors."""
    named = "GIL" if getattr(sys, "_is_gil_enabled", lambda: True)() else "no GIL"
    found = {f"no bfc, {named}": least_by_case(arithmetic, [None, None])}
    for policy, make in POLICIES.items():
        for kind, work in ("raw", raw_pairs), ("Buffers", buffers):
            pools = [make(bfc.HostSubAllocator("64 MiB")) for _ in range(2)]
            found[f"{policy}, {kind}, {named}"] = least_by_case(work, pools)
            for pool in pools:
                pool.close()
    return found


def least_by_case(work: Callable[[Any], None], pools: list[Any]) -> dict[str, tuple[float, float]]:
    least = dict.fromkeys(CASES, (math.inf, math.inf))
    for _ in range(REPEATS):
        for case, devices in CASES.items():
            wall, on_processors = in_threads(work, [pools[device] for device in devices])
            least[case] = min(least[case][0], wall), min(least[case][1], on_processors)
    return least


def in_threads(work: Callable[[Any], None], pools: list[Any]) -> tuple[float, float]:
    """The nanoseconds of a pair of each thread. By the clock it is from the first one's start to
    the last one's end: with the GIL one thread may be done before another begins. On processors it
    is the mean over the threads."""
    start = threading.Barrier(len(pools))
    spans: list[tuple[int, int]] = []
    on_processors: list[int] = []

    def run(pool: Any) -> None:
        start.wait()
        begun, used = time.perf_counter_ns(), time.thread_time_ns()
        work(pool)
        on_processors.append(time.thread_time_ns() - used)
        spans.append((begun, time.perf_counter_ns()))

    threads = [threading.Thread(target=run, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall = max(ended for _, ended in spans) - min(begun for begun, _ in spans)
    return wall / PYTHON_PAIRS, statistics.mean(on_processors) / PYTHON_PAIRS


def raw_pairs(pool: bfc.Allocator) -> None:
    allocate, free, nbytes = pool.allocate_raw, pool.deallocate_raw, own_int(NBYTES)
    held = [allocate(nbytes) for _ in range(HELD)]
    for _ in range(PYTHON_PAIRS // HELD):
        for i in range(HELD):
            free(held[i])
            held[i] = allocate(nbytes)
    for ptr in held:
        free(ptr)


def buffers(pool: bfc.Allocator) -> None:
    allocate, nbytes = pool.allocate, own_int(NBYTES)
    for _ in range(PYTHON_PAIRS):
        allocate(nbytes)


def arithmetic(nothing: None) -> None:
    held = [own_int(NBYTES + i) for i in range(HELD)]
    factor, modulus = own_int(12_345_678), own_int(1_000_003)
    for _ in range(PYTHON_PAIRS // HELD):
        for i in range(HELD):
            held[i] = held[i] * factor % modulus


def own_int(number: int) -> int:
    """An int of this thread: threads that count references to the same one wait for each other."""
    return int(str(number))


# -- threads of C++ --------------------------------------------------------------------------------


def compiled(folder: Path) -> ctypes.CDLL:
    source = Path(__file__).with_suffix(".cpp")
    command = needed("CXX", "c++", "C++", "this benchmark")
    library = folder / "threads.so"
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-pthread", f"-I{bfc.get_include()}"]
    subprocess.run([*command, *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer_to(table: object) -> ctypes.c_void_p:
    """The `const bfc_allocator *` in a capsule."""
    ask = ctypes.pythonapi.PyCapsule_GetPointer
    ask.restype, ask.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    return ctypes.c_void_p(ask(table, b"bfc.allocator"))


def run(play: ctypes.CDLL, table: ctypes.c_void_p, devices: list[int]) -> list[float]:
    """The nanoseconds of a pair, by thread."""
    threads = len(devices)
    numbers = (ctypes.c_int * threads)(*devices)
    ns = (ctypes.c_double * threads)()
    play.bench_threads(table, numbers, threads, ctypes.c_int64(PAIRS), ctypes.c_size_t(NBYTES), ns)
    if min(ns) < 0:
        raise SystemExit("a request was refused")
    return list(ns)


if __name__ == "__main__":
    main()
