from typing import SupportsIndex

from bfc.buffers._buffer import Owner
from bfc.snapshots.snapshot import Snapshot

class PinnedBlock:
    """A live block of a `PinnedAllocator`: the `context` that `record_event` takes.

    It does not keep the block alive.

    Parameters
    ----------
    ptr : int
        Its first byte.
    nbytes : int
        The bytes that were asked for.
    allocation_id : int
        The number of the allocation.

    Attributes
    ----------
    ptr : int
        As given.
    nbytes : int
        As given.
    allocation_id : int
        As given.
    """

    def __init__(self, ptr: int, nbytes: int, allocation_id: int) -> None: ...
    @property
    def ptr(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def allocation_id(self) -> int: ...

class PinnedBooks(Owner):
    """The bookkeeping of a `PinnedAllocator`, and a part of it."""

    def find(self, address: SupportsIndex) -> PinnedBlock | None:
        """The live block that an address lies in.

        Parameters
        ----------
        address : int
            The first byte of the block, or any other.

        Returns
        -------
        PinnedBlock or None
            None if there is no such block.

        Raises
        ------
        TypeError
            If `address` is not an int.
        InvalidPointerError
            If `address` is negative or above 2**64 - 2.
        """

    def requested_size(self, ptr: SupportsIndex) -> int:
        """The bytes that were asked for at an address.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.

        Returns
        -------
        int
            The `nbytes` of the request.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        """

    def allocated_size(self, ptr: SupportsIndex) -> int:
        """The bytes of the block at an address.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.

        Returns
        -------
        int
            The request, rounded up to a power of two.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        """

    def host_memory_stats(self) -> dict[str, int | float]:
        """PyTorch's figures by PyTorch's keys, as `torch.cuda.host_memory_stats()` returns them.

        Returns
        -------
        dict of str to int or float
            Bytes, counts and microseconds. "allocations" and "allocated_bytes" count the blocks that the
            allocator owns, in use or cached; "active_requests" and "active_bytes" those in use, or freed
            but still used by a stream. Each has "current", "peak", "allocated" and "freed". The times are
            those of the calls to the sub-allocator.

        Notes
        -----
        Cost: O(1), no device call. Source: PyTorch's behaviour, 4.7.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate(40_960)
        >>> stats = allocator.host_memory_stats()
        >>> stats["active_bytes.current"], stats["num_host_alloc"]
        (65536, 1)
        """

    def reset_peak_stats(self) -> None:
        """Restart the peaks from the current values, and forget the longest and shortest times."""

    def reset_accumulated_stats(self) -> None:
        """Restart the counts of what was allocated and freed, and the sums of times, from 0."""

    def _look(self) -> Snapshot:
        """The blocks as a snapshot, for an error: each is a region with one chunk."""

    def check(self) -> None:
        """Recount the bookkeeping from nothing.

        Raises
        ------
        InvariantError
            If it contradicts itself, which is a bug in bfc.

        Notes
        -----
        Cost: O(n) in the blocks.
        """
