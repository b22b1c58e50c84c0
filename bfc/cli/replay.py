"""`bfc replay TRACE...`: what an allocator makes of recorded runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import bfc
from bfc.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from tqdm import tqdm

LONG_TRACE = 1_000_000
HEADINGS = ("trace", "events", "live", "in use", "reserved", "fragment.", "ns/event", "refused")

EPILOG = """\
columns: live is the peak of what was asked for, in use the peak of the chunks handed out for it,
reserved the peak of the regions taken from the device; fragment. is the share of the free bytes
outside the largest free block at the end; ns/event is the fastest pass. exit code: 0 all fitted,
1 an allocation was refused, 2 a wrong call or file.
"""


@dataclass
class Row:
    """What one trace came to. Sizes are bytes."""

    trace: str
    events: int
    peak_bytes_live: int
    peak_bytes_in_use: int
    peak_bytes_reserved: int
    fragmentation: float | None
    ns_per_event: float
    refused: int

    def cells(self) -> tuple[str, ...]:
        return (
            self.trace,
            str(self.events),
            format_bytes(self.peak_bytes_live),
            format_bytes(self.peak_bytes_in_use),
            format_bytes(self.peak_bytes_reserved),
            "-" if self.fragmentation is None else f"{self.fragmentation:.1%}",
            f"{self.ns_per_event:.1f}",
            str(self.refused),
        )


def add_to(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "replay",
        help="replay recorded allocations and show how they are laid out",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", type=Path, help="an .npz trace, or a folder of them")
    add(
        "--device",
        default="simulated:80GiB",
        help="simulated:SIZE, or host[:SIZE] (default: simulated:80GiB)",
    )
    add(
        "--memory-limit",
        metavar="LIMIT",
        help="bytes, such as 40GiB, or a fraction of the device, such as 0.9",
    )
    add(
        "--allow-growth",
        action="store_true",
        help="take regions as they are needed, each twice the last",
    )
    add("--strict", action="store_true", help="refuse whatever TensorFlow 2.21 refuses")
    add(
        "--passes",
        type=_positive,
        default=3,
        help="replays of each trace on one allocator (default: 3)",
    )
    add("--json", action="store_true", help="print JSON instead of a table")
    add("--no-picture", action="store_true", help="leave the picture of the fullest moment out")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> bool:
    """Replays every trace. True where all of it fitted."""
    make_allocator = _allocator_maker(arguments)
    results: list[tuple[Row, bfc.Snapshot | None]] = []
    for name, path in _named(list(_files(arguments.traces))):
        trace = bfc.Trace.load(path)
        row = _replay(name, trace, make_allocator, arguments.passes)
        picture = None if arguments.no_picture else _at_its_fullest(trace, make_allocator)
        results.append((row, picture))
    if arguments.json:
        traces = [_as_json(row, picture) for row, picture in results]
        print(json.dumps({"device": arguments.device, "traces": traces}, indent=2))
    else:
        for row, picture in results:
            if picture is not None:
                print(f"{row.trace}, when most is live\n{picture}\n")
        _print_table([HEADINGS, *(row.cells() for row, _ in results)])
    return not any(row.refused for row, _ in results)


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            inside = sorted(path.glob("*.npz"))
            if not inside:
                raise ValueError(f"{path}: no .npz file in this folder")
            yield from inside
        else:
            yield path


def _named(paths: list[Path]) -> list[tuple[str, Path]]:
    """Each path behind its name: the stem, or all of it where two have one stem."""
    stems = Counter(path.stem for path in paths)
    return [(path.stem if stems[path.stem] == 1 else str(path), path) for path in paths]


def _allocator_maker(arguments: argparse.Namespace) -> Callable[[], bfc.BFCAllocator]:
    kind, _, size = arguments.device.partition(":")
    if kind not in ("simulated", "host") or (kind == "simulated" and not size):
        raise ValueError(f"--device {arguments.device}: it is simulated:SIZE or host[:SIZE]")
    capacity = parse_bytes(size) if size else None
    limit = arguments.memory_limit
    if limit is not None and "." in limit and limit.replace(".", "", 1).isdigit():
        limit = float(limit)

    def make() -> bfc.BFCAllocator:
        device: bfc.SubAllocator
        if kind == "host":
            device = bfc.HostSubAllocator(capacity)
        else:
            device = bfc.SimulatedSubAllocator(size)
        return bfc.BFCAllocator(
            device, memory_limit=limit, allow_growth=arguments.allow_growth, strict=arguments.strict
        )

    make().close()  # what is wrong with the options is said before anything is read
    return make


def _replay(
    name: str, trace: bfc.Trace, make_allocator: Callable[[], bfc.BFCAllocator], passes: int
) -> Row:
    closed = trace.closed()
    with _progress(name, len(trace) + len(closed) * passes) as progress:
        with make_allocator() as allocator:
            first = trace.replay(allocator, progress=progress())
            fragmentation = allocator.stats().fragmentation
        with make_allocator() as allocator:
            times = [
                closed.replay(allocator, progress=progress()).ns_per_event for _ in range(passes)
            ]
    return Row(
        name,
        len(trace),
        first.peak_bytes_live,
        first.peak_bytes_in_use,
        first.peak_bytes_reserved,
        None if math.isnan(fragmentation) else fragmentation,
        min(times),
        first.failed,
    )


def _at_its_fullest(
    trace: bfc.Trace, make_allocator: Callable[[], bfc.BFCAllocator]
) -> bfc.Snapshot:
    with make_allocator() as allocator:
        trace[: trace.fullest_event() + 1].replay(allocator)
        return allocator.snapshot()


def _bar(name: str, events: int) -> tqdm[NoReturn] | None:
    """A bar for long work on a terminal, where tqdm is installed."""
    if events < LONG_TRACE or not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=events, desc=name, unit="ev", unit_scale=True, leave=False)


@contextlib.contextmanager
def _progress(name: str, events: int) -> Iterator[Callable[[], Callable[[int], None] | None]]:
    """A function to call once a replay: it returns what that replay calls to move the bar, or None
    where there is no bar."""
    bar = _bar(name, events)
    if bar is None:
        yield lambda: None
        return

    def start() -> Callable[[int], None]:
        last = 0

        def report(done: int) -> None:
            nonlocal last
            bar.update(done - last)
            last = done

        return report

    with bar:
        yield start


def _as_json(row: Row, picture: bfc.Snapshot | None) -> dict[str, Any]:
    if picture is None:
        return asdict(row)
    return {**asdict(row), "occupancy_when_most_is_live": picture.occupancy()}


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        print("  ".join(cells).rstrip())


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return value
