"""Programs in C++ that test the headers of `bfc/native/`, with sanitizers where there are any. What
was compiled is kept, for other processes and for the next run."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import pytest

import bfc
from bfc.compiling import cache, kept_in

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
    done = ran(*command, "-E", "-P", str(source))
    if done.returncode:
        return done
    flags = [word for word in command if not word.startswith("-I")]
    made_from = repr([flags, version(), done.stdout])  # with the text of each header
    kept = cache() / "tests" / hashlib.sha256(made_from.encode()).hexdigest()
    if not kept.exists():
        with kept_in(kept.parent, "a test's program") as folder:
            done = ran(*command, str(source), "-o", str(folder / "made"))
            if done.returncode:
                return done
            (folder / "made").rename(kept)
    shutil.copy(kept, program)
    return subprocess.CompletedProcess(command, 0, "", "")


def ran(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


@functools.cache
def version() -> str:
    assert COMPILER is not None
    return ran(*COMPILER.split(), "--version").stdout


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
