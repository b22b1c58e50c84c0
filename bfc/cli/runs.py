"""Recorded runs that a command is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from bfc.errors import TraceError
from bfc.pytorch.reader import some_numbers


@contextlib.contextmanager
def option_named(path: Path) -> Iterator[None]:
    """Reads a file within. If it has the histories of several devices, the error names the option
    that chooses one."""
    try:
        yield
    except TraceError as error:
        if not error.devices:
            raise
        raise TraceError(
            f"{path}: it holds the devices {some_numbers(error.devices)}: choose one with "
            "--snapshot-device"
        ) from None
