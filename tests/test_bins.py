"""The bins and the table of starts against std::set and std::map, compiled with the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
HEADERS = TESTS.parent / "bfc" / "native"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def compile_cpp(source: Path, program: Path, options: list[str]) -> subprocess.CompletedProcess:
    command = [*COMPILER.split(), "-std=c++17", "-O1", "-g", *options, f"-I{HEADERS}"]
    return subprocess.run(
        [*command, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler: set CXX, or install g++ or clang++")
    folder = tmp_path_factory.mktemp("bins")
    (folder / "empty.cpp").write_text("int main() { return 0; }\n")
    has_sanitizers = compile_cpp(folder / "empty.cpp", folder / "empty", SANITIZERS).returncode == 0
    options = WARNINGS + (SANITIZERS if has_sanitizers else [])
    built = compile_cpp(TESTS / "test_bins.cpp", folder / "test_bins", options)
    assert built.returncode == 0, built.stderr
    return folder / "test_bins"


@pytest.mark.parametrize("seed", range(1, 7))
def test_bins_and_starts_agree_with_the_standard_containers(program: Path, seed: int) -> None:
    run = subprocess.run(
        [str(program), str(seed), "20000"], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, (
        f"{program.name} {seed} 20000\n{run.stdout[-2000:]}{run.stderr[-4000:]}"
    )
    assert run.stdout.endswith("sound\n")
