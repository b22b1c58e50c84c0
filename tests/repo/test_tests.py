"""The tests: no one leans on another, and their folders are those of the packages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from sources import CHECKOUT, PACKAGES


def test_no_test_imports_another() -> None:
    tests = CHECKOUT / "tests"
    found = {
        path.relative_to(tests)
        for path in tests.rglob("*.py")
        if re.search(r"^\s*(from|import) (test_|conftest|tests\b)", path.read_text(), re.MULTILINE)
    }
    assert found == set()


def test_each_room_of_tests_is_one_of_the_packages() -> None:
    tests = CHECKOUT / "tests"
    folders = {path.parent.relative_to(tests).parts[0] for path in tests.rglob("*/test_*.py")}
    own = {
        "cuda",
        "opencl",
        "torch_opencl",
        "repo",
        "documents",
        "bench",
        "peers",
        "dask",
        "installing",
    }
    rooms = {path.name for package in PACKAGES for path in package.rglob("*") if path.is_dir()}
    assert sorted(folders - own - rooms) == []


#: A failure in a long file, and garbage whose finalisers raise: it is collected as the file is
#: parsed for the report.
FAILS = """
import gc

class Raises:
    def __del__(self):
        (1 + int("a")) * 2

def test_it():
    for _ in range(3):
        garbage = Raises()
        garbage.itself = garbage
    gc.set_threshold(gc.get_count()[0] + 400)
    raise ValueError("the failure")

def long():
""" + "\n".join(f"    a{n} = b{n}[c.d(e + {n})]" for n in range(400))


def test_a_failure_is_reported_whatever_finalisers_raise(tmp_path: Path) -> None:
    path = tmp_path / "test_fails.py"
    path.write_text(FAILS)
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "--rootdir", tmp_path, path]
    paths = [CHECKOUT / "tests", CHECKOUT / "tests" / "helpers", CHECKOUT]
    ran = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert "ValueError: the failure" in ran.stdout
    assert "recursion depth mismatch" not in ran.stdout
