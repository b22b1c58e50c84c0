"""What the extension asks of Python: queues as streams, marks in them as events, pinned memory, and
where copies and kernels find a device."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

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

Given = ParamSpec("Given")
Answer = TypeVar("Answer")

#: How many queues a device has beside its own. The next stream after these is the first one again,
#: as with CUDA.
STREAMS = 32
#: How long `Stream.query` waits for a marker, where nobody has waited for the queue itself.
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
        #: By stream: the number of its last use, and that which it had when somebody waited for it.
        self._used: dict[int, int] = {}
        self._finished: dict[int, int] = {}
        self._numbers = itertools.count()
        self._shared = {0}  # streams whose queue others may use, which nobody notes

    def queue(self) -> Any:
        """The pyopencl.CommandQueue of this thread's current stream, for work."""
        self.note_work()
        return self.queue_of(self._extension.current_stream(self.index))

    def note_work(self, stream: int | None = None) -> None:
        """A stream, or this thread's current one, gets work: said before it, and again behind it,
        since another thread may wait for the stream in between."""
        if stream is None:
            stream = self._extension.current_stream(self.index)
        self._used[stream] = next(self._numbers)

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
        for stream in list(self._queues):
            self.finish_stream(stream)

    def finish_stream(self, stream: int) -> None:
        """Waits for all work of a stream."""
        used = self._used.get(stream, -1)
        with _opencl.in_words("clFinish"):
            self.queue_of(stream).finish()
        self._finished[stream] = used

    def share(self, stream: int) -> int:
        """The handle of a stream's queue, on which others may queue work from now on."""
        self._shared.add(stream)
        return int(self.queue_of(stream).int_ptr)

    def is_finished(self, stream: int) -> bool:
        """Whether somebody waited for a stream, and it got no work since. False where others may
        have given it some."""
        self.queue_of(stream)
        used = self._used.get(stream, -1)
        return stream not in self._shared and self._finished.get(stream) == used


def _queues_work(
    function: Callable[Concatenate[Runtime, Given], Answer],
) -> Callable[Concatenate[Runtime, Given], Answer]:
    """Notes work of the current streams behind a method of the runtime. Those who queue it have
    noted it before."""

    @functools.wraps(function)
    def call(runtime: Runtime, /, *args: Given.args, **kwargs: Given.kwargs) -> Answer:
        try:
            return function(runtime, *args, **kwargs)
        finally:
            for place in list(runtime._places.values()):
                place.note_work()

    return call


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
        return self.place(device).share(stream)

    def is_idle(self, device: int, stream: int) -> bool:
        """Whether a queue has nothing left to do: it has not where somebody waited for it, and it
        got no work since. Else OpenCL has no such question: a marker is queued, which soon ends
        where nothing is before it. A queue that has just become idle may be said to be busy."""
        if self.place(device).is_finished(stream):
            return True
        mark = self.record(device, stream)
        deadline = time.perf_counter() + PATIENCE_SECONDS
        while not self.is_done(mark):
            if time.perf_counter() > deadline:
                return False
        return True

    def finish_stream(self, device: int, stream: int) -> None:
        self.place(device).finish_stream(stream)

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
            place.note_work(stream)
            _opencl.load().enqueue_barrier(place.queue_of(stream), wait_for=[mark.event])
            place.note_work(stream)

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

    @_queues_work
    def copy(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        copies.copy(to, source, non_blocking, self.place)

    @_queues_work
    def fill(self, out: torch.Tensor, value: float) -> bool:
        return kernels.fill(out, value, self.place(out.device.index))

    @_queues_work
    def binary(
        self, name: str, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float
    ) -> bool:
        return kernels.binary(name, out, a, b, alpha, self.place(out.device.index))

    @_queues_work
    def relu(self, out: torch.Tensor, a: torch.Tensor) -> bool:
        return kernels.relu(out, a, self.place(out.device.index))

    @_queues_work
    def total(self, out: torch.Tensor, a: torch.Tensor, dims: list[int]) -> bool:
        return kernels.total(out, a, dims, self.place(out.device.index))

    @_queues_work
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
