from typing import Final

from bfc.allocators._users import Users

PUT_OFF: Final[str]

class Waiting:
    """A mark in a stream's queue, and the block that waits for it."""

class Events(Users):
    """Which streams use pinned memory, and the one queue of marks that freed blocks wait behind."""
