"""Tests of predictions. `make test-predict` runs them, in an environment of their own: they need
torch, which the other tests do without."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# PyTorch 2.15 gives each product a workspace of its own unless this is set, as before it: so tests
# count the same with every version. Those of the rule say what they want themselves.
os.environ["TORCH_CUBLAS_WORKSPACE_CACHE"] = "1"

if os.environ.get("BFC_TEST_TORCH") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a program into an empty working folder. Returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return "train.py"

    return write
