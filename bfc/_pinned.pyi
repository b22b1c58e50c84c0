from typing import Self, SupportsIndex

from bfc._buffer import Buffer
from bfc._pinned_books import PinnedBlock, PinnedBooks
from bfc.settings import PinnedSettings
from bfc.streams import StreamLike
from bfc.suballocators.base import SubAllocator

class PinnedAllocator(PinnedBooks):
    """PyTorch's caching allocator for pinned host memory, from which a device copies without waiting.

    A request is rounded up to a power of two, and a freed block serves the next request of the same power: blocks are
    never split or joined. `sub_allocator` is where they come from. None takes CUDA's pinned memory, on the device that
    is in use (it retains that device's primary context); where there is no CUDA, pageable memory of the host, which
    works the same and is copied more slowly. `is_pinned` says which, and `repr` says why.

    `settings` is the text of PyTorch's PYTORCH_CUDA_ALLOC_CONF, of which the pinned_* keys count (`PinnedSettings`).

    A device may still read or write a block when it is freed. Whoever queues such work says so, with `record_stream` or
    `record_event`; the block is used again only when that stream has come so far. All events stand in one queue,
    and the oldest that is not done holds back those behind it, also of other streams.

    It may be used from any thread. Peaks are true peaks; PyTorch's are sums of the peaks of each size.
    Raises SettingsError, TypeError and ValueError for arguments that it cannot take, DriverError.
    Source: `CachingHostAllocatorImpl`, spec 4.

    >>> import bfc
    >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    >>> ptr = allocator.allocate_raw(40_960)
    >>> allocator.allocated_size(ptr)
    65536
    >>> allocator.deallocate_raw(ptr)
    >>> allocator.allocate_raw(50_000) == ptr
    True
    """

    def __init__(
        self, sub_allocator: SubAllocator | None = None, settings: str | PinnedSettings = ""
    ) -> None: ...
    @property
    def settings(self) -> str:
        """The last text of settings."""

    def set_settings(self, text: str | PinnedSettings) -> None:
        """New settings from now on, in PyTorch's words; what the text does not name stays. A block goes back the way it
        came, whatever is set by then; a reserve that was made stays as it is.

        Raises SettingsError, and changes nothing then.

        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB"))
        >>> allocator.set_settings("pinned_max_cached_size_mb:16")
        >>> allocator.settings
        'pinned_max_cached_size_mb:16'
        """

    @property
    def is_pinned(self) -> bool:
        """Whether its memory is pinned: whether a CUDA device copies from it and to it without a detour."""

    @property
    def closed(self) -> bool:
        """Whether `close()` has been called."""

    def allocate_raw(self, nbytes: SupportsIndex, stream: StreamLike | None = None) -> int:
        """An address for `nbytes` bytes; 0 for 0 bytes. A stream that is named is recorded, as by `record_stream`.

        Raises OutOfMemoryError, TypeError or ValueError for a size that is none, SubAllocatorError, ClosedError.
        Cost: one query of the oldest event, if there is one, and no other call of a driver on a hit.
        Source: `CachingHostAllocatorImpl::allocate`, spec 4.2.
        """

    def allocate(self, nbytes: SupportsIndex | str, stream: StreamLike | None = None) -> Buffer:
        """A `Buffer` of `nbytes` bytes (an int, or a text such as "3 MiB"). Errors and cost as `allocate_raw`.

        >>> import bfc
        >>> with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
        ...     bytes(allocator.allocate(4).from_host(b"abcd"))
        b'abcd'
        """

    def deallocate_raw(self, ptr: SupportsIndex) -> None:
        """Gives an address of `allocate_raw` back. 0 is a no-op.

        Raises InvalidPointerError for what is no live allocation's first byte, BufferError while another object views
        the memory, and what the device raises where a stream used it; nothing changes then.
        Cost: an event for each stream that was recorded. Source: `CachingHostAllocatorImpl::free`, spec 4.3.
        """

    def record_event(
        self,
        ptr: SupportsIndex,
        context: Buffer | PinnedBlock | object,
        stream: object,
        *,
        source: SubAllocator | None = None,
    ) -> bool:
        """Says that a stream uses the block: freed, it is used again only when what was queued there at the free has
        finished. Whether there is such a block.

        `context` is the block's own, which `find` gives, or its `Buffer`, and then `ptr` may lie anywhere; with
        another, or None, `ptr` must be a live allocation's first byte. `stream` is an int or an object, of this
        allocator's device, or of the sub-allocator `source`; a `pyopencl.CommandQueue` needs none.
        Raises TypeError or ValueError for what is no stream. No call of a driver.
        Source: `CachingHostAllocatorImpl::record_event`, spec 4.3.

        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> ptr = allocator.allocate_raw(4096)
        >>> allocator.record_event(ptr, None, 7), allocator.record_event(ptr + 8, None, 7)
        (True, False)
        """

    def mark_event(self, block: Buffer | PinnedBlock | object, stream: object) -> bool:
        """As `record_event` for a block that `find` gave, where all that the stream does with it is queued already: the
        stream is marked now, and may be destroyed before the free. Where that fails, the whole device is waited for.

        Raises TypeError or ValueError for what is no stream. Cost: an event.

        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> ptr = allocator.allocate_raw(4096)
        >>> allocator.mark_event(allocator.find(ptr + 8), 7), allocator.mark_event(None, 7)
        (True, False)
        """

    def record_stream(
        self,
        ptr_or_buffer: SupportsIndex | Buffer,
        stream: object,
        *,
        source: SubAllocator | None = None,
    ) -> None:
        """As `record_event` for an address of `allocate_raw`, or a buffer. A no-op for 0 bytes.

        Raises InvalidPointerError for what is no live allocation of this allocator.
        """

    def empty_cache(self) -> int:
        """Gives every block that nobody uses back to the source, and waits for no stream. Returns the bytes of these
        blocks. Pieces of the reserve are forgotten, and lost until `close()`.

        Raises SubAllocatorError, and keeps for the next time what the source did not take.
        Source: `CachingHostAllocatorImpl::empty_cache`, spec 4.4.

        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.allocate(1000).free()
        >>> allocator.empty_cache()
        1024
        """

    def close(self) -> None:
        """Gives every block back, live ones and the reserve too. Their addresses and buffers are worthless afterwards.

        Waits for the streams that still use freed blocks, and for what uses live ones. Raises BufferError, and closes
        nothing, while another object views the memory; when all is given back, what a stream failed with;
        SubAllocatorError for what the source did not take: call it again. Closing twice does nothing.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...

def open_allocators() -> list[PinnedAllocator]:
    """The allocators that are open now."""
