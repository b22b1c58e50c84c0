"""The copies of CUDA devices, by the driver's calls through cuda-python."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from types import TracebackType
from typing import Any, Self

import numpy as np

from bfc.buffers import _current
from bfc.buffers._buffer import Buffer
from bfc.copying import kernels
from bfc.copying.launch import launch_by_temporaries, plan
from bfc.copying.layout import MAX_DIMS, Rows, packed_strides, pieces
from bfc.copying.views import View
from bfc.copying.waiting import Waiting
from bfc.drivers.cuda import _driver
from bfc.errors import (
    DeviceUnavailableError,
    DriverError,
    InvalidPointerError,
    OutOfMemoryError,
)
from bfc.interpreter._forks import ForkSafeLock
from bfc.streams import is_queue, stream_handle

OUT_OF_MEMORY, INVALID_CONTEXT, DESTROYED, ALREADY_ENABLED = 2, 201, 709, 704
CAPTURING = 900
#: Numbers of CUdevice_attribute.
MAX_PITCH, MULTIPROCESSORS, MAJOR, MINOR, PAGEABLE_ACCESS, MEMORY_POOLS = 11, 16, 75, 76, 88, 115
#: Of CUpointer_attribute.
CONTEXT, MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL = 1, 2, 8, 9
TYPE_HOST, TYPE_UNIFIED = 1, 4
PER_THREAD = 2  # the last of the handles that name a default stream
NO_TIMING = 2  # cuEventCreate
NON_BLOCKING = 1  # cuStreamCreate
RELAXED = 2  # CUstreamCaptureMode
NOT_READY = 600
THREADS, BLOCKS_EACH = 256, 32

_cu: Any = None


def driver() -> Any:
    """cuda-python's module of the driver's calls. Raises DeviceUnavailableError."""
    global _cu
    if _cu is None:
        _driver.load()
        from cuda.bindings import driver as module

        _cu = module
    return _cu


def call(name: str, *arguments: Any) -> Any:
    """What a call gives besides its success. Raises DriverError."""
    results = getattr(_cu or driver(), name)(*arguments)
    if results[0]:
        raise failure(name, int(results[0]))
    return results[1] if len(results) == 2 else results[1:]


def failure(name: str, code: int, hint: str = "") -> DriverError:
    cu = driver()
    named, text = (
        function(cu.CUresult(code))[1] for function in (cu.cuGetErrorName, cu.cuGetErrorString)
    )
    if not hint and code < CAPTURING:  # of captures those hints say when to allocate
        hint = _driver.hint_for(code)
    return DriverError(name, code, (named or b"").decode(), (text or b"").decode(), hint)


def chosen_stream(stream: Any) -> int | None:
    """The handle that a user named, for this copy or by `bfc.use_stream`; None where neither, or
    where the latter is a queue of OpenCL's."""
    if stream is None:
        stream = _current.current_stream()
        if stream is None or is_queue(stream):
            return None
    if is_queue(stream):
        raise TypeError("a stream is one of CUDA's here, not a pyopencl.CommandQueue")
    return stream_handle(stream) or 1


# -- addresses and devices -------------------------------------------------------------------------


def _attributes(address: int, *numbers: int) -> Any:
    return call("cuPointerGetAttributes", len(numbers), _named(numbers), address)


@functools.cache
def _named(numbers: tuple[int, ...]) -> list[Any]:
    return [driver().CUpointer_attribute(number) for number in numbers]


def kind_and_ordinal(address: int) -> tuple[str, int]:
    """Of memory that is known by its address alone. Raises InvalidPointerError for what the driver
    does not know: it was freed, or belongs to another process."""
    context, kind, managed, ordinal = _attributes(
        address, CONTEXT, MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL
    )
    if not int(kind):
        raise InvalidPointerError(
            f"{address:#x} is no memory that the CUDA driver knows: it was freed, or never was"
        )
    ordinal = int(ordinal)
    if managed:
        return "cuda_managed", max(ordinal, 0)
    if int(kind) == TYPE_HOST:
        return "cuda_host", max(ordinal, 0)
    if int(context) and int(context) != int(device(ordinal).context()):
        raise InvalidPointerError(
            f"{address:#x} belongs to another context than the primary one of device {ordinal}, "
            "which bfc works in"
        )
    return "cuda", ordinal


def is_pinned(address: int) -> bool:
    """Whether the driver knows this as host memory of its own."""
    return int(_attributes(address, MEMORY_TYPE, IS_MANAGED)[0]) == TYPE_HOST


def _is_drivers(address: int) -> bool:
    """Whether memory is the driver's, pinned or managed, which it uses where it is."""
    return bool(int(_attributes(address, MEMORY_TYPE, IS_MANAGED)[0]))


def _is_mapped(address: int) -> bool:
    """Whether memory belongs to no context: mapped piece by piece, or of a pool."""
    return not int(_attributes(address, CONTEXT, MEMORY_TYPE)[0])


@functools.cache
def _relaxed() -> Any:
    return driver().CUstreamCaptureMode(RELAXED)


class Device:
    """What is asked of a device once."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.handle = call("cuDeviceGet", ordinal)
        self._retained: Any = None
        self._follower: int | None = None
        self._context_id: int | None = None
        self._known: dict[int, int] = {}

    def context(self) -> Any:
        if self._retained is None:
            self._retained = call("cuDevicePrimaryCtxRetain", self.handle)
        return self._retained

    def enter(self) -> Any:
        """Makes the context current, in the relaxed capture mode: a graph that another thread
        captures must not mind. Returns what `leave` takes."""
        try:
            call("cuCtxPushCurrent", self.context())
        except DriverError as error:
            if error.code not in (INVALID_CONTEXT, DESTROYED):
                raise
            self._retained = None  # another library has reset it
            call("cuCtxPushCurrent", self.context())
        try:
            return call("cuThreadExchangeStreamCaptureMode", _relaxed())
        except BaseException:
            call("cuCtxPopCurrent")
            raise

    def leave(self, mode: Any) -> None:
        try:
            call("cuThreadExchangeStreamCaptureMode", mode)
        finally:
            call("cuCtxPopCurrent")

    def call(self, name: str, *arguments: Any) -> Any:
        """`call`, with the context current for it alone."""
        mode = self.enter()
        try:
            return call(name, *arguments)
        finally:
            self.leave(mode)

    def notice_reset(self) -> None:
        """Forgets what has gone with the context, where another library has reset the device."""
        try:
            found = call("cuCtxGetId", self.context())
        except DriverError as error:
            if error.code not in (INVALID_CONTEXT, DESTROYED):
                raise
            self._retained = None
            found = call("cuCtxGetId", self.context())
        if found == self._context_id:
            return
        if self._context_id is not None:
            self._follower = None
            for pair in [pair for pair in peers if self.ordinal in pair]:
                peers.pop(pair, None)
        self._context_id = found

    def follower(self) -> int:
        """A stream that nothing is queued on but waiting for others."""
        self.notice_reset()
        if self._follower is None:
            self._follower = int(self.call("cuStreamCreate", NON_BLOCKING))
        return self._follower

    def attribute(self, number: int) -> int:
        if number not in self._known:
            attribute = driver().CUdevice_attribute(number)
            self._known[number] = call("cuDeviceGetAttribute", attribute, self.handle)
        return self._known[number]


_devices: dict[int, Device] = {}
#: (source, destination): whether the first reaches the memory of the second.
peers: dict[tuple[int, int], bool] = {}


def device(ordinal: int) -> Device:
    if ordinal not in _devices:
        _devices[ordinal] = Device(ordinal)
    return _devices[ordinal]


def peer_access(source: int, to: int) -> bool:
    """Whether kernels of one device reach the memory of another. Asked once a pair and remembered;
    access is enabled then, in this direction only."""
    if source == to:
        return True
    for end in (source, to):
        device(end).notice_reset()
    if (source, to) not in peers:
        can = bool(call("cuDeviceCanAccessPeer", device(source).handle, device(to).handle))
        if can:
            try:
                device(source).call("cuCtxEnablePeerAccess", device(to).context(), 0)
            except DriverError as error:
                if error.code != ALREADY_ENABLED:
                    raise
        peers[source, to] = can
    return peers[source, to]


def reaches(source: View, to: View) -> bool:
    """Whether the source's device may write the destination's memory. Enabling peer access does not
    cover memory that belongs to no context."""
    return peer_access(source.ordinal, to.ordinal) and not _is_mapped(to.address)


def forget() -> None:
    """Asks everything anew, as after a reset of the devices."""
    _devices.clear()
    peers.clear()
    _libraries.clear()
    _waiting.forget()


# -- lanes -----------------------------------------------------------------------------------------


def lane(view: View, stream: Any) -> Lane:
    there = device(view.ordinal)
    handle = chosen_stream(stream)
    if handle != view.stream and not belongs(handle, there):
        handle = _refused(handle, stream)
    return Lane(there, handle or view.stream or 1, alone=True)


def lanes(source: View, to: View, stream: Any) -> tuple[Lane, Lane]:
    """Of the source's device and of the destination's. A stream that belongs to the second is its
    own; the source's is the default one then."""
    here, there = device(source.ordinal), device(to.ordinal)
    handle = chosen_stream(stream)
    if not belongs(handle, here):
        if belongs(handle, there):
            return Lane(here, source.stream or 1), Lane(there, int(handle or 0))
        handle = _refused(handle, stream)
    return Lane(here, handle or source.stream or 1), Lane(there, to.stream or 1)


def belongs(handle: int | None, there: Device) -> bool:
    """Whether a device can work on a stream: its own, or a default stream, which each has."""
    if handle is None or handle <= PER_THREAD:
        return True
    return _context_of(handle) == int(there.context())


def _context_of(handle: int) -> int:
    found = call("cuStreamGetCtx", handle)
    return int(found[0] if isinstance(found, tuple) else found)


def _refused(handle: int | None, stream: Any) -> int | None:
    """For a stream of a device that has no part in the copy: an error where it was named for this
    copy; where `bfc.use_stream` named it, the answer that none was chosen."""
    if stream is not None:
        raise ValueError(
            f"the stream {handle:#x} belongs to no device whose memory is copied here: "
            "name a stream of that device, or none"
        )
    return None


def lane_of(stream: int, ordinal: int) -> Lane:
    """A stream that pinned memory names, which may be of any device. A default one is that of the
    device where the memory was made."""
    if stream <= PER_THREAD:
        return Lane(device(ordinal), stream)
    call("cuCtxPushCurrent", _context_of(stream))
    try:
        return Lane(device(int(call("cuCtxGetDevice"))), stream)
    finally:
        call("cuCtxPopCurrent")


def wait_on_host(view: View) -> None:
    """Before the host itself reads or writes pinned memory that names a stream: waits for that, as
    `__cuda_array_interface__` asks."""
    if view.kind != "cuda_host" or view.stream is None or view.buffer is not None:
        return
    lane = lane_of(view.stream, view.ordinal)
    if lane.is_capturing():
        hint = "the host cannot wait for the stream that this memory names while it is captured"
        raise failure("bfc.copy", CAPTURING, hint)
    lane.synchronize()


class Lane:
    """A stream of a CUDA device. The memory that it has adopted knows at its end that the stream
    used it. Every call is made with the device's primary context current, and leaves the caller's
    as it was."""

    __slots__ = (
        "_call", "_capturing", "_followers", "_mode", "alone", "device", "handle", "held",
    )  # fmt: skip

    def __init__(self, device: Device, handle: int, *, alone: bool = False) -> None:
        self.device = device
        self.handle = handle
        self.held: list[object] = []
        #: Whether it is the only lane of a copy, whose context may stay current all along.
        self.alone = alone
        self._mode: Any = None
        self._call = call if alone else device.call
        self._capturing: bool | None = None
        self._followers: dict[int, Lane] = {}

    def __enter__(self) -> Self:
        if self.alone:
            self._mode = self.device.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.held.clear()
        if self.alone:
            self.device.leave(self._mode)

    # -- what comes before -------------------------------------------------------------------------

    def is_capturing(self) -> bool:
        if self._capturing is None:
            self._capturing = bool(self._call("cuStreamIsCapturing", self.handle))
        return self._capturing

    def refuse_capture(self) -> None:
        if self.is_capturing():
            hint = "a graph cannot capture what the host does to cast, or to close gaps"
            raise failure("bfc.copy", CAPTURING, hint)

    def refuse_capture_of(self, host: int, non_blocking: bool) -> None:
        """A graph would read the host's memory each time it runs, and nobody can wait for it."""
        if not self.is_capturing():
            return
        if not non_blocking:
            hint = "a copy that waits cannot be captured: pass non_blocking=True"
        elif not is_pinned(host):
            hint = "only pinned memory takes part in a capture: bfc.PinnedAllocator has it"
        else:
            return
        raise failure("bfc.copy", CAPTURING, hint)

    def adopt(self, *views: View) -> None:
        """Comes after what is queued where the views' memory was last used. Raises ClosedError for
        a buffer that was freed."""
        for view in views:
            if view.buffer is not None:
                self.held.append(self._hold(view.buffer))
            elif view.stream is not None and view.stream != self.handle:
                self._wait_for_stream(view.stream)

    def _hold(self, buffer: Buffer) -> object:
        """A capsule for this stream: it waits for the buffer's own, and the buffer's allocator
        learns when the capsule goes that the stream has used it."""
        stream = -1 if self.is_capturing() else self.handle
        return buffer.__dlpack__(stream=stream, max_version=(1, 0))

    def come_after(self, host: View) -> None:
        """Of the stream that pinned memory names, if it does."""
        if host.kind != "cuda_host" or host.stream is None:
            return
        there = lane_of(host.stream, host.ordinal)
        if (there.device, there.handle) != (self.device, self.handle):
            self.wait_for(there)

    def adopt_pinned(self, host: View) -> None:
        buffer = host.buffer or _buffer_under(host.array)
        shown = ("cuda_host", "cuda_managed")  # an array may show managed memory, too
        if buffer is None or not buffer.nbytes or buffer.device.kind not in shown:
            self.come_after(host)
            return
        there = self._lane_on(buffer.device.ordinal)
        self.held.append(there._hold(buffer))
        if there is not self:
            self.wait_for(there)

    def settle_pinned(self, host: View) -> None:
        """Tells the caching allocator of a pinned block that the stream uses it. The stream may be
        destroyed before the block is freed, so it is marked now: a buffer by the capsule that is
        held, an address here. An event of a graph tells nothing, so that is left to the free."""
        pinned = sys.modules.get("bfc.pinned")  # not imported: no block of it exists
        found = pinned.find(host.address) if pinned is not None else None
        there = self
        if found is not None and found[0].is_pinned:
            there = self._lane_on(found[0].device.ordinal)
        for follower in self._followers.values():
            follower.wait_for(self)
        if found is None:
            return
        allocator, block = found
        if self.is_capturing():
            allocator.record_event(host.address, block, there.handle)
        elif not (host.buffer or _buffer_under(host.array)):
            allocator.mark_event(block, there.handle)

    def _lane_on(self, ordinal: int) -> Lane:
        """This one, or for an allocator that knows only streams of another device one of that
        device, which follows this one when the copy is queued."""
        if ordinal == self.device.ordinal or self.is_capturing():
            return self
        if ordinal not in self._followers:
            there = device(ordinal)
            self._followers[ordinal] = Lane(there, there.follower())
        return self._followers[ordinal]

    def wait_for(self, other: Lane) -> None:
        if self.is_capturing() != other.is_capturing():
            hint = (
                "a graph cannot wait for a stream that is not captured with it, nor the other way "
                "round: this memory is used on both"
            )
            raise failure("bfc.copy", CAPTURING, hint)
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

    def _wait_for_stream(self, stream: int) -> None:
        self.wait_for(Lane(self.device, stream))

    # -- what comes after --------------------------------------------------------------------------

    def synchronize(self) -> None:
        self._call("cuStreamSynchronize", self.handle)

    def keep(self, host: View) -> None:
        """Pageable memory the driver has taken when its call returns, unless the device reads it in
        place; pinned memory of ours is known to its allocator. That of others may show as an array,
        as numba's and CuPy's does."""
        if host.buffer is not None or self.is_capturing():
            return
        in_place = host.kind == "cuda_host" or self.device.attribute(PAGEABLE_ACCESS)
        if not in_place and (_buffer_under(host.array) or not _is_drivers(host.address)):
            return
        _waiting.keep(_Event(self._record()), host)

    # -- memory ------------------------------------------------------------------------------------

    def temporary(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> View:
        if not self.device.attribute(MEMORY_POOLS) and self.is_capturing():
            hint = (
                "the graph would use a temporary that is freed by then: copy without a cast or gaps"
            )
            raise failure("bfc.copy", CAPTURING, hint)
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

    def move_between(self, to: View, source: View, peers: bool, there: Lane) -> None:
        """To another device. Memory that is mapped without access for both needs the peer copy."""
        if peers or not (_is_mapped(to.address) or _is_mapped(source.address)):
            self.move(to, source)
        else:
            self._call(
                "cuMemcpyPeerAsync", to.address, there.device.context(), source.address,
                self.device.context(), to.nbytes, self.handle,
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
    return error != NOT_READY  # what has failed is not worth keeping either


#: The host's memory of transfers that were not waited for.
_waiting = Waiting(_is_done)


def _buffer_under(array: np.ndarray[Any, Any] | None) -> Buffer | None:
    """The buffer whose memory an array shows, if it is one of ours."""
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


def compiled(text: str, arch: int) -> bytes:
    """A program for a device of compute capability `arch` (90 for 9.0): its own code, or where
    NVRTC is older than the device PTX that the driver finishes."""
    nvrtc = _nvrtc()
    error, known = nvrtc.nvrtcGetSupportedArchs()
    _check_nvrtc(error, "nvrtcGetSupportedArchs")
    older = [number for number in known if number <= arch]
    if not older:
        raise DeviceUnavailableError(
            f"this NVRTC compiles for compute capability {min(known) / 10} and later, and the "
            f"device has {arch / 10}: install an older one"
        )
    exact = arch in known
    target = f"sm_{arch}" if exact else f"compute_{max(older)}"
    return compiled_for(text, target)


def compiled_for(text: str, target: str) -> bytes:
    nvrtc = _nvrtc()
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), b"bfc_copy.cu", 0, [], [])
    _check_nvrtc(error, "nvrtcCreateProgram")
    try:
        options = [f"--gpu-architecture={target}".encode()]
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if int(error):
            length = nvrtc.nvrtcGetProgramLogSize(program)[1]
            log = b" " * length
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC does not compile the copy kernel:\n{log.decode()}")
        size, get = (
            (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
            if target.startswith("sm_")
            else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
        )
        image = bytes(size(program)[1])
        _check_nvrtc(get(program, image)[0], "nvrtcGetPTX")
        return image
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    """cuda-python's module of NVRTC's calls. Raises DeviceUnavailableError."""
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except Exception as error:  # cuda-python has a class of its own for a missing library
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DeviceUnavailableError(
            f"this copy compiles a kernel, and NVRTC was not found ({reason}): "
            f"{_nvrtc_to_install()}"
        ) from error
    return nvrtc


def _nvrtc_to_install() -> str:
    """NVRTC must be of the CUDA that cuda-bindings is for."""
    if _version_of("cuda-bindings").startswith("12."):
        return "pip install 'nvidia-cuda-nvrtc-cu12==12.*', which 'bfc-allocator[cuda12]' brings"
    return "pip install 'nvidia-cuda-nvrtc==13.*', which 'bfc-allocator[cuda]' brings"


def _version_of(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _check_nvrtc(error: Any, name: str) -> None:
    if int(error):
        raise RuntimeError(f"{name}: {error}")
