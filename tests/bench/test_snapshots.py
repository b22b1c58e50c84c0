"""The benchmark of snapshots: what it measures, and that each of its figures is there."""

from __future__ import annotations

import pytest

import bfc
from bench import snapshots


def test_each_part_of_a_snapshot_is_timed(monkeypatch, capsys):
    monkeypatch.setattr(snapshots, "ENTRIES", 600)
    monkeypatch.setattr(snapshots, "REPEATS", 2)
    monkeypatch.setattr(snapshots, "LONG_REPEATS", 2)
    snapshots.main()
    _machine, _heading, *rows = capsys.readouterr().out.splitlines()
    heads = [row[:52].strip() for row in rows]
    assert heads[:2] == [
        "bfc: snapshot(history=False), 501 blocks",
        "caching: snapshot(history=False), 493 blocks",
    ]
    parts = ["snapshot()", "to_torch()", "dump()", "the first look at them"]
    kinds = ["600 entries without frames", "600 entries with frames"]
    assert heads[2:] == [f"{kind}: {part}" for kind in kinds for part in parts]
    assert all(row.count("/") == 2 for row in rows)


@pytest.mark.long
def test_the_history_that_is_measured_is_full_and_has_frames():
    for context in (None, "all"):
        with bfc.CachingAllocator(bfc.SimulatedSubAllocator("8 GiB")) as allocator:
            snapshots.record(allocator, context)
            history = allocator.snapshot().history
            assert len(history) == snapshots.ENTRIES
            assert all(bool(entry.frames) == (context is not None) for entry in history[-9:])
            assert len(allocator.snapshot().to_torch()["device_traces"][0]) == len(history)
