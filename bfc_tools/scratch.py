"""Folders for files of a process, which are removed however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator

#: Seconds after its making in which a folder may be about to be locked.
OLD = 60


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[str]:
    """A folder that this process removes; if it is killed, the next with this prefix does."""
    folder, owner = tempfile.mkdtemp(prefix=prefix), os.getpid()
    try:
        with open(f"{folder}/lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _remove_what_others_left(os.path.dirname(folder), prefix)
            yield folder
    finally:
        if os.getpid() == owner:
            _remove(folder)


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if os.path.lexists(folder):  # it has some that cannot be entered
        for top, folders, _ in os.walk(folder):
            for path in [os.path.join(top, name) for name in folders]:
                if not os.path.islink(path):
                    os.chmod(path, 0o700)
        shutil.rmtree(folder, ignore_errors=True)


def _remove_what_others_left(folder: str, prefix: str) -> None:
    """Of processes that were killed: their locks are free."""
    for name in os.listdir(folder):
        if name.startswith(prefix):
            with contextlib.suppress(OSError), open(f"{folder}/{name}/lock") as lock:
                found = os.fstat(lock.fileno())
                if found.st_uid == os.getuid() and found.st_mtime < time.time() - OLD:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(f"{folder}/{name}")
