"""The planner's headers under the sanitizers: random instances, compared with the slow way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cpp
import pytest


@pytest.mark.long
def test_layouts_searches_and_matches_of_random_instances(tmp_path: Path):
    program = cpp.built(Path(__file__).with_suffix(".cpp"), tmp_path)
    run = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout == "100 rounds\n"
