"""Iterations whose sizes vary, such as batches of sentences: all of them follow from few."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bfc.libraries import NDArray, np

#: Sizes follow from one length if they are foretold for this part of the requests.
FORETOLD = 0.95
#: The longest length of which squares are taken, in units, and the largest size, in bytes: so what
#: is computed fits 64 bits.
MOST_SQUARED, MOST_BYTES = 1 << 20, 1 << 40
#: The most lengths of an iteration, and how many requests there are at least for each of them.
MOST_KEYS, SLOTS_OF_A_KEY = 256, 2
#: After so many more keys it is given up if hardly anything follows from them.
FEW = 16
#: The unit of a bound: a length is at most so many times `above` + `slope` x.
PARTS = 1024
#: A length follows another in rough terms if they are as alike as that.
CORRELATED = 0.95


@dataclass(frozen=True)
class Key:
    """A request that tells a length, such as that for the tokens of a batch."""

    request: int  # its number in the iteration
    unit: int  # bytes: its size is so many of them as the length
    recorded: int  # the longest length that was recorded
    longest: int  # for which there is room
    like: int  # the first key of which all the same sizes follow, such as that of another batch
    #: Where the first key tells x, this one tells at most (`above` + `slope` x) / 1024. Both are 0
    #: for a key that has nothing to do with the first one.
    above: int = 0
    slope: int = 0
    #: 1 if nothing lives in the region of the bodies when its request comes, as far as is known:
    #: more room can be made then. 0 if something does. 2 for a first key of which that is so since
    #: what outlives its iteration, and does not grow, lies in the region of what is never freed.
    clear: int = 1


@dataclass(frozen=True, eq=False)
class Lengths:
    """How the sizes of an iteration grow with its lengths."""

    keys: tuple[Key, ...]  # in the order of their requests
    follows: NDArray[np.uint32]  # of each request: the key that its size follows from
    #: The bytes of each request before they are rounded, as a polynomial of the length, shape
    #: (slots, 3): constant, linear and square term.
    growth: NDArray[np.int64]

    def sizes(self, lengths: Sequence[int]) -> NDArray[np.uint64]:
        """The bytes of each request before they are rounded, where each key tells its length."""
        x = np.array(lengths, np.int64)[self.follows]
        return np.maximum(evaluated(self.growth, x), 1).astype(np.uint64)

    def most(self, lengths: Sequence[int]) -> int:
        """A bound of those bytes, where they may be too many to be counted in 64 bits."""
        x = np.array(lengths, np.float64)[self.follows]
        terms = np.abs(self.growth.astype(np.float64))
        return int((terms[:, 0] + terms[:, 1] * x + terms[:, 2] * x**2).max())

    def cleared(self, numbers: Sequence[int]) -> Lengths:
        """The same, where nothing lives in the region of the bodies when these keys come, by
        number. Those that have all that are like them among these need no spare room."""
        chosen = {0, *numbers}
        others = {key.like for number, key in enumerate(self.keys) if number not in chosen}
        keys = [
            replace(
                key,
                clear=(number in chosen) + (number == 0),
                longest=key.longest if key.like in others else key.recorded,
            )
            for number, key in enumerate(self.keys)
        ]
        return replace(self, keys=tuple(keys))

    @property
    def recorded(self) -> list[int]:
        """The longest that was recorded of each key."""
        return [key.recorded for key in self.keys]

    @property
    def longest(self) -> list[int]:
        """The longest of each key for which there is room."""
        return [key.longest for key in self.keys]

    def of(self, size: NDArray[np.uint64]) -> list[int]:
        """The lengths that the requests of an iteration tell, which have these bytes."""
        return [int(size[key.request]) // key.unit for key in self.keys]

    def with_room(self, wanted: Mapping[int, int]) -> Lengths:
        """The same, with room for these lengths of some keys, by number. Keys that are like one of
        them have room for as much, and those that are bounded by the first, if that is longer than
        was recorded."""
        longest = dict(wanted)
        first = wanted.get(0, 0)
        for number, key in enumerate(self.keys):
            if number in wanted:
                continue
            like = [wanted[one] for one in wanted if self.keys[one].like == key.like]
            is_bound = key.slope and first > self.keys[0].recorded
            bound = (key.above + key.slope * first) // PARTS if is_bound else 0
            longest[number] = max(key.longest, bound, *like)
        return self.with_keys(longest)

    def with_keys(self, longest: Mapping[int, int]) -> Lengths:
        """The same, with room for just these lengths of some keys, by number."""
        keys = [
            replace(key, longest=longest.get(number, key.longest))
            for number, key in enumerate(self.keys)
        ]
        return replace(self, keys=tuple(keys))


def evaluated(growth: NDArray[np.int64], length: NDArray[np.int64] | int) -> NDArray[np.int64]:
    values: NDArray[np.int64] = growth[:, 0] + growth[:, 1] * length + growth[:, 2] * length**2
    return values


def fitted(iterations: Sequence[NDArray[np.uint64]], most_keys: int = MOST_KEYS) -> Lengths | None:
    """How the sizes that each iteration asks for, before they are rounded, follow from lengths.

    Where the first size that varies tells of all others, but for one of twenty, it is the only
    key. Else each size that follows from no earlier one is a key, and a size follows if a
    polynomial through fewer lengths than are known foretells it in all iterations. None: nothing
    varies, the first key has fewer than three lengths, or there are more keys than `most_keys` or
    than half of the sizes that vary.
    """
    size = np.stack(iterations).astype(np.int64)
    varies = (size != size[0]).any(axis=0)
    if not varies.any() or size.max() >= MOST_BYTES:
        return None
    first = int(varies.argmax())
    unit, length = _told(size[:, first])
    known, at = np.unique(length, return_index=True)
    if len(known) < 3:
        return None
    if known[-1] < MOST_SQUARED:
        three = [0, len(known) // 2, len(known) - 1]
        growth = _through(known[three].tolist(), size[at[three]])
        told = np.stack([evaluated(growth, int(each)) for each in length]) == size
        if told.mean(axis=1).min() >= FORETOLD:
            follows = np.zeros(len(growth), np.uint32)
            keys, growth = _refined([(first, unit, int(known[-1]))], growth, follows)
            return Lengths(keys, follows, growth)
    return _of_many(size, varies, most_keys) if most_keys > 1 else None


def _of_many(size: NDArray[np.int64], varies: NDArray[np.bool_], most_keys: int) -> Lengths | None:
    """The same for iterations whose sizes follow from more than one of them."""
    open_ = np.flatnonzero(varies)
    growth = np.zeros((size.shape[1], 3), np.int64)
    growth[:, 0] = size[0]
    follows = np.zeros(size.shape[1], np.int64)
    found: list[tuple[int, int, int]] = []
    rows: list[NDArray[np.int64]] = []
    while len(open_):
        request = int(open_[0])
        unit, length = _told(size[:, request])
        if len(found) == most_keys:
            return None
        terms, told = _foretold(length, size[:, open_])
        terms[0], told[0] = (0, unit, 0), True
        growth[open_[told]] = terms[told]
        follows[open_[told]] = len(found)
        found.append((request, unit, int(length.max())))
        rows.append(length)
        open_ = open_[~told]
        if len(found) % FEW == 0 and SLOTS_OF_A_KEY * len(found) > varies.sum() - len(open_):
            return None
    if SLOTS_OF_A_KEY * len(found) > varies.sum():
        return None
    keys, growth = _refined(found, growth, follows)
    scale = [old[1] // key.unit for old, key in zip(found, keys, strict=True)]
    lengths = [row * times for row, times in zip(rows, scale, strict=True)]
    keys = _bounded(_alike(keys, growth, follows), lengths)
    spare = _spare(keys, lengths)
    keys = tuple(
        replace(key, longest=key.longest + room, clear=int(number == 0))
        for number, (key, room) in enumerate(zip(keys, spare, strict=True))
    )
    return Lengths(keys, follows.astype(np.uint32), growth)


def _told(size: NDArray[np.int64]) -> tuple[int, NDArray[np.int64]]:
    """The unit of a request's sizes, and the lengths that they tell."""
    unit = int(np.gcd.reduce(size))
    return unit, size // unit


def _foretold(
    length: NDArray[np.int64], size: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Polynomials for sizes, shape (iterations, slots), and which of them hold in all iterations.
    The simplest is taken: a multiple of the length, or affine, or of the second degree, each
    through fewer lengths than are known."""
    known, at = np.unique(length, return_index=True)
    last = len(known) - 1
    growth = np.zeros((size.shape[1], 3), np.int64)
    told = np.zeros(size.shape[1], bool)
    tried = [np.zeros_like(growth)]
    tried[0][:, 1] = size[at[-1]] // known[-1]
    if last >= 2:
        low, high = int(known[0]), int(known[-1])
        affine = np.zeros_like(growth)
        affine[:, 1] = (size[at[-1]] - size[at[0]]) // (high - low)
        affine[:, 0] = size[at[0]] - affine[:, 1] * low
        tried.append(affine)
    if last >= 3 and known[-1] < MOST_SQUARED:
        three = [0, last // 2, last]
        tried.append(_through(known[three].tolist(), size[at[three]]))
    for terms in tried:
        holds = np.all(
            [evaluated(terms, int(x)) == each for x, each in zip(length, size, strict=True)], axis=0
        )
        growth[holds & ~told] = terms[holds & ~told]
        told |= holds
    return growth, told


def _refined(
    found: list[tuple[int, int, int]], growth: NDArray[np.int64], follows: NDArray[Any]
) -> tuple[tuple[Key, ...], NDArray[np.int64]]:
    """Keys of these requests, units and longest lengths, with finer units where all terms stay
    whole in them."""
    growth = growth.copy()
    keys = []
    for number, (request, unit, longest) in enumerate(found):
        its = follows == number
        finer = _finer(unit, growth[its], longest)
        growth[its] //= np.array([1, finer, finer * finer])
        keys.append(Key(request, unit // finer, longest * finer, longest * finer, number))
    return tuple(keys), growth


def _finer(unit: int, growth: NDArray[np.int64], longest: int) -> int:
    """How many lengths lie between two that are one unit apart, as far as all terms stay whole:
    what the recorded lengths have in common may be more than what all of them have."""
    linear, square = (int(np.gcd.reduce(growth[:, term])) for term in (1, 2))
    most = math.gcd(unit, linear)
    numbers = np.arange(1, max(1, min(MOST_SQUARED // longest, most)) + 1)
    whole = (most % numbers == 0) & (square % (numbers * numbers) == 0)
    return int(numbers[whole].max())


def _alike(
    keys: tuple[Key, ...], growth: NDArray[np.int64], follows: NDArray[np.int64]
) -> tuple[Key, ...]:
    """Keys of which the same sizes follow are alike, such as the batches of an iteration: what one
    of them was may be the next."""
    first: dict[bytes, int] = {}
    varies = (growth[:, 1:] != 0).any(axis=1)
    like = [
        first.setdefault(np.unique(growth[varies & (follows == i)], axis=0).tobytes(), i)
        for i in range(len(keys))
    ]
    longest: dict[int, int] = {}
    for key, of in zip(keys, like, strict=True):
        longest[of] = max(longest.get(of, 0), key.longest)
    return tuple(
        replace(key, like=of, recorded=longest[of], longest=longest[of])
        for key, of in zip(keys, like, strict=True)
    )


def _spare(keys: tuple[Key, ...], lengths: list[NDArray[np.int64]]) -> list[int]:
    """How much room there is to be for lengths longer than those that were recorded: the first
    request of a step can have the places laid out anew, and a later one often cannot. Of numbers
    that are as likely as each other the next largest is that far away."""
    spare = {}
    for of in {key.like for key in keys[1:]}:
        its = np.concatenate(
            [length for key, length in zip(keys, lengths, strict=True) if key.like == of]
        )
        spare[of] = int(its.max() - its.min()) // len(its)
    return [spare.get(key.like, 0) for key in keys]


def _bounded(keys: tuple[Key, ...], lengths: list[NDArray[np.int64]]) -> tuple[Key, ...]:
    """The keys, with bounds for those whose lengths follow those of the first in rough terms."""
    first = lengths[0].astype(float)
    found = [keys[0]]
    for key, length in zip(keys[1:], lengths[1:], strict=True):
        varies = first.std() and length.std()
        if varies and np.corrcoef(first, length)[0, 1] >= CORRELATED:
            slope = max(float(np.polyfit(first, length, 1)[0]), 0.0)
            above = float((length - slope * first).max())
            parts = math.ceil(PARTS * slope), math.ceil(PARTS * max(above, 0.0))
            key = replace(key, slope=parts[0], above=parts[1])
        found.append(key)
    return tuple(found)


def _through(length: list[int], size: NDArray[np.int64]) -> NDArray[np.int64]:
    """The polynomials through three sizes of each request. Where the terms are not whole, the size
    is taken to be the largest of the three."""
    first, second, third = length
    low, high = size[1] - size[0], size[2] - size[1]
    numerator = high * (second - first) - low * (third - second)
    square, rest = np.divmod(numerator, (third - second) * (second - first) * (third - first))
    linear, other = np.divmod(low - square * (second**2 - first**2), second - first)
    constant = size[0] - linear * first - square * first**2
    growth = np.stack([constant, linear, square], axis=1)
    broken = (rest != 0) | (other != 0)
    growth[broken] = 0
    growth[broken, 0] = size.max(axis=0)[broken]
    return growth
