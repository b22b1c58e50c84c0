"""The verdict where the answer is not yes: figures are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bfc_tools.predicting import verdict
from bfc_tools.predicting.unsure import Bounds
from bfc_tools.predicting.verdict import ADDRESSES, REPEATED, STEPS, Run

MIB = 1 << 20


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Steps that fit in 100 MiB, four other layouts of which one does not fit, and one only since
    PyTorch gives back what it keeps; and steps made again, which fit."""
    peaks = {96: STEPS, 97: ADDRESSES, 104: ADDRESSES, 108: ADDRESSES, 95: ADDRESSES}
    runs = [Run(kind, peak, peak * MIB) for peak, kind in peaks.items()]

    def replay(trace: int, point: object, limit: int) -> Any:
        return SimpleNamespace(completes=trace <= 104)

    monkeypatch.setattr(verdict, "replay", replay)
    return SimpleNamespace(
        runs=lambda: [*runs, Run(REPEATED, 99, 99 * MIB)],
        settings="",
        refusals=(),
        ran_out=False,
        peak_reserved=96 * MIB,
        reserved_range=lambda: (95 * MIB, 108 * MIB),
        reserved_after=lambda: 99 * MIB,
        reserved_bounds=Bounds(96 * MIB, 96 * MIB, 96 * MIB, []),
        _at=lambda which: 96,
    )


def test_layouts_at_which_it_does_not_fit_are_counted(found) -> None:
    answer = verdict.decide(found, 100 * MIB, "a GPU")
    assert (answer.fits, answer.reason) == (False, ADDRESSES)
    assert answer.answer == (
        "It may not fit on a GPU: it would reserve 95.00 MiB to 108.00 MiB, by the addresses that "
        "the driver gives. It fits at 4 of the 5 that were tried."
    )


def test_what_fits_at_every_address_fits(found) -> None:
    assert verdict.decide(found, 108 * MIB, "a GPU").answer == (
        "It fits on a GPU: it reserves at most 95.00 MiB to 108.00 MiB."
    )


@pytest.mark.parametrize("kind", [REPEATED, ADDRESSES])
def test_what_is_not_known_does_not_turn_an_answer_that_is_not_of_the_steps(found, kind) -> None:
    found.reserved_bounds = Bounds(95 * MIB, None, None, ["x"])
    found.runs = lambda: [Run(STEPS, 96, 96 * MIB), Run(kind, 108, 108 * MIB)]
    answer = verdict.decide(found, 100 * MIB, "a GPU")
    assert (answer.reason, answer.fits_at_least, answer.fits_at_most) == (kind, None, False)
    assert answer.answer.startswith("It ")
    assert "may need" not in answer.answer


def test_the_least_may_fit_only_just(found) -> None:
    found.reserved_bounds = Bounds(102 * MIB, 108 * MIB, 108 * MIB, ["x"])
    found.runs = lambda: [Run(STEPS, 108, 108 * MIB)]
    said = "It may need as little as 102.00 MiB, which would fit"
    assert verdict.decide(found, 100 * MIB, "a GPU").answer.endswith(f" {said}, if only just.")
    assert verdict.decide(found, 103 * MIB, "a GPU").answer.endswith(f" {said}.")


def test_at_most_is_said_where_all_is_known(found) -> None:
    found.reserved_bounds = Bounds(96 * MIB, 97 * MIB, 97 * MIB, ["x"])
    assert verdict.decide(found, 108 * MIB, "a GPU").answer == (
        "It fits on a GPU: it reserves 95.00 MiB to 108.00 MiB."
    )
