from bfc.errors import DriverError

def load() -> None:
    """Finds the driver and initialises it, once. Raises DeviceUnavailableError, which says what is missing."""

def driver_error(call: str, result: int, hint: str = "") -> DriverError:
    """The DriverError for the result of a call. Without `hint`, the usual hint for such errors is used."""

def device_count() -> int:
    """The number of devices that the driver shows this process. Raises DeviceUnavailableError."""

def attribute(ordinal: int, number: int) -> int:
    """A CUdevice_attribute of a device. Raises DriverError."""

def describe(ordinal: int) -> tuple[str, int]:
    """(name, total bytes) of a device. Needs no context, and makes none. Raises DriverError."""

def driver_version() -> tuple[int, int]:
    """(major, minor) of the newest CUDA version that the driver supports. Raises DeviceUnavailableError."""

def device_in_use() -> int:
    """The device whose context is current in this thread, or else the first with an active primary context, or else 0.
    Code that can use any device should use this one, so that it creates no further context. Raises
    DeviceUnavailableError.
    """
