"""What is said of a program's ranks, given what each came to."""

from __future__ import annotations

from typing import Any

import pytest

from bfc_tools.predicting.asked import Asked
from bfc_tools.predicting.ranks import Ranks
from bfc_tools.predicting.tries import Tried
from bfc_tools.predicting.world import World

MIB = 1 << 20


def tried(live: int, fits: bool = True, **kinds: int) -> Tried:
    peak: dict[str, Any] = {"by_kind": kinds, "by_module": {}, "phase": "forward", "line": "a.py:1"}
    return Tried(
        {
            "fits": fits,
            "fits_at_most": fits,
            "limit": 40 * MIB,
            "device": {"name": "a GPU", "memory": 40 * MIB, "usable": 40 * MIB},
            "peak_requested": live * MIB,
            "peak_reserved": live * MIB,
            "peak_reserved_range": [live * MIB] * 2,
            "peak_reserved_after_repeats": None,
            "peak": peak,
        }
    )


@pytest.fixture
def ranks() -> Ranks:
    found = Ranks(Asked("train.py"), World(8, 2), lambda rank, tried: None)
    found.found = {rank: tried(10, activations=8 * MIB) for rank in (0, 1, 4, 7, 8)}
    found.is_finished = True
    return found


def test_the_worst_is_first_and_ranks_that_are_alike_are_one_row(ranks: Ranks) -> None:
    ranks.found[15] = tried(50, False, activations=9 * MIB, parameters=3 * MIB)
    lines = str(ranks).splitlines()
    assert lines[0] == (
        "It does not fit on a GPU on 1 of 16 ranks: the worst, rank 15, would reserve 50.00 MiB."
    )
    assert [line.split()[:2] for line in lines[3:5]] == [["15", "no"], ["0-14", "yes"]]
    assert "  by kind: parameters (+3.00 MiB), activations (+1.00 MiB)" in lines
    assert ranks.fits is False


def test_one_that_failed_leaves_no_answer(ranks: Ranks) -> None:
    ranks.found[15] = Tried({}, "KeyError: 'x'")
    assert ranks.fits is None
    assert ranks.answer.startswith("Rank 15 of 16 failed: it is not known whether it fits")
    assert ranks.failure == "rank 15: KeyError: 'x'"


def test_one_that_fits_only_just_is_said(ranks: Ranks) -> None:
    ranks.found[15] = tried(50)
    assert "fits only just, and would reserve 50.00 MiB with more room" in ranks.answer


@pytest.mark.parametrize(
    ("most", "said"), [(False, "it would not fit."), (None, "of what a rank may need.")]
)
def test_one_that_may_need_more_is_said(ranks: Ranks, most: bool | None, said: str) -> None:
    assert ranks.answer.endswith("reserves at most 10.00 MiB.")
    ranks.found[8].figures.update(fits_at_most=most, reserved_bounds={"because": ["x"]})
    assert ranks.answer.endswith(said)
    assert "reserves 10.00 MiB. That is as counted: " in ranks.answer


def test_ranks_that_came_before_all_was_gone_are_no_answer_for_all(ranks: Ranks) -> None:
    ranks.is_finished = False
    assert ranks.answer.startswith("Not finished. Of what was tried: It fits on a GPU")
