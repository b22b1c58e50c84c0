"""`import bfc` is light, and says what to do where it cannot work."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bfc

PACKAGE = Path(bfc.__file__).parent
HEAVY = [
    "bfc.study",
    "bfc.testing",
    "bfc_cuda_emulator",
    "bfc_slow_models",
    "bfc_tools",
    "bfc_torch_opencl",
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


def test_a_plan_is_recorded_where_nothing_has_imported_plans() -> None:
    run = run_python(
        "import bfc\n"
        "pool = bfc.BFCAllocator(bfc.SimulatedSubAllocator('1 GiB'))\n"
        "with pool.record_plan(): pool.allocate(1000)"
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_importing_bfc_imports_nothing_heavy() -> None:
    """And the command little more, none of what its subcommands need: each `bfc` would wait."""
    run = run_python(
        f"import sys, bfc; print([n for n in {HEAVY} if n in sys.modules])\n"
        "import bfc_tools.cli\n"
        "print([n for n in ('asyncio', 'numpy', 'torch', 'tqdm') if n in sys.modules])\n"
        "print([n for n in sys.modules if n.startswith('bfc_tools.predicting')])",
        "-W",
        "error",
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n[]\n[]\n", "")


def test_no_module_turns_the_gil_on() -> None:
    """On a build of CPython without it, none of ours asks for it, whatever the environment says."""
    paths = (path.relative_to(PACKAGE.parent) for path in PACKAGE.rglob("*.pyx"))
    modules = sorted(".".join(path.with_suffix("").parts) for path in paths)
    assert len(modules) > 40
    run = run_python(
        f"""if True:
        import sys, sysconfig
        from importlib import import_module

        def has_gil():
            return getattr(sys, "_is_gil_enabled", lambda: True)()

        before = has_gil()
        assert before != bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
        for name in {["numpy", "bfc._cython", *modules]}:
            import_module(name)
            assert has_gil() == before, name
        """,
        "-E",
        "-W",
        "error::RuntimeWarning",
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_using_raw_memory_imports_nothing_heavy() -> None:
    run = run_python(
        "import sys, bfc\n"
        "with bfc.BFCAllocator(bfc.SimulatedSubAllocator('1 MiB')) as a:\n"
        "    a.allocate(5).free(); a.deallocate_raw(a.allocate_raw(9))\n"
        "    str(a.snapshot()); a.check()\n"
        f"print([n for n in {HEAVY} if n in sys.modules])"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")


def test_what_no_allocator_needs_comes_when_it_is_asked_for() -> None:
    """In each of several threads that are the first to ask, in a child that was forked, and to
    whoever takes all names; and it is the same thing each time."""
    run = run_python(
        "import os, sys, threading\n"
        "import bfc\n"
        "assert {*bfc.__all__, 'study'} <= {*dir(bfc)}\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    os._exit(bfc.report.__name__ != 'report')\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert sys.modules.keys().isdisjoint({'bfc_tools', 'bfc.trace', 'bfc.plans'})\n"
        "barrier, found = threading.Barrier(8), []\n"
        "def ask(names):\n"
        "    barrier.wait()\n"
        "    found.append({name: getattr(bfc, name) for name in names})\n"
        "names = sorted(bfc._HOMES)\n"
        "orders = [names[i:] + names[:i] for i in range(8)]\n"
        "threads = [threading.Thread(target=ask, args=[order]) for order in orders]\n"
        "[thread.start() for thread in threads], [thread.join() for thread in threads]\n"
        "assert len(found) == 8\n"
        "assert all(one[name] is vars(bfc)[name] for one in found for name in names)\n"
        "assert bfc.plans is sys.modules['bfc.plans']\n"
        "assert bfc.study.compare is sys.modules['bfc.study'].compare\n"
        "from bfc import *\n"
        "assert predict is bfc.predict\n",
        *("-W", "error"),
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_an_installation_that_lacks_bfc_tools_says_what_to_do() -> None:
    """As one into a checkout is that was made before there was such a package."""
    run = run_python("import sys; sys.modules['bfc_tools'] = None; import bfc")
    assert run.returncode == 1
    assert "run `make dev` in the checkout, or install it again" in run.stderr


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'bfc' has no attribute 'nothing'$"):
        _ = bfc.nothing
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'bfc'"):
        from bfc import nothing  # noqa: F401


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
