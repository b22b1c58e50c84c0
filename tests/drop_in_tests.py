"""The tests of vLLM's sleep mode and of torch_memory_saver, with their own memory and with ours.

`make test-drop-ins-own VLLM=FOLDER SAVER=FOLDER` runs them on the emulated driver; the folders are
the two sources. `tests/recordings/drop_in_tests.tsv` has the outcomes: the test, what became of it
with the library's own memory and with ours, and why. Only what passes with the first is run with
ours. What kernels would do, the host does (`helpers/torch_on_the_host.py`), also for graphs. vLLM's
files run alone (`helpers/vllm_alone.py`); the C++ parts of both are compiled. What their tests ask
their own books, `helpers/saver_view.py` and `vllm_alone.py` answer of ours.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests/helpers"), str(ROOT)]

import torch_runtime  # noqa: E402
from torch_tests import LIST, Outcome, Runner, Suite, last_line, write  # noqa: E402

OUTCOMES = ROOT / "tests/recordings/drop_in_tests.tsv"
#: Every Python process that a test starts begins so, too.
SITE = """
import os, sys
if os.environ.get("BFC_TORCH_TESTS") and "resource_tracker" not in str(sys.orig_argv):
    sys.path.append(os.environ["BFC_HELPERS"])
    from bfc.testing import cuda_emulator
    cuda_emulator.load().reset(devices=int(os.environ["BFC_TORCH_DEVICES"]))
    import torch, torch_on_the_host
    torch.set_num_threads(1)
    torch_on_the_host.begin()
    torch.cuda.device_memory_used = lambda device=None: (
        lambda free, total: total - free)(*torch.cuda.mem_get_info(device))  # which asks NVML
    if os.environ["BFC_TORCH_TESTS"] == "ours":
        import bfc, bfc.integrations.torch
        from bfc.integrations import torch_memory_saver
        torch_memory_saver.__path__ = [os.environ["BFC_SAVER"]]     # for its helpers of tests
        from bfc.integrations import _torch_cuda
        if _torch_cuda.serving() is None:       # a child of `configure_subprocess` is served
            bfc.integrations.torch.install()
        import saver_view
        saver_view.give_view()
"""
VLLM = Suite("tests/basic_correctness/memory/cumem/test_cumem.py")
SAVER = Suite("test/test_examples.py", devices=2)


ENGINE = "needs an engine and a model"
LARGE = "needs more than the 8 GiB of the emulated device, which are memory of the host's"
RESIDENT = "measures the process, which has the emulated device's memory as well"
#: Why tests fail or differ, where that was looked into: by a pattern of their names.
REASONS = {
    "test_release_kv_cache_memory*": ENGINE,
    "test_sleep_with_only_weights*": ENGINE,
    "test_basic_cumem": "waits for a call of torch.accelerator.synchronize when a block is freed, "
    "and a pool waits by events; what it says of sleep before that holds",
    "test_level2_discards*": "replaces the function by which vLLM's own allocator maps memory",
    "test_cpu_backup[[]*": "asks for the copy on the host after resume(), when a pool has none; "
    "what it says of contents before that holds",
    "test_disk_backup*": "looks for files in the folder, and those of a pool have no names",
    "test_cuda_vmm_granularity": "allocates by cudaMalloc, and a pool serves PyTorch",
    "test_cuda_graph[[]*": LARGE,
    "test_training_engine": LARGE,
    "test_cpu_backup_rss": RESIDENT,
    "test_cpu_backup_preload_backend*": RESIDENT,
}


class Reporter:
    """Plugin of pytest: says which test begins, and how it ends."""

    def __init__(self, names: Sequence[str], report: int) -> None:
        self.names, self.report, self.item = names, report, None

    def say(self, *row: str) -> None:
        os.write(self.report, (json.dumps(row) + "\n").encode())

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.names == [LIST]:
            for item in items:
                self.say(item.name)
            items.clear()
        items[:] = [item for item in items if item.name in self.names]

    def pytest_runtest_logstart(self, location: tuple[str, int | None, str]) -> None:
        self.say(location[2])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        word = {"passed": "ok"}.get(report.outcome, report.outcome)
        if report.when == "call" or word != "ok":
            text = report.longrepr
            said = text[2] if isinstance(text, tuple) else f"{text or ''}\n{report.capstdout}"
            self.say(report.location[2], word, "" if word == "ok" else last_line(said))


def child(folder: Path, suite: Suite, report: int) -> None:
    """Runs the tests that are named on standard input. Never returns."""
    names = sys.stdin.read().split("\n")
    if suite == VLLM:
        import vllm_alone

        vllm_alone.stand_in(folder, Path(os.environ["BFC_VLLM_COMPILED"]))
        if os.environ["BFC_TORCH_TESTS"] == "ours":
            from bfc.integrations import vllm

            vllm.register()
            vllm_alone.give_view()
    words = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull]
    words += ["--rootdir", str(folder), str(folder / suite.file), "--tb=short"]
    code = pytest.main(words, [Reporter(names, report)])
    sys.stdout.flush()
    os._exit(int(code))


class DropIns(Runner):
    site, script = SITE, __file__

    def __init__(self, folder: Path, scratch: Path, seconds: float, suite: Suite) -> None:
        super().__init__(folder, scratch, seconds)
        os.environ["BFC_HELPERS"] = str(ROOT / "tests/helpers")
        os.environ["BFC_SAVER"] = str(folder / "torch_memory_saver")
        if suite == VLLM:
            os.environ["BFC_VLLM_COMPILED"] = str(compile_vllm(folder, scratch))
        else:
            # The package and what is compiled of it lie where the tests of both find them.
            packages = scratch / "packages"
            shutil.copytree(folder / "torch_memory_saver", packages / "torch_memory_saver")
            compile_saver(folder, packages)
            os.environ["PYTHONPATH"] = str(packages)

    def is_believed(self, name: str) -> bool:
        return known(name) is not None


def compiled(sources: Sequence[Path], into: Path, *flags: str) -> Path:
    headers = torch_runtime.packages() / "nvidia/cu13/include"
    own = [f"-I{it}" for it in (into.parent, headers, sysconfig.get_path("include"))]
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", *flags, *own, *map(str, sources)]
    subprocess.run([*command, "-o", str(into)], check=True)
    return into


def stand_in_headers(folder: Path) -> None:
    """What NVIDIA's compiler would bring, as for our runtime library."""
    (folder / "crt").mkdir(exist_ok=True, parents=True)
    (folder / "crt/host_defines.h").write_text(torch_runtime.host_defines())
    (folder / "crt/host_config.h").touch()


def compile_vllm(folder: Path, scratch: Path) -> Path:
    stand_in_headers(scratch)
    into = scratch / f"cumem_allocator{sysconfig.get_config_var('EXT_SUFFIX')}"
    return compiled([folder / "csrc/cumem_allocator.cpp"], into)


def compile_saver(folder: Path, packages: Path) -> None:
    stand_in_headers(packages)
    sources = [
        folder / f"csrc/{it}.cpp" for it in ("api_forwarder", "core", "disk_backend", "entrypoint")
    ]
    for mode in ("preload", "torch"):
        into = packages / f"torch_memory_saver_hook_mode_{mode}_cu13.abi3.so"
        flags = ["-DUSE_CUDA=1", f"-DTMS_HOOK_MODE_{mode.upper()}=1", "-ldl"]
        # Its tests look for calls of the runtime library in it, and so find those it is linked to.
        runtime = torch_runtime.build() / "libcudart.so.13"
        compiled(sources, into, *flags, "-Wl,--no-as-needed", str(runtime))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--child", nargs=2)
    parser.add_argument("--vllm", type=Path, help="the folder of vLLM's source")
    parser.add_argument("--saver", type=Path, help="that of torch_memory_saver's")
    parser.add_argument("--only", nargs="*", default=[""], help="parts of the names of tests")
    parser.add_argument("--seconds", type=float, default=300, help="for a test at most")
    given = parser.parse_args()
    if given.child:
        child(given.folder, Suite(*json.loads(given.child[0])), int(given.child[1]))
    worse = 0
    for suite, folder in ((VLLM, given.vllm), (SAVER, given.saver)):
        if folder is None:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            runner = DropIns(folder.resolve(), Path(scratch), given.seconds, suite)
            names = [it for it in runner.names(suite) if any(part in it for part in given.only)]
            print(f"{folder.name}: {len(names)} tests", flush=True)
            found = {
                name: (with_reason(name, own), with_reason(name, ours))
                for name, (own, ours) in runner.both(suite, names).items()
            }
            write(suite, found, OUTCOMES)
            worse += said(found)
    print(f"{worse} tests pass with the library's own memory only, for no known reason")
    return int(worse > 0)


def known(name: str) -> str | None:
    return next((why for it, why in REASONS.items() if fnmatch.fnmatchcase(name, it)), None)


def with_reason(name: str, outcome: Outcome) -> Outcome:
    why = known(name)
    return outcome if outcome.word in ("ok", "-") or why is None else outcome._replace(reason=why)


def said(found: dict[str, tuple[Outcome, Outcome]]) -> int:
    """Prints what passes with the library's own memory only, and says how many of these differ for
    no known reason."""
    worse = {name: ours for name, (own, ours) in found.items() if own.word == "ok" != ours.word}
    for name, ours in worse.items():
        print(f"    {name}: {ours.word}: {ours.reason}", flush=True)
    both = sum(own.word == ours.word == "ok" for own, ours in found.values())
    print(f"  both pass: {both}", flush=True)
    return sum(known(name) is None for name in worse)


if __name__ == "__main__":
    sys.exit(main())
