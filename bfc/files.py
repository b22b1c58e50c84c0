"""Files that are whole or not there."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file, which takes the place of `path` once it is whole. After an error nothing of it is
    left."""
    target = os.path.realpath(path)
    if os.path.exists(target) and not os.path.isfile(target):
        with open(path, "wb") as file:  # a pipe or a device: written to, not replaced
            yield file
        return
    new = os.path.join(os.path.dirname(target), f".{secrets.token_hex(8)}.tmp")
    with open(new, "xb") as file:
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
