"""The order of births and deaths in a recorded run, and where pieces of it come again.

Sizes change with the lengths of a batch. Which block is born after which, and how many requests it
outlives, hardly does.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bfc.libraries import NDArray, np

if TYPE_CHECKING:
    from bfc.trace.trace import Trace

    Signs = NDArray[np.uint64]
    Numbers = NDArray[np.int64]

#: How many requests in a row make a window. Long ones are hardly ever alike by chance; short ones
#: are found in small iterations, too, and between requests that were left out or put in.
WINDOWS = (24, 8)
#: Lives up to this many requests count exactly, longer ones to a factor of two: what is put in or
#: left out while a block lives changes the long ones.
EXACT_LIFE = 12
FOR_EVER = 63
#: Distances are one period where they differ by less than this factor.
NEAR = 0.88
#: Of a window that comes once an iteration, so many distances are near their median, at most so
#: many far below it (other kinds of iterations in between make some of them longer), ...
STEADY, SHORT = 0.6, 0.1
#: ... and it is found over so much of the run.
SPANS = 0.4


@dataclass(frozen=True, eq=False)
class Lives:
    """The requests of a run, numbered from 0, and how long each block lives."""

    event: Numbers
    size: Numbers
    stream: Numbers
    death: Numbers  # the request before which it is freed; -1 if it never is

    @classmethod
    def of(cls, trace: Trace) -> Lives:
        """Those of a trace."""
        event, death = trace._requests()
        size, stream = (column[event].astype(np.int64) for column in (trace.size, trace.stream))
        return cls(event, size, stream, death)

    def __len__(self) -> int:
        return len(self.event)

    @functools.cached_property
    def signs(self) -> Signs:
        """A number for each request that does not depend on lengths: its stream, its life, and
        whether it is larger than the request before it."""
        life = self.death - np.arange(len(self))
        longer = np.log2(np.maximum(life, EXACT_LIFE) / EXACT_LIFE).astype(np.int64)
        known = np.where(life < EXACT_LIFE, life, EXACT_LIFE + longer)
        signs = np.where(self.death < 0, FOR_EVER, known).astype(np.uint64) * np.uint64(4)
        return signs + self.orders()

    def orders(self) -> Signs:
        """A number for each request that says its stream, and whether it is larger than the request
        before it: all that is known at the end of a recording, where the frees are missing."""
        grows = np.zeros(len(self), np.int64)
        grows[1:] = 1 + np.sign(np.diff(self.size))
        return (self.stream * 256 + grows).astype(np.uint64)

    def sizes(self) -> Signs:
        """A number for each request that says its size and stream: the first iteration of a run has
        the sizes of the others, and other lives, since more is made in it."""
        return self.size.astype(np.uint64) * np.uint64(256) + self.stream.astype(np.uint64)

    @functools.cached_property
    def live(self) -> Numbers:
        """How many blocks are live right before each request."""
        return self._sums(np.ones(len(self), np.int64)).astype(np.int64)

    @functools.cached_property
    def held(self) -> NDArray[np.float64]:
        """What computation still holds right before each request.

        A block that is freed by itself counts as one. Of blocks that are freed together, without a
        request in between, each counts a part of one: gradients that are dropped, or all that a
        program has at its end, lived because they had names, and not because more was to be done.
        """
        dies = self.death >= 0
        together = np.bincount(self.death[dies], minlength=len(self) + 1)
        weight = np.zeros(len(self))
        weight[dies] = 1 / together[self.death[dies]]
        return np.maximum(self._sums(weight), 0)

    def _sums(self, weight: NDArray[np.float64]) -> NDArray[np.float64]:
        dies = self.death >= 0
        change = np.zeros(len(self) + 1, weight.dtype)
        change[1:] += weight
        np.subtract.at(change, self.death[dies], weight[dies])
        return np.cumsum(change)[: len(self)]


def windows(signs: Signs, length: int) -> Signs:
    """A number for each window of so many signs in a row."""
    total = max(0, len(signs) - length + 1)
    hashed = np.zeros(total, np.uint64)
    for i in range(length):  # modulo 2**64
        hashed = hashed * np.uint64(0x9E3779B97F4A7C15) + signs[i : i + total] + np.uint64(1)
    return hashed


@dataclass(frozen=True, eq=False)
class Repeats:
    """Windows that come again, and how far apart."""

    order: Numbers  # where the windows begin, equal ones in a row
    first: Numbers  # of each different window, its first index in `order`
    count: Numbers
    apart: Numbers  # the median distance between two of them
    steady: NDArray[np.bool_]  # whether it comes once in each of something

    @classmethod
    def of(cls, hashed: Signs) -> Repeats:
        order = np.argsort(hashed, kind="stable")
        ordered = hashed[order]
        first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        count = np.diff(np.concatenate([first, [len(order)]]))
        which = np.repeat(np.arange(len(first)), count)
        again = which[1:] == which[:-1]
        distance, which = np.diff(order)[again], which[1:][again]
        if not len(distance):
            return cls(order, first, count, np.zeros_like(count), np.zeros(len(first), bool))
        begins = np.searchsorted(which, np.arange(len(first)))
        middle = np.minimum(begins + (count - 1) // 2, len(distance) - 1)
        apart = np.where(count > 1, distance[np.lexsort((distance, which))][middle], 0)
        near = np.bincount(which, abs(distance - apart[which]) <= 0.15 * apart[which], len(first))
        short = np.bincount(which, distance < 0.6 * apart[which], len(first))
        spans = order[first + count - 1] - order[first] + apart
        steady = (near >= STEADY * (count - 1)) & (short <= SHORT * count)
        return cls(
            order, first, count, apart, steady & (count > 1) & (spans >= SPANS * len(hashed))
        )

    def places(self, window: int) -> Numbers:
        """Where a window is, in order."""
        return self.order[self.first[window] : self.first[window] + self.count[window]]

    def periods(self) -> Iterator[tuple[float, Numbers]]:
        """Distances at which windows come again, the longest first, and these windows."""
        chosen = np.flatnonzero(self.steady)
        chosen = chosen[np.argsort(-self.apart[chosen], kind="stable")]
        apart = self.apart[chosen].astype(float)
        begin = 0
        while begin < len(chosen):
            end = int(np.searchsorted(-apart, -apart[begin] * NEAR, "right"))
            yield float(np.median(apart[begin:end])), chosen[begin:end]
            begin = end


@dataclass(frozen=True, eq=False)
class Index:
    """Where short windows of a run are: by lives, sizes and order."""

    tables: tuple[tuple[Signs, Signs, Numbers], ...]  # by place; sorted; their places

    @classmethod
    def of(cls, lives: Lives) -> Index:
        sizes = lives.sizes()
        hashed = (
            windows(lives.signs, WINDOWS[-1]),
            windows(sizes, WINDOWS[-1]),
            windows(sizes, 3),
            windows(lives.orders(), WINDOWS[0]),
        )
        orders = [np.argsort(one, kind="stable") for one in hashed]
        return cls(
            tuple((one, one[order], order) for one, order in zip(hashed, orders, strict=True))
        )

    def head(self, begin: int, length: int) -> Head:
        """What begins at a request, to be looked for elsewhere."""
        found = []
        for hashed, ordered, order in self.tables:
            wanted = hashed[begin : begin + length]
            lowest, end = (np.searchsorted(ordered, wanted, side) for side in ("left", "right"))
            found.append([order[x:y] - i for i, (x, y) in enumerate(zip(lowest, end, strict=True))])
        return Head(tuple(found))


@dataclass(frozen=True, eq=False)
class Head:
    """The first windows of an iteration: for each, where it would begin by each of its places."""

    begins: tuple[list[Numbers], ...]

    def find(self, begin: int, end: int, *, by_order: bool = False) -> tuple[int, float]:
        """The request from `begin` to `end` at which it begins, the first one if several are as
        good, and which part of it is there. Where frees are missing, the order of sizes counts,
        which an evaluation has, too."""
        tables = self.begins if by_order else self.begins[:-1]
        found = [_most_votes(one, begin, end) for one in tables]
        best = max(share for _, share in found)
        return min((at, share) for at, share in found if share >= 0.95 * best)


def _most_votes(begins: list[Numbers], lowest: int, end: int) -> tuple[int, float]:
    inside = [places[slice(*np.searchsorted(places, (lowest, end)))] for places in begins]
    votes = np.concatenate([*inside, np.zeros(0, np.int64)]).astype(np.int64)
    if not len(votes):
        return lowest, 0.0
    voter = np.repeat(np.arange(len(inside)), [len(one) for one in inside])
    order = np.argsort(votes, kind="stable")
    votes, voter = votes[order], voter[order]
    near = max(1, len(begins) // 16)
    upto = np.searchsorted(votes, votes + near, "right")
    many = upto - np.arange(len(votes))
    # Where layers are alike, a later one is nearly as good: the iteration begins with the first
    likely = np.flatnonzero(many >= 0.8 * many.max())[:64]
    voters = {int(one): len(np.unique(voter[one : upto[one]])) for one in likely}
    most = max(voters.values())
    first = min(one for one, count in voters.items() if count >= 0.85 * most)
    best = max((one for one in voters if one < upto[first]), key=lambda one: voters[one])
    at = int(np.median(votes[best : upto[best]]))
    # What is put in behind the first windows shifts those behind it: the first ones know
    around = (votes <= at + near) & (votes > at - max(8, len(begins) // 10))
    knows = np.flatnonzero(around & (voter < max(2, len(begins) // 4)))
    if len(knows):
        knows = knows[np.lexsort((abs(votes[knows] - at), voter[knows]))]
        _, nearest = np.unique(voter[knows], return_index=True)
        at = int(np.median(votes[knows[nearest[:5]]]))
    return at, voters[best] / len(begins)
