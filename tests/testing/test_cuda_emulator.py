"""The emulated CUDA driver as users get it: made in their cache, or refused in words."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bfc
from bfc.testing import cuda_emulator
from bfc_cuda_emulator import library

ASK = "from bfc.testing import cuda_emulator; cuda_emulator.load()"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv("BFC_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(bfc.__file__).parents[1],
    )


def told(code: str, **environment: str) -> str:
    """The last line of what a process says that must fail."""
    process = start(code, **environment)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    return errors.splitlines()[-1]


def test_the_library_is_kept_where_the_system_keeps_caches(monkeypatch) -> None:
    monkeypatch.delenv("BFC_CACHE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert library.cache() == Path("/somewhere/bfc")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert library.cache() == Path("/home/somebody/.cache/bfc")


@pytest.mark.long
def test_it_is_made_once_by_many_processes_at_a_time(home: Path) -> None:
    started = [start(ASK + "; print('loaded')") for _ in range(4)]
    assert [process.communicate(timeout=120) for process in started] == [("loaded\n", "")] * 4
    (made,) = (path for path in home.rglob("*") if path.is_file())
    assert made == library.path()
    before = made.stat().st_ino
    assert cuda_emulator.build() == made
    assert made.stat().st_ino == before


def test_another_compiler_or_other_sources_make_another(home: Path, tmp_path: Path) -> None:
    known = {library.path()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", f"{shutil.which('cc')} -O1")
        known.add(library.path())
        patch.delenv("CC")
        copied = shutil.copytree(library.HERE, tmp_path / "sources")
        (copied / "stubs.c").write_text("/* nothing */")
        patch.setattr(library, "HERE", copied)
        known.add(library.path())
    assert len(known) == 3


def test_a_driver_that_is_loaded_already_is_refused(tmp_path: Path) -> None:
    other = shutil.copy(cuda_emulator.build(), tmp_path)
    line = told(f"import ctypes; ctypes.CDLL({other!r})\n{ASK}")
    assert line.startswith("bfc.errors.DeviceUnavailableError: a CUDA driver is loaded already")
    assert str(other) in line


def test_no_compiler_is_told(home: Path) -> None:
    line = told(ASK, CC="no-such-compiler -g")
    assert "there is no C compiler 'no-such-compiler': install gcc or clang" in line


def test_another_system_is_told() -> None:
    assert "for Linux alone, not for darwin" in told(f"import sys; sys.platform = 'darwin'; {ASK}")


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    line = told(ASK, BFC_CACHE_HOME=str(tmp_path / "file"))
    assert "cannot be kept in" in line
    assert "BFC_CACHE_HOME" in line


def test_code_that_does_not_compile_is_told(home: Path, tmp_path: Path, monkeypatch) -> None:
    copied = shutil.copytree(library.HERE, tmp_path / "sources")
    for file in copied.glob("*.c"):
        file.write_text("what is this" if file.name == "core.c" else "")
    monkeypatch.setattr(library, "HERE", copied)
    with pytest.raises(RuntimeError, match="does not compile"):
        cuda_emulator.build()
    assert not [path for path in home.rglob("*") if path.is_file()], "nothing is left"
