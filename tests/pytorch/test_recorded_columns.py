"""Time, stacks and owners of a recording."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch_dumps import MIB, event, free, read, recording, segment

import bfc
from bfc.pytorch.owners import is_the_users

MAIN = {"filename": "/home/me/train.py", "line": 12, "name": "main"}
STEP = {"filename": "/home/me/model.py", "line": 34, "name": "forward"}
LINEAR = {"filename": "/opt/lib/site-packages/torch/nn/linear.py", "line": 5, "name": "forward"}
MALLOC = {"filename": "??", "line": 0, "name": "c10::malloc()"}
EMPTY = segment((2 * MIB, -1))


def test_each_event_has_the_time_of_its_entry():
    events = [event("alloc", time_us=50), *free()]
    events[1]["time_us"], events[2]["time_us"] = 60, 70
    trace = read(recording([EMPTY], events))
    first = trace.meta["torch"]["first_recorded_event"]
    assert trace.time_us[first:].tolist() == [50, 70]
    assert set(trace.time_us[:first].tolist()) == {50}  # what was before is as old as the first


@pytest.mark.parametrize("time", [None, -1, 1.5, 2**64, "now"])
def test_a_time_that_is_none_is_0(time: Any):
    trace = read(recording([segment((2 * MIB, 1000))], [event("alloc", time_us=time)]))
    assert trace.time_us is None


def test_stacks_are_a_tree_of_shared_frames():
    stacks = [[MALLOC, STEP, MAIN], [MALLOC, LINEAR, STEP, MAIN], [MALLOC, STEP, MAIN]]
    events = [event("alloc", n << 21, 2 * MIB, frames=frames) for n, frames in enumerate(stacks)]
    live = [segment((2 * MIB, 2 * MIB), addr=n << 21) for n in range(3)]
    trace = read(recording(live, events))
    assert trace.stack[-3] == trace.stack[-1] != trace.stack[-2]
    assert len(trace.frames) == 4
    assert len(trace.stacks) == 1 + 5
    at = len(trace) - 2
    names = ["c10::malloc()", "forward", "forward", "main"]
    assert [frame.name for frame in trace.frames_of(at)] == names
    assert trace.frames_of(at)[-1] == ("/home/me/train.py", 12, "main")


def test_a_block_from_before_has_the_frames_that_the_file_says():
    held = segment((2 * MIB, 1000))
    held["blocks"][0]["frames"] = [STEP, MAIN]
    trace = read(recording([held], []))
    assert trace.frames_of(len(trace) - 1)[0].name == "forward"
    assert trace.owners[trace.owner[-1]] == "train.py:12 in main"


def test_frames_may_be_left_out():
    events = [event("alloc", frames=[STEP, MAIN], user_metadata="cache")]
    content = recording([segment((2 * MIB, 1000))], events)
    trace = read(content, frames=False)
    assert (trace.stack, len(trace.frames), len(trace.stacks)) == (None, 0, 1)
    assert trace.owners == ("", "cache")


def owner(*frames: Any, rules: Any = None, **rest: Any) -> str:
    events = [event("alloc", frames=list(frames), **rest), *free()]
    trace = read(recording([EMPTY], events), owners=rules)
    if trace.owner is None:
        return ""
    assert trace.owner[-1] == trace.owner[-2]  # a free is its allocation's
    return trace.owners[trace.owner[-1]]


def test_an_owner_is_the_outermost_frame_of_the_users_code():
    assert owner(MALLOC, LINEAR, STEP, MAIN) == "train.py:12 in main"
    assert owner(MALLOC, LINEAR, STEP, LINEAR) == "model.py:34 in forward"
    assert owner(MALLOC, LINEAR) == ""
    assert owner() == ""


def test_rules_go_before_it_and_the_entrys_own_word_before_rules():
    rules = {"*/model*.py": "model", "train.py": "rest"}
    assert owner(MALLOC, STEP, MAIN, rules=rules) == "model"
    assert owner(MALLOC, MAIN, rules=rules) == "rest"
    assert owner(MALLOC, STEP, MAIN, rules={"/other/": "other"}) == "train.py:12 in main"
    assert owner(MALLOC, STEP, rules=rules, user_metadata="kv cache") == "kv cache"


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("/home/me/train.py", True),
        ("train.py", True),
        ("C:\\me\\train.py", True),
        ("<ipython-input-3-abc>", True),
        ("/opt/venv/lib/python3.11/site-packages/vllm/engine.py", False),
        ("C:\\Python\\Lib\\site-packages\\torch\\a.py", False),
        ("/usr/lib/python3.11/runpy.py", False),
        ("/build/pytorch/torch/nn/module.py", False),
        ("<frozen runpy>", False),
        ("Module.cpp", False),
        ("??", False),
        ("", False),
    ],
)
def test_what_is_the_users_own_code(filename: str, expected: bool):
    assert is_the_users(filename) == expected


@pytest.mark.parametrize(
    "frames", [7, "abc", {}, [None, 3, [], {}], [{"filename": 1, "line": 2, "name": 3}], (MAIN,)]
)
def test_frames_of_an_odd_kind_are_none(frames: Any):
    trace = read(recording([segment((2 * MIB, 1000))], [event("alloc", frames=frames)]))
    assert trace.stack is None


@pytest.mark.parametrize("line", [-1, 1 << 32, None, 1.5, 2**70])
def test_a_line_that_is_none_is_0(line: Any):
    frames = [{"filename": "a.py", "line": line, "name": "b"}]
    trace = read(recording([segment((2 * MIB, 1000))], [event("alloc", frames=frames)]))
    assert trace.frames_of(len(trace) - 1) == (("a.py", 0, "b"),)


def test_more_owners_than_there_is_room_for_have_none():
    count = (1 << 16) + 10
    events = []
    for number in range(count):
        events += [event("alloc", user_metadata=f"owner {number}"), *free()]
    trace = read(recording([EMPTY], events))
    assert len(trace.owners) == 1 << 16
    assert trace.owner[-1] == 0


def test_a_long_history_makes_no_object_for_a_frame_of_a_stack():
    """40 frames for each of 20,000 entries: as lists of the file they are there before, as a table
    they are its 41 rows."""
    frames = [{"filename": "a.py", "line": n, "name": "f"} for n in range(40)]
    events = [event("segment_alloc", 0, 2 * MIB)]
    for _ in range(5000):
        events += [event("alloc", frames=list(frames)), *free()]
    trace = read(recording([EMPTY], events))
    assert len(trace.stacks) == 41
    assert len(trace.frames) == 40
    assert len(pickle.dumps(trace)) < 60 * len(trace)


def test_our_own_frames_come_back():
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    pool.record_history(context="all")
    pool.deallocate_raw(pool.allocate_raw(1000))
    trace = read(pool.snapshot().to_torch())
    name = test_our_own_frames_come_back.__name__
    assert any(frame.name == name for frame in trace.frames_of(0))


HOSTILE = """
import resource, sys
import numpy
import bfc
import bfc.pytorch.reader

bfc.Trace([0], [0], [1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
trace = bfc.Trace.from_torch(sys.argv[1])
print(len(trace.stacks), 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
"""


def test_a_file_full_of_stacks_takes_at_most_a_hundred_times_its_size(tmp_path: Path):
    """Two bytes a frame, and no two stacks alike: what a table of them takes that is in C++."""
    dice = random.Random(1)
    frames = [{"filename": "f", "line": line, "name": "f"} for line in range(200)]
    lists = [dice.choices(frames, k=200_000) for _ in range(9)]
    content = {"frames": frames, "device_traces": [[{"action": "x", "frames": f} for f in lists]]}
    path = tmp_path / "stacks.pickle"
    path.write_bytes(pickle.dumps(content, 4))
    said = subprocess.check_output([sys.executable, "-c", HOSTILE, str(path)], text=True)
    stacks, taken = map(int, said.split())
    assert stacks > 1_500_000
    assert taken < 100 * path.stat().st_size
