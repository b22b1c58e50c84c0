"""A search for the largest of some values that fits, which uses what its tries have shown.

What a program reserves is nearly affine in the size of a batch, between jumps. So a line through
two tries says where the limit is reached, and the two values there mostly prove it: the last that
fits and the first that does not. Where the line is wrong, the interval between them is halved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

#: After so many tries that failed, none of which fits or does not, the search ends.
MOST_FAILURES = 8
#: With nothing but failures, sooner.
FAILURES_AT_FIRST = 4
#: No try is at more than so many times a value that is known to fit: the program may take long.
FARTHEST = 64


@dataclass(frozen=True)
class Known:
    """What a try has shown: whether it fits, None if it failed; what it needs, in bytes."""

    fits: bool | None
    needs: int = 0
    limit: int = 0


@dataclass
class Bounds:
    """What is known of some values, which rise; `known` is by their place among them.

    `wanted` says what to try next. The answer is `largest`, and `first_too_large` proves it.
    """

    values: Sequence[int]
    width: int = 2  # how many tries run at a time
    known: dict[int, Known] = field(default_factory=dict)
    _gaps: list[int] = field(default_factory=list)
    _steps: int = 0

    def learn(self, at: int, known: Known) -> None:
        """Notes what a try has shown."""
        self.known[at] = known

    @property
    def first_too_large(self) -> int | None:
        """The place of the smallest value that is known not to fit."""
        return min((at for at, one in self.known.items() if one.fits is False), default=None)

    @property
    def largest(self) -> int | None:
        """The place of the largest value that fits, of those below all that do not."""
        end = self.first_too_large
        fitting = (at for at, one in self.known.items() if one.fits and (end is None or at < end))
        return max(fitting, default=None)

    @property
    def beyond(self) -> list[int]:
        """The places of values that fit, though smaller ones do not."""
        end = self.first_too_large
        return [at for at, one in sorted(self.known.items()) if one.fits and end and at > end]

    @property
    def failed(self) -> list[int]:
        """The places of values at which the program failed."""
        return sorted(at for at, one in self.known.items() if one.fits is None)

    @property
    def gave_up(self) -> bool:
        """Whether too many tries failed for an answer."""
        most = MOST_FAILURES if len(self.failed) < len(self.known) else FAILURES_AT_FIRST
        return len(self.failed) >= most and self.is_open

    @property
    def is_open(self) -> bool:
        """Whether there are values that would say more."""
        low, end = self.largest, self.first_too_large
        first = -1 if low is None else low
        last = len(self.values) if end is None else end
        return sum(first < at < last for at in self.known) < last - first - 1

    def wanted(self) -> list[int]:
        """The places to try next, at most `width`; none if the answer is proven, or if the search
        has given up."""
        if self.gave_up or not self.is_open:
            return []
        low, end = self.largest, self.first_too_large
        if low is None:
            return self._first() if end is None else self._near(end // 2, -1, end)
        top = len(self.values) if end is None else end
        failures = [at for at in self.failed if low < at < top]
        if len(failures) > 1 and failures[0] > low + 1:  # all from there on may fail
            return self._some([(low + failures[0]) // 2, failures[0] - 1], low, top)
        if end is None:
            at = self._beyond(low)
            return self._some([at, at + 1], low, top)
        self._gaps.append(end - low)
        at, middle = self._between(low, end), (low + end) // 2
        were_wrong = len(self._gaps) > 2 and self._gaps[-1] > self._gaps[-2] / 4
        return self._some([middle, at] if were_wrong else [at, at + 1], low, end)

    # -- where to look --------------------------------------------------------------------------

    def _first(self) -> list[int]:
        """The smallest, and another not far from it, so that the line is known. Where these fail,
        others."""
        second = self._place(2 * max(1, self.values[0]) + 6)
        if not self.known:
            return list(dict.fromkeys((0, min(max(1, second), len(self.values) - 1))))
        after = max(self.known)
        return self._near(min(2 * after + 1, len(self.values) - 1), -1, len(self.values))

    def _place(self, value: float) -> int:
        """The place of the largest value that is not larger; 0 if all are."""
        return max(0, bisect_right(self.values, value) - 1)

    def _beyond(self, low: int) -> int:
        """Where the line through two that fit reaches the limit; not too far. If that was too near
        before, farther each time."""
        value, least = self.values[low], low + (1 << self._steps)
        self._steps += 1
        far = self._place(FARTHEST * max(1, value))
        one = self.known[low]
        below = sorted((at for at in self.known if at < low), reverse=True)
        for other in sorted(below, key=lambda at: at == low - 1):  # jumps count most in one step
            there = self.known[other]
            if there.fits and there.needs < one.needs:
                slope = (one.needs - there.needs) / (value - self.values[other])
                at = self._place(max(value, value + (one.limit - one.needs) / slope))
                return max(min(at, far), least)
        return max(far, least)

    def _between(self, low: int, end: int) -> int:
        """Where the line between the two reaches the limit."""
        a, b = self.known[low], self.known[end]
        if b.needs <= a.needs:
            return (low + end) // 2
        share = (a.limit - a.needs) / (b.needs - a.needs)
        value = self.values[low] + share * (self.values[end] - self.values[low])
        return self._place(min(max(value, self.values[low]), self.values[end]))

    def _some(self, first: list[int], low: int, end: int) -> list[int]:
        """These places, and with more room others, all between two places, which are left out
        themselves. Where one is known, its nearest neighbour that is not."""
        found: list[int] = []
        shares = range(1, max(1, self.width - 1))
        for place in (*first, *(low + (end - low) * one // (len(shares) + 1) for one in shares)):
            found += self._near(place, low, end, found)
        return found[: max(1, self.width)]

    def _near(self, at: int, low: int, end: int, taken: Sequence[int] = ()) -> list[int]:
        """The place that is nearest to `at` between two others, and that is not known; if any."""
        at = min(max(at, low + 1), end - 1)
        for far in range(end - low):
            for place in (at - far, at + far):
                if low < place < end and place not in self.known and place not in taken:
                    return [place]
        return []
