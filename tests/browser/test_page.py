"""The page of a report in a real Chromium: what it shows is what the trace holds, every control
does what it says, and the browser has nothing to complain of. `make test-browser` runs these; with
BFC_PICTURES=1 the pictures of docs/pictures/ are taken anew."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import chromium
import numpy as np
import pytest
from chromium import Page
from numpy.typing import NDArray
from PIL import Image

import bfc
from bfc.policies._bfc import BFCAllocator
from bfc.policies._caching import CachingAllocator
from bfc.trace import Trace
from bfc_tools.browser.data import data_of
from bfc_tools.browser.render import render
from bfc_tools.study.experiment import Policy

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
GIB = 1 << 30

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.missing() is not None, reason=str(chromium.missing())),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reports")


#: The commands of the README's block that ends in a report.
BLOCK = next(
    text for text in (ROOT / "README.md").read_text().split("```") if "-o report.html" in text
)
COMMANDS = re.findall(r"^\$ (.+)$", BLOCK, re.MULTILINE)


@pytest.fixture(scope="module")
def pictured(folder: Path) -> Path:
    """The report that the README's two commands write."""
    assert [command.split()[:2] for command in COMMANDS] == [["bfc", "demo"], ["bfc", "report"]]
    paths = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    for command in COMMANDS:
        words = [sys.executable, "-m", *shlex.split(command)]
        subprocess.run(words, check=True, cwd=folder, env=environment)
    return folder / "report.html"


@pytest.fixture(scope="module")
def training(folder: Path, pictured: Path) -> Trace:
    """The run of that report."""
    return Trace.from_torch(folder / "bfc-demo" / "training.pickle")


@pytest.fixture(scope="module")
def report(folder: Path, training: Trace) -> Path:
    """That run as it was recorded, and replayed under PyTorch's policy."""
    data = data_of([("training.pickle", training)], [Policy("caching", CachingAllocator)])
    return written(folder / "training.html", data)


def written(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(render(data), encoding="utf-8")
    return path


# -- what is in the page --------------------------------------------------------------------------


def recount(trace: Trace, addresses: list[int]) -> dict[str, Any]:
    """The figures of a run from its events, one by one."""
    live: dict[int, tuple[int, int]] = {}
    total, peak, at_peak, found = 0, -1, 0, []
    for event, (op, number, size) in enumerate(
        zip(trace.op.tolist(), trace.id.tolist(), trace.size.tolist(), strict=True)
    ):
        if op == 0:
            live[number] = (event, size)
            total += size
        elif op == 1:
            total -= live.pop(number)[1]
        if total > at_peak:
            peak, at_peak, found = event, total, list(live.values())
    rows = [
        [addresses[event], size, trace.owners[trace.owner[event]], frames_of(trace, event)]
        for event, size in sorted(found, key=lambda block: -block[1])
    ]
    return {"events": len(trace), "peak_event": peak, "peak_live": at_peak, "live_at_peak": rows}


def frames_of(trace: Trace, event: int) -> list[str]:
    return [f"{frame.filename}:{frame.line} {frame.name}" for frame in trace.frames_of(event)]


def test_the_data_in_the_page_is_a_recount_of_the_trace(
    page: Page, report: Path, training: Trace
) -> None:
    page.open(report)
    data = json.loads(page.text("#bfc-report"))
    expected = recount(training, training.meta["torch"]["addresses"])
    blocks = expected.pop("live_at_peak")
    assert {key: data[key] for key in expected} == expected
    assert [row[:3] for row in data["live_at_peak"]] == [row[:3] for row in blocks]
    assert (data["left_out"], len(blocks)) == (0, data["views"]["peak"]["blocks"])

    # The stacks, as the page shows them: the list has the blocks in the same order.
    page.press("b")
    for place in (0, 57, len(blocks) - 1):
        while page.value("document.querySelectorAll('tr[data-block]').length") <= place:
            page.click("#view .more")
        choose = "document.querySelectorAll('tr[data-block]')[arguments[0]].click()"
        page.run(choose, place)
        page.wait("document.querySelector('#block .stack')")
        shown = page.value(
            "Array.from(document.querySelectorAll('#block .stack li'), l => l.title)"
        )
        assert shown == blocks[place][3]
        assert f"({blocks[place][1]:,} bytes)" in page.text("#block-body dl")
        assert f"{blocks[place][0]:#x}" in page.text("#block-body dl")


def test_the_figures_at_the_top_are_those_of_the_run(page: Page, report: Path) -> None:
    page.open(report)
    data = json.loads(page.text("#bfc-report"))
    shown = page.text(".tiles")
    assert f"{data['peak_live'] / GIB:.2f} GiB" in shown
    assert f"{data['peak_reserved'] / GIB:.2f} GiB" in shown
    assert f"{data['events']:,}" in shown
    rows = page.value("Array.from(document.querySelectorAll('.runs tbody tr'), r => r.textContent)")
    assert [row.strip().split("r")[0] for row in rows] == ["as ", "caching"]


def test_owners_add_up_to_what_is_live(page: Page, report: Path, training: Trace) -> None:
    page.open(report)
    live: dict[str, int] = {}
    for _, size, owner, _ in json.loads(page.text("#bfc-report"))["live_at_peak"]:
        live[owner] = live.get(owner, 0) + size
    script = """return Array.from(document.querySelectorAll('#view tbody tr'),
        row => [row.cells[0].textContent, row.cells[2].textContent])"""
    assert page.run(script) == [
        [owner, written_bytes(size)]
        for owner, size in sorted(live.items(), key=lambda item: -item[1])
    ]


def written_bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    places = Decimal(0 if unit == "B" else -1 if value >= 100 else -2)
    return f"{Decimal(value).quantize(Decimal(10) ** places, ROUND_HALF_UP)} {unit}"


# -- the controls ---------------------------------------------------------------------------------


def shown_range(page: Page) -> str:
    return page.text("#range")


def test_a_drag_chooses_a_range_and_the_views_follow(page: Page, report: Path) -> None:
    page.open(report)
    assert shown_range(page).startswith("Shown: all 5,")
    whole = page.text("#selected")
    left, top, width, height = page.box("#timeline .u-over")
    page.point(
        left + width * 0.2, top + height / 2, (left + width * 0.4, top + height / 2), press=True
    )
    page.wait("document.querySelector('#range').textContent.startsWith('Shown: events 1,')")
    assert page.text("#selected") != whole
    assert "after event 1," in page.text("#selected")  # the peak of the range
    page.press("4")  # all blocks of the range
    ranged = page.text("#selected")
    page.click("#zoom-all")
    page.wait("document.querySelector('#range').textContent.startsWith('Shown: all')")
    assert page.text("#selected") != ranged


def test_a_drag_on_the_map_zooms_too_and_a_double_click_shows_all(page: Page, report: Path) -> None:
    page.open(report)
    left, top, width, height = page.box("#map")
    y = top + height / 2
    page.point(left + width * 0.5, y, (left + width * 0.6, y), press=True)
    page.wait("document.querySelector('#range').textContent.startsWith('Shown: events 2,')")
    page.run(
        "document.querySelector('#map').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))"
    )
    page.wait("document.querySelector('#range').textContent.startsWith('Shown: all')")


def test_the_pointer_on_the_timeline_shows_the_figures_there(page: Page, report: Path) -> None:
    page.open(report)
    left, top, width, height = page.box("#timeline .u-over")
    page.point(left + width / 2, top + height / 2)
    page.wait("!document.querySelector('#tip').hidden")
    shown = page.text("#tip")
    assert "as recorded reserved" in shown
    assert "caching live" in shown
    assert shown.count("GiB") == 4
    page.point(2, 2)
    page.wait("document.querySelector('#tip').hidden")


def test_a_band_stands_where_each_tag_slept(page: Page, folder: Path) -> None:
    """One row of bands for each tag: what the page shows, but would not if nothing had slept."""
    allocator = CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), stitch=True)
    allocator.record_history()
    kept = []
    for tag in ("weights", "kv"):
        with allocator.tag(tag):
            kept.append(allocator.allocate("40 MiB"))
    for drop in (["kv"], ["kv"], ["weights"]):
        for _ in range(6):
            allocator.allocate("1 MiB").free()
        allocator.sleep(drop=drop)
        for _ in range(6):
            allocator.allocate("1 MiB").free()
        if drop == ["kv"]:
            allocator.wake()
    allocator.dump(folder / "slept.pickle")
    data = data_of([("slept", Trace.from_torch(folder / "slept.pickle"))])
    pictures = []
    slept, events = data["runs"][0]["asleep"], data["events"]
    for shown in (slept, []):
        data["runs"][0]["asleep"] = shown
        page.open(written(folder / "slept.html", data))
        pictures.append(shown_at(page))
    changed = np.abs(pictures[0] - pictures[1]).sum(axis=2) > 0
    height, width = changed.shape
    assert not changed[: height - 29].any()
    for row, tag in enumerate(dict.fromkeys(it[2] for it in slept)):
        times = [event for event, _change, its in slept if its == tag] + [events - 1] * (row == 1)
        edges = np.flatnonzero(
            np.diff(changed[height - 14 * row - 3].astype(int), prepend=0, append=0)
        )
        assert len(edges) == len(times)
        expected = [event / (events - 1) * width for event in times]
        assert np.abs(edges - expected).max() <= 0.02 * width, (tag, edges, expected)
    kept.clear()


def test_iterations_stand_in_a_table_and_at_the_head_of_the_timeline(
    page: Page, folder: Path
) -> None:
    trace = Trace.load(ROOT / "bench/traces/gpt2m_adam.npz")
    data = data_of([("adam", trace)])
    rows = data["iterations"]["rows"]
    page.open(written(folder / "adam.html", data))
    cells = page.value(
        "[...document.querySelectorAll('#iterations tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))"
    )
    found = [[int(one.replace(",", "")) for one in cell[2].split(" – ")] for cell in cells]
    assert found == [[begin, end - 1] for _kind, begin, end, *_ in rows]
    assert [cell[7] for cell in cells] == ["–", "0", "0", "−3.98 GiB"]  # which the end frees
    assert page.text("#iterations-count") == data["iterations"]["sentence"]
    with_bands = shown_at(page)
    page.click("#iterations tbody tr:nth-child(2) button")
    begin, end = rows[1][1:3]
    assert f"Shown: events {begin:,} to {end - 1:,}" in page.text("#range")
    data["iterations"]["rows"] = []
    page.open(written(folder / "adam.html", data))
    assert page.value("document.querySelector('#iterations').hidden")
    changed = np.abs(with_bands - shown_at(page)).sum(axis=2) > 0
    assert not changed[14:].any()
    inside = np.flatnonzero(changed[:12].any(axis=0)) / changed.shape[1] * data["events"]
    assert abs(inside[0] - rows[0][1]) < 0.01 * data["events"]


def shown_at(page: Page) -> NDArray[np.int_]:
    """The timeline as it is drawn."""
    picture = Image.open(io.BytesIO(page.picture(page.box("#timeline .u-over"))))
    return np.array(picture.convert("RGB"), int)


def middle_of_block(page: Page, block: int, training: Trace) -> tuple[float, float]:
    """Where a block at the peak is on the map, from the map's description in the data."""
    data = json.loads(page.text("#bfc-report"))
    address, size, _, _ = data["live_at_peak"][block]
    shown = data["runs"][0]["map"]
    below = 0
    for start, nbytes in shown["ranges"]:
        if start <= address < start + nbytes:
            below += address - start + size // 2
            break
        below += nbytes
    left, top, width, height = page.box("#map")
    share = below / (shown["rows"] * shown["row_bytes"])
    x = left + 108 + (width - 122) * data["peak_event"] / (data["events"] - 1)
    return x, top + 4 + (1 - share) * (height - 8)


def test_the_map_names_the_block_under_the_pointer_and_a_click_chooses_it(
    page: Page, report: Path, training: Trace
) -> None:
    page.open(report)
    place = middle_of_block(page, 5, training)
    page.point(*place)
    page.wait("!document.querySelector('#tip').hidden")
    address, size, owner, _ = json.loads(page.text("#bfc-report"))["live_at_peak"][5]
    assert f"{written_bytes(size)}, {owner}" in page.text("#tip")
    assert f"{address:#x}" in page.text("#tip")
    page.point(*place, press=True)
    page.wait("document.querySelector('#block .self')")
    assert f"{address:#x}" in page.text("#block .self")
    assert page.value("document.querySelectorAll('#block .stack li').length") > 2


def test_a_block_leads_to_its_neighbours(page: Page, report: Path) -> None:
    page.open(report)
    page.run("""[...document.querySelectorAll('#segments tbody tr')]
        .find(row => Number(row.cells[4].textContent) >= 4).click()""")
    page.wait("document.querySelectorAll('#block tr.other').length > 1")
    before = page.text("#block .self .address")
    neighbour = page.value("document.querySelector('#block tr.other').cells[2].textContent")
    page.click("#block tr.other button")
    page.wait(
        "document.querySelector('#block .self .address').textContent === arguments[0]", neighbour
    )
    page.press("j")  # down again, one or more
    for _ in range(8):
        if page.text("#block .self .address") == before:
            break
        page.press("j")
    assert page.text("#block .self .address") == before


def test_sums_of_private_pools_stand_above_the_segments(page: Page, folder: Path) -> None:
    """Of each pool what it has taken at the peak, and what is live in it; without pools none."""
    device = bfc.SimulatedSubAllocator("1 GiB")
    allocator = CachingAllocator(device)
    allocator.record_history()
    kept = [allocator.allocate_raw(30 << 20)]
    with allocator.capture(7) as graph:
        kept += [allocator.allocate_raw(size, stream=7) for size in (3 << 20, 4 << 20, 1000)]
    trace = Trace.from_snapshot(allocator.snapshot())
    page.open(written(folder / "pools.html", data_of([("graphs", trace)])))
    found = page.value(
        "[...document.querySelectorAll('#pools tbody tr')]"
        ".map(row => [...row.cells].map(it => it.textContent))"
    )
    name = f"private pool {graph.id[0]}.{graph.id[1]}"
    assert found == [
        ["default pool", "1", written_bytes(30 << 20), written_bytes(30 << 20), "1"],
        [name, "2", written_bytes(22 << 20), written_bytes((7 << 20) + 1024), "3"],
    ]
    graph.release()
    page.open(written(folder / "no-pools.html", data_of([("none", Trace([0], [0], [1000]))])))
    assert page.value("document.querySelector('#pools') === null")


def test_search_finds_owners_lines_and_addresses(page: Page, report: Path) -> None:
    page.open(report)
    data = json.loads(page.text("#bfc-report"))
    owned = [row for row in data["live_at_peak"] if row[2] == "optimizer"]
    page.press("/")
    assert page.value("document.activeElement.id") == "search"
    page.press(*"OPTIMIZER")
    text = f"{len(owned)} blocks"
    page.wait("document.querySelector('#selected').textContent.includes(arguments[0])", text)
    page.type("#search", "feed_forward")
    page.wait("!document.querySelector('#selected').textContent.includes(arguments[0])", text)
    page.press("Escape", "b")
    lines = "Array.from(document.querySelectorAll('#view tbody tr'), r => r.cells[2].textContent)"
    assert {line.split()[0] for line in page.value(lines)} == {"feed_forward"}
    page.type("#search", hex(owned[0][0] + 10))
    page.wait("document.querySelector('#selected').textContent.includes('in 1 block')")
    page.type("#search", "no such thing")
    page.wait("document.querySelector('#selected').textContent.includes('in 0 blocks')")


def test_hits_are_counted_and_gone_through(page: Page, report: Path) -> None:
    page.open(report)
    assert page.value("document.querySelector('#hits').hidden") is True
    owned = [
        row[1]
        for row in json.loads(page.text("#bfc-report"))["live_at_peak"]
        if row[2] == "activations"
    ]
    page.press("/", *"activ", "Enter")
    page.wait(
        "document.querySelector('#hits-count').textContent === arguments[0]", f"1 of {len(owned)}"
    )
    assert page.value("document.activeElement.id") == "search"
    assert written_bytes(max(owned)) in page.text("#block .self")
    first = page.text("#block-body dl")
    page.click("#hits-next")
    assert page.text("#hits-count") == f"2 of {len(owned)}"
    assert page.text("#block-body dl") != first
    page.press("N")
    assert page.text("#block-body dl") == first
    page.press("N")  # before the first comes the last
    assert page.text("#hits-count") == f"{len(owned)} of {len(owned)}"
    page.type("#search", "no such thing")
    page.wait("document.querySelector('#hits-count').textContent === '0 hits'")
    assert page.value("document.querySelector('#hits-next').disabled") is True


ROWS = """return Array.from(document.querySelectorAll('#view tbody tr'),
    row => Array.from(row.cells, cell => cell.textContent))"""


def test_the_table_of_lines_can_be_sorted(page: Page, report: Path) -> None:
    page.open(report)
    data = json.loads(page.text("#bfc-report"))
    page.press("i")
    rows = page.run(ROWS)
    held = data["lines"]
    columns = zip(held["bytes"], held["blocks"], held["most"], held["most_event"], strict=True)
    assert sorted((row[1], *row[3:]) for row in rows) == sorted(
        (written_bytes(size), f"{blocks:,}", written_bytes(most), f"{event:,}")
        for size, blocks, most, event in columns
    )
    page.click("[data-sort='most']")
    by_most = [written_bytes(size) for size in sorted(held["most"], reverse=True)]
    assert [row[4] for row in page.run(ROWS)] == by_most
    assert page.value("document.activeElement.dataset.sort") == "most"
    page.click("[data-sort='most']")
    assert [row[4] for row in page.run(ROWS)] == by_most[::-1]
    assert page.value("document.activeElement.parentElement.ariaSort") == "ascending"
    page.press("2")  # never freed: the same table of other blocks
    shown = [row for row in page.run(ROWS) if row[1] != "0 B"]
    assert len(shown) == len(data["views"]["never_freed"]["by_line"])
    page.press("1")
    page.click("#view tbody tr button")
    page.wait("document.querySelector('#how-list').ariaPressed === 'true'")


def test_the_call_tree_opens_and_closes_by_keys(page: Page, report: Path) -> None:
    page.open(report)
    page.press("r")
    rows = "document.querySelectorAll('.tree [role=treeitem]').length"
    tree = json.loads(page.text("#bfc-report"))["views"]["peak"]["tree"]
    first = page.text(".tree [role=treeitem]")
    assert first.endswith(f"{written_bytes(tree['bytes'][1])} 100.0 %, {tree['blocks'][1]} blocks")
    page.run("document.querySelector('.tree [role=treeitem]').focus()")
    opened = page.value(rows)
    page.press("ArrowLeft")
    assert page.value(rows) == 1
    page.press("ArrowRight")
    assert page.value(rows) == opened
    page.run("document.querySelector('.tree [aria-expanded=false]').focus()")
    page.press("ArrowRight")
    assert page.value(rows) > opened
    page.press("ArrowRight", "ArrowLeft", "ArrowLeft")  # in, out, and closed
    assert page.value(rows) == opened
    size = page.value("document.activeElement.querySelector('b').textContent")
    page.press("Enter")
    page.wait("document.querySelector('#selected .chip')")
    assert page.text("#selected b") == size


def test_what_memory_is_for_is_totalled_at_the_peak_and_said_to_be_a_guess(
    page: Page, folder: Path, report: Path
) -> None:
    page.open(report)
    view = json.loads(page.text("#bfc-report"))
    shown = page.value(
        "Array.from(document.querySelectorAll('#kinds dl > div'), d => d.textContent)"
    )
    found = {view["kinds"][at]: size for at, size, _ in view["views"]["peak"]["by_kind"]}
    assert len(shown) == len(found)
    for text in shown:
        assert any(text.startswith(f" {kind}{written_bytes(size)}") for kind, size in found.items())
    assert "in part guessed" in page.text("#kinds")
    nobody = Trace(
        [0], [0], [5 << 20], stack=[1], frames=[("model.py", 3, "forward")], stacks=[(0, 0)] * 2
    )
    page.open(written(folder / "guessed.html", data_of([("guessed", nobody)])))
    assert "At the peak, guessed." in page.text("#kinds")
    assert page.value("document.querySelector('#paint-line').ariaPressed") == "true"
    plain = data_of([("plain", Trace([0], [0], [5 << 20]))])
    page.open(written(folder / "plain.html", plain))
    assert page.value("document.querySelector('#kinds')") is None


def test_the_views_of_owners_lines_sizes_and_ages_lead_to_their_blocks(
    page: Page, report: Path
) -> None:
    page.open(report)
    for how in ("owner", "size", "age"):
        page.click(f"#how-{how}")
        row = page.value(
            "Array.from(document.querySelector('#view tbody tr').cells, c => c.textContent)"
        )
        page.click("#view tbody tr button")
        page.wait("document.querySelector('#how-list').getAttribute('aria-pressed') === 'true'")
        assert page.text("#selected b") == row[2]
        assert f" {row[4]} block" in page.text("#selected")
        page.click("#selected .chip")
        page.wait("!document.querySelector('#selected .chip')")
    page.click("#how-flame")
    whole = page.value("document.querySelector('.flame button').getAttribute('aria-label')")
    page.click(".flame button[data-depth='1']")
    page.wait(
        "document.querySelector('.flame button').getAttribute('aria-label') !== arguments[0]", whole
    )
    named = page.value("document.querySelector('.flame button').getAttribute('aria-label')")
    page.click(".crumbs .small")
    page.wait("document.querySelector('#selected .chip')")
    assert page.text("#selected b") == named.split(" · ")[1].split(",")[0]


def test_never_freed_and_temporary_are_those_of_the_trace(
    page: Page, report: Path, training: Trace
) -> None:
    page.open(report)
    born: dict[int, tuple[int, int]] = {}
    made, lives = 0, []
    for op, number, size in zip(training.op, training.id, training.size, strict=True):
        if op == 0:
            born[int(number)] = (made, int(size))
            made += 1
        elif op == 1:
            first, nbytes = born.pop(int(number))
            lives.append((made - first - 1, nbytes))
    page.press("2")
    assert f" {len(born)} block" in page.text("#selected")
    assert page.text("#selected b") == written_bytes(sum(size for _, size in born.values()))
    page.press("3")
    for within in (10, 3, 40):
        page.type("#within", str(within))
        brief = [nbytes for others, nbytes in lives if others < within]
        text = f"{written_bytes(sum(brief))} in {len(brief):,} blocks"
        page.wait("document.querySelector('#selected').textContent.startsWith(arguments[0])", text)


def test_keys_do_what_the_help_says(page: Page, report: Path) -> None:
    page.open(report)
    page.press("?")
    page.wait("document.querySelector('#help').open")
    listed = page.value("Array.from(document.querySelectorAll('#help kbd'), k => k.textContent)")
    assert set("/te+-0p1234olsabjk?cwirnN") <= set(listed)
    page.press("Escape")
    page.wait("!document.querySelector('#help').open")
    views = {"l": "flame", "i": "line", "r": "tree", "w": "kind"}
    for key, how in {**views, "s": "size", "a": "age", "b": "list", "o": "owner"}.items():
        page.press(key)
        pressed = "document.getElementById(arguments[0]).getAttribute('aria-pressed') === 'true'"
        assert page.value(pressed, f"how-{how}")
    page.press("p", "+")
    narrow = shown_range(page)
    page.press("ArrowRight")
    assert shown_range(page) != narrow
    page.press("0")
    assert "all" in shown_range(page)
    page.press("e")
    assert page.value("document.querySelector('#axis-time').getAttribute('aria-pressed')") == "true"
    page.press("e")
    for paint in ("line", "kind", "lane", "owner"):
        page.press("c")
        assert page.value(f"document.querySelector('#paint-{paint}').ariaPressed") == "true"


def test_timeline_map_and_flame_graph_answer_to_arrow_keys(page: Page, report: Path) -> None:
    page.open(report)
    page.run("document.querySelector('#timeline').focus()")
    page.press("ArrowRight", "ArrowRight")
    page.wait("document.querySelector('#tip').textContent.includes('event')")
    page.run("document.querySelector('#map').focus()")
    for _ in range(20):
        page.press("ArrowUp")
        if "lives" in page.text("#tip"):
            break
    page.press("Enter")
    page.wait("document.querySelector('#block .self')")
    page.press("l")
    page.run("document.querySelector('.flame button').focus()")
    page.press("ArrowDown", "ArrowRight")
    assert page.value("document.activeElement.dataset.depth") == "1"
    page.press("ArrowUp")
    assert page.value("document.activeElement.dataset.depth") == "0"


NAMELESS = """
    const named = id => id && document.getElementById(id).textContent;
    const name = one => one.getAttribute('aria-label') || one.textContent.trim()
        || one.closest('label')?.textContent.trim() || named(one.getAttribute('aria-labelledby'));
    return [...document.querySelectorAll('button, input, select, [role], [tabindex]')]
        .filter(one => !name(one) && !one.hidden && !one.classList.contains('scroll'))
        .map(one => one.outerHTML);"""


def test_everything_that_answers_has_a_name_and_can_have_the_focus(
    page: Page, report: Path
) -> None:
    page.open(report)
    for key in "lbir":
        page.press(key)
        nameless = page.run(NAMELESS)
        assert nameless == []
    tree = page.devtools("Accessibility.getFullAXTree")["nodes"]
    roles = {node["role"]["value"] for node in tree}
    assert {"application", "tablist", "tab", "tabpanel", "searchbox", "table", "heading"} <= roles


#: What `make test-browser` downloads. It is injected: no page has it.
AXE = sorted(ROOT.glob("build/axe-core-*/axe.min.js"))
VIOLATIONS = """
    return axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.map(
        one => `${one.id}: ${one.nodes.length} times, ${one.nodes[0].html.slice(0, 300)}`));"""


@pytest.mark.skipif(not AXE, reason="needs axe-core: make test-browser")
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing(page: Page, report: Path, theme: str) -> None:
    page.open(report, width=1280 if theme == "light" else 400, dark=theme == "dark")
    page.run(AXE[-1].read_text("utf-8"))
    for key in "owirlb?":
        page.press(key)
        if key == "b":
            page.run("document.querySelector('#view tr[data-block]').click()")
        assert page.run(VIOLATIONS) == [], key


CUT_OFF = """
    const found = [];
    for (const one of document.querySelectorAll('header, header *, main, main *, footer')) {
        const {left, right, width, height} = one.getBoundingClientRect();
        // Names that a box of the flame graph has no room for are in its tip.
        if (!width || !height || one.closest('.unseen, .flame, .uplot')) continue;
        const clips = getComputedStyle(one).overflowX !== 'visible';
        const isOutside = left < -0.5 || right > innerWidth + 0.5;
        if (isOutside || (clips && one.scrollWidth > one.clientWidth + 1))
            found.push([one.tagName, one.className, one.id, one.textContent.slice(0, 50)]);
    }
    return found;"""


def test_nothing_is_cut_off_on_a_narrow_screen(page: Page, report: Path, folder: Path) -> None:
    page.open(report, width=400)
    page.type("#search", "miniature")
    page.wait("!document.querySelector('#hits').hidden")
    page.press("Escape")
    for key in "owirlsab":
        page.press(key)
        assert page.run(CUT_OFF) == [], key
    page.run("document.querySelector('#view tr[data-block]').click()")
    assert page.run(CUT_OFF) == []
    long = "a_name_without_a_space_" * 12
    trace = Trace(
        [0],
        [0],
        [7 << 20],
        owner=[0],
        owners=[long],
        stack=[1],
        frames=[(long, 1, long)],
        stacks=[(0, 0)] * 2,
    )
    page.open(written(folder / "wide.html", data_of([(long, trace)])), width=400)
    for key in "oirlb":
        page.press(key)
        assert page.run(CUT_OFF) == [], key


def test_light_and_dark_follow_the_system_and_the_switch(page: Page, report: Path) -> None:
    def brightness() -> float:
        shown = page.value("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in shown[4:-1].split(","))

    page.open(report, dark=True)
    assert brightness() < 120
    page.click("#theme")
    assert brightness() > 600
    page.open(report, dark=False)
    assert brightness() > 600
    page.press("t")
    assert brightness() < 120


def test_lines_can_be_switched_off_and_another_run_placed_on_the_map(
    page: Page, folder: Path, training: Trace
) -> None:
    data = data_of([("training", training)], [Policy("bfc", BFCAllocator)])
    page.open(written(folder / "beside.html", data))
    page.click("#legend button")
    assert page.value("document.querySelector('#legend button').ariaPressed") == "false"
    count = page.text("#segments-count")
    page.run("""const chosen = document.querySelector('select');
        chosen.value = '1'; chosen.dispatchEvent(new Event('change'))""")
    page.wait("document.querySelector('#segments-count').textContent !== arguments[0]", count)


COLOURS_AT = """
    const canvas = document.querySelector('#map canvas');
    const {data} = canvas.getContext('2d').getImageData(canvas.width - 40, 0, 1, canvas.height);
    return arguments[0].map(share => {
        const y = Math.round(4 + (1 - share) * (canvas.clientHeight - 8));
        return `rgb(${[...data.slice(4 * y, 4 * y + 3)].join(', ')})`;
    });"""


def saved(page: Page, folder: Path, button: str, name: str) -> bytes:
    """The file that a button saves."""
    page.devtools("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    path = folder / name
    path.unlink(missing_ok=True)
    page.click(button)
    for _ in range(500):
        if path.exists() and path.stat().st_size:
            return path.read_bytes()
        time.sleep(0.02)
    raise AssertionError(f"{button} has not saved {name}: {sorted(folder.iterdir())}")


def test_pictures_and_figures_are_saved(page: Page, report: Path, tmp_path: Path) -> None:
    page.open(report)
    data = json.loads(page.text("#bfc-report"))
    name = data["title"]
    rows = list(csv.reader(io.StringIO(saved(page, tmp_path, "#save-csv", f"{name}.csv").decode())))
    at = {column: index for index, column in enumerate(rows[0])}
    for run in data["runs"]:
        mine = [row for row in rows[1:] if row[0] == run["label"]]
        for column in ("event", "live", "reserved", "driver_calls"):
            assert [int(row[at[column]]) for row in mine] == run["timeline"][column]
    root = ElementTree.fromstring(saved(page, tmp_path, "#save-svg", f"{name}.svg"))
    tag = "{http://www.w3.org/2000/svg}"
    drawn = root.findall(f"{tag}path")
    assert len(drawn) == 4  # live and reserved of two runs
    assert all(len(path.get("d", "")) > 100 for path in drawn)
    texts = [text.text for text in root.iter(f"{tag}text")]
    assert f"peak {written_bytes(data['peak_live'])} live" in texts
    assert {"as recorded live", "optimizer"} <= set(texts)
    (image,) = root.iter(f"{tag}image")
    assert image.get("href", "").startswith("data:image/png;base64,")
    picture = saved(page, tmp_path, "#save-png", f"{name}.png")
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 20_000
    page.press("i")
    lines = saved(page, tmp_path, "#lines-csv", f"{name}-lines.csv").decode()
    rows = list(csv.reader(io.StringIO(lines)))
    assert rows[0] == ["line", "bytes", "blocks", "most_bytes", "most_event"]
    assert [int(row[1]) for row in rows[1:]] == data["lines"]["bytes"]


def test_streams_and_private_pools_have_colours_of_their_own(page: Page, folder: Path) -> None:
    memory = bfc.SimulatedSubAllocator("1 GiB")
    allocator = CachingAllocator(memory)
    allocator.record_history(context="all")
    kept = [allocator.allocate("60 MiB")]
    with bfc.use_stream(5):
        kept.append(allocator.allocate("60 MiB"))
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        kept.append(allocator.allocate("60 MiB"))
    allocator.allocate("2 MiB").free()
    allocator.dump(folder / "pools.pickle")
    data = data_of([("pools", Trace.from_torch(folder / "pools.pickle"))])
    page.open(written(folder / "pools.html", data))
    page.click("#paint-lane")
    names = page.value("Array.from(document.querySelectorAll('#lanes .key'), k => k.textContent)")
    assert len(names) == 4
    assert sum(name.startswith("private pool") for name in names) == 1

    shown, places = data["runs"][0]["map"], []
    [(start, _)] = shown["ranges"]
    for address, size, _, _ in data["live_at_peak"][:3]:
        below = address - start + size // 2
        places.append(below / (shown["rows"] * shown["row_bytes"]))
    colours = page.run(COLOURS_AT, places)
    swatches = "Array.from(document.querySelectorAll('#lanes .swatch'), s => s.style.background)"
    assert sorted(colours) == sorted(page.value(swatches)[:3])
    kept.clear()
    pool.release()


def test_the_map_has_the_colours_of_owners_whose_blocks_are_not_listed(
    page: Page, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long run has more blocks than a page can list."""
    monkeypatch.setattr("bfc_tools.browser.data.LEVELS", ((1, 0, 9),))
    trace = Trace(
        [0] * 40,
        range(40),
        [60 << 20] * 40,
        owner=[at // 20 for at in range(40)],
        owners=["weights", "kv cache"],
    )
    data = data_of([("many", trace)])
    assert len(data["live_at_peak"]) == 1
    page.open(written(folder / "many.html", data))
    swatches = page.value(
        "Array.from(document.querySelectorAll('#lanes .swatch'), s => s.style.background)"
    )
    shown = page.run(COLOURS_AT, [0.05, 0.4, 0.6, 0.95])
    assert [near(colour, swatches) for colour in shown] == [0, 0, 1, 1]


def near(colour: str, others: list[str]) -> int:
    """The index of the colour that another one, of a cell that is nearly full, is most like."""
    parts = [np.array(re.findall(r"\d+", one)[:3], int) for one in (colour, *others)]
    return int(np.argmin([np.abs(parts[0] - part).sum() for part in parts[1:]]))


# -- strangers' names, odd runs -------------------------------------------------------------------

TAGS = "<script>window.ran = true</script>", "</script><img src=x onerror=window.ran=true>"


def test_names_of_a_hostile_recording_are_shown_as_text(page: Page, folder: Path) -> None:
    pool = CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    pool.record_history(context="all")
    with bfc.owner(TAGS[0]):
        kept = [pool.allocate_raw(n << 20) for n in (3, 5, 30)]
    pool.dump(folder / "hostile.pickle")
    content = pickle.loads((folder / "hostile.pickle").read_bytes())
    entries = [entry for device in content["device_traces"] for entry in device]
    for entry in entries:
        entry["frames"] = [{"filename": TAGS[1], "line": 1, "name": TAGS[0]}] * 2
    (folder / "hostile.pickle").write_bytes(pickle.dumps(content))
    trace = Trace.from_torch(folder / "hostile.pickle")
    page.open(written(folder / "hostile.html", data_of([(TAGS[1], trace)], title=TAGS[1])))
    for pointer in kept:
        pool.deallocate_raw(pointer)

    assert page.text("#title") == TAGS[1]
    assert page.value("document.title") == f"bfc report: {TAGS[1]}"
    assert page.text("#view td.name") == TAGS[0]
    page.press("l")
    assert TAGS[0] in page.text(".flame")
    page.press("b")
    page.click("#view tr[data-block] button")
    page.wait("document.querySelector('#block .stack li')")
    assert TAGS[1] in page.value("document.querySelector('#block .stack li').title")
    page.type("#search", TAGS[0])
    page.wait("document.querySelector('#selected').textContent.includes('3 blocks')")
    assert page.value("window.ran") is None
    assert page.value("document.querySelectorAll('img, script[src]').length") == 0
    assert page.value("document.scripts.length") == 2


def test_the_policy_stops_what_stands_in_the_page_and_is_not_ours(
    page: Page, report: Path, folder: Path
) -> None:
    """So the policy is in force, and an empty log says something."""
    text = report.read_text(encoding="utf-8")
    changed = text.replace("</body>", "<script>window.ran = true</script></body>")
    (folder / "changed.html").write_text(changed, encoding="utf-8")
    page.open(folder / "changed.html")
    assert page.value("window.ran") is None
    assert any("Content Security Policy" in problem for problem in page.problems())


def test_a_recording_that_began_late_opens_at_the_peak_of_what_was_recorded(
    page: Page, folder: Path
) -> None:
    """The events before rebuild what was live, and fill the gaps for a moment."""
    pool = CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    held = [pool.allocate_raw(40 << 20) for _ in range(10)]
    small = [pool.allocate_raw(6 << 20) for _ in range(6)]
    for pointer in small[1:5:2]:
        pool.deallocate_raw(pointer)
    pool.record_history(context="all")
    with bfc.owner("late"):
        pool.deallocate_raw(pool.allocate_raw(1 << 20))
    pool.dump(folder / "late.pickle")
    trace = Trace.from_torch(folder / "late.pickle")
    data = data_of([("late", trace)])
    assert trace.size[trace.op == 0].sum() > data["peak_live"] + (1 << 20), "there are no gaps"
    page.open(written(folder / "late.html", data))
    assert "Shown: all 2 events" in page.text("#range")
    assert f"from event {data['rebuilt']} on" in page.text(".tiles")
    assert page.text("#selected b") == written_bytes(data["peak_live"])
    assert "late" in page.text("#view")
    page.press("4")  # all, and no gaps among them
    assert "in 15 blocks" in page.text("#selected")
    for pointer in held + small[::2] + small[5:]:
        pool.deallocate_raw(pointer)


ODD: dict[str, Callable[[], Trace]] = {
    "no-events": lambda: Trace([], [], []),
    "one-event": lambda: Trace([0], [0], [100]),
    "nothing-but-zeros": lambda: Trace([0, 1, 0], [0, 0, 1], [0, 0, 0]),
    "large-numbers": lambda: Trace([0, 1], [0, 0], [1 << 45, 0]),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_run_has_a_page_without_errors(page: Page, folder: Path, name: str) -> None:
    path = folder / f"{name}.html"
    page.open(written(path, data_of([(name, ODD[name]())], [Policy("bfc", BFCAllocator)])))
    for key in "1234olsabwirnN0+-pect":
        page.press(key)
    assert name in page.text("#title")


# -- large runs, and pictures ---------------------------------------------------------------------


def long_run(events: int) -> Trace:
    """A run of so many events: sizes, lives, owners and stacks by chance, 60,000 blocks live."""
    chance = np.random.default_rng(16)
    live, half = 60_000, events // 2
    op = np.tile(np.array([0, 1], np.uint8), half)
    made = np.arange(half, dtype=np.uint32)
    number = np.empty(2 * half, np.uint32)
    number[::2] = made
    number[1::2] = np.maximum(made.astype(np.int64) - live, 0)
    size = np.zeros(2 * half, np.uint64)
    size[::2] = 1 + (chance.random(half) ** 8 * (3 << 20)).astype(np.uint64)
    keep = np.ones(2 * half, bool)
    keep[1 : 2 * live + 1 : 2] = False  # nothing is freed at first
    frames = [(f"/srv/training/model_{n % 40}.py", n, f"function_{n}") for n in range(2_000)]
    stacks = [(0, 0)]
    while len(stacks) < 20_000:
        stacks.append((int(chance.integers(0, len(stacks))), int(chance.integers(0, 2_000))))
    owner = chance.integers(0, 40, 2 * half).astype(np.uint16)
    stack = chance.integers(1, len(stacks), 2 * half).astype(np.uint32)
    time = np.arange(2 * half, dtype=np.uint64) * 13
    return Trace(
        op[keep],
        number[keep],
        size[keep],
        chance.integers(0, 3, 2 * half).astype(np.uint16)[keep] * (op[keep] == 0),
        time_us=time[keep],
        owner=owner[keep] * (op[keep] == 0),
        stack=stack[keep] * (op[keep] == 0),
        owners=["", *(f"part {n}" for n in range(39))],
        frames=frames,
        stacks=np.array(stacks, np.uint32),
    )


def test_the_report_of_five_million_events_is_small_and_answers_within_two_seconds(
    page: Page, folder: Path
) -> None:
    """The one bound on a time in the tests: measured by the browser, from the beginning of the
    navigation until the page is painted and every control answers."""
    trace = long_run(5_060_000)
    assert len(trace) >= 5_000_000
    path = written(folder / "long.html", data_of([("long", trace)]))
    assert path.stat().st_size < 5_000_000
    times = []
    for _ in range(3):
        page.open(path)
        mark = "performance.getEntriesByName('bfc-interactive')[0].startTime"
        times.append(page.value(mark))
    print(f"interactive after {sorted(times)} ms, {path.stat().st_size / 1e6:.2f} MB")
    assert sorted(times)[1] < 2000
    page.press("p", "l", "b", "3", "4", "0")
    assert "of those that the report lists" in page.text("#selected")
    assert "10,001 blocks" in page.text("#left")


PARTS = {"report": ("header", "#map-help"), "blocks": (".columns", "#segments")}
CHOOSE_A_BLOCK = """
    [...document.querySelectorAll('#segments tbody tr')]
        .find(row => Number(row.cells[4].textContent) >= 4).click();
    document.activeElement.blur();
    scrollTo(0, 0);
    return new Promise(done => requestAnimationFrame(() => setTimeout(done, 100)))"""
EXTENT = """
    const box = selector => document.querySelector(selector).getBoundingClientRect();
    return [box(arguments[0]).top + scrollY, box(arguments[1]).bottom + scrollY]"""


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_in_light_and_dark(page: Page, folder: Path, pictured: Path, theme: str) -> None:
    """Of the report that the README leads to. What is drawn on canvases is in them."""
    page.open(pictured, width=1280, height=900, dark=theme == "dark")
    page.press("l")
    page.point(1, 1)
    page.run(CHOOSE_A_BLOCK)
    for name, ends in PARTS.items():
        top, bottom = page.run(EXTENT, *ends)
        taken = Image.open(io.BytesIO(page.picture((0, top, 1280, bottom - top + 14))))
        # With a palette it takes a third of the room, and rare colours are kept.
        picture = taken.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
        target = PICTURES if os.environ.get("BFC_PICTURES") == "1" else folder
        path = target / f"{name}-{theme}.png"
        picture.save(path, optimize=True)
        assert 20_000 < path.stat().st_size < 200_000
        colours = np.array(picture.getpalette()).reshape(-1, 3)
        drawn = page.run(
            "return ['lane0', 'lane1'].map(name => getComputedStyle("
            "document.documentElement).getPropertyValue('--' + name))"
        )
        for colour in drawn:
            wanted = [int(colour.strip()[at : at + 2], 16) for at in (1, 3, 5)]
            assert np.abs(colours - wanted).sum(1).min() < 12


def test_a_run_that_ran_out_begins_with_a_sentence_and_one_without_names_with_sizes(
    page: Page, folder: Path
) -> None:
    pool = CachingAllocator(bfc.SimulatedSubAllocator("330 MiB"))
    pool.record_history(context=None)
    held = [pool.allocate(30 << 20) for _ in range(10)]
    assert pool.try_allocate(80 << 20) is None
    data = data_of([("ran-out", Trace.from_snapshot(pool.snapshot()))])
    page.open(written(folder / "ran-out.html", data))
    assert page.text("#ran-out") == data["ran_out"][0]["sentence"]
    assert page.value("document.querySelector('main').innerText").startswith("It ran out of memory")
    assert page.value("document.querySelector('#how-size').getAttribute('aria-pressed')") == "true"
    assert "16 MiB to 32 MiB" in page.text("#view")
    page.open(written(folder / "served.html", data_of([("served", Trace([0], [0], [100]))])))
    assert page.value("document.querySelector('#ran-out').offsetHeight") == 0
    assert len(held) == 10
