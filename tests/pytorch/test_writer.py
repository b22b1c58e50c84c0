"""Snapshots in PyTorch's form: the dict, its pickle, and what the viewers need of both."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import pickletools
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch_recorder
from hypothesis import given, settings
from hypothesis import strategies as st

import bfc
from bfc.files import replacing
from bfc.pytorch.settings import CachingSettings
from bfc.pytorch.stripped import strip
from bfc.snapshots.snapshot import ChunkInfo, Frame, HistoryEntry, RegionInfo, Snapshot, Stats

MIB = 1 << 20
BASE = 1 << 40
PLAIN = (bool, int, float, str, list, tuple, dict, type(None))
#: What the unpickler of the web page knows.
KNOWN_TO_THE_PAGE = {
    "APPEND APPENDS BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE DICT EMPTY_DICT",
    "EMPTY_LIST EMPTY_TUPLE FRAME LIST LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE",
    "NEWTRUE NONE PROTO SETITEM SETITEMS SHORT_BINUNICODE STOP TUPLE TUPLE1 TUPLE2 TUPLE3",
}
SEGMENT_FIELDS = {
    "device": int,
    "address": int,
    "total_size": int,
    "allocated_size": int,
    "active_size": int,
    "requested_size": int,
    "stream": int,
    "segment_type": str,
    "segment_pool_id": tuple,
    "is_expandable": bool,
    "frames": list,
    "blocks": list,
}
BLOCK_FIELDS = {"address": int, "size": int, "requested_size": int, "state": str, "frames": list}
ENTRY_FIELDS = {
    "action": str,
    "size": int,
    "stream": int,
    "time_us": int,
    "compile_context": str,
    "user_metadata": str,
    "pool_id": tuple,
    "frames": list,
}
FRAMES = (Frame("train.py", 12, "step"), Frame("train.py", 40, "<module>"))


def chunk(ptr: int, size: int, requested: int = 0, state: str = "in use", **rest) -> ChunkInfo:
    return ChunkInfo(BASE + ptr, size, requested, 1, state, **rest)


def snapshot(*regions: RegionInfo, history=(), device: str = "simulated:0", **rest) -> Snapshot:
    return Snapshot(device, Stats(), regions, history=tuple(history), **rest)


def a_region() -> RegionInfo:
    chunks = (
        chunk(0, 1024, 1000, frames=FRAMES),
        chunk(1024, 512, 0, "free", last_requested_size=77),
        chunk(1536, 512, 300, "waiting"),
    )
    return RegionInfo(BASE, 2048, chunks, stream=7, kind="small", pool_id=(0, 3), frames=FRAMES)


def entry(action: str, addr: int, size: int = 512, time_us: int = 1, **rest) -> HistoryEntry:
    return HistoryEntry(action, BASE + addr, size, 7, time_us, **rest)


def assert_plain(value: Any) -> None:
    """Of the built-in types themselves, no subclass, all the way down."""
    assert type(value) in PLAIN
    if isinstance(value, dict):
        assert all(type(key) is str for key in value)
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            assert_plain(item)


def test_every_field_of_a_segment_is_there():
    content = snapshot(a_region()).to_torch()
    assert set(content) == {
        "segments",
        "device_traces",
        "allocator_settings",
        "external_annotations",
        "host_segments",
        "host_traces",
    }
    assert_plain(content)
    (segment,) = content["segments"]
    assert {name: type(value) for name, value in segment.items()} == SEGMENT_FIELDS
    frames = [
        {"filename": "train.py", "line": 12, "name": "step"},
        {"filename": "train.py", "line": 40, "name": "<module>"},
    ]
    blocks = segment.pop("blocks")
    assert segment == {
        "device": 0,
        "address": BASE,
        "total_size": 2048,
        "allocated_size": 1024,
        "active_size": 1536,
        "requested_size": 1300,
        "stream": 7,
        "segment_type": "small",
        "segment_pool_id": (0, 3),
        "is_expandable": False,
        "frames": frames,
    }
    assert [{name: type(value) for name, value in block.items()} for block in blocks] == [
        BLOCK_FIELDS
    ] * 3
    assert [(b["address"] - BASE, b["size"], b["requested_size"], b["state"]) for b in blocks] == [
        (0, 1024, 1000, "active_allocated"),
        (1024, 512, 77, "inactive"),
        (1536, 512, 300, "active_pending_free"),
    ]
    assert [block["frames"] for block in blocks] == [frames, [], []]


def test_every_field_of_an_entry_is_there():
    history = [
        entry("free_completed", 0, 900, pool_id=(0, 3)),
        entry("alloc", 0, 1000, frames=FRAMES),
        HistoryEntry("oom", 12345, 1 << 30, 0, 9),
        HistoryEntry("snapshot", 0, 1536, 0, 10),
    ]
    entries = snapshot(a_region(), history=history).to_torch()["device_traces"][0]
    assert_plain(entries)
    for made, where in zip(entries, ["addr", "addr", "device_free", "addr"], strict=True):
        assert {name: type(value) for name, value in made.items()} == {where: int, **ENTRY_FIELDS}
    assert [(e["action"], e["size"]) for e in entries] == [
        ("free_completed", 900),
        ("alloc", 1000),
        ("oom", 1 << 30),
        ("snapshot", 1536),
    ]
    assert entries[2]["device_free"] == 12345
    assert entries[0]["pool_id"] == (0, 3)
    assert entries[1]["frames"] == [frame._asdict() for frame in FRAMES]


def test_a_clock_that_is_set_back_stands_still():
    history = [entry("snapshot", 0, 1, time_us) for time_us in (5, 3, 9, 9, 1)]
    entries = snapshot(history=history).to_torch()["device_traces"][0]
    assert [made["time_us"] for made in entries] == [5, 5, 9, 9, 9]


@pytest.mark.parametrize(
    ("device", "number"),
    [("cuda:0", 0), ("cuda:3", 3), ("host", 0), ("opencl:GPU:2", 2), ("x:99999999999", 0)],
)
def test_the_device_is_the_place_in_the_traces(device: str, number: int):
    history = [entry("snapshot", 0)]
    content = snapshot(a_region(), history=history, device=device).to_torch()
    assert [len(trace) for trace in content["device_traces"]] == [0] * number + [1]
    assert content["segments"][0]["device"] == number


def test_settings_are_the_policys_own_or_pytorchs_default_ones():
    assert snapshot().to_torch()["allocator_settings"] == CachingSettings().as_torch()
    chosen = CachingSettings().apply("max_split_size_mb:40")
    made = snapshot(settings=chosen).to_torch()["allocator_settings"]
    assert made == chosen.as_torch()
    assert made["max_split_size"] == 40 * MIB
    assert_plain(made)


def test_numbers_and_texts_of_other_types_become_plain():
    class Text(str):
        pass

    class Number(int):
        pass

    frames = (Frame(Text("a.py"), Number(3), Text("f")),)
    region = RegionInfo(Number(BASE), 512, (chunk(0, 512, Number(5), frames=frames),), Number(2))
    history = [HistoryEntry(Text("alloc"), Number(BASE), 5, Number(2), True, frames=frames)]
    assert_plain(snapshot(region, history=history).to_torch())


def test_equal_frames_are_one_list():
    history = [entry("snapshot", 0, frames=tuple(Frame(*frame) for frame in FRAMES))] * 100
    entries = snapshot(a_region(), history=history).to_torch()["device_traces"][0]
    assert len({id(made["frames"]) for made in entries}) == 1


def test_a_snapshot_of_tensorflows_policy_is_exported_too(make_allocator):
    allocator = make_allocator("8 MiB")
    addresses = [allocator.allocate_raw(1000 * (number + 1)) for number in range(5)]
    allocator.deallocate_raw(addresses[2])
    content = allocator.snapshot().to_torch()
    assert_plain(content)
    (segment,) = content["segments"]
    assert (segment["segment_type"], segment["segment_pool_id"]) == ("large", (0, 0))
    assert sum(block["size"] for block in segment["blocks"]) == segment["total_size"]
    live = {
        b["address"]: b["requested_size"] for b in segment["blocks"] if b["state"] != "inactive"
    }
    assert live == {a: 1000 * (n + 1) for n, a in enumerate(addresses) if n != 2}
    for address in addresses[:2] + addresses[3:]:
        allocator.deallocate_raw(address)


# The file ------------------------------------------------------------------------------------


def test_the_pickle_is_what_the_pages_reader_knows(tmp_path: Path):
    frames = tuple(Frame("ö" * 300 + f"{n}.py", 1 << 20, "f" * n) for n in range(1500))
    history = [entry("alloc", 0, frames=frames), *[entry("snapshot", 0)] * 2500]
    taken = snapshot(a_region(), history=history, device="cuda:2")
    taken.dump(tmp_path / "memory.pickle")
    content = (tmp_path / "memory.pickle").read_bytes()
    assert_readable_by_the_page(content)
    assert pickle.loads(content) == taken.to_torch()


def assert_readable_by_the_page(content: bytes) -> None:
    known = set(" ".join(KNOWN_TO_THE_PAGE).split())
    assert content[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04")
    for operation, argument, _ in pickletools.genops(content):
        assert operation.name in known
        if operation.name == "LONG1":
            assert -(1 << 63) <= argument < 1 << 63


def test_a_dump_replaces_the_file_or_leaves_it(tmp_path: Path, monkeypatch):
    path = tmp_path / "memory.pickle"
    path.write_text("before")
    with pytest.raises(KeyError):
        snapshot(RegionInfo(BASE, 512, (chunk(0, 512, state="nowhere"),))).dump(path)
    assert path.read_text() == "before"

    @contextlib.contextmanager
    def full(path):
        with replacing(path) as file:
            file.write(b"half")
            raise OSError(28, "no space left")
            yield

    monkeypatch.setattr("bfc.snapshots.snapshot.replacing", full)
    with pytest.raises(OSError, match="no space"):
        snapshot(a_region()).dump(path)
    assert (path.read_text(), os.listdir(tmp_path)) == ("before", ["memory.pickle"])
    monkeypatch.undo()
    snapshot(a_region()).dump(str(path))
    assert (
        pickle.loads(path.read_bytes())["segments"][0]["address"],
        len(os.listdir(tmp_path)),
    ) == (
        BASE,
        1,
    )
    with pytest.raises(FileNotFoundError):
        snapshot().dump(tmp_path / "nowhere" / "memory.pickle")


# What the page can run backwards -------------------------------------------------------------


def run_backwards(content: dict[str, Any]) -> None:
    """What the page does when its user steps back through the history; an assertion stands where
    it would meet a null."""
    segments = {s["address"]: s["address"] + s["total_size"] for s in content["segments"]}
    streams = {s["address"]: s["stream"] for s in content["segments"]}
    blocks = {
        block["address"]: block["state"]
        for segment in content["segments"]
        for block in segment["blocks"]
        if block["state"] != "inactive"
    }

    def draw() -> None:
        for address in blocks:
            assert any(start <= address < end for start, end in segments.items())

    draw()
    for step in reversed(content["device_traces"][-1]):
        action, address = step["action"], step.get("addr")
        if action == "alloc":
            blocks.pop(address, None)
        elif action == "free_requested":
            assert address in blocks
        elif action == "free_completed":
            assert address not in blocks
            blocks[address] = "active_pending_free"
        elif action == "segment_alloc":
            assert segments.pop(address) == address + step["size"]
        elif action == "segment_map":
            unmap(segments, streams, address, address + step["size"])
        elif action in ("segment_free", "segment_unmap"):
            assert all(
                end <= address or start >= address + step["size"] for start, end in segments.items()
            )
            segments[address] = address + step["size"]
            streams[address] = step["stream"]
            if action == "segment_unmap":
                join(segments, streams, address)
        draw()


def unmap(segments: dict[int, int], streams: dict[int, int], start: int, end: int) -> None:
    """Takes a part of a segment away, which has to lie in one."""
    (around,) = (at for at, last in segments.items() if at <= start and end <= last)
    last = segments.pop(around)
    if around < start:
        segments[around] = start
    if end < last:
        segments[end], streams[end] = last, streams[around]


def join(segments: dict[int, int], streams: dict[int, int], address: int) -> None:
    """Joins a segment to those of its stream that lie next to it."""
    end = segments[address]
    if end in segments and streams[end] == streams[address]:
        segments[address] = segments.pop(end)
    for before, its_end in segments.items():
        if its_end == address and streams[before] == streams[address]:
            segments[before] = segments.pop(address)
            break


def as_snapshot(content: dict[str, Any]) -> Snapshot:
    """A snapshot of ours from PyTorch's dict."""
    states = {"active_allocated": "in use", "active_pending_free": "waiting", "inactive": "free"}
    regions = tuple(
        RegionInfo(
            segment["address"],
            segment["total_size"],
            tuple(
                ChunkInfo(
                    block["address"],
                    block["size"],
                    0 if block["state"] == "inactive" else block["requested_size"],
                    1,
                    states[block["state"]],
                    last_requested_size=block["requested_size"],
                )
                for block in segment["blocks"]
            ),
            segment["stream"],
            segment["segment_type"],
            segment["segment_pool_id"],
        )
        for segment in content["segments"]
    )
    history = tuple(
        HistoryEntry(e["action"], e["addr"], e["size"], e["stream"], e["time_us"])
        for e in content["device_traces"][0]
    )
    return Snapshot("simulated:0", Stats(), regions, history)


def a_run(seed: int, steps: int = 120) -> torch_recorder.Recorder:
    dice = random.Random(seed)
    recorder = torch_recorder.Recorder(torch_recorder.random_places(dice))
    torch_recorder.random_run(dice, recorder, steps)
    return recorder


@given(st.integers(0, 1 << 30), st.data())
def test_a_history_of_any_length_is_exported_whole(seed: int, data: st.DataObject):
    recorder = a_run(seed)
    last = data.draw(st.integers(0, len(recorder.trace)))
    content = recorder.snapshot(last)
    made = as_snapshot(content).to_torch()
    assert [e["action"] for e in made["device_traces"][0]] == [
        e["action"] for e in content["device_traces"][0]
    ]
    assert made["segments"] == content["segments"]
    run_backwards(made)


@given(st.integers(0, 1 << 30), st.data())
def test_a_history_with_holes_is_cut_to_what_the_page_can_follow(seed: int, data: st.DataObject):
    """As with `skip_actions`, with a pool's own segments, or with entries that are lost."""
    recorder = a_run(seed)
    taken = as_snapshot(recorder.snapshot())
    gone = data.draw(st.sets(st.sampled_from(sorted({e["action"] for e in recorder.trace}))))
    lost = data.draw(st.sets(st.integers(0, len(recorder.trace) - 1), max_size=3))
    history = tuple(
        e for n, e in enumerate(taken.history) if e.action not in gone and n not in lost
    )
    regions = tuple(r for r in taken.regions if data.draw(st.integers(0, 5)))
    run_backwards(dataclasses.replace(taken, history=history, regions=regions).to_torch())


def test_entries_of_memory_that_is_not_shown_are_left_out():
    elsewhere = [entry("segment_alloc", 9 * MIB), entry("alloc", 9 * MIB), entry("snapshot", 0)]
    inside = [entry("free_completed", 0, 900), entry("alloc", 0, 1000)]
    made = snapshot(a_region(), history=[*elsewhere, *inside]).to_torch()["device_traces"][0]
    assert [e["action"] for e in made] == ["snapshot", "free_completed", "alloc"]


def test_what_comes_before_a_contradiction_is_left_out():
    double = [entry("alloc", 0), entry("free_completed", 0, 512), entry("free_requested", 0)]
    made = snapshot(a_region(), history=double).to_torch()["device_traces"][0]
    assert [e["action"] for e in made] == ["free_requested"]


def an_expandable_run(
    seed: int, steps: int = 200, max_entries: int = 1 << 20, **options: Any
) -> bfc.CachingAllocator:
    """A run of ours that maps and unmaps; the option is turned off now and then."""
    dice = random.Random(seed)
    source = bfc.SimulatedSubAllocator("400 MiB")
    made = bfc.CachingAllocator(source, settings="expandable_segments:True")
    made.record_history(max_entries=max_entries, **options)
    live = []
    for _ in range(steps):
        choice = dice.random()
        if choice < 0.05:
            made.release_free_regions()
        elif choice < 0.07:
            made.set_settings(f"expandable_segments:{dice.random() < 0.6}")
        elif live and choice < 0.5:
            made.deallocate_raw(live.pop(dice.randrange(len(live))))
        else:
            size = torch_recorder.random_size(dice)
            with contextlib.suppress(bfc.OutOfMemoryError):
                live.append(made.allocate_raw(size, stream=2 * dice.randrange(2)))
    return made


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("max_entries", [1 << 20, 40])
def test_a_run_that_maps_is_exported_whole(seed: int, max_entries: int):
    with an_expandable_run(seed, max_entries=max_entries) as allocator:
        snapshot = allocator.snapshot()
        made = snapshot.to_torch()
    assert len(made["device_traces"][0]) == len(snapshot.history)
    actions = {entry["action"] for entry in made["device_traces"][0]}
    assert max_entries == 40 or actions >= {"segment_map", "segment_unmap"}
    run_backwards(made)


@given(st.integers(0, 1 << 30), st.data())
@settings(max_examples=40, deadline=None)
def test_a_run_that_maps_is_cut_to_what_the_page_can_follow(seed: int, data: st.DataObject):
    with an_expandable_run(seed, 120) as allocator:
        taken = allocator.snapshot()
    gone = data.draw(st.sets(st.sampled_from(sorted({e.action for e in taken.history}))))
    lost = data.draw(st.sets(st.integers(0, len(taken.history) - 1), max_size=3))
    history = tuple(
        e for n, e in enumerate(taken.history) if e.action not in gone and n not in lost
    )
    regions = tuple(r for r in taken.regions if data.draw(st.integers(0, 5)))
    run_backwards(dataclasses.replace(taken, history=history, regions=regions).to_torch())


# Upstream's own viewer -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def viewer() -> ModuleType:
    from bench.peers.torch_viz import load

    return load()


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(4))
def test_upstreams_viewer_takes_what_is_dumped(viewer, tmp_path: Path, seed: int):
    """Rows 82 and 83."""
    recorder = a_run(seed, 200)
    as_snapshot(recorder.snapshot(150)).dump(tmp_path / "memory.pickle")
    assert_viewable(viewer, (tmp_path / "memory.pickle").read_bytes())


@pytest.mark.peers
def test_upstreams_viewer_takes_what_is_anonymised(viewer, tmp_path: Path):
    as_snapshot(a_run(1, 200).snapshot(150)).dump(tmp_path / "memory.pickle")
    strip(tmp_path / "memory.pickle", tmp_path / "shared.pickle")
    assert_viewable(viewer, (tmp_path / "shared.pickle").read_bytes())


@pytest.mark.peers
def test_upstreams_viewer_takes_a_snapshot_with_views(viewer, tmp_path: Path):
    """It sees them as expandable segments."""
    device = bfc.SimulatedSubAllocator("64 MiB")
    with bfc.BFCAllocator(device, virtual_memory=True) as allocator:
        addresses = [allocator.allocate_raw(5 * MIB) for _ in range(12)]
        for address in addresses[::2]:
            allocator.deallocate_raw(address)
        allocator.allocate_raw(20 * MIB)
        snapshot = allocator.snapshot()
    assert sum(region.is_view for region in snapshot.regions) == 1
    snapshot.dump(tmp_path / "memory.pickle")
    assert_viewable(viewer, (tmp_path / "memory.pickle").read_bytes())


def assert_viewable(viewer: ModuleType, content: bytes) -> None:
    assert_readable_by_the_page(content)
    data = pickle.loads(content)
    run_backwards(data)
    assert f"segments: {len(data['segments'])}\n" in viewer.segsum(data)
    recorded = data["device_traces"][-1]
    assert (f"{len(recorded)} entries" if recorded else "") in viewer.trace(data)
    for draw in (viewer.segments, viewer.memory):
        lines = draw(data, format_flamegraph=lambda lines: lines)
        total = sum(int(line.rpartition(" ")[2]) for line in lines.splitlines())
        assert total >= sum(s["requested_size"] for s in data["segments"])
    compared = viewer.compare(data["segments"][:-1], data["segments"], lambda lines: lines)
    assert compared.startswith("only_after;")
    for options in ({}, {"plot_segments": True}, {"filter_freed": True}):
        assert "MemoryViz.js" in viewer.trace_plot(pickle.loads(content), **options)
    assert "Allocator State History" in viewer.segment_plot(data)


@pytest.mark.peers
@pytest.mark.parametrize("seed", range(4))
def test_upstreams_viewer_takes_a_run_that_maps(viewer, tmp_path: Path, seed: int):
    with an_expandable_run(seed) as allocator:
        allocator.dump(tmp_path / "memory.pickle")
    assert_viewable(viewer, (tmp_path / "memory.pickle").read_bytes())


@pytest.mark.peers
@pytest.mark.parametrize("torch", ["2.11", "2.15"])
def test_upstreams_viewer_takes_a_captured_program(viewer, tmp_path: Path, torch: str):
    """Also its marks: where captures begin and end, and where a pool is let go."""
    with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), torch=torch) as allocator:
        allocator.record_history()
        for _ in range(3):
            with allocator.capture(2) as graph:
                inside = allocator.allocate_raw(3 * MIB, stream=2)
            allocator.deallocate_raw(inside)
            allocator.allocate_raw(MIB, stream=2)
            graph.release()
        allocator.empty_cache()
        allocator.dump(tmp_path / "memory.pickle")
    content = (tmp_path / "memory.pickle").read_bytes()
    assert sum(it["action"] == "annotate" for it in pickle.loads(content)["device_traces"][0]) == 9
    assert_viewable(viewer, content)


@pytest.mark.peers
def test_upstreams_viewer_takes_a_recorded_run_of_ours(viewer, tmp_path: Path):
    caching = getattr(bfc, "CachingAllocator", None)
    if caching is None:
        pytest.skip("PyTorch's policy is not built in")
    dice = random.Random(5)
    allocator = caching(bfc.SimulatedSubAllocator("2 GiB"))
    allocator.record_history(context="all", max_entries=300)
    live = []
    for _ in range(400):
        if live and dice.random() < 0.5:
            allocator.deallocate_raw(live.pop(dice.randrange(len(live))))
        else:
            live.append(allocator.allocate_raw(torch_recorder.random_size(dice)))
    allocator.snapshot().dump(tmp_path / "memory.pickle")
    content = (tmp_path / "memory.pickle").read_bytes()
    assert_viewable(viewer, content)
    data = pickle.loads(content)
    assert len(data["device_traces"][0]) == 300
    assert any(e["frames"] for e in data["device_traces"][0])
    for address in live:
        allocator.deallocate_raw(address)
    allocator.close()
