"""Places for blocks whose lives are known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bfc.errors import InvariantError, PlanError
from bfc.libraries import NDArray, np
from bfc.plans._planning import SEARCH_ORDERS, place_in_order, search
from bfc.plans.lives import Lives

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

#: A layout this near to its bound is left as it is.
NEAR = 1.0005
#: The work after which no further order is tried, in extents that are met.
WORK = 8_000_000
MOST_ROUNDS = 400
#: The most blocks of an exact search, and the blocks that it looks at: two seconds or so.
MOST_SEARCHED = 600
STEPS = 20_000_000
#: The first of the limits of a search, which double.
FEWEST_STEPS = 20_000
#: The largest address, in units.
MOST_UNITS = (1 << 32) - 2


@dataclass(frozen=True)
class Layout:
    """Places for blocks. Sizes are in the unit of those that were given, such as bytes.

    Attributes
    ----------
    offsets : numpy.ndarray of int64, shape (blocks,)
        The first address of each block.
    span : int
        The end of the highest block.
    bound : int
        The most that lives at once. No layout has a smaller span.
    """

    offsets: NDArray[np.int64]
    span: int
    bound: int


def lay_out(
    sizes: ArrayLike,
    births: ArrayLike,
    deaths: ArrayLike,
    *,
    capacity: int | None = None,
    steps: int = STEPS,
) -> Layout:
    """Find places for blocks whose lives are known, so that their span is small.

    Parameters
    ----------
    sizes : array_like of int
        The size of each block, in bytes or any other unit; from 1 on.
    births, deaths : array_like of int
        When each block comes and goes. A block that goes at the moment another comes does not meet
        it.
    capacity : int, optional
        The span that is looked for, in the unit of `sizes`. None looks for one within 0.05 % of the
        bound.
    steps : int, optional
        The work that an exact search may take, in blocks that it looks at. It is tried for at most
        600 blocks, where nothing quicker has found such a span.

    Returns
    -------
    Layout
        The best that was found. Whether it is below `capacity`, its `span` says. The same arguments
        give the same layout.

    Raises
    ------
    PlanError
        If the arrays differ in length, a block is empty or dies before it is born, or the span
        takes 2**32 or more times the greatest common divisor of the sizes.
    InvariantError
        If two blocks overlap in the result, which would be a mistake in bfc: each layout is
        checked.

    Notes
    -----
    Largest first, each block goes to the lowest place that is free during its whole life. Where
    that is not near enough, it is tried again in other orders, and then by an exact search.

    Cost: two microseconds or so for each block where many blocks lie end to end, as those of a
    network do. Where random sizes leave gaps everywhere it grows with the gaps, to 70 microseconds
    among 2,000 live blocks. A signal such as Ctrl-C ends it.

    Examples
    --------
    >>> from bfc.plans import lay_out
    >>> layout = lay_out([4, 4, 4, 4, 4], [0, 3, 0, 9, 0], [3, 9, 9, 21, 21])
    >>> layout.span, layout.bound
    (12, 12)
    """
    size, birth, death = (_whole(values) for values in (sizes, births, deaths))
    if not len(size) == len(birth) == len(death):
        raise PlanError("sizes, births and deaths differ in length")
    wrong = np.flatnonzero((size < 1) | (death <= birth))
    if len(wrong):
        raise PlanError(f"block {wrong[0]} is empty, or dies before it is born")
    unit = max(int(np.gcd.reduce(size)), 1)
    lives = Lives(np.arange(len(size)), birth, death)
    goal = None if capacity is None else capacity // unit
    found = planned(size // unit, lives, goal=goal, steps=steps)
    return Layout(found.offsets * unit, found.span * unit, found.bound * unit)


def _whole(values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PlanError("sizes, births and deaths are arrays of one dimension of integers")
    if array.size and not -(2**62) < int(array.min()) <= int(array.max()) < 2**62:
        raise PlanError("sizes, births and deaths are below 2**62")
    return array.astype(np.int64)


def planned(
    size: NDArray[np.int64],
    lives: Lives,
    *,
    fixed: NDArray[np.int64] | None = None,
    wall: int | None = None,
    goal: int | None = None,
    steps: int = STEPS,
) -> Layout:
    """Places for blocks, in units. Those whose `fixed` is not negative stand there; no other lies
    across `wall`. The span that is looked for is `goal`, or one near the bound."""
    bound = lives.most(size)
    if not len(size):
        return Layout(np.zeros(0, np.int64), 0, 0)
    if bound > MOST_UNITS or int(size.max()) > MOST_UNITS:
        raise PlanError(f"{bound} units live at once: a plan has at most {MOST_UNITS}")
    target = int(bound * NEAR) if goal is None else goal
    placer = _Placer(size, lives, fixed, wall)
    best = placer.place(placer.largest_first())
    if best.span > target:
        best = _in_rounds(placer, best, target)
    simple = fixed is None and wall is None and len(lives.block) == len(size) <= MOST_SEARCHED
    if best.span > target and simple and best.span < 1 << 30:
        best = _searched(placer, best, max(bound, goal or 0), goal is None, steps)
    met = lives.overlap(best.offsets.astype(np.uint64), size.astype(np.uint64))
    if met is not None:
        raise InvariantError(f"the blocks {met[0]} and {met[1]} overlap: a mistake in bfc")
    return best


class _Placer:
    """Places blocks in a given order, again and again."""

    def __init__(
        self,
        size: NDArray[np.int64],
        lives: Lives,
        fixed: NDArray[np.int64] | None,
        wall: int | None,
    ) -> None:
        self.size, self.lives, self.fixed, self.wall = size, lives, fixed, wall
        self.work = 0
        self.bound = lives.most(size)
        self.units = size.astype(np.uint32)
        self.begin, self.end, self.sections = lives.sections()
        self.first = np.searchsorted(lives.block, np.arange(len(size) + 1)).astype(np.int32)
        self.life = np.add.reduceat(lives.death - lives.birth, self.first[:-1])
        self.birth = lives.birth[self.first[:-1]]
        self.death = lives.death[self.first[1:] - 1]

    def largest_first(self) -> NDArray[np.int64]:
        """The longest life first where sizes are equal, then the earliest birth."""
        return np.lexsort((self.birth, -self.life, -self.size))

    def other_orders(self) -> Iterator[NDArray[np.intp]]:
        """Orders for runs on which the largest first leaves gaps: by size and life with several
        weights; equal sizes from the last to the first; what is never freed as a stack."""
        size, life = np.log(self.size), np.log(self.life)
        yield np.lexsort((self.birth, -2 * size - life))
        yield np.lexsort((-self.birth, -self.size))
        yield np.lexsort((-self.size, self.birth, self.death < self.death.max()))
        for weight in (4, 0.5, 1, 0.25, 0):
            yield np.lexsort((self.birth, -weight * size - life))

    def place(self, order: NDArray[np.intp]) -> Layout:
        offsets = np.full(len(self.size), -1, np.int64) if self.fixed is None else self.fixed.copy()
        work = place_in_order(
            self.first,
            self.begin,
            self.end,
            self.units,
            order.astype(np.int32),
            offsets,
            self.sections,
            self.wall,
        )
        if work < 0:
            raise PlanError(f"the blocks need more than {MOST_UNITS} units")
        self.work += work + len(offsets)
        return Layout(offsets, int((offsets + self.size).max()), self.bound)


def _in_rounds(placer: _Placer, best: Layout, target: int) -> Layout:
    """Tries other orders: first some that are good on other runs, then the best of all with what
    stood above the bound nearer to the front."""
    count = len(placer.size)
    order = placer.largest_first()
    for tried in placer.other_orders():
        if best.span <= target or placer.work > WORK:
            return best
        found = placer.place(tried)
        if found.span < best.span:
            best, order = found, tried
    random = np.random.default_rng(0)
    rank = np.empty(count)
    rank[order] = np.arange(count)
    latest = best
    for _ in range(MOST_ROUNDS):
        if best.span <= target or placer.work > WORK:
            break
        high = np.flatnonzero(latest.offsets + placer.size > placer.bound)
        rank[high] *= 0.8 * random.random(len(high))
        latest = placer.place(np.argsort(rank, kind="stable"))
        best = min(best, latest, key=lambda layout: layout.span)
    return best


def _searched(placer: _Placer, best: Layout, least: int, halving: bool, steps: int) -> Layout:
    """Searches exactly for a span of `least`; with `halving`, for one between that and the best."""
    left = steps
    capacity = least
    while capacity < best.span and left > 0:
        found: Layout | None = None
        allowed = left // 2 if halving else left
        for answer, used in _attempts(placer, capacity, allowed):
            left -= used
            found = answer
        if found is not None:
            best = found
        else:
            least = capacity + 1
        if not halving:
            break
        capacity = (least + best.span) // 2
    return best


def _attempts(placer: _Placer, capacity: int, steps: int) -> Iterator[tuple[Layout | None, int]]:
    """What each attempt found, and its steps. The orders take turns, and their limits double. Ends
    with a layout, or when there is none, or when the steps are used up."""
    size = placer.size.astype(np.int32)
    life = np.minimum(placer.life, np.iinfo(np.int32).max).astype(np.int32)
    offsets = np.zeros(len(placer.size), np.int64)
    limit = FEWEST_STEPS
    while steps > 0:
        for order in range(SEARCH_ORDERS):
            allowed = min(limit, steps)
            found = search(
                placer.begin,
                placer.end,
                size,
                life,
                placer.sections,
                capacity,
                order,
                allowed,
                offsets,
            )
            steps -= allowed
            if found:
                span = int((offsets + placer.size).max())
                yield Layout(offsets, span, placer.bound), allowed
                return
            yield None, allowed
            if found is False or steps <= 0:
                return
        limit *= 2
