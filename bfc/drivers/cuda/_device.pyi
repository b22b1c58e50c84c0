class PrimaryContext:
    """The primary context of a device. It is retained until this object is collected.

    Another library may reset the device. Memory, streams and events of the context are gone then, and when the device
    is used again, its context has the same handle: only its id has changed. Whoever has memory in the context enters
    it (`enter`), which fails from then on. Whoever has none pushes it (`push`), and gets the context as it is now.
    """

    def __init__(self, device: int) -> None: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def handle(self) -> int: ...
    def push(self) -> int:
        """Makes the context current as `enter` does, as it is now. Returns what `pop` takes. Raises DriverError."""

    def pop(self, mode: int) -> None:
        """Makes the context current that was so before `push`. Raises DriverError."""

    def current_id(self) -> int:
        """The id of the context as it is now. It has changed if the device was reset. Raises DriverError."""

def device_of(context: int) -> int:
    """The device of any context. Raises DriverError."""

def is_host_memory(address: int) -> bool:
    """Whether the driver knows an address as host memory: pinned, or registered. Makes no context: if no device has
    one, nothing can be pinned. Raises DriverError where the driver does not answer.
    """

class DeviceMemory:
    """One kind of memory of a device, and its events."""

    def __init__(self, device: int, kind: str) -> None: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def live_bytes(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def total_bytes(self) -> int: ...
    def attribute(self, number: int) -> int:
        """A CUdevice_attribute."""

    def memory_info(self) -> tuple[int, int]:
        """(free, total) bytes of the device now, as every process on it shares them."""

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        """As SubAllocator.alloc."""

    def alloc_registered(self, alignment: int, nbytes: int, threads: int) -> tuple[int, int] | None:
        """As SubAllocator.alloc: pages of the operating system, touched by some threads, and pinned with
        cuMemHostRegister.
        """

    def free(self, address: int, nbytes: int, idle: bool = False) -> None:
        """As SubAllocator.free, or free_idle."""

    def fence(self, stream: int) -> EventFence | None:
        """As SubAllocator.fence. Raises DriverError."""

    def order(self, first: int, then: int) -> None:
        """As SubAllocator.order. Raises DriverError."""

    def stream_id(self, stream: int) -> int:
        """As SubAllocator.stream_id. Raises DriverError."""

    def synchronize(self) -> None:
        """Waits for all work on the device. Raises DriverError, also if a kernel has failed earlier."""

    def wait(self, stream: int) -> None:
        """As SubAllocator.wait. Raises DriverError."""

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """As SubAllocator.copy. Raises DriverError."""

    def native(self) -> object:
        """The capsule of `native/source.h`. It is good for as long as this object."""

class EventFence:
    """An event behind what was queued on a stream. See `bfc.Fence`."""

    def done(self) -> bool:
        """Whether everything queued before the mark has finished."""

    def wait(self) -> None:
        """Blocks until it has."""
