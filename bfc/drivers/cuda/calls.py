"""The CUDA driver's calls from Python: facts about addresses, devices and streams."""

from __future__ import annotations

import functools
from typing import Any

from bfc.drivers.cuda import _device, _driver
from bfc.drivers.cuda._driver import driver_error
from bfc.errors import DriverError, InvalidPointerError

ALREADY_ENABLED, CAPTURING = 704, 900
#: Numbers of CUpointer_attribute.
CONTEXT, MEMORY_TYPE, IS_MANAGED, DEVICE_ORDINAL = 1, 2, 8, 9
TYPE_HOST, TYPE_UNIFIED = 1, 4
LEGACY, PER_THREAD = 1, 2  # the last handles of the legacy default stream, and of all default ones
NON_BLOCKING = 1  # cuStreamCreate

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
    """The result of a call, without its CUresult. Raises DriverError if the call fails."""
    results = getattr(_cu or driver(), name)(*arguments)
    if results[0]:
        raise driver_error(name, int(results[0]))
    return results[1] if len(results) == 2 else results[1:]


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
    if int(context) and int(context) != device(ordinal).context.handle:
        raise InvalidPointerError(
            f"{address:#x} belongs to another context than the primary one of device {ordinal}, "
            "which bfc works in"
        )
    return "cuda", ordinal


def is_drivers(address: int) -> bool:
    """Whether the driver knows host memory as pinned or managed, so that the device may use it in
    place. `_device.is_host_memory` says whether it is pinned."""
    return bool(int(_attributes(address, MEMORY_TYPE, IS_MANAGED)[0]))


def is_mapped(address: int) -> bool:
    """Whether memory belongs to no context: it is mapped from pages, or comes from a pool."""
    return not int(_attributes(address, CONTEXT, MEMORY_TYPE)[0])


class DeviceCalls:
    """Calls in a device's primary context, and facts about the device, each queried once."""

    def __init__(self, ordinal: int) -> None:
        self.ordinal = ordinal
        self.context = _device.PrimaryContext(ordinal)
        self.forget()

    def forget(self) -> None:
        self._follower: int | None = None
        self._context_id: int | None = None
        self._known: dict[int, int] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """Like `call`, with the context current during the call."""
        mode = self.context.push()
        try:
            return call(name, *arguments)
        finally:
            self.context.pop(mode)

    def notice_reset(self) -> None:
        """Forgets what was in the old context, if another library has reset the device."""
        found = self.context.current_id()
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
            self._known[number] = _driver.attribute(self.ordinal, number)
        return self._known[number]


_devices: dict[int, DeviceCalls] = {}
#: For (source, destination): whether the source can access the destination's memory.
peers: dict[tuple[int, int], bool] = {}


def device(ordinal: int) -> DeviceCalls:
    if ordinal not in _devices:
        _devices[ordinal] = DeviceCalls(ordinal)
    return _devices[ordinal]


def peer_access(source: int, to: int) -> bool:
    """Whether kernels of one device can access the memory of another. The answer is cached for each
    pair. If it is yes, access is enabled, in this direction only."""
    if source == to:
        return True
    for end in (source, to):
        device(end).notice_reset()
    if (source, to) not in peers:
        can = bool(call("cuDeviceCanAccessPeer", source, to))
        if can:
            try:
                device(source).call("cuCtxEnablePeerAccess", device(to).context.handle, 0)
            except DriverError as error:
                if error.code != ALREADY_ENABLED:
                    raise
        peers[source, to] = can
    return peers[source, to]


def context_of(handle: int) -> int:
    found = call("cuStreamGetCtx", handle)
    return int(found[0] if isinstance(found, tuple) else found)


def belongs(handle: int | None, there: DeviceCalls) -> bool:
    """Whether a device can use a stream: its own, or a default stream, which each device has."""
    if handle is None or handle <= PER_THREAD:
        return True
    return context_of(handle) == there.context.handle


def forget() -> None:
    """Forgets all cached facts, as after a reset of the devices."""
    for known in _devices.values():
        known.forget()
    peers.clear()
