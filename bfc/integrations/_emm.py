"""numba's External Memory Manager, whichever numba it is for."""

from __future__ import annotations

import ctypes
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.buffers._buffer import Buffer
from bfc.errors import DeviceUnavailableError
from bfc.integrations import cuda_core
from bfc.integrations._shared import Allocators, device_memory, fault_of, is_mapped

#: The per-thread default stream. A fence for it is one on the default stream, since the handle does
#: not say which thread is meant.
PER_THREAD_STREAM = 2


def _let_go(buffer: Buffer, pointers: dict[int, Any] | None = None) -> None:
    """The finaliser of numba's pointer. It drops the reference to the buffer, which frees it
    without raising. After a reset, `pointers` is empty already."""
    if pointers is not None:
        pointers.pop(buffer.ptr, None)


class Manager:
    """Takes device memory from a pool of bfc. Other memory, such as pinned, is numba's own."""

    interface_version = 1
    numba: Any  # its driver module
    find: Callable[[int], Allocator]
    managed: Allocators
    fenced: bool
    context: Any
    allocations: dict[int, Any]
    _pool: Allocator | None = None
    _retire: Callable[[], None] | None = None
    _initialized = False

    def initialize(self) -> None:
        """numba calls this around each of its own calls."""
        if not self._initialized:
            self._initialized = True
            self._stage_here()

    def _stage_here(self) -> None:
        """numba copies a host array that is passed to a kernel through cuda.core, not through its
        memory manager: so cuda.core gets our pool, too."""
        device = getattr(self.context.device, "_dev", None)
        try:
            if device is not None and not cuda_core.is_ours(device):
                self._retire = cuda_core.put(device, self.pool())
        except Exception:
            pass  # no pool for this device, or an old cuda.core: memalloc says what is wrong

    def retire(self) -> None:
        """To be called when the context has got another manager."""
        if self._retire is not None:
            self._retire()

    def pool(self) -> Allocator:
        """The allocator of this context's device."""
        if self._pool is None or self._pool.closed:
            pool = self.find(self.context.device.id)
            if fault := fault_of(pool):
                text = f"{pool.device} was reset or has failed, its memory is lost: {fault}"
                raise DeviceUnavailableError(f"{text}\n  try: bfc.use(a new one, 'numba')")
            self._pool = pool
        return self._pool

    def _take(self, kind: Any, pool: Allocator, nbytes: int, fenced: bool, *known: Any) -> Any:
        buffer = pool.allocate(nbytes, 0)
        if fenced:
            pool.record_stream(buffer, PER_THREAD_STREAM)
        release = functools.partial(_let_go, buffer, *known)
        address = ctypes.c_void_p(buffer.ptr)
        return kind(weakref.proxy(self.context), address, nbytes, finalizer=release)

    def memalloc(self, size: int) -> Any:
        return self._take(self.numba.MemoryPointer, self.pool(), size, self.fenced)

    def memallocmanaged(self, size: int, attach_global: bool) -> Any:
        pool = self.managed.get(self.context.device.id)
        if pool is None or not attach_global:  # our memory is attached to all streams
            return super().memallocmanaged(size, attach_global)  # type: ignore[misc]
        # Always fenced, and waited for: the host may write to it at once.
        memory = self._take(self.numba.ManagedMemory, pool, size, True, self.allocations)
        fence = pool.sub_allocator.fence(pool.stream or 0)
        if fence is not None:
            fence.wait()  # what the memory's last owner has queued there
        self.allocations[memory.device_pointer_value] = memory
        return memory.own()

    def get_memory_info(self) -> Any:
        """What the pool has free and may still take, and its limit."""
        pool = self.pool()
        stats = pool.stats()
        free, total = device_memory(pool)
        more = max(0, min(free, stats.bytes_limit - stats.pool_bytes))
        free = stats.pool_bytes - stats.bytes_in_use + more
        return self.numba.MemoryInfo(free=free, total=min(total, stats.bytes_limit))

    def get_ipc_handle(self, memory: Any) -> Any:
        """A handle of the whole region, and the offset in it."""
        source = self.pool().sub_allocator
        kind = getattr(source, "kind", "device")
        if kind != "device":
            raise NotImplementedError(
                f"the driver shares no memory of kind {kind!r} with other processes: "
                "use bfc.CUDASubAllocator(kind='device')"
            )
        if is_mapped(source, memory.device_pointer_value):
            raise NotImplementedError(
                "the driver gives no IPC handle of memory that is mapped, as that of expandable "
                "segments is: use a pool with expandable_segments:False for what is shared"
            )
        return super().get_ipc_handle(memory)  # type: ignore[misc]


def make_manager(
    numba: Any, find: Callable[[int], Allocator], managed: Allocators, fenced: bool
) -> type:
    """The class for one numba, by its driver module."""
    bases = (Manager, numba.GetIpcHandleMixin, numba.HostOnlyCUDAMemoryManager)
    members = {"numba": numba, "find": staticmethod(find), "managed": managed, "fenced": fenced}
    return types.new_class("BFCMemoryManager", bases, {}, lambda names: names.update(members))
