"""What is installed: every header and every source that others compile, and what the project file
says of it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from sources import CHECKOUT, PACKAGES

import bfc


def project() -> dict[str, Any]:
    return tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]


def test_what_is_not_python_is_installed_too(tmp_path: Path) -> None:
    """And nothing that was moved after an earlier build."""
    moved = tmp_path / "bfc/study/__init__.py"  # it would hide bfc/study.py
    moved.parent.mkdir(parents=True)
    moved.touch()
    command = [sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert ran.returncode == 0, ran.stderr
    installed = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    wanted = {
        path.relative_to(CHECKOUT)
        for suffix in ("*.h", "*.hpp", "*.cpp", "*.c", "*.pyi", "*.pxd", "*.js", "page.*")
        for package in PACKAGES
        for path in package.rglob(suffix)
    }
    assert Path("bfc/include/bfc_torch_allocator.hpp") in wanted
    assert Path("bfc_torch_opencl/extension.cpp") in wanted
    assert wanted - installed == set()
    assert not moved.exists()
    assert {Path(package.name, "py.typed") for package in PACKAGES} < installed  # PEP 561
    assert {Path("bfc/study.py"), Path("bfc_tools/predicting/rules/orders.json")} < installed


def test_the_version_is_the_distributions() -> None:
    assert bfc.__version__ == project()["version"]


@pytest.mark.parametrize(
    ("extra", "bindings", "nvrtc"),
    [
        ("cuda", "cuda-bindings", "nvidia-cuda-nvrtc>=13,<14"),
        ("cuda12", "cuda-bindings>=12.9,<13", "nvidia-cuda-nvrtc-cu12>=12.9,<13"),
    ],
)
def test_an_extra_for_cuda_brings_what_copies_are_compiled_with(extra, bindings, nvrtc) -> None:
    wanted = project()["optional-dependencies"][extra]
    assert wanted[0].startswith(bindings)
    assert wanted[1].partition(";")[0] == nvrtc
