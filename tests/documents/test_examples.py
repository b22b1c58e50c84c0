"""The programs of examples/: each runs as its docstring says, and prints what stands there."""

from __future__ import annotations

import ast
import doctest
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pocl
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
#: A command of a docstring, and what it prints.
RUN = re.compile(r"^    \$ (.+)\n((?:    .*\n)*)", re.MULTILINE)
#: PoCL's compiler may have to be told which processor it is on (tests/helpers/pocl.py).
WITH_POCL = (
    "import pocl, runpy, sys; pocl.start(); sys.argv = sys.argv[1:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
TAKE_LONG = ("fuzz_a_source", "my_policies", "opencl_arrays", "stitching", "which_settings_help")
NEEDS = {"cuda.core": "cuda.core", "from numba": "numba", "pyopencl": "pyopencl"}


def runs_of(path: Path) -> list[tuple[str, str]]:
    """(command, what it prints) as the docstring has them."""
    text = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
    return [
        (command, re.sub(r"^    ", "", printed, flags=re.MULTILINE))
        for command, printed in RUN.findall(f"{text}\n")
    ]


def all_runs() -> Iterator[tuple[Path, str, str]]:
    for path in EXAMPLES:
        for command, printed in runs_of(path):
            yield path, command, printed


@pytest.mark.parametrize(
    ("path", "command", "printed"),
    [
        pytest.param(*run, id=run[0].stem, marks=[pytest.mark.long] * (run[0].stem in TAKE_LONG))
        for run in all_runs()
    ],
)
def test_an_example_prints_what_its_docstring_says(path: Path, command: str, printed: str) -> None:
    for word, package in NEEDS.items():
        if word in path.read_text():
            pytest.importorskip(package)
    if "pyopencl" in path.read_text() and not pocl.devices():
        pytest.skip("needs an OpenCL device")
    ran = run(command, with_pocl="pyopencl" in path.read_text())
    assert (ran.returncode, ran.stderr) == (0, "")
    assert doctest.OutputChecker().check_output(printed, ran.stdout, doctest.ELLIPSIS), ran.stdout


def run(command: str, *, with_pocl: bool) -> subprocess.CompletedProcess[str]:
    """The command in the checkout, with the Python and the packages of this process."""
    words = shlex.split(command)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z]+=", word))
    python, *arguments = words[len(variables) :]
    assert python == "python"
    paths = [variables.pop("PYTHONPATH", ""), *sys.path]
    return subprocess.run(
        [sys.executable, *(["-c", WITH_POCL] if with_pocl else []), *arguments],
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )


def test_an_example_says_first_what_it_shows_and_how_to_run_it() -> None:
    for path in EXAMPLES:
        assert re.match(r'"""[A-Z]', path.read_text()), path.name
        assert [path.name in command for command, _ in runs_of(path)] == [True], path.name


def test_the_site_shows_every_example() -> None:
    shown = re.findall(
        r"^```{literalinclude} \.\./(.+)$", (ROOT / "docs/examples.md").read_text(), re.M
    )
    assert sorted(shown) == [str(path.relative_to(ROOT)) for path in EXAMPLES]


def test_the_lines_of_expandable_segments_stand_in_the_how_to() -> None:
    text = (ROOT / "examples/expandable_segments.py").read_text()
    lines = text.partition('"""\n\n')[2]
    assert sum(bool(line) for line in lines.splitlines()) == 14
    assert f"```python\n{lines}```" in (ROOT / "docs/how-to/why-did-it-not-fit.md").read_text()
