"""Whether OpenCL is available on this machine, and memory for a framework's OpenCL back end.
Importing this module calls no driver; its functions do."""

from __future__ import annotations

from bfc.devices import Availability
from bfc.drivers.opencl import platform as _opencl
from bfc.policies.device_allocator import DeviceAllocator, DeviceStats

__all__ = ["DeviceAllocator", "DeviceStats", "device_count", "is_available"]


def is_available() -> Availability:
    """Whether there is pyopencl, an OpenCL driver and a device.

    Returns
    -------
    Availability
        True or False; printed, it says what was found or what is missing. No error is raised.

    Examples
    --------
    >>> import bfc
    >>> usable = bfc.opencl.is_available()
    >>> isinstance(bool(usable), bool), len(str(usable)) > 0
    (True, True)
    """
    return Availability(*_opencl.availability())


def device_count() -> int:
    """How many OpenCL devices the drivers show, all platforms counted together.

    Returns
    -------
    int
        0 if OpenCL is not available; `is_available()` says why.
    """
    return _opencl.device_count()
