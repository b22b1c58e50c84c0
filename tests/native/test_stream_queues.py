"""The queues of streams against plain lists, compiled with the sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cpp
import pytest


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpp.built(Path(__file__).with_suffix(".cpp"), tmp_path_factory.mktemp("queues"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(1, 5))
def test_queues_agree_with_lists(program: Path, seed: int) -> None:
    run = subprocess.run(
        [str(program), str(seed), "20000"], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, f"{run.stdout[-2000:]}{run.stderr[-4000:]}"
    assert run.stdout.endswith("sound\n")
