from collections.abc import Iterable
from typing import Any, SupportsIndex

from bfc._buffer import Buffer
from bfc._ledger import Ledger
from bfc.streams import StreamLike

OVER: Any
VIEWED: str

class Frees(Ledger):
    """How memory comes back to an allocator. Make a `BFCAllocator` or a `CachingAllocator`."""

    def deallocate_raw(self, ptr: SupportsIndex) -> None:
        """Gives an address of `allocate_raw` back. 0 is a no-op.

        Raises InvalidPointerError for what is no live allocation's first byte, BufferError while another object views
        the memory, and what the device raises where another stream used it; nothing changes then. A CachingAllocator's
        memory that other streams use comes back at the first allocation after they have finished.
        Cost: O(log n). Source: `BFCAllocator::DeallocateRaw`, spec 2.5.
        """

    def deallocate_many(self, ptrs: Iterable[SupportsIndex]) -> None:
        """Frees every address of an iterable; an array of ints goes fastest. All are checked first: where one is no
        live allocation, stands there twice, or is viewed by another object, an error is raised and none is freed.

        Where the device fails for memory that other streams used, its error is raised at once, and what stands later
        is not freed. Cost: some 20 ns an address of an array, half of `deallocate_raw` from Python.

        >>> import bfc
        >>> allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        >>> allocator.deallocate_many(allocator.allocate_many([256, 512, 1024]))
        """

    def record_stream(
        self, ptr_or_buffer: SupportsIndex | Buffer, stream: StreamLike | None
    ) -> None:
        """Says that another stream uses this memory: freed, it comes back only when what was queued on that stream at
        the free has finished. A no-op for the allocator's own stream. A stream object (with `__cuda_stream__`) is kept
        alive until then; an int must name a stream that lives as long.

        Raises InvalidPointerError, TypeError for what is neither an address nor a buffer, and SubAllocatorError for a
        queue of OpenCL that is none, or another context's. A no-op for 0 bytes.
        """
