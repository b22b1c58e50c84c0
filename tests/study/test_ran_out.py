"""The sentence with which everything begins that is shown of a run that ran out of memory."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import bfc
from bfc.study import RanOut, ran_out
from bfc_tools.browser.data import data_of
from bfc_tools.cli import main

MIB = 1 << 20
CAPACITY = 330 * MIB


def refuse(allocator: bfc.Allocator, nbytes: int, stream: int = 0) -> None:
    assert allocator.try_allocate(nbytes, stream=stream) is None, nbytes


def pieces(allocator: bfc.Allocator, stream: int = 0) -> list[Any]:
    """Three segments of 100 MiB with 30 MiB free in each, which no request of 80 MiB can have."""
    kept: list[Any] = []
    for block in [allocator.allocate(100 * MIB, stream=stream) for _ in range(3)]:
        block.free()
        kept.append(allocator.allocate(70 * MIB, stream=stream))
    refuse(allocator, 80 * MIB)
    return kept


def other_stream(allocator: bfc.Allocator) -> list[Any]:
    return pieces(allocator, stream=7)


def too_small(allocator: bfc.Allocator) -> list[Any]:
    kept = [allocator.allocate(30 * MIB) for _ in range(10)]
    refuse(allocator, 80 * MIB)
    return kept


def huge(allocator: bfc.Allocator) -> list[Any]:
    kept = [allocator.allocate(30 * MIB)]
    refuse(allocator, 1000 * MIB)
    return kept


def under_a_limit(allocator: bfc.Allocator) -> list[Any]:
    assert isinstance(allocator, bfc.CachingAllocator)
    allocator.set_memory_fraction(0.3)
    kept = [allocator.allocate(60 * MIB)]
    refuse(allocator, 80 * MIB)
    return kept


def caught(allocator: bfc.Allocator) -> list[Any]:
    kept = huge(allocator)
    refuse(allocator, 500 * MIB)
    return [*kept, allocator.allocate(MIB)]


def caught_and_ended(allocator: bfc.Allocator) -> list[Any]:
    kept = caught(allocator)
    kept += [allocator.allocate(40 * MIB) for _ in range(6)]
    refuse(allocator, 80 * MIB)
    return kept


def run_of(
    program: Callable[[bfc.Allocator], list[Any]],
    settings: str = "",
    context: str | None = "alloc",
    **options: Any,
) -> bfc.Trace:
    """What a program recorded, read from the file that it dumps."""
    source = bfc.SimulatedSubAllocator(CAPACITY)
    allocator = bfc.CachingAllocator(source, settings=settings)
    allocator.record_history(context=context)
    kept = program(allocator)
    file = io.BytesIO(allocator.snapshot()._pickled_as_torch())
    del kept
    return bfc.Trace.from_torch(file, **options)


def found_in(*arguments: Any, **options: Any) -> RanOut:
    found = ran_out(run_of(*arguments, **options))
    assert found is not None
    return found


def test_enough_is_free_but_in_pieces():
    found = found_in(pieces)
    assert (found.cause, found.nbytes, found.free_on_device) == ("pieces", 80 * MIB, 30 * MIB)
    assert (found.free_in_segments, found.largest_free) == (90 * MIB, 30 * MIB)
    assert found.sentence == (
        "It ran out of memory: 80.00 MiB were refused at test_ran_out.py:24 in refuse, where "
        "210.00 MiB were live; of the 300.00 MiB reserved 90.00 MiB were free for such a request, "
        "in pieces of at most 30.00 MiB, and 30.00 MiB on the device: this is fragmentation, since "
        "120.00 MiB would do in one piece; try expandable_segments:True, under which a replay on "
        "330.00 MiB refuses nothing."
    )


def test_where_expandable_segments_are_in_force_they_are_not_what_is_tried():
    def program(allocator: bfc.Allocator) -> list[Any]:
        kept = [allocator.allocate(15 * MIB) for _ in range(20)]
        for block in kept[::2]:
            block.free()
        refuse(allocator, 100 * MIB)
        return kept

    found = found_in(program, "expandable_segments:True")
    assert (found.cause, found.largest_free) == ("pieces", 15 * MIB)
    assert "`bfc advise` with --device 330.00MiB" in found.to_try


def test_what_others_keep_is_no_fragmentation():
    found = found_in(other_stream)
    assert (found.cause, found.free_in_segments) == ("elsewhere", 0)
    assert found.free_elsewhere == 90 * MIB
    assert "fewer streams" in found.sentence


def test_the_device_is_too_small():
    found = found_in(too_small)
    assert (found.cause, found.reserved, found.free_in_segments) == ("capacity", 300 * MIB, 0)
    assert (found.most_line.split(" in ")[0][:16], found.most_bytes) == (
        "test_ran_out.py:",
        300 * MIB,
    )
    assert "50.00 MiB would be missing" in found.sentence
    assert "expandable" not in found.sentence


def test_one_request_is_larger_than_everything():
    found = found_in(huge)
    assert found.cause == "request"
    assert "more than there is, 330.00 MiB in all" in found.sentence


def test_a_limit_of_the_programs_is_named():
    found = found_in(under_a_limit)
    assert (found.cause, found.free_on_device) == ("limit", 270 * MIB)
    assert "set_per_process_memory_fraction" in found.to_try


def test_of_several_refusals_it_is_the_one_that_ended_the_run_or_the_first():
    found = found_in(caught)
    assert (found.went_on, found.refusals, found.nbytes) == (True, 2, 1000 * MIB)
    assert "(the first of 2 refusals; the program went on)" in found.sentence
    ended = found_in(caught_and_ended)
    assert (ended.went_on, ended.refusals, ended.nbytes) == (False, 3, 80 * MIB)
    assert "(after 2 refusals that it survived)" in ended.sentence


@pytest.mark.parametrize("how", ["not recorded", "not read", "anonymised"])
def test_without_stacks_it_says_that_the_line_is_not_known(how: str):
    trace = {
        "not recorded": lambda: run_of(pieces, context=None),
        "not read": lambda: run_of(pieces, frames=False),
        "anonymised": lambda: run_of(pieces).anonymised(),
    }[how]()
    found = ran_out(trace)
    assert found is not None
    assert (found.line, found.most_line, found.cause) == ("", "", "pieces")
    assert "(the recording does not say by which line)" in found.sentence


def test_the_history_of_tensorflows_policy():
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator(CAPACITY), allow_growth=True)
    allocator.record_history()
    kept = [allocator.allocate(30 * MIB) for _ in range(10)]
    for block in kept[::2]:
        block.free()
    refuse(allocator, 100 * MIB)
    found = ran_out(bfc.Trace.from_snapshot(allocator.snapshot()))
    assert found is not None
    assert found.cause == "pieces"
    assert "BFCAllocator(virtual_memory=True)" in found.to_try


def test_a_run_that_was_refused_nothing_says_nothing():
    assert ran_out(bfc.Trace([0], [0], [MIB])) is None
    assert ran_out(run_of(lambda allocator: [allocator.allocate(MIB)])) is None


@pytest.mark.parametrize("seed", range(40))
def test_what_was_free_is_what_the_allocator_has(seed: int):
    dice = Random(seed)
    settings = dice.choice(
        ["", "expandable_segments:True", "max_split_size_mb:40", "roundup_power2_divisions:4"]
    )
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator(CAPACITY), settings=settings)
    allocator.record_history(context=None)
    kept: list[Any] = []
    while True:
        size = dice.choice([dice.randint(1, MIB), dice.randint(MIB, 60 * MIB)])
        made = allocator.try_allocate(size, stream=dice.choice([0, 0, 3]))
        if made is None:
            break
        kept.append(made)
        if dice.random() < 0.45:
            kept.pop(dice.randrange(len(kept))).free()
    snapshot = allocator.snapshot()
    chunks = [chunk for region in snapshot.regions for chunk in region.chunks]
    free = [chunk.size for chunk in chunks if not chunk.in_use]
    # Where PyTorch has not split a small rest off, nothing in a history tells it from a free block.
    rest = sum(chunk.size - chunk.requested_size for chunk in chunks if chunk.in_use)
    rest = 0 if settings == "expandable_segments:True" else rest
    found = ran_out(bfc.Trace.from_snapshot(snapshot))
    assert found is not None, f"seed {seed}"
    figure = found.free_in_segments + found.free_elsewhere
    assert sum(free) <= figure <= sum(free) + rest, f"seed {seed}, {settings}"
    assert found.reserved == snapshot.stats.pool_bytes, f"seed {seed}"


def test_a_trace_from_before_calls_were_listed_and_one_that_was_damaged():
    trace = run_of(pieces)
    torch = {key: value for key, value in trace.meta["torch"].items() if key != "oom_calls"}
    found = ran_out(trace._with_meta({**trace.meta, "torch": torch}))
    assert found is not None
    assert (found.cause, found.line, found.free_in_segments) == ("pieces", "", 90 * MIB)
    for name in ("oom", "oom_calls", "addresses", "segments", "segment_events", "streams"):
        for odd in (None, 7, [[]], [["a", "b", "c"]], [[1 << 70] * 5]):
            damaged = trace._with_meta({**trace.meta, "torch": {**trace.meta["torch"], name: odd}})
            ran_out(damaged)  # None, or what it can say


def test_the_command_begins_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tmp_path / "run.npz"
    trace = run_of(pieces)
    trace.save(run)
    sentence = str(ran_out(trace))
    assert main(["report", str(run), "-o", str(tmp_path / "run.html")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == sentence
    main(["advise", str(run), "--device", "330MiB", "--jobs", "1"])
    first, answer, *_ = capsys.readouterr().out.splitlines()
    assert first == sentence
    assert answer.startswith("PyTorch 2.15: It fits on 330.00 MiB with expandable_segments:True")
    main(["advise", str(run), "--device", "330MiB", "--jobs", "1", "--json"])
    assert json.loads(capsys.readouterr().out)["ran_out"]["sentence"] == sentence
    (shown,) = data_of([("run", trace)])["ran_out"]
    assert (shown["trace"], shown["sentence"]) == ("run", sentence)
