"""The iterations of a run beside each other: what each holds, and what it leaves behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bfc.libraries import np
from bfc.trace import Trace
from bfc.trace.iterations import Iterations
from bfc.units import format_bytes

#: Later iterations hold the same if they differ by less than this part.
ALIKE = 0.005
#: What stays behind is said if it adds up to this part of the peak, and if it grows this often.
KEPT, OFTEN = 0.005, 0.9


@dataclass(frozen=True)
class IterationFigures:
    """What one iteration of a run holds. Sizes are in bytes.

    Attributes
    ----------
    kind : str
        As `Trace.iterations` names it, such as "train".
    begin, end : int
        Its first event, and the event behind its last one.
    complete : bool
        Whether the recording has its end.
    agreement : float
        Which part of it, from 0 to 1, is found in another iteration of its kind.
    allocations : int
        How many it makes.
    peak_live : int
        The most that is live in it at once, with what was live before.
    peak_event : int
        The event after which that is so, the first of several.
    live_after : int
        What is live at its end.
    """

    kind: str
    begin: int
    end: int
    complete: bool
    agreement: float
    allocations: int
    peak_live: int
    peak_event: int
    live_after: int


def figures_of(trace: Trace, found: Iterations) -> tuple[IterationFigures, ...]:
    """The figures of each iteration that was found in a trace, in the order of the run.

    Cost: linear in the events.
    """
    live = trace._live()
    made = np.concatenate([[0], np.cumsum(trace.op == 0)])
    figures = []
    for one in found:
        peak = one.begin + int(live[one.begin : one.end].argmax())
        figures.append(
            IterationFigures(
                one.kind,
                one.begin,
                one.end,
                one.complete,
                one.agreement,
                int(made[one.end] - made[one.begin]),
                int(live[peak]),
                peak,
                int(live[one.end - 1]),
            )
        )
    return tuple(figures)


@dataclass(frozen=True)
class Steady:
    """The first iteration of a run beside the later ones. Sizes are in bytes.

    Attributes
    ----------
    kind : str
        The kind of iteration that makes up most of the run.
    iterations : int
        How many of that kind there are.
    first_live : int
        The most that is live in the first of them.
    later_live : tuple of int
        The least and the most that later ones hold at most.
    kept_each : int
        What stays live after each, on the average, where it grows from one to the next; else 0.
    peak_is_before : bool
        Whether the most of the run is live before the first iteration.
    reserved : tuple of int
        What the settings in force reserve at most up to the end of the first iteration, of the
        second, and of the run. Empty where nothing was replayed.
    """

    kind: str
    iterations: int
    first_live: int
    later_live: tuple[int, int]
    kept_each: int
    peak_is_before: bool
    reserved: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """All of it, in one sentence."""
        least, most = self.later_live
        later = format_bytes(most)
        if most - least > ALIKE * most:
            later = f"{format_bytes(least)} to {later}"
        ones = "one" if self.iterations == 2 else "ones"
        text = (
            f"{self.iterations} iterations ({self.kind}): the first holds "
            f"{format_bytes(self.first_live)} at most, the later {ones} {later}"
        )
        if self.peak_is_before:
            text += "; the most is live before them"
        if self.reserved:
            first, second, whole = map(format_bytes, self.reserved)
            text += (
                f"; the settings in force reserve {first} up to the end of the first, {second} up "
                f"to that of the second, {whole} in all"
            )
        if self.kept_each:
            text += (
                f"; after each, {format_bytes(self.kept_each)} more stay live: something is kept "
                "from one to the next"
            )
        return f"{text}."


def steady_of(trace: Trace, figures: Sequence[IterationFigures]) -> Steady | None:
    """The first iteration beside the later ones; None where fewer than two are of one kind."""
    events: Counter[str] = Counter()
    for one in figures:
        events[one.kind] += one.end - one.begin
    kind = events.most_common(1)[0][0] if events else ""
    mine = [one for one in figures if one.kind == kind]
    if len(mine) < 2:
        return None
    later = [one for one in mine[1:] if one.complete] or mine[1:]  # one that is cut off has no peak
    peaks = [one.peak_live for one in later]
    return Steady(
        kind,
        len(mine),
        mine[0].peak_live,
        (min(peaks), max(peaks)),
        _kept_each([one for one in mine if one.complete and one.end < len(trace)]),
        trace.fullest_event() < mine[0].begin,
    )


def _kept_each(mine: Sequence[IterationFigures]) -> int:
    """What more is live after each from the first on, where that grows nearly always. Warm-up is
    over after the first; two later ones tell nothing. At its end a program frees what it has."""
    after = [one.live_after for one in mine]
    rises = np.diff(np.array(after, np.int64))
    if len(rises) < 3 or (rises > 0).mean() < OFTEN or (rises[1:] < 0).any():
        return 0
    kept = after[-1] - after[1]
    enough = kept >= KEPT * max(one.peak_live for one in mine)
    return kept // (len(after) - 2) if enough else 0
