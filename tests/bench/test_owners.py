"""The benchmark of owners: what it measures, and that each of its figures is there."""

from __future__ import annotations

import re

import pytest

import bfc
from bench import owners


def test_every_figure_is_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(owners, "REPEATS", 3)
    monkeypatch.setattr(owners, "NUMBER", 50)
    owners.main()
    lines = capsys.readouterr().out.splitlines()
    row = r"a raw pair, (bfc|caching)( +\d+\.\d / *\d+\.\d / *\d+\.\d){3} +-?\d+\.\d"
    assert [bool(re.fullmatch(row, line)) for line in lines[2:4]] == [True, True]
    assert [line.split(":")[0] for line in lines[4:]] == ["with owner", "with bfc.owner(...)"]


def test_what_is_measured_has_the_owner() -> None:
    """One of the two samples of a turn, and nothing is left."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    allocator.record_history(context=None)
    timer = owners.timer_of(allocator)
    timer.timeit(3)
    with bfc.owner("benchmark"):
        timer.timeit(5)
    found = [entry.owner for entry in allocator.history() if entry.action == "alloc"]
    assert found == ["", "", "", "", *["benchmark"] * 5]
    assert len(allocator.leaks()) == 1
