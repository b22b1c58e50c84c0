"""The bins and the table of starts against std::set and std::map, compiled with the sanitizers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import cpp
import pytest


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cpp.built(Path(__file__).with_suffix(".cpp"), tmp_path_factory.mktemp("bins"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(1, 7))
def test_bins_and_starts_agree_with_the_standard_containers(program: Path, seed: int) -> None:
    run = subprocess.run(
        [str(program), str(seed), "20000"], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, (
        f"{program.name} {seed} 20000\n{run.stdout[-2000:]}{run.stderr[-4000:]}"
    )
    assert run.stdout.endswith("sound\n")
