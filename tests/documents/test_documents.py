"""The README, the documents and the docstrings, run as they are written."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pocl
import pytest
from documents import BLOCK, DOCUMENTS, ROOT, commands, not_printed, run_in_a_process
from own_interpreter import run as run_alone
from sources import PACKAGES, is_module

import bfc
from bfc.testing import cuda_emulator as emulator
from bfc_tools.cli import main
from bfc_tools.cli.miniature import record

#: These run where distributed and torch are installed: tests/dask and tests/torch_opencl have them.
RUN_ELSEWHERE = ("dask.md", "tensors-on-opencl.md")
TAKE_LONG = (
    *("fuzzing.md", "one-pool.md", "ray.md", "sleep.md", "why-did-it-not-fit.md"),
    "your-own-policy.md",
)
RUN = [
    pytest.param(
        path,
        marks=[pytest.mark.long] if path.name in TAKE_LONG else [],
        id=str(path.relative_to(ROOT)),
    )
    for path in DOCUMENTS
    if path.name not in RUN_ELSEWHERE and "```python\n" in path.read_text()
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("path", RUN)
def test_the_code_of_a_document_runs_and_prints_what_stands_below_it(path: Path) -> None:
    """In a process of its own. A page that needs CUDA loads the emulated driver itself, so that a
    reader without a GPU can try it; on a GPU (BFC_TEST_GPU=1) that is left out."""
    if "numba" in path.read_text():
        pytest.importorskip("numba")
        pytest.importorskip("cuda.core")
    uses_opencl = "pyopencl" in path.read_text() or "bfc.opencl" in path.read_text()
    if uses_opencl and not pocl.devices():
        pytest.skip(str(bfc.opencl.is_available()))
    ran = run_in_a_process(path, "import pocl; pocl.devices()" if uses_opencl else "pass")
    assert (ran.returncode, ran.stderr) == (0, "")


SHOWN = [
    (path, command, output)
    for path in DOCUMENTS
    for command, output in commands(path, "advise|replay|--version")
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("path", "command", "shown"), SHOWN, ids=lambda value: getattr(value, "name", None)
)
def test_a_command_of_a_document_prints_what_stands_below_it(
    path: Path, command: str, shown: list[str]
) -> None:
    """Every line that is shown. Only what `bfc advise` says while it works goes elsewhere. Those of
    `bfc predict` need torch: tests/predicting has them."""
    ran = subprocess.run(
        [sys.executable, "-m", *shlex.split(command)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert re.sub(r"bfc advise: .*\n", "", ran.stderr) == ""
    assert not_printed(shown, ran.stdout) == []


@pytest.mark.long
def test_the_first_screen_of_the_readme_runs_far_from_a_checkout(tmp_path, monkeypatch):
    """What it installs is there, and another recording in the place of the training's."""
    first_screen = (ROOT / "README.md").read_text().partition("\n## ")[0]
    memory = types.SimpleNamespace(
        _record_memory_history=lambda: None, _dump_snapshot=lambda name: record(Path(name))
    )
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(memory=memory))
    monkeypatch.chdir(tmp_path)
    ran = []
    for kind, code in BLOCK.findall(first_screen):
        if kind == "py":
            exec(code, {"torch": torch})
            continue
        for name, *words in (shlex.split(line[2:], comments=True) for line in code.splitlines()):
            if name == "bfc" and words[0] not in ("predict", "run"):  # which need torch
                assert main(words) == 0
                ran.append(words[0])
    assert ran == ["demo", "advise", "report"]
    assert (tmp_path / "snapshot.html").exists()


def test_the_documents_show_what_commands_print():
    assert {path.name for path, _, _ in SHOWN} >= {"README.md", "first-hour.md"}


#: These import torch, which is not here, and have no examples.
WITH_TORCH = {
    *(
        f"bfc_torch_opencl.{name}"
        for name in ("copies", "device_module", "kernels", "places", "runtime")
    ),
    *(
        f"bfc_tools.predicting.{name}"
        for name in (
            "changing",
            "cuda_module",
            "even_choices",
            "fake_torch",
            "generation",
            "hooks",
            "host_numbers",
            "known_values",
            "legacy_types",
            "lengths",
            "real_values",
            "recorder",
        )
    ),
}
FOUND = {
    module.name
    for package in PACKAGES
    for module in pkgutil.walk_packages([str(package)], f"{package.name}.")
    if is_module(module.name)  # or a build has left it behind, whose source is gone
}
MODULES = sorted({*(package.name for package in PACKAGES), *FOUND} - WITH_TORCH)


def test_modules_that_are_not_tried_have_no_examples() -> None:
    assert WITH_TORCH <= FOUND
    for name in WITH_TORCH:
        path = ROOT / f"{name.replace('.', '/')}.py"
        assert ">>>" not in path.read_text()


#: What modules cannot be imported without, or their examples.
NEEDS = {
    "bfc.copying.opencl_stream": "pyopencl",
    "bfc.integrations.prometheus": "prometheus_client",
}


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_the_docstrings_run(name: str):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    if "emulator" in name:  # which change the one machine of a process
        run = f"import doctest, {name}; print(doctest.testmod({name}).failed)"
        assert emulator.script(run).stdout == "0\n"
        return
    if name == "bfc.integrations":  # an emulated driver in this process would count as a GPU
        run_alone(f"import doctest, {name}; assert doctest.testmod({name}).failed == 0")
        return
    module = importlib.import_module(name)
    assert doctest.testmod(module).failed == 0


def test_the_examples_are_found_in_compiled_modules_too():
    from bfc.allocators import _allocator

    assert len([test for test in doctest.DocTestFinder().find(_allocator) if test.examples]) >= 5
