"""Whether a program fits: the one answer that all that is printed comes from.

What is asked is whether PyTorch refuses a request on a device of that size: in the steps that ran,
if the last of them goes on, and, before PyTorch 2.13, wherever the driver's addresses lie. Each of
these is a run, which is replayed on the device where it would reserve more than that has.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bfc.trace import Trace
from bfc.units import format_bytes
from bfc_tools.predicting.repeats import REPEATS
from bfc_tools.predicting.unsure import LEAST, MOST, Bounds
from bfc_tools.study.candidates import CACHING, COLLECTS, WITH_A_LIMIT, Point, replay

if TYPE_CHECKING:
    from bfc_tools.predicting.prediction import Prediction

#: What a run is of: the steps that ran, the last one again and again, other addresses.
STEPS, REPEATED, ADDRESSES = "steps", "repeated steps", "addresses"
#: Why something does not fit, if not for one of these: the program was refused memory.
REFUSED = "refused"


@dataclass(frozen=True)
class Run:
    """A run that has to fit, and what it reserves on a device that never refuses."""

    kind: str
    trace: Trace
    peak_reserved: int


@dataclass(frozen=True)
class Refusal:
    """A request that a program was refused. Sizes are bytes.

    Attributes
    ----------
    event : int
        How many events of the trace were before it.
    nbytes : int
        What was asked for.
    line : str
        The line of the program, such as "train.py:61 in step".
    live : int
        What the program had asked for, and not freed.
    reserved : int
        What PyTorch had taken from the device.
    free : int
        What the device had left.
    """

    event: int
    nbytes: int
    line: str
    live: int
    reserved: int
    free: int


@dataclass(frozen=True)
class Verdict:
    """The answer of a prediction. `print` shows it.

    Attributes
    ----------
    fits : bool or None
        Whether PyTorch serves every request on the device. None if the program ended before that
        was known.
    answer : str
        The same as a sentence, with the figures.
    limit : int
        What PyTorch may take, in bytes: what the device leaves to it, or less, if the program or
        its settings say so.
    reason : str
        What does not fit: "steps", those that ran; "repeated steps", the last one made again and
        again; "addresses", in some layouts of the driver's addresses; "refused", the program was
        refused memory, or said so. Empty if nothing was found that does not fit.
    fits_at_least, fits_at_most : bool or None
        Whether the steps that ran would fit with all that is not known at its least, and at its
        most, at the predicted addresses, and without an FFT of cuDNN's: `fits` goes by what is
        counted. None if it is not known: there is no upper bound, or the program ended early. None
        also means that it was not asked: the least, where something else than these steps does not
        fit, or memory was refused.
    """

    fits: bool | None
    answer: str
    limit: int
    reason: str = ""
    fits_at_least: bool | None = None
    fits_at_most: bool | None = None

    @property
    def _as_counted(self) -> bool:
        """Whether what is not known may turn the answer, which then begins with "As counted"."""
        return not self.fits_at_most if self.fits else bool(self.fits_at_least)

    def __str__(self) -> str:
        return self.answer


def decide(found: Prediction, limit: int, on: str, *, until: str = "") -> Verdict:
    """The verdict for a device on which PyTorch may take `limit` bytes: `on` names it. `until`
    says how the program ended before its end was known, as "failed"."""
    settings = settings_under_a_limit(found.settings)
    reason = first_that_fails(found.runs(), settings, limit)
    if found.refusals or found.ran_out:
        reason = REFUSED
    told = _answer(found, limit, reason, on)
    if reason == ADDRESSES:
        places = places_that_fit(found.runs(), settings, limit)
        told += f" It fits at {sum(places)} of the {len(places)} that were tried."
    if until and not reason:
        return Verdict(None, f"Until it {until}: It {told}", limit, reason)
    extremes = _at_extremes(found, settings, limit, reason)
    verdict = Verdict(not reason, f"It {told}", limit, reason, *extremes)
    if verdict._as_counted:
        other = _otherwise(found.reserved_bounds, verdict)
        return replace(verdict, answer=f"As counted, it {told} It may need {other}.")
    return verdict


def _at_extremes(
    found: Prediction, settings: str, limit: int, reason: str
) -> tuple[bool | None, bool | None]:
    """Whether it would fit with all that is not known at its least, and at its most. The least is
    asked only of the steps that ran, where these do not fit as counted."""
    held, fits = found.reserved_bounds, not reason
    if not held.because:
        return fits, fits
    if fits:
        if held.high is None:
            return True, None
        return True, _completes(Run(STEPS, found._at(MOST), held.high), settings, limit)
    if reason != STEPS:
        return None, False
    return _completes(Run(STEPS, found._at(LEAST), held.low), settings, limit), False


def _otherwise(held: Bounds, verdict: Verdict) -> str:
    """What it may need instead of what is counted, where that turns the answer."""
    if not verdict.fits:
        just = ", if only just" if held.low > verdict.limit else ""
        return f"as little as {format_bytes(held.low)}, which would fit{just}"
    if held.high is None:
        return "more: no upper bound is known"
    return f"up to {format_bytes(held.high)}, which would not fit"


def first_that_fails(runs: Sequence[Run], settings: str, limit: int) -> str:
    """The kind of the first run that is refused something; empty if none is."""
    return next((run.kind for run in runs if not _completes(run, settings, limit)), "")


def places_that_fit(runs: Sequence[Run], settings: str, limit: int) -> list[bool]:
    """Whether the steps that ran are served, for each layout of the driver's addresses."""
    return [_completes(run, settings, limit) for run in runs if run.kind != REPEATED]


def _completes(run: Run, settings: str, limit: int) -> bool:
    if run.peak_reserved <= limit:
        return True
    return replay(run.trace, Point(CACHING, settings), limit).completes


def settings_under_a_limit(settings: str) -> str:
    """The settings for a device that has no more than the limit: without a fraction of its own,
    but where PyTorch collects garbage only under a limit."""
    kept = _FRACTION.sub("", settings).strip(", ")
    return f"{kept},{WITH_A_LIMIT}" if COLLECTS in kept else kept


_FRACTION = re.compile(r"(^|,)\s*per_process_memory_fraction\s*:[^,]*")


def _answer(found: Prediction, limit: int, reason: str, on: str) -> str:
    """What stands behind "It"."""
    held, low, high = found.peak_reserved, *found.reserved_range()
    after = found.reserved_after() or 0
    reserves = format_bytes(held)
    if reason == REFUSED:
        return _refused(found, on)
    if reason == STEPS:
        return f"does not fit on {on}: it would reserve {reserves}."
    if reason == ADDRESSES:
        between = f"{format_bytes(low)} to {format_bytes(high)}"
        return (
            f"may not fit on {on}: it would reserve {between}, by the addresses that the driver "
            "gives."
        )
    if reason == REPEATED:
        return (
            f"does not fit on {on}: the steps that ran do, and reserve {reserves}, but not the "
            f"last one made {REPEATS} times more, which would reserve {format_bytes(after)}."
        )
    if high > limit:
        more = format_bytes(high)
        return f"fits on {on}, if only just: with more room it would reserve {more}."
    if high > low:
        reserves = f"{format_bytes(low)} to {format_bytes(high)}"
    repeated = ""
    if limit >= after > high:
        repeated = f", and {format_bytes(after)} if its last step is made {REPEATS} times more"
    most = "" if found.reserved_bounds.because else "at most "
    return f"fits on {on}: it reserves {most}{reserves}{repeated}."


def _refused(found: Prediction, on: str) -> str:
    if not found.refusals:
        return f"does not fit on {on}: the program says that it ran out of memory."
    first, *others = found.refusals
    at = f" at {first.line}" if first.line else ""
    more = ""
    if others:
        more = f", and {len(others)} more request{'s' if others[1:] else ''} later"
    return (
        f"runs out of memory on {on}: {format_bytes(first.nbytes)} were refused{at}, where "
        f"{format_bytes(first.reserved)} were reserved{more}."
    )
