"""`import bfc` is light, and every module stands on its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bfc

ROOT = Path(__file__).parents[2] / "bfc"
PROJECT = ROOT.parent / "pyproject.toml"
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
SOURCES = sorted(path for path in ROOT.rglob("*.py*") if path.suffix in (".py", ".pyx"))
#: Modules that need an extra package: they may fail to import where they say that it is missing.
EXTRAS = ("integrations", "testing")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_python(code: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, "-c", code]
    home = Path(bfc.__file__).parent.parent
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd=home
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


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_every_module_imports_alone_and_without_a_warning(path: Path) -> None:
    name = module_name(path)
    if name.endswith("__main__"):
        return
    run = run_python(f"import {name}", "-W", "error")
    if run.returncode and path.relative_to(ROOT).parts[0] in EXTRAS:
        assert "ModuleNotFoundError" in run.stderr or "DeviceUnavailableError" in run.stderr, (
            run.stderr
        )
        return
    assert (run.returncode, run.stderr) == (0, "")


def test_every_public_name_exists_and_is_listed_once() -> None:
    assert [name for name in bfc.__all__ if not hasattr(bfc, name)] == []
    assert len(set(bfc.__all__)) == len(bfc.__all__)
    namespace: dict[str, object] = {}
    exec("from bfc import *", namespace)
    assert set(bfc.__all__) <= set(namespace)


def test_every_public_name_says_what_it_is() -> None:
    assert [name for name in bfc.__all__ if not getattr(bfc, name).__doc__] == []


def test_the_version_is_the_distributions() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    assert bfc.__version__ == project["version"]


def test_the_package_lists_each_of_its_folders() -> None:
    setuptools = tomllib.loads(PROJECT.read_text())["tool"]["setuptools"]
    if not isinstance(setuptools.get("packages"), list):
        return  # found by setuptools itself
    folders = {module_name(path) for path in ROOT.rglob("__init__.py")}
    assert set(setuptools["packages"]) == folders


def test_no_test_imports_another() -> None:
    tests = ROOT.parent / "tests"
    found = {
        path.relative_to(tests)
        for path in tests.rglob("*.py")
        if re.search(r"^\s*(from|import) (test_|conftest|tests\b)", path.read_text(), re.MULTILINE)
    }
    assert found == set()


def test_each_room_of_tests_is_one_of_the_package() -> None:
    tests = ROOT.parent / "tests"
    rooms = {path.parent.relative_to(tests).parts[0] for path in tests.rglob("*/test_*.py")}
    own = {"cuda", "opencl", "torch_opencl", "house", "peers", "dask"}
    assert sorted(room for room in rooms - own if not (ROOT / room).is_dir()) == []


def test_a_checkout_that_was_never_built_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "bfc", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    command = [sys.executable, "-S", "-c", "import bfc"]  # without the packages of the environment
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 1
    last = run.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path}/bfc is not compiled: run `make dev`")
    assert "circular" not in run.stderr


def test_a_checkout_that_was_built_from_older_sources_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(ROOT, tmp_path / "bfc", ignore=shutil.ignore_patterns("_ledger*.so"))
    command = [sys.executable, "-S", "-c", "import bfc"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 1
    said, advice = run.stderr.splitlines()[-2:]
    assert "_ledger" in said
    assert advice.endswith("it was built from other sources: run `make dev`")


@pytest.mark.parametrize(
    ("extra", "bindings", "nvrtc"),
    [
        ("cuda", "cuda-bindings", "nvidia-cuda-nvrtc>=13,<14"),
        ("cuda12", "cuda-bindings>=12.9,<13", "nvidia-cuda-nvrtc-cu12>=12.9,<13"),
    ],
)
def test_an_extra_for_cuda_brings_what_copies_are_compiled_with(extra, bindings, nvrtc) -> None:
    wanted = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"][extra]
    assert wanted[0].startswith(bindings)
    assert wanted[1].partition(";")[0] == nvrtc
