"""What the integrations have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from bfc.allocators._allocator import Allocator
from bfc.allocators._captured import captured_streams
from bfc.buffers._buffer import Buffer
from bfc.errors import ClosedError, DeviceUnavailableError, DriverError
from bfc.libraries import client as client
from bfc.pinned import PinnedAllocator
from bfc.streams import StreamLike, stream_handle
from bfc.suballocators.base import checked_memory_info

Allocators = dict[int, Allocator]  # one for each device, by ordinal
OneOrMore = Allocator | Iterable[Allocator] | Mapping[int, Allocator]  # as users pass them

CUDA_KINDS = ("cuda", "cuda_managed")


def by_device(allocators: OneOrMore) -> Allocators:
    """Sorts allocators by their device.

    Raises TypeError if one is not an allocator; ValueError if its memory is not that of a CUDA
    device, if two are for one device, or if an ordinal is wrong; ClosedError if one is closed.
    """
    named = dict(allocators) if isinstance(allocators, Mapping) else {}
    given = allocators if isinstance(allocators, Iterable) else [allocators]
    found: Allocators = {}
    for allocator in named.values() or given:
        if not isinstance(allocator, Allocator):
            raise TypeError(f"expected an allocator, not {type(allocator).__name__}")
        kind, ordinal = allocator.device
        if kind not in CUDA_KINDS:
            raise ValueError(
                f"other libraries need memory of a CUDA device, and this allocator's is on "
                f"{allocator.device}: make it over bfc.CUDASubAllocator()"
            )
        if allocator.closed:
            raise ClosedError(f"the allocator for {allocator.device} is closed")
        if ordinal in found:
            raise ValueError(f"two allocators for device {ordinal}: a device can have one")
        found[ordinal] = allocator
    if not found:
        raise ValueError("no allocator was given; None puts everything back")
    if named and named != found:
        raise ValueError(f"{sorted(named)} are not the devices of the allocators: {sorted(found)}")
    return found


def no_allocator(allocators: Allocators, device: int) -> NoReturn:
    """Raises the error for a request on a device that has no allocator."""
    known = ", ".join(str(allocator.device) for allocator in allocators.values())
    raise DeviceUnavailableError(
        f"no bfc allocator for device {device}, which is the current one: there is one for {known}."
        f"\n  try: bfc.use([..., an allocator over bfc.CUDASubAllocator({device})], ...)"
    )


def require_runtime(library: str, ask: Callable[[], object], allocators: Allocators) -> None:
    """Calls a function that asks the CUDA runtime, as all arrays of a library do.

    Raises DeviceUnavailableError where it fails, so that `bfc.use` does not seem to work there.
    """
    try:
        ask()
    except Exception as error:
        names = [str(getattr(it.sub_allocator, "name", "")) for it in allocators.values()]
        hint = f"update the NVIDIA driver, or install the {library} for its version of CUDA"
        if any(name.startswith("Emulated GPU") for name in names):
            hint = 'a GPU; or "numba" or "cuda_core", whose arrays work on the emulated driver'
        raise DeviceUnavailableError(
            f"{library} cannot run here: the CUDA runtime that it uses refuses the driver "
            f"({error})\n  try: {hint}"
        ) from error


def device_memory(pool: Allocator) -> tuple[int, int]:
    """(free, total) bytes of an allocator's device. One driver call."""
    return checked_memory_info(pool.sub_allocator.memory_info(), pool.sub_allocator)


def is_mapped(source: Any, address: int) -> bool:
    """Whether an address lies in addresses that a sub-allocator has reserved to map memory."""
    pages = getattr(source, "_own_pages", None)
    return pages is not None and pages.holds(address)


def fault_of(pool: Allocator) -> DriverError | None:
    """The driver's error if the device was reset or has failed. One driver call."""
    try:
        device_memory(pool)
    except DriverError as error:
        return error
    return None


def is_captured(allocator: Allocator, stream: object) -> bool:
    """Whether the allocator has been told of the capture that this stream belongs to."""
    streams = captured_streams(allocator)
    if not streams:
        return False
    capture_id = allocator.sub_allocator.capture_id
    mine = capture_id(stream_handle(stream))
    return mine != 0 and any(capture_id(other) == mine for other in streams)


def refuse_unknown_capture(allocator: Allocator, stream: int) -> None:
    """Raises RuntimeError if a stream captures a graph that the allocator was not told of.

    A temporary array of the capture would be freed at its end, and its memory go to others, while
    each launch of the graph still writes there. One driver call; none for the default stream.
    """
    if allocator.sub_allocator.capture_id(stream) and not is_captured(allocator, stream):
        raise RuntimeError(
            f"stream {stream:#x} captures a CUDA graph, which uses its memory at each launch, and "
            "others would get that memory once it is freed here\n  try: `with "
            "allocator.capture(stream) as graph_pool:` around the capture; or allocate before it"
        )


class Blocks:
    """Allocations by address, for libraries that also name a stream when they free.

    Such a library promises that all use comes before the free in the order of that stream. The
    stream of the allocation may not exist any more by then, so it is not recorded. Instead the
    block comes from the allocator's own stream, and the stream of the allocation is made to wait
    for that (two driver calls, unless it is the same stream). In a capture, where no stream may
    wait for one outside, it comes from the graph's pool, for the stream itself.
    """

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.live: dict[int, Buffer] = {}

    def allocate(self, nbytes: int, stream: StreamLike) -> int:
        """The address; 0 for 0 bytes. Errors as `Allocator.allocate`."""
        captured = is_captured(self.allocator, stream)
        buffer = self.allocator.allocate(nbytes, stream if captured else None)
        if not buffer.nbytes:
            return 0
        source, home = self.allocator.sub_allocator, self.allocator.stream or 0
        handle = stream_handle(stream)
        if handle == source.default_stream_alias:
            handle = 0
        if source.asynchronous and handle != home and not captured:
            source.order(home, handle)
        self.live[buffer.ptr] = buffer
        return buffer.ptr

    def free(self, ptr: int, nbytes: int, stream: StreamLike) -> bool:
        """Frees a block. Raises nothing, since C++ calls it: the buffer is freed as if collected.
        Does nothing if the address is not ours, or the allocator is closed. Returns whether the
        address came from `allocate`."""
        return let_go(self.live, self.allocator, ptr, stream)


def let_go(
    live: dict[int, Buffer], allocator: Allocator | PinnedAllocator, ptr: int, stream: StreamLike
) -> bool:
    """Drops the buffer of an address, in the order of a stream; see `Blocks.free`."""
    buffer = live.pop(ptr, None)
    if buffer is None:
        return False
    try:
        allocator.record_stream(buffer, stream)
    except ClosedError:
        pass  # the allocator is closed
    return True
