"""Copies on CUDA devices, by driver calls through cuda-python."""

from __future__ import annotations

import ctypes
import sys
import weakref
from types import TracebackType
from typing import Any, Self

import numpy as np

from bfc.buffers import _scopes
from bfc.buffers._buffer import Buffer
from bfc.copying import kernels
from bfc.copying.launch import launch_by_temporaries, plan
from bfc.copying.layout import MAX_DIMS, Rows, packed_strides, pieces
from bfc.copying.view import View
from bfc.copying.waiting import Waiting
from bfc.drivers.cuda import calls
from bfc.drivers.cuda._device import device_of, is_host_memory
from bfc.drivers.cuda._driver import driver_error
from bfc.drivers.cuda.calls import (
    CAPTURING,
    PER_THREAD,
    TYPE_HOST,
    TYPE_UNIFIED,
    DeviceCalls,
    belongs,
    call,
    context_of,
    device,
    driver,
    is_drivers,
    is_mapped,
    peer_access,
)
from bfc.drivers.cuda.nvrtc import compiled
from bfc.errors import (
    DriverError,
    OutOfMemoryError,
)
from bfc.interpreter._process import ForkSafeLock
from bfc.streams import is_queue, stream_handle

OUT_OF_MEMORY, NOT_READY = 2, 600
#: Numbers of CUdevice_attribute.
MAX_PITCH, MULTIPROCESSORS, MAJOR, MINOR, PAGEABLE_ACCESS, MEMORY_POOLS = 11, 16, 75, 76, 88, 115
NO_TIMING = 2  # cuEventCreate
THREADS, BLOCKS_EACH = 256, 32


def chosen_stream(stream: Any) -> int | None:
    """The handle of the stream that the user passed to this copy or to `bfc.use_stream`. None if
    there is neither, or if the latter is an OpenCL queue."""
    if stream is None:
        stream = _scopes.current_stream()
        if stream is None or is_queue(stream):
            return None
    if is_queue(stream):
        raise TypeError("a copy on CUDA takes a CUDA stream, not a pyopencl.CommandQueue")
    return stream_handle(stream) or 1


def reaches(source: View, to: View) -> bool:
    """Whether the source's device may write the destination's memory. Peer access does not cover
    memory that belongs to no context."""
    return peer_access(source.ordinal, to.ordinal) and not is_mapped(to.address)


def forget() -> None:
    """Forgets all cached facts about the devices, for use after they were reset."""
    calls.forget()
    _libraries.clear()
    _waiting.forget()


# -- streams ---------------------------------------------------------------------------------------


def stream_for(view: View, stream: Any) -> CUDACopyStream:
    there = device(view.ordinal)
    handle = chosen_stream(stream)
    if handle != view.stream and not belongs(handle, there):
        refuse_named(stream, handle)
        handle = None
    return CUDACopyStream(there, handle or view.stream or 1, alone=True)


def streams_between(source: View, to: View, stream: Any) -> tuple[CUDACopyStream, CUDACopyStream]:
    """Streams of the source's device and of the destination's. If `stream` belongs to the second,
    the first uses its default stream."""
    here, there = device(source.ordinal), device(to.ordinal)
    handle = chosen_stream(stream)
    if not belongs(handle, here):
        if belongs(handle, there):
            return CUDACopyStream(here, source.stream or 1), CUDACopyStream(there, int(handle or 0))
        refuse_named(stream, handle)
        handle = None
    return CUDACopyStream(here, handle or source.stream or 1), CUDACopyStream(there, to.stream or 1)


def refuse_named(stream: Any, handle: int | None) -> None:
    """Raises ValueError if the caller of the copy passed `stream`, whose device is not part of the
    copy. A stream from `bfc.use_stream` is meant for all copies, and is ignored in this one."""
    if stream is not None:
        raise ValueError(
            f"the stream {handle:#x} belongs to no device whose memory is copied here: "
            "name a stream of that device, or none"
        )


def stream_named(stream: int, ordinal: int) -> CUDACopyStream:
    """A stream that pinned memory names. It may belong to any device. A default stream is the one
    of the device on which the memory was made."""
    if stream <= PER_THREAD:
        return CUDACopyStream(device(ordinal), stream)
    return CUDACopyStream(device(device_of(context_of(stream))), stream)


def wait_on_host(view: View) -> None:
    """Waits for the stream that pinned memory names, before the host itself reads or writes the
    memory, as `__cuda_array_interface__` requires."""
    if view.kind != "cuda_host" or view.stream is None or view.buffer is not None:
        return
    stream = stream_named(view.stream, view.ordinal)
    if stream.is_capturing():
        hint = "the host cannot wait for the stream that this memory names while it is captured"
        raise driver_error("bfc.copy", CAPTURING, hint)
    stream.synchronize()


class CUDACopyStream:
    """A stream of a CUDA device. At the end of its `with` block it releases the buffers that it
    holds, and their allocators record that the stream used them. Every call is made with the
    device's primary context current, and leaves the caller's current afterwards."""

    __slots__ = (
        "_call", "_capturing", "_followers", "_mode", "alone", "device", "handle", "held",
    )  # fmt: skip

    def __init__(self, device: DeviceCalls, handle: int, *, alone: bool = False) -> None:
        self.device = device
        self.handle = handle
        self.held: list[object] = []
        #: Whether it is the only stream of a copy. Its context may then stay current throughout.
        self.alone = alone
        self._mode: Any = None
        self._call = call if alone else device.call
        self._capturing: bool | None = None
        self._followers: dict[int, CUDACopyStream] = {}

    def __enter__(self) -> Self:
        if self.alone:
            self._mode = self.device.context.push()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.held.clear()
        if self.alone:
            self.device.context.pop(self._mode)

    # -- what comes before -------------------------------------------------------------------------

    def is_capturing(self) -> bool:
        if self._capturing is None:
            self._capturing = bool(self._call("cuStreamIsCapturing", self.handle))
        return self._capturing

    def refuse_capture(self) -> None:
        if self.is_capturing():
            hint = "a graph cannot capture what the host does to cast, or to close gaps"
            raise driver_error("bfc.copy", CAPTURING, hint)

    def refuse_capture_of(self, host: int, non_blocking: bool) -> None:
        """Raises an error while a graph is captured: the graph would read the host's memory each
        time it runs, and the copy could not be waited for."""
        if not self.is_capturing():
            return
        if not non_blocking:
            hint = "a copy that waits cannot be captured: pass non_blocking=True"
        elif not is_host_memory(host):
            hint = "only pinned memory takes part in a capture: bfc.PinnedAllocator has it"
        else:
            return
        raise driver_error("bfc.copy", CAPTURING, hint)

    def wait_for_users(self, *views: View) -> None:
        """Waits for the streams on which the views' memory was last used. Raises ClosedError if a
        buffer was freed."""
        for view in views:
            if view.buffer is not None:
                self.held.append(self._hold(view.buffer))
            elif view.stream is not None and view.stream != self.handle:
                self.wait_for(CUDACopyStream(self.device, view.stream))

    def _hold(self, buffer: Buffer) -> object:
        """A capsule for this stream: the stream waits for the buffer's own, and when the capsule is
        dropped the buffer's allocator learns that the stream has used the buffer."""
        stream = -1 if self.is_capturing() else self.handle
        return buffer.__dlpack__(stream=stream, max_version=(1, 0))

    def wait_for_named(self, host: View) -> None:
        """Waits for the stream that pinned memory names, if it names one."""
        if host.kind != "cuda_host" or host.stream is None:
            return
        there = stream_named(host.stream, host.ordinal)
        if (there.device, there.handle) != (self.device, self.handle):
            self.wait_for(there)

    def wait_for_users_of_pinned(self, host: View) -> None:
        """Like `wait_for_users`, for pinned memory. If it belongs to a buffer of bfc, this holds
        the buffer, and waits for the buffer's stream."""
        buffer = host.buffer or _buffer_under(host.array)
        shown = ("cuda_host", "cuda_managed")  # an array may lie in managed memory, too
        if buffer is None or not buffer.nbytes or buffer.device.kind not in shown:
            self.wait_for_named(host)
            return
        there = self._on_device(buffer.device.ordinal)
        self.held.append(there._hold(buffer))
        if there is not self:
            self.wait_for(there)

    def note_use_of_pinned(self, host: View) -> None:
        """Tells the allocator of a pinned block that the stream uses the block. The stream may be
        destroyed before the block is freed, so an event is recorded on it now: for a buffer by the
        capsule that is held, for an address here. While a graph is captured an event cannot be
        queried, so only the stream is noted, and the event is recorded when the block is freed."""
        pinned = sys.modules.get("bfc.pinned")  # if it is not imported, none of its blocks exist
        found = pinned.find(host.address) if pinned is not None else None
        there = self
        if found is not None and found[0].is_pinned:
            there = self._on_device(found[0].device.ordinal)
        for follower in self._followers.values():
            follower.wait_for(self)
        if found is None:
            return
        allocator, block = found
        if self.is_capturing():
            allocator.record_event(host.address, block, there.handle)
        elif not (host.buffer or _buffer_under(host.array)):
            allocator.mark_event(block, there.handle)

    def _on_device(self, ordinal: int) -> CUDACopyStream:
        """This stream; or, for an allocator that knows only streams of another device, a stream of
        that device, which is made to wait for this one when the copy is queued."""
        if ordinal == self.device.ordinal or self.is_capturing():
            return self
        if ordinal not in self._followers:
            there = device(ordinal)
            self._followers[ordinal] = CUDACopyStream(there, there.follower())
        return self._followers[ordinal]

    def wait_for(self, other: CUDACopyStream) -> None:
        if self.is_capturing() != other.is_capturing():
            hint = (
                "a graph cannot wait for a stream that is not captured with it, nor the other way "
                "round: this memory is used on both"
            )
            raise driver_error("bfc.copy", CAPTURING, hint)
        event = other._record()
        try:
            self._call("cuStreamWaitEvent", self.handle, event, 0)
        finally:
            call("cuEventDestroy", event)

    def _record(self) -> Any:
        event = self._call("cuEventCreate", NO_TIMING)
        try:
            self._call("cuEventRecord", event, self.handle)
        except DriverError:
            call("cuEventDestroy", event)
            raise
        return event

    # -- what comes after --------------------------------------------------------------------------

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self.handle)

    def keep(self, host: View) -> None:
        """Keeps the host's memory until the copy is done, if nobody else does. That is not needed
        for pageable memory, which the driver has read when its call returns (unless the device
        reads it in place), nor for bfc's pinned memory, whose allocator knows the stream. It is
        needed for pinned memory of other libraries, such as numba and CuPy."""
        if host.buffer is not None or self.is_capturing():
            return
        in_place = host.kind == "cuda_host" or self.device.attribute(PAGEABLE_ACCESS)
        if not in_place and (_buffer_under(host.array) or not is_drivers(host.address)):
            return
        _waiting.keep(_Event(self._record()), host)

    # -- memory ------------------------------------------------------------------------------------

    def temporary(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> View:
        if not self.device.attribute(MEMORY_POOLS) and self.is_capturing():
            hint = (
                "the graph would use a temporary buffer that is freed before the graph runs: "
                "copy without a cast or gaps"
            )
            raise driver_error("bfc.copy", CAPTURING, hint)
        strides = packed_strides(shape, dtype.itemsize)
        view = View("cuda", self.device.ordinal, 0, dtype, shape, strides)
        try:
            if self.device.attribute(MEMORY_POOLS):
                address = self._call("cuMemAllocAsync", view.nbytes, self.handle)
            else:
                address = self._call("cuMemAlloc", view.nbytes)
        except DriverError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            free, total = self._call("cuMemGetInfo")
            raise OutOfMemoryError(
                view.nbytes, total - free, total, total, free,
                refused=f"device {self.device.ordinal}, for a temporary of bfc.copy",
                advice=("copying in pieces, or between sides of one dtype without gaps",),
            ) from error  # fmt: skip
        view.address = int(address)
        return view

    def release(self, view: View) -> None:
        if self.device.attribute(MEMORY_POOLS):
            self._call("cuMemFreeAsync", view.address, self.handle)
        else:
            self._call("cuMemFree", view.address)

    # -- copies ------------------------------------------------------------------------------------

    def move(self, to: View, source: View) -> None:
        self._call("cuMemcpyAsync", to.address, source.address, to.nbytes, self.handle)

    def move_between(self, to: View, source: View, peers: bool, there: CUDACopyStream) -> None:
        """To another device. Memory that is mapped without access for both needs the peer copy."""
        if peers or not (is_mapped(to.address) or is_mapped(source.address)):
            self.move(to, source)
        else:
            self._call(
                "cuMemcpyPeerAsync", to.address, there.device.context.handle, source.address,
                self.device.context.handle, to.nbytes, self.handle,
            )  # fmt: skip

    def move_rows(self, to: View, source: View, rows: Rows) -> bool:
        limit = self.device.attribute(MAX_PITCH) or 2**31 - 1
        if max(rows.to_pitch, rows.source_pitch) > limit:
            return False
        cu = driver()
        flat = rows.depth == 1
        what = cu.CUDA_MEMCPY2D() if flat else cu.CUDA_MEMCPY3D()
        _name_side(what, "src", source, rows.source_pitch)
        _name_side(what, "dst", to, rows.to_pitch)
        what.WidthInBytes, what.Height = rows.width, rows.height
        if not flat:
            what.Depth = rows.depth
            what.srcHeight = rows.source_slice // rows.source_pitch
            what.dstHeight = rows.to_slice // rows.to_pitch
        self._call("cuMemcpy2DAsync" if flat else "cuMemcpy3DAsync", what, self.handle)
        return True

    # -- kernels -----------------------------------------------------------------------------------

    def prepare(self, to: np.dtype[Any], source: np.dtype[Any]) -> bool:
        codes = kernels.code_of(source), kernels.code_of(to)
        if codes[0] is None or codes[1] is None:
            return False
        self._function(codes[0], codes[1])
        return True

    def _function(self, source: str, to: str) -> Any:
        arch = self.device.attribute(MAJOR) * 10 + self.device.attribute(MINOR)
        kernel = library_of(arch, source, to)
        return self._call("cuKernelGetFunction", kernel)

    def launch(self, to: View, source: View, change: int) -> None:
        asked = plan(to, source, change)
        if asked is None:
            launch_by_temporaries(self, to, source, change)
            return
        codes, way = asked
        function = self._function(*codes)
        most = BLOCKS_EACH * max(self.device.attribute(MULTIPROCESSORS), 1)
        for piece in pieces(way):
            arguments = _Arguments(to.address, source.address, piece, change)
            blocks = min(-(-piece.items // THREADS), most)
            self._call(
                "cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, self.handle,
                arguments.pointers, 0,
            )  # fmt: skip


class _Event:
    """An event of its own, destroyed with this object."""

    def __init__(self, event: Any) -> None:
        self.event = event
        weakref.finalize(self, _destroy, event).atexit = False


def _destroy(event: Any) -> None:
    driver().cuEventDestroy(event)


def _is_done(event: Any) -> bool:
    error = int(driver().cuEventQuery(event.event)[0])
    return error != NOT_READY  # an event that has failed need not be kept either


#: The host's memory in transfers that nobody has waited for yet.
_waiting = Waiting(_is_done)


def _buffer_under(array: np.ndarray[Any, Any] | None) -> Buffer | None:
    """The `bfc.Buffer` whose memory an array uses, or None."""
    under: Any = array
    while isinstance(under, np.ndarray):
        under = under.base
    if isinstance(under, memoryview):
        under = under.obj
    while hasattr(under, "base") and isinstance(under, Buffer):
        under = under.base
    return under if isinstance(under, Buffer) else None


def _name_side(what: Any, side: str, view: View, pitch: int) -> None:
    memory = driver().CUmemorytype(TYPE_HOST if view.on_host else TYPE_UNIFIED)
    setattr(what, f"{side}MemoryType", memory)
    setattr(what, f"{side}Host" if view.on_host else f"{side}Device", view.address)
    setattr(what, f"{side}Pitch", pitch)


class _Layout(ctypes.Structure):
    _fields_ = (
        ("to", ctypes.c_int64 * MAX_DIMS),
        ("source", ctypes.c_int64 * MAX_DIMS),
        ("shape", ctypes.c_uint32 * MAX_DIMS),
    )


class _Arguments:
    """A launch's arguments, and the array of pointers to them."""

    def __init__(self, to: int, source: int, piece: Any, change: int) -> None:
        layout = _Layout()
        for index, dim in enumerate(piece.dims):
            layout.shape[index], layout.to[index] = dim.steps, dim.to
            layout.source[index] = dim.source
        self.values = (
            ctypes.c_uint64(to),
            ctypes.c_int64(piece.to),
            ctypes.c_uint64(source),
            ctypes.c_int64(piece.source),
            layout,
            ctypes.c_uint32(piece.items),
            ctypes.c_int32(len(piece.dims)),
            ctypes.c_int32(change),
        )
        self._array = (ctypes.c_void_p * len(self.values))(
            *(ctypes.addressof(value) for value in self.values)
        )
        self.pointers = ctypes.addressof(self._array)


# -- NVRTC -----------------------------------------------------------------------------------------

#: By architecture and dtypes; a library is loaded into every context that launches from it.
_libraries: dict[tuple[int, str, str], tuple[Any, Any]] = {}
_libraries_lock = ForkSafeLock()  # a finaliser may copy while NVRTC compiles


def library_of(arch: int, source: str, to: str) -> Any:
    """The kernel of a pair of dtypes, compiled when first asked for. Raises
    DeviceUnavailableError."""
    key = arch, source, to
    with _libraries_lock:
        if key not in _libraries:
            image = compiled(kernels.text_of([(source, to)]), arch)
            library = call("cuLibraryLoadData", image, [], [], 0, [], [], 0)
            name = kernels.kernel_name(source, to).encode()
            _libraries[key] = library, call("cuLibraryGetKernel", library, name)
        return _libraries[key][1]
