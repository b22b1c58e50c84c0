"""Entries and lists of frames are packed while a file is read. No trace can tell: it is the one of
a reading that packs nothing. And the reading takes little memory for the file's size."""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from torch_dumps import recorded
from waiting import run_all

import bfc
import bfc.pytorch.plain_pickle as plain_pickle
import bfc.pytorch.reader as reader

#: What PyTorch writes, and what only others do: it stays a dict or a list, and is looked at.
ODD_FRAMES: tuple[Any, ...] = (
    None,
    "frames",
    7,
    [7],
    [{"name": "no file"}],
    [{"filename": "a.py", "line": -1, "name": "f"}, None],
    ({"filename": "torch/cuda/memory.py", "line": 3, "name": "empty_cache"},),
)
ODD_VALUES: tuple[Any, ...] = (None, "text", -1, 1 << 63, 1 << 64, 2.5, [], [0, 0], (0, 3), (1,))
NAMES = ("addr", "size", "stream", "time_us", "action", "pool_id", "user_metadata", "frames")


def content_of(dice: random.Random, seed: int) -> dict[str, Any]:
    """A snapshot with stacks, of two devices at times, some of it odd."""
    frames = [
        {"filename": f"/home/me/{number % 7}.py", "line": number, "name": f"f{number}"}
        for number in range(40)
    ]
    frames += [{"filename": "torch/cuda/memory.py", "line": 3, "name": "empty_cache"}]
    lists = [dice.sample(frames, dice.randrange(12)) for _ in range(30)]
    lists += [frames[:1], frames * 30, []]
    content = recorded(seed, 40).snapshot(dice.choice([None, 10, 30]))
    parts = [*content["device_traces"][0]]
    parts += [block for one in content["segments"] for block in one["blocks"]]
    for part in parts:
        part["frames"] = dice.choice(lists) if dice.random() < 0.5 else list(dice.choice(lists))
        if dice.random() < 0.3:
            part["user_metadata"] = dice.choice(["a", "b", "c"])
        if dice.random() < 0.2:
            part["pool_id"] = dice.choice([(0, 0), (0, 1), [0, 0]])
    if dice.random() < 0.3:
        dice.choice(parts)["frames"] = dice.choice(ODD_FRAMES)
    if dice.random() < 0.3:
        dice.choice(parts)[dice.choice(NAMES)] = dice.choice(ODD_VALUES)
    if dice.random() < 0.2 and content["device_traces"][0]:
        content["device_traces"][0].append(dice.choice(content["device_traces"][0]))
    if dice.random() < 0.3:
        content["device_traces"].append([dict(one) for one in content["device_traces"][0]])
    return content


def written(dice: random.Random, content: dict[str, Any]) -> bytes:
    data = pickle.dumps(content, dice.choice([2, 4]))
    return pickletools.optimize(data) if dice.random() < 0.3 else data


def facts(data: bytes, frames: bool) -> Any:
    """All that is read, or why nothing is."""
    try:
        trace = bfc.Trace.from_torch(io.BytesIO(data), device=0, frames=frames)
    except bfc.TraceError as error:
        return str(error)
    found = trace._columns() | {"frames": [*trace.frames], "meta": trace.meta}
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in found.items()
    }


@pytest.mark.long
def test_a_trace_is_the_same_whether_entries_are_packed(monkeypatch):
    refused = 0
    for seed in range(200):
        dice = random.Random(seed)
        data = written(dice, content_of(dice, seed))
        for frames in (True, False):
            packed = facts(data, frames)
            with monkeypatch.context() as patch:
                patch.setattr(reader, "loads", lambda data, packer: plain_pickle.loads(data))
                assert facts(data, frames) == packed, f"seed {seed}, frames={frames}"
            refused += isinstance(packed, str)
    assert 0 < refused < 200


def test_files_are_read_in_four_threads_at_once():
    """What is packed is decided by counts of references, which no other thread changes."""
    files = []
    for seed in range(12):
        dice = random.Random(seed)
        files.append(written(dice, content_of(dice, seed)))
    alone = [facts(data, True) for data in files]

    def read() -> None:
        assert [facts(data, True) for data in files] == alone

    assert run_all([read] * 4) == []


def test_a_dict_that_is_named_again_before_it_is_whole_stays_one():
    """PyTorch writes no such file: what stands for a dict would not be what was named."""
    whole = {"action": "alloc", "addr": 512, "size": 512, "stream": 0, "frames": []}
    body = pickle.dumps(whole, 2)[2:-1]
    assert body.startswith(b"}q\x00(")
    holds_itself = b"\x80\x02" + body[:3] + b"(X\x04\x00\x00\x00selfh\x00" + body[4:] + b"."
    value: Any = plain_pickle.loads(holds_itself, reader.Packer())
    assert value["self"] is value
    assert {name: value[name] for name in whole} == whole


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("depth", "times_its_size"), [(0, 3.5), (40, 1.5)])
def test_reading_takes_little_memory_for_the_size_of_the_file(depth, times_its_size):
    """6.6 and 4.0 times, where each entry is a dict until the whole file is read."""
    frames = [{"filename": f"{n}.py", "line": n, "name": f"f{n}"} for n in range(100)]
    nothing: list[Any] = []
    entries = []
    for number in range(18000):
        at = (1 << 45) + number // 3 * 4096
        action = ("alloc", "free_requested", "free_completed")[number % 3]
        entry = {"action": action, "addr": at, "size": 1000 + number // 3, "stream": 0}
        stack = [frames[(number + n) % 100] for n in range(depth)] if depth else nothing
        entry |= {"time_us": (1 << 50) + number, "frames": stack, "pool_id": (0, 0)}
        entries.append(entry | {"compile_context": "N/A", "user_metadata": ""})
    data = pickle.dumps({"segments": [], "device_traces": [entries]}, 4)
    del entries
    bfc.Trace.from_torch(io.BytesIO(pickle.dumps({"segments": []}, 4)))  # what it imports
    tracemalloc.start()
    try:
        trace = bfc.Trace.from_torch(io.BytesIO(data), frames=False)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(trace) == 12000
    assert most < times_its_size * len(data)
