"""Where memory lies, and marks in a device's queues."""

from __future__ import annotations

from typing import NamedTuple, Protocol

#: DLPack's numbers for the kinds of memory that it knows.
DLPACK_DEVICE_TYPES = {"cpu": 1, "cuda": 2, "cuda_host": 3, "opencl": 4, "cuda_managed": 13}


class Device(NamedTuple):
    """Where memory lies.

    Attributes
    ----------
    kind : str
        "cpu", "cuda", "cuda_managed", "cuda_host" (pinned), "opencl" or "simulated".
    ordinal : int
        The device's number, from 0.
    """

    kind: str
    ordinal: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.ordinal}"


class Fence(Protocol):
    """A mark in a stream's queue."""

    def done(self) -> bool:
        """Whether all that was queued before the mark has finished.

        Returns
        -------
        bool
            At once, without blocking.
        """

    def wait(self) -> None:
        """Block until all that was queued before the mark has finished."""
