"""What is compiled when it is first used: the compiler for it, and where the result is kept."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bfc.errors import DeviceUnavailableError


def cache() -> Path:
    """Where compiled libraries are kept: `$BFC_CACHE_HOME`, else `$XDG_CACHE_HOME/bfc`, else
    `~/.cache/bfc`."""
    own = os.environ.get("BFC_CACHE_HOME")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return Path(shared or Path.home() / ".cache") / "bfc"


def compiler(variable: str, usual: str) -> list[str] | None:
    """The command of a compiler, with its full path: the one that an environment variable names, or
    else the usual one. None if it is not installed."""
    command = shlex.split(os.environ.get(variable) or usual)
    found = shutil.which(command[0])
    return None if found is None else [found, *command[1:]]


def needed(variable: str, usual: str, language: str, what: str) -> list[str]:
    """Like `compiler`, for a compiler that must be there. Else raises DeviceUnavailableError, which
    says what was to be compiled."""
    command = compiler(variable, usual)
    if command is None:
        name = shlex.split(os.environ.get(variable) or usual)[0]
        raise DeviceUnavailableError(
            f"{what} is compiled when first used, and there is no {language} compiler {name!r}: "
            f"install gcc or clang, or name one in {variable}"
        )
    return command


@contextlib.contextmanager
def kept_in(folder: Path, what: str) -> Iterator[Path]:
    """A new folder inside `folder` to build in; the caller renames what it wants to keep out of it.
    An error of the file system becomes a RuntimeError, which says what could not be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as name:
            yield Path(name)
    except OSError as error:
        raise RuntimeError(
            f"{what} cannot be kept in {folder}: {error}; "
            f"name a folder that can be written in BFC_CACHE_HOME"
        ) from error
