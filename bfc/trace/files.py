"""Opens what a trace is read from: regular files, which have an end and wait for nobody."""

from __future__ import annotations

import os
import stat
from typing import IO

from bfc.errors import TraceError

OTHER_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """A file, opened to be read. Raises OSError, and TraceError for what is no regular one."""
    # The open file is asked what it is: by now the path may lead to another one.
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
