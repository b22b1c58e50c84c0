"""A recorded run with expandable segments becomes a trace: PyTorch's recording, and one of ours."""

from __future__ import annotations

import io
import pickle
import random
from typing import Any

import pytest
from caching_subject import CommonPeer, Ours
from torch_histories import Make

import bfc
from bench.peers.server import Operation
from bench.peers.torch import build

MIB, GIB = 1 << 20, 1 << 30
ON = "expandable_segments:True"
ALLOCATED, FREED = 0, 1
EMPTIES = [{"filename": "torch/cuda/memory.py", "line": 224, "name": "empty_cache"}]


@pytest.fixture(params=[pytest.param(CommonPeer, marks=pytest.mark.peers), Ours])
def make(request: pytest.FixtureRequest) -> Make:
    if request.param is CommonPeer:
        build()
    return request.param


def a_run(seed: int, *, empties: bool) -> list[Operation]:
    rng = random.Random(seed)
    live: list[int] = []
    operations: list[Operation] = [("record_history", True, 1 << 20)]
    for slot in range(300):
        if live and rng.random() < 0.45:
            operations.append(("free_slot", live.pop(rng.randrange(len(live)))))
        else:
            live.append(slot)
            size = rng.choice([rng.randrange(1, MIB), rng.randrange(MIB, 60 * MIB)])
            operations.append(("malloc", size, rng.choice([0, 2]), slot))
        if empties and rng.random() < 0.05:
            operations.append(("empty_cache",))
    return operations


def record(make: Make, seed: int, *, empties: bool) -> tuple[list[Any], list[Any]]:
    """The segments at the end, and the history."""
    subject = make(settings=ON, capacity=80 * GIB)
    *_, segments, trace = subject.run([*a_run(seed, empties=empties), ("snapshot",), ("trace",)])
    subject.close()
    return segments, trace


def read(segments: list[Any], trace: list[Any]) -> bfc.Trace:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": ON}
    content = {"segments": segments, "device_traces": [trace], "allocator_settings": settings}
    return bfc.Trace.from_torch(io.BytesIO(pickle.dumps(content)))


def live_at_the_end(trace: bfc.Trace) -> dict[int, int]:
    addresses: dict[int, int] = {}
    sizes: dict[int, int] = {}
    rows = zip(trace.op, trace.id, trace.size, trace.meta["torch"]["addresses"], strict=True)
    for op, number, size, address in rows:
        if op == ALLOCATED:
            addresses[int(number)], sizes[int(number)] = address, int(size)
        elif op == FREED:
            del addresses[int(number)]
    return {address: sizes[number] for number, address in addresses.items()}


def live_in(segments: list[Any]) -> dict[int, int]:
    return {
        block["address"]: block["requested_size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }


@pytest.mark.parametrize("seed", range(5))
def test_every_allocation_is_read_where_it_was(make: Make, seed: int) -> None:
    segments, trace = record(make, seed, empties=True)
    actions = {entry["action"] for entry in trace}
    assert {"segment_map", "segment_unmap"} <= actions
    assert "segment_alloc" not in actions
    read_back = read(segments, trace)
    facts = read_back.meta["torch"]
    made = [entry["addr"] for entry in trace if entry["action"] == "alloc"]
    assert [address for address in facts["addresses"] if address] == made
    assert (facts["repairs"], facts["segments"]) == ({}, [])
    assert live_at_the_end(read_back) == live_in(segments)


@pytest.mark.parametrize("seed", range(5))
def test_a_history_that_lost_its_beginning_ends_with_the_same_blocks(make: Make, seed: int) -> None:
    segments, trace = record(make, seed, empties=True)
    for kept in (len(trace) // 2, len(trace) // 5, 0):
        read_back = read(segments, trace[len(trace) - kept :])
        assert read_back.meta["torch"]["repairs"] == {}
        assert live_at_the_end(read_back) == live_in(segments)


@pytest.mark.parametrize("has_frames", [True, False])
def test_its_replay_puts_every_block_where_it_was(make: Make, has_frames: bool) -> None:
    """With the releases where the cache was emptied. Without frames some of them are not sure, and
    then the replay goes on in what the recorded run gave back."""
    emptied = unsure = 0
    for seed in range(12):
        segments, trace = record(make, seed, empties=seed % 4 > 0)
        for entry in trace if has_frames else ():
            entry["frames"] = EMPTIES  # the device is never full: nothing else gives memory back
        read_back = read(segments, trace)
        emptied += int((read_back.op == 2).sum())
        unsure += read_back.meta["torch"]["releases_unsure"]
        with bfc.CachingAllocator(
            bfc.SimulatedSubAllocator("80 GiB"), settings=ON, strict=True
        ) as allocator:
            replay = read_back.replay(allocator)
            assert replay.failed == 0
            if not read_back.meta["torch"]["releases_unsure"]:
                assert replay.addresses.tolist() == read_back.meta["torch"]["addresses"]
    assert emptied > 2
    assert (unsure == 0) == has_frames
