"""How much faster a sweep of 2,000 replays is on two workers of Dask than on one:
`python -m bench.dask_sweep`, four minutes. It needs distributed, and two cores that are free.

Each replay is of one trace, under one of the settings that `bfc advise --thorough` tries, on a
device of one of several sizes. A pass times one worker and then both, and the ratio is of one pass.
A worker is a process with one thread on this machine. Sending the trace and the batches is part of
the time. Both must give the same outcomes.

The goal is 1.7. The load is that of the machine before a pass: without other work it is at most 2.
Where the machine is busy, two workers get no more of it than one, and the ratio of wall times says
nothing. "CPU" then helps: the CPU seconds of one worker over those of the busier of two, which is
what the ratio comes to where the cores are free, but for the client and the scheduler. Their CPU
seconds stand beside it: they and the workers share the cores.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import bfc
from bench.histories import TRACES
from bench.report import machine, say, spread
from bfc_tools.study import candidates
from bfc_tools.study.candidates import Outcome
from bfc_tools.study.workers import Replays, Task

REPLAYS, PASSES, GOAL = 2_000, 3, 1.7
TRACE = "gpt2m_adam"
#: Devices, as parts of what is live at most.
PARTS = (1.03, 1.1, 1.3, 2.0)


def tasks(trace: bfc.Trace, count: int) -> list[Task]:
    """Different replays, `count` of them."""
    live = candidates.replay(trace, candidates.Point(candidates.CACHING, ""), 1 << 50).peak_live
    sizes = [int(live * part) for part in PARTS]
    return list(itertools.islice(itertools.product(candidates.grid(), sizes), count))


@dataclass(frozen=True)
class Pass:
    """Seconds on one worker and on two: by the clock, and of their processors; the processor's
    seconds of this process, which has the client and the scheduler, in the second; the load."""

    alone: float
    together: float
    cpu_alone: float
    cpu_busier: float
    cpu_here: float
    load: float

    @property
    def ratio(self) -> float:
        return self.alone / self.together

    @property
    def cpu_ratio(self) -> float:
        return self.cpu_alone / self.cpu_busier


@contextmanager
def two_workers() -> Iterator[tuple[Any, Executor, Executor]]:
    """A client, and executors over one worker and over two."""
    from distributed import Client, LocalCluster

    options: dict[str, Any] = {"n_workers": 2, "threads_per_worker": 1, "processes": True}
    with (
        LocalCluster(
            host="127.0.0.1", dashboard_address="127.0.0.1:0", silence_logs=logging.ERROR, **options
        ) as cluster,
        Client(cluster, set_as_default=False) as client,
    ):
        first = min(client.nthreads())
        yield client, client.get_executor(workers=[first]), client.get_executor()


def timed(
    client: Any, trace: bfc.Trace, executor: Executor, work: list[Task]
) -> tuple[float, float, list[Outcome]]:
    """The seconds, those of the busiest worker's processor, and what came of it."""
    before: dict[str, float] = client.run(time.process_time)
    begun = time.perf_counter()
    with Replays(trace, executor) as replays:
        outcomes = replays.run(work)
    seconds = time.perf_counter() - begun
    after: dict[str, float] = client.run(time.process_time)
    return seconds, max(after[worker] - before[worker] for worker in before), outcomes


def measure(trace: bfc.Trace, count: int, passes: int) -> Iterator[Pass]:
    work = tasks(trace, count)
    with two_workers() as (client, one, two):
        for executor in (one, two):  # imports, and a first replay in each process
            timed(client, trace, executor, work[:16])
        for _ in range(passes):
            load = os.getloadavg()[0]
            alone, cpu_alone, outcomes = timed(client, trace, one, work)
            here = time.process_time()
            together, cpu_busier, same = timed(client, trace, two, work)
            here = time.process_time() - here
            if outcomes != same:
                raise RuntimeError("two workers have given other outcomes than one")
            yield Pass(alone, together, cpu_alone, cpu_busier, here, load)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", default=TRACE, help=f"of bench/traces (default: {TRACE})")
    parser.add_argument("--replays", type=int, default=REPLAYS)
    parser.add_argument("--passes", type=int, default=PASSES)
    parsed = parser.parse_args(arguments)
    trace = bfc.Trace.load(TRACES / f"{parsed.trace}.npz")
    say(machine())
    say(f"{parsed.replays} replays of {parsed.trace}, {len(trace)} events")
    say("one worker, s  two, s   ratio    CPU  client, CPU s  load")
    rows = []
    for row in measure(trace, parsed.replays, parsed.passes):
        rows.append(row)
        say(
            f"{row.alone:13.1f}  {row.together:6.1f}  {row.ratio:6.2f} {row.cpu_ratio:6.2f}"
            f"  {row.cpu_here:13.2f}  {row.load:4.1f}"
        )
    say(f"ratio {spread([row.ratio for row in rows])} (min / median / max), goal {GOAL}")
    say(f"CPU   {spread([row.cpu_ratio for row in rows])}")


if __name__ == "__main__":
    main()
