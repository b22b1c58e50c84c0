"""What a command prints: a table for people, or JSON or CSV for scripts; and a bar meanwhile."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from bfc.units import printable

if TYPE_CHECKING:
    from tqdm import tqdm

#: A row of a table, for scripts: figures in bytes and texts, by the names of the columns.
Cells = Mapping[str, object]


def add_formats(parser: argparse.ArgumentParser, *, markdown: bool = False) -> None:
    """Adds `--json` and `--csv`, and `--markdown`. `show` prints what the first two ask for."""
    formats = parser.add_mutually_exclusive_group()
    formats.add_argument("--json", action="store_true", help="print JSON instead of text")
    formats.add_argument(
        "--csv",
        action="store_true",
        help="print the table as CSV: a line for each row, sizes in bytes",
    )
    if markdown:
        formats.add_argument("--markdown", action="store_true", help="print Markdown")


def show(
    arguments: argparse.Namespace,
    *,
    text: Callable[[], object],
    as_json: Callable[[], str],
    rows: Callable[[], Iterable[Cells]],
) -> None:
    """Prints one of three forms of a result: the one that `--json` or `--csv` asks for, or text.

    `rows` returns the rows of the table, whose keys name the columns. A row that lacks a column,
    or has None there, has an empty cell in it.
    """
    if arguments.csv:
        print(_csv(list(rows())), end="")
    else:
        print(as_json() if arguments.json else text())


def _csv(rows: list[Cells]) -> str:
    columns = dict.fromkeys(name for row in rows for name in row)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells = [row.get(name) for name in columns]
        writer.writerow([printable(it) if isinstance(it, str) else it for it in cells])
    return out.getvalue()


def bar(**options: Any) -> tqdm[NoReturn] | None:
    """A bar that shows progress on a terminal, where tqdm is installed; else None."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(leave=False, file=sys.stderr, **options)
