from typing import Final

from bfc.devices import Fence

OVER: Final[Fence]

class Late:
    """A chunk that was freed, and how many fences it still waits for."""

class Waiting:
    """A fence that a freed chunk waits for, in the queue of its stream."""

class Fences:
    """Which streams use memory, and what was freed and waits for them."""
