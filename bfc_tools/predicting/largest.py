"""`bfc.largest`: the largest of some values with which a program fits, proven by tries."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, SupportsIndex, TypeVar

from bfc.units import format_bytes, printable
from bfc_tools.predicting.asked import figures, verdict_of
from bfc_tools.predicting.axes import values_of
from bfc_tools.predicting.bounds import Bounds, Known
from bfc_tools.predicting.script import follow
from bfc_tools.predicting.stopping import Limits
from bfc_tools.predicting.tries import ANSWERS, Question, Runs, Tried, Tries, as_counted, held
from bfc_tools.study.workers import usable_cores

Key = TypeVar("Key")


@dataclass(frozen=True)
class Try:
    """A try of a search. Sizes are in bytes, and 0 if the program failed before it used the GPU.

    Attributes
    ----------
    value : int
        The value that was tried.
    fits : bool or None
        Whether the program fits with it. None if it failed otherwise.
    live : int
        The most that it asked for and did not free.
    reserved : int
        The most that is taken from a device that never refuses.
    error : str
        What went wrong, in a line; else empty.
    fits_at_most : bool or None
        Whether it fits with the most of what is not known. None if no upper bound is known, or it
        failed.
    """

    value: int
    fits: bool | None
    live: int
    reserved: int
    error: str
    fits_at_most: bool | None = None


@dataclass
class Largest:
    """The largest value with which a program fits. `bfc.largest` finds it; printed, it tells all.

    Attributes
    ----------
    name : str
        What is varied.
    values : sequence of int
        The values that were allowed, from the smallest.
    form : str
        How the script took it, such as "--batch-size N"; empty for a function.
    device : str
        The device's name, or its size.
    limit : int
        What PyTorch may take of it, in bytes.
    tries : list of Try
        What was tried, from the smallest value.
    hints : list of str
        What else has to be said, such as how a program that adapts to the memory is predicted.
    """

    name: str
    values: Sequence[int]
    form: str = ""
    device: str = ""
    limit: int = 0
    tries: list[Try] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._bounds = Bounds(self.values)
        self._failure: Tried | None = None

    @property
    def value(self) -> int | None:
        """The largest that fits of those below all that do not; None if none was seen to fit."""
        at = self._bounds.largest
        return None if at is None else self.values[at]

    @property
    def first_too_large(self) -> int | None:
        """The smallest that does not fit; None if none was seen."""
        at = self._bounds.first_too_large
        return None if at is None else self.values[at]

    @property
    def is_proven(self) -> bool:
        """Whether no value between the two is left, or all fit, or none does."""
        return not self._bounds.gave_up and not self._bounds.is_open

    @property
    def fits(self) -> bool:
        """Whether there is an answer: a value that fits."""
        return self.value is not None

    @property
    def answer(self) -> str:
        """The same as a sentence."""
        low, end, on = self.value, self.first_too_large, f"on {self.device}"
        if not self.tries:
            return "Nothing was tried."
        allowed = f"{self.name} {_range(self.values)}"
        if low is None and end is None:
            return f"No answer: it fails with all that were tried of {allowed}."
        too_large = (
            "" if end is None else f"{end} would reserve {format_bytes(self._reserved(end))}"
        )
        if low is None:
            which = (
                f"None of {allowed} fits" if self.is_proven else f"{self.name} {end} does not fit"
            )
            return f"{which} {on}: {too_large}{self._failures()}."
        if end is None and low == self.values[-1]:
            return f"All of {allowed} fit {on}{self._held(low, str(low))}.{self._as_counted()}"
        if not self.is_proven:
            more = "" if end is None else f", and {end} does not"
            return (
                f"Not finished: {self.name} {low} fits {on}{more}{self._failures()}."
                + self._as_counted()
            )
        end_of_it = f"{too_large and f', and {too_large}'}{self._failures()}.{self._as_counted()}"
        return f"The largest {self.name} that fits {on} is {low}{self._held(low, 'it')}{end_of_it}"

    def _held(self, value: int, which: str) -> str:
        reserved = self._reserved(value)
        return held(which, reserved, reserved > self.limit)

    def _reserved(self, value: int) -> int:
        return next(one.reserved for one in self.tries if one.value == value)

    def _as_counted(self) -> str:
        """What is said if the answer would not fit with the most that it may need."""
        at = next(at for at, one in enumerate(self.tries) if one.value == self.value)
        sure = [one.value for one in self.tries[:at] if one.fits_at_most]
        which = f"{sure[-1]}, which was tried, would" if sure else ""
        return as_counted(self.tries[at].fits_at_most, f"{self.name} {self.value}", which)

    def _failures(self) -> str:
        """What is said of values that failed, above the last that fits and below the first that
        does not."""
        low, end = self.value, self.first_too_large
        failed = [
            str(one.value)
            for one in self.tries
            if one.fits is None
            and (low is None or one.value > low)
            and (end is None or one.value < end)
        ]
        if not failed:
            return ""
        return f"; it fails with {', '.join(failed[:4])}{' and more' if failed[4:] else ''}"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON: sizes are in bytes.

        Returns
        -------
        dict of str
            Lists, dicts, texts and numbers.
        """
        return {
            "fits": self.fits,
            "answer": self.answer,
            "name": self.name,
            "value": self.value,
            "first_too_large": self.first_too_large,
            "is_proven": self.is_proven,
            "form": self.form,
            "device": self.device,
            "limit": self.limit,
            "tries": [asdict(one) for one in self.tries],
            "hints": self.hints,
        }

    def to_json(self) -> str:
        """`to_dict()` as JSON.

        Returns
        -------
        str
            The text.
        """
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        """What `bfc predict --largest` prints."""
        return as_text(self, self.hints)


def as_text(found: Largest, hints: Sequence[str]) -> str:
    """All of it as text, with what else has to be said."""
    lines = [found.answer]
    if found.form:
        lines.append(f"The script takes it as {found.form}.")
    if found._bounds.beyond:
        larger = ", ".join(str(found.values[at]) for at in found._bounds.beyond)
        lines.append(f"It is not the size alone: {larger} fit, too.")
    if found._bounds.gave_up:
        lines.append(
            "The search has ended, since the program failed too often. If it takes only some "
            f"values, name them: {found.name}=8..512:8, or {found.name}=8,16,32"
        )
    lines += [*hints, "", *table(found)]
    if found._failure is not None:
        printed = found._failure.output or found._failure.error
        lines += ["", "What it printed when it first failed:"]
        lines += [f"  {line}" for line in printed.splitlines()]
    return "\n".join(map(printable, lines))


def wanted(found: Largest, width: int) -> list[int]:
    """The places of the values to try next, at most `width`; none if the answer is proven, or if
    the search has given up."""
    found._bounds.width = width
    return found._bounds.wanted()


def learn(found: Largest, at: int, tried: Tried) -> None:
    """Notes what a try of the value at a place came to."""
    told, fits = tried.figures, tried.fits
    if told:
        found.device, found.limit = device_of(told), told["limit"]
        if told["hint"] and told["hint"] not in found.hints:
            found.hints.append(told["hint"])
    if fits is None and found._failure is None:
        found._failure = tried
    found._bounds.learn(at, Known(fits, tried.needs, found.limit))
    error = tried.error if fits is None else ""
    found.tries.append(
        Try(found.values[at], fits, tried.live, tried.needs, error, tried.fits_at_most)
    )
    found.tries.sort(key=lambda one: one.value)


def table(found: Largest) -> list[str]:
    """The names of the columns, and a line for each try."""
    width = max(len(text) for text in (found.name, *(str(one.value) for one in found.tries)))
    rows = [(str(one.value), one.fits, one.live, one.reserved, one.error) for one in found.tries]
    return rows_of(found.name.rjust(width), [(a.rjust(width), *b) for a, *b in rows], found.limit)


def rows_of(title: str, rows: Sequence[tuple[Any, ...]], limit: int) -> list[str]:
    """A table of tries: of each its name, whether it fits, what is live and reserved, its error."""
    lines = [f"{title}  fits           live     reserved  of the device"]
    for name, fits, live, reserved, error in rows:
        start = f"{name}  {ANSWERS[fits]:6}"
        if reserved and limit:
            start += f" {format_bytes(live):>12} {format_bytes(reserved):>12}"
            start += f"{reserved / limit:>15.1%}"
        lines.append(f"{start}  {error}".rstrip())
    return lines


def _range(values: Sequence[int]) -> str:
    if isinstance(values, range) and len(values) > 1:
        step = "" if values.step == 1 else f":{values.step}"
        return f"{values[0]}..{values[-1]}{step}"
    return ", ".join(map(str, values))


def device_of(found: dict[str, Any]) -> str:
    """The device of a try, as an answer names it."""
    gpu, limit = found["device"], found["limit"]
    if gpu["memory"] == gpu["usable"] == limit:
        return str(gpu["name"])
    return f"{gpu['name']}, of which PyTorch can take {format_bytes(limit)}"


def settle(
    tries: Runs,
    searches: dict[Key, Largest],
    question: Callable[[Key, int], Question],
    told: Callable[[Key, int, Tried], object],
) -> None:
    """Runs several searches to their ends, side by side: `question` makes what is asked of a search
    and a value, and `told` is called with what that came to."""
    while True:
        next_ones = {
            (key, at): question(key, one.values[at])
            for key, one in searches.items()
            for at in wanted(one, tries.width)
        }
        if not next_ones:
            return
        for (key, at), tried in tries.outcomes(next_ones):
            learn(searches[key], at, tried)
            told(key, searches[key].values[at], tried)


# -- from Python ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """A function, and the value that it is called with."""

    function: Callable[[int], object]
    value: int
    limits: Limits
    real_files: bool
    options: dict[str, Any]

    def answer(self) -> dict[str, Any]:
        ran = follow(
            lambda: self.function(self.value),
            os.getcwd(),
            limits=self.limits,
            real_files=self.real_files,
            **self.options,
        )
        return figures(ran, verdict_of(ran, "the function"), "", None)


def largest(
    function: Callable[[int], object],
    values: Sequence[int] | str,
    device: SupportsIndex | str = "h100",
    *,
    steps: int = 2,
    settings: str | None = None,
    oom: bool = False,
    real_files: bool = False,
    as_torch: str | None = None,
    jobs: int | None = None,
) -> Largest:
    """Find the largest value with which a function fits on a GPU, without a GPU.

    The function makes a model and trains it, as a block of `bfc.predict` does. It is called with
    some of the values, each time in a process of its own, which is a fork of this one.

    Parameters
    ----------
    function : callable
        Called with a value, such as the size of a batch. What it returns is not used.
    values : sequence of int or str
        The values that are allowed: a range, a list, or a text such as "1..512" or "8..512:8".
    device : int or str, optional
        As in `bfc.predict`.
    steps : int, optional
        After so many steps of the optimizer the function is stopped; 0 lets it run to its end.
    settings : str, optional
        As in `bfc.predict`.
    oom : bool, optional
        As in `bfc.predict`.
    real_files : bool, optional
        As in `bfc.predict`.
    as_torch : str, optional
        As in `bfc.predict`.
    jobs : int, optional
        How many processes run at a time. The default is one for each core.

    Returns
    -------
    Largest
        `value`, which is the answer, `first_too_large`, which proves it, and `tries`.

    Raises
    ------
    DeviceUnavailableError
        If there is no torch, or one of a version that is not known, or no C++ compiler.
    ValueError
        If there are no values, or a text is not a range.
    RuntimeError
        If this process has made a prediction itself.

    Notes
    -----
    It takes about as long as two or three predictions of a small program, most of it once for the
    import of PyTorch. This process must not have made a backward pass.

    Examples
    --------
    >>> import bfc
    >>> def train(batch):
    ...     import torch
    ...
    ...     model = torch.nn.Linear(1024, 1024, device="cuda")
    ...     model(torch.randn(batch, 1024, device="cuda")).sum().backward()
    >>> def answer() -> int | None:
    ...     return bfc.largest(train, "1..1000000", "24 GiB").value
    """
    allowed = values_of(values, repr(values)) if isinstance(values, str) else values
    if not isinstance(allowed, range) or allowed.step < 0:
        allowed = sorted(set(allowed))
    if not len(allowed):
        raise ValueError("there are no values to try")
    limits = Limits(steps=steps if steps > 0 else 1 << 62)
    options = {"device": device, "settings": settings, "oom": oom, "as_torch": as_torch}
    with Tries(jobs or usable_cores()) as tries:
        found = Largest("value", allowed)
        settle(
            tries,
            {"": found},
            lambda key, value: _Call(function, value, limits, real_files, options),
            lambda key, value, tried: None,
        )
    return found
