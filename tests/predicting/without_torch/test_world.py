"""Which ranks of many are predicted, and which they stand for."""

from __future__ import annotations

import random

import pytest

from bfc_tools.predicting.world import Classes, World, in_words


def predicted(classes: Classes, sign) -> dict[int, object]:
    found: dict[int, object] = {0: sign(0)}
    while wanted := classes.wanted(found):
        found |= {rank: sign(rank) for rank in wanted}
    return found


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_differ_along_dimensions_are_found(seed: int) -> None:
    """Of each dimension the first place, and those from one on, differ from the others."""
    draw = random.Random(seed)
    shape = [draw.choice((1, 2, 3, 8, 30)) for _ in range(draw.randint(2, 3))]
    size = shape[0] * shape[1] * (shape[2] if len(shape) > 2 else 1)
    ends = [draw.randint(1, one) for one in shape]
    classes = Classes(World(size), [shape])

    def sign(rank: int) -> object:
        places = classes._places(rank)
        kinds = [(place == 0) + 2 * (place >= end) for place, end in zip(places, ends, strict=True)]
        return tuple(kinds)

    found = predicted(classes, sign)
    assert all(found[classes.like(rank, found)] == sign(rank) for rank in range(size)), seed
    assert len(found) <= max(8, 27 + 10 * len(shape))


def test_a_thousand_alike_take_few() -> None:
    classes = Classes(World(8, 128))
    assert len(predicted(classes, lambda rank: 0)) <= 10


@pytest.mark.parametrize(
    ("ranks", "text"), [([0], "0"), ([3, 0, 1], "0-1, 3"), (range(1024), "0-1023")]
)
def test_ranks_in_words(ranks, text: str) -> None:
    assert in_words(list(ranks)) == text


def test_the_variables_of_torchrun() -> None:
    variables = dict(World(8, 2).environment(11))
    assert (variables["RANK"], variables["LOCAL_RANK"], variables["GROUP_RANK"]) == ("11", "3", "1")
    assert (variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("16", "8")
