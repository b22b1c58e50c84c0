"""Places for blocks whose lives are known: the worked cases, brute force, and the reach."""

from __future__ import annotations

import itertools
import random
import signal
from pathlib import Path

import numpy as np
import pytest

import bfc
from bfc.plans import lay_out
from bfc.plans.layout import planned
from bfc.plans.lives import Lives
from bfc.plans.parts import HEAD, Requests, lives_of

TRACES = sorted(
    path
    for folder in ("bench/traces", "tests/recordings")
    for path in (Path(__file__).parents[2] / folder).glob("*.npz")
)
#: Sizes, births and deaths.
Blocks = tuple[list[int], list[int], list[int]]


def overlaps(blocks: Blocks, offsets: list[int]) -> list[tuple[int, int]]:
    """Every two blocks that share an address at some moment, found by comparing all of them."""
    sizes, births, deaths = blocks
    return [
        (a, b)
        for a, b in itertools.combinations(range(len(sizes)), 2)
        if births[a] < deaths[b] and births[b] < deaths[a]
        and offsets[a] < offsets[b] + sizes[b] and offsets[b] < offsets[a] + sizes[a]
    ]  # fmt: skip


def most_live(blocks: Blocks) -> int:
    return max(
        sum(size for size, birth, death in zip(*blocks, strict=True) if birth <= moment < death)
        for moment in blocks[1]
    )


def least_span(blocks: Blocks) -> int:
    """The smallest span of all layouts. In some best layout no block can sink, so that it is found
    by placing the blocks in every order, each at the lowest place."""
    sizes, births, deaths = blocks
    best = sum(sizes)
    for order in itertools.permutations(range(len(sizes))):
        placed: dict[int, int] = {}
        for block in order:
            met = [b for b in placed if births[b] < deaths[block] and births[block] < deaths[b]]
            at = 0
            for other in sorted(met, key=placed.__getitem__):
                if placed[other] < at + sizes[block] and placed[other] + sizes[other] > at:
                    at = placed[other] + sizes[other]
            placed[block] = at
            if at + sizes[block] >= best:
                break
        else:
            best = max(placed[block] + sizes[block] for block in placed)
    return best


def some_blocks(dice: random.Random, count: int) -> Blocks:
    births = [dice.randrange(10) for _ in range(count)]
    deaths = [birth + dice.randint(1, 6) for birth in births]
    return [dice.randint(1, 9) for _ in range(count)], births, deaths


def test_the_worked_case():
    """P-1 and P-2: what dies when another is born does not meet it."""
    layout = lay_out([4, 4, 4, 4, 4], [0, 3, 0, 9, 0], [3, 9, 9, 21, 21])
    assert layout.offsets.tolist() == [8, 8, 4, 4, 0]
    assert (layout.span, layout.bound) == (12, 12)


def test_a_layout_keeps_the_unit_of_its_sizes():
    layout = lay_out([3 << 20, 1 << 20], [0, 1], [2, 3])
    assert (layout.span, layout.bound) == (4 << 20, 4 << 20)
    assert lay_out([], [], []).span == 0


@pytest.mark.parametrize("seed", range(60))
def test_small_instances_are_laid_out_as_by_brute_force(seed: int):
    dice = random.Random(seed)
    blocks = some_blocks(dice, dice.randint(1, 7))
    layout = lay_out(*blocks, capacity=most_live(blocks))
    assert overlaps(blocks, layout.offsets.tolist()) == []
    assert layout.bound == most_live(blocks)
    least = least_span(blocks)
    if layout.span != least:  # the capacity was not possible: ask for the least that is
        layout = lay_out(*blocks, capacity=least)
    assert layout.span == least, f"seed {seed}"


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 140))
def test_instances_of_eight_are_laid_out_as_by_brute_force(seed: int):
    blocks = some_blocks(random.Random(seed), 8)
    least = least_span(blocks)
    layout = lay_out(*blocks, capacity=least)
    assert overlaps(blocks, layout.offsets.tolist()) == []
    assert layout.span == least, f"seed {seed}"


@pytest.mark.parametrize("seed", range(20))
def test_without_a_capacity_the_least_span_is_searched(seed: int):
    """The search halves between the bound and the best that is known."""
    blocks = some_blocks(random.Random(seed), 7)
    assert lay_out(*blocks).span == least_span(blocks), f"seed {seed}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(10))
def test_larger_instances_do_not_overlap(seed: int):
    dice = random.Random(seed)
    births = [dice.randrange(400) for _ in range(300)]
    deaths = [birth + dice.randint(1, 80) for birth in births]
    blocks = [dice.randint(1, 50) for _ in births], births, deaths
    layout = lay_out(*blocks, steps=100_000)
    assert overlaps(blocks, layout.offsets.tolist()) == []
    assert layout.bound == most_live(blocks) <= layout.span


def test_blocks_may_live_in_pieces_and_stand_already():
    """Block 0 lives at 0 and 4, block 1 between, so that they share a place; block 2 stands."""
    lives = Lives(np.array([0, 0, 1, 2]), np.array([0, 4, 1, 0]), np.array([1, 5, 4, 5]))
    found = planned(np.array([8, 8, 3]), lives, fixed=np.array([-1, -1, 2]))
    assert found.offsets.tolist() == [5, 5, 2]
    assert (found.span, found.bound) == (13, 11)


def test_no_block_lies_across_the_wall():
    lives = Lives(np.arange(3), np.zeros(3, int), np.ones(3, int))
    found = planned(np.array([2, 4, 3]), lives, wall=6)
    assert found.offsets.tolist() == [4, 0, 6]


@pytest.mark.parametrize(
    ("blocks", "fault"),
    [
        (([1, 2], [0], [1]), "differ in length"),
        (([1, 0], [0, 0], [1, 1]), "block 1 is empty"),
        (([1, 1], [0, 5], [1, 5]), "block 1 is empty, or dies before it is born"),
        (([1.5], [0], [1]), "integers"),
        (([1 << 62], [0], [1]), "below 2\\*\\*62"),
        (([1, 1 << 33], [0, 0], [1, 1]), "units live at once"),
    ],
)
def test_what_is_not_an_instance_is_refused_in_words(blocks, fault: str):
    with pytest.raises(bfc.PlanError, match=fault):
        lay_out(*blocks)


def test_a_span_of_2_to_32_units_is_refused():
    """Each of them fits, and they cannot lie under 2**32 together."""
    sizes = [(1 << 31) - 1, (1 << 31) - 2, 3]
    with pytest.raises(bfc.PlanError, match="units"):
        lay_out(sizes, [0, 0, 0], [2, 2, 2])


def test_a_signal_ends_a_long_layout():
    """Random sizes leave gaps everywhere: it takes a second, and the alarm comes long before."""
    dice = random.Random(2)
    births = list(range(30_000))
    deaths = [birth + dice.randrange(1, 4000) for birth in births]
    sizes = [dice.randrange(1, 1 << 20) for _ in births]

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError):
            lay_out(sizes, births, deaths)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_same_arguments_give_the_same_layout():
    blocks = some_blocks(random.Random(5), 200)
    assert (lay_out(*blocks).offsets == lay_out(*blocks).offsets).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_recorded_runs_need_little_more_than_their_bound(path: Path):
    """The reach: 1.002 of the bound. The largest is long elsewhere: here it takes a second."""
    trace = bfc.Trace.load(path)
    unit = np.uint64(512)
    requests = Requests.of(trace, lambda size: (size + unit - np.uint64(1)) // unit * unit)
    count = len(requests.size)
    part = requests.part(HEAD, "", 0, count, count)
    found = planned(part.size.astype(np.int64) // 512, lives_of([part]))
    assert found.bound <= found.span <= 1.002 * found.bound
