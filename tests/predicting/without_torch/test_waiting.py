"""What is told of a program that makes no step."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from bfc_tools.predicting.waiting import told


def run_until(text: str, often: int, err: io.StringIO) -> None:
    end = time.monotonic() + 60
    while err.getvalue().count(text) < often and time.monotonic() < end:
        time.sleep(0.01)


def test_a_program_without_a_step_is_told_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    with told(lambda: 0, lambda: 12_345, first=0.02):
        run_until("without a step", 3, err)
    lines = err.getvalue().splitlines()
    waited = [float(re.match(r"bfc: ([0-9.]+) s without a step", line)[1]) for line in lines[:3]]
    assert waited == [0.02, 0.04, 0.08]
    assert re.search(r"at .*test_waiting\.py:\d+, after 12,345 operators\.", lines[0])
    assert "--forwards N" in lines[0]
    assert "--seconds N" in lines[0]


def test_one_that_makes_steps_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    asked = []

    def steps() -> int:
        asked.append(1)
        return len(asked)

    with told(steps, lambda: 0, first=0.02):
        end = time.monotonic() + 60
        while len(asked) < 6 and time.monotonic() < end:
            time.sleep(0.01)
    assert err.getvalue() == ""
