"""Which settings a recorded run fits under, and how small a device it fits on.

One key at a time, then pairs of the best values, then one more key while that helps. A size is
never concluded from others: whether a run completes is not monotone in the device's size, so every
size that is reported was replayed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from bfc_tools.study.candidates import (
    CACHING,
    NEEDS,
    VALUES,
    Outcome,
    Point,
    caching,
    one_key_at_a_time,
    values_of,
)
from bfc_tools.study.candidates import EXPANDABLE as EXPANDABLE_SEGMENTS
from bfc_tools.study.workers import Replays

#: Segments are multiples of this.
GRAIN = 2 << 20
#: Sizes this near to the smallest count as equal: there the calls of the driver decide.
NEAR = 1.01
#: What needs less than this part of a plainer setting's device is worth more words.
SAVES = 1.03
#: Sizes are narrowed to within this part of the live bytes; those of the best, to within GRAIN.
COARSE = 1 / 1024
#: How many of the smallest are narrowed to within GRAIN.
REFINED = 3
#: The values of a key that are paired with those of others.
BEST_OF_A_KEY = 2
#: How often one more key is tried beside the best settings.
CLIMBS = 4
#: Which sizes are tried around one that was found: so many grains below, and such parts of it
#: above.
BELOW = (1, 2, 4, 8)
ABOVE = (1.0025, 1.005, 1.01, 1.02)
#: By what factor a device is enlarged on which nothing completes, and how often at most.
GROWTH, MOST_GROWTHS = 1.25, 40

DEFAULT = Point(CACHING, "")
EXPANDABLE = Point(CACHING, EXPANDABLE_SEGMENTS)


@dataclass
class Candidate:
    """What is known about a point. Sizes are the bytes of devices."""

    point: Point
    #: On the device that was asked for.
    outcome: Outcome
    #: The largest size below `high` where it was refused; at first, one that cannot be enough.
    low: int
    #: The smallest size on which it completed; None if none is known.
    high: int | None = None
    #: What it reserved there.
    reserved: int = 0
    #: Sizes above `high` on which it was refused all the same.
    refused_above: list[int] = field(default_factory=list)
    #: Whether a replay was given up (`Outcome.given_up`). No other size is tried then.
    given_up: bool = False

    def __post_init__(self) -> None:
        self.floor = self.low

    def note(self, size: int, outcome: Outcome) -> None:
        """Learns from a replay."""
        if outcome.given_up:
            self.given_up = True
        elif not outcome.completes:
            if self.high is None or size < self.high:
                self.low = max(self.low, size)
        elif self.high is None or size < self.high:
            self.high, self.reserved = size, outcome.peak_reserved
            if self.low >= size:  # it completes again below a size that was refused
                self.low = max(self.floor, size - GRAIN)

    def is_within(self, step: int) -> bool:
        """Whether the search is done, down to `step`, and was not given up before."""
        return self.high is not None and self.high - self.low <= max(step, GRAIN)

    def next_size(self, bound: float) -> int:
        """Where to replay it next, if only sizes up to `bound` matter."""
        assert self.high is not None
        enough = -(-self.reserved // GRAIN) * GRAIN
        if self.low < enough < self.high:  # no call went further, so none will be refused there
            return enough
        top = int(min(bound, self.high)) // GRAIN * GRAIN
        if self.low < top < self.high:
            return top
        return max((self.low + self.high) // 2 // GRAIN * GRAIN, self.low + GRAIN)


class Search:
    """The search for the trace of `replays` and a device of so many bytes. No device below `live`
    is enough: it is the most that the trace has asked for and not freed. `stage` is called with
    what is done next, in words."""

    def __init__(
        self,
        replays: Replays,
        device: int,
        live: int,
        stage: Callable[[str], object] = lambda text: None,
    ) -> None:
        self.replays = replays
        self.device = device
        self.live = live
        self.stage = stage
        self.coarse = max(GRAIN, int(live * COARSE) // GRAIN * GRAIN)
        self.candidates: dict[Point, Candidate] = {}

    # Learning

    def add(self, points: Iterable[Point]) -> list[Candidate]:
        """Replays points on the device itself."""
        listed = list(dict.fromkeys(points))
        outcomes = self.replays.run([(point, self.device) for point in listed])
        floor = max(0, (self.live - 1) // GRAIN * GRAIN)
        for point, outcome in zip(listed, outcomes, strict=True):
            if point not in self.candidates:
                made = Candidate(point, outcome, floor)
                made.note(self.device, outcome)
                self.candidates[point] = made
        return [self.candidates[point] for point in listed]

    def try_sizes(self, asked: Sequence[tuple[Candidate, int]]) -> list[Outcome]:
        outcomes = self.replays.run([(candidate.point, size) for candidate, size in asked])
        for (candidate, size), outcome in zip(asked, outcomes, strict=True):
            candidate.note(size, outcome)
        return outcomes

    def narrow(self, candidates: Iterable[Candidate], step: int, beside: bool = True) -> None:
        """Bisects what completes, down to `step`. With `beside`, only as long as a candidate may
        come near the smallest of all."""
        listed = [candidate for candidate in candidates if candidate.high is not None]
        while True:
            open_ = []
            for candidate in listed:
                if candidate.given_up:
                    continue
                near = self.bound(candidate.point) * NEAR if beside else float("inf")
                if not candidate.is_within(step) and candidate.low + GRAIN <= near:
                    open_.append((candidate, candidate.next_size(near)))
            if not open_:
                return
            self.try_sizes(open_)

    def widen(self, candidates: Iterable[Candidate]) -> None:
        """Finds a larger device for what does not complete."""
        size = max(self.device, self.live)
        for _ in range(MOST_GROWTHS):
            left = [it for it in candidates if it.high is None and not it.given_up]
            if not left:
                return
            size = int(size * GROWTH) // GRAIN * GRAIN + GRAIN
            self.try_sizes([(candidate, size) for candidate in left])

    def look_around(self, candidates: Sequence[Candidate]) -> None:
        """Replays sizes just below what was found, where it may complete again, and some above."""
        while True:
            below = [
                (candidate, candidate.high - GRAIN - grains * GRAIN)
                for candidate in candidates
                for grains in BELOW
                if candidate.high is not None and candidate.high - GRAIN * (grains + 1) >= self.live
            ]
            found = {candidate.point: candidate.high for candidate in candidates}
            self.try_sizes(below)
            moved = [it for it in candidates if it.high != found[it.point]]
            if not moved:
                break
            self.narrow(moved, GRAIN, beside=False)
            candidates = [*moved, *(it for it in candidates if it not in moved)]
        above = [
            (candidate, -(-int(candidate.high * part) // GRAIN) * GRAIN)
            for candidate in candidates
            for part in ABOVE
            if candidate.high is not None
        ]
        for (candidate, size), outcome in zip(above, self.try_sizes(above), strict=True):
            if not outcome.completes and size not in candidate.refused_above:
                candidate.refused_above.append(size)

    # Comparing

    def bound(self, point: Point) -> float:
        """The smallest size known to be enough for PyTorch's policy, or for the others."""
        return min(
            (
                candidate.high
                for candidate in self.candidates.values()
                if candidate.high is not None and candidate.point.is_pytorch == point.is_pytorch
            ),
            default=float("inf"),
        )

    @staticmethod
    def order(candidate: Candidate) -> tuple[float, int, int, str]:
        """A sort key: what fits on less comes first, then what refuses less."""
        high = float("inf") if candidate.high is None else candidate.high
        text = candidate.point.settings
        return high, candidate.outcome.refused, len(text), text

    def ranked(self, is_pytorch: bool = True) -> list[Candidate]:
        mine = (it for it in self.candidates.values() if it.point.is_pytorch == is_pytorch)
        return sorted(mine, key=self.order)

    def chosen(self, is_pytorch: bool = True) -> Candidate | None:
        """The best that fits on the device, of PyTorch's policy or of ours."""
        return choose(self.ranked(is_pytorch), self.device, self.coarse)

    # Searching

    def search(
        self, ours: Iterable[Point], grid: Iterable[Point] = (), known: Iterable[Point] = ()
    ) -> None:
        """Looks for the best settings of PyTorch's policy, and of ours. People compare them with
        the settings that are known, and with the defaults: their smallest device is searched in any
        case.

        Settings are combined only where that can help: the run does not fit as it is, and the
        device has room for what is live."""
        compared = [DEFAULT, EXPANDABLE, *known]
        is_possible = self.live <= self.device
        fits = self.add(known or [DEFAULT])[0].outcome.completes
        keys = one_key_at_a_time() if is_possible else {}
        self.stage("one setting at a time")
        single = {
            key: [point for values in listed if (point := caching(values)) is not None]
            for key, listed in keys.items()
        }
        self.add([*compared, *itertools.chain(*single.values()), *ours])
        for is_pytorch in (True, False):
            family = self.ranked(is_pytorch)
            if all(it.high is None for it in family):
                self.widen(family)
        self.narrow(self.candidates.values(), self.coarse)
        if is_possible and not fits:
            self._combine(keys)
        if grid:
            self.stage("the full grid")
            self.narrow(self.add(grid), self.coarse)
        self.stage("the smallest devices")
        self._settle(self.add(compared))

    def _combine(self, keys: dict[str, list[dict[str, str]]]) -> None:
        """Tries pairs of the best values, then one more key while that helps."""
        self.stage("pairs of settings")
        self.improve(self._pairs(self._best_values(keys)))
        for _ in range(CLIMBS):
            before = self.order(self.ranked()[0])
            self.improve(self._one_more(self.ranked()[0]))
            if self.order(self.ranked()[0]) == before:
                break
        self.stage("fewer calls of the driver")
        self._fewer_calls()

    def improve(self, points: Iterable[Point]) -> None:
        """Adds those of some points that complete on less than the smallest so far."""
        listed = [point for point in dict.fromkeys(points) if point not in self.candidates]
        bound = self.bound(DEFAULT)
        size = (int(bound) - 1) // GRAIN * GRAIN if bound < float("inf") else 0
        if size < max(self.live, GRAIN):
            return
        outcomes = self.replays.run([(point, size) for point in listed])
        better = [point for point, it in zip(listed, outcomes, strict=True) if it.completes]
        for candidate in self.add(better):
            self.try_sizes([(candidate, size)])
        self.narrow([self.candidates[point] for point in better], self.coarse)

    def _best_values(self, keys: dict[str, list[dict[str, str]]]) -> dict[str, list[str]]:
        """The values of each key that by themselves fit on the smallest device; all values of a key
        that needs another key."""
        best: dict[str, list[str]] = {}
        for key, listed in keys.items():
            values = [it[key] for it in listed]
            points = {value: caching({key: value}) for value in values}
            ranked = sorted(
                values,
                key=lambda value: self.order(self.candidates[points[value]]),  # type: ignore[index]
            )
            best[key] = ranked[:BEST_OF_A_KEY]
        return best | {key: list(VALUES[key]) for key in NEEDS}

    @staticmethod
    def _pairs(best: dict[str, list[str]]) -> list[Point]:
        made = []
        for (key, values), (other, others) in itertools.combinations(best.items(), 2):
            for value, another in itertools.product(values, others):
                made.append(caching({key: value, other: another}))
        return [point for point in made if point is not None]

    def _fewer_calls(self) -> None:
        """Changes one key of what would be chosen, as long as that saves calls of the driver and
        still fits on a size within NEAR."""
        for _ in range(CLIMBS):
            chosen = self.chosen()
            if chosen is None:
                return
            near = int(self.bound(DEFAULT) * NEAR) // GRAIN * GRAIN
            listed = [it for it in self._one_more(chosen) if it not in self.candidates]
            outcomes = self.replays.run([(point, near) for point in listed])
            fitting = [point for point, it in zip(listed, outcomes, strict=True) if it.completes]
            made = self.add(fitting)
            self.try_sizes([(candidate, near) for candidate in made])
            fewest = chosen.outcome.driver_calls
            self.narrow((it for it in made if it.outcome.driver_calls < fewest), self.coarse)
            if self.chosen() is chosen:
                return

    @staticmethod
    def _one_more(candidate: Candidate) -> list[Point]:
        """A candidate's settings with one key changed, added or left out."""
        now = values_of(candidate.point)
        made = [
            caching(now | {key: value})
            for key, values in VALUES.items()
            for value in (*values, None)
        ]
        return [point for point in made if point is not None]

    def _settle(self, compared: list[Candidate]) -> None:
        """Finds exact sizes of the best few, and rough sizes of what people compare them with."""
        self.widen(compared)
        self.narrow(compared, self.coarse, beside=False)
        settled: set[Point] = set()
        for is_pytorch in (True, False):
            while True:
                few = [it for it in self.ranked(is_pytorch)[:REFINED] if it.high is not None]
                chosen = self.chosen(is_pytorch)
                few += [chosen] if chosen is not None and chosen not in few else []
                new = [it for it in few if it.point not in settled]
                if not new:
                    break
                self.narrow(new, GRAIN, beside=False)
                if is_pytorch:  # ours need what is live and a little more: nothing is below
                    self.look_around(new)
                settled |= {it.point for it in new}


def choose(candidates: Iterable[Candidate], device: int, step: int) -> Candidate | None:
    """The best of those that complete on the device; None if none does. That is the plainest,
    unless another needs a few percent less (SAVES): PyTorch's own advice, then one setting alone,
    then several. Of equally plain ones it is, near the smallest, that with the fewest calls of the
    driver, and then with the fewest bytes."""
    listed = [
        it
        for it in candidates
        if it.outcome.completes and it.high is not None and it.is_within(step)
    ]
    if not listed:
        return None
    smallest = _smallest(listed)
    for plain in range(_plainness(max(listed, key=_plainness)) + 1):
        alike = [it for it in listed if _plainness(it) <= plain]
        if alike and _smallest(alike) <= smallest * SAVES:
            break
    near = [it for it in alike if it.high is not None and it.high <= _smallest(alike) * NEAR]
    return min(
        near,
        key=lambda it: (it.outcome.driver_calls, it.high, len(it.point.settings), it.point),
    )


def _smallest(listed: Sequence[Candidate]) -> int:
    return min(it.high for it in listed if it.high is not None)


def _plainness(candidate: Candidate) -> int:
    """How much a user has to understand: 0 is the least."""
    if candidate.point in (DEFAULT, EXPANDABLE):
        return 0
    return candidate.point.settings.count(":") if candidate.point.is_pytorch else 0
