"""PyTorch's build for CUDA on the emulated driver: a CUDA runtime library over calls of the driver,
a cuBLAS that computes nothing, and an NVML that knows nothing.

It needs the wheels that such a PyTorch brings along, for the headers and the list of calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from cuda_machine import ON_GPU
from documents import ROOT
from torch_forks import Ended, Forks

from bfc.compiling import cache, kept_in

HERE = Path(__file__).parent
#: What NVIDIA's compiler defines, in the place of a header that another wheel has.
NOTHING = (
    "__host__ __device__ __device_builtin__ __device_builtin_texture_type__ __no_return__ "
    "__device_builtin_surface_type__ __cudart_builtin__ CUDARTAPI CUDARTAPI_CDECL CUDA_CB CUDART_CB"
)
ALIGNED = "__builtin_align__ __align__"


class Library(NamedTuple):
    """One that takes the place of NVIDIA's of that name."""

    name: str
    source: str
    rest: str  #: what each call is that the source has not
    declares: str = ""
    defines: tuple[str, ...] = ()


NOT_SUPPORTED = 'extern "C" int {0}() {{ std::fputs("no {0} here\\n", stderr); return %d; }}'
PRINTS = "#include <cstdio>"
LIBRARIES = (
    Library("libcudart.so.13", "torch_runtime.cpp", NOT_SUPPORTED % 801, PRINTS),
    Library(
        "libcublas.so.13",
        "torch_products.cpp",
        'extern "C" int {}(void* handle) {{ return torch_product(handle); }}',
        'extern "C" int torch_product(void*);',
    ),
    Library("libcublasLt.so.13", "torch_products.cpp", NOT_SUPPORTED % 15, PRINTS, ("-DLT",)),
    Library("libnvidia-ml.so.1", "torch_nvml.cpp", ""),
)


def version_of_torch() -> str:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""


VERSION = version_of_torch()  #: "" if there is none
HAS_TORCH = VERSION != "" and "+cpu" not in VERSION
PATIENCE = 300  # seconds for a script
Run = Callable[..., str]


def with_torch(test: Callable[..., None]) -> Callable[..., None]:
    reason = "needs a build of PyTorch for CUDA: make test-torch-cuda"
    return pytest.mark.skipif(not HAS_TORCH, reason=reason)(test)


def environment(folder: Path | None) -> dict[str, str]:
    """That of a process in which PyTorch runs on the emulated driver; on a GPU, None is given."""
    preload = {}
    if folder is not None:
        preload["LD_PRELOAD"] = ":".join(str(folder / library.name) for library in LIBRARIES)
    return os.environ | {"PYTHONPATH": str(ROOT)} | preload


@contextlib.contextmanager
def runner(folder: Path | None) -> Iterator[Run]:
    """A function that runs a script in a process of its own, as what it changes is for good, and
    returns what that prints. Variables of the environment are read when PyTorch is imported, so
    that only a script without any is forked from a process that has done so."""
    first = ""
    begun: list[Forks] = []
    if not ON_GPU:
        first = "from bfc.testing import cuda_emulator\ncuda_emulator.load().reset(devices=1)\n"

    def run(script: str, *arguments: str, **variables: str) -> str:
        done: Ended | subprocess.CompletedProcess[str]
        code = first + textwrap.dedent(script)
        if variables:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", code, *arguments],
                capture_output=True,
                text=True,
                check=False,
                timeout=PATIENCE,
                cwd=ROOT,
                env=environment(folder) | variables,
            )
        else:
            if not begun:
                begun.append(Forks(environment(folder), ROOT))
            done = begun[0].run(code, arguments, PATIENCE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        yield run
    finally:
        for forks in begun:
            forks.close()


def packages() -> Path:
    """The folder of installed packages that has PyTorch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def build() -> Path:
    """The folder of the libraries, all of which are to be loaded first. They are compiled once for
    a version of PyTorch, and kept in the user's cache."""
    folder = cache() / "torch_runtime" / key()
    if not folder.exists():
        with kept_in(folder.parent, "what PyTorch runs on") as scratch:
            made = scratch / "made"
            made.mkdir()
            compile_all(made)
            try:
                made.replace(folder)
            except OSError:  # another process was faster
                assert folder.exists()
    return folder


def key() -> str:
    """Of what is compiled, and for what."""
    digest = hashlib.sha256(VERSION.encode())
    for source in sorted({Path(__file__), *(HERE / library.source for library in LIBRARIES)}):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def host_defines() -> str:
    """The text of a header that only NVIDIA's compiler brings."""
    lines = [f"#define {name}" for name in NOTHING.split()]
    lines += [f"#define {name}(n) __attribute__((aligned(n)))" for name in ALIGNED.split()]
    return "\n".join([*lines, "#define __forceinline__ inline", ""])


def compile_all(folder: Path) -> None:
    (folder / "crt").mkdir()
    (folder / "crt" / "host_defines.h").write_text(host_defines())
    if not (packages() / "nvidia" / "cu13" / "include" / "nv" / "target").exists():
        # The wheels of PyTorch 2.14 leave it out: bodies of functions that nobody calls here.
        (folder / "nv").mkdir()
        (folder / "nv" / "target").write_text("#define NV_IF_ELSE_TARGET(...)\n")
    calls = wanted()
    for library in LIBRARIES:
        compile_one(library, folder, calls.get(library.name, set()))


def compile_one(library: Library, folder: Path, calls: set[str]) -> None:
    made = folder / library.name
    ours, rest = made.with_suffix(".o"), made.with_suffix(".cpp")
    headers = packages() / "nvidia" / "cu13" / "include"
    compiler = ["g++", "-std=c++17", "-fPIC", f"-I{folder}", f"-I{headers}", *library.defines]
    subprocess.run([*compiler, "-c", HERE / library.source, "-o", ours], check=True)
    missing = sorted(calls - names(ours, "T"))
    rest.write_text("\n".join([library.declares, *map(library.rest.format, missing)]))
    flags = ["-shared", f"-Wl,-soname,{library.name}", "-Wl,--default-symver"]
    subprocess.run([*compiler, *flags, rest, ours, "-o", made], check=True)


def wanted() -> dict[str, set[str]]:
    """The calls of each library that PyTorch's libraries name. Some want all to be there."""
    found: dict[str, set[str]] = {}
    for it in sorted((packages() / "torch" / "lib").glob("*.so")):
        for symbol in names(it, "U"):
            name, _, library = symbol.partition("@")
            found.setdefault(library.lstrip("@"), set()).add(name)
    return found


def names(library: Path, kind: str) -> set[str]:
    flags = ["-D"] if library.suffix == ".so" else []
    listed = subprocess.run(["nm", *flags, library], capture_output=True, text=True, check=True)
    rows = [line.split()[-2:] for line in listed.stdout.splitlines()]
    return {name for found, name in rows if found == kind}
