"""What the benchmarks replay: the recorded traces, and random churn around a number of live
blocks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import bfc

TRACES = Path(__file__).with_name("traces")
#: The policies that a benchmark measures, each over a sub-allocator.
Maker = Callable[[bfc.SubAllocator], bfc.Allocator]
POLICIES: dict[str, Maker] = {"bfc": bfc.BFCAllocator, "caching": bfc.CachingAllocator}
CHURN_LIVE = (200, 2_000, 20_000, 200_000)


def traces() -> Iterator[tuple[str, bfc.Trace]]:
    """The recorded traces, each closed by frees so that it can be replayed again."""
    for path in sorted(TRACES.glob("*.npz")):
        yield path.stem, bfc.Trace.load(path).closed()


def chosen(
    listed: dict[str, bfc.Trace], description: str | None, arguments: list[str] | None
) -> dict[str, bfc.Trace]:
    """Those of the listed traces that the command line names after `--traces`, in its order; all,
    if it names none."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--traces", nargs="+", metavar="NAME", help="these traces (default: all)")
    names = parser.parse_args(arguments).traces or listed
    unknown = [name for name in names if name not in listed]
    if unknown:
        parser.error(f"there is no trace {unknown[0]!r}; there are {', '.join(listed)}")
    return {name: listed[name] for name in names}


def churn(
    live: int, events: int, *, smallest: int = 256, largest: int = 1 << 20, seed: int = 0
) -> bfc.Trace:
    """`live` allocations, then `events` events that free a random one or make a new one, about as
    often.

    Sizes are log-uniform from `smallest` to `largest`.
    """
    rng = np.random.default_rng(seed)
    total = live + events
    sizes = np.exp(rng.uniform(np.log(smallest), np.log(largest), total)).astype(np.uint64).tolist()
    coin, pick = rng.random(total).tolist(), rng.random(total).tolist()
    op, ident, size = [], [], []
    alive: list[int] = []
    for i in range(total):
        grows = 0.5 + 0.25 * (live - len(alive)) / live
        if i < live or coin[i] < grows:
            op.append(0)
            ident.append(i)
            size.append(sizes[i])
            alive.append(i)
        else:
            k = int(pick[i] * len(alive))
            alive[k], alive[-1] = alive[-1], alive[k]
            op.append(1)
            ident.append(alive.pop())
            size.append(0)
    return bfc.Trace(op, ident, size)


def churns() -> Iterator[tuple[str, bfc.Trace]]:
    for live in CHURN_LIVE:
        yield f"churn {live}", churn(live, max(200_000, 3 * live)).closed()
