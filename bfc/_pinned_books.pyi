from typing import SupportsIndex

from bfc._buffer import Owner

class PinnedBlock:
    """A live block of a `PinnedAllocator`: `ptr`, its first byte; `nbytes`, as asked for; `allocation_id`. It is the
    `context` that `record_event` takes. It keeps nothing alive.
    """

    def __init__(self, ptr: int, nbytes: int, allocation_id: int) -> None: ...
    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def allocation_id(self) -> int: ...

class PinnedBooks(Owner):
    """What a `PinnedAllocator` knows of its blocks, and counts. Make that."""

    def find(self, address: SupportsIndex) -> PinnedBlock | None:
        """The live block that an address lies in, its first byte or any other, as a `PinnedBlock`; or None."""

    def requested_size(self, ptr: SupportsIndex) -> int:
        """The bytes that were asked for. Raises InvalidPointerError."""

    def allocated_size(self, ptr: SupportsIndex) -> int:
        """The bytes of the block. Raises InvalidPointerError."""

    def host_memory_stats(self) -> dict[str, int | float]:
        """PyTorch's figures, under its keys, as `torch.cuda.host_memory_stats()` has them: bytes, counts, microseconds.

        "allocations" and "allocated_bytes" are the blocks that it owns, in use or cached; "active_requests" and
        "active_bytes" those in use, or freed and still used by a stream. Each has "current", "peak", "allocated" and
        "freed". The times are those of the source's calls. Nothing is asked of a device. Source: spec 4.7.

        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate(40_960)
        >>> stats = allocator.host_memory_stats()
        >>> stats["active_bytes.current"], stats["num_host_alloc"]
        (65536, 1)
        """

    def reset_peak_stats(self) -> None:
        """Peaks start again from what is current; the longest and shortest times from nothing."""

    def reset_accumulated_stats(self) -> None:
        """What was allocated and freed so far, and the sums of times, start again from 0."""

    def check(self) -> None:
        """Recounts the books from nothing. Raises InvariantError where they contradict themselves. Linear."""
