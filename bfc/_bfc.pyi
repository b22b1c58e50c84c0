from collections.abc import Callable
from typing import SupportsIndex

from bfc._allocator import Allocator
from bfc._core import SharedCounter
from bfc.streams import StreamLike
from bfc.suballocators.base import SubAllocator

class BFCAllocator(Allocator):
    """TensorFlow's best fit with coalescing over one sub-allocator.

    `memory_limit` (None: what the sub-allocator says; bytes; "4 GiB"; a float: that fraction of the total) bounds what
    it takes. `allow_growth=False` takes all of it with the first allocation; True takes 2 MiB, then doubles.
    `garbage_collection` gives wholly free regions back when memory has run out. A chunk is split where at least
    `fragmentation_fraction` of the limit (0: 128 MiB) would be left over, or where it is twice the request.
    `strict` refuses whatever TensorFlow 2.21 refuses. `retry_seconds` waits that long for other threads to free memory.
    `stream` is the one that it belongs to. Any thread may use it. Raises TypeError or ValueError for options that are
    none. Source: `tsl::BFCAllocator` of TensorFlow 2.21; docs/design.md lists where it differs on purpose.

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
    ) -> None: ...
    @property
    def allow_growth(self) -> bool: ...
    @property
    def garbage_collection(self) -> bool: ...
    @property
    def fragmentation_fraction(self) -> float: ...
    @property
    def next_region_size(self) -> int:
        """The bytes that the next region would have, limits apart."""

    def set_timing_counter(self, counter: SharedCounter) -> None:
        """From now on a free carries the counter's next count, and is merged with its neighbours only when the safe
        frontier has passed it (TensorFlow's `SetTimingCounter`, spec 2.9).

        Each allocation then looks through the frees that are not merged yet: O(n) in those.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        >>> allocator.set_timing_counter(bfc.SharedCounter())
        >>> allocator.deallocate_raw(allocator.allocate_raw(1000))
        >>> [chunk.freed_at_count for chunk in allocator.snapshot().free_chunks()]
        [1, 0]
        """

    def set_safe_frontier(self, count: SupportsIndex | Callable[[], SupportsIndex]) -> None:
        """Frees counted before `count` are safe to merge and to reuse anywhere. It only ever rises."""
