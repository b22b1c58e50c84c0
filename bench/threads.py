"""Threads of C++ that allocate through the table of C functions: `python -m bench.threads`.

A step frees the oldest of sixteen blocks and allocates one, so that nearly all are hits. One thread
alone, two on one allocator, and two on an allocator each (two devices of one table) take turns.
`together` is how many pairs all threads finish in the time in which one thread alone finishes one,
by the least times: 2 for two threads that do not disturb each other. It needs a C++ compiler, and
two processors.
"""

from __future__ import annotations

import ctypes
import statistics
import subprocess
import tempfile
from pathlib import Path

import bfc
from bench.histories import POLICIES
from bench.report import machine, say, spread
from bfc.compiling import needed
from bfc.integrations.torch_backend import capsule

TURNS, PAIRS, NBYTES = 15, 400_000, 1000
CASES = {
    "1 thread, first device": [0],
    "1 thread, second device": [1],
    "2 threads, one allocator": [0, 0],
    "2 threads, two allocators": [0, 1],
}


def main() -> None:
    say(machine())
    with tempfile.TemporaryDirectory() as folder:
        play = compiled(Path(folder))
        for policy, make in POLICIES.items():
            pools = [make(bfc.HostSubAllocator("64 MiB")) for _ in range(2)]
            kept = capsule(pools)
            table = pointer_to(kept)
            found: dict[str, list[float]] = {case: [] for case in CASES}
            for _ in range(TURNS):
                for case, devices in CASES.items():
                    found[case].append(statistics.mean(run(play, table, devices)))
            say(f"{policy + ', ns a pair':28}{'min / median / max':>24}  together")
            alone = min(found["1 thread, first device"])
            for case, devices in CASES.items():
                together = len(devices) * alone / min(found[case])
                say(f"{case:28}{spread(found[case]):>24}{together:10.2f}")
            for pool in pools:
                pool.close()


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
