"""The benchmark of timelines: which histories it takes, and that each figure is there."""

from __future__ import annotations

import bfc
from bench import timelines

TRACE = bfc.Trace(
    op=[0, 0, 1, 0, 0], id=[0, 1, 0, 2, 3], size=[1000, 3 << 20, 0, 700, 5 << 20]
).closed()


def test_long_histories_are_timed_with_and_without(monkeypatch, capsys):
    monkeypatch.setattr(
        timelines, "histories", lambda: iter([("short", TRACE[:4]), ("long", TRACE)])
    )
    monkeypatch.setattr(timelines, "FEWEST_EVENTS", len(TRACE))
    monkeypatch.setattr(timelines, "PASSES", 2)
    timelines.main()
    *_heading, one, two = capsys.readouterr().out.splitlines()
    assert [one.split()[:2], two.split()[:2]] == [["long", "bfc"], ["long", "caching"]]
    assert all(line.count("%") == 2 for line in (one, two))
    assert one.split()[-3] == str(len(TRACE))


def test_more_is_of_the_least():
    assert timelines.pair({None: [4e-6, 2e-6], 400: [3e-6, 9e-6]}, 1000).split() == [
        "2.0",
        "3.0",
        "50.0%",
    ]
