"""Recorded runs that a command is given."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bfc.errors import TraceError
from bfc.pytorch.reader import some_numbers
from bfc.pytorch.rules import NEWEST, VERSIONS
from bfc.trace import Trace
from bfc_tools.cli.sizes import whole
from bfc_tools.study.file_formats import ENDINGS, has_devices, read
from bfc_tools.study.torch_version import decided

#: What the help texts say of the file that a command takes, and of several.
FILE = "an .npz trace, a memory snapshot of PyTorch or a log of RMM, under any name"
FILES = f"{FILE}; or a folder of them, of which the files {', '.join(ENDINGS)} are taken"


def add_torch(add: Callable[..., Any]) -> None:
    """Adds `--torch`, which several commands have."""
    add(
        "--torch",
        choices=VERSIONS,
        help="the version of PyTorch whose rules are followed (default: that of the recording, or "
        f"the one under which a replay is as recorded, or {NEWEST})",
    )


def add_snapshot_device(add: Callable[..., Any]) -> None:
    """Adds `--snapshot-device`, which all commands that read a recorded run have."""
    add(
        "--snapshot-device",
        type=whole,
        metavar="N",
        help="the device whose history is taken, if a snapshot has those of several",
    )


@contextlib.contextmanager
def option_named(path: Path) -> Iterator[None]:
    """To be entered while a file is read. If it has the histories of several devices, the error
    names the option that chooses one."""
    try:
        yield
    except TraceError as error:
        if not error.devices:
            raise
        raise TraceError(
            f"{path}: it holds the devices {some_numbers(error.devices)}: choose one with "
            "--snapshot-device"
        ) from None


def files(paths: list[Path]) -> Iterator[Path]:
    """The files of the arguments of a command, each of which is one or a folder."""
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() in ENDINGS)
            if not inside:
                raise ValueError(f"{path}: no {', '.join(ENDINGS)} file in this folder")
            yield from inside
        else:
            yield path


def read_trace(
    path: Path, device: int | None, torch: str | None = None, *, frames: bool = True
) -> Trace:
    """Reads a trace, and decides under the rules of which version of PyTorch it is replayed.
    `device` chooses one where the file may hold several."""
    with option_named(path):
        trace = read(path, device if has_devices(path) else None, frames=frames)
    return decided(trace, torch)


def named(paths: list[Path]) -> list[tuple[str, Path]]:
    """Each path, and its name in a table: the stem, or the whole path if two have the same
    stem."""
    stems = Counter(path.stem for path in paths)
    return [(path.stem if stems[path.stem] == 1 else str(path), path) for path in paths]
