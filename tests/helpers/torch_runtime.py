"""PyTorch's build for CUDA on the emulated driver: a CUDA runtime library over calls of the driver.

It needs the wheels that such a PyTorch brings along, for the headers and the list of calls.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from cuda_machine import ON_GPU
from documents import ROOT

SOURCE = Path(__file__).with_suffix(".cpp")
NAME = "libcudart.so.13"
#: What NVIDIA's compiler defines, in the place of a header that another wheel has.
NOTHING = (
    "__host__ __device__ __device_builtin__ __device_builtin_texture_type__ __no_return__ "
    "__device_builtin_surface_type__ __cudart_builtin__ CUDARTAPI CUDARTAPI_CDECL CUDA_CB CUDART_CB"
)
ALIGNED = "__builtin_align__ __align__"


def has_torch_for_cuda() -> bool:
    try:
        return "+cpu" not in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


HAS_TORCH = has_torch_for_cuda()
Run = Callable[..., str]


def with_torch(test: Callable[..., None]) -> Callable[..., None]:
    reason = "needs a build of PyTorch for CUDA: make test-torch-cuda"
    return pytest.mark.skipif(not HAS_TORCH, reason=reason)(test)


def environment(library: Path | None) -> dict[str, str]:
    """That of a process in which PyTorch runs on the emulated driver; on a GPU, None is given."""
    preload = {} if library is None else {"LD_PRELOAD": str(library)}
    return os.environ | {"PYTHONPATH": str(ROOT)} | preload


def runner(library: Path | None) -> Run:
    """A function that runs a script in a process of its own, as what it changes is for good, and
    returns what that prints."""
    first = ""
    if not ON_GPU:
        first = "from bfc.testing import cuda_emulator\ncuda_emulator.load().reset(devices=1)\n"

    def run(script: str, *arguments: str, **variables: str) -> str:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", first + textwrap.dedent(script), *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=ROOT,
            env=environment(library) | variables,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def packages() -> Path:
    """The folder of installed packages that has PyTorch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def build(folder: Path) -> Path:
    """Compiles the library. To be loaded first: LD_PRELOAD."""
    (folder / "crt").mkdir()
    lines = [f"#define {name}" for name in NOTHING.split()]
    lines += [f"#define {name}(n) __attribute__((aligned(n)))" for name in ALIGNED.split()]
    (folder / "crt" / "host_defines.h").write_text("\n".join([*lines, ""]))
    ours = folder / "ours.o"
    headers = packages() / "nvidia" / "cu13" / "include"
    compiler = ["g++", "-std=c++17", "-fPIC", f"-I{folder}", f"-I{headers}"]
    subprocess.run([*compiler, "-c", SOURCE, "-o", ours], check=True)
    rest = folder / "rest.cpp"
    rest.write_text("\n".join(map(refusal, sorted(wanted() - names(ours, "T")))))
    flags = ["-shared", f"-Wl,-soname,{NAME}", "-Wl,--default-symver"]
    subprocess.run([*compiler, *flags, rest, ours, "-o", folder / NAME], check=True)
    return folder / NAME


def wanted() -> set[str]:
    """The calls that PyTorch's libraries name. Some of them want all to be there."""
    libraries = sorted((packages() / "torch" / "lib").glob("*.so"))
    return {
        name.partition("@")[0]
        for library in libraries
        for name in names(library, "U")
        if name.endswith(f"@{NAME}")
    }


def names(library: Path, kind: str) -> set[str]:
    flags = ["-D"] if library.suffix == ".so" else []
    listed = subprocess.run(["nm", *flags, library], capture_output=True, text=True, check=True)
    rows = [line.split()[-2:] for line in listed.stdout.splitlines()]
    return {name for found, name in rows if found == kind}


def refusal(name: str) -> str:
    not_supported = 801
    return f'extern "C" int {name}() {{ return {not_supported}; }}'
