from typing import Self, SupportsIndex

from bfc.buffers._buffer import Buffer
from bfc.pinned._books import PinnedBlock, PinnedBooks
from bfc.pytorch.pinned_settings import PinnedSettings
from bfc.streams import StreamLike
from bfc.suballocators.base import SubAllocator

class PinnedAllocator(PinnedBooks):
    """PyTorch's caching allocator for pinned host memory, which a device can copy asynchronously.

    A request is rounded up to a power of two, and a freed block serves the next request of the same
    power. Blocks are never split or merged.

    Parameters
    ----------
    sub_allocator : SubAllocator, optional
        Where the blocks come from. None takes CUDA's pinned memory on the current device, whose
        primary context it retains. Without CUDA, None takes pageable host memory, which behaves the
        same but is copied more slowly: `is_pinned` is False then, and `repr` says why.
    settings : str or PinnedSettings, optional
        The pinned_* settings of PYTORCH_CUDA_ALLOC_CONF. Others are checked and ignored.

    Raises
    ------
    SettingsError
        If `settings` is malformed or out of range.
    TypeError
        If an argument has the wrong type.
    ValueError
        If the sub-allocator's memory cannot be reached from the host.
    DriverError
        If the device fails.
    RuntimeError
        If `__init__` is called twice.

    Notes
    -----
    A device may still use a block when it is freed. Declare such work with `record_stream` or
    `record_event`: the block is not reused before it has finished. All events wait in one queue. One
    that has not finished holds back those behind it, also events of other streams.

    Any thread may use it. Peaks are true peaks; PyTorch's are sums of the peaks of each size.
    Source: `CachingHostAllocatorImpl`, PyTorch's behaviour, 4.

    Examples
    --------
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
        """The settings' text that was applied last."""

    def set_settings(self, text: str | PinnedSettings) -> None:
        """Apply new settings. Those that the text does not name stay.

        Parameters
        ----------
        text : str or PinnedSettings
            The pinned_* settings of PYTORCH_CUDA_ALLOC_CONF. Blocks that exist are still given back the
            way they were made, and a reserve that exists stays.

        Raises
        ------
        SettingsError
            If the text is malformed or out of range. Nothing has changed then.
        TypeError
            If `text` is neither of the two.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB"))
        >>> allocator.set_settings("pinned_max_cached_size_mb:16")
        >>> allocator.settings
        'pinned_max_cached_size_mb:16'
        """

    @property
    def is_pinned(self) -> bool:
        """True if the memory is pinned, so that a CUDA device copies it directly."""

    @property
    def closed(self) -> bool:
        """True once `close()` has been called."""

    def allocate_raw(self, nbytes: SupportsIndex, stream: StreamLike | None = None) -> int:
        """Allocate `nbytes` bytes and return their address.

        Parameters
        ----------
        nbytes : int
            The size in bytes, from 0 to 2**63 - 1.
        stream : int, stream object or None, optional
            A stream that will use the memory: it is recorded, as by `record_stream`.

        Returns
        -------
        int
            The address; 0 for 0 bytes.

        Raises
        ------
        OutOfMemoryError
            If there is no cached block, and the sub-allocator has no memory.
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is negative or above 2**63 - 1.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: asks the device about the oldest event, if there is one; no other driver call on a hit.
        Source: `CachingHostAllocatorImpl::allocate`, PyTorch's behaviour, 4.2.
        """

    def try_allocate(
        self, nbytes: SupportsIndex | str, stream: StreamLike | None = None
    ) -> Buffer | None:
        """Allocate like `allocate`, but return None where that raises OutOfMemoryError.

        Parameters
        ----------
        nbytes : int or str
            The size in bytes, or a text such as "3 MiB".
        stream : int, stream object or None, optional
            As in `allocate_raw`.

        Returns
        -------
        Buffer or None
            None if there is no cached block, and the sub-allocator has no memory.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is malformed, negative or above 2**63 - 1.
        MemoryError
            If the host has no memory for the bookkeeping.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        It tries all that `allocate` tries. Cost: as `allocate`.

        Examples
        --------
        >>> import bfc
        >>> with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
        ...     allocator.try_allocate("100 MiB") is None
        True
        """

    def allocate(self, nbytes: SupportsIndex | str, stream: StreamLike | None = None) -> Buffer:
        """Allocate `nbytes` bytes as a `Buffer`, which frees itself.

        Parameters
        ----------
        nbytes : int or str
            The size in bytes, or a text such as "3 MiB".
        stream : int, stream object or None, optional
            As in `allocate_raw`.

        Returns
        -------
        Buffer
            The allocation.

        Raises
        ------
        OutOfMemoryError
            If there is no cached block, and the sub-allocator has no memory.
        TypeError
            If an argument has the wrong type.
        ValueError
            If `nbytes` is malformed, negative or above 2**63 - 1.
        SubAllocatorError
            If the device failed, with something other than "out of memory".
        ClosedError
            If the allocator is closed.

        Notes
        -----
        Cost: as `allocate_raw`, and one Python object.

        Examples
        --------
        >>> import bfc
        >>> with bfc.PinnedAllocator(bfc.HostSubAllocator("64 MiB")) as allocator:
        ...     bytes(allocator.allocate(4).from_host(b"abcd"))
        b'abcd'
        """

    def deallocate_raw(self, ptr: SupportsIndex) -> None:
        """Free the allocation at an address.

        Parameters
        ----------
        ptr : int
            An address that `allocate_raw` returned. 0 does nothing.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at `ptr`.
        TypeError
            If `ptr` is not an int.
        BufferError
            If another object holds a view of the memory (an array, a memoryview).
        SubAllocatorError
            If a stream was recorded for it, and the device fails to mark that stream.

        Notes
        -----
        After an error the allocation is still live. Cost: an event for each stream that was recorded.
        Source: `CachingHostAllocatorImpl::free`, PyTorch's behaviour, 4.3.
        """

    def record_event(
        self,
        ptr: SupportsIndex,
        context: Buffer | PinnedBlock | object,
        stream: object,
        *,
        source: SubAllocator | None = None,
    ) -> bool:
        """Tell the allocator that a stream uses a block, as a framework does.

        Once freed, the block is not reused before the work that was queued on that stream at the time of
        the free has finished.

        Parameters
        ----------
        ptr : int
            An address of the block: its first byte, or any of its bytes if `context` is the block's.
        context : PinnedBlock, Buffer or object
            The block, from `find`, or its buffer. Anything else is ignored.
        stream : int or stream object
            A stream of this allocator's device, or of the device of `source`.
        source : SubAllocator, optional
            The sub-allocator of the device that the stream is on. A `pyopencl.CommandQueue` needs none.

        Returns
        -------
        bool
            True if there is such a block.

        Raises
        ------
        TypeError
            If `stream` is not a stream.
        ValueError
            If a handle is negative or above 2**64 - 1.

        Notes
        -----
        Cost: no driver call. Source: `CachingHostAllocatorImpl::record_event`, PyTorch's behaviour, 4.3.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> ptr = allocator.allocate_raw(4096)
        >>> allocator.record_event(ptr, None, 7), allocator.record_event(ptr + 8, None, 7)
        (True, False)
        """

    def mark_event(self, block: Buffer | PinnedBlock | object, stream: object) -> bool:
        """Record a stream that uses a block now, and will not use it again.

        Unlike `record_event` it marks the stream at once: the stream may be destroyed before the block is
        freed. If it cannot be marked, the call waits for the whole device.

        Parameters
        ----------
        block : PinnedBlock, Buffer or object
            The block, from `find`, or its buffer.
        stream : int or stream object
            A stream of this allocator's device.

        Returns
        -------
        bool
            True if there is such a block.

        Raises
        ------
        TypeError
            If `stream` is not a stream.
        ValueError
            If a handle is negative or above 2**64 - 1.

        Notes
        -----
        Cost: an event.

        Examples
        --------
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
        """Tell the allocator that a stream uses an allocation: `record_event` for addresses and buffers.

        Parameters
        ----------
        ptr_or_buffer : int or Buffer
            A live allocation: its address, its buffer, or a view of that. One of 0 bytes is ignored.
        stream : int or stream object
            As in `record_event`.
        source : SubAllocator, optional
            As in `record_event`.

        Raises
        ------
        InvalidPointerError
            If no live allocation of this allocator is there.
        TypeError
            If `ptr_or_buffer` is neither an address nor a buffer, or `stream` is not a stream.
        ValueError
            If a handle is negative or above 2**64 - 1.
        """

    def empty_cache(self) -> int:
        """Give every block that nobody uses back to the sub-allocator, without waiting for streams.

        Returns
        -------
        int
            The bytes of these blocks. Pieces of the reserve are forgotten, and lost until `close()`.

        Raises
        ------
        SubAllocatorError
            If the sub-allocator fails to take a block back. The next call offers it again.

        Notes
        -----
        Source: `CachingHostAllocatorImpl::empty_cache`, PyTorch's behaviour, 4.4.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.PinnedAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.allocate(1000).free()
        >>> allocator.empty_cache()
        1024
        """

    def close(self) -> None:
        """Give every block back, live ones and the reserve too.

        Addresses and buffers must not be used afterwards. Closing twice does nothing.

        Raises
        ------
        BufferError
            If another object still holds a view of the memory. The allocator stays open then.
        SubAllocatorError
            If a stream failed, or the sub-allocator fails to take a block back. The allocator is closed
            all the same; closing it again offers those blocks again.

        Notes
        -----
        Cost: waits for the streams that use freed or live blocks.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...

def open_allocators() -> list[PinnedAllocator]:
    """The allocators that are open now.

    Returns
    -------
    list of PinnedAllocator
        In no particular order.
    """
