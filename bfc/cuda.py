"""What CUDA there is on this machine. Importing this calls no driver; asking does."""

from __future__ import annotations

from dataclasses import dataclass

from bfc import _driver
from bfc.errors import DeviceUnavailableError, DriverError


@dataclass(frozen=True, slots=True, repr=False)
class Availability:
    """True or false, and why: printed it is a sentence."""

    available: bool
    reason: str

    def __bool__(self) -> bool:
        return self.available

    def __str__(self) -> str:
        return self.reason

    def __repr__(self) -> str:
        return self.reason


def is_available() -> Availability:
    """Whether there is a driver and a device. The answer prints why, or why not. Raises nothing.

    >>> import bfc
    >>> usable = bfc.cuda.is_available()
    >>> isinstance(bool(usable), bool), len(str(usable)) > 0
    (True, True)
    """
    try:
        count = _driver.device_count()
        major, minor = _driver.driver_version()
    except (DeviceUnavailableError, DriverError) as error:
        return Availability(False, f"CUDA is not available: {error}")
    if count == 0:
        return Availability(False, "CUDA is not available: the driver shows no device")
    devices = "1 device" if count == 1 else f"{count} devices"
    return Availability(True, f"CUDA is available: {devices}, driver for CUDA {major}.{minor}")


def device_count() -> int:
    """How many devices the driver shows this process; 0 where CUDA is not available, and
    `is_available()` says why."""
    try:
        return _driver.device_count()
    except (DeviceUnavailableError, DriverError):
        return 0
