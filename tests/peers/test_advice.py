"""PyTorch 2.11's compiled allocator does what `bfc.advise` says of its rows: on the device that was
asked for, and on one of exactly the smallest size that is named."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from report_recounts import gaps_of

import bfc
from bench.histories import churn
from bench.memory import COUNTED, KINDS
from bench.peers.torch import TorchPeer
from bfc_tools.study.candidates import Point, replay

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("torch_peer")]

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
TRACES = {path.stem: path for path in (ROOT / "bench" / "traces").glob("*.npz")}
RECORDINGS = {path.stem: path for path in (ROOT / "tests" / "recordings").glob("*.npz")}


def by_pytorch(row: bfc.AdviceRow, trace: bfc.Trace, size: int) -> tuple[int, int, int]:
    """Refusals, the peak of what is reserved, and calls of the driver."""
    if row.beginning == "as placed":
        trace = without_gaps(trace)
    stream = trace.stream.astype(np.uint64) * 2  # handles, which are even
    with TorchPeer(capacity=size, settings=row.settings) as peer:
        addresses, _seconds = peer.replay(trace.op, trace.id, trace.size, stream)
        kinds = Counter(KINDS.get(kind, kind) for kind, *_ in peer.calls)
        calls = sum(kinds[kind] for kind in COUNTED)
        asks = (trace.op == 0) & (trace.size > 0)
        refused = int((addresses[asks] == 0).sum())
        return refused, peer.stats()["reserved_bytes.all.peak"], calls


def without_gaps(trace: bfc.Trace) -> bfc.Trace:
    """Without what fills gaps for a moment, before the recorded history."""
    gaps = gaps_of(trace)
    kept = np.array([event not in gaps for event in range(len(trace))])
    return bfc.Trace(trace.op[kept], trace.id[kept], trace.size[kept], trace.stream[kept])


def assert_true(trace: bfc.Trace, part: float, most: int = 40) -> int:
    """Every row of PyTorch's policy, on a device of a part of what is live. Returns how many have a
    smallest device."""
    live = replay(trace, Point("caching", ""), 1 << 62).peak_live
    device = int(live * part)
    advice = bfc.advise(trace, device, jobs=1)
    rows = [row for row in advice.rows if row.is_pytorch]
    smallest = [row for row in rows if row.smallest_device is not None]
    for row in rows[:most]:
        figures = (row.refused, row.peak_reserved, row.driver_calls)
        assert by_pytorch(row, trace, device) == figures, row
    for row in smallest[:most]:
        ours = replay(trace, Point(row.policy, row.settings), row.smallest_device)
        there = dataclasses.replace(row, beginning=ours.beginning)
        refused, peak, calls = by_pytorch(there, trace, row.smallest_device)
        assert refused == 0, row
        assert (peak, calls) == (ours.peak_reserved, ours.driver_calls), row
        for size in row.refused_above:
            assert by_pytorch(row, trace, size)[0] > 0, row
    return len(smallest)


@pytest.mark.parametrize("name", ["gpu_decomfl", "gpu_lm_small", "gpt2m_adam"])
def test_recorded_traces(name: str):
    assert assert_true(bfc.Trace.load(TRACES[name]), 1.03, most=10) >= 3


def test_a_recorded_trace_of_several_streams():
    assert assert_true(bfc.Trace.load(TRACES["llama7b_zero3_lro"]), 1.03, most=6) >= 3


@pytest.mark.parametrize("name", sorted(RECORDINGS)[:3])
def test_recordings_of_strangers(name: str):
    assert assert_true(bfc.Trace.load(RECORDINGS[name]), 1.02, most=8) >= 2


@pytest.mark.parametrize("seed", range(6))
def test_random_traces(seed: int):
    """Also where nothing can fit on the device: then there are two rows that everybody compares
    with."""
    dice = random.Random(seed)
    trace = churn(
        dice.choice([20, 100]),
        3000,
        smallest=64 << 10,
        largest=dice.choice([24, 200]) << 20,
        seed=seed,
    )
    part = dice.choice([0.9, 1.05, 1.2])
    found = assert_true(trace, part)
    assert found == 2 if part < 1 else found >= 3


def test_a_trace_with_releases_of_what_is_cached():
    trace = churn(100, 3000, smallest=64 << 10, largest=64 * MIB, seed=7)
    at = range(500, len(trace), 500)
    released = bfc.Trace(
        np.insert(trace.op, at, 2),
        np.insert(trace.id, at, 0),
        np.insert(trace.size, at, 0),
    )
    assert assert_true(released, 1.1) >= 3
