"""The CUDA driver's calls from Python: facts about addresses, devices and streams."""

from __future__ import annotations

import functools
from typing import Any

from bfc.drivers.cuda import _driver
from bfc.errors import DriverError, InvalidPointerError

INVALID_CONTEXT, DESTROYED, ALREADY_ENABLED, CAPTURING = 201, 709, 704, 900
#: Numbers of CUpointer_attribute.
CONTEXT, MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL = 1, 2, 8, 9
TYPE_HOST, TYPE_UNIFIED = 1, 4
PER_THREAD = 2  # the last of the handles that name a default stream
NON_BLOCKING = 1  # cuStreamCreate
RELAXED = 2  # CUstreamCaptureMode

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
    """What a call returns after its CUresult. Raises DriverError if it fails."""
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


# -- addresses and devices -------------------------------------------------------------------------


def _attributes(address: int, *numbers: int) -> Any:
    return call("cuPointerGetAttributes", len(numbers), _named(numbers), address)


@functools.cache
def _named(numbers: tuple[int, ...]) -> list[Any]:
    return [driver().CUpointer_attribute(number) for number in numbers]


def kind_and_ordinal(address: int) -> tuple[str, int]:
    """The kind and the device of the memory at an address. Raises InvalidPointerError if the driver
    does not know it: it was freed, or belongs to another process."""
    context, kind, managed, ordinal = _attributes(
        address, CONTEXT, MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL
    )
    if not int(kind):
        raise InvalidPointerError(
            f"{address:#x} is not memory of CUDA: it was freed, or never allocated"
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


def is_drivers(address: int) -> bool:
    """Whether memory is pinned or managed, so that the device can use it in place."""
    return bool(int(_attributes(address, MEMORY_TYPE, IS_MANAGED)[0]))


def is_mapped(address: int) -> bool:
    """Whether memory belongs to no context: it is mapped from pages, or comes from a pool."""
    return not int(_attributes(address, CONTEXT, MEMORY_TYPE)[0])


@functools.cache
def _relaxed() -> Any:
    return driver().CUstreamCaptureMode(RELAXED)


class Device:
    """Facts about a device, which are asked for once, and its primary context."""

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
        """If another library has reset the device, forgets what was in the old context."""
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
        """A stream on which nothing is queued except waits for other streams."""
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


def context_of(handle: int) -> int:
    found = call("cuStreamGetCtx", handle)
    return int(found[0] if isinstance(found, tuple) else found)


def belongs(handle: int | None, there: Device) -> bool:
    """Whether a device can work on a stream: its own, or a default stream, which each has."""
    if handle is None or handle <= PER_THREAD:
        return True
    return context_of(handle) == int(there.context())


def forget() -> None:
    """Forgets all facts, as after a reset of the devices."""
    _devices.clear()
    peers.clear()
