"""The fixtures that pytest finds where the package is installed."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import bfc_pytest

ROOT = Path(bfc_pytest.__file__).parent

LEAKS = """
import bfc

def build(allocator):
    return allocator.allocate_raw(1000)

def test_it(bfc_leak_check):
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    bfc_leak_check(allocator)
    build(allocator)

def test_none(bfc_leak_check):
    allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    bfc_leak_check(allocator)
    allocator.deallocate_raw(build(allocator))
"""

CUDA = """
def test_first(bfc_cuda_emulator):
    import bfc
    bfc_cuda_emulator.reset(devices=1, total=1 << 20)
    source = bfc.CUDASubAllocator()
    assert source.alloc(256, 1 << 30) is None

def test_second(bfc_cuda_emulator):
    assert bfc_cuda_emulator.calls == []
"""

BUDGETS = """
import bfc, pytest

@pytest.fixture
def pool():
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))

def cache(pool, nbytes):
    return pool.allocate(nbytes)

@pytest.mark.bfc_memory_budget("1 KiB")
@pytest.mark.parametrize("nbytes", [1024, 1025])
def test_limit(pool, nbytes, bfc_memory_budget):
    with bfc_memory_budget(pool):
        cache(pool, nbytes)

class TestStored:
    def test_it(self, pool, bfc_memory_budget):
        with bfc_memory_budget(pool):
            cache(pool, 2048)
"""

#: Ways of a gate that never closes, and of tests that say nothing about memory.
TRAPS = """
import bfc, pytest

@pytest.fixture
def pool():
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))

@pytest.mark.bfc_memory_budget("1 KiB")
def test_without_the_fixture(pool):
    pool.allocate(4096)

def test_without_with(pool, bfc_memory_budget):
    bfc_memory_budget(pool, "1 KiB")
    pool.allocate(4096)

@pytest.mark.bfc_memory_budget("22 gigs")
def test_no_size(bfc_memory_budget):
    pass

@pytest.mark.bfc_memory_budget(limits="1 KiB")
def test_no_such_option(bfc_memory_budget):
    pass

@pytest.mark.bfc_memory_budget("1 KiB")
@pytest.mark.skip(reason="not today")
def test_skipped_by_a_marker():
    pass

def test_skipped_halfway(pool, bfc_memory_budget):
    with bfc_memory_budget(pool):
        pool.allocate(1024)
    pytest.skip("not on this machine")

def test_fails_for_another_reason(pool, bfc_memory_budget):
    with bfc_memory_budget(pool):
        pool.allocate(1024)
    assert 1 == 2

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail(bfc_memory_budget):
    assert 1 == 2
"""

MANY = """
import bfc, pytest

@pytest.mark.parametrize("number", range(8))
def test_it(number, bfc_memory_budget):
    bfc_memory_budget(bfc.Trace([0], [0], [number]))
"""

PLAIN = """
import sys

def test_nothing_is_loaded():
    assert not [name for name in sys.modules if name.partition(".")[0] in ("bfc", "hypothesis")]
"""


def run_pytest(folder: Path, text: str, *options: str) -> str:
    (folder / "test_theirs.py").write_text(text)
    plugins = [*options] if is_installed() else ["-p", "bfc_pytest", *options]
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", *plugins, str(folder)]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=120
    )
    return ran.stdout + ran.stderr


def is_installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.value == "bfc_pytest" for point in entry_points(group="pytest11"))


def test_pytest_finds_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"bfc": "bfc_pytest"}
    assert is_installed()


def test_it_is_light(tmp_path: Path) -> None:
    assert "1 passed" in run_pytest(tmp_path, PLAIN)


def test_a_leak_fails_the_test_and_names_the_line(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, LEAKS)
    assert "2 passed, 1 error" in said
    assert "1 allocation, 1000 B, still live in" in said or "still live in" in said
    assert "return allocator.allocate_raw(1000)" in said


def test_a_budget_is_the_markers_or_the_stored_one(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, BUDGETS)
    assert "2 failed, 1 passed" in said
    assert "1.0 KiB live at most, 1 B over the budget of 1.0 KiB" in said
    assert "test_theirs.py::TestStored::test_it: pytest --bfc-write-budgets" in said
    assert "study/budgets.py" not in said, "the traceback ends in the test"
    assert "1 failed, 2 passed" in run_pytest(tmp_path, BUDGETS, "--bfc-write-budgets")
    assert "1 failed, 2 passed" in run_pytest(tmp_path, BUDGETS)


def test_a_test_that_measures_nothing_fails(tmp_path: Path) -> None:
    """And one that is skipped, or fails for another reason, stores nothing."""
    said = run_pytest(tmp_path, TRAPS, "--bfc-write-budgets")
    assert "3 failed, 2 skipped, 1 xfailed, 2 errors" in said
    assert "does not ask for the fixture of that name, so that nothing is measured" in said
    assert "test_theirs.py::test_without_with asks for bfc_memory_budget, but measures" in said
    assert "ValueError: '22 gigs' is not a size" in said
    assert "TypeError: bfc_memory_budget takes limit and allow: (), {'limits': '1 KiB'}" in said
    assert not (tmp_path / "bfc_budgets.json").exists()


@pytest.mark.long
def test_workers_of_xdist_store_and_compare(tmp_path: Path) -> None:
    assert "8 passed" in run_pytest(tmp_path, MANY, "-n", "2", "--bfc-write-budgets")
    figures = json.loads((tmp_path / "bfc_budgets.json").read_text())["figures"]
    assert sorted(figure["live"] for figure in figures.values()) == list(range(8))
    assert "8 passed" in run_pytest(tmp_path, MANY, "-n", "2")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a libcuda.so.1")
def test_each_test_gets_a_new_machine(tmp_path: Path) -> None:
    assert "2 passed" in run_pytest(tmp_path, CUDA)
