"""The page of `bfc diff -o`: its numbers are those of the value, and names stay text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from chromium import Page

import bfc
from bfc_tools.browser import compared
from bfc_tools.browser.render import render
from bfc_tools.cli import main

MIB = 1 << 20
HOSTILE = "</script><script>window.ran = 1</script><img src=x onerror='window.ran = 2'>"
OWNERS = ["", "weights", "kv cache", HOSTILE]
in_a_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.missing() is not None, reason=str(chromium.missing())),
]


def a_run(cached: int, hostile: int) -> bfc.Trace:
    """8 MiB of weights that stay, and a cache that goes."""
    count = 1 + cached + hostile
    owner = [1] + [2] * cached + [3] * hostile
    sizes = [8 * MIB] + [MIB] * cached + [700] * hostile
    return bfc.Trace(
        [0] * count + [1] * cached,
        [*range(count), *range(1, 1 + cached)],
        sizes + [0] * cached,
        owner=owner + [2] * cached,
        owners=OWNERS,
        stack=[1] * count + [0] * cached,
        frames=[("/home/me/model.py", 7, HOSTILE)],
        stacks=[(0, 0), (0, 0)],
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    paths = folder / "before.npz", folder / "after.npz"
    for path, counts in zip(paths, ((2, 0), (5, 3)), strict=True):
        a_run(*counts).save(path)
    return paths


@pytest.fixture(scope="module")
def report(runs: tuple[Path, Path]) -> Path:
    path = runs[0].with_name("diff.html")
    assert main(["diff", *map(str, runs), "-o", str(path)]) == 1
    return path


@pytest.fixture
def page(window: Page, report: Path) -> Iterator[Page]:
    window.problems()
    window.open(report)
    yield window
    assert window.problems() == []


def data_in(report: Path) -> dict:
    text = report.read_text()
    found = re.search(r'<script type="application/json" id="bfc-report">(.*?)</script>', text, re.S)
    return json.loads(found[1])


def test_the_data_is_the_value(report, runs, capsys):
    data = data_in(report)
    value = bfc.diff(*runs).as_dict()
    assert data["diff"] == value | {"a": "before.npz", "b": "after.npz"}
    assert data["title"] == "after.npz compared with before.npz"
    assert [run["trace"] for run in data["runs"]] == ["after.npz", "before.npz"]
    assert data["peak_live"] == data["diff"]["peak"]["b"]


def test_files_of_one_name_keep_their_folders(runs):
    (trace,) = map(bfc.Trace.load, runs[:1])
    value = bfc.diff(runs[0], runs[0])
    data = compared.data_of_diff(value, trace, trace)
    assert (data["diff"]["a"], data["diff"]["b"]) == (str(runs[0]), str(runs[0]))


def test_long_lists_and_names_are_cut(monkeypatch):
    monkeypatch.setattr(compared, "MOST_ROWS", 4)
    long = "x" * 5000
    a = bfc.Trace([], [], [])
    b = bfc.Trace([0] * 9, range(9), range(1, 10), owner=[0] * 9, owners=[long])
    shown = compared.data_of_diff(bfc.diff(a, b), a, b)["diff"]["peak"]
    assert [row["name"] for row in shown["by_size"]] == ["9", "8", "7", "6"]
    assert shown["left_out"]["size"] == 5
    assert len(shown["by_owner"][0]["name"]) == 299
    assert shown["growth"] == 45


def test_a_report_without_a_comparison_has_no_such_section(tmp_path):
    from bfc_tools.browser.data import data_of

    text = render(data_of([("a", a_run(1, 0))]))
    assert '<section class="card" id="diff" aria-labelledby="diff-title" hidden>' in text


def test_a_page_that_cannot_be_written_leaves_nothing(runs, tmp_path, capsys):
    missing = tmp_path / "missing" / "diff.html"
    assert main(["diff", *map(str, runs), "-o", str(missing)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "missing" in err
    assert list(tmp_path.iterdir()) == []


def rows_of(page: Page) -> list[list[str]]:
    script = """
        return Array.from(document.querySelectorAll("#diff tbody tr"),
            (row) => Array.from(row.cells, (cell) => cell.textContent));"""
    return page.run(script)


class TestInTheBrowser:
    pytestmark = in_a_browser

    def test_what_grew_is_there_at_once(self, page):
        assert page.value("document.getElementById('diff').hidden") is False
        assert "growth of the peak" in page.text("#diff")
        assert "+3.00 MiB" in page.text("#diff .tiles")
        assert [row[:4] + row[5:] for row in rows_of(page)] == [
            ["kv cache", "2.00 MiB", "5.00 MiB", "+3.00 MiB", "2 → 5"],
            [HOSTILE, "0 B", "2.05 KiB", "+2.05 KiB", "0 → 3"],
        ]
        assert "1 row did not change" in page.text("#diff-body")

    def test_every_moment_and_kind(self, page, runs):
        found = bfc.diff(*runs)
        for moment in ("peak", "end"):
            page.click(f"#diff-{moment}")
            for kind in ("owner", "line", "size"):
                page.click(f"#diff-{kind}")
                parts = getattr(found, moment).parts(kind)
                changed = [part for part in parts if part.bytes or part.count]
                shown = rows_of(page)
                assert [row[5] for row in shown] == [
                    f"{part.count_a} → {part.count_b}" for part in changed
                ]
                pressed = "document.querySelectorAll('#diff [aria-pressed=\"true\"]').length"
                assert page.value(pressed) == 2

    def test_names_stay_text(self, page):
        page.click("#diff-line")
        assert rows_of(page)[0][0] == f"model.py:7 in {HOSTILE}"
        full = "document.querySelector('#diff td.name').title"
        assert page.value(full) == f"/home/me/model.py:7 in {HOSTILE}"
        assert page.value("window.ran") is None
        assert page.value("document.querySelectorAll('img').length") == 0

    def test_the_rest_of_the_report_is_there_too(self, page):
        assert "after.npz" in page.text("#figures")
        assert "before.npz" in page.text("#figures")
        assert page.value("document.querySelectorAll('#timeline canvas').length") == 1
