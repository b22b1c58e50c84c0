"""`bfc.report`: a run, or what an allocator holds, as one file for the browser."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.errors import TraceError
from bfc.files import replacing
from bfc.snapshots.columns import IS_VIEW, REGION
from bfc.snapshots.snapshot import Snapshot
from bfc.trace import Trace
from bfc.units import format_bytes
from bfc_tools.browser.data import data_of, data_of_state
from bfc_tools.browser.render import render
from bfc_tools.study.file_formats import read


def report(
    run: Trace | Allocator | Snapshot | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    title: str = "",
) -> None:
    """Write a page for the browser that shows a run, or what an allocator holds.

    Parameters
    ----------
    run : Trace, Allocator, Snapshot, str or os.PathLike
        A trace; the file of one: a memory snapshot of PyTorch, an `.npz` trace, or a log of RMM
        (`.csv`); or an allocator. Of an allocator the recorded history is shown
        (`CachingAllocator.record_history`), or, if there is none, what it holds now.
    path : str or os.PathLike
        The file to write. One that exists is replaced once the new one is whole.
    title : str, optional
        The page's title; the default is the name of the file or of the device.

    Raises
    ------
    TypeError
        If `run` is none of these.
    TraceError
        If the file holds no run; the text names the file and the fault in one line.
    OSError
        If a file cannot be read or written.

    Notes
    -----
    The page is one file that asks the network for nothing. It holds names of functions and files,
    if the run has them: `Trace.anonymised()` has none.

    A recording of PyTorch is shown as it was recorded. Another trace is replayed under PyTorch's
    policy with its default settings, on a simulated device. `bfc report` shows several runs or
    policies side by side.

    Cost: about 1 second for a million events, and a file of at most 5 MB.

    Examples
    --------
    >>> import pathlib, tempfile, bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> with tempfile.TemporaryDirectory() as folder, allocator.allocate("3 MiB"):
    ...     bfc.report(allocator, pathlib.Path(folder, "report.html"))
    ...     pathlib.Path(folder, "report.html").read_text()[:15]
    '<!DOCTYPE html>'
    """
    write(shown(run, title), path)


def write(data: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Writes the page of what `bfc_tools.browser.data` describes."""
    text = render(data).encode("utf-8")
    with replacing(path) as file:
        file.write(text)


def shown(run: Any, title: str = "") -> dict[str, Any]:
    """What a page of a run, or of an allocator, shows."""
    if isinstance(run, Trace):
        return data_of([(title or "trace", run)], title=title)
    if isinstance(run, (str, os.PathLike)):
        trace = read(run, frames=True)
        return data_of([(Path(run).stem, trace)], title=title)
    snapshot = run if isinstance(run, Snapshot) else _snapshot_of(run)
    title = title or snapshot.device
    if len(snapshot._history_columns()):
        try:
            data = data_of([(snapshot.device, Trace.from_snapshot(snapshot))], title=title)
        except TraceError as error:
            return data_of_state(snapshot, title=title, remark=f"its history is left out: {error}")
        data["runs"][0]["remarks"] += _remarks(snapshot, data["runs"][0].get("asleep", ()))
        return data
    return data_of_state(snapshot, title=title)


def _snapshot_of(run: Any) -> Snapshot:
    snapshot = run.snapshot() if callable(getattr(run, "snapshot", None)) else None
    if not isinstance(snapshot, Snapshot):
        raise TypeError(
            f"a report is of a trace, its file, or an allocator, not {type(run).__name__}"
        )
    return snapshot


def _remarks(snapshot: Snapshot, asleep: Iterable[list[Any]]) -> list[str]:
    """Remarks on what a history has no entries for."""
    remarks = []
    unsaid = snapshot.stats.bytes_asleep - sum(row[1] for row in asleep)
    if unsaid > 0:
        remarks.append(
            f"{format_bytes(unsaid)} sleep now, and count as reserved: the history begins later"
        )
    if any(row[-1] & IS_VIEW for row in REGION.iter_unpack(snapshot._region_columns().regions)):
        remarks.append("blocks were stitched from pages of other segments, and lie in none of them")
    return remarks
