"""`bfc run` with PyTorch itself: `make test-torch-cuda`. The scripts know nothing of bfc; the
emulated driver is loaded by another sitecustomize, as a user's own may stand on the path."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_machine import ON_GPU
from documents import ROOT
from torch_runtime import environment, with_torch

Ran = subprocess.CompletedProcess[str]
Bfc = Callable[..., Ran]
pytestmark = pytest.mark.skipif(ON_GPU, reason="it counts on the emulated driver")

EMULATED = """
import os
from bfc.testing import cuda_emulator
cuda_emulator.load().reset(devices=2)
"""
HOLES = """
import torch

def some(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

blocks = [some(4) for _ in range(15)]
del blocks[::2]
joined = some(24)
print(torch.cuda.memory_reserved() >> 20)
"""


@pytest.fixture
def bfc_run(runtime: Path | None, tmp_path: Path) -> Bfc:
    """Runs `bfc run` with a script, which begins to be a file, in a folder of its own."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(EMULATED)
    given = environment(runtime)
    given["PYTHONPATH"] = f"{tmp_path / 'site'}:{ROOT}"

    def call(*words: str, script: str = "", code: int = 0, **variables: str) -> Ran:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "bfc", "run", *words],
            cwd=tmp_path,
            env=given | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert ran.returncode == code, ran.stderr
        return ran

    return call


@with_torch
def test_holes_are_stitched_for_an_unchanged_script(bfc_run: Bfc) -> None:
    assert bfc_run("--memory-limit", "64MiB", "script.py", script=HOLES).stdout == "60\n"


@with_torch
def test_pytorchs_own_policy_runs_out_there(bfc_run: Bfc) -> None:
    ran = bfc_run(
        "--policy", "caching", "--memory-limit", "64MiB", "script.py", script=HOLES, code=1
    )
    assert "CUDA out of memory. Tried to allocate 24.00 MiB" in ran.stderr
