"""Makes the emulated driver's library: compiled once, and kept in the user's cache."""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

from bfc.compiling import cache, kept_in, needed
from bfc.errors import DeviceUnavailableError

HERE = Path(__file__).resolve().parent
LIBRARY = "libcuda.so.1"
WHAT = "the emulated CUDA driver"
FLAGS = ("-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden")
WARNINGS = ("-Wall", "-Wextra", "-Wno-override-init")  # the macro of a call has defaults


def compiler() -> list[str]:
    """The command that compiles C: `$CC`, or `cc`. Raises DeviceUnavailableError."""
    return needed("CC", "cc", "C", WHAT)


def path() -> Path:
    """Where the library of these sources, this compiler and this machine is kept, made or not."""
    command = compiler()
    real = Path(command[0]).resolve()
    made = real.stat()
    digest = hashlib.sha256()
    key = (command, real, made.st_size, made.st_mtime_ns, FLAGS, WARNINGS, platform.machine())
    digest.update(repr(key).encode())
    for source in sorted([*HERE.glob("*.c"), *HERE.glob("*.h")]):
        digest.update(source.name.encode() + source.read_bytes())
    return cache() / "cuda_emulator" / digest.hexdigest()[:16] / LIBRARY


def refuse_elsewhere() -> None:
    """Raises DeviceUnavailableError on other systems than Linux."""
    if not sys.platform.startswith("linux"):
        raise DeviceUnavailableError(
            f"the emulated CUDA driver is a libcuda.so.1, for Linux alone, not for {sys.platform}"
        )


def build() -> Path:
    """The emulator's library, compiled if it is not in the user's cache yet.

    Returns
    -------
    pathlib.Path
        Where it is. Many processes may call this at the same time.

    Raises
    ------
    DeviceUnavailableError
        If this is not Linux, or there is no C compiler.
    RuntimeError
        If it does not compile, or the cache cannot be written.
    """
    refuse_elsewhere()
    target = path()
    if target.exists():
        return target
    with kept_in(target.parent, WHAT) as folder:
        made = folder / LIBRARY
        _compile(made)
        made.replace(target)
    return target


def _compile(made: Path) -> None:
    sources = sorted(str(source) for source in HERE.glob("*.c"))
    command = [*compiler(), *FLAGS, *WARNINGS, f"-Wl,-soname,{LIBRARY}", "-o", str(made), *sources]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{WHAT} does not compile:\n{done.stderr}")


def loaded_driver() -> Path | None:
    """The libcuda that this process has loaded, if any."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        _, slash, name = line.partition("/")
        mapped = Path(slash + name.removesuffix(" (deleted)"))
        if slash and mapped.name.startswith("libcuda.so"):
            return mapped
    return None


def refuse_beside(other: Path | None, ours: Path) -> None:
    """Raises DeviceUnavailableError where another driver than ours is loaded: cuda-python, and
    whoever else asks for a libcuda, has it or would get it."""
    if other is not None and other.resolve() != ours.resolve():
        raise DeviceUnavailableError(
            f"a CUDA driver is loaded already: {other}. The emulated one must come first, before "
            f"anything calls CUDA: load it at the start of the process"
        )
