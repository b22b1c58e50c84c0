"""Programs in C++ that test the headers of `bfc/native/`, with sanitizers where there are any."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

import bfc

HEADERS = Path(bfc.__file__).parent / "native"
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def built(source: Path, folder: Path) -> Path:
    """The program, in a folder. Skips the test where there is no compiler."""
    if COMPILER is None:
        pytest.skip("no C++ compiler: set CXX, or install g++ or clang++")
    empty, program = folder / "empty.cpp", folder / source.stem
    empty.write_text("int main() { return 0; }\n")
    has_sanitizers = compiled(empty, folder / "empty", SANITIZERS).returncode == 0
    done = compiled(source, program, WARNINGS + (SANITIZERS if has_sanitizers else []))
    assert done.returncode == 0, done.stderr
    return program


def compiled(source: Path, program: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    assert COMPILER is not None
    command = [*COMPILER.split(), "-std=c++17", "-O1", "-g1", *options, f"-I{HEADERS}"]
    return subprocess.run(
        [*command, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )


def built_library(source: Path, folder: Path, options: Sequence[str] = ()) -> Path:
    """A library for ctypes, made from a source that knows the headers of Python and of bfc."""
    if COMPILER is None:
        pytest.skip("no C++ compiler: set CXX, or install g++ or clang++")
    library = folder / f"{source.stem}.so"
    headers = [f"-I{bfc.get_include()}", f"-I{sysconfig.get_path('include')}"]
    every = [*WARNINGS, *headers, "-shared", "-fPIC", "-pthread", *options]
    done = compiled(source, library, every)
    assert done.returncode == 0, done.stderr
    return library
