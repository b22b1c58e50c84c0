"""The page about Dask, run as it is written."""

from __future__ import annotations

from documents import ROOT, run_in_a_process


def test_the_code_of_the_page_runs_and_prints_what_stands_below_it() -> None:
    ran = run_in_a_process(ROOT / "docs" / "how-to" / "dask.md")
    assert ran.returncode == 0, ran.stderr  # where distributed logs, too
