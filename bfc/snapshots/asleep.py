"""What `sleep` has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SleepReport:
    """What went when tags were put to sleep.

    Attributes
    ----------
    tags : tuple of str
        The tags that sleep now and were awake before.
    released_bytes : int
        The memory that went back to the device, in whole pages.
    kept_bytes : int
        The part of it that was copied to the host: what was asked for by live allocations.
    seconds : float
        How long it took, with the waiting and the copying.
    """

    tags: tuple[str, ...] = ()
    released_bytes: int = 0
    kept_bytes: int = 0
    seconds: float = 0.0
