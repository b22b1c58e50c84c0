"""What is written about tensors on OpenCL, run as it is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import ROOT, run_in_a_process


@pytest.mark.parametrize("name", ["README.md", "docs/how-to/tensors-on-opencl.md"])
def test_the_code_runs_and_prints_what_stands_below_it(name: str) -> None:
    ran = run_in_a_process(ROOT / name, "import pocl; pocl.start()")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_tests_of_the_table_are_there() -> None:
    text = (ROOT / "docs/how-to/tensors-on-opencl.md").read_text()
    named = set(re.findall(r"\| `(\w+\.py)` \|$", text, re.MULTILINE))
    assert len(named) >= 4
    assert named <= {path.name for path in Path(__file__).parent.glob("test_*.py")}
