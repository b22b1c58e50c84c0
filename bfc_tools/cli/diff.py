"""`bfc diff A B`: what grew between two recorded runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import bfc
from bfc.units import parse_bytes
from bfc_tools.browser.compared import data_of_diff
from bfc_tools.browser.report import write
from bfc_tools.cli.runs import FILE, add_snapshot_device, add_torch, option_named
from bfc_tools.cli.sizes import positive
from bfc_tools.cli.tables import Cells, add_formats, show
from bfc_tools.study.diff import compared, devices_of
from bfc_tools.study.file_formats import read
from bfc_tools.study.growth import KINDS, SHOWN, Diff
from bfc_tools.study.torch_version import decided, line_of

HELP = "show what grew between two recorded runs"
EPILOG = """\
Of runs that PyTorch recorded, the first line names the version. Then come the peak of live bytes in
each run, what is live at the end of each, and the differences. Tables follow, of what was live at
the two peaks and at the two ends: by owner, by line and by size, what grew most first, and what
shrank last. Rows that did not change are left out.

owner: in a snapshot of PyTorch, the user_metadata of an allocation; where it has none, the
outermost line of your own code. line: the innermost line of your own code, which is Python that is
not installed; without one the innermost of any Python, or PyTorch's operator. blocks: how many
allocations are live.

--json prints an object:
  "a", "b"        the two files
  "peak", "end"   objects with "event_a" and "event_b", the events after which was counted;
                  "a", "b" and "growth" in bytes; "count_a" and "count_b", the allocations; and
                  lists "by_owner", "by_line" and "by_size" of all rows, each with "name", "a", "b",
                  "growth", "count_a" and "count_b". The rows of a list add up to the total. What
                  has no owner, or no stack, has the name "". "left_out" has 0 for each kind here
  "reserved_a", "reserved_b"   the most bytes in segments that a recording tells of, or null
  "remarks"       what cannot be compared, and why

--markdown prints the peaks, and what changed at them, as a comment on a pull request shows it.

--csv prints a line for each of these rows, with the columns at (peak or end), by (total, owner,
line or size), name, a, b, growth, count_a and count_b.

exit code: 0 the peak of B is at most that of A (and --allow), 1 it is larger, 2 a wrong call or
file.

examples:
  bfc diff before.pickle after.pickle -o diff.html
  bfc diff run.pickle run.pickle --iterations 1 9    what a training holds on to
  bfc diff main.npz branch.npz --allow 64MiB     in CI: fails if the peak grew by more
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("first", metavar="A", type=Path, help=f"the first run: {FILE}")
    add("second", metavar="B", type=Path, help="the second run")
    add_torch(add)
    add_formats(parser, markdown=True)
    add(
        "--rows",
        type=positive,
        default=SHOWN,
        metavar="N",
        help=f"the rows of each table at most, those that changed most (default: {SHOWN})",
    )
    add(
        "--allow",
        default="0",
        metavar="SIZE",
        help="by how much the peak of B may be larger before the exit code is 1 (default: 0)",
    )
    add(
        "--iterations",
        type=int,
        nargs=2,
        metavar=("I", "J"),
        help="compare iteration I of A with iteration J of B, as `bfc plan` finds them: 0 is the "
        "first, -1 the last",
    )
    add_snapshot_device(add)
    add(
        "-o",
        "--output",
        metavar="HTML",
        type=Path,
        help="also write a page for the browser: what grew, and what `bfc report` shows of B and A",
    )


def run(arguments: argparse.Namespace) -> bool:
    """Prints the diff. Returns True if the peak did not grow by more than is allowed."""
    allowed = parse_bytes(arguments.allow)  # what is wrong with it is said before a file is read
    paths = arguments.first, arguments.second
    first, second = (
        decided(_read(path, device), arguments.torch)
        for path, device in zip(paths, devices_of(paths, arguments.snapshot_device), strict=True)
    )
    chosen = None if arguments.iterations is None else tuple(arguments.iterations)
    found = compared(str(arguments.first), first, str(arguments.second), second, chosen)
    if arguments.output is not None:
        write(data_of_diff(found, first, second), arguments.output)
    show(
        arguments,
        text=lambda: _text(found, arguments, [*_versions(first, second)]),
        as_json=found.to_json,
        rows=lambda: _rows(found),
    )
    return found.peak.total.bytes <= allowed


def _text(found: Diff, arguments: argparse.Namespace, versions: list[str]) -> str:
    if arguments.markdown:
        return found.to_markdown(arguments.rows)
    return "\n".join([*versions, found.text(arguments.rows)])


def _rows(found: Diff) -> Iterator[Cells]:
    """All rows of all tables, and the total of each moment."""
    for at, moment in (("peak", found.peak), ("end", found.end)):
        yield {"at": at, "by": "total", **moment.total.as_dict()}
        for kind in KINDS:
            yield from ({"at": at, "by": kind, **part.as_dict()} for part in moment.parts(kind))


def _versions(first: bfc.Trace, second: bfc.Trace) -> Iterator[str]:
    """The lines that name the versions of PyTorch, where it recorded a run: one if they are the
    same."""
    lines = {
        name: line_of(trace)
        for name, trace in (("A", first), ("B", second))
        if "torch" in trace.meta
    }
    if len(lines) == 2 and lines["A"] == lines["B"]:
        lines = {"A and B": lines["A"]}
    yield from (f"{name}: {line}" for name, line in lines.items())


def _read(path: Path, device: int | None) -> bfc.Trace:
    with option_named(path):
        return read(path, device, frames=True)
