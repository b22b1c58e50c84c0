import os
from collections.abc import Callable, Iterable

from bfc._allocator import Allocator
from bfc.snapshot import HistoryEntry

class Recorded(Allocator):
    """What PyTorch's policy counts and writes down. Make a `CachingAllocator`."""

    def memory_stats(self) -> dict[str, int]:
        """PyTorch's counters by PyTorch's keys, sorted: `torch.cuda.memory_stats()`. O(1), no device call.

        Each group has `.all`, `.small_pool` and `.large_pool`, and in each `.current`, `.peak`, `.allocated` and
        `.freed`; bytes count whole chunks but for `requested_bytes`. Source: spec 3.1.

        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate("3 MiB")
        >>> stats = allocator.memory_stats()
        >>> stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
        (3145728, 20971520)
        """

    def memory_summary(self, abbreviated: bool = False) -> str:
        """The statistics as a table, as `torch.cuda.memory_summary()` lays it out. Source: spec 3.2.

        >>> import bfc
        >>> print(bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")).memory_summary()[:20])
        |===================
        """

    def reset_accumulated_stats(self) -> None:
        """What only rises starts anew from 0; what is current, and the peaks, stay."""

    def record_history(
        self,
        enabled: str | None = "all",
        *,
        context: str | None = "all",
        stacks: str = "python",
        max_entries: int | None = None,
        skip_actions: Iterable[str] = (),
    ) -> None:
        """Begins to write down what happens, as `torch.cuda.memory._record_memory_history()` does; earlier entries go.

        `enabled`: "all", "state" (frames of what is live, and no history), or None to stop. `context`: whose Python
        frames are kept: None, "state" or "alloc" (allocations), "all" (frees too): some microseconds each. The last
        `max_entries` are kept (None: all), at 64 bytes each; those of `skip_actions` are not written down. C++ frames
        (`stacks="all"`) are not to be had. Raises ValueError. Source: spec 3.4.

        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.record_history()
        >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
        >>> [entry.action for entry in allocator.history()]
        ['segment_alloc', 'alloc', 'free_requested', 'free_completed']
        """

    def history(self) -> list[HistoryEntry]:
        """What was recorded, oldest first: a list of `bfc.HistoryEntry`. Empty where nothing is recorded. O(n)."""

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Writes `snapshot().to_torch()` as a pickle that PyTorch's memory viewer opens. See `Snapshot.dump`."""

    def add_free_memory_callback(self, callback: Callable[[], object]) -> None:
        """`callback()` runs whenever nothing fits, before memory is asked for. It may free memory, and says with True
        that it did: then what is free is searched again. It runs without a lock; what it raises is reported through
        `sys.unraisablehook`, and counts as False. Source: spec 2.7.
        """

    def remove_free_memory_callback(self, callback: Callable[[], object]) -> None:
        """Takes a callback back. Raises ValueError where it is none."""

    def attach_oom_observer(self, observer: Callable[[int, int, int, int], object]) -> None:
        """`observer(device ordinal, bytes asked of the device, limit or total, bytes free on the device)` runs before
        OutOfMemoryError is raised, without a lock. What it raises is reported through `sys.unraisablehook`; a refusal
        inside it calls no observer. Source: spec 2.17.
        """

    def detach_oom_observer(self, observer: Callable[[int, int, int, int], object]) -> None:
        """Takes an observer back. Raises ValueError where it is none."""
