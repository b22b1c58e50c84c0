"""Iterations whose lengths vary, such as batches of sentences: all sizes follow from one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bfc.libraries import NDArray, np

#: Sizes follow from the lengths if they are foretold for this part of the requests.
FORETOLD = 0.95
#: The longest length, in units, and the largest size, in bytes: what is computed fits 64 bits.
MOST_UNITS, MOST_BYTES = 1 << 20, 1 << 40


@dataclass(frozen=True, eq=False)
class Lengths:
    """How the sizes of an iteration grow with its length."""

    key: int  # the first request whose size varies: as many units as the length
    unit: int  # bytes
    recorded: int  # the longest that was recorded
    longest: int  # for which there is room
    #: The bytes of each request before they are rounded, as a polynomial of the length, shape
    #: (slots, 3): constant, linear and square term.
    growth: NDArray[np.int64]

    def sizes(self, length: int) -> NDArray[np.uint64]:
        """The bytes of each request at a length, before they are rounded."""
        bytes_ = evaluated(self.growth, length)
        return np.maximum(bytes_, 1).astype(np.uint64)

    def most(self, length: int) -> int:
        """A bound of those bytes, where they may be too many to be counted in 64 bits."""
        powers = np.array([1.0, length, float(length) ** 2])
        return int((np.abs(self.growth.astype(np.float64)) @ powers).max())


def evaluated(growth: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    values: NDArray[np.int64] = growth[:, 0] + growth[:, 1] * length + growth[:, 2] * length**2
    return values


def fitted(iterations: Sequence[NDArray[np.uint64]]) -> Lengths | None:
    """How the sizes that each iteration asks for, before they are rounded, follow from lengths.
    None: there are fewer than three lengths, or polynomials of the second degree with whole terms,
    through three of them, do not foretell all iterations but for one size of twenty."""
    size = np.stack(iterations).astype(np.int64)
    varies = (size != size[0]).any(axis=0)
    if not varies.any() or size.max() >= MOST_BYTES:
        return None
    key = int(varies.argmax())
    unit = int(np.gcd.reduce(size[:, key]))
    length = size[:, key] // unit
    known, at = np.unique(length, return_index=True)
    if len(known) < 3 or known[-1] >= MOST_UNITS:
        return None
    three = [0, len(known) // 2, len(known) - 1]
    growth = _through(known[three].tolist(), size[at[three]])
    told = np.stack([evaluated(growth, int(each)) for each in length]) == size
    if told.mean(axis=1).min() < FORETOLD:
        return None
    finer = _finer(unit, growth, int(known[-1]))
    growth //= np.array([1, finer, finer * finer])
    longest = int(known[-1]) * finer
    return Lengths(key, unit // finer, longest, longest, growth)


def _finer(unit: int, growth: NDArray[np.int64], longest: int) -> int:
    """How many lengths lie between two that are one unit apart, as far as all terms stay whole:
    what the recorded lengths have in common may be more than what all of them have."""
    linear, square = (int(np.gcd.reduce(growth[:, term])) for term in (1, 2))
    most = math.gcd(unit, linear)
    return max(
        number
        for number in range(1, MOST_UNITS // longest + 1)
        if most % number == 0 and square % (number * number) == 0
    )


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
