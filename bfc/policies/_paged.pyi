import os
from collections.abc import Iterable
from typing import SupportsIndex

from bfc.allocators._allocator import Allocator
from bfc.buffers._buffer import Buffer
from bfc.snapshots.snapshot import HistoryEntry

class PagedAllocator(Allocator):
    """What both policies have beside the placement: memory mapped page by page, and a history."""

    def page_stats(self) -> dict[str, float]:
        """How much memory is mapped, and what was called for that, of an allocator that maps page by page.

        Returns
        -------
        dict of str to int or float
            `page_size` in bytes; `pages`, all that were made and not released; `pages_owned`, those
            of which at least a part is in use; `views`; `slots_mapped`, how many addresses pages
            are mapped at; `stitches`, the views made so far; `creates`, `maps` (of pages),
            `set_accesses`, `unmaps`, `releases`, the calls so far; `stream_waits`, how often a
            stream had to wait for another one's work; `most_calls_of_a_request`; `lost_slots`,
            those that could not be unmapped; `driver_seconds`, the time in these calls.

        Raises
        ------
        ValueError
            If the allocator has neither `virtual_memory` nor `stitch`.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
        >>> address = allocator.allocate_raw(5 << 20)
        >>> allocator.page_stats()["pages"]
        3
        """

    def trim(self, keep: SupportsIndex | str = 0, *, wait: bool = False) -> int:
        """Give free pages back, of an allocator that maps page by page. Their addresses stay reserved.

        Parameters
        ----------
        keep : int or str, optional
            The bytes to keep: free pages go until no more than that is reserved, or no page is free.
        wait : bool, optional
            Wait for the streams that may still use them. If False, the pages of streams that are busy
            stay.

        Returns
        -------
        int
            The bytes given back.

        Raises
        ------
        ValueError
            If the allocator has neither `virtual_memory` nor `stitch`, or if `keep` is negative or malformed.
        SubAllocatorError
            If the device failed. What it did not take back is offered again by the next call.

        Notes
        -----
        Pages that have one address go first, and the largest free chunks before smaller ones. Then the
        views go, and the pages behind them. Cost: one call to unmap each row of pages, and one to
        release each page.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
        >>> allocator.deallocate_raw(allocator.allocate_raw(64 << 20))
        >>> allocator.trim("16 MiB")
        50331648
        """

    def try_extend(self, buffer: Buffer | SupportsIndex, nbytes: SupportsIndex | str) -> bool:
        """Make an allocation larger where it is, without a copy.

        Parameters
        ----------
        buffer : Buffer or int
            The allocation, or its address.
        nbytes : int or str
            Its new size in bytes, from its present one on.

        Returns
        -------
        bool
            True if what lies behind it was free, or could be mapped. If False, nothing has changed.

        Raises
        ------
        InvalidPointerError
            If it is no live allocation of this allocator.
        ValueError
            If `nbytes` is less than the present size, or malformed.
        TypeError
            If an argument has the wrong type.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Where memory is mapped page by page, new pages are mapped behind a chunk that is the last of its
        range. A view, which is what a request was stitched for, only grows up to its last page.

        Cost: O(log n) if enough is free behind it, otherwise the calls that map pages.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), virtual_memory=True)
        >>> cache = allocator.allocate("64 MiB")
        >>> allocator.try_extend(cache, "96 MiB"), cache.nbytes
        (True, 100663296)
        """

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
            If an argument is not one of the values above, or `max_entries` is negative.
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: 64 bytes an entry; some microseconds for the frames of each call. In a BFCAllocator each
        hit then takes the slow path, half a microsecond more, and a replay goes call by call. Nothing
        while nothing is recorded. Source: PyTorch's behaviour, 3.4.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
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
