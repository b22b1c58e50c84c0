"""The file of a report, as text: what it may run, and that no text of the data becomes a part of
the page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bfc.trace import Trace
from bfc_tools.browser import render
from bfc_tools.browser.data import data_of

HOSTILE = (
    "</script><script>window.ran = 1</script><!-- {{script}} {{policy}} \u2028 "
    "<img src=x onerror=alert(1)>"
)


def report(title: str = "a run") -> dict[str, object]:
    trace = Trace([0, 0, 1], [0, 1, 0], [3 << 20, 1 << 20, 0])
    return data_of([("small", trace)], title=title)


class Parts(HTMLParser):
    """The elements of a page, and the texts of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self._in: str | None = None
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.texts.append((tag, ""))
            self._in = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._in:
            self._in = None

    def handle_data(self, data: str) -> None:
        if self._in is not None:
            tag, text = self.texts[-1]
            self.texts[-1] = (tag, text + data)


def test_the_policy_allows_this_script_and_this_style_by_their_hashes_and_nothing_else() -> None:
    page = Parts(render.render(report()))
    policies = [
        attributes["content"]
        for tag, attributes in page.elements
        if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    style, data, script = (text for _, text in page.texts)
    hashes = [
        "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    ]
    assert json.loads(data)["events"] == 3
    expected = (
        f"default-src 'none'; script-src '{hashes[0]}'; style-src '{hashes[1]}'; "
        "base-uri 'none'; form-action 'none'"
    )
    assert policies == [expected]


def test_the_page_names_no_other_file_and_has_no_code_in_attributes() -> None:
    for tag, attributes in Parts(render.render(report())).elements:
        assert not {"src", "srcset", "action", "style"} & set(attributes), tag
        assert all(not name.startswith("on") for name in attributes)
        assert attributes.get("href", "#").startswith("#")  # within the page


def test_a_hostile_text_stays_inside_the_block_of_data() -> None:
    plain, hostile = (Parts(render.render(report(title))) for title in ("a run", HOSTILE))
    assert hostile.elements == plain.elements
    assert json.loads(hostile.texts[1][1])["title"] == HOSTILE
    assert "<" not in hostile.texts[1][1]
    assert (hostile.texts[0], hostile.texts[2]) == (plain.texts[0], plain.texts[2])


def test_what_json_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        render.render({"events": float("nan")})


def test_the_scripts_make_no_code_and_no_elements_of_texts() -> None:
    text = render.scripts()
    ways = r"(?:inner|outer|set|insertAdjacent)HTML|document\.write|\beval\b|new Function|parseFrom"
    assert re.findall(ways, text) == []
    assert "</script" not in text.lower()
    assert re.findall(r"\b(?:fetch|XMLHttpRequest|WebSocket|sendBeacon|import)\s*\(", text) == []


def test_every_script_of_the_folder_is_in_the_page_and_is_short() -> None:
    folder = Path(render.__file__).parent
    ours = {name for name in render.SCRIPTS if name.startswith("script/")} | {"script/failed.js"}
    assert ours == {f"script/{path.name}" for path in (folder / "script").iterdir()}
    assert all(len((folder / name).read_text().splitlines()) < 700 for name in ours)


def test_the_page_carries_the_licence_and_the_version_of_the_library() -> None:
    folder = Path(render.__file__).parent / "vendor"
    text = render.render(report())
    assert (folder / "uPlot.LICENSE").read_text() in text
    named = re.search(r"uPlot (\d+\.\d+\.\d+)", (folder / "uPlot.VERSION").read_text())
    assert named is not None
    assert f"uPlot ({'v' + named[1]})" in text  # the library says so itself
    assert f"uPlot {named[1]} (MIT licence" in text  # and the foot of the page
