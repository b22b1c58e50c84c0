"""`import bfc` is light, and says what to do where it cannot work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import bfc

PACKAGE = Path(bfc.__file__).parent
HEAVY = [
    "bfc.testing",
    "hypothesis",
    "pytest",
    "numpy",
    "cuda",
    "pyopencl",
    "cupy",
    "numba",
    "torch",
    "tqdm",
    "rmm",
    "matplotlib",
    "dask",
    "distributed",
    "bokeh",
    "pandas",
]


def run_python(code: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd=PACKAGE.parent
    )


def test_importing_bfc_imports_nothing_heavy() -> None:
    run = run_python(
        f"import sys, bfc; print([n for n in {HEAVY} if n in sys.modules])", "-W", "error"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")


def test_using_raw_memory_imports_nothing_heavy() -> None:
    run = run_python(
        "import sys, bfc\n"
        "with bfc.BFCAllocator(bfc.SimulatedSubAllocator('1 MiB')) as a:\n"
        "    a.allocate(5).free(); a.deallocate_raw(a.allocate_raw(9))\n"
        "    str(a.snapshot()); a.check()\n"
        f"print([n for n in {HEAVY} if n in sys.modules])"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")


def test_a_checkout_that_was_never_built_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "bfc", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "-S", "-c", "import bfc"]  # without the packages of the environment
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path}/bfc is not compiled: run `make dev`")
    assert "circular" not in run.stderr


def test_a_checkout_that_was_built_from_older_sources_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "bfc", ignore=shutil.ignore_patterns("_allocator*.so"))
    command = [sys.executable, "-S", "-c", "import bfc"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 1
    said, advice = run.stderr.splitlines()[-2:]
    assert "_allocator" in said
    assert advice.endswith("it was built from other sources: run `make dev`")
