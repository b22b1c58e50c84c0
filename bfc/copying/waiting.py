"""Objects that are kept until a device has finished with them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Waiting:
    """A queue of events, and the object that is kept until each event is done.

    Dropping an object may run a finaliser that copies, in this thread too. So nothing here waits
    for a lock, or drops an object while it holds one.
    """

    def __init__(self, is_done: Callable[[object], bool]) -> None:
        self._is_done = is_done
        self._queue: deque[tuple[object, object]] = deque()
        self._lock = threading.Lock()

    def keep(self, event: object, what: object) -> None:
        """Keeps an object, and drops those whose events are done, the oldest first."""
        self._queue.append((event, what))
        if not self._lock.acquire(blocking=False):
            return  # the thread that holds the lock drops what is done
        gone = []
        try:
            while self._queue and self._is_done(self._queue[0][0]):
                gone.append(self._queue.popleft())
        finally:
            self._lock.release()

    def events(self) -> list[Any]:
        """The events until which objects are kept, the oldest first."""
        return [event for event, _what in list(self._queue)]

    def forget(self) -> None:
        self._queue.clear()
