"""`python -m bench.torch_pickles`: a snapshot like PyTorch's, and what reading it takes."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

import bfc
from bench import torch_pickles


def test_the_snapshot_is_whole_and_of_the_size_that_is_asked_for(tmp_path: Path):
    path = tmp_path / "memory.pickle"
    assert 0.8e6 < torch_pickles.write(path, 1) < 1.6e6
    trace = bfc.Trace.from_torch(path)
    facts = trace.meta["torch"]
    assert (facts["repairs"], facts["first_recorded_event"]) == ({}, 0)
    assert trace.replay(bfc.CachingAllocator(bfc.SimulatedSubAllocator("80 GiB"))).failed == 0
    depths = [len(trace.frames_of(event)) for event in range(0, len(trace), 97)]
    assert 25 < sum(depths) / len(depths) < 50


def test_the_one_without_stacks_has_none_and_the_same_shape(tmp_path: Path):
    path = tmp_path / "memory.pickle"
    assert 0.8e6 < torch_pickles.write(path, 1, has_stacks=False) < 1.6e6
    trace = bfc.Trace.from_torch(path)
    assert (trace.stack, trace.meta["torch"]["repairs"]) == (None, {})


def test_it_is_the_same_each_time():
    assert pickle.dumps(torch_pickles.snapshot(2000)) == pickle.dumps(torch_pickles.snapshot(2000))


@pytest.mark.long
def test_what_it_prints(capsys: pytest.CaptureFixture[str]):
    torch_pickles.main(["--megabytes", "1"])
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["MB", "events", "seconds", "peak", "MB", "of", "its", "size"]
    assert [" ".join(line.split()[:-5]) for line in lines] == [
        f"{kind}: {what}"
        for kind in ("stacks", "no stacks")
        for what in ("from_torch", "from_torch, frames=False", "bfc advise, 2 processes")
    ]
    for line in lines:
        size, events, seconds, peak, ratio = line.split()[-5:]
        assert float(size) > 0.8
        assert int(events) > 1000
        assert 0 < float(seconds) < 60
        assert float(peak) == pytest.approx(float(ratio) * float(size), rel=0.1)
