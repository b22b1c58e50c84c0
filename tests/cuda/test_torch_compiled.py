"""What `torch.compile` is predicted to allocate, beside what Inductor's programs allocate when they
run, with Triton's kernels, on the emulated driver: `make test-torch-cuda`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cuda_machine import ON_GPU
from documents import ROOT
from inductor_steps import PROGRAMS
from torch_runtime import environment, with_torch

SCRIPT = ROOT / "tests/helpers/inductor_steps.py"
QUICK = "words"


def steps(what: str, program: str, runtime: Path | None, cache: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, what, program],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment(runtime)
        | {"TORCHINDUCTOR_CACHE_DIR": str(cache / what), "TRITON_CACHE_DIR": str(cache / "triton")},
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def in_any_order(events: list[int | None]) -> list[list[int]]:
    """What is freed between one block and the next, up to the last one."""
    between: list[list[int]] = [[]]
    for event in events:
        if event is not None and event >= 0:
            between[-1].sort()
            between.append([])
        else:
            between[-1].append(0 if event is None else event)
    return between[:-1]


@with_torch
@pytest.mark.skipif(ON_GPU, reason="needs the emulated driver: a GPU's timings choose kernels")
@pytest.mark.parametrize(
    "program",
    [it if it == QUICK else pytest.param(it, marks=pytest.mark.long) for it in PROGRAMS],
)
def test_inductors_plan_is_what_its_program_does(
    program: str, runtime: Path | None, tmp_path: Path
) -> None:
    """Each block of the second and third step has the predicted size, and is freed between the same
    two others."""
    theirs = steps("run", program, runtime, tmp_path)
    mine = steps("predict", program, None, tmp_path)
    assert len(mine["sizes"]) > 50
    assert mine["sizes"] == theirs["sizes"]
    assert in_any_order(mine["events"]) == in_any_order(theirs["events"])
