"""What a report of a long run costs, and how large it is: `python -m bench.reports`.

Random churn around 20,000 and 100,000 live blocks, with times, four streams, 200 owners and 20,000
stacks, as 5 million events; each block's owner and stack are drawn at random, which is the worst
for the size of the file. A history of each is written as a page in a process of its own: the
seconds of `bfc.report` without reading the trace, the most resident memory of that process beside
what the trace itself takes, and the bytes of the file. `--events` makes shorter ones.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import bfc
from bench.histories import churn
from bench.report import machine, resident_bytes, say

LIVE = (20_000, 100_000)
EVENTS = 5_000_000
OWNERS, FRAMES, STACKS, STREAMS = 200, 5_000, 20_000, 4
#: What the page may have, in bytes.
MOST = 5_000_000


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the traces and the pages")
    parser.add_argument("--one", type=Path, nargs=2, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if parsed.one:
        say(one(*parsed.one))
        return
    say(machine())
    say(f"{'live':>8}{'events':>10}{'seconds':>9}{'more MiB':>10}{'bytes of the file':>19}")
    with tempfile.TemporaryDirectory() as folder:
        for live in LIVE:
            row(live, parsed.events, parsed.keep or Path(folder))


def row(live: int, events: int, folder: Path) -> None:
    path, page = folder / f"churn-{live}.npz", folder / f"churn-{live}.html"
    trace = long_run(min(live, events // 4), events)
    trace.save(path)
    command = [sys.executable, "-m", "bench.reports", "--one", str(path), str(page)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    seconds, more = float(found[0]), int(found[1])
    size = page.stat().st_size
    verdict = "" if size < MOST else "  TOO LARGE"
    say(f"{live:8}{len(trace):10}{seconds:9.1f}{more / 2**20:10.0f}{size:19,}{verdict}")


def one(path: Path, page: Path) -> str:
    """Writes a page: seconds, and bytes of memory beside the trace's."""
    trace = bfc.Trace.load(path)
    before = resident_bytes()
    forget_peak()
    begun = time.perf_counter()
    bfc.report(trace, page, title=path.stem)
    return f"{time.perf_counter() - begun:.2f} {most_resident_bytes() - before}"


def forget_peak() -> None:
    """Lets the kernel measure the most resident memory anew, where it can."""
    Path("/proc/self/clear_refs").write_text("5")


def most_resident_bytes() -> int:
    """The most resident memory since then."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def long_run(live: int, events: int, seed: int = 0) -> bfc.Trace:
    """Churn with times, streams, owners and stacks."""
    rng = np.random.default_rng(seed)
    base = churn(live, events - live)
    count = len(base)
    parents = rng.integers(np.maximum(np.arange(STACKS) - 400, 0), np.maximum(np.arange(STACKS), 1))
    stacks = np.stack([parents, rng.integers(0, FRAMES, STACKS)], axis=1)
    stacks[0] = 0
    return bfc.Trace(
        base.op,
        base.id,
        base.size,
        rng.integers(0, STREAMS, count),
        time_us=1_700_000_000_000_000 + np.cumsum(rng.integers(1, 40, count)),
        owner=rng.integers(0, OWNERS, count),
        stack=rng.integers(0, STACKS, count),
        owners=["", *(f"layer {at}, attention" for at in range(1, OWNERS))],
        frames=[(f"/home/me/model/part_{at % 90}.py", at, f"forward_{at}") for at in range(FRAMES)],
        stacks=stacks,
    )


if __name__ == "__main__":
    main()
