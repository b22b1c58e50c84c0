from typing import Self

class ForkSafeLock:
    """A re-entrant lock for sections that run Python. One that a dead thread has held is free: of the parent's threads
    only the one that forked lives in the child, and of all only one sees the interpreter's end.

    What it guards must make sense after each step of a section, since the child may find the work half done.

    >>> from bfc.interpreter._forks import ForkSafeLock
    >>> lock = ForkSafeLock()
    >>> with lock, lock:
    ...     pass
    """

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...
