"""The memory resource for cuda.core. Its class is made when it is first asked for, since it derives
from one of cuda.core's."""

from __future__ import annotations

import functools
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.errors import DeviceUnavailableError
from bfc.integrations._shared import Blocks, by_device, client, is_captured

INSTALL = "'cuda-core>=1,<2'"
PUBLIC = "bfc.integrations.cuda_core"


@functools.cache
def resource_class() -> type:
    core: Any = client("cuda.core", INSTALL)
    if int(core.__version__.split(".")[0]) < 1:
        raise DeviceUnavailableError(f"cuda-core {core.__version__}\n  try: pip install {INSTALL}")
    graph_builder: type = client("cuda.core.graph", INSTALL).GraphBuilder

    class MemoryResource(core.MemoryResource):  # type: ignore[misc]
        """A `cuda.core.MemoryResource` over an allocator of one device.

        `allocate(size, *, stream)` gives a `cuda.core.Buffer` for that stream; 0 bytes have the
        address 0. When it is freed, its memory is not reused until the work that is queued on that
        stream, or on the one that was given to `close` or `set_deallocation_stream`, has finished.

        Raises what `Allocator.allocate` does, and TypeError for a graph that is being built outside
        of `Allocator.capture`. Cost: no driver call on the allocator's own stream; on
        another two, and two for the free.
        """

        is_device_accessible = True
        is_ipc_enabled = False  # cuda.core asks before it shares a buffer
        before: Any = None  # what it replaced on a device

        def __init__(self, allocator: Allocator) -> None:
            [(self._ordinal, self._allocator)] = by_device(allocator).items()
            self._blocks = Blocks(self._allocator)

        def allocate(self, size: int, *, stream: Any) -> Any:
            if isinstance(stream, graph_builder) and not is_captured(self._allocator, stream):
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
            self._blocks.free(int(ptr), size, stream)

        @property
        def is_host_accessible(self) -> bool:
            return bool(self._allocator.host_accessible)

        @property
        def is_managed(self) -> bool:
            return self._allocator.device.kind == "cuda_managed"

        @property
        def device_id(self) -> int:
            return self._ordinal

    MemoryResource.__module__, MemoryResource.__qualname__ = PUBLIC, "MemoryResource"
    return MemoryResource
