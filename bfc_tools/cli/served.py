"""What a process below `bfc run` says at its end: of each pool three lines, and its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bfc
from bfc.errors import TraceError
from bfc.pytorch.rules import NEWEST
from bfc.units import format_bytes
from bfc_tools.browser.report import shown, write
from bfc_tools.cli.streams import tell
from bfc_tools.study.counting import CountedPages
from bfc_tools.study.recorded_settings import read

#: What names the processes of one program, in the order in which it is looked for.
RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
#: The most entries of a history: 72 MB. Of a longer one the end is kept.
MOST = 1_000_000


def name_of_process(first: str | None, variables: Mapping[str, str], pid: int) -> str:
    """What tells this process from others of the program; empty for the one that it began with,
    whose number is `first`."""
    rank = next((variables[name] for name in RANKS if variables.get(name)), None)
    if rank is not None:
        return f"rank{rank}"
    return "" if first in (None, str(pid)) else str(pid)


def summary(pool: bfc.CachingAllocator, settings: str) -> Iterator[str]:
    """Three lines about a pool that recorded a history, over a source that counts: what it took,
    what PyTorch's own allocator would have taken with these settings, and the driver's calls."""
    source: Any = pool.sub_allocator
    calls = source.calls_by_kind.total()
    try:
        trace = bfc.Trace.from_snapshot(pool.snapshot())
    except TraceError as error:
        yield f"nothing is known of its peaks: {error}"
        return
    version = trace.torch or NEWEST
    device = CountedPages(pool.memory_limit)
    with bfc.CachingAllocator(device, settings=settings, torch=version) as own:
        replay = trace.replay(own)
        would = device.calls_by_kind.total()
    reserved = read(trace).peak_reserved or pool.stats().peak_bytes_reserved
    live = replay.peak_bytes_live
    yield f"{format_bytes(live)} live at most, {format_bytes(reserved)} reserved at most"
    refused = f", and refused {replay.failed} of them" if replay.failed else ""
    last = f" (its last {len(trace)})" if len(pool.history()) >= MOST else ""
    yield (
        f"PyTorch's own allocator would have reserved {format_bytes(replay.peak_bytes_reserved)} "
        f"for the same {len(trace)} allocations and frees{last}{refused}"
    )
    stats = pool.plan_stats()
    if "agreement" in stats:
        yield f"{stats['agreement']:.0%} of the requests came as planned"
    yield f"{calls} calls of the driver for memory; PyTorch's own would have made {would}"


def is_of_another_program(pool: bfc.CachingAllocator) -> bool:
    """Whether a plan is served, and no request came as it has it."""
    stats = pool.plan_stats()
    return stats.get("hits") == 0 and stats["side"] > 0


def say(
    pools: Mapping[int, bfc.CachingAllocator],
    settings: str,
    process: str,
    *,
    with_summary: bool,
    report: str | None,
    plan: str | None = None,
) -> None:
    """Prints the lines, and writes the pages. What goes wrong here is said, and raised never: the
    program's exit code is its own."""
    for device, pool in sorted(pools.items()):
        where = f"{process} cuda:{device}".strip()
        try:
            if with_summary:
                for line in summary(pool, settings):
                    tell(f"bfc: {where}: {line}")
            if is_of_another_program(pool):
                tell(f"bfc: {where}: no request came as {plan} has it: is it of another program?")
            if report is not None:
                path = _page(Path(report), process, device if len(pools) > 1 else None)
                data = shown(pool, where)
                write(data, path)
                for it in data["ran_out"]:
                    tell(f"bfc: {where}: {it['sentence']}")
                tell(f"bfc: {where}: {path}")
        except Exception as error:
            tell(f"bfc: {where}: {type(error).__name__}: {error}")


def _page(path: Path, process: str, device: int | None) -> Path:
    """A file of its own for each process and device."""
    parts = [path.stem, *filter(None, [process]), *([] if device is None else [f"cuda{device}"])]
    return path.with_name("-".join(parts) + (path.suffix or ".html"))
