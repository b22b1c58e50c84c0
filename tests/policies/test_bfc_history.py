"""The history that a `BFCAllocator` keeps: what a caching one does, of TensorFlow's placement."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bfc
from bfc.testing import leak_check

MIB = 1 << 20

KINDS: dict[str, Callable[[bfc.SimulatedSubAllocator], bfc.BFCAllocator]] = {
    "growing": lambda device: bfc.BFCAllocator(device, allow_growth=True),
    "whole": lambda device: bfc.BFCAllocator(device, strict=True),
    "pages": lambda device: bfc.BFCAllocator(device, virtual_memory=True),
}


def make(kind: str, capacity: str = "1 GiB") -> bfc.BFCAllocator:
    return KINDS[kind](bfc.SimulatedSubAllocator(capacity))


def test_it_has_the_actions_lines_and_owners_of_each_call() -> None:
    allocator = make("growing")
    early = allocator.allocate_raw(700)
    allocator.record_history()
    with bfc.owner("kv cache", step=17):
        buffer = allocator.allocate(5 * MIB, stream=3)
        many = allocator.allocate_many([100, 200])
    buffer.free()
    allocator.deallocate_many(many)
    allocator.deallocate_raw(early)
    assert allocator.try_allocate(1 << 40) is None
    assert allocator.empty_cache() == 10 * MIB
    entries = allocator.history()
    assert [
        (entry.action, entry.size, entry.stream, entry.owner, entry.step) for entry in entries
    ] == [
        ("segment_alloc", 8 * MIB, 0, "", None),
        ("alloc", 5 * MIB, 3, "kv cache", 17),
        ("alloc", 100, 0, "kv cache", 17),
        ("alloc", 200, 0, "kv cache", 17),
        ("free_requested", 5 * MIB, 3, "kv cache", 17),
        ("free_completed", 5 * MIB, 3, "kv cache", None),
        *[(f"free_{what}", 100, 0, "kv cache", 17) for what in ("requested", "completed")],
        *[(f"free_{what}", 200, 0, "kv cache", 17) for what in ("requested", "completed")],
        *[(f"free_{what}", 700, 0, "", None) for what in ("requested", "completed")],
        ("oom", 1 << 40, 0, "", None),
        ("segment_free", 2 * MIB, 0, "", None),
        ("segment_free", 8 * MIB, 0, "", None),
    ]
    lines = {entry.frames[0].line for entry in entries if entry.action == "alloc"}
    assert len(lines) == 2
    assert all(entry.frames[0].filename == __file__ for entry in entries if entry.action == "oom")
    allocator.record_history(None)
    allocator.deallocate_raw(allocator.allocate_raw(100))
    assert allocator.history() == []


def test_a_free_behind_a_stream_is_requested_and_later_completed() -> None:
    device = bfc.SimulatedSubAllocator("16 MiB")
    allocator = bfc.BFCAllocator(device)
    allocator.record_history(context=None)
    address = allocator.allocate_raw(MIB)
    allocator.record_stream(address, 7)
    device.hold(7)
    allocator.deallocate_raw(address)
    assert [entry.action for entry in allocator.history()][-2:] == ["alloc", "free_requested"]
    device.finish(7)
    assert [entry.action for entry in allocator.history()][-1] == "free_completed"


def play(
    allocator: bfc.BFCAllocator, seed: int, live: dict[int, tuple[Any, int]]
) -> list[tuple[str, int, int]]:
    """Random calls of all kinds. Returns what a history must have of them."""
    rng = random.Random(seed)
    seen: list[tuple[str, int, int]] = []
    for _ in range(300):
        if live and rng.random() < 0.45:
            address = rng.choice(list(live))
            kept, nbytes = live.pop(address)
            seen.append(("free_completed", address, nbytes))
            if isinstance(kept, bfc.Buffer) and rng.random() < 0.5:
                kept.free()
            elif isinstance(kept, bfc.Buffer):
                del kept  # its finaliser frees it
            else:
                allocator.deallocate_raw(address)
        else:
            nbytes = rng.choice([rng.randrange(1, 5000), rng.randrange(1, 9 * MIB)])
            stream = rng.choice([0, 0, 5])
            if rng.random() < 0.5:
                kept = address = allocator.allocate_raw(nbytes, stream)
            else:
                kept = allocator.allocate(nbytes, stream)
                address = kept.ptr
            live[address] = kept, nbytes
            seen.append(("alloc", address, nbytes))
    return seen


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_it_is_what_happened_and_can_be_replayed(kind: str, seed: int) -> None:
    """No entry too many or too few; the placement is as without one; and the trace that is read
    from it places everything where it lay."""
    allocator, twin = make(kind), make(kind)
    allocator.record_history()
    live: list[dict[int, tuple[Any, int]]] = [{}, {}]
    seen = play(allocator, seed, live[0])
    assert play(twin, seed, live[1]) == seen
    found = [(entry.action, entry.addr, entry.size) for entry in allocator.history()]
    asked = [event for event in seen if event[0] == "alloc"]
    assert [event for event in found if event[0] == "alloc"] == asked
    # A finaliser leaves what another stream has used to the next call.
    assert sorted(event for event in found if event[0] == "free_completed") == sorted(
        event for event in seen if event[0] == "free_completed"
    )
    allocator.check()
    snapshot = allocator.snapshot()
    trace = bfc.Trace.from_snapshot(snapshot)
    again = trace.replay(make(kind))
    assert trace.size[trace.op == 0].tolist() == [nbytes for _, _, nbytes in asked]
    assert again.addresses[trace.op == 0].tolist() == [address for _, address, _ in asked]
    assert again.peak_bytes_in_use == snapshot.stats.peak_bytes_in_use


def test_a_replay_is_recorded_and_places_as_without_a_history() -> None:
    rng = np.random.default_rng(3)
    op = np.tile(np.repeat(np.array([0, 1], np.uint8), 50), 4)
    ids = np.tile(np.r_[np.arange(50), rng.permutation(50)], 4)
    trace = bfc.Trace(op, ids, np.where(op == 0, rng.integers(1, MIB, 400), 0))
    for kind in KINDS:
        recorded, plain = make(kind), make(kind)
        recorded.record_history()
        ours = trace.replay(recorded, samples=20)
        assert (ours.addresses == trace.replay(plain).addresses).all()
        actions = [entry.action for entry in recorded.history()]
        assert (actions.count("alloc"), actions.count("free_completed")) == (200, 200)


def test_frees_with_timestamps_are_recorded_too() -> None:
    allocator = make("whole")
    allocator.record_history()
    allocator.set_timing_counter(bfc.SharedCounter())
    address = allocator.allocate_raw(1000)
    allocator.deallocate_raw(address)
    allocator.set_timing_counter(bfc.SharedCounter())
    allocator.record_history(None)
    allocator.deallocate_raw(allocator.allocate_raw(1000))
    assert allocator.snapshot().free_chunks()[0].freed_at_count == 1
    allocator.check()


def test_growing_in_place_is_recorded_as_a_free_and_an_allocation() -> None:
    allocator = make("whole")
    allocator.record_history()
    cache = allocator.allocate(MIB)
    assert allocator.try_extend(cache, 3 * MIB)
    assert [(entry.action, entry.size) for entry in allocator.history()][1:] == [
        ("alloc", MIB),
        ("free_requested", MIB),
        ("free_completed", MIB),
        ("alloc", 3 * MIB),
    ]


def test_leaks_and_the_check_for_them_name_the_lines() -> None:
    allocator = make("growing")
    allocator.record_history()
    with leak_check(allocator) as check:
        address = allocator.allocate_raw(1000)
        (found,) = check.found()
        (leak,) = allocator.leaks()
        assert leak.frames[0] == found.frames[0]
        assert "test_bfc_history.py" in str(allocator.leaks())
        allocator.deallocate_raw(address)


def test_reports_and_differences_are_made_of_it(tmp_path: Path) -> None:
    first, second = make("growing"), make("growing")
    for number, allocator in enumerate((first, second)):
        allocator.record_history()
        with bfc.owner("weights"):
            kept = allocator.allocate((1 + number) * MIB)
        for _ in range(3):
            allocator.allocate(4 * MIB).free()
        kept.free()
        allocator.dump(tmp_path / f"{number}.pickle")
    growth = bfc.diff(first, second)
    assert growth.peak.total.bytes == MIB
    page = tmp_path / "page.html"
    bfc.report(second, page)
    assert '"kind": "trace"' in page.read_text("utf-8") or '"kind":"trace"' in page.read_text(
        "utf-8"
    )
    trace = bfc.Trace.from_torch(tmp_path / "1.pickle")
    assert (len(trace), trace.replay(make("growing")).peak_bytes_live) == (8, 6 * MIB)
    assert json.dumps(first.snapshot().as_dict())


def test_it_may_be_turned_on_and_off_while_threads_allocate() -> None:
    allocator = make("growing")
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            kept = allocator.allocate(1000)
            allocator.deallocate_raw(allocator.allocate_raw(3000))
            kept.free()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for round_number in range(60):
        allocator.record_history(None if round_number % 3 == 2 else "all", max_entries=50)
        assert len(allocator.history()) <= 50
        allocator.snapshot().to_torch()
    stop.set()
    for thread in threads:
        thread.join()
    assert allocator.stats().bytes_in_use == 0
    allocator.check()
