"""Tells the user of a program that makes no step for long where it is, and what ends that."""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from bfc_tools.predicting.places import users_line

#: Seconds without a step after which it is told first; each time later it takes twice as long.
FIRST = 60.0


@contextlib.contextmanager
def told(
    steps: Callable[[], int], operators: Callable[[], int], first: float = FIRST
) -> Iterator[None]:
    """While a program runs in this thread, writes to standard error where it is, if it makes no
    step of an optimizer for `first` seconds: after twice as long again, and so on."""
    ended, program = threading.Event(), threading.get_ident()

    def watch() -> None:
        made, after, waited = steps(), first, 0.0
        while not ended.wait(after - waited):
            if steps() != made:
                made, after, waited = steps(), first, 0.0
                continue
            _tell(after, users_line(sys._current_frames().get(program)), operators())
            after, waited = 2 * after, after

    # no thread of the program's kind, which would be under the prediction
    _thread.start_new_thread(watch, ())
    try:
        yield
    finally:
        ended.set()


def _tell(seconds: float, line: str, operators: int) -> None:
    where = f", at {line}" if line else ""
    print(
        f"bfc: {seconds:g} s without a step of an optimizer{where}, after {operators:,} operators. "
        "--forwards N stops the program after N forward passes of a model, and --seconds N after "
        "N seconds, with the figures until then",
        file=sys.stderr,
        flush=True,
    )
