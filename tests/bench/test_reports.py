"""The benchmark of reports: that its rows are of whole pages."""

from __future__ import annotations

import json
import re

import bfc
from bench import reports


def test_each_row_is_of_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reports, "LIVE", (50, 400))
    reports.main(["--events", "2000", "--keep", str(tmp_path)])
    *_heading, one, two = capsys.readouterr().out.splitlines()
    for live, line in ((50, one), (400, two)):
        shown, events, seconds, _more, size = line.split()
        page = (tmp_path / f"churn-{live}.html").read_text("utf-8")
        assert (int(shown), int(size.replace(",", ""))) == (live, len(page.encode()))
        (text,) = re.findall(r'id="bfc-report">(.*?)</script>', page, re.DOTALL)
        trace = bfc.Trace.load(tmp_path / f"churn-{live}.npz")
        found = json.loads(text)
        assert found["events"] == int(events) == len(trace)
        assert found["peak_event"] == trace.fullest_event()
        assert float(seconds) >= 0


def test_a_page_that_is_too_large_is_marked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reports, "LIVE", (50,))
    monkeypatch.setattr(reports, "MOST", 1000)
    reports.main(["--events", "400", "--keep", str(tmp_path)])
    assert capsys.readouterr().out.endswith("TOO LARGE\n")
