"""Waiting for what other threads of Python do, a moment at a time."""

from __future__ import annotations

import time


def sleep(seconds: float) -> None:
    """Sleeps, and first lets Python free what only this thread may free.

    Without the GIL a buffer whose last reference goes in another thread is freed by the thread that
    made it, as soon as that begins a function in Python. Compiled code is none.
    """
    time.sleep(seconds)
