"""The how-to's pieces, run by pytest as users run them. test_documents compares what it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def block(words: str) -> str:
    """The piece of docs/how-to/fuzzing.md in which these words stand."""
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/how-to/fuzzing.md").read_text(), re.DOTALL
    )
    (found,) = (text for text in blocks if words in text)
    return found if found.startswith("import bfc\n") else f"import bfc\n{found}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("words", ["class TestMySource", "def test_nothing_is_left", "class Mine("])
def test_a_piece_passes(words: str, tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(block(words))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=300,
        env=os.environ | {"CI": "true"},  # where Hypothesis has no deadlines
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout


def test_the_first_piece_is_ten_lines() -> None:
    lines = [line for line in block("class Mine(").splitlines() if line]
    assert len(lines) <= 10
