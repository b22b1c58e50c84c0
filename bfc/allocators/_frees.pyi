from collections.abc import Iterable
from typing import SupportsIndex

from bfc.allocators._ledger import Ledger
from bfc.buffers._buffer import Buffer
from bfc.streams import StreamLike

VIEWED: str

class Frees(Ledger):
    """How memory comes back to an allocator: a part of `Allocator`."""

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
            If another stream has used the memory, and the device fails when it is asked about it.

        Notes
        -----
        After an error the allocation is still live. Memory that other streams use is reused once they
        have finished with it; a CachingAllocator looks for that at its next allocation.

        Cost: O(log n). No device call for memory that one stream alone has used, otherwise one or two
        for each other stream. Source: `BFCAllocator::DeallocateRaw`, TensorFlow's behaviour, 2.5.
        """

    def deallocate_many(self, ptrs: Iterable[SupportsIndex]) -> None:
        """Free the allocations at many addresses.

        Parameters
        ----------
        ptrs : iterable of int
            Addresses that `allocate_raw` or `allocate_many` returned. An array of 64-bit ints goes
            fastest. 0 does nothing.

        Raises
        ------
        InvalidPointerError
            If no live allocation starts at one of them, or one appears twice. None is freed then.
        TypeError
            If one of them is not an int. None is freed then.
        BufferError
            If another object holds a view of the memory of one of them. None is freed then.
        SubAllocatorError
            If another stream has used the memory of one of them, and the device fails when it is asked
            about it. That one and those after it are still live.

        Notes
        -----
        Cost: about 20 ns an address of an array, half of `deallocate_raw` from Python.

        Examples
        --------
        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.deallocate_many(allocator.allocate_many([256, 512, 1024]))
        """

    def record_stream(
        self, ptr_or_buffer: SupportsIndex | Buffer, stream: StreamLike | None
    ) -> None:
        """Tell the allocator that another stream uses this memory.

        Once freed, the memory is not reused before the work that was queued on that stream at the time
        of the free has finished.

        Parameters
        ----------
        ptr_or_buffer : int or Buffer
            A live allocation: its address, its buffer, or a view of that. One of 0 bytes is ignored.
        stream : int, stream object or None
            The other stream; None is stream 0. The allocator's own stream is ignored. A stream object
            is kept alive until the memory can be reused; the stream of an int must live as long.

        Raises
        ------
        InvalidPointerError
            If no live allocation of this allocator is there.
        TypeError
            If `ptr_or_buffer` is neither an address nor a buffer, or `stream` is not a stream.
        SubAllocatorError
            If `stream` is not an OpenCL queue of this context, where the memory is OpenCL's.

        Notes
        -----
        Cost: O(1), no device call; the free then asks the device about each stream that was recorded.
        """
