"""`python -m bench.stitching`: which figures stand in its tables."""

from __future__ import annotations

import numpy as np
import pytest

import bfc
from bench import stitching
from bench.stitching import MIB, Passes, on_one_stream

#: 40 MiB in ten blocks, every second of which goes; then 16 MiB, which no hole can hold.
OP = [*[0] * 10, *[1] * 5, 0]
TRACE = bfc.Trace(
    OP,
    [*range(10), *range(0, 10, 2), 10],
    [*[4 * MIB] * 10, *[0] * 5, 16 * MIB],
    stream=[0] * 16,
).closed()
TWO = bfc.Trace([0, 0, 1, 1], [0, 1, 0, 1], [9 * MIB, MIB, 0, 0], stream=[0, 1, 0, 1])


@pytest.fixture(autouse=True)
def _short_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stitching, "traces", lambda: iter([("one", TRACE), ("two", TWO)]))
    monkeypatch.setattr(stitching, "CHURNS", ((20, MIB, 4 * MIB),))
    monkeypatch.setattr(stitching, "CHURN_EVENTS", 100)


def test_the_passes_of_a_trace():
    passes = Passes(TRACE, 1 << 30)
    assert (passes.refused, passes.page, passes.ratio) == (0, 2, 1.0)
    assert passes.figures["stitches"] == 1
    assert passes.calls[0] > passes.calls[1] == passes.calls[5] == 0
    assert passes.waits == [0] * 6


def test_a_refusal_is_seen():
    passes = Passes(TRACE, 38 * MIB, passes=1)
    assert passes.refused
    assert stitching.ratio_or_refused(passes) == "refused"


def test_who_waits_is_counted():
    """The device has room for one of the two streams only."""
    halves = bfc.Trace([0, 1, 0, 1], [0, 0, 1, 1], [8 * MIB, 0, 8 * MIB, 0], stream=[0, 0, 1, 1])
    passes = Passes(halves, 8 * MIB, passes=3)
    assert passes.refused == 0
    assert all(passes.waits[1:])
    assert Passes(on_one_stream(halves), 8 * MIB, passes=3).waits == [0] * 3


def test_the_tables_have_every_trace_under_both_policies(capsys):
    stitching.main([])
    _machine, *tables = capsys.readouterr().out.strip().split("\n\n")
    for policy, headrooms in (
        ("BFCAllocator(virtual_memory=True)", ["0%", "5%"]),
        ("CachingAllocator(stitch=True)", ["0%"]),
    ):
        one_stream, by_stream, churned = (tables.pop(0).splitlines() for _ in range(3))
        assert one_stream[0] == policy
        assert [line.split()[0] for line in one_stream[2:]] == ["one", "two", "geometric", "worst"]
        assert ("MiB: 1.0" in one_stream[2]) == (policy[0] == "B")
        assert [line[:41].split() for line in by_stream[1:]] == [
            ["one,", "dealt", "to", "2", "80", "GiB"],
            ["one,", "dealt", "to", "2", "1.03"],
            ["two", "80", "GiB"],
            ["two", "1.01"],
        ]
        assert [line.split("MiB")[-1].split()[0] for line in churned[1:]] == headrooms
    assert tables == []


def test_a_trace_that_is_not_there_is_refused(capsys):
    with pytest.raises(SystemExit):
        stitching.main(["--traces", "one", "three"])
    assert "there is no trace 'three'; there are one, two" in capsys.readouterr().err


def test_the_device_is_one_that_people_have():
    assert stitching.usual_device(15 << 30) == 16 << 30
    assert stitching.usual_device(int(15.9 * (1 << 30))) == 24 << 30
    assert np.all(np.diff(stitching.USUAL) > 0)
