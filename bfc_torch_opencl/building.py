"""Makes the extension: compiled once for each torch, Python and compiler, and kept in the user's
cache.

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
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from bfc.compiling import cache, compiler, kept_in, needed
from bfc.errors import DeviceUnavailableError
from bfc.include import get_include

SOURCE = Path(__file__).with_name("extension.cpp")
NAME = "_bfc_torch_opencl"
WHAT = "the extension for PyTorch"
OLDEST = (2, 11)
INSTALL = "pip install 'bfc-allocator[torch-opencl]'"
#: -O1 takes half the time of -O2, and the hot code is in the pool, which is compiled already.
FLAGS = ("-std=c++20", "-O1", "-g0", "-fPIC", "-shared")
LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
ERROR_LINES = 6
COMPILING = f"bfc: compiling {WHAT} {{}}, which takes up to a minute; later processes find it made"


def load(source: Path = SOURCE) -> ModuleType:
    """The extension's module, compiled first if the cache does not have it.

    Raises DeviceUnavailableError where torch is missing or too old, or the compiler is, and
    RuntimeError where the source does not compile, the cache cannot be written, or what was
    compiled does not load.
    """
    torch = supported_torch()
    folder = cache() / "torch_opencl" / _key(torch, source)
    for made in _whole(folder):
        with contextlib.suppress(ImportError):  # a torch of the same name is another one now
            return _module(made)
        made.unlink(missing_ok=True)
    with _alone(folder):
        made = next(_whole(folder), None) or _build(torch, source, folder)
    try:
        return _module(made)
    except ImportError as error:
        made.unlink(missing_ok=True)
        raise RuntimeError(
            f"{WHAT} was compiled for torch {torch.__version__} and does not load: {error}"
        ) from error


def supported_torch() -> Any:
    """torch. Raises DeviceUnavailableError, which says what to install."""
    try:
        import torch
    except ImportError as error:
        raise DeviceUnavailableError(
            f"tensors on OpenCL need the package torch ({error})\n  try: {INSTALL}"
        ) from error
    version = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
    if version < OLDEST:
        raise DeviceUnavailableError(
            f"tensors on OpenCL need torch {OLDEST[0]}.{OLDEST[1]} or newer, and this is torch "
            f"{torch.__version__}\n  try: {INSTALL}"
        )
    return torch


def _key(torch: Any, source: Path) -> str:
    """The name of a folder, from all that the extension is made from, except the compiler."""
    abi = sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag
    parts: list[object] = [torch.__version__, torch.version.git_version, abi, platform.machine()]
    parts += [FLAGS, LIBRARIES, _definitions(torch)]
    for folder in (source.parent, Path(get_include())):
        code = sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".hpp", ".h"))
        parts += [(path.name, path.read_bytes()) for path in code]
    return f"torch{torch.__version__}-{abi}-{_digest(repr(parts).encode())}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _definitions(torch: Any) -> tuple[str, ...]:
    """The macros that `torch.utils.cpp_extension` defines."""
    return (
        f"-DTORCH_EXTENSION_NAME={NAME}",
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


def _module(path: Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
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


def _build(torch: Any, source: Path, folder: Path) -> Path:
    """The new file of the cache."""
    command = needed("CXX", "c++", "C++", WHAT)
    print(COMPILING.format(torch.__version__), file=sys.stderr, flush=True)
    with kept_in(folder, WHAT) as scratch:
        made = scratch / "made.so"
        _compile([*command, *_arguments(torch, source), "-o", str(made)], torch, folder)
        number = _digest(made.read_bytes())
        return made.replace(folder / f"{_compiler_number(command)}-{number}.so")


def _arguments(torch: Any, source: Path) -> list[str]:
    from torch.utils import cpp_extension

    headers = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    return [
        *(*FLAGS, *_definitions(torch), f"-I{get_include()}"),
        *(word for folder in headers for word in ("-isystem", folder)),
        str(source),
        *(f"-L{folder}" for folder in cpp_extension.library_paths()),
        *(f"-l{library}" for library in LIBRARIES),
    ]


def _compile(command: list[str], torch: Any, folder: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        log = folder / "failed.log"
        log.write_text(f"{' '.join(command)}\n\n{done.stdout}{done.stderr}")
        lines = done.stderr.splitlines()
        errors = [line for line in lines if re.search(r"\berror\b", line)] or lines
        shown = "".join(f"\n  {line}" for line in errors[:ERROR_LINES])
        raise RuntimeError(
            f"{WHAT} does not compile against torch {torch.__version__}, exit status "
            f"{done.returncode}:{shown}\n  all of it: {log}"
        )
