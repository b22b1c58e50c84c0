"""The memory resource for cuda.core. Its class is made when it is first asked for, since it derives
from one of cuda.core's."""

from __future__ import annotations

import functools
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.buffers._buffer import Buffer
from bfc.errors import ClosedError, DeviceUnavailableError, InvalidPointerError
from bfc.integrations._shared import Blocks, by_device, client, is_captured, let_go
from bfc.pinned import PinnedAllocator

INSTALL = "'cuda-core>=1,<2'"
PUBLIC = "bfc.integrations.cuda_core"


class PinnedBlocks:
    """Blocks of a pinned pool by address, as `Blocks` has those of a device. The host uses such
    memory at once, and so no stream waits for another."""

    def __init__(self, allocator: PinnedAllocator) -> None:
        self.allocator = allocator
        self.live: dict[int, Buffer] = {}

    def allocate(self, nbytes: int, stream: Any) -> int:
        buffer = self.allocator.allocate(nbytes)
        if not buffer.nbytes:
            return 0
        self.live[buffer.ptr] = buffer
        return buffer.ptr

    def free(self, ptr: int, nbytes: int, stream: Any) -> bool:
        return let_go(self.live, self.allocator, ptr, stream)


def free_other(allocator: Allocator | PinnedAllocator, ptr: int, stream: Any) -> None:
    """Frees a block of a pool that did not come from the resource, such as one of `allocate_raw`:
    whoever made a buffer of it by `Buffer.from_handle` gave it away. Raises nothing."""
    try:
        allocator.record_stream(ptr, stream)
        allocator.deallocate_raw(ptr)
    except (InvalidPointerError, ClosedError):
        pass  # it is not one of its blocks, or was freed already


@functools.cache
def resource_class() -> type:
    core: Any = client("cuda.core", INSTALL)
    if int(core.__version__.split(".")[0]) < 1:
        raise DeviceUnavailableError(f"cuda-core {core.__version__}\n  try: pip install {INSTALL}")
    graph_builder: type = client("cuda.core.graph", INSTALL).GraphBuilder

    class MemoryResource(core.MemoryResource):  # type: ignore[misc]
        """A `cuda.core.MemoryResource` over an allocator of one device, or a `PinnedAllocator`.

        `allocate(size, *, stream)` gives a `cuda.core.Buffer` for that stream; 0 bytes have the
        address 0. When it is freed, its memory is not reused until the work that is queued on that
        stream, or on the one that was given to `close` or `set_deallocation_stream`, has finished.
        A block of the pool that `Buffer.from_handle(address, size, mr=resource)` was given is freed
        in the same way.

        Raises what `Allocator.allocate` does, and TypeError for a graph that is being built outside
        of `Allocator.capture`. Cost: no driver call on the allocator's own stream; on
        another two, and two for the free.
        """

        is_ipc_enabled = False  # cuda.core asks before it shares a buffer
        before: Any = None  # what it replaced on a device

        def __init__(self, allocator: Allocator | PinnedAllocator) -> None:
            self._allocator: Any = allocator
            self._is_pinned = isinstance(allocator, PinnedAllocator)
            if isinstance(allocator, PinnedAllocator):
                self._ordinal = -1
                self._blocks: Blocks | PinnedBlocks = PinnedBlocks(allocator)
            else:
                [(self._ordinal, self._allocator)] = by_device(allocator).items()
                self._blocks = Blocks(self._allocator)

        def allocate(self, size: int, *, stream: Any) -> Any:
            if isinstance(stream, graph_builder) and (
                self._is_pinned or not is_captured(self._allocator, stream)
            ):
                raise TypeError(
                    "a graph in the making needs cuda.core.GraphMemoryResource, or "
                    "`with allocator.capture(builder):` around it"
                )
            address = self._blocks.allocate(size, stream)
            try:
                return core.Buffer.from_handle(address, size, mr=self, stream=stream)
            except BaseException:
                self._blocks.free(address, size, stream)
                raise

        def deallocate(self, ptr: Any, size: int, *, stream: Any) -> None:
            if not self._blocks.free(int(ptr), size, stream) and int(ptr):
                free_other(self._allocator, int(ptr), stream)

        @property
        def is_device_accessible(self) -> bool:
            return not self._is_pinned or bool(self._allocator.is_pinned)

        @property
        def is_host_accessible(self) -> bool:
            return self._is_pinned or bool(self._allocator.host_accessible)

        @property
        def is_managed(self) -> bool:
            return not self._is_pinned and self._allocator.device.kind == "cuda_managed"

        @property
        def device_id(self) -> int:
            if self._is_pinned:
                raise RuntimeError("pinned memory of the host belongs to no device")
            return self._ordinal

    MemoryResource.__module__, MemoryResource.__qualname__ = PUBLIC, "MemoryResource"
    return MemoryResource
