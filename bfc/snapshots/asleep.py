"""The report of `sleep`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SleepReport:
    """What was released when tags were put to sleep.

    Attributes
    ----------
    tags : tuple of str
        The tags that sleep now and were awake before.
    released_bytes : int
        The memory that went back to the device, in whole pages.
    kept_bytes : int
        The bytes of it that were copied to the host: the requested bytes of live allocations.
    seconds : float
        How long it took, including waiting and copying.
    """

    tags: tuple[str, ...] = ()
    released_bytes: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
