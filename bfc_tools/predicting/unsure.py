"""Between which figures a prediction lies, where sizes are not known.

The events are played again with other sizes: all that are not known at their least, and all at
their most. So a range is that of the peak, and not a sum over the program.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bfc.libraries import np
from bfc.trace import Trace
from bfc.trace.trace import ALLOCATE, FREE
from bfc_tools.predicting.conditions import ONE_PASS
from bfc_tools.predicting.rules.unknowable import CUSTOM

if TYPE_CHECKING:
    from bfc_tools.predicting.memory import Doubted
    from bfc_tools.predicting.prediction import Prediction

#: What share of the memory what is not known has to decide about for it to be told at once.
MATTERS = 0.02


@dataclass(frozen=True)
class Bounds:
    """Between which figures a peak lies, in bytes, as far as it is known.

    Attributes
    ----------
    low : int
        The peak if all that is not known takes its least.
    high : int or None
        The peak if all of it takes its most; None if no upper bound is known of something.
    with_an_fft : int or None
        The same if cuDNN may also convolve by FFTs, whose workspaces are gigabytes at worst.
    because : list of str
        What is not known, in words; empty if all is.
    """

    low: int
    high: int | None
    with_an_fft: int | None
    because: list[str]

    def matters(self, peak: int) -> bool:
        """Whether the range is more than a fiftieth of the peak, or has no end."""
        high = self.with_an_fft
        return bool(self.because) and (high is None or high - self.low > MATTERS * peak)


@dataclass(frozen=True)
class Value:
    """Lines at which values decide about the figures that are not known: "at least", "at most" or
    "about", why, what was made up there, and the most bytes that were live before."""

    side: str
    why: str
    made_up: list[dict[str, Any]]
    before: int


#: What was made up of what decides the figures, by how it begins: which side they are on, and what
#: is said of it.
_OPEN = {
    ONE_PASS: ("at least", "is passed as often as values want it, which are not known: once here"),
    "split: even parts": ("about", "parts are as long as values want it: all alike here"),
    "counts of choices: even": ("about", "choices fall as values want it: evenly here"),
    "a mask, or nonzero: all": ("at most", "values choose elements: all of them here"),
    "unique: all rows": ("at most", "values say which rows are alike: none here"),
}
#: The bytes of an index, as those of what a mask takes.
_INDEX = 8


def steps(trace: Trace) -> Any:
    """By how many bytes each event changes what is live."""
    sizes = trace.size.astype(np.int64)
    return np.where(trace.op == ALLOCATE, sizes, np.where(trace.op == FREE, -sizes, 0))


def values(found: Prediction) -> Iterator[Value]:
    """What values decide about, unless it is a small part of the figures."""
    for begin, (side, why) in _OPEN.items():
        made_up = [one for one in found.assumptions if one["what"].startswith(begin)]
        if side == "at most":
            least = MATTERS * found.peak_requested
            made_up = [one for one in made_up if _INDEX * int(one["value"]) > least]
        if made_up:
            first = min(one["event"] for one in made_up)
            live = int(np.cumsum(steps(found.trace))[:first].max(initial=0))
            yield Value(side, f"a loop {why}" if begin == ONE_PASS else why, made_up, live)


def reasons(doubted: Sequence[Doubted]) -> list[str]:
    """What is not known, each kind once, what may take most first."""
    most: dict[str, float] = {}
    for one in doubted:
        least, size, why = one.doubt.least, one.doubt.most, one.doubt.why
        most[why] = max(most.get(why, 0), math.inf if size is None else size - least)
    return sorted(most, key=lambda why: -most[why])


def bounds(
    found: Prediction, doubted: Sequence[Doubted], runs: Sequence[tuple[int, ...]]
) -> tuple[Bounds, ...]:
    """What each peak leaves open, and what else is not known: operators of others, and values.
    `runs` has the peaks with sizes as counted, at their least, their most and at worst."""
    because, open_end = reasons(doubted), any(one.doubt.most is None for one in doubted)
    for name in sorted(name for name, why in found.unknown.items() if why == CUSTOM):
        because.append(f"it is not known what {name} allocates inside")
        open_end = True
    lower: list[int] = []
    for one in values(found):
        because.append(one.why)
        open_end |= one.side != "at most"
        if one.side != "at least":
            lower.append(max(found.least_requested, one.before))
    made = []
    for peaks in zip(*runs, strict=True):
        low = min([*peaks, *lower])
        high, worst = (None, None) if open_end else (max(peaks[:3]), max(peaks))
        made.append(Bounds(low, high, worst, [*because]))
    return tuple(made)


#: What can be asked of sizes that are not known: they are fields of a `Doubt`.
LEAST, MOST, AT_WORST = "least", "most", "at_worst"


def at(trace: Trace, doubted: Sequence[Doubted], which: str) -> Trace:
    """The same events, where sizes that are not known are the LEAST that they may be, the MOST, or
    that AT_WORST; as counted without an upper bound. It has no owners and no stacks."""
    sizes: dict[int, int] = {}
    moments: list[tuple[int, int]] = []
    for one in doubted:
        size: int | None = getattr(one.doubt, which)
        if which == AT_WORST and size is None:
            size = one.doubt.most
        if size is not None and one.number >= 0:
            sizes[one.number] = size
        elif size and one.number < 0:
            moments.append((one.event, size))
    op, number, size_of, stream = (
        np.array(one) for one in (trace.op, trace.id, trace.size, trace.stream)
    )
    if sizes:
        other = np.full(int(number.max()) + 1, -1, np.int64)
        other[list(sizes)] = list(sizes.values())
        changed = (other[number] >= 0) & ((op == ALLOCATE) | (op == FREE))
        size_of[changed] = other[number[changed]]
        kept = ~(changed & (size_of == 0))
    else:
        kept = np.ones(len(op), bool)
    return _with_moments(trace, (op, number, size_of, stream), kept, moments)


def _with_moments(trace: Trace, columns: Any, kept: Any, moments: list[tuple[int, int]]) -> Trace:
    """What is allocated and freed at once, between the events that are kept."""
    where = np.repeat(np.array([event for event, _ in moments], np.int64), 2)
    where = np.concatenate(([0], np.cumsum(kept)))[where]
    first = int(np.max(columns[1], initial=0)) + 1
    more = (
        np.tile([ALLOCATE, FREE], len(moments)),
        np.repeat(np.arange(first, first + len(moments)), 2),
        np.repeat(np.array([size for _, size in moments], np.int64), 2),
        np.zeros(2 * len(moments), np.int64),
    )
    made = (
        np.insert(one[kept], where, added.astype(one.dtype))
        for one, added in zip(columns, more, strict=True)
    )
    return Trace(*made, meta=trace.meta)
