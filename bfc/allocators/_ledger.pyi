from typing import SupportsIndex

from bfc.buffers._buffer import Owner
from bfc.snapshots.leaks import Leaks
from bfc.snapshots.snapshot import Snapshot, Stats

class Ledger(Owner):
    """What can be read from an allocator: a part of `Allocator`."""

    @property
    def memory_limit(self) -> int:
        """The most bytes that the allocator takes from its sub-allocator."""

    @property
    def stream(self) -> int | None:
        """The stream that the allocator belongs to, as an int; None for memory of the host (pinned)."""

    @property
    def bookkeeping_bytes(self) -> int:
        """The host memory that the allocator's records take, in bytes."""

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
        """The bytes of the chunk at an address.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.

        Returns
        -------
        int
            The rounded size of the request, and any remainder that was too small to be split off.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        """

    def allocation_id(self, ptr: SupportsIndex) -> int:
        """The number of the allocation at an address.

        Parameters
        ----------
        ptr : int
            The address of a live allocation.

        Returns
        -------
        int
            Allocations are numbered 1, 2, 3, ... in their order; no number is used twice.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        """

    def stats(self) -> Stats:
        """The allocator's figures now: TensorFlow's AllocatorStats, and some that it lacks.

        Returns
        -------
        Stats
            A frozen copy.

        Raises
        ------
        ClosedError
            If a CachingAllocator's `__init__` has not finished.

        Notes
        -----
        Cost: O(1). A BFCAllocator asks the device once for each stream that freed memory waits for.
        """

    def reset_peak_stats(self) -> None:
        """Restart the peaks from what is in use and reserved now, and `largest_alloc_size` from 0."""

    def reset_accumulated_stats(self) -> None:
        """Restart the counts from 0. Allocation ids go on."""

    def clear_stats(self) -> bool:
        """Restart `num_allocs`, `largest_alloc_size` and the peak of bytes in use (TensorFlow's ClearStats).

        The first two restart from 0, the peak from what is in use now. The peak of reserved bytes stays.

        Returns
        -------
        bool
            Always True, as from upstream's BFC allocator.
        """

    def _repr_html_(self) -> str:
        """What a notebook shows: the regions, and what is in use in them."""

    def _look(self) -> Snapshot:
        """A snapshot without the history, which leaves no entry in it."""

    def snapshot(self, *, history: bool = True) -> Snapshot:
        """A copy of every region and chunk as they are now. `print()` draws it.

        Parameters
        ----------
        history : bool, optional
            False leaves out the history that `record_history` has recorded.

        Returns
        -------
        Snapshot
            Frozen.

        Notes
        -----
        Cost: O(n) in the chunks and the recorded history: some nanoseconds each, in one pass under the
        lock. The objects for regions, chunks and entries are made when they are first looked at.
        """

    def leaks(self) -> Leaks:
        """What is live now, whose it is, and the lines of Python that allocated it.

        Returns
        -------
        Leaks
            A tuple of `Leak`, in address order. `print()` shows it by owner and by line, the largest
            first. What is freed and waits for a stream is not in it.

        Notes
        -----
        The lines are known only for what was allocated while `record_history()` kept frames.
        `bfc.testing.leak_check` finds them without a history. Cost: O(n) in the chunks.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.record_history()
        >>> with bfc.owner("weights"):
        ...     ptr = allocator.allocate_raw(1000)
        >>> leak, = allocator.leaks()
        >>> leak.owner, leak.nbytes, leak.frames[0].line
        ('weights', 1000, 2)
        """

    def check(self) -> None:
        """Recount every invariant from nothing: I1 to I15 of docs/design/invariants.md.

        Raises
        ------
        InvariantError
            If one does not hold, which is a bug in bfc.

        Notes
        -----
        Cost: O(n log n) in the chunks.
        """
