"""The file for Perfetto: read by Perfetto's own trace processor, and compared with the trace."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from perfetto_engine import TraceProcessor

import bfc
from bfc_tools.browser import perfetto
from bfc_tools.browser.data import data_of
from bfc_tools.browser.perfetto import COUNTERS, write_perfetto
from bfc_tools.cli import main
from bfc_tools.study.experiment import Policy

TRACES = Path(__file__).parents[2] / "bench" / "traces"
HOSTILE = '<script>alert(1)</script>\x1b[2J"\\ \ud800 \u2028'
COUNTER_ROWS = """
    select process.name, track.name, ts, value from counter
    join process_counter_track track on counter.track_id = track.id
    join process using (upid) order by counter.id"""
LIFE = """
    select process.name, slice.name, ts, dur, slice.arg_set_id from slice
    join process_track track on slice.track_id = track.id
    join process using (upid) where category = 'allocation' order by ts, slice.id"""


def written(path: Path, *traces: tuple[str, bfc.Trace], **options) -> dict:
    """The data of a report of some traces, whose runs are written."""
    data = data_of(traces, **options)
    write_perfetto(traces, data["runs"], path)
    return data


def arguments(processor: TraceProcessor, number: int) -> dict[str, object]:
    rows = processor.query(
        f"select key, coalesce(int_value, string_value) from args where arg_set_id = {number}"
    )
    return {key.removeprefix("args."): value for key, value in rows}


def a_trace() -> bfc.Trace:
    return bfc.Trace(
        op=[0, 0, 2, 1, 0, 1],
        id=[0, 1, 0, 0, 2, 1],
        size=[3 << 20, 5 << 20, 0, 0, 700, 0],
        stream=[0, 1, 0, 0, 0, 1],
        time_us=[1_700_000_000_000_000 + late for late in (0, 10, 12, 25, 24, 40)],
        owner=[1, 0, 0, 1, 2, 0],
        owners=["", "weights", HOSTILE],
        stack=[0, 2, 0, 0, 1, 0],
        frames=[("/home/me/train.py", 7, "main"), ("/home/me/model.py", 3, HOSTILE)],
        stacks=[(0, 0), (0, 0), (1, 1)],
    )


def test_the_trace_processor_reads_what_was_written(tmp_path):
    path = tmp_path / "run.json"
    policies = [
        Policy("caching", bfc.CachingAllocator),
        Policy("bfc", lambda source: bfc.BFCAllocator(source, allow_growth=True)),
    ]
    data = written(path, ("small", a_trace()), policies=policies)
    with TraceProcessor(path) as processor:
        assert processor.complaints() == []
        shown = processor.query(COUNTER_ROWS)
        lives = processor.query(LIFE)
        found = [arguments(processor, row[-1]) for row in lives]
    # Counters: every change of every figure of every run, in nanoseconds.
    times = [0, 10_000, 12_000, 25_000, 25_000, 40_000]
    for run in data["runs"]:
        for column, unit in COUNTERS.items():
            values = run["timeline"].get(column, [])  # what sleeps has none where nothing does
            mine = [
                (ts, value)
                for name, track, ts, value in shown
                if name == run["label"] and track == f"{column} {unit}"
            ]
            steps, last = [], None
            for event, value in zip(run["timeline"]["event"], values, strict=bool(values)):
                if value != last:
                    steps.append((times[event], value))
                last = value
            assert mine == steps
    # Slices: a clock that goes back does not, and what is never freed lasts beyond the last event.
    label = data["runs"][0]["label"]
    assert [row[:4] for row in lives] == [
        (label, "weights", 0, 25_000),
        (label, "/home/me/model.py:3 in " + clean(HOSTILE), 10_000, 30_000),
        (label, clean(HOSTILE), 25_000, 16_000),
    ]
    assert found[0] == {
        "bytes": 3 << 20,
        "stream": 0,
        "owner": "weights",
        "line": "",
        "allocated_at_event": 0,
        "freed_at_event": 3,
    }
    assert found[1]["stack[0]"] == "/home/me/model.py:3 in " + clean(HOSTILE)
    assert found[1]["stack[1]"] == "/home/me/train.py:7 in main"
    assert found[2]["freed_at_event"] == "never"
    assert found[2]["owner"] == clean(HOSTILE)


def clean(text: str) -> str:
    """Half of a pair of UTF-16 is in no UTF-8."""
    return text.replace("\ud800", "?")


@pytest.mark.long
def test_what_is_left_out_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(perfetto, "MOST_SLICES", 4)
    sizes = [100, 500, 300, 500, 200, 400, 600]
    trace = bfc.Trace([0] * 7, range(7), sizes)
    path = tmp_path / "run.json"
    written(path, ("seven", trace))
    with TraceProcessor(path) as processor:
        (said,) = processor.query("select arg_set_id from slice where name = 'about this trace'")
        about = arguments(processor, said[0])
        kept = [arguments(processor, row[-1])["bytes"] for row in processor.query(LIFE)]
        assert processor.complaints() == []
    assert kept == [500, 500, 400, 600]
    assert about["allocations"] == 7
    assert about["allocations_shown"] == 4
    assert about["allocations_left_out"] == 3
    assert about["largest_left_out_bytes"] == 300
    assert about["time"] == "the trace has no times: an event takes a microsecond here"
    (fact,) = json.loads(path.read_text())["otherData"]["traces"]
    assert fact == about


@pytest.mark.long
def test_a_long_recorded_run(tmp_path):
    trace = bfc.Trace.load(TRACES / "unet_buckets.npz")
    path = tmp_path / "run.json"
    data = written(path, ("unet", trace))
    assert path.stat().st_size < 20e6
    with TraceProcessor(path) as processor:
        assert processor.complaints() == []
        tops = dict(
            processor.query(
                "select track.name, max(value) from counter "
                "join counter_track track on counter.track_id = track.id group by 1"
            )
        )
        count, shortest = processor.query(
            "select count(*), min(dur) from slice where category = 'allocation'"
        )[0]
        peak = processor.query("select ts from slice where name = 'peak'")
        (byte_count,) = processor.query(
            "select sum(int_value) from args join slice using (arg_set_id) "
            "where category = 'allocation' and key = 'args.bytes'"
        )[0]
    run = data["runs"][0]
    assert tops["live bytes"] == run["peak_live"]
    assert tops["reserved bytes"] == run["peak_reserved"]
    assert (count, shortest >= 0) == (perfetto.MOST_SLICES, True)
    assert peak == [(run["peak_event"] * 1000,)]
    sizes = sorted((int(size) for op, size in zip(trace.op, trace.size, strict=True) if op == 0))
    assert byte_count == sum(sizes[-perfetto.MOST_SLICES :])


@pytest.mark.long
def test_several_traces_are_processes_of_their_own(tmp_path):
    path = tmp_path / "runs.json"
    pair = [(name, bfc.Trace([0] * 3, range(3), [size] * 3)) for name, size in (("a", 8), ("b", 9))]
    data = written(path, *pair)
    with TraceProcessor(path) as processor:
        lives = processor.query(LIFE)
    assert Counter(row[0] for row in lives) == {run["label"]: 3 for run in data["runs"]}


def test_a_recording_of_pytorch_has_its_own_times(tmp_path):
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    allocator.record_history()
    with bfc.owner("weights"):
        allocator.allocate_raw(3 << 20)
    allocator.snapshot().dump(tmp_path / "run.pickle")
    trace = bfc.Trace.from_torch(tmp_path / "run.pickle")
    path = tmp_path / "run.json"
    written(path, ("recorded", trace))
    with TraceProcessor(path) as processor:
        assert processor.complaints() == []
        ((_, name, _, _, number),) = processor.query(LIFE)
        found = arguments(processor, number)
    assert name == "weights"
    assert found["line"].startswith(f"{__file__}:")
    (fact,) = json.loads(path.read_text())["otherData"]["traces"]
    assert fact["start_us"] == int(trace.time_us[0]) > 1_000_000_000_000_000


def test_an_empty_trace_is_written(tmp_path):
    written(tmp_path / "run.json", ("nothing", bfc.Trace([], [], [])))
    assert json.loads((tmp_path / "run.json").read_text())["otherData"]["made_by"] == "bfc"


def test_a_moment_has_no_timeline(tmp_path):
    with pytest.raises(ValueError, match="has no timeline"):
        write_perfetto([], [], tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_left_alone(tmp_path):
    with pytest.raises(OSError, match="missing"):
        written(tmp_path / "missing" / "run.json", ("a", a_trace()))


@pytest.mark.long
def test_a_deep_stack_is_cut(tmp_path):
    deep = 100_000
    frames = [(f"/home/me/f{at}.py", at + 1, "call") for at in range(50)]
    stacks = [(0, 0), *((at, at % 50) for at in range(deep))]
    count = 500
    trace = bfc.Trace(
        [0] * count,
        range(count),
        [512] * count,
        stack=[deep - at for at in range(count)],
        frames=frames,
        stacks=stacks,
    )
    path = tmp_path / "run.json"
    written(path, ("deep", trace))
    events = json.loads(path.read_text())["traceEvents"]
    found = [event["args"]["stack"] for event in events if event["ph"] == "b"]
    assert len(found) == count
    assert found[0][0] == "/home/me/f49.py:50 in call"
    assert {len(stack) for stack in found} == {perfetto.MOST_FRAMES + 1}
    assert {stack[-1] for stack in found} == {"and more"}


def test_the_command_writes_it_beside_the_page(tmp_path, capsys):
    run, page, out = (tmp_path / name for name in ("run.npz", "page.html", "run.json"))
    a_trace().save(run)
    command = ["report", str(run), "-o", str(page), "--perfetto", str(out)]
    assert main([*command, "--policy", "caching", "--policy", "bfc"]) == 0
    with TraceProcessor(out) as processor:
        assert processor.complaints() == []
        names = {name for (name,) in processor.query("select name from process where pid > 0")}
        assert len(processor.query(LIFE)) == 3
    assert {name.split(":")[0] for name in names} == {"caching", "bfc"}
    assert page.stat().st_size > 100_000
