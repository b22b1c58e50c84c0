"""Plans of recorded runs: what they say, that nothing overlaps however iterations follow each
other, and which files are refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repeated_runs import Block, Run, some_run, trace_of

import bfc
from bfc.plans import Part

MIB = 1 << 20
FOREVER = (1 << 32) - 1
RECORDING = Path(__file__).parents[1] / "recordings" / "rec_wedsonlin_medium_128_training.npz"


def training(iterations: int = 4, *, sizes: tuple[int, ...] = (8, 2, 4)) -> Run:
    """Two weights; then in each iteration three activations of `sizes` MiB, of which the second is
    freed in the next one. The first iteration makes the optimizer's state."""
    blocks = [Block(10 * MIB, 0, None), Block(6 * MIB, 1, None)]
    borders = []
    for number in range(iterations):
        borders.append((len(blocks), "train"))
        for position, size in enumerate(sizes):
            dies = len(blocks) + (2, 3 + (number == 0), 1)[position]
            blocks.append(Block(size * MIB, len(blocks), dies))
        if number == 0:
            blocks += [Block(16 * MIB, len(blocks), None)]
    for block in blocks:
        if block.dies is not None and block.dies > len(blocks):
            block.dies = None
    return trace_of(blocks, borders)


@pytest.mark.parametrize(
    "name", ["rec_bcrafton_snapshot", "rec_silmont2000_memory_forward_bf16_128"]
)
def test_iterations_that_are_guessed_hold_the_peak(name: str):
    """One size asked for again and again at the end of a run is no iteration, and what repeats
    after the peak is none that a plan could be made of."""
    plan = bfc.Plan.from_trace(bfc.Trace.load(RECORDING.with_name(f"{name}.npz")), marks="auto")
    assert plan.peak <= plan.span < 1.02 * plan.peak


def test_what_marked_iterations_leave_out_of_the_peak_is_not_saved():
    trace = bfc.Trace([0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 2, 2], [MIB, 0, 9 * MIB, 0, MIB, 0])
    plan = bfc.Plan.from_trace(trace, marks=[(0, "train"), (2, ""), (4, "train")])
    assert (plan.span, plan.peak) == (MIB, 9 * MIB)
    assert plan.budget == plan.online - plan.peak


def test_a_plan_has_at_most_64_kinds():
    trace = bfc.Trace([0, 1] * 65, [0, 0] * 65, [MIB, 0] * 65)
    marks = [(2 * i, f"step {i}") for i in range(65)]
    with pytest.raises(
        bfc.errors.PlanError, match="65 kinds of iterations, and a plan has at most 64"
    ):
        bfc.Plan.from_trace(trace, marks=marks)
    assert len(bfc.Plan.from_trace(trace, marks=marks[:64]).kinds) == 64


def test_a_plan_has_at_most_64_streams(tmp_path: Path):
    """Each has bins of its own where the plan is served: 100 KB."""
    streams = range(65)
    trace = bfc.Trace([0] * 65, list(streams), [MIB] * 65, stream=list(streams))
    with pytest.raises(bfc.PlanError, match="65 streams, and a plan has at most 64"):
        bfc.Plan.from_trace(trace)
    path = tmp_path / "plan.npz"
    bfc.Plan.from_trace(bfc.Trace([0] * 65, list(streams), [MIB] * 65)).save(path)
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **(arrays | {"stream": np.arange(65, dtype=np.uint16)}))
    with pytest.raises(bfc.PlanError, match="65 streams, and a plan has at most 64"):
        bfc.Plan.load(path)


def test_a_plan_says_what_a_run_needs():
    run = training()
    plan = bfc.Plan.from_trace(run.trace, marks=run.marks)
    assert plan.kinds == ("train",)
    assert [(part.role, len(part)) for part in plan.parts] == [
        ("head", 2),
        ("body", 3),
        ("late", 1),
    ]
    assert plan.base == (10 + 6 + 16) * MIB
    assert plan.span == plan.bound == plan.peak
    assert plan.online >= plan.span
    assert plan.budget == plan.online - plan.span
    assert str(plan).startswith("head 2 slots, train 3 (3 of 3 agree), span 42.00 MiB = 1.0000 of")
    assert "caching reserved" in str(plan)
    assert repr(plan) == "<bfc.Plan, 6 slots, 42.00 MiB>"


def test_marks_may_be_numbers_or_in_the_trace():
    run = training()
    events = [event for event, _ in run.marks]
    named = bfc.Trace(
        run.trace.op, run.trace.id, run.trace.size, meta={"marks": [list(m) for m in run.marks]}
    )
    plans = [
        bfc.Plan.from_trace(run.trace, marks=run.marks),
        bfc.Plan.from_trace(run.trace, marks=events),
        bfc.Plan.from_trace(run.trace, marks=events, kinds=["train"] * 4),
        bfc.Plan.from_trace(named),
    ]
    assert len({str(plan) for plan in plans}) == 1
    assert bfc.Plan.from_trace(named, marks=[]).kinds == ()


def test_a_length_is_part_of_a_mark_and_not_of_the_kind():
    run = training()
    marks = [(event, f"step:{128 * i}") for i, (event, _) in enumerate(run.marks)]
    assert bfc.Plan.from_trace(run.trace, marks=marks).kinds == ("step",)


def test_nothing_is_planned_after_a_mark_without_a_kind():
    run = training(5)
    marks = [*run.marks[:3], (run.marks[3][0], "")]
    plan = bfc.Plan.from_trace(run.trace, marks=marks)
    assert plan.parts[1].recorded == 3


def test_the_largest_iteration_stands_for_those_that_do_not_repeat():
    blocks, borders, dice = [], [], random.Random(1)
    for number in range(6):
        borders.append((len(blocks), "step"))
        for _ in range(4):
            blocks.append(Block(dice.randrange(1, 51) * MIB, len(blocks), 4 * number + 4))
    run = trace_of(blocks, borders)
    plan = bfc.Plan.from_trace(run.trace, marks=run.marks)
    [body] = plan.parts[1:]
    assert body.agreement < 0.95
    peaks = [sum(block.size for block in blocks[i : i + 4]) for i in range(0, 20, 4)]
    assert plan.body == max(peaks[-3:])


def test_a_slot_stays_that_two_of_three_iterations_have():
    """The second of three lacks a request, which the plan has, and the third has one more."""
    blocks, borders = [], []
    for number in range(4):
        borders.append((len(blocks), "train"))
        for position in range(80):
            if (number, position) == (1, 40):
                continue
            size = (position * 13 % 37 + 1) * 64 * 1024
            blocks.append(Block(size, len(blocks), len(blocks) + 2))
            if (number, position) == (2, 20):
                blocks.append(Block(99 * MIB // 8, len(blocks), len(blocks) + 1))
    blocks[-1].dies = len(blocks)
    run = trace_of(blocks, borders)
    [body] = bfc.Plan.from_trace(run.trace, marks=run.marks).parts[1:]
    assert len(body) == 80
    assert body.size.tolist() == [(i * 13 % 37 + 1) * 64 * 1024 for i in range(80)]
    assert (body.agreeing, body.recorded) == (3, 3)


def test_iterations_are_found_from_sizes():
    """Layers repeat within an iteration, too."""
    blocks: list[Block] = [Block(40 * MIB, 0, None)]
    begins = []
    for _ in range(4):
        begins.append(len(blocks))
        length = 8 * 12 + 7
        for position in range(length):
            size = (position % 12 + 1) * MIB if position < 96 else (position - 60) * MIB
            dies = begins[-1] + min(position + 9, length)
            blocks.append(Block(size, len(blocks), dies))
    run = trace_of(blocks, [(begin, "train") for begin in begins])
    plan = bfc.Plan.from_trace(run.trace, marks="auto")
    [_, body] = plan.parts
    assert len(body) == 103
    assert plan.span == bfc.Plan.from_trace(run.trace, marks=run.marks).span == plan.bound
    assert bfc.Plan.from_trace(training(2).trace, marks="auto").kinds == ()


def test_each_stream_has_places_of_its_own_under_pytorchs_policy():
    """One stream's block dies before the other's is born."""
    run = trace_of([Block(4 * MIB, 0, 1, 0), Block(4 * MIB, 1, 2, 1)], [])
    assert bfc.Plan.from_trace(run.trace).span == 8 * MIB
    assert bfc.Plan.from_trace(run.trace, fallback="bfc").span == 4 * MIB


def test_sizes_are_rounded_as_the_fallback_does():
    trace = bfc.Trace([0], [0], [(9 << 20) + 1])
    assert bfc.Plan.from_trace(trace).span == (9 << 20) + 512
    assert bfc.Plan.from_trace(trace, fallback="bfc").span == (9 << 20) + 256
    rounded = bfc.Plan.from_trace(trace, settings="roundup_power2_divisions:4")
    assert rounded.span == 10 << 20


def test_what_a_recording_rebuilds_between_its_blocks_is_not_planned():
    trace = bfc.Trace.load(RECORDING)
    plan = bfc.Plan.from_trace(trace)
    assert plan.peak < plan.span + 1 <= 1.002 * plan.peak
    assert len(plan.parts[0]) == 7190
    assert plan.online > plan.span


# Nothing overlaps ----------------------------------------------------------------------------


def served(plan: bfc.Plan, kinds: list[str]) -> Iterator[list[tuple[int, int]]]:
    """The places of what lives at each request, if the head is served, and then iterations of these
    kinds. Written from what the attributes of `Part` mean, and nothing else."""
    bodies = {part.kind: part for part in plan.parts if part.role == "body"}
    late = {part.kind: part for part in plan.parts if part.role == "late"}
    live: dict[
        tuple[str, int], tuple[int, int, float]
    ] = {}  # place, and before which request it goes
    now = 0
    turns = [plan.parts[0], *(bodies[kind] for kind in kinds)]
    for part, following in zip(turns, [*turns[1:], turns[-1]], strict=True):
        if part.kind in late:
            for slot, place in enumerate(places(late.pop(part.kind))):
                live["late " + part.kind, slot] = (*place, np.inf)
        begun = now
        for request, place in enumerate(places(part)):
            over, end = int(part.over[request]), int(part.end[request])
            dies = np.inf if over == FOREVER else begun + end + min(over, len(following))
            live = {name: block for name, block in live.items() if block[2] > now}
            # A block that still lives from the iteration before keeps its place: this one has none.
            live.setdefault((part.kind, request), (*place, dies))
            yield [(low, high) for low, high, _ in live.values()]
            now += 1


def places(part: Part) -> list[tuple[int, int]]:
    return [
        (low, low + size)
        for low, size in zip(part.offset.tolist(), part.size.tolist(), strict=True)
    ]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(40))
def test_nothing_overlaps_however_iterations_follow_each_other(seed: int):
    dice = random.Random(seed)
    run = some_run(dice, streams=dice.randint(1, 3))
    fallback = dice.choice(("caching", "bfc"))
    plan = bfc.Plan.from_trace(run.trace, marks=run.marks, fallback=fallback)
    kinds = [dice.choice(plan.kinds) for _ in range(6)]
    for live in served(plan, kinds):
        ordered = sorted(live)
        for (_, end), (begin, _) in itertools.pairwise(ordered):
            assert end <= begin, f"seed {seed}"
        assert all(high <= plan.base or low >= plan.base for low, high in live), f"seed {seed}"
        assert all(high <= plan.span for _, high in live)
    assert plan.bound <= plan.span <= max(1.05 * plan.bound, plan.bound + MIB)


# Files ---------------------------------------------------------------------------------------


def saved(tmp_path: Path, **changes: Any) -> Path:
    """The file of a plan, with some of its arrays changed."""
    run = training()
    path = tmp_path / "plan.npz"
    bfc.Plan.from_trace(run.trace, marks=run.marks).save(path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    for name, change in changes.items():
        arrays[name] = change(arrays[name])
    np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
    return path


def described(**changes: Any) -> Any:
    """A change of the description in a file."""

    def change(text: np.ndarray) -> np.ndarray:
        return np.array(json.dumps(json.loads(str(text)) | changes))

    return change


def with_item(index: int, value: int) -> Any:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array[index] = value
        return array

    return change


def test_a_plan_comes_back_from_its_file(tmp_path: Path):
    run = some_run(random.Random(3), streams=2)
    plan = bfc.Plan.from_trace(run.trace, marks=run.marks)
    plan.save(tmp_path / "plan.npz")
    loaded = bfc.Plan.load(tmp_path / "plan.npz")
    assert str(loaded) == str(plan)
    for ours, theirs in zip(plan.parts, loaded.parts, strict=True):
        for name in Part.__annotations__:
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name


def test_a_file_that_exists_is_replaced_as_a_whole(tmp_path: Path):
    path = saved(tmp_path)
    before = path.read_bytes()
    os.chmod(tmp_path, 0o500)
    try:
        if os.geteuid():  # root may write anywhere
            with pytest.raises(OSError, match="plan"):
                bfc.Plan.load(path).save(path)
    finally:
        os.chmod(tmp_path, 0o700)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"plan": lambda _: None}, "holds no array 'plan'"),
        ({"end": lambda _: None}, "holds no array 'end'"),
        ({"plan": lambda _: np.array("{")}, "not JSON"),
        ({"plan": lambda _: np.array("[]")}, "not a plan of bfc"),
        ({"plan": described(format="trace")}, "not a plan of bfc"),
        ({"plan": described(version=1)}, "version 1, and this bfc reads version 5"),
        ({"plan": described(fallback="none")}, "lacks the parts, the fallback or the settings"),
        ({"plan": described(parts=7)}, "lacks the parts"),
        ({"plan": described(parts=[{}] * 130)}, "130 parts, and a plan has at most 64 kinds"),
        ({"plan": described(peak=0)}, "nothing was ever live"),
        ({"plan": described(parts=[])}, "numbers of type|not a head"),
        ({"plan": described(base=-1)}, "not whole, or not below"),
        ({"plan": described(base=1 << 60)}, "not whole, or not below"),
        ({"plan": described(base=0.5)}, "not whole, or not below"),
        ({"plan": described(body=0)}, "outside of the regions"),
        ({"plan": described(base=512)}, "outside of the regions, or in both"),
        ({"size": lambda array: array[1:]}, "size is not an array of 6 numbers"),
        ({"end": lambda array: array.astype(np.uint64)}, "end is not an array"),
        ({"size": with_item(0, 0)}, "empty"),
        ({"size": with_item(0, (1 << 64) - 512)}, "2\\*\\*60 bytes or more"),
        ({"offset": with_item(0, (1 << 64) - 512)}, "2\\*\\*60 bytes or more"),
        ({"size": with_item(0, 700)}, "multiples of 512"),
        ({"end": with_item(2, 0)}, "ends before it begins"),
        ({"end": with_item(2, 99)}, "ends before it begins, or behind"),
        ({"over": with_item(2, 1)}, "outlives it, and ends in it"),
        ({"over": with_item(4, FOREVER)}, "wrong part"),
        ({"over": with_item(5, 0)}, "wrong part"),
        ({"offset": lambda array: array * np.uint64(0)}, "lies in|overlap"),
        ({"offset": with_item(1, 0)}, "overlap while both live"),
    ],
)
def test_files_that_are_not_plans_are_refused_in_words(tmp_path: Path, changes, fault: str):
    path = saved(tmp_path, **changes)
    with pytest.raises(bfc.PlanError, match=fault) as raised:
        bfc.Plan.load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_list_of_files_that_lies_outside_of_the_file_is_refused(tmp_path: Path):
    """The system answers such a seek with an error that has no name of a file."""
    path = tmp_path / "plan.npz"
    bfc.Plan.from_trace(bfc.Trace([0, 0, 1], [0, 1, 0], [1000, 300, 0])).save(path)
    content = bytearray(path.read_bytes())
    end = content.rindex(b"PK\5\6")
    content[end + 16 : end + 20] = b"\xf0\xff\xff\xff"
    path.write_bytes(content)
    with pytest.raises(bfc.PlanError, match=r"plan\.npz: it is damaged"):
        bfc.Plan.load(path)


def test_damaged_files_are_refused_in_words(tmp_path: Path):
    path = saved(tmp_path)
    content = path.read_bytes()
    dice = random.Random(1)
    for _ in range(200):
        damaged = bytearray(content)
        for _ in range(dice.randint(1, 4)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        path.write_bytes(
            bytes(damaged[: dice.choice((len(content), dice.randrange(len(content))))])
        )
        with contextlib.suppress(bfc.PlanError):
            bfc.Plan.load(path)
    (tmp_path / "text").write_text("not an archive")
    with pytest.raises(bfc.PlanError, match=r"not an \.npz archive"):
        bfc.Plan.load(tmp_path / "text")
    with pytest.raises(bfc.PlanError, match="a folder"):
        bfc.Plan.load(tmp_path)
    with pytest.raises(FileNotFoundError):
        bfc.Plan.load(tmp_path / "missing")


def test_nothing_in_a_file_is_executed(tmp_path: Path):
    path = saved(tmp_path)
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    arrays["size"] = np.array([print] * 6, object)
    np.savez(path, **arrays)
    with pytest.raises(bfc.PlanError, match="Object arrays cannot be loaded"):
        bfc.Plan.load(path)


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch):
    path = saved(tmp_path, size=lambda _: np.zeros((1 << 24) + 1024, np.uint64))
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *_: pytest.fail("it was unpacked"))
    with pytest.raises(bfc.PlanError, match="size unpacks to"):
        bfc.Plan.load(path)


# Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"marks": [5, 5]}, "marks rise"),
        ({"marks": [-1]}, "marks rise"),
        ({"marks": [1 << 40]}, "the trace has"),
        ({"marks": ["one"]}, "marks are the numbers of events"),
        ({"marks": [(1, 2, 3)]}, "marks are the numbers of events"),
        ({"marks": [(1, 2)]}, "a kind of iteration is a text"),
        ({"marks": 7}, "marks are the numbers of events"),
        ({"marks": [1], "kinds": []}, "0 kinds for 1 marks"),
    ],
)
def test_wrong_marks_are_refused_in_words(arguments, fault: str):
    with pytest.raises(bfc.PlanError, match=fault):
        bfc.Plan.from_trace(training().trace, **arguments)


def test_what_cannot_be_planned_is_refused_in_words():
    trace = training().trace
    with pytest.raises(ValueError, match="'caching' or 'bfc'"):
        bfc.Plan.from_trace(trace, fallback="torch")
    with pytest.raises(ValueError, match="'auto'"):
        bfc.Plan.from_trace(trace, marks="all")
    with pytest.raises(bfc.SettingsError):
        bfc.Plan.from_trace(trace, settings="max_split_size_mb:no")
    with pytest.raises(bfc.PlanError, match="asks for no memory"):
        bfc.Plan.from_trace(bfc.Trace([0], [0], [0]))
    with pytest.raises(bfc.PlanError, match="2\\*\\*60"):
        bfc.Plan.from_trace(bfc.Trace([0], [0], [(1 << 63) - 1]))
    with pytest.raises(bfc.PlanError, match="units live at once"):
        bfc.Plan.from_trace(bfc.Trace([0], [0], [1 << 50]))
    with pytest.raises(TypeError, match="from_trace"):
        bfc.Plan()


def test_empty_requests_and_releases_have_no_slot():
    trace = bfc.Trace([0, 0, 2, 1, 1], [0, 1, 0, 0, 1], [0, 1000, 0, 0, 0])
    plan = bfc.Plan.from_trace(trace, marks=[0])
    assert sum(map(len, plan.parts)) == 1
