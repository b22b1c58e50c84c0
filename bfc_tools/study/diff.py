"""`bfc.diff`: what grew between two runs, by owner, by line and by size."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bfc.allocators._allocator import Allocator
from bfc.libraries import NDArray, np
from bfc.snapshots.snapshot import Snapshot
from bfc.trace import Trace
from bfc_tools.study import recorded_settings
from bfc_tools.study.file_formats import has_devices, read
from bfc_tools.study.growth import Diff, Growth, MomentGrowth, ordered
from bfc_tools.study.source_lines import Lines, common_names, users_files

if TYPE_CHECKING:
    #: What `diff` compares.
    Run = Trace | Allocator | Snapshot | str | os.PathLike[str]
    #: Bytes and allocations by a group's name.
    Held = dict[str, tuple[int, int]]

_LOW = (1 << 32) - 1


def diff(
    a: Run, b: Run, *, device: int | None = None, iterations: tuple[int, int] | None = None
) -> Diff:
    """What grew from one run to another, at their peaks and at their ends.

    Parameters
    ----------
    a : Trace, str, os.PathLike, Allocator or Snapshot
        The first run. A path leads to an `.npz` trace, a memory snapshot of PyTorch or a log of RMM
        (`.csv`). Of an allocator, or a snapshot of one, it is the history, if that was recorded;
        without a history it is what is live in it now, as both the peak and the end.
    b : Trace, str, os.PathLike, Allocator or Snapshot
        The second run.
    device : int, optional
        The device whose history is taken from each file that may hold several.
    iterations : tuple of int, optional
        The number of an iteration in each run, as `Trace.iterations` counts them: 0 is the first,
        and -1 the last. Their peaks and their ends are compared, not those of the whole runs.

    Returns
    -------
    Diff
        What is live in each, by owner, by line and by size. `print` shows it.

    Raises
    ------
    TypeError
        If `a` or `b` is something else.
    TraceError
        If a file cannot be read as such; the text names the file and the fault in one line.
    ValueError
        If `device` is given and both files have no devices, or a run has no such iteration.
    OSError
        If a file cannot be opened or read.

    Notes
    -----
    Bytes are those that were asked for, and exact: the parts of each kind add up to the total, and
    `diff(b, a).peak == -diff(a, b).peak`. The peak is the first event after which the most bytes
    are live, as `Trace.fullest_event` finds it.

    A line is the innermost frame of the user's own code: of a Python file that is not installed. If
    there is none, it is the innermost of any Python file, else the function of PyTorch that names
    the operator, such as "torch::autograd::generated::BmmBackward0::apply", else the innermost
    frame. Two lines are the same if file, line and function are. A file that stands in one folder
    in the first run, and in another in the second, is found by the end of its path.

    Cost: O(n log n) in the events, beside reading.

    Examples
    --------
    >>> import bfc
    >>> owners = ["", "weights", "kv cache"]
    >>> a = bfc.Trace([0, 0], [0, 1], [4096, 1024], owner=[1, 2], owners=owners)
    >>> b = bfc.Trace([0, 0, 0], [0, 1, 2], [4096, 1024, 2048], owner=[1, 2, 2], owners=owners)
    >>> found = bfc.diff(a, b)
    >>> found.peak.total.bytes, [(part.name, part.bytes) for part in found.peak.by_owner]
    (2048, [('kv cache', 2048), ('weights', 0)])
    """
    of_a, of_b = devices_of((a, b), device)
    return compared(*_run_of(a, of_a, "a"), *_run_of(b, of_b, "b"), iterations)


def compared(
    name_a: str,
    trace_a: Trace,
    name_b: str,
    trace_b: Trace,
    iterations: tuple[int, int] | None = None,
) -> Diff:
    """What grew from one named trace to another, as `diff` returns it."""
    labels = common_names(users_files(trace_a), users_files(trace_b))
    spans: list[tuple[int, int]] = [(0, len(trace_a)), (0, len(trace_b))]
    if iterations is not None:
        spans = [
            _span(name, trace, number)
            for name, trace, number in zip(
                (name_a, name_b), (trace_a, trace_b), iterations, strict=True
            )
        ]
        name_a, name_b = (
            f"{name}, iteration {number}"
            for name, number in zip((name_a, name_b), iterations, strict=True)
        )
    runs = (name_a, _Run(trace_a, labels, spans[0])), (name_b, _Run(trace_b, labels, spans[1]))
    first, second = runs[0][1], runs[1][1]
    remarks = sorted({f"{name}: {remark}" for name, run in runs for remark in run.remarks()})
    return Diff(
        name_a,
        name_b,
        _moment(first, second, first.peak, second.peak),
        _moment(first, second, first.end, second.end),
        recorded_settings.read(trace_a).peak_reserved,
        recorded_settings.read(trace_b).peak_reserved,
        tuple(remarks),
    )


def devices_of(runs: Sequence[Run], device: int | None) -> list[int | None]:
    """`device` for each run that may hold several. If none may, it stays for all, which is refused
    where files are read."""
    may = [isinstance(run, str | os.PathLike) and has_devices(run) for run in runs]
    return [device if chosen or not any(may) else None for chosen in may]


def _span(name: str, trace: Trace, number: int) -> tuple[int, int]:
    """The events of an iteration. Raises ValueError."""
    found = trace.iterations()
    if not found:
        raise ValueError(f"{name}: {found}")
    if not -len(found) <= number < len(found):
        raise ValueError(
            f"{name} has no iteration {number}: it has {len(found)}, from 0 to {len(found) - 1}"
        )
    return found[number].begin, found[number].end


def _run_of(source: Run, device: int | None, default: str) -> tuple[str, Trace]:
    """A name for the run, and its events."""
    if isinstance(source, Trace):
        return default, source
    if isinstance(source, Allocator):
        source = source.snapshot()
    if isinstance(source, Snapshot):
        return default, Trace.from_snapshot(source)
    if isinstance(source, str | os.PathLike):
        return os.fspath(source), read(source, device, frames=True)
    raise TypeError(
        f"a run is a Trace, a path, an Allocator or a Snapshot, not {type(source).__name__}"
    )


class _Run:
    """A trace, or a part of it, and what is live at an event."""

    def __init__(self, trace: Trace, labels: dict[str, str], span: tuple[int, int]) -> None:
        self.trace = trace
        begin, end = span
        self.end = end - 1
        self.peak = trace.fullest_event()
        if (begin, end) != (0, len(trace)):
            self.peak = begin + int(trace._live()[begin:end].argmax())
        self._lines = Lines(trace, labels)

    def remarks(self) -> Iterable[str]:
        if self.trace.owner is None:
            yield "it names no owners"
        if self.trace.stack is None or not len(self.trace.frames):
            yield "it has no stacks, so no lines"

    def held(self, kind: str, live: NDArray[np.intp]) -> Held:
        """What is live, summed by the names of one kind."""
        trace = self.trace
        if kind == "size":
            sizes, counts = np.unique(trace.size[live], return_counts=True)
            pairs = zip(sizes.tolist(), counts.tolist(), strict=True)
            return {str(size): (size * count, count) for size, count in pairs}
        if kind == "owner":
            numbers = np.zeros(len(live), np.int64) if trace.owner is None else trace.owner[live]
            names: Sequence[str] = trace.owners or ("",)
            return _summed(numbers, trace.size[live], names.__getitem__)
        return held_by_line(trace, live, self._lines)


def held_by_line(trace: Trace, live: NDArray[np.intp], lines: Lines) -> Held:
    """What is live, summed by the line that each allocation counts for."""
    stacks = np.zeros(len(live), np.int64) if trace.stack is None else trace.stack[live]
    return _summed(lines.of(stacks), trace.size[live], lines.text)


def _summed(numbers: NDArray[Any], sizes: NDArray[np.uint64], name_of: Any) -> Held:
    """Bytes and allocations by the name of each number. Numbers of one name count together."""
    found, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    # Two sums of halves are exact where one sum in 64 bits would overflow.
    high, low = np.zeros((2, len(found)), np.uint64)
    np.add.at(high, inverse, sizes >> np.uint64(32))
    np.add.at(low, inverse, sizes & np.uint64(_LOW))
    held: Held = {}
    for number, upper, lower, count in zip(
        *(it.tolist() for it in (found, high, low, counts)), strict=True
    ):
        name = name_of(number)
        nbytes, others = held.get(name, (0, 0))
        held[name] = nbytes + (upper << 32) + lower, others + count
    return held


def _moment(a: _Run, b: _Run, event_a: int, event_b: int) -> MomentGrowth:
    live_a, live_b = a.trace._live_after(event_a), b.trace._live_after(event_b)
    parts = {
        kind: _joined(a.held(kind, live_a), b.held(kind, live_b))
        for kind in ("owner", "line", "size")
    }
    sizes = parts["size"]
    total = Growth(
        "",
        sum(part.bytes_a for part in sizes),
        sum(part.bytes_b for part in sizes),
        len(live_a),
        len(live_b),
    )
    return MomentGrowth(event_a, event_b, total, parts["owner"], parts["line"], sizes)


def _joined(a: Held, b: Held) -> tuple[Growth, ...]:
    nothing = 0, 0
    return ordered(
        Growth(
            name,
            *(
                number
                for pair in zip(a.get(name, nothing), b.get(name, nothing), strict=True)
                for number in pair
            ),
        )
        for name in a.keys() | b.keys()
    )
