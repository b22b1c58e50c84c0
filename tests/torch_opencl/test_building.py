"""The extension is compiled once, found again without a compiler, and what goes wrong is told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from subprocess import PIPE

import pytest
import torch

import bfc
from bfc.pytorch import extension as extensions
from bfc_torch_opencl import building

SMALL = """
#include <Python.h>
#include <bfc_allocator.h>
#include <c10/core/DeviceType.h>

static PyObject* answer(PyObject*, PyObject*) {
  return PyUnicode_FromString(c10::DeviceTypeName(c10::DeviceType::CPU, true).c_str());
}
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, nullptr}, {}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "small", nullptr, -1, methods};
#define CONCATENATED(a, b) a##b
#define INIT(name) CONCATENATED(PyInit_, name)
PyMODINIT_FUNC INIT(TORCH_EXTENSION_NAME)() { return PyModule_Create(&definition); }
"""
LOAD = """
import sys, pathlib
from bfc_torch_opencl import building
module = building.load(pathlib.Path(sys.argv[1]))
print(module.answer(), module.__file__)
"""


class Extension:
    """A small source with a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "cache"
        (folder / "sources").mkdir()
        self.source = folder / "sources" / "extension.cpp"
        self.source.write_text(SMALL)

    def load(self) -> Path:
        """The path of the file that was loaded."""
        module = building.load(self.source)
        assert module.answer() == "cpu"
        return Path(module.__file__)

    def key(self) -> str:
        return extensions._key(torch, replace(building.EXTENSION, source=self.source))

    def files(self) -> list[Path]:
        return sorted(path for path in self.home.rglob("*.so") if path.is_file())


@pytest.fixture
def extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extension:
    made = Extension(tmp_path)
    monkeypatch.setenv("BFC_CACHE_HOME", str(made.home))
    monkeypatch.delenv("CXX", raising=False)
    return made


@pytest.fixture
def nothing(tmp_path: Path) -> str:
    """A search path without programs."""
    (tmp_path / "empty").mkdir()
    return str(tmp_path / "empty")


def test_what_was_compiled_is_found_again_without_a_compiler(
    extension, nothing, monkeypatch
) -> None:
    made = extension.load()
    before = made.stat()
    assert extension.load() == made
    monkeypatch.setenv("PATH", nothing)
    assert extension.load() == made
    assert made.stat().st_mtime_ns == before.st_mtime_ns
    assert extension.files() == [made]


def test_another_source_or_compiler_makes_another(extension, monkeypatch) -> None:
    made = {extension.load()}
    extension.source.with_name("part.hpp").write_text("// included, perhaps\n")
    made.add(extension.load())
    monkeypatch.setenv("CXX", "c++ -DANOTHER")
    made.add(extension.load())
    assert len(made) == 3
    assert set(extension.files()) == made


def test_what_it_is_made_from_is_in_the_key(extension, tmp_path, monkeypatch) -> None:
    keys = [extension.key()]
    extension.source.write_text(SMALL + "// changed\n")
    keys.append(extension.key())
    (tmp_path / "bfc_torch_allocator.hpp").write_text("// another\n")
    monkeypatch.setattr(extensions, "get_include", lambda: str(tmp_path))
    keys.append(extension.key())
    monkeypatch.setattr(extensions, "FLAGS", (*extensions.FLAGS, "-DANOTHER"))
    keys.append(extension.key())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    keys.append(extension.key())
    assert len(set(keys)) == len(keys)


def test_two_processes_at_once_make_it_once(extension) -> None:
    command = [sys.executable, "-c", LOAD, str(extension.source)]
    home = Path(bfc.__file__).parents[1]
    started = [
        subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True, cwd=home) for _ in range(2)
    ]
    said = [process.communicate(timeout=300) for process in started]
    (made,) = extension.files()
    assert [out for out, _ in said] == [f"cpu {made}\n"] * 2
    assert (
        "".join(err for _, err in said)
        == extensions.COMPILING.format(building.EXTENSION.what, torch.__version__) + "\n"
    )
    assert list(made.parent.glob(".building-*")) == []


@pytest.mark.parametrize("kept", [0, 1000, -1])
def test_a_damaged_file_is_made_again(extension, kept) -> None:
    made = extension.load()
    whole = made.read_bytes()
    made.unlink()  # and not overwritten, since this process has it loaded
    made.write_bytes(whole[:kept])
    assert extension.load().read_bytes()[:4] == b"\x7fELF"
    assert len(extension.files()) == 1


def test_a_whole_file_that_does_not_load_is_made_again(extension) -> None:
    made = extension.load()
    text = b"no library"
    made.rename(made.with_name(f"{made.stem.partition('-')[0]}-{extensions._digest(text)}.so"))
    (odd,) = extension.files()
    odd.unlink()
    odd.write_bytes(text)
    assert extension.load() != odd
    assert not odd.exists()


def test_a_source_that_makes_no_module_is_told(extension) -> None:
    extension.source.write_text(SMALL.replace("PyInit_", "PyInitial_"))
    with pytest.raises(RuntimeError, match="does not load: dynamic module does not define"):
        extension.load()
    assert extension.files() == [], "it is not kept"


def test_torch_that_is_missing_is_told(extension, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(bfc.DeviceUnavailableError) as caught:
        extension.load()
    assert "tensors on OpenCL need the package torch" in str(caught.value)
    assert "pip install 'bfc-allocator[torch-opencl]'" in str(caught.value)


@pytest.mark.parametrize("version", ["2.10.0+cpu", "1.13.1"])
def test_torch_that_is_too_old_is_told(extension, monkeypatch, version) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(bfc.DeviceUnavailableError) as caught:
        extension.load()
    assert f"need torch 2.11 or newer, and this is torch {version}" in str(caught.value)
    assert "pip install 'bfc-allocator[torch-opencl]'" in str(caught.value)


@pytest.mark.parametrize("compiler", ["no-such-compiler -O3", "c++"])
def test_no_compiler_is_told(extension, nothing, monkeypatch, compiler) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", nothing)
    with pytest.raises(bfc.DeviceUnavailableError) as caught:
        extension.load()
    assert str(caught.value) == (
        "the extension for PyTorch is compiled when first used, and there is no C++ compiler "
        f"{compiler.split()[0]!r}: install gcc or clang, or name one in CXX"
    )


def test_a_source_that_does_not_compile_is_told(extension) -> None:
    extension.source.write_text(SMALL + "\nint broken = what_is_this;\n")
    with pytest.raises(RuntimeError) as caught:
        extension.load()
    said = str(caught.value)
    assert said.startswith("the extension for PyTorch does not compile against torch 2.")
    assert "what_is_this" in said
    log = Path(said.rpartition("all of it: ")[2]).read_text()
    assert log.startswith("/"), "the command comes first"
    assert "what_is_this" in log
    assert extension.files() == []


def test_what_the_linker_misses_is_told(extension, monkeypatch) -> None:
    """Its lines have no "error"; the one that has says only that it failed."""
    monkeypatch.setenv("CXX", "c++ -lnothing_like_it")
    with pytest.raises(RuntimeError, match="cannot find -lnothing_like_it"):
        extension.load()


def test_a_cache_that_cannot_be_written_is_told(extension) -> None:
    extension.home.write_text("")  # a file where the folder is to be
    with pytest.raises(RuntimeError) as caught:
        extension.load()
    assert "the extension for PyTorch cannot be kept in" in str(caught.value)
    assert "name a folder that can be written in BFC_CACHE_HOME" in str(caught.value)


@pytest.mark.parametrize("header", ["bfc_allocator.h", "bfc_torch_allocator.hpp"])
def test_the_headers_are_where_the_package_says(header) -> None:
    assert "BFC_ALLOCATOR" in (Path(bfc.get_include()) / header).read_text()
