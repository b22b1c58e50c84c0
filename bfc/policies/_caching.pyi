from collections.abc import Callable, Mapping
from typing import SupportsIndex

from bfc.policies._paged import PagedAllocator
from bfc.pytorch.settings import CachingSettings
from bfc.streams import StreamLike
from bfc.suballocators.base import SubAllocator

class CachingAllocator(PagedAllocator):
    """PyTorch's caching allocator: free memory is kept by stream, small and large chunks apart.

    Parameters
    ----------
    sub_allocator : SubAllocator
        Where segments come from, such as `bfc.CUDASubAllocator()`.
    memory_limit : int, str or float, optional
        The most bytes to take from it: a number, a text such as "4 GiB", or a float up to 1.0,
        which is PyTorch's memory fraction. None is `per_process_memory_fraction`; if that is not
        set either, only the sub-allocator limits it.
    settings : str or CachingSettings, optional
        What PyTorch takes in PYTORCH_CUDA_ALLOC_CONF, such as "max_split_size_mb:128".
        `bfc.CachingSettings.from_environment()` reads BFC_ALLOC_CONF.
    strict : bool, optional
        Place, refuse and count exactly as PyTorch 2.11 does.
    stream : int, stream object or None, optional
        The stream that the allocator belongs to: the default of `allocate`.
    retry_seconds : float, optional
        How long a request that does not fit waits for other threads to free memory.
    max_split_size_mb : int, optional
        PyTorch's setting of that name, as a value. It takes precedence over the text of `settings`,
        and so do the five parameters below.
    max_non_split_rounding_mb : int, optional
        PyTorch's setting.
    garbage_collection_threshold : float, optional
        PyTorch's setting.
    roundup_power2_divisions : int or mapping, optional
        PyTorch's setting: a number of divisions for all sizes, or {MiB: divisions, ">": divisions}.
    large_segment_size_mb : int, optional
        PyTorch's setting.
    per_process_memory_fraction : float, optional
        PyTorch's setting. Cannot be given together with `memory_limit`.
    search_again : bool, optional
        After the last retry, which waits for other streams, look once more at the memory that they
        gave back (upstream #189504). On unless `strict`.
    collect_without_limit : bool, optional
        If there is no limit, `garbage_collection_threshold` is a fraction of the device's total.
        Upstream ignores the threshold then, so that placement may differ once it collects. On
        unless `strict`.
    release_only_what_is_needed : bool, optional
        The last retry gives back as much cached memory as the request needs, and everything only if
        that does not help. It saves driver calls, but the rest of the cache may be fragmented, and
        a later request may be refused because of that. Off by default.
    stitch : bool, optional
        Map memory page by page instead of taking segments, and stitch free pages that lie apart where
        no free block is large enough. Sizes are rounded, streams and private pools kept apart, and
        counts kept as in PyTorch; blocks are always split. Private pools take segments as before,
        since a captured graph needs its addresses. Cannot be combined with `strict` or
        `expandable_segments`, and the settings about segments do nothing to what is mapped.
    page_size : int or str, optional
        With `stitch`, the bytes of a page: a power of two, and a multiple of the source's
        `mapping_granularity`. None is 2 MiB, or the granularity if that is more.

    Attributes
    ----------
    search_again : bool
        True if it is on.
    collect_without_limit : bool
        True if it is on.
    release_only_what_is_needed : bool
        True if it is on.
    stitch : bool
        As given.

    Raises
    ------
    SettingsError
        If `settings`, or one of the six settings, is unknown, malformed or out of range.
    TypeError
        If `sub_allocator` is not a SubAllocator, or another argument has the wrong type.
    ValueError
        If another argument is out of its range, `stream` cannot be the stream of an allocator, both
        `memory_limit` and `per_process_memory_fraction` are given, or `stitch` is given together with
        `strict`, `expandable_segments`, or a source that cannot map memory.

    Notes
    -----
    Any thread may use it. Source: `c10::cuda::CUDACachingAllocator` of PyTorch 2.11;
    docs/design/differences.md lists where it differs on purpose.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"), settings="max_split_size_mb:64")
    >>> buffer = allocator.allocate("5 MiB")
    >>> allocator.stats().pool_bytes
    20971520
    """

    def __init__(
        self,
        sub_allocator: SubAllocator,
        *,
        memory_limit: SupportsIndex | str | float | None = None,
        settings: str | CachingSettings = "",
        strict: bool = False,
        stream: StreamLike | None = 0,
        retry_seconds: float = 0.0,
        max_split_size_mb: int | None = None,
        max_non_split_rounding_mb: int | None = None,
        garbage_collection_threshold: float | None = None,
        roundup_power2_divisions: int | Mapping[int | str, int] | None = None,
        large_segment_size_mb: int | None = None,
        per_process_memory_fraction: float | None = None,
        search_again: bool | None = None,
        collect_without_limit: bool | None = None,
        release_only_what_is_needed: bool | None = None,
        stitch: bool = False,
        page_size: SupportsIndex | str | None = None,
    ) -> None: ...
    @property
    def settings(self) -> str:
        """The settings' text that was applied last, as PyTorch remembers it."""

    def set_settings(self, text: str) -> None:
        """Apply new settings, as `torch.cuda.memory._set_allocator_settings` does.

        Parameters
        ----------
        text : str
            What PyTorch takes in PYTORCH_CUDA_ALLOC_CONF. The settings that any text resets return to
            their defaults unless it names them (see `CachingSettings.apply`).

        Raises
        ------
        SettingsError
            If the text is malformed, or changes `per_process_memory_fraction`, which is read only when
            an allocator is made (use `set_memory_fraction`; with `strict` it is ignored, as in PyTorch).
            Nothing has changed then.
        TypeError
            If `text` is not a str.

        Notes
        -----
        Source: PyTorch's behaviour, 2.18.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.set_settings("roundup_power2_divisions:4")
        >>> address = allocator.allocate_raw(84 << 20)
        >>> allocator.allocated_size(address) >> 20
        96
        """

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit the allocator to a fraction of the device's total memory.

        Parameters
        ----------
        fraction : float
            From 0.0 to 1.0; 1.0 removes the limit. Memory above the new limit is not given back.

        Raises
        ------
        TypeError
            If `fraction` is not a float.
        ValueError
            If `fraction` is not between 0.0 and 1.0.

        Notes
        -----
        Source: PyTorch's behaviour, 2.14.
        """

    @property
    def memory_fraction(self) -> float:
        """The limit as a fraction of the device's total memory; 1.0 if there is no limit."""

    @property
    def search_again(self) -> bool: ...
    @property
    def collect_without_limit(self) -> bool: ...
    @property
    def release_only_what_is_needed(self) -> bool: ...
    @property
    def stitch(self) -> bool:
        """True if memory is mapped page by page."""

    def release_free_regions(self) -> int:
        """Give every wholly free region back, after waiting for the streams that use freed memory.

        The regions of a private pool are given back only after the pool was released.

        Returns
        -------
        int
            The bytes given back.

        Raises
        ------
        SubAllocatorError
            If the sub-allocator fails to take a region back. It is offered again by the next call of
            `release_free_regions` or `close`.

        Notes
        -----
        Source: `empty_cache`, PyTorch's behaviour, 2.13.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.deallocate_raw(allocator.allocate_raw(100))
        >>> allocator.release_free_regions()
        2097152
        """

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

    def page_stats(self) -> dict[str, float]:
        """What expandable segments have reserved and mapped, and what did not go back.

        Returns
        -------
        dict of str to int
            With `stitch`, what `BFCAllocator.page_stats` returns. Otherwise, and all 0 if nothing was ever
            mapped:

            - `"reservations"` and `"reserved_address_bytes"`: the ranges of addresses.
            - `"pages"` and `"page_bytes"`: the memory for them, 2 MiB or `large_segment_size_mb` a page.
              `"lost_bytes"` are part of it.
            - `"lost_slots"`: pages that the sub-allocator failed to unmap. They are not handed out.
              `release_free_regions` and `close` try again.
            - `"lost_bytes"`: the memory of those, and of pages that it unmapped and failed to release.

        Raises
        ------
        ClosedError
            If the allocator's `__init__` has not finished.

        Notes
        -----
        Cost: O(n) in the pages, no device call. While another thread maps or unmaps, the figures may be
        those of a moment in between, and `"lost_slots"` does not count.

        Examples
        --------
        >>> import bfc
        >>> device = bfc.SimulatedSubAllocator("1 GiB")
        >>> allocator = bfc.CachingAllocator(device, settings="expandable_segments:True")
        >>> address = allocator.allocate_raw(25 << 20)
        >>> stats = allocator.page_stats()
        >>> stats["pages"], stats["page_bytes"] >> 20, stats["reserved_address_bytes"] >> 20
        (2, 40, 1160)
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
        """Call a function before OutOfMemoryError is raised, or `try_allocate` returns None.

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

    def _create_pool(
        self, pool: tuple[int, int], use_on_oom: bool = False, no_split: bool = False
    ) -> None:
        """Makes a private pool, or adds a reference to it."""

    def _begin_pool(self, pool: tuple[int, int], streams: str | int = "thread") -> None:
        """Diverts allocations into a pool, and adds a reference to it: those of this thread ("thread"), on every
        stream ("all"), on one, or none ("none").
        """

    def _end_pool(self, pool: tuple[int, int]) -> None:
        """Ends what _begin_pool began; the reference stays."""

    def _release_pool(self, pool: tuple[int, int]) -> None:
        """Takes one reference away. Without any, what the pool caches goes back with the next emptying."""

    def _pool_use_count(self, pool: tuple[int, int]) -> int:
        """How many references a pool has; 0 if it is not known."""

    def _set_use_on_oom(self, pool: tuple[int, int], use: bool = True) -> None:
        """Sets whether a pool serves requests that would be refused."""

    def _set_no_split(self, pool: tuple[int, int], no_split: bool = True) -> None:
        """Sets whether a pool's chunks are handed out whole."""

    def _empty_pool(self, pool: tuple[int, int], or_later: bool = False) -> int:
        """Gives back what a released pool caches, after waiting for the streams that use its memory. Does nothing if
        the pool still has a reference. Returns the bytes given back. `or_later`: if `strict` does not allow it now,
        leave it to the next `empty_cache`.
        """
