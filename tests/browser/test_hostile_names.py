"""No name runs: every text of a report's data is a stranger's, and so is every text that a notebook
shows. Chromium opens the pages, looks into every view, and finds neither script, element nor
attribute that came from a name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import chromium
import pytest
from chromium import Page

import bfc
from bfc.snapshots import inline
from bfc_tools.browser import compared
from bfc_tools.browser.data import data_of, data_of_state
from bfc_tools.browser.render import render

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.missing() is not None, reason=str(chromium.missing())),
]

#: What ends an element, an attribute in either quote, a script, a comment or a line of JavaScript.
HOSTILE = (
    "javascript:ran=1//</script></title></textarea><script>ran=2</script><img src=x onerror=ran=3>"
    "<svg onload=ran=4><iframe srcdoc='<script>parent.ran=5</script>'></iframe>"
    "\" onmouseover=ran=6 x=\"' onfocus=ran=7 autofocus x=' &lt;b onclick=ran=8&gt; ]]>--><!--"
    "${ran=9}`{{data}}\\u003cimg src=x onerror=ran=10>\u2028ran=11\u2029\u202e\x1b[2J\x00\ud800"
)
#: The keys of a page's data (`bfc_tools.browser.data`) whose texts are a stranger's.
NAMES = {
    *("title", "label", "settings", "device", "trace", "remarks", "owners", "texts", "version"),
    *("live_at_peak", "largest", "pool", "by_pool", "name", "name_a", "name_b"),
}

#: Everything in a document that could run or fetch, and is not the page's own two scripts.
CAME_THROUGH = """
const found = [];
for (const it of document.querySelectorAll("*")) {
  if (/^(img|iframe|object|embed|base|form|link)$/i.test(it.tagName)) found.push(it.tagName);
  for (const {name, value} of it.attributes) {
    const fetches = /^(href|src|action|formaction|xlink:href)$/i.test(name);
    if (/^on|^srcdoc$|^autofocus$/i.test(name)) found.push(name);
    if (fetches && !/^(#|blob:|data:image)/.test(value)) found.push(name);
  }
}
return [window.ran ?? null, document.scripts.length, found];
"""


def poisoned(value: Any, name: str = "") -> Any:
    """The same data, with a stranger's text for each that is a name of the recording."""
    if isinstance(value, dict):
        return {key: poisoned(it, key) for key, it in value.items()}
    if isinstance(value, list | tuple):
        return [poisoned(it, name) for it in value]
    return HOSTILE if isinstance(value, str) and value and name in NAMES else value


def a_trace(name: str = "one") -> bfc.Trace:
    """Owners and stacks, with blocks that stay and blocks that go."""
    count = 24
    return bfc.Trace(
        [0] * count + [1] * 8,
        [*range(count), *range(8)],
        [(1 + at % 5) << 20 for at in range(count)] + [0] * 8,
        owner=[at % 3 for at in range(count + 8)],
        owners=["", name, "two"],
        stack=[1 + at % 2 for at in range(count)] + [0] * 8,
        frames=[("model.py", 7, name), (name, 9, "main")],
        stacks=[(0, 0), (0, 0), (1, 1)],
    )


def a_state() -> dict[str, Any]:
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as pool:
        with bfc.owner("somebody"):
            kept = pool.allocate("3 MiB")
        found = data_of_state(pool.snapshot(), title="now", remark="a remark")
        kept.free()
    return found


#: One after the other: what a click begins is drawn before the next.
CLICKS = """
return (async () => {
  for (const it of document.querySelectorAll("button, summary, select, input")) {
    if (!it.checkVisibility()) continue;
    it.focus();
    if (it.matches("button, summary")) it.click();
    await new Promise((done) => setTimeout(done));
  }
})();
"""


def look_everywhere(page: Page) -> None:
    """Every control that shows is clicked, after each key that the page knows."""
    for key in "1234lobskhpndrtfv?":
        page.press(key)
        page.run(CLICKS)
    page.type("#search", "</script>")


@pytest.mark.parametrize("kind", ["trace", "state", "diff"])
def test_no_name_in_a_report_runs(kind: str, page: Page, tmp_path: Path) -> None:
    if kind == "trace":
        data = data_of([("one", a_trace()), ("other", a_trace())], title="a title")
    elif kind == "state":
        data = a_state()
    else:
        runs = a_trace(), a_trace()[:20]
        data = compared.data_of_diff(bfc.diff(*runs), *runs)
    changed = poisoned(data)
    assert str(changed).count("ran=2") > 3
    seen = []
    for shown in (data, changed):
        report = tmp_path / "report.html"
        report.write_text(render(shown), encoding="utf-8")
        page.open(report)
        look_everywhere(page)
        seen.append(page.run(CAME_THROUGH))
    # It is compared in the page: the driver takes no lone surrogate out of it.
    title = "document.querySelector('#title').textContent.startsWith(arguments[0])"
    assert page.value(title, HOSTILE[:-1])
    assert seen[1] == seen[0]
    assert seen[0][:2] == [None, 2]


def test_no_name_in_a_notebook_runs(page: Page, tmp_path: Path) -> None:
    """Where no policy stops a script: each object that draws itself, and each part of a drawing."""
    trace = a_trace(HOSTILE[:-2])  # without what no file can hold
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as pool:
        replayed = trace.replay(pool, samples=4)
        snapshot = replace(pool.snapshot(), device=HOSTILE)
    found = replace(bfc.diff(trace, trace[:20]), name_a=HOSTILE)
    parts = [it._repr_html_() for it in (trace, replayed, snapshot, found)]
    columns = {HOSTILE: [1, 2]}
    parts += [
        inline.framed(HOSTILE, inline.preformatted(HOSTILE), inline.table([HOSTILE], [[HOSTILE]])),
        inline.lines(HOSTILE, [0, 1], columns, 2),
        inline.bars(HOSTILE, [(4096, [(0, 512)])]),
    ]
    text = "".join(parts).replace("\ud800", "?")
    assert text.count("ran=2") > 5
    notebook = tmp_path / "notebook.html"
    notebook.write_text(f"<!doctype html><meta charset=utf-8><body>{text}", encoding="utf-8")
    page.visit(notebook.as_uri())
    page.wait("document.readyState === 'complete'")
    page.run(
        "for (const it of document.querySelectorAll('*')) it.dispatchEvent(new Event('mouseover'))"
    )
    assert page.run(CAME_THROUGH) == [None, 0, []]
