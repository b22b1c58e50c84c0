class PrimaryContext:
    """The primary context of a device. It is retained until this object is collected.

    Another library may reset the device. Memory, streams and events of the context are gone then, and when the device
    is used again, its context has the same handle: only its id has changed. Code that has memory in the
    context uses `enter`, which fails after a reset. Code without memory there uses `push`, which takes the current
    context.
    """

    def __init__(self, device: int) -> None: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def handle(self) -> int: ...
    def push(self) -> int:
        """Like `enter`, but also works after a reset. Returns the argument for `pop`. Raises DriverError."""

    def pop(self, mode: int) -> None:
        """Makes the context current that was current before `push`. Raises DriverError."""

    def current_id(self) -> int:
        """The present id of the context. It changes if the device is reset. Raises DriverError."""

def device_of(context: int) -> int:
    """The device of any context. Raises DriverError."""

def is_host_memory(address: int) -> bool:
    """Whether the driver knows an address as host memory: pinned, or registered. Makes no context: if no device has
    one, nothing can be pinned. Raises DriverError if the driver does not answer.
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
        """The (free, total) bytes of the device now, with the memory of all processes on it counted."""

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        """See SubAllocator.alloc."""

    def alloc_registered(self, alignment: int, nbytes: int, threads: int) -> tuple[int, int] | None:
        """Like SubAllocator.alloc, with pages of the operating system that `threads` threads touch, and that
        cuMemHostRegister pins.
        """

    def free(self, address: int, nbytes: int, idle: bool = False) -> None:
        """See SubAllocator.free; with `idle`, see free_idle."""

    def fence(self, stream: int) -> EventFence | None:
        """See SubAllocator.fence. Raises DriverError."""

    def order(self, first: int, then: int) -> None:
        """See SubAllocator.order. Raises DriverError."""

    def stream_id(self, stream: int) -> int:
        """See SubAllocator.stream_id. Raises DriverError."""

    def synchronize(self) -> None:
        """Waits for all work on the device. Raises DriverError, even if only an earlier kernel has failed."""

    def wait(self, stream: int) -> None:
        """See SubAllocator.wait. Raises DriverError."""

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """See SubAllocator.copy. Raises DriverError."""

    def native(self) -> object:
        """The capsule of `native/source.h`. It is valid as long as this object lives."""

class EventFence:
    """An event after the work that was queued on a stream. See `bfc.Fence`."""

    def done(self) -> bool:
        """Whether everything queued before the mark has finished."""

    def wait(self) -> None:
        """Blocks until everything queued before the mark has finished."""
