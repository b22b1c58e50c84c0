"""An object whose `__init__` never ran, or raised, answers or refuses in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.sampled(1)
@pytest.mark.parametrize("without", [[], ["no cuda"]], ids=["", "no cuda"])
def test_nothing_half_made_crashes_or_answers_by_accident(tmp_path: Path, without) -> None:
    script = Path(__file__).parent / "half_made.py"
    done = subprocess.run(
        [sys.executable, script, *without],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *complaints, last = filter(None, done.stdout.splitlines())
    assert last.startswith("walked ")
    assert not complaints, "\n".join(complaints)
    assert int(last.split()[1]) > 30
