"""What is kept until a device is done with it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Waiting:
    """A queue of events, and what each of them keeps.

    What goes may have a finaliser that copies, in this thread too: nobody waits here for a lock,
    and nothing goes while one is held.
    """

    def __init__(self, is_done: Callable[[object], bool]) -> None:
        self._is_done = is_done
        self._queue: deque[tuple[object, object]] = deque()
        self._lock = threading.Lock()

    def keep(self, event: object, what: object) -> None:
        """Keeps this one, and lets those go whose turn has come: the oldest first."""
        self._queue.append((event, what))
        if not self._lock.acquire(blocking=False):
            return  # whoever holds it does this
        gone = []
        try:
            while self._queue and self._is_done(self._queue[0][0]):
                gone.append(self._queue.popleft())
        finally:
            self._lock.release()

    def events(self) -> list[Any]:
        """Those that something is kept for, the oldest first."""
        return [event for event, _what in list(self._queue)]

    def forget(self) -> None:
        self._queue.clear()
