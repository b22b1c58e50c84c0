"""Budgets of memory in tests: a peak against a number, or against what a test stored before.

A stored figure is an entry of `bfc_budgets.json`, beside the test: the peak, which GPU and PyTorch
it is of, and what each function of the program held at it. Functions and not lines, since every
edit above moves these. It is written when the test has passed: one that fails, or is skipped
halfway, leaves the file as it is.
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
from bfc.allocators._plan_use import keeps_history
from bfc.trace import Trace
from bfc.units import format_bytes, parse_bytes
from bfc.version import __version__
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
#: The format of that file. One of another format is refused.
FORMAT = 1
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
    of : dict of str to str
        What a figure depends on, beside the program: the "gpu" and the "torch" of a prediction.
    """

    peak: int
    what: str
    held: dict[str, int]
    lines: dict[str, str]
    of: dict[str, str]


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
    peak, what, of = trace.peak_bytes_live(), "live", {}
    if not isinstance(run, Trace):
        peak, what, of = run.peak_reserved, "reserved", _of(run)
    by_size = dict(sorted(held.items(), key=lambda item: (-item[1], item[0])))
    return Measured(peak, what, by_size, {name: line for name, (_, line) in most.items()}, of)


def _of(run: Prediction) -> dict[str, str]:
    """Other operators run on another GPU, and in another minor version of PyTorch."""
    gpu = run.gpu
    capability = ".".join(map(str, gpu.cc))
    return {
        "gpu": f"{gpu.name}, compute capability {capability}, {gpu.sms} multiprocessors",
        "torch": ".".join(run.torch_version.split(".")[:2]),
    }


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
        self._limit = None if limit is None else parse_bytes(limit)
        self._allow = parse_bytes(allow)
        self._write = write
        self._asked: set[str] = set()
        self._found: dict[str, Measured] = {}  # that are to be stored
        self._has_judged = False

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
        limit = self._limit if limit is None else parse_bytes(limit)
        allowed = self._allow if allow is None else parse_bytes(allow)
        key = f"{self._test} {name}".rstrip()
        if limit is None and key in self._asked:
            raise ValueError(f"{key} has a figure already: give each of a test a name of its own")
        self._asked.add(key)
        if isinstance(run, Allocator):
            return Block(run, partial(self._check, limit=limit, allowed=allowed, key=key))
        self._check(run, limit, allowed, key)
        return None

    def passed(self) -> str:
        """Stores what is to be stored of a test that has passed, and returns what is wrong with it.

        Returns
        -------
        str
            Empty, or why it must fail all the same: it has measured nothing, or its figures cannot
            be stored.
        """
        if not self._has_judged:
            return (
                f"{self._test} asks for bfc_memory_budget, but measures nothing with it. Call "
                "bfc_memory_budget(run), or put a block into `with bfc_memory_budget(pool):`"
            )
        if not self._found:
            return ""
        try:
            with _locked(self._folder / FILE) as figures:
                figures.update({key: _entry(found) for key, found in self._found.items()})
        except (OSError, BudgetError) as error:
            return f"the figures of {self._test} cannot be stored: {error}"
        return ""

    def _check(self, run: Prediction | Trace, limit: int | None, allowed: int, key: str) -> None:
        __tracebackhide__ = True
        if not (isinstance(run, Trace) or hasattr(run, "verdict")):
            raise TypeError(
                "a budget is for a prediction, a Trace or an allocator, not for "
                f"{type(run).__name__}"
            )
        found = measured(run, self._root)
        self._has_judged = True
        if limit is not None:
            _under(found, run, limit)
        elif self._write:
            self._found[key] = found
        else:
            _compare(found, self._stored(key), allowed)

    def _stored(self, key: str) -> dict[str, Any]:
        __tracebackhide__ = True
        file = self._folder / FILE
        figures = _parsed(file, file.read_text(errors="replace")) if file.exists() else {}
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
        if keeps_history(self._allocator):
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
    before, held = stored.get(found.what), stored.get("held")
    if not isinstance(before, int) or not isinstance(held, dict):
        raise BudgetError(
            f"the stored figure is not of what is {found.what}: pytest {WRITE} stores it anew"
        )
    if others := [name for name, value in found.of.items() if stored.get(name) != value]:
        told = (f"{name} {stored.get(name, '(none)')}, not {found.of[name]}" for name in others)
        raise BudgetError(
            f"the stored figure is of another machine: {'; '.join(told)}. Such figures are not "
            f"comparable: predict for the same GPU under the same PyTorch, or let pytest {WRITE} "
            "store it anew"
        )
    total = Growth("", before, found.peak)
    if total.bytes <= allowed:
        return
    more = f", more than the {format_bytes(allowed)} allowed" if allowed else ""
    parts = [Growth(name, held.get(name, 0), nbytes) for name, nbytes in found.held.items()]
    grown = [part for part in ordered(parts) if part.bytes > 0][:NAMED]
    rows = [
        f"  {signed(part.bytes):>12}  {_where(part.name, found)}: {format_bytes(part.bytes_b)}"
        for part in grown
    ]
    named = ["At the peak, more is held by:", *rows]
    if not rows:
        named = ["No function holds more at the peak: the blocks lie otherwise."]
    if found.of and stored.get("bfc") != __version__:  # which knows more or less of operators
        named.append(
            f"It was stored by bfc {stored.get('bfc')}, and this is {__version__}, which may know "
            "other things of operators."
        )
    last = f"If that is as it should be: pytest {WRITE}"
    raise BudgetError("\n".join([f"{found.what} at most: {change(total)}{more}", *named, last]))


def _entry(found: Measured) -> dict[str, Any]:
    """A figure as it is stored."""
    by = {"bfc": __version__} if found.of else {}
    held = dict(list(found.held.items())[:NAMED])
    return {found.what: found.peak, **found.of, **by, "held": held}


def _where(name: str, found: Measured) -> str:
    """A function, and the line of it that holds most."""
    line = found.lines[name]
    return shown(f"{line}{name[name.rindex(' in ') :]}" if " in " in name else name) or NO_LINE


def _parsed(file: Path, text: str) -> dict[str, Any]:
    """The figures in the text of a file."""
    __tracebackhide__ = True
    try:
        read = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        read = None
    found = read if isinstance(read, dict) else {}
    if found.get("format", FORMAT) != FORMAT:
        raise BudgetError(
            f"{file} has format {found['format']}, and this bfc knows {FORMAT}: take the bfc that "
            f"has written it, or remove the file and run pytest {WRITE}"
        )
    figures = found.get("figures")
    if not isinstance(figures, dict) or not all(isinstance(it, dict) for it in figures.values()):
        raise BudgetError(
            f"{file} holds no figures of budgets: restore it, or remove it and run pytest {WRITE}"
        )
    return figures


@contextmanager
def _locked(file: Path) -> Iterator[dict[str, Any]]:
    """The figures of a file, to be changed. Other processes, such as pytest-xdist's, wait."""
    with open(file, "a+", errors="replace") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        stream.seek(0)
        text = stream.read()
        figures = _parsed(file, text) if text else {}
        yield figures
        whole = {"format": FORMAT, "figures": dict(sorted(figures.items()))}
        stream.truncate(0)
        stream.write(json.dumps(whole, indent=1) + "\n")
