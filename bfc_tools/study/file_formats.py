"""Files of recorded runs: which kind one is, by its content, and its trace."""

from __future__ import annotations

import os

from bfc.errors import TraceError
from bfc.files import open_regular
from bfc.trace import Trace
from bfc.trace.rmm_log import COLUMNS
from bfc_tools.study.logs.held import trace_of

#: A text is what a program printed: the dump or the error of one that ran out of memory.
ARCHIVE, LOG, SNAPSHOT, TEXT = "archive", "log", "snapshot", "text"
#: The kinds of files by the endings of their names. Commands write such names, and take files with
#: such names from a folder.
PICKLES = (".pickle", ".pkl")
ENDINGS = {".npz": ARCHIVE, ".csv": LOG, **dict.fromkeys(PICKLES, SNAPSHOT)}
#: The endings of texts that are taken from a folder without recorded runs.
TEXTS = (".log", ".txt", ".out", ".err", ".stderr", ".stdout", ".json", ".jsonl")

_HEAD = 4096
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def kind_of(path: str | os.PathLike[str]) -> str:
    """What a file is, `ARCHIVE`, `LOG` or `SNAPSHOT`, by its first bytes. If they belong to none of
    the three, by the ending of its name, so that whoever reads the file says what is wrong with it;
    and if that says nothing, it is a `TEXT`.

    Raises TraceError if it is not a regular file, or neither its content nor its name is that of a
    run.
    """
    try:
        with open_regular(path) as file:
            head = file.read(_HEAD)
    except TraceError as error:
        raise TraceError(f"{os.fspath(path)}: {error}") from None
    if head[:2] == b"PK":
        return ARCHIVE
    if head[:1] == b"\x80":
        return SNAPSHOT
    first = head.partition(b"\n")[0].decode("utf-8-sig", "replace")
    if {name.strip() for name in first.split(",")}.issuperset(COLUMNS[1:]):
        return LOG
    named = ENDINGS.get(os.path.splitext(path)[1].lower())
    if named is None and head[:2] not in _UTF16 and b"\0" in head:
        raise TraceError(
            f"{os.fspath(path)}: it is not a recorded run: an .npz trace, a memory snapshot of "
            "PyTorch (a pickle), a log of RMM (a table in CSV), or the log of a program that ran "
            "out of memory"
        )
    return TEXT if named is None else named


def read(path: str | os.PathLike[str], device: int | None = None, *, frames: bool = False) -> Trace:
    """The trace in a file: an `.npz` archive, a memory snapshot of PyTorch, a log of RMM, or a log
    that lists the chunks of an allocator, as its content tells. `device` is needed if a snapshot
    holds the history of several; with `frames`, the stacks of a snapshot are read, too. Raises
    TraceError if it is something else."""
    kind = kind_of(path)
    if kind == SNAPSHOT:
        return Trace.from_torch(path, device=device, frames=frames)
    if device is not None:
        raise ValueError(f"{os.fspath(path)}: a trace has no devices to choose from")
    if kind == TEXT:
        return trace_of(path)
    return Trace.load(path) if kind == ARCHIVE else Trace.from_rmm_log(path)


def has_devices(path: str | os.PathLike[str]) -> bool:
    """Whether a file may hold the histories of several devices, so that one can be chosen: a
    snapshot of PyTorch may."""
    return kind_of(path) == SNAPSHOT
