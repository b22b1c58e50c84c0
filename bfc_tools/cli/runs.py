"""Recorded runs that a command is given."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bfc.errors import TraceError
from bfc.pytorch.reader import some_numbers
from bfc.pytorch.rules import NEWEST, VERSIONS
from bfc.trace import Trace
from bfc_tools.cli.sizes import whole
from bfc_tools.study.file_formats import ENDINGS, TEXT, TEXTS, has_devices, kind_of, read
from bfc_tools.study.logs.held import nothing_in
from bfc_tools.study.logs.log import read_log
from bfc_tools.study.logs.side_by_side import Logs
from bfc_tools.study.torch_version import decided

#: What the help texts say of the file that a command takes, and of several.
FILE = "an .npz trace, a memory snapshot of PyTorch or a log of RMM, under any name"
FILES = f"{FILE}; or a folder of them, of which the files {', '.join(ENDINGS)} are taken"
#: The same of logs, which some commands take.
OR_LOGS = (
    "; or the log of a program that ran out of memory (TensorFlow's or JAX's list of chunks, or "
    f"PyTorch's error text), or a folder of logs ({', '.join(TEXTS[:4])})"
)


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
            inside = inside or sorted(
                file for file in path.rglob("*") if file.suffix.lower() in TEXTS and file.is_file()
            )
            if not inside:
                wanted = f"no {', '.join(ENDINGS)} file in this folder, and no {TEXTS[0]} below it"
                raise ValueError(f"{path}: {wanted}")
            yield from inside
        else:
            yield path


def logs_of(paths: list[Path]) -> Logs | None:
    """What the arguments of a command say if they are logs; None if they are recorded runs. Raises
    ValueError if some are these, and some those."""
    found = list(files(paths))
    texts = [path for path in found if kind_of(path) == TEXT]
    if not texts:
        return None
    if len(texts) < len(found):
        raise ValueError(f"{texts[0]}: it is a log, and others are recorded runs: name them apart")
    names = _beside(texts)
    logs = [read_log(path, name) for path, name in zip(texts, names, strict=True)]
    if not any(log.refusals or log.may_fail for log in logs):
        raise TraceError(nothing_in(str(texts[0] if len(texts) == 1 else paths[0]), logs[0]))
    return Logs(tuple(logs))


def _beside(paths: list[Path]) -> list[str]:
    """Names for files, without the folders that they share: ranks' logs may all be stderr.log."""
    if len(paths) == 1:
        return [paths[0].name]
    shared = os.path.commonpath([path.resolve().parent for path in paths])
    return [str(path.resolve().relative_to(shared)) for path in paths]


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
