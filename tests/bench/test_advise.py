"""`python -m bench.advise`: what its table says."""

from __future__ import annotations

import pytest

import bfc
from bench import advise
from bench.histories import churn
from bfc_tools.study import candidates

MIB = 1 << 20
TRACE = churn(30, 300, smallest=MIB, largest=64 * MIB)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advise, "traces", lambda: {"one": TRACE, "two": TRACE})
    monkeypatch.setattr(advise, "PASSES", 1)
    monkeypatch.setattr(advise, "PART", 1.3)
    # The grid has its own test: here two points of it are enough.
    few = [candidates.Point("caching", "max_split_size_mb:512")]
    monkeypatch.setattr(candidates, "grid", lambda: iter(few))


@pytest.mark.long
def test_a_trace_has_a_line_for_each_search(capsys):
    advise.main(["--traces", "two"])
    _machine, device, heading, *lines = capsys.readouterr().out.splitlines()
    assert device == "devices of 1.3 times what is live at most"
    assert heading.split()[0] == "trace"
    assert [line[20:31].split()[0] for line in lines[:3]] == ["default", "quick", "grid"]
    assert lines[0].startswith("two ")
    assert lines[3] == "1 of 1 within 1 % of the grid's smallest"
    assert lines[4].endswith("s on 2 cores, of 60 allowed")


def test_the_ratio_is_of_the_choice_over_the_smallest_of_the_grid():
    result = advise.measure(TRACE, passes=1)
    best = result.quick.rows[result.quick.best]
    assert result.grid[1] in ("", "max_split_size_mb:512", "nothing fits")
    assert result.ratio == best.smallest_device / result.grid[0]
    assert (len(result.cpu), len(result.wall)) == (1, 1)


def test_the_smallest_of_the_grid_is_where_the_next_step_down_is_refused():
    point = candidates.Point("caching", "max_split_size_mb:512")
    live = advise.replay(TRACE, point, 1 << 50).peak_live
    (size, settings), replays = advise.whole_grid(TRACE, 2 * live, live)
    assert settings == point.settings
    assert replays > 3
    assert advise.replay(TRACE, point, size).completes
    assert not advise.replay(TRACE, point, size - advise.GRAIN).completes


def test_what_fits_nowhere_is_no_choice():
    trace = bfc.Trace([0, 0], [0, 1], [64 * MIB, 64 * MIB])
    nowhere = bfc.advise(trace, "100 MiB", jobs=1)
    assert advise.row_of(nowhere) is None
    assert advise.cells(nowhere, None) == ("-", "-")
