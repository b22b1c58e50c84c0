import os
from collections.abc import Callable, Iterable

from bfc.allocators._allocator import Allocator
from bfc.report.snapshot import HistoryEntry

class Recorded(Allocator):
    """What PyTorch's policy counts and records: a part of `CachingAllocator`."""

    def memory_stats(self) -> dict[str, int]:
        """PyTorch's counters by PyTorch's keys, as `torch.cuda.memory_stats()` returns them.

        Returns
        -------
        dict of str to int
            Sorted by key. Each group has `.all`, `.small_pool` and `.large_pool`, and in each
            `.current`, `.peak`, `.allocated` and `.freed`. Bytes are those of whole chunks, except for
            `requested_bytes`.

        Raises
        ------
        ClosedError
            If the allocator's `__init__` has not finished.

        Notes
        -----
        Cost: O(1), no device call. Source: PyTorch's behaviour, 3.1.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> buffer = allocator.allocate("3 MiB")
        >>> stats = allocator.memory_stats()
        >>> stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]
        (3145728, 20971520)
        """

    def memory_summary(self, abbreviated: bool = False) -> str:
        """The counters as a table, laid out as by `torch.cuda.memory_summary()`.

        Parameters
        ----------
        abbreviated : bool, optional
            Leave out the small and the large pool.

        Returns
        -------
        str
            Many lines.

        Notes
        -----
        Source: PyTorch's behaviour, 3.2.

        Examples
        --------
        >>> import bfc
        >>> print(bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")).memory_summary()[:20])
        |===================
        """

    def reset_accumulated_stats(self) -> None:
        """Restart the counts that only rise from 0. Current values and peaks stay."""

    def record_history(
        self,
        enabled: str | None = "all",
        *,
        context: str | None = "all",
        stacks: str = "python",
        max_entries: int | None = None,
        skip_actions: Iterable[str] = (),
    ) -> None:
        """Start to record what happens, as `torch.cuda.memory._record_memory_history()` does.

        What was recorded before is dropped.

        Parameters
        ----------
        enabled : {"all", "state", None}, optional
            "all" records a history; "state" only keeps the Python frames of what is live; None stops.
        context : {"all", "alloc", "state", None}, optional
            Keep the Python frames of allocations ("alloc" or "state"), of frees too ("all"), or of
            neither (None).
        stacks : {"python"}, optional
            C++ frames ("all" in PyTorch) cannot be had.
        max_entries : int, optional
            How many entries to keep, the newest; None keeps all.
        skip_actions : iterable of str, optional
            Actions that are not recorded, such as "free_requested".

        Raises
        ------
        ValueError
            If an argument is none of its choices, or `max_entries` is negative.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: 64 bytes an entry; some microseconds for the frames of each call. Source: PyTorch's behaviour, 3.4.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.record_history()
        >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
        >>> [entry.action for entry in allocator.history()]
        ['segment_alloc', 'alloc', 'free_requested', 'free_completed']
        """

    def history(self) -> list[HistoryEntry]:
        """What `record_history` has recorded, oldest first.

        Returns
        -------
        list of HistoryEntry
            Empty if nothing is recorded.

        Notes
        -----
        Cost: O(n) in the entries.
        """

    def dump(self, path: str | os.PathLike[str]) -> None:
        """Write `snapshot().to_torch()` as a pickle that PyTorch's memory viewer opens.

        Parameters
        ----------
        path : str or os.PathLike
            The file to write. See `Snapshot.dump`.
        """

    def add_free_memory_callback(self, callback: Callable[[], object]) -> None:
        """Call a function whenever no free chunk fits, before a segment is asked for.

        Parameters
        ----------
        callback : callable
            Called without arguments and without a lock. It may free memory; if it returns True, the
            free memory is searched again. An exception is reported through `sys.unraisablehook` and
            counts as False.

        Raises
        ------
        TypeError
            If `callback` is not callable.

        Notes
        -----
        Source: PyTorch's behaviour, 2.7.
        """

    def remove_free_memory_callback(self, callback: Callable[[], object]) -> None:
        """Remove a function that was given to `add_free_memory_callback`.

        Parameters
        ----------
        callback : callable
            The function.

        Raises
        ------
        ValueError
            If it was not added.
        """

    def attach_oom_observer(self, observer: Callable[[int, int, int, int], object]) -> None:
        """Call a function before OutOfMemoryError is raised.

        Parameters
        ----------
        observer : callable
            Called without a lock as `observer(ordinal, asked, limit, free)`: the device's ordinal, the
            bytes asked of the device, the limit (or, without one, the device's total), and the bytes
            free on the device. An exception is reported through `sys.unraisablehook`. Requests that are
            refused while it runs call no observer.

        Raises
        ------
        TypeError
            If `observer` is not callable.

        Notes
        -----
        Source: PyTorch's behaviour, 2.17.
        """

    def detach_oom_observer(self, observer: Callable[[int, int, int, int], object]) -> None:
        """Remove a function that was given to `attach_oom_observer`.

        Parameters
        ----------
        observer : callable
            The function.

        Raises
        ------
        ValueError
            If it was not attached.
        """
