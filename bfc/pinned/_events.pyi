from typing import Final

PUT_OFF: Final[str]

class Waiting:
    """A mark in a stream's queue, and the block that waits for it."""

class Events:
    """Which streams use pinned memory, and the one queue of marks that freed blocks wait behind."""
