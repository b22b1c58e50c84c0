"""Traces from PyTorch's memory snapshots: what is rebuilt, what is mended, and what is refused."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch_dumps import (
    BASE,
    HEAD,
    MIB,
    event,
    facts,
    free,
    read,
    recorded,
    recording,
    refused,
    segment,
)
from torch_recorder import Recorder, random_size, replayed

import bfc
import bfc.pytorch.conversion as conversion
import bfc.pytorch.plain_pickle as plain_pickle
import bfc.pytorch.reader as torch_pickle
from bfc.pytorch.settings import CachingSettings
from bfc.testing import Misbehaving

NOTHING = {"segments": [], "device_traces": [[]]}


def history(trace: bfc.Trace) -> list[tuple[int, int, int]]:
    """(op, address, size) of each event of the recording itself."""
    first = facts(trace)["first_recorded_event"]
    addresses = facts(trace)["addresses"]
    return [
        (int(trace.op[n]), addresses[n] and addresses[n] - BASE, int(trace.size[n]))
        for n in range(first, len(trace))
    ]


def live_at_the_end(trace: bfc.Trace) -> dict[int, int]:
    """Addresses and sizes, with overlaps refused."""
    addresses = facts(trace)["addresses"]
    live: dict[int, tuple[int, int]] = {}
    for number, (op, name) in enumerate(zip(trace.op.tolist(), trace.id.tolist(), strict=True)):
        if op == 1:
            del live[name]
        elif op == 0:
            live[name] = addresses[number], int(trace.size[number])
    assert len({address for address, _ in live.values()}) == len(live)
    return dict(live.values())


def live_in(content: dict[str, Any]) -> dict[int, int]:
    found = {}
    for one in content["segments"]:
        at = one["address"]
        for block in one["blocks"]:
            if block["state"] != "inactive":
                found[at] = block["requested_size"]
            at += block["size"]
    return found


# What was live before the recording ----------------------------------------------------------


def played_again(trace: bfc.Trace, **options: Any) -> tuple[Recorder, list[tuple[int, int]]]:
    places = [address for _, address, _ in facts(trace)["segments"]]
    recorder = Recorder(lambda size: places.pop(0), **options)
    addresses = list(replayed(trace, recorder))
    assert places == []
    return recorder, addresses


@given(st.integers(0, 1 << 40), st.floats(0, 1))
def test_a_recording_cut_anywhere_plays_again_to_the_same_end(seed: int, share: float):
    """Every block stands where it stood, and the segments end as the file has them."""
    recorder = recorded(seed)
    content = recorder.snapshot(int(share * len(recorder.trace)))
    trace = read(content)
    assert (facts(trace)["repairs"], facts(trace)["segments_not_exact"]) == ({}, 0)
    assert live_at_the_end(trace) == live_in(content)
    if facts(trace)["blocks_of_unsure_size"] == 0:
        again, addresses = played_again(trace)
        assert all(here == there for here, there in addresses)
        assert again.layout() == recorder.layout()


def test_most_recordings_play_again_exactly_even_where_sizes_are_unsure():
    exact = 0
    for seed in range(60):
        recorder = recorded(seed, 200)
        trace = read(recorder.snapshot(len(recorder.trace) // 2))
        try:
            exact += played_again(trace)[0].layout() == recorder.layout()
        except AssertionError:
            pass
    assert exact >= 59


def test_a_whole_recording_is_its_own_events():
    recorder = recorded(3)
    trace = read(recorder.snapshot())
    assert facts(trace)["first_recorded_event"] == 0
    events = [e for e in recorder.trace if e["action"] in ("alloc", "free_completed")]
    named = trace.op != 2
    assert trace.op[named].tolist() == [int(e["action"] != "alloc") for e in events]
    asked = [0 if e["action"] != "alloc" else e["size"] for e in events]
    assert trace.size[named].tolist() == asked
    handles = facts(trace)["streams"]
    assert handles[0] == 0
    assert [handles[s] for s in trace.stream[named]] == [e["stream"] for e in events]


def test_other_roundings_are_rebuilt_too():
    chosen = CachingSettings().apply("roundup_power2_divisions:8")
    options = {"rounding": chosen.round_size, "settings": chosen.as_torch()}
    exact = 0
    for seed in range(40):
        recorder = recorded(seed, **options)
        trace = read(recorder.snapshot(len(recorder.trace) // 2))
        assert live_at_the_end(trace) == live_in(recorder.snapshot())
        if facts(trace)["blocks_of_unsure_size"] == facts(trace)["segments_not_exact"] == 0:
            again, addresses = played_again(trace, rounding=chosen.round_size)
            assert all(here == there for here, there in addresses)
            assert again.layout() == recorder.layout()
            exact += 1
    assert exact >= 10


def test_a_file_without_events_is_rebuilt_block_by_block():
    blocks = [(512, 500), (2 * MIB - 1024, -1), (512, 1)]
    trace = read(recording([segment(*blocks)], []))
    again, addresses = played_again(trace)
    assert [here - BASE for here, _ in addresses] == [0, 512, 512 + MIB, 2 * MIB - 512]
    assert [(size, asked) for _, size, asked in again.layout()[0][2]] == blocks


def test_a_block_larger_than_its_request_is_rebuilt_so():
    """It was taken whole, for what was left over was too small to split off."""
    blocks = [(3 * MIB, 2 * MIB + 5), (5 * MIB, -1), (12 * MIB, 11 * MIB)]
    trace = read([segment(*blocks)])
    again, _ = played_again(trace)
    assert [(size, asked) for _, size, asked in again.layout()[0][2]] == blocks


def test_the_hole_behind_a_block_says_how_large_it_was():
    rest = [event("alloc", 3 * MIB, 2 * MIB), *free(0, 2 * MIB + 5)]
    blocks = [(3 * MIB, -1), (2 * MIB, 2 * MIB), (15 * MIB, -1)]
    trace = read(recording([segment(*blocks)], rest))
    assert facts(trace)["blocks_of_unsure_size"] == 0
    again, addresses = played_again(trace)
    assert all(here == there for here, there in addresses)
    assert [(size, asked) for _, size, asked in again.layout()[0][2]] == blocks


def test_segments_that_were_given_back_meanwhile_are_rebuilt():
    events = [*free(0, 1000), event("segment_free", 0, 2 * MIB)]
    trace = read(recording([], events))
    assert facts(trace)["segments"] == [[0, BASE, 2 * MIB]]
    assert trace.op[-1] == 2
    assert facts(trace)["segment_events"] == [["segment_free", len(trace) - 1, BASE, 2 * MIB, 0]]
    again, _ = played_again(trace)
    assert again.layout() == []


def test_the_rebuilt_beginning_replays_on_tensorflows_policy():
    recorder = recorded(8, 300)
    trace = read(recorder.snapshot(200))
    pool = bfc.BFCAllocator(bfc.SimulatedSubAllocator("80 GiB"))
    assert trace.replay(pool).failed == 0
    sizes = [chunk.requested_size for chunk in pool.snapshot().live_chunks()]
    assert sorted(sizes) == sorted(live_in(recorder.snapshot()).values())


def test_our_own_dump_comes_back(tmp_path: Path, make_allocator):
    allocator = make_allocator("8 MiB")
    live = [allocator.allocate_raw(1000 * (number + 1)) for number in range(9)]
    for address in live[::2]:
        allocator.deallocate_raw(address)
    allocator.snapshot().dump(tmp_path / "memory.pickle")
    trace = bfc.Trace.from_torch(tmp_path / "memory.pickle")
    asked = {address: 1000 * (n + 1) for n, address in enumerate(live) if n % 2}
    assert live_at_the_end(trace) == asked
    other = bfc.BFCAllocator(bfc.SimulatedSubAllocator("8 MiB", base=1 << 40))
    assert trace.replay(other, beginning="as recorded").beginning == "as recorded"
    assert {c.ptr: c.requested_size for c in other.snapshot().live_chunks()} == asked
    for address in live[1::2]:
        allocator.deallocate_raw(address)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("last", [1 << 20, 200])
@pytest.mark.parametrize("seed", range(8))
def test_a_run_of_the_caching_allocator_replays_to_the_same_addresses(seed, last, tmp_path):
    dice = random.Random(seed)
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("8 GiB"))
    allocator.record_history(max_entries=last)
    live: list[int] = []
    for _ in range(400):
        if live and dice.random() < 0.5:
            allocator.deallocate_raw(live.pop(dice.randrange(len(live))))
        else:
            live.append(allocator.allocate_raw(random_size(dice), dice.choice([0, 0, 6])))
    allocator.snapshot().dump(tmp_path / "memory.pickle")
    trace = bfc.Trace.from_torch(tmp_path / "memory.pickle")
    assert (facts(trace)["repairs"], facts(trace)["segments_not_exact"]) == ({}, 0)
    assert bool(facts(trace)["first_recorded_event"]) == (last == 200)
    places = [address for _, address, _ in facts(trace)["segments"]]
    source = Misbehaving(1 << 50)
    source.on("alloc", instead=lambda ask, alignment, nbytes: (places.pop(0), nbytes))
    source.on("free", returns=None)
    again = bfc.CachingAllocator(source)
    assert trace.replay(again).addresses.tolist() == facts(trace)["addresses"]
    chunks = [
        {(c.ptr, c.size, c.requested_size, c.state) for c in pool.snapshot().chunks()}
        for pool in (allocator, again)
    ]
    assert chunks[0] == chunks[1]
    allocator.close()
    again.close()


def test_what_is_read_can_be_saved(tmp_path: Path):
    trace = read(recorded(4).snapshot(60))
    trace.save(tmp_path / "run.npz")
    loaded = bfc.Trace.load(tmp_path / "run.npz")
    assert loaded.meta == trace.meta
    assert loaded.op.tolist() == trace.op.tolist()


@pytest.mark.peers
@pytest.mark.parametrize("last", [1 << 20, 250])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_of_pytorchs_own_allocator_replays_to_the_same_addresses(seed: int, last: int):
    """On ours, with frees that wait for another stream."""
    from bench.peers.torch import TorchPeer, build

    build()
    dice = random.Random(seed)
    live: list[int] = []
    with TorchPeer(capacity=1 << 40) as peer:
        peer.record_history(True, last)
        peer.hold(4)
        for step in range(500):
            if live and dice.random() < 0.5:
                address = live.pop(dice.randrange(len(live)))
                if dice.random() < 0.1:
                    peer.record_stream(address, 4)
                peer.free(address)
            else:
                live.append(peer.malloc(random_size(dice), dice.choice([0, 0, 2])))
            if step % 100 == 99:
                peer.finish(4)
                peer.hold(4)
        segments = [dict(one) | {"device": 0} for one in peer.snapshot()]
        entries = [dict(entry) for entry in peer.trace()]
    content = recording(segments, entries)
    trace = read(content)
    assert (facts(trace)["repairs"], facts(trace)["segments_not_exact"]) == ({}, 0)
    assert live_at_the_end(trace) == live_in(content)
    assert facts(trace)["frees_completed_later"] > 0
    places = [address for _, address, _ in facts(trace)["segments"]]
    source = Misbehaving(1 << 50)
    source.on("alloc", instead=lambda ask, alignment, nbytes: (places.pop(0), nbytes))
    source.on("free", returns=None)
    again = bfc.CachingAllocator(source)
    addresses = trace.replay(again).addresses.tolist()
    if facts(trace)["blocks_of_unsure_size"] == 0:
        assert addresses == facts(trace)["addresses"]
        blocks = {(b["address"], b["size"]) for one in segments for b in one["blocks"]}
        assert {(c.ptr, c.size) for c in again.snapshot().chunks()} == blocks
    again.close()


# Single rules --------------------------------------------------------------------------------


def test_a_free_stands_where_it_was_completed():
    events = [
        event("segment_alloc", 0, 2 * MIB),
        event("alloc"),
        event("free_requested"),
        event("alloc", 1024),
        event("free_completed"),
        *free(1024),
    ]
    trace = read(recording([segment((2 * MIB, -1))], events))
    assert history(trace) == [(0, 0, 1000), (0, 1024, 1000), (1, 0, 0), (1, 0, 0)]
    assert trace.id.tolist() == [0, 1, 0, 1]
    assert (facts(trace)["frees_completed_later"], facts(trace)["repairs"]) == (1, {})


def test_a_free_that_still_waits_leaves_its_block_live():
    one = segment((1024, 1000), (2 * MIB - 1024, -1))
    one["blocks"][0]["state"] = "active_pending_free"
    trace = read(recording([one], [event("alloc"), event("free_requested")]))
    assert live_at_the_end(trace) == {BASE: 1000}
    assert (facts(trace)["waiting_at_the_end"], facts(trace)["repairs"]) == (1, {})


def test_stream_handles_become_ordinals_and_0_stays_0():
    handles = [0x5581, 7, 0, 7, -3]
    events = [event("alloc", 1024 * n, stream=h) for n, h in enumerate(handles)]
    for one in list(events):
        events.append(one | {"action": "free_completed"})
    trace = read(recording([], events))
    assert trace.stream.tolist() == [1, 2, 0, 2, 3] * 2
    assert facts(trace)["streams"] == [0, 0x5581, 7, -3]


def test_refusals_and_unknown_actions_are_noted():
    events = [
        event("alloc"),
        {"action": "oom", "device_free": 4096, "size": 1 << 40, "stream": 0},
        {"action": "snapshot", "addr": 0, "size": 0, "stream": 0},
        {"action": "annotate", "size": 0},
        {"action": "teleport"},
        {"action": "teleport", "addr": "here"},
    ]
    trace = read(recording([segment((2 * MIB, 1000))], events))
    assert facts(trace)["oom"] == [[len(trace), 1 << 40, 4096]]
    assert facts(trace)["unknown_actions"] == {"teleport": 2}
    assert facts(trace)["repairs"] == {}


def test_private_pools_are_counted():
    events = [
        event("alloc", pool_id=(0, 1)),
        event("alloc", 1024),
        event("alloc", 2048, pool_id=[0, 0]),
    ]
    blocks = ((1024, 1000), (1024, 1000), (2 * MIB - 2048, 1000))
    trace = read(recording([segment(*blocks, segment_pool_id=(0, 1))], events))
    assert facts(trace)["private_pool_allocations"] == 1
    trace = read(recording([segment(*blocks, segment_pool_id=(0, 1))], []))
    assert facts(trace)["private_pool_allocations"] == 3


def test_the_settings_are_kept_where_they_are_plain():
    chosen = (
        CachingSettings().apply("max_split_size_mb:40,roundup_power2_divisions:[64:8]").as_torch()
    )
    assert facts(read(NOTHING | {"allocator_settings": chosen}))["settings"] == chosen
    odd = {"a": float("nan"), "b": [1], "c": {"x": 1, "y": "z"}, "d": 1 << 900, "e": None}
    assert facts(read(NOTHING | {"allocator_settings": odd}))["settings"] == {
        "c": {"x": 1},
        "e": None,
    }


def test_expandable_segments_grow_and_shrink():
    mapped = segment((1024, 1000), (4 * MIB - 1024, -1), is_expandable=True)
    events = [
        event("segment_map", 2 * MIB, 2 * MIB),
        event("alloc", 0, 1000),
        event("segment_unmap", 4 * MIB, 2 * MIB),
    ]
    trace = read(recording([mapped], events))
    assert facts(trace)["segments"] == [[0, BASE, 2 * MIB], [1, BASE + 4 * MIB, 2 * MIB]]
    assert (facts(trace)["segments_not_exact"], facts(trace)["repairs"]) == (2, {})
    assert live_at_the_end(trace) == {BASE: 1000}


# Histories that contradict themselves --------------------------------------------------------


EMPTY = segment((2 * MIB, -1))
GROWN, SHRUNK = event("segment_alloc", 0, 2 * MIB), event("segment_free", 0, 2 * MIB)
ADDED, OUTSIDE = "frees_added", "live_outside_segments"
UNKNOWN, ASKED = "frees_of_unknown", "frees_requested_of_unknown"
BEFORE, WRONG = "allocations_before_outside_segments", "segment_events_contradicting"


@pytest.mark.parametrize(
    ("segments", "events", "expected", "repairs"),
    [
        # a free that is missing: before the next block there, or over it, or of its segment
        ([segment((2 * MIB, 7))], [event("alloc"), event("alloc", 0, 7)], "AFA", {ADDED: 1}),
        ([], [event("alloc", 512), event("alloc", 0, 2000)], "AFA", {ADDED: 1, OUTSIDE: 1}),
        ([], [event("alloc", 0, 2000), event("alloc", 512)], "AFA", {ADDED: 1, OUTSIDE: 1}),
        ([], [GROWN, event("alloc"), SHRUNK], "AFR", {ADDED: 1}),
        # one that the end misses
        ([EMPTY], [event("alloc")], "AF", {ADDED: 1}),
        # an allocation that is missing
        ([segment((2 * MIB, 1000))], free(), "FA", {"allocations_added": 1}),
        ([segment((2 * MIB, 9))], [event("alloc")], "AFA", {"allocations_added": 1, ADDED: 1}),
        ([EMPTY], [event("alloc"), *free(), *free()], "AF", {UNKNOWN: 1, ASKED: 1}),
        # blocks before the recording, in no segment, or in none that was there
        ([], free(), "F", {BEFORE: 1}),
        ([EMPTY], [GROWN, *free()], "F", {BEFORE: 1}),
        # segments that come or go twice
        ([EMPTY], [event("segment_alloc", 0, 4 * MIB)], "", {WRONG: 1}),
        ([EMPTY], [event("segment_free", MIB, 2 * MIB)], "", {WRONG: 1}),
        ([], [event("free_requested")], "", {ASKED: 1}),
    ],
)
def test_each_contradiction_is_mended_and_counted(segments, events, expected, repairs):
    trace = read(recording(segments, events))
    assert "".join("AFR"[op] for op, _, _ in history(trace)) == expected
    assert facts(trace)["repairs"] == repairs
    if segments:
        assert live_at_the_end(trace) == live_in(recording(segments, events))


@given(st.integers(0, 1 << 40), st.data())
def test_a_recording_with_holes_still_ends_as_the_file_says(seed: int, data: st.DataObject):
    recorder = recorded(seed, 60)
    content = recorder.snapshot()
    events = content["device_traces"][0]
    gone = data.draw(st.sets(st.sampled_from(sorted({e["action"] for e in events}))))
    lost = data.draw(st.sets(st.integers(0, len(events) - 1), max_size=6))
    kept = [e for n, e in enumerate(events) if e["action"] not in gone and n not in lost]
    if data.draw(st.booleans()):
        random.Random(seed).shuffle(kept)
    trace = read(recording(content["segments"], kept))
    live = live_at_the_end(trace)
    inside = {
        address: size
        for address, size in live.items()
        if any(0 <= address - s["address"] < s["total_size"] for s in content["segments"])
    }
    assert inside == live_in(content)
    outside = facts(trace)["repairs"].get("live_outside_segments", 0)
    assert len(live) - len(inside) == outside


# Older files, and several devices ------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dumps", [pickle.dumps, pickle._dumps])
def test_every_binary_protocol_is_read(protocol: int, dumps: Callable[..., bytes]):
    content = recorded(1).snapshot(70)
    content["external_annotations"] = [{"x" * 300: (1, 1.5, None, True, False, -(2**70), (), (2,))}]
    content["extra"] = {"one": 1}
    expected = read(content)
    made = bfc.Trace.from_torch(io.BytesIO(dumps(content, protocol)))
    assert (made.op.tolist(), made.meta) == (expected.op.tolist(), expected.meta)


def test_the_plain_reader_agrees_with_pythons():
    values = [0, -1, 255, 65535, 1 << 31, -(1 << 31), 1 << 63, 1e300, "é", "\udc80", {"a": [[]]}]
    values += [
        list(range(3000)),
        {str(n): n for n in range(3000)},
        (1, 2, 3, 4, 5),
        [values[5]] * 9,
    ]
    for protocol in (2, 3, 4, 5):
        content = pickle.dumps([values, values], protocol)
        assert plain_pickle.loads(content) == pickle.loads(content)


def test_old_blocks_say_what_was_asked_for_in_their_history():
    one = segment((1024, 1000), (2 * MIB - 1024, 9))
    del one["stream"], one["segment_type"]
    one["blocks"][0] = {
        "size": 1024,
        "state": "active_allocated",
        "history": [{"addr": BASE, "real_size": 900, "frames": []}],
    }
    del one["blocks"][1]["requested_size"]
    assert live_at_the_end(read([one])) == {BASE: 900, BASE + 1024: 2 * MIB - 1024}
    assert live_at_the_end(read({"segments": [one], "traces": []})) == live_at_the_end(read([one]))


def test_a_device_is_chosen_where_there_are_several():
    events = [[], [event("alloc")], [], [event("alloc"), event("alloc", 1024)]]
    content = {"segments": [segment((2 * MIB, -1), device=2)], "device_traces": events}
    with pytest.raises(bfc.TraceError, match=r"devices \[1, 3\]: choose one with device="):
        read(content)
    assert len(read(content, device=3)) == 2
    assert facts(read(content, device=3))["device"] == 3
    assert len(facts(read(content, device=2))["segments"]) == 1
    with pytest.raises(bfc.TraceError, match=r"nothing of device 0, but of \[1, 2, 3\]"):
        read(content, device=0)
    assert facts(read({"segments": [], "device_traces": [[], [event("alloc")]]}))["device"] == 1
    assert len(read(NOTHING)) == 0


def test_memory_of_the_host_is_left_aside():
    content = recording([], [event("alloc")])
    content["host_segments"] = [segment((512, 4), device=-1)]
    content["segments"] = [segment((512, 4), device=-1)]
    assert live_at_the_end(read(content)) == {BASE: 1000}


def test_paths_and_binary_files_are_read_and_nothing_else(tmp_path: Path):
    path = tmp_path / "m.pickle"
    path.write_bytes(pickle.dumps(NOTHING, 4))
    assert len(bfc.Trace.from_torch(path)) == len(bfc.Trace.from_torch(str(path))) == 0
    with path.open("rb") as file:
        assert len(bfc.Trace.from_torch(file)) == 0
    with path.open(encoding="latin-1") as file, pytest.raises(TypeError, match="binary mode"):
        bfc.Trace.from_torch(file)
    with pytest.raises(FileNotFoundError):
        bfc.Trace.from_torch(tmp_path / "none.pickle")
    path.write_bytes(b"nonsense")
    with pytest.raises(bfc.TraceError) as caught:
        bfc.Trace.from_torch(path)
    assert str(caught.value) == f"{path}: it is not a pickle of protocol 2 to 5"


# Files that are damaged, or mean harm --------------------------------------------------------


class Harm:
    """A value whose pickle runs something when Python's unpickler reads it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.how = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.how


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (os.system, ("echo harm > /tmp/harm",), f"{os.name}.system"),
        (eval, ("1/0",), "eval"),
        (getattr, (os, "system"), "getattr"),
        (subprocess.Popen, (["true"],), ".Popen"),
        (datetime.date, (2020, 1, 1), "datetime.date"),
    ],
)
def test_what_a_hostile_file_names_is_named_and_not_called(protocol, function, arguments, name):
    try:
        content = pickle.dumps(NOTHING | {"segments": [Harm(function, *arguments)]}, protocol)
    except TypeError:  # a module cannot be pickled: the call alone will do
        content = pickle.dumps([Harm(function)], protocol)
    text = refused(content)
    assert text.startswith("byte ")
    assert f"{name}, which may run code" in text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (HEAD + b"cos\nsystem\n(X\x04\x00\x00\x00truetR.", "it names os.system"),
        (HEAD + b"(cos\nsystem\nX\x04\x00\x00\x00trueo.", "it names os.system"),
        (HEAD + b"(X\x04\x00\x00\x00trueios\nsystem\n.", "it names os.system"),
        (HEAD + b"\x8c\x02os\x8c\x06system\x93.", "it names os.system"),
        (HEAD + b"\x8c\x07o\n\x1b[2Js\x8c\x01f\x93.", r"it names o\n\x1b[2Js.f"),
        (HEAD + b"K\x01\x93.", "it names an object"),
        (HEAD + b"c" + b"a" * 9999, "it names aaaa"),
        (HEAD + b"Pxyz\n.", "a persistent id"),
        (HEAD + b"K\x01Q.", "a persistent id"),
        (HEAD + b"\x82\x01.", "extension number"),
        (HEAD + b"\x84\x01\x00\x00\x00.", "extension number"),
        (HEAD + b"])R.", "asks to build an object"),
        (HEAD + b"]}b.", "asks to build an object"),
        (HEAD + b"])\x81.", "asks to build an object"),
        (HEAD + b"C\x01a.", "holds bytes"),
        (HEAD + b"\x96\xff\xff\xff\xff\xff\xff\xff\x7f.", "holds bytes"),
        (HEAD + b"\x8f.", "holds a set"),
        (HEAD + b"\x97.", "a buffer outside the file"),
        (HEAD + b"\x8b\xff\xff\xff\x7f.", "absurd length"),
        (HEAD + b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "absurd length"),
        (HEAD + b"I1\n.", "protocol 0 or 1"),
        (HEAD + b"\xff.", "unknown operation (0xff)"),
        (HEAD + HEAD + b"N.", "a second pickle"),
        (HEAD + b"Nr\xff\xff\xff\x7f.", "stores a value under number 2147483647"),
        (HEAD + b"X\xff\xff\xff\xffabc", "ends in the middle"),
        (HEAD + b"\x8c\x02\xff\xfe.", "its text is not UTF-8"),
        (HEAD + b"\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.", "neither 'segments'"),
        (HEAD + b"N" * 99 + b"a.", "appends to something that is not a list"),
        (HEAD + b"NNN" + b"s.", "sets an item of something that is not a dict"),
        (HEAD + b"}K\x01Ns.", "a dict has the key 1, no text"),
        (HEAD + b"})Ns.", "a dict has the key a tuple, no text"),
        (HEAD + b"(N}d" + b"N" * 20 + b".", "a dict has the key None"),
        (HEAD + b"}(\x8c\x01au." + b"N" * 20, "uses a value that was never read"),
        (HEAD + b"h\x09" + b"." * 20, "uses a value that was never read"),
        (HEAD + b"a" + b"." * 20, "uses a value that was never read"),
        (HEAD + b"u" + b"." * 20, "uses a value that was never read"),
        (HEAD + b"\x87" + b"." * 20, "uses a value that was never read"),
        (HEAD + b"NN.", "ends with 2 values"),
        (HEAD + b".", "ends with 0 values"),
        (HEAD, "ends in the middle"),
        (b"", "not a pickle of protocol 2 to 5"),
        (b"\x80\x06N.", "not a pickle of protocol 2 to 5"),
        (b"(lp0\n.", "not a pickle of protocol 2 to 5"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"PK\x03\x04", "zip archive"),
        (b'{"segments": []}', "not a pickle of protocol 2 to 5"),
    ],
)
def test_an_operation_that_no_snapshot_needs_is_refused(content: bytes, text: str):
    assert text in refused(content)


def test_a_file_cut_anywhere_is_refused():
    content = pickle.dumps(recorded(2, 20).snapshot(), 4)
    for end in range(len(content)):
        assert refused(content[:end])


def test_a_file_with_any_byte_changed_is_read_or_refused():
    content = pickle.dumps(recorded(2, 20).snapshot(9), 4)
    dice = random.Random(1)
    read_all = 0
    for _ in range(1500):
        changed = bytearray(content)
        changed[dice.randrange(2, len(content))] = dice.randrange(256)
        with contextlib.suppress(bfc.TraceError):
            trace = bfc.Trace.from_torch(io.BytesIO(changed))
            assert len(facts(trace)["addresses"]) == len(trace)
            read_all += 1
    assert 0 < read_all < 1500


def test_deep_and_shared_and_circular_values_do_no_harm():
    deep = b"]" * 900_000 + b"a" * 899_999
    assert "more values than are read" in refused(HEAD + deep + b".")
    assert "segments[0] is a list" in refused(HEAD + deep + b"." + b" " * (8 << 20))
    nested = b")" + b"\x85" * 1_000_000
    assert "neither 'segments'" in refused(HEAD + nested + b"." + b" " * (8 << 20))
    laughs = b"](K\x01K\x01e\x94"  # each of the lists that follow holds the last one ten times
    for number in range(60):
        laughs += b"](" + b"h" + bytes([number]) + (b"h" + bytes([number])) * 9 + b"e\x94"
    assert "segments[0] is a list" in refused(HEAD + b"]\x94h\x00a.")  # holds itself
    assert "ends with 61 values" in refused(HEAD + laughs + b".")


def test_the_limits_hold(monkeypatch):
    content = pickle.dumps(recorded(2, 20).snapshot(), 4)
    monkeypatch.setattr(torch_pickle, "MOST_BYTES", len(content) - 1)
    assert f"more than {len(content) - 1} bytes" in refused(content)
    monkeypatch.undo()
    monkeypatch.setattr(torch_pickle, "MOST_ENTRIES", 3)
    assert "entries: too many" in refused(content)
    monkeypatch.undo()
    monkeypatch.setattr(plain_pickle, "MOST_CONTAINERS", 1000)
    assert "more values than are read" in refused(HEAD + b"]" * 100_000)
    monkeypatch.setattr(plain_pickle, "MOST_VALUES", 1000)
    assert "more values than are read" in refused(HEAD + b"](" + b"NNe(" * 50_000)
    assert "more values than are read" in refused(HEAD + b"]" + b"Na" * 50_000)
    assert "more values than are read" in refused(HEAD + b"N" + b"\x94" * 50_000)
    monkeypatch.setattr(plain_pickle, "MOST_WAITING", 1000)
    assert "too many values belong to no list" in refused(HEAD + b"N" * 50_000)
    assert "too many values belong to no list" in refused(HEAD + b"(" * 50_000)
    monkeypatch.setattr(conversion, "MOST_STREAMS", 3)
    events = [event("alloc", 1024 * n, stream=n) for n in range(4)]
    assert "4 streams: at most 3" in refused(pickle.dumps(recording([], events), 4))


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    content = recording(
        [segment((1024, 1000), (2 * MIB - 1024, -1))], [event("alloc")], allocator_settings={}
    )
    change(content)
    return content


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda c: c.clear(), "it holds a dict with neither 'segments' nor 'device_traces'"),
        (lambda c: c.update(segments=3), "segments is 3: a list is expected"),
        (lambda c: c.update(segments=["x" * 99]), "segments[0] is 'xxxx"),
        (lambda c: c.update(device_traces={"a": 1}), "device_traces is a dict"),
        (lambda c: c.update(device_traces=[None]), "device_traces[0] is None"),
        (lambda c: c.update(allocator_settings=[1]), "allocator_settings is a list"),
        (lambda c: c["segments"][0].pop("address"), "segments[0]['address'] is missing"),
        (lambda c: c["segments"][0].update(address=-1), "segments[0]['address'] is -1"),
        (lambda c: c["segments"][0].update(address=1 << 64), "a number from 0 is expected"),
        (lambda c: c["segments"][0].update(address=1 << 2000), "a number of 2001 bits"),
        (lambda c: c["segments"][0].update(address=(1 << 64) - 512), "beyond all addresses"),
        (lambda c: c["segments"][0].update(address=True), "is True"),
        (lambda c: c["segments"][0].update(address=1.0), "is 1.0"),
        (lambda c: c["segments"][0].update(device="cuda"), "segments[0]['device'] is 'cuda'"),
        (lambda c: c["segments"][0].update(stream="s"), "segments[0]['stream'] is 's'"),
        (
            lambda c: c["segments"][0].update(total_size=512),
            "has 512 bytes, but its blocks 2097152",
        ),
        (lambda c: c["segments"][0].update(blocks=None), "segments[0]['blocks'] is None"),
        (lambda c: c["segments"][0].update(blocks=[1]), "segments[0]['blocks'][0] is 1"),
        (lambda c: c["segments"][0].update(segment_pool_id=1), "a pair of numbers is expected"),
        (lambda c: c["segments"][0]["blocks"][0].update(size=0), "['blocks'][0]['size'] is 0"),
        (lambda c: c["segments"][0]["blocks"][0].update(state="odd"), "['state'] is 'odd'"),
        (lambda c: c["segments"][0]["blocks"][0].update(state=[]), "['state'] is a list"),
        (lambda c: c["segments"][0]["blocks"][0].update(requested_size=1025), "is asked for 1025"),
        (lambda c: c["segments"][0]["blocks"][1].update(address=5), "where the block before it"),
        (lambda c: c["segments"].append(segment((512, -1), addr=512)), "overlap"),
        (lambda c: c["device_traces"].append([7]), "choose one with device="),
        (lambda c: c["device_traces"][0].append(7), "device_traces[0][1] is 7"),
        (lambda c: c["device_traces"][0][0].pop("action"), "device_traces[0][0]['action'] is None"),
        (lambda c: c["device_traces"][0][0].pop("addr"), "device_traces[0][0]['addr'] is missing"),
        (lambda c: c["device_traces"][0][0].update(size="big"), "['size'] is 'big'"),
        (lambda c: c["device_traces"][0][0].update(size=-4), "['size'] is -4"),
        (lambda c: c["device_traces"][0][0].update(size=(1 << 64) - 1), "beyond all addresses"),
        (lambda c: c["device_traces"][0][0].update(stream=None), "['stream'] is missing"),
        (lambda c: c["device_traces"][0][0].update(pool_id=(0,)), "['pool_id'] is a tuple"),
        (lambda c: c["device_traces"][0].append({"action": "oom", "size": 1}), "['device_free']"),
    ],
)
def test_each_fault_says_where_it_stands(change: Callable[[dict[str, Any]], Any], text: str):
    assert text in refused(pickle.dumps(changed(change), 4))


def test_reading_does_not_load_pythons_unpickler_or_numpy_early():
    code = (
        "import bfc, sys; assert 'numpy' not in sys.modules; bfc.Trace.from_torch; "
        "import bfc.pytorch.plain_pickle; assert 'pickle' not in vars(bfc.pytorch.plain_pickle)"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert ran.returncode == 0


def test_an_absurd_frame_or_float_is_harmless():
    content = pickle.dumps(NOTHING, 4)
    assert content[2] == 0x95
    absurd = content[:3] + struct.pack("<Q", (1 << 64) - 1) + content[11:]
    assert len(bfc.Trace.from_torch(io.BytesIO(absurd))) == 0
