"""Reads only regular files, and writes a file completely or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import IO

from bfc.errors import TraceError


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file, which replaces `path` once it is complete. An error leaves nothing of it."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "wb") as file:  # a pipe or a device: written to, not replaced
            yield file
        return
    target = os.path.realpath(path)
    new = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}.tmp")
    with _new(new, path) as file:
        try:
            if os.path.exists(target):
                shutil.copymode(target, new)
            yield file
            file.close()
            os.replace(new, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(new)
            raise


def _new(name: str, path: str | os.PathLike[str]) -> IO[bytes]:
    """A new file. An error names `path`, which the user gave, and not `name`."""
    try:
        return open(name, "xb")
    except OSError as error:
        error.filename = os.fspath(path)
        raise


#: Kinds of files that have no end, or that wait for another process.
OTHER_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A file, opened for reading. Raises OSError, or TraceError if it is not a regular file."""
    # The check is of the open file: by now the path may lead to another one.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            kind_in_words = OTHER_KINDS.get(kind, "something else")
            raise TraceError(f"it is {kind_in_words}, and only regular files are read")
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")
