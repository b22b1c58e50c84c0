"""Runs the tests of other libraries on their own memory and on ours, and compares the outcomes.

`make test-peers-own` runs each library's tests three times: on its own memory, and on pools of both
policies (`helpers/peers_memory.py`). OpenCL is PoCL. CUDA is the emulated driver, whose kernels
compute nothing, so that many tests fail on all three: only outcomes that differ count. A test that
differs runs once more on each memory, in a process of its own: what the tests before it left does
not count either. What differs for a known reason stands in `peers_own.toml`. Any other difference
is printed, and the exit code is 1.

pyopencl's and CuPy's tests come from their source archives, and stay in `build/peers-own`; numba's
are part of its wheel, and are copied there. cuda.core has no source archive on the index, and no
tests in its wheel.

    python tests/peers_own.py [--out FILE] [PEER...]
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections import Counter
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "peers-own"
KNOWN = Path(__file__).with_suffix(".toml")
MEMORIES = ("own", "bfc", "caching")
PATIENCE = 300  # seconds for a test
NONE_LEFT = 5  # what pytest exits with when no test is left
Outcomes = dict[str, str]  # by test, or by memory


@dataclass(frozen=True)
class Peer:
    """`package` is what is installed, `archive` the name of its source archive on the index, and
    `files` are patterns of files of tests: of those that allocate, and do not need results of
    kernels where nothing computes them."""

    package: str
    archive: str
    files: tuple[str, ...]


PEERS = {
    "pyopencl": Peer(
        "pyopencl",
        "pyopencl",
        tuple(
            f"test/test_{it}.py"
            for it in ("array", "arrays_in_structs", "clmath", "clrandom", "enqueue_copy")
        ),
    ),
    "numba": Peer("numba-cuda", "", ("cudadrv/test_*.py",)),
    "cupy": Peer(
        "cupy-cuda13x",
        "cupy",
        (
            *(
                f"tests/cupy_tests/cuda_tests/test_{it}.py"
                for it in (
                    *("memory", "memory_hook", "pinned_memory", "stream"),
                    *("device", "driver", "graph"),
                )
            ),
            "tests/cupy_tests/cuda_tests/memory_hooks_tests/*.py",
            *(
                f"tests/cupy_tests/core_tests/test_{it}.py"
                for it in (
                    *("ndarray", "ndarray_owndata", "ndarray_get", "multithreading"),
                    "ndarray_cuda_array_interface",
                )
            ),
        ),
    ),
}


def unpacked(peer: Peer) -> Path:
    """A folder with the library's tests, of the version that is installed."""
    version = metadata.version(peer.package)
    found = FOLDER / f"{peer.archive or peer.package}-{version}"
    if found.exists():
        return found
    FOLDER.mkdir(parents=True, exist_ok=True)
    if not peer.archive:
        copy_installed(found)
        return found
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", peer.archive, f"{peer.archive}=={version}", "-d", str(FOLDER)]
    # CuPy's archive looks for CUDA before it tells its name, unless its documents are built.
    subprocess.run(command, check=True, env=os.environ | {"READTHEDOCS": "True"})
    with tarfile.open(f"{found}.tar.gz") as opened:
        opened.extractall(FOLDER, filter="data")
    return found


def copy_installed(found: Path) -> None:
    """Numba's tests, without what makes them a package: pytest would import it as `cuda`, where
    the bindings are."""
    spec = find_spec("numba_cuda")
    assert spec is not None, "numba-cuda is not installed"
    assert spec.origin is not None
    installed = Path(spec.origin).parent / "numba" / "cuda" / "tests"
    shutil.copytree(installed, found, ignore=shutil.ignore_patterns("__init__.py", "__pycache__"))


def outcomes(name: str, memory: str, only: str = "") -> Outcomes:
    """Of each of the library's tests, or of one. Where the process ends in the middle, the next
    goes on with the test after that."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch, "results")
        results.touch()
        size, code = -1, 0
        while code != NONE_LEFT and size < (size := results.stat().st_size):
            code = run(name, memory, only, results)
        return dict(json.loads(line) for line in results.read_text().splitlines())


def run(name: str, memory: str, only: str, results: Path) -> int:
    """The exit code of a process of pytest."""
    peer = PEERS[name]
    folder = unpacked(peer)
    environment = os.environ | {
        "BFC_PEER": name,
        "BFC_PEER_MEMORY": memory,
        "BFC_PEER_RESULTS": str(results),
        "BFC_PEER_ONLY": only,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "helpers"), str(ROOT)]),
        "PYOPENCL_TEST": "portable:",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "peers_memory", "-p", "no:cacheprovider"]
    command += ["-p", "no:xdist", "--tb=no", "-c", os.devnull, "--rootdir", str(folder)]
    command += ["--import-mode=importlib", "--continue-on-collection-errors"]
    # A test that does not end ends its process.
    command += ["-o", f"faulthandler_timeout={PATIENCE}", "-o", "faulthandler_exit_on_timeout=true"]
    files = sorted({str(file) for pattern in peer.files for file in folder.glob(pattern)})
    done = subprocess.run([*command, *files], env=environment, capture_output=True, text=True)
    if not results.stat().st_size:
        raise SystemExit(f"{name}: no test ran: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode


def differing(found: dict[str, Outcomes], test: str) -> Outcomes | None:
    """The outcome of a test by memory, if they are not the same."""
    said = {memory: found[memory].get(test, "not run") for memory in MEMORIES}
    return said if len(set(said.values())) > 1 else None


def compare(name: str) -> dict[str, Outcomes]:
    """The outcomes of the tests that differ, after a line about all of them."""
    found = {memory: outcomes(name, memory) for memory in MEMORIES}
    every = sorted(set().union(*found.values()))
    counted = Counter(found["own"].values())
    print(f"{name}: {len(every)} tests; on its own memory {dict(counted)}", flush=True)
    differences = {}
    for test in filter(lambda test: differing(found, test), every):
        alone = {memory: outcomes(name, memory, test) for memory in MEMORIES}
        if said := differing(alone, test):
            differences[test] = said
        else:
            print(f"  {test} differs only after others: {differing(found, test)}", flush=True)
    return differences


def reason(name: str, test: str) -> str | None:
    for known in tomllib.loads(KNOWN.read_text()).get(name, ()):
        if fnmatch.fnmatchcase(test, known["tests"]):
            return str(known["why"])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", nargs="*", choices=[[], *PEERS], metavar="PEER")
    parser.add_argument("--out", type=Path, help="write all differences there, as JSON")
    arguments = parser.parse_args()
    unknown, found = 0, {}
    for name in arguments.peers or PEERS:
        found[name] = compare(name)
        print(f"{name}: {len(found[name])} differ")
        for test, said in found[name].items():
            why = reason(name, test)
            unknown += why is None
            print(f"  {test}: {', '.join(f'{key} {value}' for key, value in said.items())}")
            print(f"    {why or 'NOT KNOWN: mend it, or add it to ' + KNOWN.name}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1))
    raise SystemExit(unknown > 0)


if __name__ == "__main__":
    main()
