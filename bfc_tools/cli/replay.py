"""`bfc replay TRACE...`: what allocators make of recorded runs, policy beside policy."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bfc
from bfc.files import replacing
from bfc.pytorch.rules import NEWEST
from bfc.trace.timeline import pyplot_of
from bfc.units import format_bytes, in_columns
from bfc_tools.cli.policies import (
    default_policy,
    device_maker,
    is_default,
    is_pytorch,
    of_version,
    policies,
    tried,
    with_steps,
)
from bfc_tools.cli.runs import FILES, add_snapshot_device, add_torch, files, named, read_trace
from bfc_tools.cli.sizes import positive
from bfc_tools.cli.tables import Cells, add_formats, bar, show
from bfc_tools.study.counting import device_for
from bfc_tools.study.experiment import Row, Start, at_its_fullest, measure, over_time
from bfc_tools.study.figure import plot
from bfc_tools.study.file_formats import PICKLES, has_devices
from bfc_tools.study.torch_version import line_of

LONG_TRACE = 1_000_000
#: The most rows of each timeline in a figure.
SAMPLES = 1_000
HEADINGS = (
    "trace",
    "events",
    "live",
    "in use",
    "reserved",
    "regions",
    "calls",
    "fragment.",
    "ns/event",
    "refused",
)
#: The kinds of calls of a driver, in the order of their columns in CSV.
CALLS = ("alloc", "free", "reserve", "unreserve", "create", "release", "map", "access", "unmap")

HELP = "replay recorded allocations and show how they are laid out"
EPILOG = """\
policies: bfc is TensorFlow's. It takes its whole limit at once, or, with --allow-growth, regions
that double. bfc:virtual_memory maps memory page by page, and stitches free pages together where no
free chunk is large enough; bfc:virtual_memory,page_size=4MiB,headroom=0.05 has both its OPTIONS.
caching is PyTorch's, with SETTINGS as in PYTORCH_CUDA_ALLOC_CONF:
caching:max_split_size_mb:128,roundup_power2_divisions:4 or caching:expandable_segments:True.
caching:stitch is the same policy, which stitches where it would take more memory or refuse;
page_size and SETTINGS may follow: caching:stitch,page_size=4MiB,max_split_size_mb:128.
caching:plan=FILE and bfc:plan=FILE serve a plan that `bfc plan` wrote; SETTINGS, stitch or
virtual_memory may follow after a comma. Its steps begin where the trace has marks, or as `bfc plan`
finds them. No gate declines it.
MODULE:CLASS is a policy of your own, a bfc.study.PythonPolicy, in a module of this folder or one
that Python finds. Each --policy has a row for each trace.

columns: live is the most that was asked for and not freed; in use, the most in chunks handed out;
reserved, the most that was taken from the device; regions, how many regions were taken (each would
be a cudaMalloc on a GPU); calls, how many calls of the driver took memory or gave it back (with
expandable_segments:True, virtual_memory and stitch they create, map and unmap pieces of memory,
and each piece that is mapped counts); fragment., the share of the free bytes outside the largest
free block at the end, which is high if there are many regions; ns/event, the nanoseconds for each
allocation or free, in the fastest pass; refused, the allocations that did not fit. All but ns/event
are of one replay on a new allocator.

--csv prints the same columns in bytes, under the names that they have in --json, and the calls of
each kind; the pictures are left out.

exit code: 0 all fitted, 1 an allocation was refused, 2 a wrong call or file.
"""


def _cells(row: Row) -> tuple[str, ...]:
    """The cells of a row of the table."""
    return (
        row.trace,
        str(row.events),
        format_bytes(row.peak_bytes_live),
        format_bytes(row.peak_bytes_in_use),
        format_bytes(row.peak_bytes_reserved),
        str(row.regions_taken),
        str(row.driver_calls),
        "-" if row.fragmentation is None else f"{row.fragmentation:.1%}",
        f"{row.ns_per_event:.1f}",
        str(row.refused),
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", type=Path, help=FILES)
    add(
        "--policy",
        action="append",
        metavar="POLICY",
        help="bfc[:virtual_memory[,OPTIONS]] or caching[:[stitch[,page_size=SIZE],]SETTINGS], "
        "either with :plan=FILE, or MODULE:CLASS; several are shown side by side (default: "
        "caching, with the recorded settings, for what PyTorch recorded, caching with --torch, and "
        "bfc for other traces)",
    )
    add_options_of_allocators(add)
    add_snapshot_device(add)
    add(
        "--passes",
        type=positive,
        default=3,
        help="replays of each trace on one allocator (default: 3)",
    )
    add_formats(parser)
    add("--no-picture", action="store_true", help="do not draw the fullest moment")
    add(
        "--figure",
        metavar="FILE",
        type=Path,
        help="also draw what is live and reserved over time under each policy, of one TRACE: "
        ".png, .pdf or .svg (needs matplotlib)",
    )


def add_options_of_allocators(
    add: Callable[..., Any], device: str | None = "simulated:80GiB"
) -> None:
    """Adds the arguments that several commands share. Without `device`, a device that is large
    enough is made."""
    add(
        "--device",
        default=device,
        metavar="DEVICE",
        help="[simulated:]SIZE, such as 34GiB, host[:SIZE] or opencl[:INDEX][:SIZE] "
        f"(default: {device or '80 GiB, or four times the largest peak'})",
    )
    add(
        "--memory-limit",
        metavar="LIMIT",
        help="the most that each policy may take: bytes, such as 40GiB, or a fraction of the "
        "device, such as 0.9; instead of per_process_memory_fraction in the SETTINGS of caching",
    )
    add(
        "--allow-growth",
        action="store_true",
        help="policy bfc: take regions as they are needed, each twice as large as the last "
        "(caching always takes them as they are needed)",
    )
    add(
        "--strict",
        action="store_true",
        help="refuse whatever the original refuses, TensorFlow 2.21 or PyTorch "
        "(virtual_memory and stitch have no original)",
    )
    add_torch(add)


def run(arguments: argparse.Namespace) -> bool:
    """Replays every trace under every policy. Returns True if nothing was refused."""
    make_device = device_maker(arguments.device, arguments.policy)
    listed = tried(policies(arguments), make_device)
    paths = list(files(arguments.traces))
    if arguments.snapshot_device is not None and not any(map(has_devices, paths)):
        raise ValueError(
            f"--snapshot-device {arguments.snapshot_device}: it is an option for memory snapshots "
            f"of PyTorch ({', '.join(PICKLES)}), and no TRACE is one"
        )
    if arguments.figure is not None:
        _check_figure(arguments.figure, paths)
    results: list[tuple[str, Row, bfc.Snapshot | None]] = []
    remarks: list[str] = []
    versions: dict[str, str] = {}
    timelines: dict[str, bfc.Timeline] = {}
    for name, path in named(paths):
        trace = read_trace(path, arguments.snapshot_device, arguments.torch, frames=False)
        trace = with_steps(trace, listed)
        make = device_for(trace, make_device)
        why = ""
        if is_default(arguments):
            default, why = default_policy(trace, arguments)
            listed = policies(arguments, default)
        listed = of_version(listed, trace.torch or NEWEST)
        if any(map(is_pytorch, listed)):
            versions[name] = line_of(trace)
        if why:
            remarks.append(f"{name} was recorded by PyTorch: {why} (--policy takes others)")
        remarks += _of_pools(name, trace)
        for policy in listed:
            caption = name if arguments.policy is None else f"{name} under {policy.name}"
            row = measure(
                trace,
                policy,
                make,
                name=name,
                passes=arguments.passes,
                progress=functools.partial(_progress, caption),
            )
            wanted = not arguments.no_picture
            picture = at_its_fullest(trace, policy, make) if wanted else None
            results.append((caption, row, picture))
            if arguments.figure is not None:
                timelines[policy.name] = over_time(trace, policy, make, SAMPLES)
    if arguments.figure is not None:
        _draw(timelines, arguments.figure)
    traces = [_as_json(row, picture) for _, row, picture in results]
    show(
        arguments,
        text=lambda: "\n".join(
            _lines(results, _of_versions(versions), remarks, arguments.policy is not None)
        ),
        as_json=lambda: json.dumps(
            {"device": arguments.device, "torch": versions, "traces": traces}, indent=2
        ),
        rows=lambda: [_flat(row) for _, row, _ in results],
    )
    return not any(row.refused for _, row, _ in results)


def _check_figure(path: Path, paths: list[Path]) -> None:
    """Raises, before anything is replayed, what would be wrong with the figure."""
    pyplot_of().switch_backend("Agg")
    from matplotlib.backend_bases import FigureCanvasBase

    if len(paths) > 1:
        raise ValueError(f"--figure {path}: it shows one TRACE, and there are {len(paths)}")
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in known:
        raise ValueError(f"--figure {path}: its name ends in .png, .pdf, .svg or so")


def _draw(timelines: dict[str, bfc.Timeline], path: Path) -> None:
    figure: Any = plot(timelines).figure
    with replacing(path) as file:
        figure.savefig(file, format=path.suffix.lower().removeprefix("."), dpi=200)
    pyplot_of().close(figure)


@contextlib.contextmanager
def _progress(name: str, events: int) -> Iterator[Start]:
    """A function to call once a replay: it returns what that replay calls to move the bar, or None
    where there is no bar."""
    is_long = events >= LONG_TRACE
    shown = bar(total=events, desc=name, unit="ev", unit_scale=True) if is_long else None
    if shown is None:
        yield lambda: None
        return

    def start() -> Callable[[int], None]:
        last = 0

        def report(done: int) -> None:
            nonlocal last
            shown.update(done - last)
            last = done

        return report

    with shown:
        yield start


def _as_json(row: Row, picture: bfc.Snapshot | None) -> dict[str, Any]:
    if picture is None:
        return asdict(row)
    return {**asdict(row), "occupancy_when_most_is_live": picture.occupancy()}


def _flat(row: Row) -> Cells:
    """A row without lists in it: a column for the calls of each kind, whatever the policy makes."""
    cells = asdict(row)
    by_kind = cells.pop("driver_calls_by_kind")
    return {**cells, **{f"{kind}_calls": by_kind.get(kind, 0) for kind in CALLS}}


def _of_versions(versions: dict[str, str]) -> list[str]:
    """The lines that name the version of PyTorch: one if it is the same for all traces."""
    if len(set(versions.values())) == 1:
        return list(versions.values())[:1]
    return [f"{name}: {line}" for name, line in versions.items()]


def _of_pools(name: str, trace: bfc.Trace) -> Iterator[str]:
    """A line about a trace's private pools, if it has some."""
    if private := trace._private_allocations():
        yield (
            f"{name}: {private} allocations are from private pools, such as those of captured "
            "graphs, and are kept apart"
        )


def _lines(
    results: list[tuple[str, Row, bfc.Snapshot | None]],
    versions: list[str],
    remarks: list[str],
    with_policies: bool,
) -> Iterator[str]:
    yield from versions
    for caption, _, picture in results:
        if picture is not None:
            yield f"{caption}, when most is live\n{picture}\n"
    yield from remarks
    yield from _table([row for _, row, _ in results], with_policies or bool(remarks))


def _table(rows: list[Row], with_policies: bool) -> Iterator[str]:
    lines = in_columns([HEADINGS, *map(_cells, rows)])
    for line, policy in zip(lines, ["policy", *(row.policy for row in rows)], strict=True):
        # At the end, so that long settings do not move the figures.
        yield f"{line}  {policy}" if with_policies else line
