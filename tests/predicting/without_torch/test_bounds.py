"""The search for the largest value that fits, on made-up programs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bfc_tools.predicting.axes import Axis, values_of
from bfc_tools.predicting.bounds import Bounds, Known

LIMIT = 24 << 30


def searched(values: range | list[int], needs: Callable[[int], int | None], width: int) -> Bounds:
    """A search in which each value needs so many bytes, or fails."""
    bounds = Bounds(values, width)
    for _ in range(200):
        wanted = bounds.wanted()
        if not wanted:
            return bounds
        for at in wanted:
            assert at not in bounds.known, "it was tried before"
            held = needs(values[at])
            fits = None if held is None else held <= LIMIT
            bounds.learn(at, Known(fits, held or 0, LIMIT))
    raise AssertionError("it does not end")


@given(
    st.integers(1, 5000),
    st.integers(1, 7),
    st.integers(1, 4),
    st.integers(0, 30 << 30),
    st.integers(1 << 10, 4 << 30),
    st.integers(0, 512 << 20),
)
def test_the_answer_is_the_last_that_fits(last, step, width, base, slope, jump) -> None:
    values = range(1, last + 1, step)

    def needs(value: int) -> int:
        return base + slope * value + jump * (value // 16)

    bounds = searched(values, needs, width)
    fitting = [at for at, value in enumerate(values) if needs(value) <= LIMIT]
    assert bounds.largest == (fitting[-1] if fitting else None)
    assert bounds.first_too_large == (len(fitting) if len(fitting) < len(values) else None)
    assert not bounds.is_open


def test_a_straight_line_takes_few_tries() -> None:
    for slope in (7 << 20, 120 << 20, 1000 << 20):
        bounds = searched(range(1, 513), lambda value, by=slope: (300 << 20) + by * value, 2)
        assert len(bounds.known) <= 8


@given(st.sets(st.integers(0, 40), min_size=1), st.integers(1, 3), st.integers(0, 40))
def test_values_that_fail_do_not_keep_it_from_ending(failing, width, most) -> None:
    def needs(value: int) -> int | None:
        return None if value in failing else LIMIT * value // most if most else LIMIT + 1

    bounds = searched(range(1, 41), needs, width)
    if bounds.largest is not None and bounds.first_too_large is not None:
        assert bounds.largest < bounds.first_too_large
    assert bounds.gave_up or not bounds.is_open


def test_only_failures_end_it_soon() -> None:
    bounds = searched(range(1, 513), lambda value: None, 2)
    assert bounds.gave_up
    assert bounds.largest is None
    assert len(bounds.known) <= 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("batch-size", "write a range"),
        ("batch-size=", "write a range"),
        ("=1..8", "write a range"),
        ("batch-size=1..many", "write a range"),
        ("batch-size=-1..8", "write a range"),
        ("batch-size=8..1", "the smallest comes first: 1..8"),
        ("batch-size=1..8:0", "the step is 1 or more"),
        ("env:=1..8", "write a range"),
    ],
)
def test_what_is_no_range_is_said(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"--largest") as error:
        Axis.parse(text)
    assert said.lower() in str(error.value).lower()


def test_values() -> None:
    assert list(values_of("8..32:8")) == [8, 16, 24, 32]
    assert list(values_of("16,8,8")) == [8, 16]
