"""OpenCL through pyopencl: devices, contexts, and errors in words. Nothing is loaded before the
first device is used."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any

from bfc.errors import DeviceUnavailableError, DriverError, SubAllocatorError
from bfc.interpreter._process import ForkSafeLock

INSTALL = "pip install 'bfc-allocator[opencl]'"
DRIVERS = (
    "for a device install its vendor's OpenCL driver, and for the processor pip install "
    "pocl-binary-distribution"
)

NEW_PROCESSOR = (
    "no kernel compiles there (\"unknown target CPU 'generic'\"): this PoCL is older than the "
    "processor. Intel's driver takes it: pip install intel-opencl-rt intel-cmplr-lib-rt, and set "
    "OCL_ICD_VENDORS to the lib/libintelocl.so that they bring"
)

#: OpenCL's error codes that can only mean "no room": for a buffer, for resources, on the host, and
#: for a size above the largest.
NO_ROOM = frozenset({-4, -5, -6, -61})

_HINTS = {
    -2: "the device was lost: close this allocator, and make another on a new context",
    -5: "a kernel touched memory that is not its own, or the device is out of memory",
    -13: "the block does not start at the device's alignment: let an allocator place it",
    -30: "the queue or the memory belongs to another context",
    -34: "the context was lost, or is another one: close this allocator, and make another",
    -36: "the queue was released, or belongs to another context",
    -38: "the memory was released, or belongs to another context",
}
_FORKED = (
    "OpenCL was used before this process was forked, and does not work in the child: start "
    'processes with multiprocessing\'s "spawn" or "forkserver"'
)

_lock = ForkSafeLock()
_contexts: dict[int, Any] = {}  # by ordinal
_asked_in = 0  # the process in which a driver was used


def load() -> Any:
    """pyopencl. Raises DeviceUnavailableError, which says what to install."""
    try:
        import pyopencl
    except ImportError as error:
        raise DeviceUnavailableError(
            f"OpenCL needs the package pyopencl ({error})\n  try: {INSTALL}"
        ) from error
    return pyopencl


def devices() -> list[Any]:
    """Every device of every platform, as the platforms list them. Raises DeviceUnavailableError if
    there is none, and in a forked child of a process that has used a driver: queues in the child
    would wait for threads that exist only in the parent."""
    cl = load()
    refuse_child()
    found: list[Any] = []
    try:
        for platform in cl.get_platforms():
            with contextlib.suppress(cl.Error):  # a driver without its hardware
                found += platform.get_devices()
    except cl.Error as error:
        raise DeviceUnavailableError(
            f"no OpenCL driver was found ({first_line(error)})\n  try: {DRIVERS}"
        ) from error
    if not found:
        raise DeviceUnavailableError(f"the OpenCL drivers show no device\n  try: {DRIVERS}")
    note_use()
    return found


def device_count() -> int:
    """How many devices there are; 0 if OpenCL is not available."""
    try:
        return len(devices())
    except (DeviceUnavailableError, DriverError):
        return 0


def availability() -> tuple[bool, str]:
    """Whether there is a device, and a sentence that says why, or why not."""
    try:
        found = devices()
    except (DeviceUnavailableError, DriverError) as error:
        return False, f"OpenCL is not available: {error}"
    count = "1 device" if len(found) == 1 else f"{len(found)} devices"
    return True, f"OpenCL is available: {count}, the first {name_of(found[0])}"


def refuse_child() -> None:
    """Raises DeviceUnavailableError in a forked child of a process that used a driver."""
    if _asked_in not in (0, os.getpid()):
        raise DeviceUnavailableError(_FORKED)


def note_use() -> None:
    """Notes that this process uses a driver: its forked children cannot use one."""
    global _asked_in
    _asked_in = os.getpid()


def default_context(ordinal: int) -> Any:
    """The shared context of a device, for users that pass no context. Raises
    DeviceUnavailableError."""
    found = devices()
    if not 0 <= ordinal < len(found):
        raise DeviceUnavailableError(
            f"there is no OpenCL device {ordinal}: the drivers show {len(found)}, counted from 0"
        )
    with _lock:
        if ordinal not in _contexts:
            with in_words(f"clCreateContext for device {ordinal}"):
                _contexts[ordinal] = load().Context([found[ordinal]])
        return _contexts[ordinal]


def ordinal_of(device: Any) -> int:
    """The index of a device in `devices()`, or of the device that it is a part of; 0 if it is not
    listed."""
    parts = [device]
    with contextlib.suppress(load().Error, AttributeError):
        while (whole := parts[-1].parent_device) is not None:
            parts.append(whole)
    return next((i for i, other in enumerate(devices()) if other in parts), 0)


def has_svm(device: Any) -> bool:
    """Whether a device has shared virtual memory in the form that every kind of it includes."""
    cl = load()
    try:
        return bool(device.svm_capabilities & cl.device_svm_capabilities.COARSE_GRAIN_BUFFER)
    except cl.Error:
        return False  # OpenCL 1.x does not know this query


def why_no_kernels(device: Any) -> str:
    """Why no kernel can be compiled for a device, and what to do; empty where nothing is known.

    PoCL up to 3.0, which pip has, asks LLVM for the processor's name, which stands at the end of
    the device's version. Its compiler then refuses "generic", LLVM's name for newer processors.
    """
    is_old = re.search(r"pocl ([0-2]\.|3\.0)", str(device.platform.version), re.IGNORECASE)
    if is_old and re.search(r"x86_64.*-generic$", str(device.version).strip()):
        return NEW_PROCESSOR
    return ""


def name_of(device: Any) -> str:
    try:
        return str(device.name).strip()
    except load().Error as error:
        return f"does not tell its name ({first_line(error)})"


def first_line(error: object) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class in_words:  # noqa: N801 - it reads as a statement
    """Turns pyopencl's errors into a DriverError that names the call: by default, pyopencl's name
    for it."""

    __slots__ = ("_call",)

    def __init__(self, call: str = "") -> None:
        self._call = call

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is not None and isinstance(error, load().Error):
            raise failure(error, self._call) from error


def failure(error: Any, call: str = "") -> DriverError:
    code = int(getattr(error, "code", 0))
    name = "CL_" + str(load().status_code.to_string(code, "unknown error %d"))
    call = call or getattr(error, "routine", None) or "OpenCL"
    return DriverError(call, code, name, first_line(error), _HINTS.get(code, ""))


def is_no_room(error: Any) -> bool:
    return getattr(error, "code", 0) in NO_ROOM


class Home:
    """The process that a context was used in. OpenCL does not survive a fork."""

    def __init__(self) -> None:
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._process

    def check(self) -> None:
        if not self.is_here:
            raise SubAllocatorError(_FORKED)
