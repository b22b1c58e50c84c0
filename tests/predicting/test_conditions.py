"""Conditions that are not known are what lets a program go on."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import bfc

PROGRAM = """
def refuses(number):
    assert number > 3, "too small"
    assert not number > 3
    assert number > 0 and number.isfinite()
    assert not (number > 0 or number < 4)
    if number > 5:
        raise ValueError(number)
    if not (number > 5).all():
        raise ValueError(number)
    assert bool(number > 3)
    assert (number > 3).item()


def waits(error):
    passes = 0
    while error > 1e-3 and passes < 9:
        error = error / 2
        passes += 1
    return passes


def chooses(number):
    return 1 if number > 3 or (number < 0).any() else 0
"""


@pytest.fixture
def program(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return runpy.run_path(str(path))


def test_what_refuses_a_value_lets_it_pass(program: dict[str, Any]) -> None:
    """A solver's assertion about its times failed: all that was not known was False."""
    with bfc.predict("h100") as run:
        program["refuses"](torch.rand((), device="cuda"))
    assert {one["what"] for one in run.assumptions} == {".item()"}


@pytest.mark.parametrize(("name", "found"), [("waits", 1), ("chooses", 0)])
def test_a_loop_that_goes_on_while_a_value_is_large_is_passed_once(
    program: dict[str, Any], name: str, found: int
) -> None:
    """It was never entered, and a solver's model never called."""
    with bfc.predict("h100") as run:
        for _ in range(2):
            assert program[name](torch.rand((), device="cuda")) == found
    told = [
        line for line in str(run).splitlines() if line.startswith("at least   a loop is passed")
    ]
    assert len(told) == found
