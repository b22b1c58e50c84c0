from collections.abc import Sequence
from typing import Literal

from bfc.drivers.cuda._device import DeviceMemory
from bfc.errors import DriverError

HandleType = Literal["none", "posix", "fabric"]
HANDLE_TYPES: dict[str, int]

def why_not(ordinal: int) -> str:
    """Why a device has no virtual memory; "" if it has. Raises DeviceUnavailableError if there is no driver."""

def can_access(ordinal: int, peer: int) -> bool:
    """Whether a device can be given access to memory of another. Raises DriverError."""

class VirtualMemory:
    """Virtual memory of one device.

    `handle_type` is "none", "posix" or "fabric". A device without fabric handles gives file descriptors: the driver
    may say so at once, or refuse the first page.
    """

    def __init__(self, memory: DeviceMemory, handle_type: str) -> None: ...
    @property
    def granularity(self) -> int: ...
    @property
    def handle_type(self) -> HandleType:
        """The kind of handle that pages have."""

    def reserve(self, nbytes: int) -> int | None:
        """See SubAllocator.reserve."""

    def unreserve(self, address: int, nbytes: int) -> None:
        """See SubAllocator.unreserve."""

    def create(self, nbytes: int) -> int | None:
        """A handle of new memory, or None. Raises DriverError."""

    def release(self, handle: int) -> None:
        """Releases a handle. Raises DriverError."""

    def map(
        self, address: int, handles: list[int], sizes: list[int]
    ) -> tuple[DriverError, DriverError | None, int] | None:
        """Maps handles end to end, all or none. Returns None, or on failure a tuple: the error, the error of
        undoing it or None, and the bytes that are still mapped.
        """

    def unmap(self, address: int, nbytes: int) -> None:
        """See SubAllocator.unmap."""

    def set_access(
        self, address: int, nbytes: int, devices: Sequence[int], allowed: bool = True
    ) -> None:
        """Gives some devices access to mapped memory, or takes it from them, in one call. Raises DriverError."""
