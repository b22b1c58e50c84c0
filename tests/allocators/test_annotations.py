"""Texts of a program about its allocations, in the history."""

from __future__ import annotations

from pathlib import Path

import pytest

import bfc
from bfc.snapshots.summary import summary

MIB = 1 << 20


def recording(**options: object) -> bfc.CachingAllocator:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), **options)
    allocator.record_history()
    return allocator


def test_an_annotation_is_an_entry_with_the_text(tmp_path: Path):
    """(V-14)"""
    allocator = recording()
    address = allocator.allocate_raw(3 * MIB, stream=7)
    allocator.annotate(address, "logits of step 3")
    allocator.deallocate_raw(address)
    actions = [entry["action"] for entry in allocator.snapshot().to_torch()["device_traces"][0]]
    assert actions == ["segment_alloc", "alloc", "annotate", "free_requested", "free_completed"]
    allocator.dump(tmp_path / "memory.pickle")
    entry = allocator.snapshot().to_torch()["device_traces"][0][2]
    assert (entry["addr"], entry["size"], entry["stream"]) == (address, 3 * MIB, 7)
    assert entry["user_metadata"] == "logits of step 3"
    run = bfc.Trace.from_torch(tmp_path / "memory.pickle")
    assert run.op.tolist() == [0, 1]
    assert run.meta["torch"]["unknown_actions"] == {}
    assert bfc.Trace.from_snapshot(allocator.snapshot()).op.tolist() == [0, 1]


def test_what_cannot_be_annotated():
    allocator = recording()
    address = allocator.allocate_raw(1000)
    with pytest.raises(bfc.InvalidPointerError):
        allocator.annotate(address + 512, "inside")
    with pytest.raises(ValueError, match="needs a name"):
        allocator.annotate(address, "")
    with pytest.raises(TypeError):
        allocator.annotate(address, 3)
    allocator.deallocate_raw(address)
    with pytest.raises(bfc.InvalidPointerError):
        allocator.annotate(address, "dead")
    older = recording(torch="2.11")
    with pytest.raises(ValueError, match=r"PyTorch 2\.11 has no annotations: torch='2\.15' has"):
        older.annotate(older.allocate_raw(1000), "logits")


def test_an_annotation_may_be_skipped_or_unheard():
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    address = allocator.allocate_raw(1000)
    allocator.annotate(address, "nobody records")
    allocator.record_history(skip_actions=("annotate",))
    allocator.annotate(address, "skipped")
    assert allocator.snapshot().history == ()
    allocator.record_history()
    allocator.annotate(address, "kept")
    assert [(entry.action, entry.owner) for entry in allocator.snapshot().history] == [
        ("annotate", "kept")
    ]


def test_a_summary_has_what_private_pools_reserved_and_what_was_rejected():
    stats = {f"reserved_bytes_by_private_pools.0_3.all.{name}": 22 * MIB for name in ("current",)}
    stats["num_oom_rejections"] = 2
    lines = summary(stats, "cuda:0").splitlines()
    assert {len(line) for line in lines} == {77}
    (row,) = (line for line in lines if "pool 0_3" in line)
    assert row.split("|")[1:3] == [" Reserved by pool 0_3  ", "  22528 KiB "]
    assert "Refused before the device was asked: 2" in lines[-2]
    short = summary(stats, "cuda:0", abbreviated=True)
    assert "pool 0_3" not in short
    assert "asked: 2" in short
    assert "Refused before" not in summary({}, "cuda:0")
