def load() -> None:
    """Finds the driver and initialises it, once. Raises DeviceUnavailableError, which says what is missing."""

def hint_for(code: int) -> str:
    """What to try after an error of the driver; "" if that is not known."""

def device_count() -> int:
    """The devices that the driver shows this process. Raises DeviceUnavailableError."""

def describe(ordinal: int) -> tuple[str, int]:
    """(name, total bytes) of a device. Needs no context, and makes none. Raises DriverError."""

def driver_version() -> tuple[int, int]:
    """(major, minor) of the newest CUDA that the driver knows. Raises DeviceUnavailableError."""

def device_in_use() -> int:
    """The device whose context is current in this thread, or else the first with an active primary context, or else 0.
    Code that can use any device takes this one, so that it makes no further context. Raises DeviceUnavailableError.
    """

def is_host_memory(address: int) -> bool:
    """Whether the driver knows an address as host memory: pinned, or registered. Makes no context: if no device has
    one, nothing can be pinned.
    """
