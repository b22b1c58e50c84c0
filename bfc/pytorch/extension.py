"""Makes an extension of PyTorch: compiled once for each torch, Python and compiler, and kept in the
user's cache.

It is one translation unit, so the compiler is called directly, and no ninja is needed. A file of
the cache has two numbers in its name: one for the compiler, and one for its own content, so that a
damaged file is noticed without loading it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from bfc.compiling import cache, compiler, kept_in, needed
from bfc.errors import DeviceUnavailableError
from bfc.include import get_include

#: -O1 takes half the time of -O2, and the hot code is in the pool, which is compiled already.
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared")
ERROR_LINES = 6
COMPILING = "bfc: compiling {} {}, which takes up to a minute; later processes find it made"


@dataclass(frozen=True)
class Extension:
    """An extension, and what is said about it."""

    source: Path  # its one source file; headers may stand beside it
    name: str  # the name of its module
    folder: str  # in the cache
    what: str  # what it is called in errors
    #: What cannot be had without it, as the beginning of a sentence: "tensors on OpenCL need".
    needed_by: str
    install: str  # the command that installs torch for it
    oldest: tuple[int, int]  # the oldest version of torch that it works with
    libraries: tuple[str, ...] = ("c10", "torch_cpu", "torch", "torch_python")
    headers: tuple[str, ...] = ()  # folders, besides PyTorch's, Python's and bfc's own
    #: Headers by name that stand in where the compiler finds none.
    stand_ins: tuple[tuple[str, str], ...] = ()


def load(wanted: Extension) -> ModuleType:
    """The extension's module, compiled first if the cache does not have it.

    Raises DeviceUnavailableError where torch is missing or too old, or the compiler is, and
    RuntimeError where the source does not compile, the cache cannot be written, or what was
    compiled does not load.
    """
    path = made(wanted)
    with contextlib.suppress(ImportError):  # a torch of the same name is another one now
        return _module(wanted.name, path)
    path.unlink(missing_ok=True)
    path = made(wanted)
    try:
        return _module(wanted.name, path)
    except ImportError as error:
        path.unlink(missing_ok=True)
        raise RuntimeError(
            f"{wanted.what} was compiled for torch {supported_torch(wanted).__version__} and does "
            f"not load: {error}"
        ) from error


def made(wanted: Extension) -> Path:
    """The extension's file in the cache, compiled first if it is not there. Raises as `load`."""
    torch = supported_torch(wanted)
    folder = cache() / wanted.folder / _key(torch, wanted)
    found = next(_whole(folder), None)
    if found is not None:
        return found
    with _alone(folder):
        return next(_whole(folder), None) or _build(torch, wanted, folder)


def supported_torch(wanted: Extension) -> Any:
    """torch. Raises DeviceUnavailableError, which says what to install."""
    return torch_from(wanted.oldest, wanted.needed_by, wanted.install)


def torch_from(oldest: tuple[int, ...], needed_by: str, install: str) -> Any:
    """torch, of a version or newer. Raises DeviceUnavailableError, which says what to install."""
    try:
        import torch
    except ImportError as error:
        raise DeviceUnavailableError(
            f"{needed_by} the package torch ({error})\n  try: {install}"
        ) from error
    if torch_version(torch) < oldest:
        raise DeviceUnavailableError(
            f"{needed_by} torch {oldest[0]}.{oldest[1]} or newer, and this is "
            f"torch {torch.__version__}\n  try: {install}"
        )
    return torch


def torch_version(torch: Any) -> tuple[int, ...]:
    """Its version, the first two numbers."""
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def _key(torch: Any, wanted: Extension) -> str:
    """The name of a folder, from all that the extension is made from, except the compiler."""
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    parts: list[object] = [torch.__version__, torch.version.git_version, abi, platform.machine()]
    parts += [
        FLAGS,
        wanted.libraries,
        wanted.headers,
        wanted.stand_ins,
        _definitions(torch, wanted.name),
    ]
    for folder in (wanted.source.parent, Path(get_include())):
        code = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".hpp", ".h"))
        parts += [(path.name, path.read_bytes()) for path in code]
    return f"torch{torch.__version__}-{abi}-{_digest(repr(parts).encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _definitions(torch: Any, name: str) -> tuple[str, ...]:
    """The macros that `torch.utils.cpp_extension` defines."""
    return (
        f"-DTORCH_EXTENSION_NAME={name}",
        "-DTORCH_API_INCLUDE_EXTENSION_H",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    )


def _whole(folder: Path) -> Iterator[Path]:
    """The files of the cache that this compiler has made, or any compiler where there is none.
    Damaged ones are removed."""
    command = compiler("CXX", "c++")
    made_by = "*" if command is None else _compiler_number(command)
    for path in sorted(folder.glob(f"{made_by}-*.so")):
        with contextlib.suppress(OSError):  # another process was first, or the cache is not ours
            if path.stem.endswith(f"-{_digest(path.read_bytes())}"):
                yield path
            else:
                path.unlink()


def _compiler_number(command: list[str]) -> str:
    """A number for the compiler's path, options and version."""
    asked = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, errors="replace", check=False
    )
    return _digest(repr((command, asked.stdout.partition("\n")[0])).encode())


def _module(name: str, path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Only one process builds at a time: the others wait, and find what it made. Where the file
    system has no locks, they build beside it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(folder / "lock", "w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(torch: Any, wanted: Extension, folder: Path) -> Path:
    """The new file of the cache."""
    command = needed("CXX", "c++", "C++", wanted.what)
    print(COMPILING.format(wanted.what, torch.__version__), file=sys.stderr, flush=True)
    # The compiler writes to a temporary folder: in a prediction Python alone may see the cache.
    with kept_in(folder, wanted.what) as kept, TemporaryDirectory(prefix="bfc-building-") as name:
        scratch, moved = Path(name), kept / "made.so"
        file = scratch / "made.so"
        for header, text in wanted.stand_ins:
            (scratch / header).parent.mkdir(exist_ok=True)
            (scratch / header).write_text(text)
        arguments = [
            *command,
            *_arguments(torch, wanted),
            "-idirafter",
            str(scratch),
            "-o",
            str(file),
        ]
        _compile(arguments, wanted.what, torch, folder)
        shutil.copyfile(file, moved)
        number = _digest(moved.read_bytes())
        return moved.replace(folder / f"{_compiler_number(command)}-{number}.so")


def _arguments(torch: Any, wanted: Extension) -> list[str]:
    from torch.utils import cpp_extension

    headers = [*cpp_extension.include_paths(), sysconfig.get_path("include"), *wanted.headers]
    return [
        *(*FLAGS, *_definitions(torch, wanted.name), f"-I{get_include()}"),
        *(word for folder in headers for word in ("-isystem", folder)),
        str(wanted.source),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *(f"-l{library}" for library in wanted.libraries),
    ]


def _compile(command: list[str], what: str, torch: Any, folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        log = folder / "failed.log"
        log.write_text(f"{' '.join(command)}\n\n{done.stdout}{done.stderr}")
        lines = done.stderr.splitlines()
        # A linker's reasons have no such word, but for the line that only says that it failed.
        reason = r"\berror\b(?!: ld returned)|\bld: (?!warning)"
        errors = [line for line in lines if re.search(reason, line)] or lines
        shown = "".join(f"\n  {line}" for line in errors[:ERROR_LINES])
        raise RuntimeError(
            f"{what} does not compile against torch {torch.__version__}, exit status "
            f"{done.returncode}:{shown}\n  all of it: {log}"
        )
