"""What the extension asks of Python: queues as streams, marks in them as events, pinned memory, and
where copies and kernels find a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bfc.drivers.opencl import platform as _opencl
from bfc.errors import OutOfMemoryError
from bfc.integrations._torch_table import Table
from bfc.interpreter._process import ForkSafeLock
from bfc.pinned import PinnedAllocator, find
from bfc.suballocators.host import HostSubAllocator
from bfc_torch_opencl import copies, kernels

if TYPE_CHECKING:
    from types import ModuleType

    import torch

    from bfc.allocators._allocator import Allocator
    from bfc.policies.device_allocator import DeviceAllocator
    from bfc.suballocators.opencl import OpenCLSubAllocator

#: How many queues a device has beside its own. The next stream after these is the first one again,
#: as with CUDA.
STREAMS = 32
#: How long `Stream.query` waits for a marker on a queue that may be idle.
PATIENCE_SECONDS = 2e-3


@dataclass(slots=True, frozen=True)
class Mark:
    """A place in a queue: what an event has recorded."""

    device: int
    event: Any  # whose queue notes times


class DevicePlace:
    """One device: its pool, and its queues by the handles that PyTorch has as ids of streams."""

    def __init__(self, index: int, pool: Allocator, table: Table, extension: ModuleType) -> None:
        source: Any = pool.sub_allocator
        self.index = index
        self.pool = pool
        self.source: OpenCLSubAllocator = source
        self._table = table
        self._extension = extension
        self._queues: dict[int, Any] = {0: self.source.queue}
        self._made: list[int] = []
        self._given = 0
        self._lock = ForkSafeLock()

    def queue(self) -> Any:
        """The pyopencl.CommandQueue of this thread's current stream."""
        return self.queue_of(self._extension.current_stream(self.index))

    def queue_of(self, stream: int) -> Any:
        """The pyopencl.CommandQueue of a stream, by its id. Raises ValueError if the id is not one
        of its streams."""
        found = self._queues.get(stream)
        if found is None:
            raise ValueError(
                f"{stream} is not a stream of opencl:{self.index}: make one with "
                f'torch.Stream("opencl")'
            )
        return found

    def new_stream(self) -> int:
        """The id of the next stream in turn."""
        with self._lock:
            if len(self._made) < STREAMS:
                self._made.append(self._make_queue())
            self._given += 1
            return self._made[(self._given - 1) % STREAMS]

    def _make_queue(self) -> int:
        cl = _opencl.load()
        with _opencl.in_words("clCreateCommandQueue"):
            timed = cl.command_queue_properties.PROFILING_ENABLE
            queue = cl.CommandQueue(self.source.context, self.source.cl_device, timed)
        handle = int(queue.int_ptr)
        self._queues[handle] = queue
        self._table.note_ordered(self.index, handle)
        return handle

    def finish(self) -> None:
        """Waits for all work of all streams."""
        with _opencl.in_words("clFinish"):
            for queue in list(self._queues.values()):
                queue.finish()


class Runtime:
    """The devices of PyTorch's back end "opencl".

    Parameters
    ----------
    memory : bfc.opencl.DeviceAllocator
        Makes the pools, each when its device is first used.
    extension : module
        The compiled extension.
    """

    def __init__(self, memory: DeviceAllocator, extension: ModuleType) -> None:
        self._extension = extension
        self.table = Table(memory.allocator, memory.device_count())
        self._memory = memory
        self._places: dict[int, DevicePlace] = {}
        self._pinned: PinnedAllocator | None = None
        #: A method of the pool: a Ctrl-C comes before it or behind it, but not in it.
        self.free_pinned: Callable[[int], None]
        self._lock = ForkSafeLock()

    def place(self, device: int) -> DevicePlace:
        """The device of a number."""
        found = self._places.get(device)
        if found is None:
            with self._lock:
                if device not in self._places:
                    pool = self._memory.allocator(device)
                    self._places[device] = DevicePlace(device, pool, self.table, self._extension)
                found = self._places[device]
        return found

    # -- streams -----------------------------------------------------------------------------------

    def new_stream(self, device: int) -> int:
        return self.place(device).new_stream()

    def handle_of(self, device: int, stream: int) -> int:
        return int(self.place(device).queue_of(stream).int_ptr)

    def is_idle(self, device: int, stream: int) -> bool:
        """Whether a queue has nothing left to do. OpenCL has no such question: a marker is queued,
        which ends at once where nothing is before it."""
        mark = self.record(device, stream)
        deadline = time.perf_counter() + PATIENCE_SECONDS
        while not self.is_done(mark):
            if time.perf_counter() > deadline:
                return False
        return True

    def finish_stream(self, device: int, stream: int) -> None:
        with _opencl.in_words("clFinish"):
            self.place(device).queue_of(stream).finish()

    def finish(self, device: int) -> None:
        self.place(device).finish()

    # -- events ------------------------------------------------------------------------------------

    def record(self, device: int, stream: int) -> Mark:
        queue = self.place(device).queue_of(stream)
        with _opencl.in_words("clEnqueueMarker"):
            event = _opencl.load().enqueue_marker(queue)
            queue.flush()  # a command that is not submitted never finishes
            return Mark(device, event)

    def block(self, mark: Mark, device: int, stream: int) -> None:
        """Lets a stream wait for a mark. Where that is of another device, the host waits."""
        place = self.place(device)
        if self.place(mark.device).source.context != place.source.context:
            self.wait(mark)
            return
        with _opencl.in_words("clEnqueueBarrierWithWaitList"):
            queue = place.queue_of(stream)
            _opencl.load().enqueue_barrier(queue, wait_for=[mark.event])

    def is_done(self, mark: Mark) -> bool:
        cl = _opencl.load()
        with _opencl.in_words("clGetEventInfo"):
            return bool(mark.event.command_execution_status <= cl.command_execution_status.COMPLETE)

    def wait(self, mark: Mark) -> None:
        with _opencl.in_words("clWaitForEvents"):
            mark.event.wait()

    def elapsed(self, first: Mark, second: Mark) -> float:
        """The milliseconds between two marks of one device."""
        if first.device != second.device:
            raise ValueError(
                f"the events were recorded on opencl:{first.device} and opencl:{second.device}, "
                f"whose clocks differ"
            )
        with _opencl.in_words("clGetEventProfilingInfo"):
            return float(second.event.profile.end - first.event.profile.end) * 1e-6

    # -- copies and kernels ------------------------------------------------------------------------

    def copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        copies.copy(to, source, non_blocking, self.place)

    def fill(self, out: torch.Tensor, value: float) -> bool:
        return kernels.fill(out, value, self.place(out.device.index))

    def binary(
        self, name: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float
    ) -> bool:
        return kernels.binary(name, out, a, b, alpha, self.place(out.device.index))

    def relu(self, out: torch.Tensor, a: torch.Tensor) -> bool:
        return kernels.relu(out, a, self.place(out.device.index))

    def total(self, out: torch.Tensor, a: torch.Tensor, dims: list[int]) -> bool:
        return kernels.total(out, a, dims, self.place(out.device.index))

    def mm(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> bool:
        return kernels.mm(out, a, b, self.place(out.device.index))

    # -- pinned memory -----------------------------------------------------------------------------

    def pinned(self) -> PinnedAllocator:
        """The pool of pinned memory. OpenCL pins nothing: this is ordinary memory of the host. It
        is reused only when copies that were not waited for have finished."""
        with self._lock:
            if self._pinned is None:
                self._pinned = PinnedAllocator(HostSubAllocator())
                self.free_pinned = self._pinned.deallocate_raw
            return self._pinned

    def allocate_pinned(self, nbytes: int) -> int:
        import torch

        try:
            return self.pinned().allocate_raw(nbytes)
        except OutOfMemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from error

    def is_pinned(self, address: int) -> bool:
        return self._pinned is not None and find(address) is not None
