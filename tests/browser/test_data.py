"""What a page shows equals a slow, obvious recount of the trace."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_recounts import (
    Life,
    addresses_of,
    frame_of,
    frames_of,
    opened,
    random_trace,
    recount,
    unpacked,
)

import bfc
from bfc_tools.browser import data, tables
from bfc_tools.browser.data import LISTED, OTHERS, data_of
from bfc_tools.browser.encoding import packed
from bfc_tools.browser.kinds import TEMPORARY_WITHIN as TEMPORARY
from bfc_tools.browser.render import render
from bfc_tools.study.experiment import Policy

FILES = [
    *sorted((Path(__file__).parents[2] / "bench/traces").glob("*.npz")),
    *sorted((Path(__file__).parents[1] / "recordings").glob("*.npz")),
]
SMALL = bfc.Trace([0, 0, 1], [0, 1, 0], [3 << 20, 1 << 20, 0])


def owner_of(trace: bfc.Trace, event: int) -> str:
    has_owners = trace.owner is not None and len(trace.owners) > 0
    return trace.owners[trace.owner[event]] if has_owners else ""


def check_blocks(found: dict[str, Any], trace: bfc.Trace, addresses: list[int]) -> None:
    """The rows of the blocks, one by one."""
    counted = recount(trace)
    assert (found["events"], found["peak_event"]) == (len(trace), counted.peak)
    assert found["peak_live"] == max(counted.live, default=0)
    by_size = sorted(counted.lives, key=lambda life: (-life.size, life.born))
    at_peak = [life for life in by_size if life.is_live_after(counted.peak)]
    others = [life for life in by_size if not life.is_live_after(counted.peak)][:OTHERS]
    assert found["left_out"] == max(0, len(at_peak) - LISTED)
    assert found["left_out_bytes"] == sum(life.size for life in at_peak[LISTED:])
    for row, life in zip(found["live_at_peak"], at_peak[:LISTED], strict=True):
        assert row[:3] == [addresses[life.born], life.size, owner_of(trace, life.born)]
        assert frames_of(found, row[3]) == list(trace.frames_of(life.born))
    check_columns(found, trace, addresses, at_peak[:LISTED], others)
    assert found["blocks"]["total"] == len(counted.lives)
    assert found["blocks"]["total_bytes"] == sum(life.size for life in counted.lives)


def check_columns(
    found: dict[str, Any],
    trace: bfc.Trace,
    addresses: list[int],
    listed: list[Life],
    others: list[Life],
) -> None:
    blocks, every = found["blocks"], listed + others
    assert blocks["at_peak"] == len(listed)
    assert blocks["born"] == [life.born for life in every]
    assert blocks["died"] == [life.died for life in every]
    assert blocks["between"] == [min(life.between, 255) for life in every]
    assert blocks["stream"] == [int(trace.stream[life.born]) for life in every]
    assert blocks["size"] == [life.size for life in others]
    assert blocks["address"] == [addresses[life.born] for life in others]
    names = [*found["owners"], ""]
    assert [names[at] for at in blocks["owner"]] == [owner_of(trace, life.born) for life in others]
    for stack, life in zip(blocks["stack"], others, strict=True):
        assert frames_of(found, stack) == list(trace.frames_of(life.born))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
def test_blocks_of_random_traces_equal_a_recount(seed: int) -> None:
    print("seed", seed)
    trace = random_trace(seed)
    check_blocks(opened(data_of([("random", trace)])), trace, addresses_of(trace))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_blocks_of_recorded_traces_equal_a_recount(file: Path) -> None:
    trace = bfc.Trace.load(file)
    found = json.loads(json.dumps(data_of([(file.stem, trace)])))
    torch = (trace.meta or {}).get("torch", {})
    check_blocks(opened(found), trace, torch.get("addresses") or addresses_of(trace))
    assert found["rebuilt"] == torch.get("first_recorded_event", 0)


def check_view(
    found: dict[str, Any], trace: bfc.Trace, view: dict[str, Any], chosen: list[tuple[Life, int]]
) -> None:
    """The sums of a view; `chosen` has the age of each allocation."""
    by_owner: Counter[str] = Counter()
    by_size: Counter[int] = Counter()
    by_age: Counter[int] = Counter()
    by_place: Counter[tuple[Any, ...]] = Counter()
    blocks: Counter[tuple[Any, ...]] = Counter()
    for life, age in chosen:
        by_owner[owner_of(trace, life.born)] += life.size
        by_size[life.size.bit_length() - 1] += life.size
        by_age[age.bit_length() - 1] += life.size
        outermost_first = tuple(reversed(trace.frames_of(life.born)))
        for depth in range(len(outermost_first) + 1):
            by_place[outermost_first[:depth]] += life.size
            blocks[outermost_first[:depth]] += 1
    assert (view["bytes"], view["blocks"]) == (sum(by_owner.values()), len(chosen))
    names = [*found["owners"], ""]
    assert {names[owner]: size for owner, size, _ in view["by_owner"]} == by_owner
    by_line: Counter[Any] = Counter()
    for life, _ in chosen:
        by_line[line_of(trace, life)] += life.size
    rows = {None if at < 0 else frame_of(found, at): size for at, size, _ in view["by_line"]}
    assert rows == by_line
    assert sum(size for _, size, _ in view["by_kind"]) == view["bytes"]
    assert {power: size for power, size, _ in view["by_size"]} == by_size
    assert {power: size for power, size, _ in view["by_age"]} == by_age
    sizes: Counter[tuple[Any, ...]] = Counter()
    counts: Counter[tuple[Any, ...]] = Counter()
    paths: list[tuple[Any, ...]] = []
    rows = zip(
        *(view["tree"][name] for name in ("parent", "frame", "bytes", "blocks")), strict=True
    )
    for parent, frame, size, count in rows:
        paths.append(() if parent < 0 else (*paths[parent], frame_of(found, frame)))
        sizes[paths[-1]] += size
        counts[paths[-1]] += count
    assert sizes == by_place
    assert counts == blocks


def line_of(trace: bfc.Trace, life: Life) -> Any:
    """The line that counts for an allocation: the innermost, since all files are the user's."""
    return next((tuple(frame) for frame in trace.frames_of(life.born)), None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_what_lines_hold_equals_a_recount(seed: int) -> None:
    print("seed", seed)
    trace = random_trace(seed)
    found, counted = opened(data_of([("random", trace)])), recount(trace)
    held: Counter[Any] = Counter()
    most: dict[Any, tuple[int, int]] = {}
    for event in range(len(trace)):
        for life in counted.lives:
            line = line_of(trace, life)
            held[line] += life.size * ((life.born == event) - (life.died == event))
        for line, size in held.items():
            if any(line_of(trace, life) == line for life in counted.lives if life.born <= event):
                most[line] = max(most.get(line, (-1, 0)), (size, -event))
    at_peak = [line_of(trace, life) for life in counted.at_peak]
    rows = found["lines"]
    names = [frame_of(found, at) for at in rows["line"]]
    assert sorted(names) == sorted(line for line in most if line is not None)
    assert rows["bytes"] == sorted(rows["bytes"], reverse=True)
    assert rows["left_out"] == [0]
    for at, name in enumerate(names):
        size = sum(life.size for life in counted.at_peak if line_of(trace, life) == name)
        assert (rows["bytes"][at], rows["blocks"][at]) == (size, at_peak.count(name))
        assert (rows["most"][at], -rows["most_event"][at]) == most[name]
    # The page knows of each stack which line counts for it.
    for at, line in enumerate(found["stacks"]["line"]):
        assert frame_of(found, line) == frames_of(found, at)[0]


@pytest.mark.parametrize("seed", range(4))
def test_views_equal_a_recount(seed: int) -> None:
    print("seed", seed)
    trace = random_trace(seed)
    found, counted = opened(data_of([("random", trace)])), recount(trace)
    end = len(trace) - 1
    at_peak = [(life, counted.peak - life.born) for life in counted.at_peak]
    never = [(life, end - life.born) for life in counted.lives if life.died < 0]
    brief = [
        (life, life.died - life.born)
        for life in counted.lives
        if life.died >= 0 and life.between < TEMPORARY
    ]
    assert at_peak
    assert never
    assert brief
    check_view(found, trace, found["views"]["peak"], at_peak)
    check_view(found, trace, found["views"]["never_freed"], never)
    check_view(found, trace, found["views"]["temporary"], brief)


@pytest.mark.parametrize("seed", range(3))
def test_owners_over_time_equal_a_recount(seed: int) -> None:
    print("seed", seed)
    trace = random_trace(seed, events=700)
    counted, found = recount(trace), data_of([("random", trace)])
    over_time = found["owners_over_time"]
    assert counted.peak in over_time["event"]
    named = [found["owners"][at] for at in over_time["owner"][:-1]]
    assert sorted(named) == sorted(trace.owners)
    for at, event in enumerate(over_time["event"]):
        live = Counter(dict.fromkeys(trace.owners, 0))
        for life in counted.lives:
            if life.is_live_after(event):
                live[owner_of(trace, life.born)] += life.size
        assert [row[at] for row in over_time["live"]] == [*(live[name] for name in named), 0]


def test_small_pieces_of_a_tree_stay_in_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    from bfc_tools.browser import aggregates

    monkeypatch.setattr(aggregates, "MOST_NODES", 5)
    trace = random_trace(2)
    whole = recount(trace)
    tree = data_of([("random", trace)])["views"]["peak"]["tree"]
    assert len(tree["parent"]) == 5
    assert tree["left_out"] > 0
    assert tree["bytes"][0] == whole.live[whole.peak]
    for parent, size in zip(tree["parent"][1:], tree["bytes"][1:], strict=True):
        assert size <= tree["bytes"][parent]


def test_packed_arrays_come_back() -> None:
    for dtype in ("uint8", "uint16", "uint32", "int32", "uint64"):
        info = np.iinfo(dtype)
        numbers = [info.min, 0, 1, 200, info.max]
        assert unpacked(packed(np.array(numbers, dtype))) == numbers
    assert unpacked(packed(np.zeros(0, np.uint8))) == []


# What is left out -------------------------------------------------------------------------------


def test_more_than_fifty_thousand_blocks_at_the_peak() -> None:
    count = 50_007
    trace = bfc.Trace(
        [0] * count, range(count), [512 + at % 97 for at in range(count)], owner=[0] * count,
        owners=["kv"],
    )  # fmt: skip
    found = data_of([("many", trace)])
    assert len(found["live_at_peak"]) == 50_000
    assert found["left_out"] == 7
    assert found["left_out_bytes"] == 7 * 512
    assert found["views"]["peak"]["blocks"] == count
    assert found["views"]["peak"]["by_owner"] == [[0, int(trace.size.sum()), count]]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("filler", ["x", "<", "\N{SNOWMAN}"])
def test_long_names_make_no_long_page(filler: str) -> None:
    count = 60_000
    names = [f"{at:04}" + filler * 252 for at in range(200)]
    owner = [at % 200 for at in range(count)]
    trace = bfc.Trace([0] * count, range(count), [512] * count, owner=owner, owners=names)
    found = data_of([("names", trace)])
    assert len(render(found)) < 5_000_000
    listed = len(found["live_at_peak"])
    assert 0 < listed < 50_000
    assert found["left_out"] == count - listed
    assert found["blocks"]["at_peak"] == listed


@pytest.mark.long
def test_many_owners_make_no_long_page() -> None:
    """Nor does the process learn their names, of which it can hold no more (that would warn)."""
    count = 1 << 16
    names = [f"{at:05}" + "<" * 250 for at in range(count)]
    size = [512 + at % 9973 for at in range(count)]
    trace = bfc.Trace([0] * count, range(count), size, owner=range(count), owners=names)
    found = data_of([("names", trace)])
    assert len(render(found)) < 5_000_000
    assert found["views"]["peak"]["bytes"] == sum(size)
    largest = size.index(max(size))
    assert found["live_at_peak"][0][2] == found["owners"][largest] == names[largest]
    assert found["owners"][size.index(min(size))] == "…"


def test_texts_without_room_are_said_to_be_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_CHARACTERS", 400)
    frames = [("a" * 1000, 1, "short"), ("b" * 299, 2, "other")]
    trace = bfc.Trace([0], [0], [512], stack=[2], frames=frames, stacks=[(0, 0), (0, 0), (1, 1)])
    found = opened(data_of([("texts", trace)]))
    (block,) = found["live_at_peak"]
    inner, outer = frames_of(found, block[3])
    assert outer == ("a" * 149 + "…" + "a" * 149, 1, "short")
    assert inner == ("…", 2, "other")


def test_stacks_without_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "LEVELS", ((50_000, 100, 3),))
    frames = [("a.py", at, "f") for at in range(6)]
    chain = [(0, 0), *((at, at) for at in range(6))]
    trace = bfc.Trace([0, 0, 0], [0, 1, 2], [3, 2, 1], stack=[3, 6, 1], frames=frames, stacks=chain)
    found = opened(data_of([("deep", trace)]))
    assert [len(frames_of(found, row[3])) for row in found["live_at_peak"]] == [3, 0, 1]
    assert found["stacks_left_out"] == 1
    assert max(found["views"]["peak"]["tree"]["bytes"]) == 6


# Odd traces ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "peak"),
    [
        (bfc.Trace([], [], []), -1),
        (bfc.Trace([2, 2], [0, 0], [0, 0]), 0),
        (bfc.Trace([0], [5], [0]), 0),
        (bfc.Trace([0], [5], [7]), 0),
        (bfc.Trace([0] * 5, range(5), [1 << 20] * 5), 4),
    ],
    ids=["empty", "only releases", "no bytes", "one event", "all leaked"],
)
def test_odd_traces(trace: bfc.Trace, peak: int) -> None:
    found = json.loads(json.dumps(data_of([("odd", trace)])))
    check_blocks(opened(found), trace, addresses_of(trace))
    assert found["peak_event"] == peak == trace.fullest_event()
    assert found["views"]["never_freed"]["bytes"] == int(trace.size.sum())


def test_sizes_that_no_number_holds_are_refused() -> None:
    trace = bfc.Trace([0, 0], [0, 1], [1 << 62, 1 << 62])
    with pytest.raises(bfc.TraceError, match=r"^huge: its sizes add up to 2\*\*63 bytes or more$"):
        data_of([("huge", trace)])


def test_too_many_runs_are_refused() -> None:
    listed = [Policy("caching", bfc.CachingAllocator)] * 9
    with pytest.raises(ValueError, match="at most 16 runs side by side, not 18"):
        data_of([("one", SMALL), ("two", SMALL)], listed)
    with pytest.raises(ValueError, match="at least one run"):
        data_of([])


def test_iterations_are_found_by_stacks_where_owners_are_named() -> None:
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    pool.record_history(context="all")
    for number in range(6):
        with bfc.owner("step"):
            kept = [pool.allocate("1 MiB") for _ in range(10)]
            kept += [pool.allocate("2 MiB") for _ in range(1 + number)]
        while kept:
            kept.pop()
    trace = bfc.Trace.from_snapshot(pool.snapshot())
    found = data_of([("steps", trace)])["iterations"]
    assert trace.owners
    assert found["source"] == trace.iterations().source == "stacks"
    assert len(found["rows"]) == len(trace.iterations()) == 6


def test_iterations_are_those_of_the_trace_and_a_page_has_so_many() -> None:
    found = data_of([("small", SMALL)])
    assert found["iterations"] is None
    sizes = [size for _ in range(500) for size in (1 << 20, 0)]
    marks = [[begin, "train:long"] for begin in range(0, 1000, 2)]
    trace = bfc.Trace([0, 1] * 500, [0] * 1000, sizes, meta={"marks": marks})
    found = data_of([("many", trace)])["iterations"]
    assert (found["source"], found["left_out"]) == ("marks", 100)
    assert found["rows"][3] == ["train", 6, 8, True, 1.0, 1, 1 << 20, 6, 0]
    assert found["sentence"].startswith("500 iterations (train): the first holds 1.00 MiB at most")
