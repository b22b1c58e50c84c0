"""The runs of a report: their timelines, maps and segments."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_recounts import Life, addresses_of, random_trace, recount, unpacked

import bfc
from bfc_tools.browser.data import MOST_SEGMENTS, data_of
from bfc_tools.browser.runs import COLUMNS, ROWS, SAMPLES
from bfc_tools.study.counting import CountedSimulated
from bfc_tools.study.experiment import Policy
from bfc_tools.study.segments import Pieces

RECORDINGS = sorted((Path(__file__).parents[1] / "recordings").glob("*.npz"))
CACHING = Policy("caching", bfc.CachingAllocator)
SPLIT = Policy(
    "caching:max_split_size_mb:21",
    functools.partial(bfc.CachingAllocator, settings="max_split_size_mb:21"),
)
GROWS = Policy("bfc", functools.partial(bfc.BFCAllocator, allow_growth=True))
MIB = 1 << 20


def device(capacity: int) -> Any:
    return lambda: CountedSimulated(capacity)


def served_live(trace: bfc.Trace, addresses: list[int]) -> list[int]:
    """The bytes that are live after each event, of what a run served."""
    live, total, sizes = [], 0, {}
    for event, (op, number) in enumerate(zip(trace.op.tolist(), trace.id.tolist(), strict=True)):
        if op == 0:
            sizes[number] = int(trace.size[event]) if addresses[event] else 0
            total += sizes[number]
        elif op == 1:
            total -= sizes[number]
        live.append(total)
    return live


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", [CACHING, SPLIT, GROWS], ids=lambda policy: policy.name)
def test_a_replay_has_the_figures_of_the_replay(seed: int, policy: Policy) -> None:
    print("seed", seed)
    trace = random_trace(seed, events=900)
    (run,) = data_of([("random", trace)], [policy], device(400 * MIB))["runs"]
    with policy.make_allocator(CountedSimulated(400 * MIB)) as allocator:
        result = trace.replay(allocator, samples=SAMPLES)
    addresses = result.addresses.tolist()
    live = served_live(trace, addresses)
    refused = [
        event
        for event, op in enumerate(trace.op.tolist())
        if op == 0 and trace.size[event] and not addresses[event]
    ]
    assert refused, "the device is too large for this test"
    assert run["refusals"] == len(refused) == result.failed
    assert run["first_refusal"] == refused[0]
    assert not run["completed"]
    assert (run["peak_live"], run["peak_event"]) == (max(live), live.index(max(live)))
    assert run["peak_reserved"] == result.peak_bytes_reserved
    assert run["device"] == "400.00 MiB"
    check_timeline(run["timeline"], trace, live, result)


def check_timeline(
    timeline: dict[str, Any], trace: bfc.Trace, live: list[int], result: bfc.Replay
) -> None:
    assert set(timeline["event"]) == set(range(len(trace)))
    assert timeline["time_us"] == [7 * event for event in timeline["event"]]
    assert timeline["live"] == [live[event] for event in timeline["event"]]
    for name in ("in_use", "reserved", "largest_free", "refused", "driver_calls"):
        assert timeline[name] == getattr(result.timeline, name).tolist()


def check_segments(run: dict[str, Any], lives: list[Life], owners: list[int]) -> None:
    """What lies in each segment, by looking at each block."""
    segments = run["segments"]
    rows = list(zip(segments["address"], segments["size"], strict=True))
    assert rows == sorted(rows)
    inside: dict[int, list[list[int]]] = {at: [] for at in range(len(rows))}
    for life, owner in zip(lives, owners, strict=True):
        address = run["addresses"][life.born]
        for at, (start, size) in enumerate(rows):
            if address and life.size and start <= address < start + size:
                assert address + life.size <= start + size
                inside[at].append([address, life.size, owner])
    assert segments["live"] == [sum(block[1] for block in found) for found in inside.values()]
    assert segments["blocks"] == [len(found) for found in inside.values()]
    for at, found in inside.items():
        largest = sorted(found, key=lambda block: -block[1])[:3]
        assert [row[1] for row in segments["largest"][at]] == [row[1] for row in largest]
        assert all(row in found for row in segments["largest"][at])
    placed = sum(1 for life in lives if run["addresses"][life.born])
    assert sum(segments["blocks"]) == placed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy", [CACHING, GROWS], ids=lambda policy: policy.name)
def test_segments_at_the_peak_equal_a_recount(seed: int, policy: Policy) -> None:
    print("seed", seed)
    trace, capacity = random_trace(seed), 4 << 30
    (run,) = data_of([("random", trace)], [policy], device(capacity))["runs"]
    counted = recount(trace)
    with policy.make_allocator(CountedSimulated(capacity)) as allocator:
        run["addresses"] = trace.replay(allocator).addresses.tolist()
    with policy.make_allocator(CountedSimulated(capacity)) as allocator:
        trace[: counted.peak + 1].replay(allocator)
        regions = allocator.snapshot().regions
    segments = run["segments"]
    for name, attribute in (("address", "ptr"), ("size", "size"), ("kind", "kind")):
        assert segments[name] == [getattr(region, attribute) for region in regions]
    assert segments["left_out"] == 0
    check_segments(run, counted.at_peak, [int(trace.owner[life.born]) for life in counted.at_peak])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("file", RECORDINGS, ids=lambda file: file.stem)
def test_a_recording_is_shown_as_it_was(file: Path) -> None:
    trace = bfc.Trace.load(file)
    torch = trace.meta["torch"]
    found = data_of([(file.stem, trace)], [CACHING])
    first, again = found["runs"]
    assert (first["origin"], again["origin"]) == ("recorded", "replayed")
    taken, after = {}, []
    events = list(torch["segment_events"])
    fresh = sum(event[0] == "segment_alloc" for event in events)
    for _, address, size in torch["segments"][: len(torch["segments"]) - fresh]:
        taken[address] = size
    peak, at_peak, counted = sum(taken.values()), {}, recount(trace)
    start = torch["first_recorded_event"] - 1
    looked_at = start + counted.live[start:].index(max(counted.live[start:]))
    for event in range(len(trace)):
        while events and events[0][1] <= event:
            action, _, address, size, _ = events.pop(0)
            assert action in ("segment_alloc", "segment_free")
            taken = {**taken, address: size} if action == "segment_alloc" else taken
            if action == "segment_free":
                del taken[address]
            peak = max(peak, sum(taken.values()))
        after.append(sum(taken.values()))
        if event == looked_at:
            at_peak = dict(taken)
    for event, live, reserved in zip(
        *(first["timeline"][name] for name in ("event", "live", "reserved")), strict=True
    ):
        assert live == counted.live[event]
        assert reserved >= after[event]
    assert first["peak_reserved"] == peak == max(first["timeline"]["reserved"])
    assert first["peak_live"] == max(counted.live)
    shown = dict(zip(first["segments"]["address"], first["segments"]["size"], strict=True))
    assert shown == dict(sorted(at_peak.items()))
    first["addresses"] = torch["addresses"]
    assert found["segments_event"] == looked_at
    there = [life for life in counted.lives if life.is_live_after(looked_at)]
    check_segments(first, there, [-1] * len(there))


@pytest.mark.parametrize("seed", range(3))
def test_the_map_equals_a_recount(seed: int) -> None:
    print("seed", seed)
    trace = random_trace(seed)
    (run,) = data_of([("random", trace)])["runs"]
    shown, addresses = run["map"], addresses_of(trace)
    columns, rows, cell = shown["columns"], shown["rows"], shown["row_bytes"]
    assert (columns, rows) == (len(trace), ROWS)
    assert shown["ends"] == list(range(1, columns + 1))
    laid = {}
    total = 0
    for start, size in shown["ranges"]:
        laid[start] = total
        total += size
    assert cell == -(-total // rows)
    use = np.zeros((rows, columns))
    streams: list[Counter[int]] = [Counter() for _ in range(rows)]
    for life in recount(trace).lives:
        address = addresses[life.born]
        if not address:
            continue
        start = next(at for at, size in shown["ranges"] if at <= address < at + size)
        begin = laid[start] + address - start
        stop = life.died if life.died >= 0 else columns
        for row in range(begin // cell, (begin + life.size - 1) // cell + 1):
            part = min((row + 1) * cell, begin + life.size) - max(row * cell, begin)
            use[row, life.born : stop] += part / cell
            streams[row][int(trace.stream[life.born])] += 1
    fill = np.array(unpacked(shown["fill"])).reshape(rows, columns)
    assert ((fill > 0) == (use > 0)).all()
    assert np.abs(fill / 256 - use).max() <= 8 / 256
    for row, found in zip(shown["row_stream"], streams, strict=True):
        assert found[row] == max(found.values()) if found else row == -1


@pytest.mark.parametrize("seed", range(3))
def test_a_cell_has_the_colour_of_what_it_holds_most_of(seed: int) -> None:
    print("seed", seed)
    trace = random_trace(seed)
    found = data_of([("random", trace)])
    shown, addresses = found["runs"][0]["map"], addresses_of(trace)
    columns, cell = shown["columns"], shown["row_bytes"]
    colours = found["painted"]["owner"]
    area = np.zeros((9, ROWS, columns))
    for life in recount(trace).lives:
        address, owner = addresses[life.born], int(trace.owner[life.born])
        if not address or not life.size:
            continue
        below = 0
        for start, size in shown["ranges"]:
            if start <= address < start + size:
                break
            below += size
        begin, stop = below + address - start, life.died if life.died >= 0 else columns
        at = colours.index(owner) if owner in colours else 8
        for row in range(begin // cell, (begin + life.size - 1) // cell + 1):
            part = min((row + 1) * cell, begin + life.size) - max(row * cell, begin)
            area[at, row, life.born : stop] += part / cell
    painted = np.array(unpacked(shown["paint"]["owner"])).reshape(ROWS, columns)
    assert ((painted > 0) == (area.max(0) > 1e-6)).all()
    there = painted > 0
    of_it = np.take_along_axis(area, np.maximum(painted - 1, 0)[None].astype(int), 0)[0]
    assert (of_it[there] >= area.max(0)[there] - 1e-4).all()
    assert set(shown["paint"]) == {"owner", "line", "kind"}


def test_a_run_with_a_plan_says_how_it_was_followed() -> None:
    """In the last step a block has another size."""
    sizes = [(9, 11, 30), (9, 11, 30), (9, 11, 30), (9, 14, 30)]
    marks = [[6 * i, "train"] for i in range(4)]
    trace = bfc.Trace(
        [0, 1] * 12,
        [number for number in range(12) for _ in range(2)],
        [n << 20 for step in sizes for size in step for n in (size, 0)],
        meta={"marks": marks},
    )
    plan = bfc.Plan.from_trace(trace)
    served = functools.partial(bfc.CachingAllocator, plan=plan)
    alone, planned = data_of(
        [("run", trace)], [CACHING, Policy("caching:plan=plan.npz", served)], device(400 * MIB)
    )["runs"]
    assert alone["remarks"] == []
    [remark] = planned["remarks"]
    assert remark == (
        "its plan takes 30.00 MiB; of 12 requests 11 had a place in it, 1 were put into its gaps, "
        "and 0 were served beside it; 1 of 4 steps did not follow it, the first of them train 4, "
        "with its request 1 of 14.00 MiB where 11.00 MiB were planned"
    )
    assert planned["peak_reserved"] == 30 * MIB < alone["peak_reserved"]


def test_limits_hold() -> None:
    trace = random_trace(1, events=30_000)
    runs = data_of([("long", trace)], [CACHING] * 4, device(8 << 30))["runs"]
    assert sum(len(run["timeline"]["event"]) for run in runs) <= 8_000
    (run,) = data_of([("long", trace)])["runs"]
    assert 1_000 < len(run["timeline"]["event"]) <= SAMPLES
    assert (run["map"]["columns"], run["map"]["rows"]) == (COLUMNS, ROWS)
    assert run["map"]["fill"]["count"] == COLUMNS * ROWS


def test_segments_without_room_are_said() -> None:
    count = MOST_SEGMENTS + 5
    trace = bfc.Trace([0] * count, range(count), [(20 + at % 2) << 20 for at in range(count)])
    (run,) = data_of([("many", trace)])["runs"]
    assert len(run["segments"]["address"]) == MOST_SEGMENTS
    assert run["segments"]["left_out"] == 5
    assert run["segments"]["left_out_bytes"] == 5 * (20 << 20)


def test_runs_of_several_traces_say_whose_they_are() -> None:
    one, two = random_trace(1), random_trace(2)
    found = data_of([("one", one), ("two", two)], [CACHING, GROWS])
    assert [run["label"] for run in found["runs"]] == [
        "one: caching", "one: bfc", "two: caching", "two: bfc",
    ]  # fmt: skip
    assert [run["trace"] for run in found["runs"]] == ["one", "one", "two", "two"]
    assert found["peak_live"] == max(recount(one).live)
    assert found["title"] == "one, two"


def damaged(meta: Any) -> bfc.Trace:
    return bfc.Trace([0, 1], [0, 0], [512, 0], meta=meta)


@pytest.mark.parametrize(
    "torch",
    [
        {"segments": [[0, 4096, 1024]], "segment_events": [], "addresses": [4096]},
        {"segments": [[0, 4096, 1024]], "segment_events": [], "addresses": ["x", 0]},
        {"segments": [[0, 4096, 1024]], "segment_events": [], "addresses": [-1, 0]},
        {"segments": [[0, 4096, 1024]], "segment_events": []},
        {"segments": [[0, 4096, 1024], 7], "segment_events": [], "addresses": [4096, 0]},
        {"segments": [[0, "x", 1024]], "segment_events": [], "addresses": [4096, 0]},
        {
            "segments": [[0, 4096, 1024]],
            "segment_events": [["segment_alloc", 1, 4096, 1024, 0], ["segment_free", 0, 1, 1, 0]],
            "addresses": [4096, 0],
        },
        {
            "segments": [[0, 4096, 1024]],
            "segment_events": [],
            "addresses": [4096, 0],
            "streams": 5,
        },
        {"segments": [[0, 4096, 1024]], "segment_events": [], "addresses": [4096, 0], "oom": [1]},
        {"segments": [[0, 4096, 1024]], "segment_events": [], "addresses": [(1 << 64) - 1, 0]},
        {"segments": [[0, -4096, 1024]], "segment_events": [], "addresses": [4096, 0]},
        {"segments": [[0, 4096, 1 << 70]], "segment_events": [], "addresses": [4096, 0]},
        {"segments": [[0, 4096, 1024]], "segment_events": [], "addresses": [4096, 0], "pools": [1]},
        {
            "segments": [[0, 4096, 1024]],
            "segment_events": [["segment_map", 0, 1 << 64, 1, 0]],
            "addresses": [4096, 0],
        },
    ],
)
def test_a_meta_that_makes_no_sense_is_no_recording(torch: Any) -> None:
    (run,) = data_of([("odd", damaged({"torch": torch}))])["runs"]
    assert run["origin"] == "replayed"
    assert run["peak_reserved"] == 2 * MIB


def test_pieces_are_cut_and_joined() -> None:
    pieces = Pieces()
    pieces.add(100, 50, 1, joined=True)
    pieces.add(150, 50, 1, joined=True)
    pieces.add(200, 50, 2, joined=True)
    pieces.add(300, 10, 1)
    assert list(zip(pieces.starts, pieces.ends, strict=True)) == [
        (100, 200),
        (200, 250),
        (300, 310),
    ]
    pieces.remove(120, 100)
    assert list(zip(pieces.starts, pieces.ends, pieces.streams, strict=True)) == [
        (100, 120, 1), (220, 250, 2), (300, 310, 1),
    ]  # fmt: skip
    pieces.add(120, 100, 2, joined=True)  # what goes on behind it is the same memory
    pieces.add(250, 50, 2, joined=False)
    assert list(zip(pieces.starts, pieces.ends, strict=True)) == [
        (100, 120), (120, 250), (250, 300), (300, 310),
    ]  # fmt: skip
    pieces.remove(0, 1000)
    assert pieces.starts == []
