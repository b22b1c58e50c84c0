"""Budgets of memory in tests: a peak against a number, or against what a test stored before.

A stored figure is an entry of `bfc_budgets.json`, beside the test: the peak, and what each function
of the program held at it. Functions and not lines, since every edit above moves these.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bfc.allocators._allocator import Allocator
from bfc.trace import Trace
from bfc.units import format_bytes, parse_bytes
from bfc_tools.study.diff import held_by_line
from bfc_tools.study.growth import NO_LINE, Growth, change, ordered, signed
from bfc_tools.study.recorded_settings import shown
from bfc_tools.study.source_lines import Lines

if TYPE_CHECKING:
    from typing import SupportsIndex

    from bfc_tools.predicting.prediction import Prediction

    Size = SupportsIndex | str

#: The file of stored figures, in the folder of the test.
FILE = "bfc_budgets.json"
#: The option of pytest that stores what it measures.
WRITE = "--bfc-write-budgets"
#: How many functions an error names.
NAMED = 8


class BudgetError(AssertionError):
    """A peak is above its budget, or has grown."""


@dataclass(frozen=True)
class Measured:
    """A peak, and whose it was. Sizes are in bytes.

    Attributes
    ----------
    peak : int
        The most that was reserved, by a prediction, or live, in all else.
    what : str
        Which of these: "reserved" or "live".
    held : dict of str to int
        What was live at the peak, by the function that asked for it, as "model.py in forward".
    lines : dict of str to str
        The line of each function that held most.
    """

    peak: int
    what: str
    held: dict[str, int]
    lines: dict[str, str]


def measured(run: Prediction | Trace, root: Path) -> Measured:
    """The peak of a run. Files are named as seen from a folder, or by their last names."""
    trace = run if isinstance(run, Trace) else run.trace
    held: dict[str, int] = {}
    most: dict[str, tuple[int, str]] = {}
    live = trace._live_after(trace.fullest_event())
    for text, (nbytes, _) in held_by_line(trace, live, Lines(trace)).items():
        function, line = _names(text, root)
        held[function] = held.get(function, 0) + nbytes
        most[function] = max(most.get(function, (0, "")), (nbytes, line))
    peak, what = trace.peak_bytes_live(), "live"
    if not isinstance(run, Trace):
        peak, what = run.peak_reserved, "reserved"
    by_size = dict(sorted(held.items(), key=lambda item: (-item[1], item[0])))
    return Measured(peak, what, by_size, {name: line for name, (_, line) in most.items()})


def _names(text: str, root: Path) -> tuple[str, str]:
    """A function and the line in it, of a text such as "/home/me/model.py:12 in forward"."""
    place, _, function = text.rpartition(" in ")
    path, _, line = place.rpartition(":")
    if not path:
        return text, text
    path = os.path.relpath(path, root) if Path(path).is_relative_to(root) else Path(path).name
    return f"{path} in {function}", f"{path}:{line}"


class Budget:
    """What the fixture `bfc_memory_budget` gives a test.

    Parameters
    ----------
    test : str
        The file and the name of the test, under which its figures are stored.
    folder : Path
        The folder of the test, where the file of figures lies.
    root : Path
        The folder from which files are named.
    limit : int or str, optional
        The budget of the test, in bytes or as a text; without one, the stored figure counts.
    allow : int or str, optional
        How much the peak may be above the stored figure.
    write : bool, optional
        Store what is measured, and compare nothing with what was stored.
    """

    def __init__(
        self,
        test: str,
        folder: Path,
        root: Path,
        limit: Size | None = None,
        allow: Size = 0,
        *,
        write: bool = False,
    ) -> None:
        self._test, self._folder, self._root = test, folder, root
        self._limit, self._allow = limit, allow
        self._write = write
        self._asked: set[str] = set()

    def __call__(
        self,
        run: Prediction | Trace | Allocator,
        limit: Size | None = None,
        *,
        allow: Size | None = None,
        name: str = "",
    ) -> Block | None:
        """Fail the test if a run needs more than its budget.

        Parameters
        ----------
        run : Prediction, Trace or Allocator
            What is measured: the most that is reserved in a prediction, and the most that is live
            in a trace. Of an allocator it is the most that is live while a block runs:
            `with bfc_memory_budget(pool):`. What was live before it counts, too.
        limit : int or str, optional
            In bytes, or as a text such as "22 GiB". The default is that of the test's marker, and
            without one the figure that was stored for the test.
        allow : int or str, optional
            How much the peak may be above the stored figure.
        name : str, optional
            Tells several figures of one test apart.

        Returns
        -------
        Block or None
            Of an allocator, what measures a `with` block.

        Raises
        ------
        BudgetError
            If the peak is above the limit, or above the stored figure by more than `allow`. It
            names the functions that hold most, or grew most.
        TypeError
            If `run` is something else.
        ValueError
            If a test asks twice for a stored figure of one name.
        """
        __tracebackhide__ = True
        limit = self._limit if limit is None else limit
        allowed = parse_bytes(self._allow if allow is None else allow)
        key = f"{self._test} {name}".rstrip()
        if limit is None and key in self._asked:
            raise ValueError(f"{key} has a figure already: give each of a test a name of its own")
        self._asked.add(key)
        if isinstance(run, Allocator):
            return Block(run, partial(self._check, limit=limit, allowed=allowed, key=key))
        self._check(run, limit, allowed, key)
        return None

    def _check(self, run: Prediction | Trace, limit: Size | None, allowed: int, key: str) -> None:
        __tracebackhide__ = True
        if not (isinstance(run, Trace) or hasattr(run, "verdict")):
            raise TypeError(
                "a budget is for a prediction, a Trace or an allocator, not for "
                f"{type(run).__name__}"
            )
        found = measured(run, self._root)
        if limit is not None:
            _under(found, run, parse_bytes(limit))
        elif self._write:
            self._store(key, found)
        else:
            _compare(found, self._stored(key), allowed)

    def _store(self, key: str, found: Measured) -> None:
        entry = {found.what: found.peak, "held": dict(list(found.held.items())[:NAMED])}
        with _locked(self._folder / FILE) as figures:
            figures[key] = entry

    def _stored(self, key: str) -> dict[str, Any]:
        __tracebackhide__ = True
        file = self._folder / FILE
        figures = _parsed(file, file.read_text()) if file.exists() else {}
        if key not in figures:
            raise BudgetError(f"{file} has no figure of {key}: pytest {WRITE} stores it")
        found: dict[str, Any] = figures[key]
        return found


class Block:
    """Measures what is live in an allocator while a `with` block runs. `peak` is that, afterwards.

    Parameters
    ----------
    allocator : Allocator
        Whose memory it is.
    check : callable
        Called with the trace of the block, unless an exception leaves it.
    """

    def __init__(self, allocator: Allocator, check: Callable[[Trace], None]) -> None:
        self._allocator, self._check = allocator, check
        self.peak = 0

    def __enter__(self) -> Self:
        if self._allocator._keeps_history():
            raise ValueError(
                "this allocator records a history, which a budget would drop: end it first, with "
                "record_history(None), or give the budget a Trace"
            )
        self._allocator.record_history(context="alloc")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        __tracebackhide__ = True
        if self._allocator.closed:
            if error is None:
                raise ValueError("this allocator was closed in the block: its peak is not known")
            return
        trace = Trace.from_snapshot(self._allocator.snapshot())
        self._allocator.record_history(None)
        self.peak = trace.peak_bytes_live()
        if error is None:
            self._check(trace)


def _under(found: Measured, run: Prediction | Trace, limit: int) -> None:
    """Raises an error if a peak is above a number."""
    __tracebackhide__ = True
    if isinstance(run, Trace):
        if found.peak <= limit:
            return
        over = f"{format_bytes(found.peak - limit)} over the budget of {format_bytes(limit)}"
        answer = f"{format_bytes(found.peak)} live at most, {over}"
    else:
        verdict = run.verdict(budget=limit)
        if verdict.fits:
            return
        answer = verdict.answer
    rows = [
        f"  {format_bytes(nbytes):>11}  {_where(name, found)}"
        for name, nbytes in list(found.held.items())[:NAMED]
    ]
    raise BudgetError("\n".join([answer, "At the peak, most is held by:", *rows]))


def _compare(found: Measured, stored: dict[str, Any], allowed: int) -> None:
    """Raises an error if a peak has grown since it was stored."""
    __tracebackhide__ = True
    before = stored.get(found.what)
    if before is None:
        raise BudgetError(f"the stored figure is not of what is {found.what}: pytest {WRITE}")
    total = Growth("", before, found.peak)
    if total.bytes <= allowed:
        return
    more = f", more than the {format_bytes(allowed)} allowed" if allowed else ""
    held: dict[str, int] = stored["held"]
    parts = [Growth(name, held.get(name, 0), nbytes) for name, nbytes in found.held.items()]
    grown = [part for part in ordered(parts) if part.bytes > 0][:NAMED]
    rows = [
        f"  {signed(part.bytes):>12}  {_where(part.name, found)}: {format_bytes(part.bytes_b)}"
        for part in grown
    ]
    named = ["At the peak, more is held by:", *rows]
    if not rows:
        named = ["No function holds more at the peak: the blocks lie otherwise."]
    raise BudgetError(
        "\n".join(
            [
                f"{found.what} at most: {change(total)}{more}",
                *named,
                f"If that is as it should be: pytest {WRITE}",
            ]
        )
    )


def _where(name: str, found: Measured) -> str:
    """A function, and the line of it that holds most."""
    line = found.lines[name]
    return shown(f"{line}{name[name.rindex(' in ') :]}" if " in " in name else name) or NO_LINE


def _parsed(file: Path, text: str) -> dict[str, Any]:
    """The figures in the text of a file."""
    __tracebackhide__ = True
    try:
        figures = json.loads(text)
    except json.JSONDecodeError as error:
        figures = error
    if not isinstance(figures, dict):
        raise BudgetError(
            f"{file} holds no figures of budgets: restore it, or remove it and run pytest {WRITE}"
        )
    return figures


@contextmanager
def _locked(file: Path) -> Iterator[dict[str, Any]]:
    """The figures of a file, to be changed. Other processes, such as pytest-xdist's, wait."""
    with open(file, "a+") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        figures = _parsed(file, stream.read() or "{}")
        yield figures
        text = json.dumps(dict(sorted(figures.items())), indent=1)
        stream.truncate(0)
        stream.write(text + "\n")
