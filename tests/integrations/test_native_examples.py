"""The programs of examples/native: compiled by the lines at their top, and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from cpp import COMPILER

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "native"
CONFIG = Path(sysconfig.get_config_var("BINDIR"), f"python{sysconfig.get_python_version()}-config")
LIBRARY = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("LDLIBRARY"))
IN_A_PROGRAM = pytest.mark.skipif(
    not sysconfig.get_config_var("Py_ENABLE_SHARED"), reason="this Python is linked statically"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The programs, with the commands `python` and `python3-config` of this Python."""
    if COMPILER is None or not CONFIG.exists() or not LIBRARY.exists():
        pytest.skip("needs a compiler, and the library and headers of this Python")
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    for name, target in (("python", sys.executable), ("python3-config", CONFIG)):
        command = tmp_path / name
        command.write_text(f'#!/bin/sh\nexec {target} "$@"\n')
        command.chmod(0o755)
    return tmp_path


def shown(text: str) -> tuple[list[str], str]:
    """The commands of the first comment, and what it says that the last of them prints."""
    lines = [line[3:].strip() for line in re.findall(r"^(?://| \*)   .*$", text, re.MULTILINE)]
    commands = [line[2:] for line in lines if line.startswith("$ ")]
    return commands, "\n".join(lines[len(commands) :])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", [pytest.param("engine.cpp", marks=IN_A_PROGRAM), "frames.c"])
def test_a_program_compiles_and_prints_what_its_first_lines_say(folder: Path, name: str) -> None:
    commands, printed = shown((folder / name).read_text())
    *build, run = commands
    assert ran(" && ".join(build), folder) == ""
    # The checkout stands where an installation would.
    assert ran(re.sub(r"^PYTHONPATH=.* (?=\./)", "", run), folder) == printed


def ran(command: str, folder: Path) -> str:
    paths = [str(ROOT), *sys.path]
    environment = os.environ | {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.rstrip()


@IN_A_PROGRAM
def test_what_python_raises_is_thrown(folder: Path) -> None:
    """By a program that opens nothing that exists, and something that is no allocator."""
    source = folder / "wrong.cpp"
    source.write_text(
        "#include <bfc_embed.hpp>\n#include <cstdio>\nint main() {\n"
        + "".join(
            f'    try {{ bfc::open("{wrong}"); }} catch (const std::runtime_error& error) '
            "{ std::puts(error.what()); }\n"
            for wrong in ("bfc.Nothing()", "5")
        )
        + "}\n"
    )
    build = " && ".join(shown((folder / "engine.cpp").read_text())[0][:-1])
    warnings = "-Wall -Wextra -Werror wrong.cpp"
    assert ran(build.replace("engine.cpp", warnings), folder) == ""
    assert ran("./engine", folder).splitlines() == [
        "AttributeError: module 'bfc' has no attribute 'Nothing'",
        "TypeError: a pool is an allocator of bfc, not int",
    ]
