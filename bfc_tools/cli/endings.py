"""What a command ends with: exit codes, and signals, after which it leaves no folders, no
half-written files and no processes."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from enum import IntEnum
from types import FrameType

#: Those that a command answers as it answers Ctrl-C.
SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Exit(IntEnum):
    """Exit codes: a script can tell "it does not fit" from "the command was wrong"."""

    OK = 0
    DOES_NOT_FIT = 1
    WRONG = 2
    OVER_BUDGET = 3
    INTERRUPTED = 130


class Ended(BaseException):
    """A signal came that ends the command."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        return f"ended by {signal.Signals(self.number).name}"

    @property
    def code(self) -> int:
        """What the command exits with, as shells say it."""
        return 128 + self.number


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Ended`, unless somebody handles or ignores them. The others that
    follow the first are ignored: a terminal that is closed sends several. What ends the command
    counts, Ctrl-C too, and not an error of what is cleaned up on the way."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [it for it in SIGNALS if signal.getsignal(it) is signal.SIG_DFL]

    def end(number: int, frame: FrameType | None) -> None:
        for it in taken:
            signal.signal(it, signal.SIG_IGN)
        raise Ended(number)

    for number in taken:
        signal.signal(number, end)
    try:
        yield
    except Exception as error:
        first: BaseException | None = error
        while isinstance(first, Exception):
            first = first.__context__
        if first is None:
            raise
        raise first from error
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
