from typing import Final

from bfc.devices import Fence

OVER: Final[Fence]

class Users:
    """Which streams use memory: a part of device memory's fences and of pinned memory's events."""
