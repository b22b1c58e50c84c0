"""Snapshots that say more than they hold: lists that share their parts, and absurd sizes."""

from __future__ import annotations

import contextlib
import io
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from torch_dumps import (
    BASE,
    HEAD,
    KIB,
    MIB,
    event,
    facts,
    read,
    recorded,
    recording,
    refused,
    segment,
)  # fmt: skip

import bfc
import bfc.pytorch.layout as torch_layout
import bfc.pytorch.plain_pickle as plain_pickle
import bfc.pytorch.reader as torch_pickle
from bfc.pytorch.settings import CachingSettings

SHARED = "its lists share parts"


# Segments of absurd sizes --------------------------------------------------------------------


@pytest.mark.parametrize("size", [4 * MIB, 1 << 60])
def test_a_small_segment_of_another_size_is_not_cut_up(size: int):
    """PyTorch has none, so no requests give one: a hole is one request, and said to be inexact."""
    trace = read([segment((size, -1), segment_type="small")])
    assert set(trace.size.tolist()) == {size, 0}
    assert len(trace) <= 4
    assert facts(trace)["segments_not_exact"] == 1
    blocks = [(512, 500), (size - 512, -1)]
    trace = read([segment(*blocks, segment_type="small")])
    assert len(trace) < 8
    assert facts(trace)["segments_not_exact"] == 1


def test_the_holes_of_expandable_small_segments_have_pieces_in_common():
    """A hole that fits into what is left of them is cut, one beyond it is not."""
    most = torch_layout.MOST_PIECES
    places = {"segment_type": "small", "is_expandable": True}
    cut = segment((64 * MIB, -1), **places)
    absurd = segment((1 << 60, -1), addr=1 << 50, **places)
    trace = read([cut, absurd])
    assert len(trace) == 2 * 64 + 2
    assert facts(trace)["segments_not_exact"] == 2
    many = [segment((1 << 34, -1), addr=number << 40, **places) for number in range(40)]
    assert len(read(many)) < 2 * most + 4 * len(many)


# Lists that share their parts ----------------------------------------------------------------


def test_a_file_of_parts_that_it_says_one_by_one_is_read():
    """The smallest that a pickle of PyTorch's fields has, many times more than are free."""
    count = 10 * torch_pickle.FIRST_PARTS
    entries = [{"action": "oom", "device_free": 0, "size": 1} for _ in range(count)]
    assert len(facts(read(recording([], entries)))["oom"]) == count
    blocks = [{"size": 512, "state": "inactive"} for _ in range(count)]
    one = {"address": 0, "total_size": 512 * count, "blocks": blocks}
    assert read([one]).size.sum() >= 512 * count


@pytest.mark.parametrize(
    ("content", "where"),
    [
        ([segment((512, -1))] * 100_000, "segments: "),
        ([segment(*[(512, -1)] * 2) | {"blocks": [{"size": 512}] * 100_000}], "segments[0]: "),
        (recording([], [event("alloc")] * 100_000), "device_traces[0]: "),
        (recording([], []) | {"device_traces": [[event("alloc")]] * 100_000}, "device_traces: "),
    ],
)
def test_shared_parts_are_counted_as_often_as_they_are_met(content: Any, where: str):
    text = refused(pickle.dumps(content, 4))
    assert text.startswith(where)
    assert SHARED in text


def test_blocks_that_segments_share_are_counted_for_each():
    blocks = [{"size": 512, "state": "inactive"}] * 3000
    shared = {"address": BASE, "total_size": 512 * 3000, "blocks": blocks}
    assert SHARED in refused(pickle.dumps([shared] * 3, 4))
    assert SHARED in refused(pickle.dumps([dict(shared) for _ in range(3)], 4))


def test_parts_of_another_device_are_not_looked_at():
    entries = [[event("alloc")] * 100_000, [event("alloc")]]
    content = recording([segment((512, -1), device=1)], []) | {"device_traces": entries}
    assert len(read(content, device=1)) > 0
    assert SHARED in refused(pickle.dumps(content | {"device_traces": entries[:1]}, 4))


def test_many_devices_make_a_short_error():
    content = recording([], []) | {"device_traces": [[{"action": "oom"}]] * 1000}
    assert "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15] and more" in refused(
        pickle.dumps(content, 4)
    )


def test_settings_that_share_a_table_are_kept_in_part():
    table = {f"{number:05000}": number for number in range(300)}
    settings = {f"{number:03}": table for number in range(300)}
    kept = facts(read(recording([], [], allocator_settings=settings)))["settings"]
    assert len(kept) + sum(len(each) for each in kept.values()) <= 2 * torch_pickle.MOST_SETTINGS
    assert max(len(key) for each in kept.values() for key in each) <= torch_pickle.LONGEST_TEXT


# The memory that a file takes ----------------------------------------------------------------

SIZE = 64 * KIB
WORDS = ("size", "state", "active_allocated", "inactive", "address", "total_size", "blocks",
         "action", "addr", "alloc", "free_completed", "segment_free")  # fmt: skip
AT = {word: b"h" + bytes([number]) for number, word in enumerate(WORDS)}
NEXT = b"h" + bytes([len(WORDS)])


def text(word: str) -> bytes:
    return b"\x8c" + bytes([len(word)]) + word.encode()


def number(value: int) -> bytes:
    return b"\x8a\x08" + value.to_bytes(8, "little")


def listed(parts: list[bytes]) -> bytes:
    return b"](" + b"".join(parts) + b"e"


def entry(action: str, at: int, size: int = 1) -> bytes:
    where = b"J" + struct.pack("<i", at)
    return b"(" + AT["action"] + AT[action] + AT["addr"] + where + AT["size"] + number(size) + b"d"


def block(state: str) -> bytes:
    return b"(" + AT["size"] + b"M\x00\x02" + AT["state"] + AT[state] + b"d"


def snapshot(blocks: list[bytes], entries: list[bytes]) -> bytes:
    """Padded with the values that take most memory for their bytes."""
    words = text("words") + b"(" + b"".join(text(word) + b"\x94" for word in WORDS) + b"l"
    one = b"(" + AT["address"] + b"K\x00" + AT["total_size"] + number(512 * len(blocks))
    segments = b"(" + one + AT["blocks"] + listed(blocks) + b"dl" if blocks else b"]"
    content = words + text("segments") + segments + text("device_traces") + b"("
    content += listed(entries) + b"l" if entries else b"]l"
    padding = text("more") + listed([b"N"] * max(0, SIZE - len(content)))
    return HEAD + b"(" + content + padding + b"d."


MOST_PARTS = SIZE // 12
CONTENTS: dict[str, Callable[[], bytes]] = {
    "shared blocks": lambda: snapshot(
        [block("active_allocated") + b"\x94", *[NEXT] * (MOST_PARTS - 9)], []
    ),
    "blocks and holes": lambda: snapshot(
        [block("active_allocated"), block("inactive")] * (SIZE // 26), []
    ),
    "shared entries": lambda: snapshot(
        [], [entry("alloc", 0) + b"\x94", *[NEXT] * (MOST_PARTS - 9)]
    ),
    "allocations": lambda: snapshot([], [entry("alloc", 8 * n) for n in range(SIZE // 26)]),
    "frees": lambda: snapshot([], [entry("free_completed", 8 * n) for n in range(SIZE // 26)]),
    "segments given back": lambda: snapshot(
        [], [entry("segment_free", 512 * n, 512) for n in range(SIZE // 26)]
    ),
    "lists": lambda: HEAD + listed([b"]" + b"N" * 7] * (SIZE // 8)) + b".",
    "dicts": lambda: (
        HEAD + text("key") + b"\x940" + listed([b"}h\x00Ns" + b"N" * 3] * (SIZE // 8)) + b"."
    ),
    "nested tuples": lambda: HEAD + b")" + b"\x85" * SIZE + b".",
    "nested lists": lambda: HEAD + b"]" * SIZE + b"a" * (SIZE - 1) + b".",
    "texts": lambda: HEAD + listed([text(f"{n % 100:02}") for n in range(SIZE // 4)]) + b".",
    "numbers": lambda: HEAD + listed([b"M\x01\x02"] * (SIZE // 3)) + b".",
    "keys": lambda: HEAD + b"}(" + b"".join(text(f"{n:04x}") + b"N" for n in range(9999)) + b"u.",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CONTENTS)
def test_no_file_takes_more_than_a_hundred_times_its_size(name: str, monkeypatch):
    """Without the parts that are free, which are 32 MiB at most."""
    monkeypatch.setattr(torch_pickle, "FIRST_PARTS", 0)
    monkeypatch.setattr(plain_pickle, "FIRST_CONTAINERS", 16)
    monkeypatch.setattr(plain_pickle, "TURN", 64)
    data = CONTENTS[name]()
    read(recording([], []))  # what is imported stays out of account
    tracemalloc.start()
    try:
        trace = None
        with contextlib.suppress(bfc.TraceError):
            trace = bfc.Trace.from_torch(io.BytesIO(data))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(data), f"{peak / len(data):.0f} times"
    if b"device_traces" in data:
        assert trace is not None
        assert len(trace) >= SIZE // 26


# The sizes of other settings -----------------------------------------------------------------


@pytest.mark.parametrize(
    "conf",
    [
        "large_segment_size_mb:64",
        "expandable_segments:True, large_segment_size_mb : 64,max_split_size_mb:80",
    ],
)
def test_a_large_segment_has_the_size_of_the_settings(conf: str):
    settings = {"PYTORCH_CUDA_ALLOC_CONF": conf}
    content = recording([segment((64 * MIB, 5 * MIB))], [], allocator_settings=settings)
    content["segments"] = [segment((5 * MIB, 5 * MIB), (59 * MIB, -1))]
    assert facts(read(content))["segments_not_exact"] == 0
    assert read(content).size.tolist()[0] == 5 * MIB
    del content["allocator_settings"]
    assert read(content).size.tolist()[0] == 64 * MIB  # it is asked for as a whole


@pytest.mark.parametrize("value", ["", "abc", "5", "9" * 99, None, 7])
def test_an_odd_large_segment_size_is_the_default(value: object):
    conf = value if not isinstance(value, str) else f"large_segment_size_mb:{value}"
    sizes = torch_layout.Sizes({"PYTORCH_CUDA_ALLOC_CONF": conf})
    assert sizes.segment(5 * MIB) == 20 * MIB


def test_sizes_are_those_of_the_settings():
    chosen = CachingSettings().apply("roundup_power2_divisions:[4:8,64:2,>:1]")
    sizes = torch_layout.Sizes(chosen.as_torch())
    for power in range(9, 60):
        for size in (1 << power, (1 << power) + 1, 3 << power, 7 << power):
            assert sizes.rounded(size) == chosen.round_size(size)
            assert sizes.segment(size) == chosen.segment_size(size)
            down = sizes.rounded_down(size)
            assert chosen.round_size(down) == down <= size < chosen.round_size(down + 1)


def test_a_recording_under_other_large_segments_replays():
    allocator = bfc.CachingAllocator(
        bfc.SimulatedSubAllocator("4 GiB"), large_segment_size_mb=11, max_split_size_mb=40
    )
    allocator.record_history(max_entries=4)
    live = [allocator.allocate_raw(size * MIB) for size in (2, 3, 2, 5, 1, 9)]
    content = allocator.snapshot().to_torch()
    trace = read(content)
    assert facts(trace)["segments_not_exact"] == 0
    again = bfc.CachingAllocator(
        bfc.SimulatedSubAllocator("4 GiB"), large_segment_size_mb=11, max_split_size_mb=40
    )
    assert trace.replay(again).failed == 0
    found = sorted((r.size, len(r.chunks)) for r in again.snapshot().regions)
    assert found == sorted((r.size, len(r.chunks)) for r in allocator.snapshot().regions)
    for address in live:
        allocator.deallocate_raw(address)


# What is read can be saved -------------------------------------------------------------------


def test_a_long_recording_can_be_saved(tmp_path, monkeypatch):
    """Its addresses are an array of the file, and no part of its text."""
    import bfc.trace.trace as trace_module

    trace = read(recorded(4).snapshot(60))
    most = trace_module.MOST_BYTES | {"meta": 4 * 4000}
    assert len(str(facts(trace)["addresses"])) < 4000
    long = bfc.Trace(
        [0, 1] * 5000, [0] * 10_000, [1, 0] * 5000,
        meta=trace.meta | {"torch": facts(trace) | {"addresses": [BASE, (1 << 64) - 1] * 5000}},
    )  # fmt: skip
    monkeypatch.setattr(trace_module, "MOST_BYTES", most)
    long.save(tmp_path / "long.npz")
    loaded = bfc.Trace.load(tmp_path / "long.npz")
    assert loaded.meta == long.meta
    assert type(loaded.meta["torch"]["addresses"][0]) is int
    assert "addresses" in long.meta["torch"]
    monkeypatch.setattr(trace_module, "MOST_BYTES", most | {"torch_addresses": 8 * 9999})
    with pytest.raises(bfc.TraceError, match="9999 addresses"):
        long.save(tmp_path / "other.npz")
    monkeypatch.setattr("bfc.files.HEADER_BYTES", 0)
    with pytest.raises(bfc.TraceError, match="torch_addresses unpacks to"):
        bfc.Trace.load(tmp_path / "long.npz")
