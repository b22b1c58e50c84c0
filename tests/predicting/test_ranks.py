"""One process of several: which GPU it has, and what it sends to others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bfc


def predicted(code: str, folder: Path, **variables: object) -> str:
    """What the command says of a program. It runs in a process of its own, since PyTorch counts the
    devices once."""
    script = folder / "train.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "bfc", "predict", str(script), "--no-advice"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {name: str(value) for name, value in variables.items()},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LOCAL = """
import torch
torch.cuda.set_device(3)
assert (torch.cuda.current_device(), torch.cuda.device_count()) == (3, 4)
for at in range(torch.cuda.device_count()):  # as who builds kernels for all of them asks
    assert torch.cuda.get_device_capability(at) == torch.cuda.get_device_capability()
    assert torch.cuda.get_device_properties(at).name == torch.cuda.get_device_name(3)
x = torch.ones(1 << 20, device="cuda", requires_grad=True)
y = torch.ones(1 << 20, device="cuda:3")
assert torch.tensor([1, 2], device="cuda").device == x.device
assert torch.as_tensor(3, device="cuda").device == x.device
with torch.device("cuda"):
    assert torch.tensor([1, 2]).device == x.device
(x * y).sum().backward()
assert x.grad.device == torch.device("cuda:3") == torch.cuda.Event().device
for wrong in (lambda: torch.ones(1, device="cuda:0"), lambda: torch.cuda.set_device(2)):
    try:
        wrong()
    except torch.AcceleratorError as error:
        assert "one GPU, cuda:3: " in str(error) and "LOCAL_RANK has" in str(error)
    else:
        raise AssertionError
"""
SEES_ITS_OWN = """
import torch
assert (torch.cuda.current_device(), torch.cuda.device_count()) == (0, 1)
torch.ones(1 << 20, device="cuda:0")
"""


def test_a_process_has_the_gpu_of_its_local_rank(tmp_path: Path) -> None:
    said = predicted(LOCAL, tmp_path, LOCAL_RANK=3, LOCAL_WORLD_SIZE=4)
    assert "live       12.00 MiB" in said


def test_a_process_that_sees_its_own_gpu_alone_has_the_first(tmp_path: Path) -> None:
    predicted(SEES_ITS_OWN, tmp_path, LOCAL_RANK=3, CUDA_VISIBLE_DEVICES=3)


def test_without_a_launcher_there_is_one_gpu() -> None:
    with bfc.predict():
        assert (torch.cuda.current_device(), torch.cuda.device_count()) == (0, 1)
        with pytest.raises(torch.AcceleratorError, match="one GPU, cuda:0: give the program"):
            torch.ones(1, device="cuda:1")
