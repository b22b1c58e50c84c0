"""The recorded traces on a device that hands freed addresses out again: each block lies where the
compiled PyTorch of the same version puts it, under pressure that makes segments go and come back.

The order of equal free blocks shows only there: while addresses rise, the oldest segment is also
the lowest one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import bfc
from bench.peers.torch import TorchPeer
from bfc.pytorch.rules import VERSIONS

pytestmark = [pytest.mark.peers, pytest.mark.usefixtures("torch_peer")]

TRACES = sorted((Path(__file__).parents[2] / "bench" / "traces").glob("*.npz"))
ROOM = 1.15  # of the bytes live at the peak


def capacity_of(trace: bfc.Trace) -> int:
    return int(trace.peak_bytes_live() * ROOM)


def ours(trace: bfc.Trace, torch: str) -> np.ndarray:
    device = bfc.SimulatedSubAllocator(capacity_of(trace), reuse=True)
    with bfc.CachingAllocator(device, strict=True, torch=torch) as allocator:
        return np.asarray(trace.replay(allocator).addresses)


def original(trace: bfc.Trace, torch: str) -> np.ndarray:
    with TorchPeer(capacity=capacity_of(trace), placement="reuse", torch=torch) as peer:
        streams = trace.stream.astype(np.uint64) * 2
        return peer.replay(trace.op, trace.id, trace.size, streams)[0]


@pytest.mark.parametrize("torch", VERSIONS)
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_each_block_lies_where_pytorch_puts_it(path: Path, torch: str) -> None:
    trace = bfc.Trace.load(path)
    allocates = trace.op == 0
    wrong = np.flatnonzero((ours(trace, torch) != original(trace, torch)) & allocates)
    assert wrong.tolist() == []


def test_the_versions_differ_there() -> None:
    """So that the test above can fail: two versions place thousands of blocks differently."""
    trace = bfc.Trace.load(next(path for path in TRACES if path.stem == "resnet50_multiscale"))
    assert np.count_nonzero(ours(trace, "2.11") != ours(trace, "2.15")) > 1000
