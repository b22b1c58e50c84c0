"""What notebooks show: small HTML without a script, with texts as text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

import bfc
from bfc.snapshots import inline
from bfc.snapshots.snapshot import Snapshot, Stats

MIB = 1 << 20
#: Elements without an end tag.
OPEN = {"path", "rect"}


class Checked(HTMLParser):
    """Collects tags, texts and attributes, and notes what is not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.stack: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []
        assert not {"script", "iframe", "object", "img", "link", "style"} & set(self.tags)
        names = [name for name, _ in self.attributes]
        assert not [name for name in names if name.startswith("on") or "href" in name]
        assert "src" not in names

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def shown(value: Any) -> Checked:
    text: str = value._repr_html_()
    assert len(text) < 200_000
    return Checked(text)


@pytest.mark.parametrize("kind", [bfc.BFCAllocator, bfc.CachingAllocator])
def test_an_allocator_and_its_snapshot(kind: Any) -> None:
    with kind(bfc.SimulatedSubAllocator("64 MiB")) as allocator:
        buffers = [allocator.allocate(3 * MIB), allocator.allocate(30 * MIB)]
        found = shown(allocator)
        assert found.text == shown(allocator.snapshot()).text
        assert "in use of" in found.text
        taken, tags = len(allocator.snapshot().regions), found.tags
        assert tags.count("rect") >= taken + 1
        del buffers
        assert shown(allocator).tags.count("rect") == taken


def test_bars_are_where_the_bytes_are() -> None:
    text = inline.bars("x", [(320, [(0, 80), (160, 1)])])
    rects = re.findall(r'<rect x="([\d.]+)" y="0" width="([\d.]+)" height="9" fill="#', text)
    assert rects == [("0.0", "160.0"), ("320.0", "2.0")]
    assert "and 6 smaller regions" in inline.bars("x", [(10, [])] * (inline.MOST_BARS + 6))


def test_a_piece_shows_how_much_of_it_is_in_use() -> None:
    size = inline.PIECES * 100
    assert inline._shades(size, [(0, 1)])[0] == 1
    assert inline._shades(size, [(0, 50)])[0] == 2
    assert inline._shades(size, [(0, 100)])[:2] == [inline.SHADES, 0]
    assert inline._shades(size, [(50, 100)])[:3] == [2, 2, 0]
    assert inline._shades(3, [(0, 3)]) == [inline.SHADES] * inline.PIECES


def test_a_trace_shows_its_peak() -> None:
    trace = bfc.Trace([0, 0, 1, 1], [0, 1, 0, 1], [3 * MIB, MIB, 0, 0])
    found = shown(trace)
    assert "4 events, at most 4.00 MiB live, after event 1" in found.text
    (path,) = (value for name, value in found.attributes if name == "d" and value[:2] == "M0"
               and "V" in value)  # fmt: skip
    heights = [int(step) for step in re.findall(r"V(\d+)", path)]
    assert heights == [inline.HEIGHT - part for part in (87, 116, 29, 0)]
    assert "0 events" in shown(bfc.Trace([], [], [])).text


def test_the_peak_of_a_long_trace_is_drawn() -> None:
    count = 5_000
    sizes = [MIB] * count
    sizes[2_345] = 64 << 30
    op, ids, size = [], [], []
    for at in range(count):
        op += [0, 1]
        ids += [at, at]
        size += [sizes[at], 0]
    found = shown(bfc.Trace(op, ids, size))
    assert "after event 4690" in found.text
    path = max((value or "" for name, value in found.attributes if name == "d"), key=len)
    assert min(int(step) for step in re.findall(r"V(\d+)", path)) == 4


def test_a_replay_with_and_without_a_timeline() -> None:
    trace = bfc.Trace([0, 0, 1], [0, 1, 0], [3 * MIB, MIB, 0])
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        plain = shown(trace.replay(allocator))
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as allocator:
        drawn = shown(trace.replay(allocator, samples=100))
    assert "svg" not in plain.tags
    assert drawn.tags.count("path") == 4
    for found in (plain, drawn):
        assert f"reserved 22.00 MiB {22 * MIB} in use 4.00 MiB" in found.text
        assert "a replay of 3 events, 0 refused" in found.text


def test_advice_names_the_best() -> None:
    trace = bfc.Trace([0, 0, 1], [0, 1, 0], [3 * MIB, MIB, 0])
    advice = bfc.advise(trace, "1 GiB", jobs=1)
    found = shown(advice)
    assert advice.rows[advice.best or 0].name in found.text
    assert "table" in found.tags


def test_names_are_text() -> None:
    snapshot = Snapshot("<script>alert(1)</script>\"'&", Stats(), ())
    assert "<script>" not in snapshot._repr_html_()
    assert "<script>alert(1)</script>\"'&" in shown(snapshot).text
    text = inline.table(["<b>"], [["<i>"]]) + inline.lines("<u>", [0], {"<p>": [1]}, 1)
    assert not re.search("<[biup]>", text)
