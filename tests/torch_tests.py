"""PyTorch's own tests on the emulated driver, with PyTorch's own allocator and with ours.

`make test-torch-whole TORCH_TESTS=FOLDER` runs SUITES; FOLDER is `test` of PyTorch's source.
Kernels do nothing, so that many fail with either allocator. What matters are the others: each that
passes with PyTorch's own has to pass with ours. `tests/recordings/torch_tests.tsv` has the
outcomes: the test, what became of it with PyTorch's own and with ours, and why. Only what passes
with the first is run with ours. A test that differs is run again alone with both before it is
believed. A crash or a hang ends one test, and not the run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/helpers"), str(ROOT)]

import torch_runtime  # noqa: E402

OUTCOMES = ROOT / "tests/recordings/torch_tests.tsv"
KINDS = ("own", "ours")
EXPANDABLE = "expandable_segments:True"
LIST = "--list--"
PYTHON = (sys.executable, "-W", "ignore")
#: Every Python process that a test starts begins so, too.
SITE = """
import os
if os.environ.get("BFC_TORCH_TESTS"):
    from bfc.testing import cuda_emulator
    cuda_emulator.load().reset(devices=int(os.environ["BFC_TORCH_DEVICES"]))
    if os.environ["BFC_TORCH_TESTS"] == "ours":
        import bfc, bfc.integrations.torch, torch
        from bfc.integrations._torch_cuda import rules_for
        bfc.integrations.torch.install(
            lambda device: bfc.CachingAllocator(
                bfc.CUDASubAllocator(device), strict=True, torch=rules_for(torch)
            )
        )
"""


class Suite(NamedTuple):
    """A file of tests, with settings of the allocator."""

    file: str
    settings: str = ""
    devices: int = 1

    @property
    def name(self) -> str:
        return self.file + (f" [{self.settings}]" if self.settings else "")


SUITES = (
    Suite("test_cuda.py"),
    Suite("test_cuda.py", EXPANDABLE),
    Suite("test_cuda_multigpu.py", devices=2),
    Suite("test_cuda_trace.py"),
    Suite("test_cuda_primary_ctx.py", devices=2),
    Suite("inductor/test_cudagraph_trees.py"),
    Suite("inductor/test_cudagraph_trees.py", EXPANDABLE),
    Suite("dynamo/test_cudagraphs.py"),
    Suite("test_multiprocessing.py"),
)


class Outcome(NamedTuple):
    word: str  #: ok, skipped, failed, crashed or hung
    reason: str = ""


# -- in a process of its own ----------------------------------------------------------------------


def import_file(folder: Path, suite: Suite) -> Any:
    path = folder / suite.file
    sys.path[:0] = [str(path.parent), str(folder)]
    sys.argv[:] = [str(path)]
    import torch
    from torch.testing._internal import inductor_utils

    if not hasattr(inductor_utils, "HAS_CUDA"):  # as the tests of releases up to 2.8 say
        inductor_utils.HAS_CUDA = inductor_utils.HAS_CUDA_AND_TRITON
    module = importlib.import_module(path.stem)
    if suite.settings:  # as PyTorch's files for expandable segments do
        torch.cuda.memory._set_allocator_settings(suite.settings)
        for name in ("TestCuda", "TestBlockStateAbsorption"):
            if hasattr(module, name):
                getattr(module, name).expandable_segments = lambda _: True
    return module


def flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for it in suite:
        if isinstance(it, unittest.TestSuite):
            yield from flat(it)
        else:
            yield it


def names_in(module: Any) -> list[str]:
    found = unittest.defaultTestLoader.loadTestsFromModule(module)
    return [f"{type(it).__name__}.{it.id().rpartition('.')[2]}" for it in flat(found)]


def run_one(module: Any, name: str) -> Outcome:
    result = unittest.TestResult()
    try:
        unittest.defaultTestLoader.loadTestsFromName(name, module).run(result)
    except BaseException as error:
        return Outcome("failed", last_line(f"{type(error).__name__}: {error}"))
    for _, text in [*result.errors, *result.failures]:
        return Outcome("failed", last_line(text))
    if result.skipped:
        return Outcome("skipped", last_line(result.skipped[0][1]))
    return Outcome("ok")


def last_line(text: str) -> str:
    """The line that names the error."""
    lines = [line.strip() for line in text.splitlines()]
    named = [line for line in lines if ("Error" in line or "Exception" in line) and ": " in line]
    found = next(iter(named[-1:] or [line for line in lines if line][-1:]), "")
    return " ".join(found.replace("\t", " ").split())[:160]


def child(folder: Path, suite: Suite, report: int) -> None:
    """Runs the tests that are named on standard input. Never returns."""
    names = sys.stdin.read().split("\n")

    def say(*row: str) -> None:
        os.write(report, (json.dumps(row) + "\n").encode())

    module = import_file(folder, suite)
    for name in names_in(module) if names == [LIST] else names:
        say(name)
        if names != [LIST]:
            say(name, *run_one(module, name))
    sys.stdout.flush()
    os._exit(0)


# -- the run --------------------------------------------------------------------------------------


class Runner:
    site, script = SITE, __file__

    def __init__(self, folder: Path, scratch: Path, seconds: float) -> None:
        self.folder, self.seconds, self.scratch = folder, seconds, scratch
        (scratch / "site").mkdir()
        (scratch / "site/sitecustomize.py").write_text(self.site)
        self.libraries = torch_runtime.build()

    def begin(self, suite: Suite, kind: str, names: Sequence[str]) -> tuple[Any, int]:
        """A process that runs tests, and the end of the pipe that it reports to."""
        environment = torch_runtime.environment(self.libraries) | {
            "BFC_TORCH_TESTS": kind,
            "BFC_TORCH_DEVICES": str(suite.devices),
            "PYTHONPATH": f"{self.scratch / 'site'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}",
        }
        reader, writer = os.pipe()
        with (self.scratch / "output").open("ab") as output:
            process = subprocess.Popen(
                [*PYTHON, self.script, str(self.folder), "--child", json.dumps(suite), str(writer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[writer],
                start_new_session=True,
                cwd=self.scratch,
                env=environment,
            )
        os.close(writer)
        assert process.stdin is not None
        process.stdin.write("\n".join(names).encode())
        process.stdin.close()
        return process, reader

    def rows(self, process: Any, reader: int) -> Iterator[list[str]]:
        """What a process reports. It is ended when it says nothing for too long."""
        text = b""
        while select.select([reader], [], [], self.seconds)[0]:
            more = os.read(reader, 1 << 16)
            if not more:
                break
            *lines, text = (text + more).split(b"\n")
            yield from map(json.loads, lines)
        else:
            yield ["", "hung"]
        os.close(reader)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            pass
        try:  # with all that it started
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()

    def names(self, suite: Suite) -> list[str]:
        rows = self.rows(*self.begin(suite, "own", [LIST]))
        found = [row[0] for row in rows if row[0]]
        return sorted(set(found), key=found.index)

    def play(self, suite: Suite, kind: str, names: Sequence[str]) -> dict[str, Outcome]:
        """Each test in turn: a new process goes on behind one that crashed or hung."""
        outcomes: dict[str, Outcome] = {}
        left = list(names)
        while left:
            process, reader = self.begin(suite, kind, left)
            begun, how = None, "crashed"
            for name, *rest in self.rows(process, reader):
                if rest == ["hung"]:
                    how = "hung"
                elif rest:
                    outcomes[name], begun = Outcome(*rest), None
                else:
                    begun = name
            if begun is None and left[0] not in outcomes:
                begun = left[0]  # nothing could be imported
            if begun is not None:
                why = f"after {self.seconds:.0f} s" if how == "hung" else ending(process.returncode)
                outcomes[begun] = Outcome(how, why)
            left = [name for name in left if name not in outcomes]
            print(f"  {kind}: {len(outcomes)} of {len(names)}", flush=True)
        return outcomes

    def both(self, suite: Suite, names: Sequence[str]) -> dict[str, tuple[Outcome, Outcome]]:
        own = self.play(suite, "own", names)
        passing = [name for name in names if own[name].word == "ok"]
        ours = self.play(suite, "ours", passing)
        for name in passing:
            if ours[name].word != "ok" and not self.is_believed(name):  # alone, before it is
                for kind, outcomes in zip(KINDS, (own, ours), strict=True):
                    outcomes.update(self.play(suite, kind, [name]))
        return {name: (own[name], ours.get(name, Outcome("-"))) for name in names}

    def is_believed(self, name: str) -> bool:
        """Whether it is known why a test passes with the first only."""
        return False


def ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def write(suite: Suite, found: dict[str, tuple[Outcome, Outcome]], into: Path = OUTCOMES) -> None:
    """Puts the outcomes into the file, in the place of those that it has of these tests."""
    lines = into.read_text().splitlines()[1:] if into.exists() else []
    rows = {line.partition("\t")[0]: line.partition("\t")[2] for line in lines}
    for name, (own, ours) in found.items():
        reason = own.reason or ours.reason
        rows[f"{suite.name}::{name}"] = f"{own.word}\t{ours.word}\t{reason}"
    lines = ["test\town\tours\treason", *(f"{name}\t{rows[name]}" for name in sorted(rows))]
    into.write_text("\n".join([*lines, ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--suite", type=int, nargs="*", default=range(len(SUITES)))
    parser.add_argument("--only", default="", help="a part of the names of tests")
    parser.add_argument("--seconds", type=float, default=120, help="for a test at most")
    given = parser.parse_args()
    if given.child:
        child(given.folder, Suite(*json.loads(given.child[0])), int(given.child[1]))
    worse = 0
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(given.folder.resolve(), Path(scratch), given.seconds)
        for suite in (SUITES[number] for number in given.suite):
            names = [name for name in runner.names(suite) if given.only in name]
            print(f"{suite.name}: {len(names)} tests", flush=True)
            found = runner.both(suite, names)
            write(suite, found)
            for name, (own, ours) in found.items():
                if own.word == "ok" != ours.word:
                    worse += 1
                    print(f"    {name}: {ours.word}: {ours.reason}", flush=True)
            both = sum(own.word == ours.word == "ok" for own, ours in found.values())
            print(f"  both pass: {both}", flush=True)
    print(f"{worse} tests pass with PyTorch's own allocator, and not with ours")
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
