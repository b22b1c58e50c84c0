"""Where memory lies, DLPack's numbers for that, marks in a device's queues, and answers that say
why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

#: DLPack's numbers for the kinds of memory that it knows.
DLPACK_DEVICE_TYPES = {"cpu": 1, "cuda": 2, "cuda_host": 3, "opencl": 4, "cuda_managed": 13}
#: DLPack's codes for dtypes, by NumPy's letter for their kind, and for dtypes of ml_dtypes, by
#: name. The latter are in DLPack since 1.1.
DLPACK_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
DLPACK_EXTRA_CODES = {
    "bfloat16": 4, "float8_e3m4": 7, "float8_e4m3": 8, "float8_e4m3b11fnuz": 9,
    "float8_e4m3fn": 10, "float8_e4m3fnuz": 11, "float8_e5m2": 12, "float8_e5m2fnuz": 13,
    "float8_e8m0fnu": 14,
}  # fmt: skip
#: The flags of a DLPack capsule.
DLPACK_READ_ONLY, DLPACK_IS_COPIED = 1, 2


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


@dataclass(frozen=True, slots=True, repr=False)
class Availability:
    """True or False with a reason. Printed, it is a sentence.

    Attributes
    ----------
    available : bool
        The answer; also its truth value.
    reason : str
        What was found, or why it is not available.
    """

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return self.reason

    def __repr__(self) -> str:
        return self.reason
