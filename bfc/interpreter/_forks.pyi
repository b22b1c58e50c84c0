from typing import Self

class ForkSafeLock:
    """A re-entrant lock for sections that run Python. It counts as free if the thread that held it is dead: of the
    parent's threads only the one that forked lives in the child, and only one thread outlives the interpreter's end.

    The data that it guards must be valid after each step of a section, since the child may find the work half done.

    >>> from bfc.interpreter._forks import ForkSafeLock
    >>> lock = ForkSafeLock()
    >>> with lock, lock:
    ...     pass
    """

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, traceback: object) -> None: ...
