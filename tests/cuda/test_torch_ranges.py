"""Iterations by the ranges that a program named, in PyTorch's own recordings: `make
test-torch-cuda`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from cuda_machine import ON_GPU
from torch_runtime import Run, with_torch

import bfc

pytestmark = pytest.mark.skipif(ON_GPU, reason="nothing is computed on the emulated device")

#: A training, recorded as users do. Prints how many allocations there were before each step.
TRAINED = """
import contextlib, json, os, sys, torch
from torch.profiler import record_function

path, kind = sys.argv[1:]
context = None if "bare" in kind else "alloc"
torch.cuda.memory._record_memory_history(stacks="python", context=context)
layers = [torch.nn.Linear(256, 256) for _ in range(6)]
model = torch.nn.Sequential(*layers).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
begins = []

def note():
    begins.append(torch.cuda.memory_stats()["allocation.all.allocated"])

def train(number):
    for part in range(2 if "parts" in kind else 1):
        name = "forward" if "named" in kind else None
        with record_function(name) if name else contextlib.nullcontext():
            loss = model(torch.empty(64 + number, 256, device="cuda")).sum()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()

def evaluate():
    with torch.no_grad():
        for _ in range(3):
            model(torch.empty(200, 256, device="cuda"))

profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
with profiler if "profiled" in kind else contextlib.nullcontext():
    for number in range(8):
        note()
        train(number)
        if "evaluated" in kind and number % 3 == 2:
            evaluate()
        if "profiled" in kind:
            profiler.step()
torch.cuda.memory._dump_snapshot(path)
print(json.dumps(begins), flush=True)
os._exit(0)
"""


@with_torch
@pytest.mark.parametrize(
    "kind", ["profiled", "named", "optimizer", "bare", "parts", "evaluated", "bare evaluated"]
)
def test_ranges_tell_the_steps_of_a_training(run: Run, tmp_path: Path, kind: str) -> None:
    """An optimizer names its own step, so that each recording has ranges. Each of eight steps is
    found, without stacks, too, and no other: with two batches a step, and evaluations between."""
    path = tmp_path / "snapshot.pickle"
    begins = json.loads(run(TRAINED, str(path), kind).splitlines()[-1])
    trace = bfc.Trace.from_torch(path)
    found = trace.iterations()
    assert found.source == "ranges", (str(found), trace.meta.get("ranges"))
    asked = np.cumsum(trace.op == 0)
    starts = [int(asked[one.begin]) - 1 for one in found if one.kind == "train"]
    assert len(starts) == len(begins) == 8, (starts, begins)
    apart = max(abs(a - b) for a, b in zip(starts, begins, strict=True))
    assert apart <= 0.02 * np.median(np.diff(begins)), (starts, begins)
