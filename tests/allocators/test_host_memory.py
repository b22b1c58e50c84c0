"""A host without memory: whichever allocation fails, nothing crashes, and nothing is lost.

`host_memory.py` does the work, in a process of its own, and prints the line that repeats a fault.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def missing(what: str) -> None:
    """What CI needs and does not find fails there; elsewhere it is skipped."""
    if os.environ.get("CI") or os.environ.get("BFC_CI"):
        pytest.fail(what)
    pytest.skip(what)


def require_hooks() -> None:
    if importlib.util.find_spec("_testcapi") is None:
        missing("this Python has no _testcapi, which makes its memory fail")


def run(kind: str, **environment: str) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "host_memory.py", kind],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "faults 0\n", done.stdout[-3000:]


@pytest.mark.slow
def test_nothing_is_lost_where_python_has_no_memory() -> None:
    require_hooks()
    run("python")


@pytest.mark.long
def test_nothing_is_lost_where_c_has_no_memory(tmp_path: Path) -> None:
    if os.environ.get("BFC_DEBUG") == "2":
        pytest.skip("the build checks after each change, for which it needs memory")
    if not COMPILER:
        missing("no C++ compiler: set CXX, or install g++ or clang++")
    if "asan" in os.environ.get("LD_PRELOAD", "") or "tsan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a sanitizer stands in for malloc already")
    shim = tmp_path / "fail_nth.so"
    build = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", "-o", shim, HERE / "fail_nth.cpp"]
    subprocess.run([*build, "-ldl"], check=True)
    run("native", LD_PRELOAD=str(shim))


def test_constructors_views_and_exports_find_no_memory() -> None:
    """The three that ended the process, or held a buffer for ever, each failed by itself."""
    require_hooks()
    code = """
import _testcapi, sys, bfc
sys.unraisablehook = lambda report: None
source = bfc.SimulatedSubAllocator("64 MiB")
allocator = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"), allow_growth=True)
buffer = allocator.allocate(4096)
view = buffer.view("f4")
memoryview(view).release()
calls = [lambda: bfc.BFCAllocator(source), lambda: bfc.PinnedAllocator(source)]
calls += [lambda: buffer.view("f4"), lambda: memoryview(view).release()]
for call in calls:
    for n in range(60):
        for _ in range(20):
            _testcapi.set_nomemory(n, n + 1)
            try:
                call()
            except MemoryError:
                pass
            finally:
                _testcapi.remove_mem_hooks()
buffer.free()
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr[-2000:]
