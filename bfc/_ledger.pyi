from typing import SupportsIndex

from bfc._buffer import Owner
from bfc.snapshot import Snapshot, Stats

class Ledger(Owner):
    """What an allocator can be asked. Make a `BFCAllocator` or a `CachingAllocator`."""

    @property
    def memory_limit(self) -> int:
        """The most bytes that it takes from the sub-allocator."""

    @property
    def stream(self) -> int | None:
        """The stream it belongs to, as an int; None for memory whose user is the host (pinned)."""

    @property
    def bookkeeping_bytes(self) -> int:
        """The host memory that the allocator's records take, in bytes."""

    def requested_size(self, ptr: SupportsIndex) -> int:
        """The bytes that were asked for at this address. Raises InvalidPointerError."""

    def allocated_size(self, ptr: SupportsIndex) -> int:
        """The bytes of the chunk at this address: what was asked for, rounded, and what was not split off."""

    def allocation_id(self, ptr: SupportsIndex) -> int:
        """The number of the allocation at this address: 1, 2, 3, ... in order, none used twice."""

    def stats(self) -> Stats:
        """A `bfc.Stats`: TensorFlow's AllocatorStats, and what it leaves out. O(1); a driver call for each stream that
        frees wait for.
        """

    def reset_peak_stats(self) -> None:
        """Peaks start anew from what is in use and reserved now, and `largest_alloc_size` from 0."""

    def reset_accumulated_stats(self) -> None:
        """Counts start anew from 0. Allocation ids go on."""

    def clear_stats(self) -> bool:
        """TensorFlow's ClearStats: `num_allocs` and `largest_alloc_size` are 0, the peak is what is in use; the pool's
        peak stays. Whether it did so: True, as upstream's answers for BFC.
        """

    def snapshot(self) -> Snapshot:
        """A `bfc.Snapshot`: every region and chunk as they are now. `print()` draws it. O(n)."""

    def check(self) -> None:
        """Recounts every invariant (docs/design.md, I1 to I11) from nothing. Raises InvariantError. O(n log n)."""
