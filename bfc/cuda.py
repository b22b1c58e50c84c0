"""Whether CUDA is available here. Importing this module calls no driver; its functions do."""

from __future__ import annotations

from bfc.devices import Availability
from bfc.drivers.cuda import _driver
from bfc.errors import DeviceUnavailableError, DriverError

__all__ = ["Availability", "device_count", "is_available"]


def is_available() -> Availability:
    """Whether there is a CUDA driver and a device.

    Returns
    -------
    Availability
        True or False; printed, it says what was found or what is missing. No error is raised.

    Examples
    --------
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
    """How many CUDA devices the driver shows this process.

    Returns
    -------
    int
        0 if CUDA is not available; `is_available()` says why.
    """
    try:
        return _driver.device_count()
    except (DeviceUnavailableError, DriverError):
        return 0
