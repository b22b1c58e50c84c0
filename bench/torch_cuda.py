"""What an allocation and its free cost PyTorch with its own allocator and with ours in its place:
`python -m bench.torch_cuda`, about a minute. It needs a build of PyTorch for CUDA, such as that of
`make test-torch-cuda`.

One process for each allocator, all alive at once; one of them works at a time, in rounds of some
milliseconds that take turns, so that what slows the machine slows all of them. Printed is the
time of each round beside that of PyTorch's own round just before: the minimum, the median and the
maximum of the ratios, with the nanoseconds of a call. `--emulated` runs on the emulated driver,
whose calls cost less than a GPU's; a hit makes none.

`--traces` drives the nine recorded histories as tensors, and prints what is reserved for what is
live, beside a replay.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bfc
from bench.report import machine, say
from bfc.trace.trace import ALLOCATE, FREE

ROOT = Path(__file__).parents[1]
CALLS, MIB = 500, 1 << 20
OURS = {"caching": "caching policy", "stitch": "stitching"}
CASES = {
    "tensor": "torch.empty and del",
    "raw": "caching_allocator_alloc and _delete",
    "joined": "a hit of 24 MiB; where we stitch, in pages that lie apart",
    "stream": "torch.empty, record_stream and del",
}


def install(kind: str) -> None:
    if kind == "own":
        return
    stitch = kind == "stitch"

    def make(device: int) -> bfc.CachingAllocator:
        source = bfc.CUDASubAllocator(device)
        return bfc.CachingAllocator(
            source, memory_limit="64 MiB" if stitch else None, stitch=stitch
        )

    bfc.integrations.torch.install(make)


def calls_of(torch: Any, kind: str) -> dict[str, Callable[[], object]]:
    def empty(nbytes: int) -> Any:
        return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

    other = torch.cuda.Stream()
    allocate = torch._C._cuda_cudaCachingAllocator_raw_alloc
    delete = torch._C._cuda_cudaCachingAllocator_raw_delete
    blocks = [empty(4 * MIB) for _ in range(14)]  # what is left of 64 MiB is not enough
    del blocks[::2]
    empty(24 * MIB)
    reserved = torch.cuda.memory_reserved()
    assert (reserved <= 64 * MIB) == (kind == "stitch"), reserved
    return {
        "tensor": lambda: empty(1000),
        "raw": lambda: delete(allocate(1000, 0)),
        "joined": lambda: empty(24 * MIB),
        "stream": lambda: empty(1000).record_stream(other),
        "keep": lambda: blocks,
    }


def work(kind: str, emulated: bool) -> None:
    """The process of an allocator: reads the name of a case, makes a round of it, prints its ns."""
    if emulated:
        from bfc.testing import cuda_emulator

        cuda_emulator.load().reset(devices=1)
    import torch

    install(kind)
    calls = calls_of(torch, kind)
    print("ready", flush=True)
    for line in sys.stdin:
        call, count = calls[line.strip()], range(CALLS)
        began = time.thread_time_ns()
        for _ in count:
            call()
        print((time.thread_time_ns() - began) / CALLS, flush=True)
    os._exit(0)


def drive(torch: Any, trace: bfc.Trace) -> int:
    """Makes a tensor for each request, on its stream, and lets go of it where it was freed. Returns
    the most that was reserved."""
    default = torch.cuda.default_stream()
    streams: dict[int, Any] = {0: default}
    live: dict[int, Any] = {}
    now = 0
    torch.cuda.reset_peak_memory_stats()
    columns = (trace.op, trace.id, trace.size, trace.stream)
    for op, number, size, on in zip(*(column.tolist() for column in columns), strict=True):
        if op == FREE:
            live.pop(number, None)
        elif op == ALLOCATE:
            if on != now:
                if on not in streams:
                    streams[on] = torch.cuda.Stream()
                torch.cuda.set_stream(streams[on])
                now = on
            live[number] = torch.empty(size, dtype=torch.uint8, device="cuda")
    peak = int(torch.cuda.max_memory_reserved())
    live.clear()
    torch.cuda.synchronize()
    torch.cuda.set_stream(default)
    torch.cuda.empty_cache()
    return peak


def drive_traces(emulated: bool) -> None:
    """In this process, for good: bfc stitches, as under `bfc run`."""
    if emulated:
        from bfc.testing import cuda_emulator

        cuda_emulator.load().reset(devices=1, total=80 << 30)
    import torch

    bfc.integrations.torch.install()
    say(f"{'reserved for what is live':26}{'as tensors':>12}{'replayed':>12}{'bytes left':>12}")
    for path in sorted((ROOT / "bench" / "traces").glob("*.npz")):
        trace = bfc.Trace.load(path)
        peak, live = drive(torch, trace), trace.peak_bytes_live()
        left = torch.cuda.memory_reserved()
        pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("80 GiB"), stitch=True)
        trace.replay(pool)
        replayed = pool.stats().peak_pool_bytes
        say(f"{path.stem:26}{peak / live:12.4f}{replayed / live:12.4f}{left:12}")
    os._exit(0)


class Worker:
    def __init__(self, kind: str, environment: dict[str, str], emulated: bool) -> None:
        words = [sys.executable, "-W", "ignore", "-m", "bench.torch_cuda", "--work", kind]
        self.process = subprocess.Popen(
            [*words, *(["--emulated"] if emulated else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.ask()

    def ask(self, case: str = "") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if case:
            print(case, file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError("the process of an allocator has ended: what it said stands above")
        return answer

    def ns(self, case: str) -> float:
        return float(json.loads(self.ask(case)))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(workers: dict[str, Worker], rounds: int) -> None:
    row = "{:62}{:>8}{:>24}"
    say(row.format("in the time of PyTorch's own", "ns", "min / median / max"))
    for case, what in CASES.items():
        ns: dict[str, list[float]] = {kind: [] for kind in workers}
        for _ in range(rounds):
            for kind, worker in workers.items():
                ns[kind].append(worker.ns(case))
        say(row.format(what, f"{statistics.median(ns['own']):.0f}", "1"))
        for kind, name in OURS.items():
            ratios = [ours / own for ours, own in zip(ns[kind], ns["own"], strict=True)]
            low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
            figures = f"{low:.2f} / {middle:.2f} / {high:.2f}"
            say(row.format(f"    bfc, {name}", f"{statistics.median(ns[kind]):.0f}", figures))


def environment_of(emulated: bool) -> dict[str, str]:
    if not emulated:
        return dict(os.environ)
    sys.path.insert(0, str(ROOT / "tests" / "helpers"))
    runtime = importlib.import_module("torch_runtime")
    environment: dict[str, str] = runtime.environment(runtime.build())
    return environment


def run(rounds: int, emulated: bool) -> None:
    environment = environment_of(emulated)
    workers = {kind: Worker(kind, environment, emulated) for kind in ("own", *OURS)}
    try:
        compare(workers, rounds)
    finally:
        for worker in workers.values():
            worker.close()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.torch_cuda", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="of each case (200)")
    parser.add_argument("--emulated", action="store_true", help="on the emulated driver")
    parser.add_argument("--work", choices=("own", *OURS), help=argparse.SUPPRESS)
    parser.add_argument("--traces", action="store_true", help="recorded histories as tensors")
    parser.add_argument("--driving", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.work:
        work(given.work, given.emulated)
        return
    if given.driving:
        drive_traces(given.emulated)
        return
    say(machine())
    if given.traces:
        words = ["--driving", *(["--emulated"] if given.emulated else [])]
        environment = environment_of(given.emulated)
        command = [sys.executable, "-W", "ignore", "-m", "bench.torch_cuda", *words]
        subprocess.run(command, env=environment, cwd=ROOT, check=True)
    else:
        run(given.rounds, given.emulated)


if __name__ == "__main__":
    main()
