"""Where items lie: every way of walking them reaches each pair of places exactly once."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from copy_cases import case, place, seeds

from bfc.copying import layout
from bfc.copying.layout import Dim, Walk


def places(way: Walk) -> list[tuple[int, int]]:
    """(to, source) of every item of a walk."""
    found = []
    for index in itertools.product(*(range(dim.steps) for dim in way.dims)):
        to = way.to + sum(i * dim.to for i, dim in zip(index, way.dims, strict=True))
        source = way.source + sum(i * dim.source for i, dim in zip(index, way.dims, strict=True))
        found.append((to, source))
    return found


def by_hand(shape, to, source) -> list[tuple[int, int]]:
    return [
        (
            sum(i * step for i, step in zip(index, to, strict=True)),
            sum(i * step for i, step in zip(index, source, strict=True)),
        )
        for index in np.ndindex(*shape)
    ]


def random_walk(seed: int):
    rng = random.Random(seed)
    shape = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.randrange(0, 6)))
    itemsize = rng.choice((1, 2, 3, 4, 8, 12, 16))
    dtype = np.dtype(f"V{itemsize}")
    to, source = (place(shape, dtype, rng, rng.random() < 0.8)[0] for _ in range(2))
    if rng.random() < 0.3:
        source = tuple(0 if rng.random() < 0.4 else step for step in source)
    return shape, itemsize, to, source


@seeds(300)
def test_a_walk_reaches_each_pair_of_places_once(seed: int):
    shape, _, to, source = random_walk(seed)
    way = layout.walk(shape, to, source)
    assert sorted(places(way)) == sorted(by_hand(shape, to, source))
    assert len(way.dims) <= sum(count > 1 for count in shape)
    assert all(dim.to > 0 for dim in way.dims)


@seeds(300)
def test_pieces_cover_a_walk_and_are_small_enough(seed: int):
    rng = random.Random(seed)
    shape, _, to, source = random_walk(seed)
    way = layout.walk(shape, to, source)
    max_dims, max_items = rng.randrange(1, 5), rng.randrange(1, 40)
    parts = list(layout.pieces(way, max_dims, max_items))
    assert sorted(itertools.chain(*map(places, parts))) == sorted(places(way))
    assert all(len(part.dims) <= max_dims and part.items <= max_items for part in parts)


def test_a_copy_above_32_bits_is_launched_in_pieces_below():
    """2**31 + 5 items, and 2**40: every count and index of a launch is below 2**31."""
    way = Walk((Dim(2**31 + 5, 1, 1),))
    assert [part.items for part in layout.pieces(way)] == [2**31 - 1, 6]
    assert [(part.to, part.source) for part in layout.pieces(way)] == [(0, 0), (2**31 - 1,) * 2]
    way = Walk((Dim(2**9, 2**33, 2**32), Dim(2**31, 4, 2)))
    parts = list(layout.pieces(way))
    assert sum(part.items for part in parts) == 2**40
    assert parts[-1].to == 511 * 2**33 + (2**31 - 1) * 4


@seeds(300)
def test_rows_are_the_same_bytes_as_the_walk(seed: int):
    shape, itemsize, to, source = random_walk(seed)
    way = layout.walk(shape, to, source)
    rows = layout.rows_of(way, itemsize)
    if rows is None:
        return
    found = [
        (
            way.to + slice_ * rows.to_slice + row * rows.to_pitch + byte,
            way.source + slice_ * rows.source_slice + row * rows.source_pitch + byte,
        )
        for slice_ in range(rows.depth)
        for row in range(rows.height)
        for byte in range(rows.width)
    ]
    wanted = [(a + byte, b + byte) for a, b in places(way) for byte in range(itemsize)]
    assert sorted(found) == sorted(wanted)


def test_rows_are_found_where_there_are_some():
    for shape, to, source in (
        ((4, 3), (16, 4), (12, 4)),
        ((4, 3), (32, 8), (24, 8)),
        ((2, 4, 3), (64, 16, 4), (96, 24, 4)),
        ((5,), (8,), (4,)),
    ):
        assert layout.rows_of(layout.walk(shape, to, source), 4) is not None
    for shape, to, source in (
        ((4, 3), (12, 4), (4, 16)),  # transposed
        ((5,), (4,), (0,)),  # one item for all
        ((2, 4, 3), (64, 16, 4), (100, 24, 4)),  # slices of no whole number of rows
        ((5,), (8,), (-8,)),
    ):
        assert layout.rows_of(layout.walk(shape, to, source), 4) is None


@seeds(200)
def test_units_lie_at_multiples_of_themselves(seed: int):
    shape, itemsize, to, source = random_walk(seed)
    rng = random.Random(-seed)
    at = rng.randrange(100), rng.randrange(100)
    way = layout.walk(shape, to, source)
    unit, split = layout.in_units(way, itemsize, *at)
    assert unit in (1, 2, 4, 8)
    assert all((at[0] + a) % unit == (at[1] + b) % unit == 0 for a, b in places(split))
    as_bytes = [(a + i, b + i) for a, b in places(split) for i in range(unit)]
    wanted = [(a + i, b + i) for a, b in places(way) for i in range(itemsize)]
    assert sorted(as_bytes) == sorted(wanted)


@seeds(100)
def test_shapes_expand_as_numpy_broadcasts(seed: int):
    source = case(f"expand {seed}").source
    rng = random.Random(seed)
    onto = tuple(rng.choice((1, 2, 3, 5, 8)) for _ in range(rng.randrange(0, 5)))
    try:
        wanted = np.broadcast_to(source.array, onto)
    except ValueError:
        wanted = None
    if wanted is None and source.array.ndim <= len(onto):
        with pytest.raises(ValueError, match="does not broadcast"):
            layout.expanded_strides(source.shape, source.strides, onto)
    elif wanted is not None:
        found = layout.expanded_strides(source.shape, source.strides, onto)
        pairs = zip(onto, found, wanted.strides, strict=True)
        assert all(a == b for count, a, b in pairs if count > 1)


def test_leading_dimensions_of_one_are_dropped_as_in_an_assignment():
    assert layout.expanded_strides((1, 1, 3), (9, 9, 4), (2, 3)) == (0, 4)
    with pytest.raises(ValueError, match="does not broadcast"):
        layout.expanded_strides((2, 3), (12, 4), (3,))
