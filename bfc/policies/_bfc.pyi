from collections.abc import Callable
from typing import SupportsIndex

from bfc._core import SharedCounter
from bfc.policies._paged import PagedAllocator
from bfc.streams import StreamLike
from bfc.suballocators.base import SubAllocator

class BFCAllocator(PagedAllocator):
    """TensorFlow's allocator: best fit with coalescing.

    Parameters
    ----------
    sub_allocator : SubAllocator
        Where regions come from, such as `bfc.CUDASubAllocator()`.
    memory_limit : int, str or float, optional
        The most bytes to take from it: a number, a text such as "4 GiB", or a float, which is a
        fraction of the device's total. None is what the sub-allocator says it can give.
    allow_growth : bool, optional
        False takes the whole limit with the first allocation. True takes 2 MiB first, and then
        regions that double.
    garbage_collection : bool, optional
        Give wholly free regions back if memory has run out, and try again.
    fragmentation_fraction : float, optional
        From 0 to 1. A chunk is split if it is at least twice the request, or if at least this
        fraction of the limit would be left over; 0 stands for 128 MiB.
    strict : bool, optional
        Refuse whatever TensorFlow 2.21 refuses, to compare runs event by event.
    retry_seconds : float, optional
        How long a request that does not fit waits for other threads to free memory.
    stream : int, stream object or None, optional
        The stream that the allocator belongs to. Memory freed on it is reused there at once.
    virtual_memory : bool, optional
        Map memory page by page, and stitch free pages that lie apart where no free chunk is large
        enough: only what shares a page with a live chunk is lost to other requests. Each stream has
        ranges of addresses of its own, chunks are always split, and memory always grows:
        `allow_growth` and `fragmentation_fraction` do nothing. The limit counts pages.
    page_size : int or str, optional
        With `virtual_memory`, the bytes of a page: a power of two, and a multiple of the source's
        `mapping_granularity`. None is the power of two at or above an 8192nd of the limit, from 2 to
        32 MiB. Small pages waste less, and large ones take fewer driver calls.
    headroom : float, optional
        With `virtual_memory`, by how much the memory taken may exceed the most that was ever in
        use, as a fraction of that, where it saves stitching: 0.05 for a program whose sizes do not
        repeat.

    Attributes
    ----------
    allow_growth : bool
        As given.
    garbage_collection : bool
        As given.
    fragmentation_fraction : float
        As given.
    virtual_memory : bool
        As given.

    Raises
    ------
    TypeError
        If `sub_allocator` is not a SubAllocator, or another argument has the wrong type.
    ValueError
        If an argument is out of its range, if `stream` cannot be the stream of an allocator, or if
        `virtual_memory` is given together with `strict`, with a source that cannot map memory, or with
        a limit below a page.

    Notes
    -----
    Any thread may use it. Source: `tsl::BFCAllocator` of TensorFlow 2.21; docs/design/differences.md lists where
    it differs on purpose.

    Examples
    --------
    >>> import bfc
    >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"), memory_limit="64 MiB")
    >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
    >>> allocator.stats().pool_bytes
    67108864
    """

    def __init__(
        self,
        sub_allocator: SubAllocator,
        *,
        memory_limit: SupportsIndex | str | float | None = None,
        allow_growth: bool = False,
        garbage_collection: bool = True,
        fragmentation_fraction: float = 0.0,
        strict: bool = False,
        retry_seconds: float = 0.0,
        stream: StreamLike | None = 0,
        virtual_memory: bool = False,
        page_size: SupportsIndex | str | None = None,
        headroom: float = 0.0,
    ) -> None: ...
    @property
    def virtual_memory(self) -> bool:
        """True if memory is mapped page by page."""

    @property
    def allow_growth(self) -> bool: ...
    @property
    def garbage_collection(self) -> bool: ...
    @property
    def fragmentation_fraction(self) -> float: ...
    @property
    def next_region_size(self) -> int:
        """The size in bytes of the next region, if the limit leaves that much."""

    def set_timing_counter(self, counter: SharedCounter) -> None:
        """Mark each free with the next count of a counter (TensorFlow's `SetTimingCounter`).

        From now on a free chunk is merged with its neighbours only once the safe frontier has passed
        its count, unless a request would fail otherwise.

        Parameters
        ----------
        counter : SharedCounter
            May be shared with other allocators.

        Raises
        ------
        TypeError
            If `counter` is not a SharedCounter.
        ValueError
            If the allocator has `virtual_memory`.

        Notes
        -----
        Cost: each allocation then looks through the frees that are not merged yet, O(n) in those.
        Source: TensorFlow's behaviour, 2.9.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> allocator.set_timing_counter(bfc.SharedCounter())
        >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
        >>> [chunk.freed_at_count for chunk in allocator.snapshot().free_chunks()]
        [1, 0]
        """

    def set_safe_frontier(self, count: SupportsIndex | Callable[[], SupportsIndex]) -> None:
        """Declare all memory freed before a count safe to merge, and to reuse on any stream.

        Parameters
        ----------
        count : int or callable
            A count of the timing counter, or a callable that returns one. A count lower than the
            last one has no effect.

        Raises
        ------
        TypeError
            If `count` is not an int.
        ValueError
            If `count` is negative or above 2**63 - 1.
        """
