"""When a program that is predicted has run long enough."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bfc.pytorch.owners import is_the_users

#: The steps after which a program is stopped that says nothing else.
STEPS = 2
#: What is told where it goes on: a program may have the call and never make it.
WAITS = (
    f"bfc: {STEPS} steps are made; it goes on until the program writes a snapshot, as its files "
    f"call _dump_snapshot. --steps {STEPS} stops it here"
)
#: Seconds between two attempts to stop a program that has caught the first.
AGAIN = 0.2
#: What runs a script.
RUNS = ("<frozen runpy>", "/runpy.py")
#: Folders whose code is not left in the middle: the prediction, and the fake tensors.
OURS = (os.path.dirname(os.path.abspath(__file__)) + os.sep, "/torch/_subclasses/")


class Stopped(BaseException):
    """Ends the program after enough of it. No `except Exception` of its own catches it."""


@dataclass(frozen=True)
class Limits:
    """After what a program is stopped, whichever comes first; None is no limit.

    Without any, it is stopped after two steps of the optimizer, or, if its own files call
    `_dump_snapshot`, once it has done that.
    """

    steps: int | None = None  # of the optimizer
    forwards: int | None = None  # forward passes of modules that no other module calls
    seconds: float | None = None  # from the beginning of the program

    @property
    def is_default(self) -> bool:
        """Whether nobody said when."""
        return self.steps is None and self.forwards is None and self.seconds is None

    @property
    def is_whole(self) -> bool:
        """Whether the program shall run to its end: it makes no so many steps."""
        return self.steps is not None and self.steps >= 1 << 62


class Stopping:
    """Stops a program at its limits: raises `Stopped` in what it is told. `stopped` says which
    limit it was, as "2 steps of the optimizer"; it is empty until then. `has_dumped` answers
    whether the program has written a snapshot."""

    def __init__(self, limits: Limits, folder: str, has_dumped: Callable[[], bool]) -> None:
        self.limits, self.folder, self.has_dumped = limits, folder, has_dumped
        self.stopped = ""
        self.steps = self.forwards = 0
        self._began = time.monotonic()

    def after_step(self, made: int) -> None:
        """The optimizer has made so many steps."""
        self.steps = made
        limit = STEPS if self.limits.is_default else self.limits.steps
        if limit is None or made < limit:
            return
        if self.limits.is_default and not self.has_dumped() and dumps_snapshot(self.folder):
            if made == STEPS:
                print(WAITS, file=sys.stderr, flush=True)
            return
        self._stop(_number(made, "step", " of the optimizer"))

    def after_forward(self, made: int) -> None:
        """So many forward passes were made."""
        self.forwards = made
        if self.limits.forwards is not None and made >= self.limits.forwards:
            self._stop(_number(made, "forward pass", "", "es"))

    def look_at_the_clock(self) -> None:
        """Stops it if its seconds are over."""
        seconds = self.limits.seconds
        if seconds is not None and time.monotonic() - self._began >= seconds:
            self._stop(_number(seconds, "second"))

    def _stop(self, after: str) -> None:
        self.stopped = after
        raise Stopped

    @contextlib.contextmanager
    def clock(self) -> Iterator[None]:
        """Stops the program after its seconds, also where it calls nothing of PyTorch's: by
        SIGALRM, if that is free. Code of the prediction is not left in the middle: there, the next
        operators look at the clock."""
        main = threading.current_thread() is threading.main_thread()
        free = main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        if self.limits.seconds is None or not free:
            yield
            return

        def ring(number: int, frame: FrameType | None) -> None:
            if not is_ours(frame):
                self.look_at_the_clock()

        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, self.limits.seconds, AGAIN)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)


def is_ours(frame: FrameType | None) -> bool:
    """Whether code of the prediction runs, called by the program, which `runpy` has called."""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(RUNS):
            return False
        if any(part in name for part in OURS):
            return True
        frame = frame.f_back
    return False


def _number(made: float, one: str, rest: str = "", plural: str = "s") -> str:
    return f"{made:g} {one}{'' if made == 1 else plural}{rest}"


def dumps_snapshot(folder: str) -> bool:
    """Whether a file of the program, the script or a module beside it, calls `_dump_snapshot`."""
    return "_dump_snapshot" in text_of_program(folder)


def text_of_program(folder: str) -> str:
    """The text of the program's own files: the script, and the modules beside it."""
    texts = []
    for module in list(sys.modules.values()):
        name = getattr(module, "__file__", None)
        if not isinstance(name, str) or not is_the_users(name):
            continue
        if os.path.abspath(name).startswith(os.path.join(folder, "")):
            with contextlib.suppress(OSError, UnicodeError):
                texts.append(Path(name).read_text())
    return "\n".join(texts)
