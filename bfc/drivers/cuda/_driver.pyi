from bfc.errors import DriverError

def load() -> None:
    """Finds the driver and initialises it, once. Raises DeviceUnavailableError, which says what is missing."""

def driver_error(call: str, result: int, hint: str = "") -> DriverError:
    """The DriverError for a result of a call. If no hint is given, it is what is known about such errors."""

def device_count() -> int:
    """The devices that the driver shows this process. Raises DeviceUnavailableError."""

def attribute(ordinal: int, number: int) -> int:
    """A CUdevice_attribute of a device. Raises DriverError."""

def describe(ordinal: int) -> tuple[str, int]:
    """(name, total bytes) of a device. Needs no context, and makes none. Raises DriverError."""

def driver_version() -> tuple[int, int]:
    """(major, minor) of the newest CUDA that the driver knows. Raises DeviceUnavailableError."""

def device_in_use() -> int:
    """The device whose context is current in this thread, or else the first with an active primary context, or else 0.
    Code that can use any device takes this one, so that it makes no further context. Raises DeviceUnavailableError.
    """
