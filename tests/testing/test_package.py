"""`bfc.testing` as a package: nothing is loaded before it is asked for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import bfc
import bfc.testing

HOME = Path(bfc.__file__).parents[1]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, cwd=HOME
    )


def without(*packages: str) -> str:
    return f"import sys; sys.modules.update(dict.fromkeys({packages}))\n"


def test_importing_bfc_does_not_import_it() -> None:
    run = run_python("import bfc, sys; print([n for n in sys.modules if 'testing' in n])")
    assert (run.returncode, run.stdout, run.stderr) == (0, "[]\n", "")


def test_importing_it_imports_neither_hypothesis_nor_pytest() -> None:
    run = run_python(
        "import bfc.testing, sys; print({'hypothesis', 'pytest'} & set(sys.modules) or '')"
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "\n", "")


@pytest.mark.parametrize("name", bfc.testing.__all__)
def test_each_name_is_there_and_says_what_it_is(name: str) -> None:
    assert (getattr(bfc.testing, name).__doc__ or "").strip()
    assert name in dir(bfc.testing)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", ["IntegerSource", "Misbehaving", "Twins", "cuda_emulator", "leak_check"]
)
def test_what_needs_no_extra_works_without(name: str) -> None:
    run = run_python(without("hypothesis", "pytest") + f"from bfc.testing import {name}")
    assert (run.returncode, run.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("AllocatorMachine", "hypothesis"),
        ("SubAllocatorContract", "pytest"),
        ("traces", "hypothesis"),
    ],
)
def test_what_needs_an_extra_says_so(name: str, extra: str) -> None:
    run = run_python(without(extra) + f"from bfc.testing import {name}")
    assert f"{name} needs" in run.stderr
    assert "pip install 'bfc-allocator[testing]'" in run.stderr


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bfc.testing.nothing
