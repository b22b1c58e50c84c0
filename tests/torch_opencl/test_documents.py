"""What is written about tensors on OpenCL, run as it is written."""

from __future__ import annotations

import pytest
import torch
from documents import ROOT, run_in_a_process


@pytest.mark.parametrize("name", ["README.md", "docs/how-to/tensors-on-opencl.md"])
def test_the_code_runs_and_prints_what_stands_below_it(
    name: str, opencl: torch.device
) -> None:  # which has compiled the extension, and said so
    ran = run_in_a_process(ROOT / name, "import pocl; pocl.start()")
    assert (ran.returncode, ran.stderr) == (0, "")
