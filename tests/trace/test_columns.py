"""Time, owner and stack of a trace's events, and their tables."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bfc
from bfc.trace import FrameTable

FRAMES = [("train.py", 7, "main"), ("model.py", 3, "forward"), ("model.py", 9, "backward")]
STACKS = [(0, 0), (0, 0), (1, 1), (1, 2)]


def some(**other: Any) -> bfc.Trace:
    columns: dict[str, Any] = {
        "op": [0, 0, 1, 2],
        "id": [0, 1, 0, 0],
        "size": [1000, 300, 0, 0],
        "time_us": [5, 6, 7, 2**60],
        "owner": [1, 2, 1, 0],
        "stack": [2, 3, 1, 0],
        "owners": ["", "weights", "kv cache \u00e9\ud800"],
        "frames": FRAMES,
        "stacks": STACKS,
    }
    return bfc.Trace(**(columns | other))


def test_columns_have_their_types_and_cannot_be_changed():
    trace = some()
    for name, dtype in (("time_us", np.uint64), ("owner", np.uint16), ("stack", np.uint32)):
        column = getattr(trace, name)
        assert column.dtype == dtype
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
        with pytest.raises(AttributeError):
            setattr(trace, name, column)
    with pytest.raises(ValueError, match="read-only"):
        trace.stacks[0, 0] = 1
    assert trace.time_us.tolist() == [5, 6, 7, 2**60]
    assert trace.owners[2] == "kv cache \u00e9\ud800"


def test_a_trace_without_them_has_none():
    trace = bfc.Trace([0], [0], [1])
    assert (trace.time_us, trace.owner, trace.stack, trace.owners) == (None, None, None, ())
    assert len(trace.frames) == 0
    assert trace.stacks.tolist() == [[0, 0]]
    assert trace.frames_of(0) == ()


def test_frames_are_made_when_they_are_looked_at():
    trace = some()
    assert list(trace.frames) == [bfc.Frame(*frame) for frame in FRAMES]
    assert trace.frames[-1].name == "backward"
    assert trace.frames[1:] == [bfc.Frame(*frame) for frame in FRAMES[1:]]
    assert [frame.name for frame in trace.frames_of(0)] == ["forward", "main"]
    assert trace.frames_of(3) == ()
    assert trace.frames == FRAMES
    assert trace.frames != FRAMES[:2]
    with pytest.raises(IndexError):
        trace.frames[3]


def everything(trace: bfc.Trace) -> list[Any]:
    columns = [trace.op, trace.id, trace.size, trace.stream, trace.time_us, trace.owner]
    columns += [trace.stack, trace.stacks]
    return [*(column.tolist() for column in columns), trace.owners, list(trace.frames), trace.meta]


def test_they_survive_a_file_a_copy_and_a_pickle(tmp_path: Path):
    trace = some(meta={"source": "a test"})
    trace.save(tmp_path / "one.npz")
    loaded = bfc.Trace.load(tmp_path / "one.npz")
    others = [copy.copy(trace), copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))]
    for other in (loaded, *others):
        assert everything(other) == everything(trace)


def test_a_part_and_a_closed_trace_keep_them():
    part = some()[:2]
    assert part.time_us.tolist() == [5, 6]
    assert part.frames_of(1)[0].name == "backward"
    closed = some().closed()
    assert closed.op.tolist() == [0, 0, 1, 2, 1]
    assert closed.owner.tolist() == [1, 2, 1, 0, 2]
    assert closed.stack.tolist() == [2, 3, 1, 0, 0]
    assert closed.time_us.tolist() == [5, 6, 7, 2**60, 2**60]


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"time_us": [1]}, "time_us has 1 numbers for 4 events"),
        ({"time_us": [-1] * 4}, "time_us holds numbers outside"),
        ({"owner": [3, 0, 0, 0]}, "owner holds 3: there are 3 of them"),
        ({"owner": [1] * 4, "owners": []}, "owner holds 1: there are 0 of them"),
        ({"owner": [1 << 16] * 4}, "owner holds numbers outside"),
        ({"stack": [4] * 4}, "stack holds 4: there are 4 of them"),
        ({"stack": [0.5] * 4}, "stack holds float64"),
        ({"stacks": [(0, 1), (0, 0)], "stack": None}, "stack 0 is the empty one"),
        ({"stacks": [(0, 0), (1, 0)], "stack": None}, "parent must stand before it"),
        ({"stacks": [(0, 0), (0, 3)], "stack": None}, "names a frame that is not there"),
        ({"stacks": [0, 0], "stack": None}, "rows of two"),
        ({"stacks": [(0, 0), (-1, 0)], "stack": None}, "stacks hold numbers outside"),
        ({"owners": "abc"}, "owners are str"),
        ({"owners": ["", 1, "c"]}, "owners are str"),
        ({"frames": [("a", -1, "b")], "stacks": [], "stack": None}, "a frame has the line -1"),
    ],
)
def test_what_is_in_no_table_is_refused(other: dict[str, Any], fault: str):
    with pytest.raises(bfc.TraceError, match=fault):
        some(**other)


def saved(path: Path, **other: Any) -> Path:
    some().save(path)
    with np.load(path) as arrays:
        kept = dict(arrays)
    kept.update(other)
    np.savez(path, **{name: array for name, array in kept.items() if array is not None})
    return path


@pytest.mark.parametrize(
    ("other", "fault"),
    [
        ({"frames": None}, "only a part of"),
        ({"frame_text_ends": np.array([3, 1, 2])}, "do not end where"),
        ({"frame_text_ends": np.array([3.5, 1, 2])}, "something other than its numbers"),
        ({"frame_texts": np.array([300, 1])}, "something other than its numbers"),
        ({"frames": np.array([[0, 0, 99]])}, "names a text that is not there"),
        ({"frames": np.array([0, 0, 1])}, "not texts, their ends, and rows"),
        ({"owners": np.array("{}")}, "not a list of texts"),
        ({"owners": np.array("[")}, "its owners is not JSON"),
        ({"owners": np.array("[1, 2, 3]")}, "owners are str"),
        ({"stacks": np.array([[0, 0], [5, 0]])}, "parent must stand before it"),
        ({"owner": np.array([9, 0, 0, 0])}, "owner holds 9"),
        ({"time_us": np.array([9])}, "time_us has 1 numbers"),
        ({"address": np.zeros(9, np.uint64)}, "address has 9 numbers for 4 events"),
        ({"torch_addresses": np.zeros(9, np.uint64)}, "torch_addresses has 9 numbers for 4"),
        ({"stacks": np.array([["a", "b"]])}, "rows of two integers"),
    ],
)
def test_a_hostile_file_is_one_line(tmp_path: Path, other: dict[str, Any], fault: str):
    path = saved(tmp_path / "one.npz", **other)
    with pytest.raises(bfc.TraceError, match=fault) as caught:
        bfc.Trace.load(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_text_that_is_no_utf_8_can_be_looked_at():
    table = FrameTable.of_arrays(
        np.array([255, 97], np.uint8), np.array([1, 2], np.uint64), np.array([[0, 5, 1]], np.uint32)
    )
    assert table[0] == ("\\xff", 5, "a")


def test_other_integer_types_are_read(tmp_path: Path):
    path = saved(tmp_path / "one.npz", owner=np.array([1, 2, 1, 0], np.int64))
    assert everything(bfc.Trace.load(path)) == everything(some())
