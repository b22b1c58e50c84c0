"""Builds, loads and steers the emulated CUDA driver."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bfc.testing.cuda_emulator.library import (
    build,
    loaded_driver,
    path,
    refuse_beside,
    refuse_elsewhere,
)

HERE = Path(__file__).resolve().parent
NOTHING = 2**64 - 1
KINDS = ("device", "managed", "host", "registered", "pooled", "mapped")
LEGACY_STREAM = 1
PER_THREAD_STREAM = 2

# The errors that tests ask for; a number will do for any other.
ERRORS = {
    "CUDA_ERROR_INVALID_VALUE": 1,
    "CUDA_ERROR_OUT_OF_MEMORY": 2,
    "CUDA_ERROR_NOT_INITIALIZED": 3,
    "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_INVALID_DEVICE": 101,
    "CUDA_ERROR_INVALID_CONTEXT": 201,
    "CUDA_ERROR_ECC_UNCORRECTABLE": 214,
    "CUDA_ERROR_INVALID_HANDLE": 400,
    "CUDA_ERROR_NOT_FOUND": 500,
    "CUDA_ERROR_NOT_READY": 600,
    "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
    "CUDA_ERROR_LAUNCH_TIMEOUT": 702,
    "CUDA_ERROR_CONTEXT_IS_DESTROYED": 709,
    "CUDA_ERROR_LAUNCH_FAILED": 719,
    "CUDA_ERROR_NOT_PERMITTED": 800,
    "CUDA_ERROR_NOT_SUPPORTED": 801,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
    "CUDA_ERROR_UNKNOWN": 999,
}


class _Logged(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("thread", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("result", ctypes.c_int),
    ]


class _Living(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("kind", ctypes.c_int),
        ("device", ctypes.c_int),
    ]


@dataclass(frozen=True)
class Call:
    """One call of the driver, in the order in which the calls ended."""

    name: str  # without a suffix such as _v2
    thread: int  # as threading.get_native_id() says
    result: int
    nbytes: int | None
    address: int | None
    stream: int | None  # as the caller named it


@dataclass(frozen=True)
class Allocation:
    address: int
    nbytes: int
    kind: str  # one of KINDS
    device: int


_driver: Driver | None = None
_loading = threading.Lock()


def load() -> Driver:
    """The emulated driver of this process. To be called before anything calls CUDA.

    Raises DeviceUnavailableError where another libcuda is loaded already, where there is no C
    compiler to make it with, and on other systems than Linux.

    >>> driver = load()
    >>> driver.reset(devices=1, total=1 << 30)
    >>> import bfc
    >>> bfc.cuda.device_count()
    1
    """
    global _driver
    with _loading:
        if _driver is None:
            refuse_elsewhere()
            refuse_beside(loaded_driver(), path())
            _driver = Driver(ctypes.CDLL(str(build()), ctypes.RTLD_GLOBAL))
            _driver.reset()
        return _driver


def preamble() -> str:
    """A line for the top of a script that is run by ``python -c``: it loads the emulator."""
    find = f"import sys; sys.path.insert(0, {str(HERE.parents[2])!r})"
    return f"{find}; from bfc.testing import cuda_emulator; cuda_emulator.load()"


def script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that has loaded the emulator, in a process of its own, which finds the modules
    that this one finds."""
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", f"{preamble()}\n{text}"],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


class Driver:
    """The controls. There is one machine in a process, so there is one of these."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.totals: list[int] = []  # the bytes of each device, as of the last reset
        size, wide, number = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int
        signatures = {
            "emu_reset": (None, [number, ctypes.POINTER(wide), number, wide]),
            "emu_clear": (None, []),
            "emu_set_patience": (None, [ctypes.c_double]),
            "emu_set_peers": (None, [number]),
            "emu_set_attribute": (None, [number, number, number]),
            "emu_set_others": (None, [number, wide]),
            "emu_set_free": (None, [number, wide]),
            "emu_log_length": (size, []),
            "emu_log_copy": (size, [ctypes.POINTER(_Logged), size, size]),
            "emu_complaints": (size, [ctypes.c_char_p, size]),
            "emu_fail": (number, [ctypes.c_char_p, number, ctypes.c_long, ctypes.c_long, wide]),
            "emu_hide_newer": (None, [number]),
            "emu_hide": (number, [ctypes.c_char_p]),
            "emu_hold": (number, [wide, number, number]),
            "emu_hold_all": (None, [number]),
            "emu_live": (size, [ctypes.POINTER(_Living), size]),
            "emu_reservations": (size, [ctypes.POINTER(_Living), size]),
            "emu_live_handles": (size, []),
            "emu_live_events": (size, []),
            "emu_live_streams": (size, []),
            "emu_pending": (size, []),
            "emu_blocked": (size, []),
            "emu_retained": (ctypes.c_uint, [number]),
            "emu_device_of": (number, [wide]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments

    def reset(
        self,
        devices: int = 2,
        total: int | Sequence[int] = 8 << 30,
        driver_version: int = 13010,
        *,
        capability: tuple[int, int] = (9, 0),
        concurrent_managed: bool = True,
        peers: bool = True,
        host: int = 1 << 40,
        patience: float = 10.0,
    ) -> None:
        """Makes a new machine: nothing is allocated, retained, logged, held or to fail.

        Handles of primary contexts and default pools stay good, since libraries keep them.
        """
        totals = [total] * devices if isinstance(total, int) else list(total)
        self.totals = totals
        numbers = (ctypes.c_uint64 * max(devices, 1))(*totals)
        self.library.emu_reset(devices, numbers, driver_version, host)
        self.set_patience(patience)
        self.library.emu_set_peers(peers)
        for device in range(devices):
            self.set_attribute(device, 75, capability[0])
            self.set_attribute(device, 76, capability[1])
            self.set_attribute(device, 89, int(concurrent_managed))

    def clear(self) -> None:
        """Forgets calls, complaints and faults, and releases what is held."""
        self.library.emu_clear()

    def set_patience(self, seconds: float) -> None:
        """How long a call may block before it complains and fails."""
        self.library.emu_set_patience(seconds)

    def set_attribute(self, device: int, attribute: int, value: int) -> None:
        """Sets a CU_DEVICE_ATTRIBUTE."""
        self.library.emu_set_attribute(device, int(attribute), value)

    def set_others(self, device: int, nbytes: int) -> None:
        """How much of the device's memory other processes use."""
        self.library.emu_set_others(device, nbytes)

    def set_free(self, device: int, nbytes: int) -> None:
        """Lets others use so much that this is free now."""
        self.library.emu_set_free(device, nbytes)

    def _log(self, start: int = 0) -> list[Call]:
        room = self.library.emu_log_length() - start
        log = (_Logged * max(room, 1))()
        count = self.library.emu_log_copy(log, start, room)

        def known(number: int) -> int | None:
            return None if number == NOTHING else number

        return [
            Call(e.name.decode(), e.thread, e.result, *map(known, (e.nbytes, e.address, e.stream)))
            for e in log[:count]
        ]

    @property
    def calls(self) -> list[Call]:
        return self._log()

    def count(self, name: str | None = None) -> int:
        """How many calls of that function, or of any, there were."""
        if name is None:
            return int(self.library.emu_log_length())
        return sum(call.name == name for call in self._log())

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Counts the calls inside of the block, by name; to be read after its end."""
        counts: Counter[str] = Counter()
        start = self.library.emu_log_length()
        try:
            yield counts
        finally:
            counts.update(call.name for call in self._log(start))

    def fail(
        self,
        name: str,
        error: str | int = "CUDA_ERROR_OUT_OF_MEMORY",
        *,
        at: int = 1,
        times: int | None = 0,
        above: int | None = None,
    ) -> None:
        """Lets the at-th call from now of that function fail, and times - 1 more; None: for ever.

        With ``above`` only the calls that ask for more bytes than that are counted. Without
        ``times`` one call fails, or with ``above`` every one.
        """
        code = ERRORS[error] if isinstance(error, str) else int(error)
        if times == 0:
            times = 1 if above is None else None
        left = -1 if times is None else times
        limit = NOTHING if above is None else above
        if not self.library.emu_fail(name.encode(), code, at, left, limit):
            raise RuntimeError("too many faults")

    def hide(self, name: str) -> None:
        """Lets cuGetProcAddress find no such function, as with an old driver.

        cuda-python looks everything up at its first call and never again, so this belongs to the
        start of a fresh process, and no reset takes it back.
        """
        if not self.library.emu_hide(name.encode()):
            raise RuntimeError("too many hidden functions")

    def hide_newer(self, version: int) -> None:
        """Hides every function that a driver of that version (such as 11040) does not have.

        The same holds for this as for :meth:`hide`. ``reset(driver_version=...)`` alone changes
        only what cuDriverGetVersion says.
        """
        self.library.emu_hide_newer(version)

    def _hold(self, stream: object, device: int, held: bool) -> None:
        if not self.library.emu_hold(_number(stream), device, held):
            raise ValueError(f"{stream!r} is no stream of device {device}")

    def hold(self, stream: object, device: int = 0) -> None:
        """Lets nothing run on the stream. 0 and 1 name the legacy stream of the device."""
        self._hold(stream, device, True)

    def release(self, stream: object, device: int = 0) -> None:
        """Lets the stream go on: all that is ready runs at once."""
        self._hold(stream, device, False)

    def release_once_waited_for(self, stream: object) -> threading.Thread:
        """Lets the stream go on when a thread is blocked in a call. To be joined."""

        def watch() -> None:
            end = time.monotonic() + 60
            while not self.library.emu_blocked() and time.monotonic() < end:
                time.sleep(0.001)
            self.release(stream)

        thread = threading.Thread(target=watch)
        thread.start()
        return thread

    def hold_all(self) -> None:
        """Holds every stream that there is now."""
        self.library.emu_hold_all(True)

    def release_all(self) -> None:
        self.library.emu_hold_all(False)

    @property
    def pending(self) -> int:
        """How many pieces of work wait."""
        return int(self.library.emu_pending())

    def allocations(self, device: int | None = None) -> list[Allocation]:
        room = self.library.emu_live(None, 0)
        found = (_Living * max(room, 1))()
        count = min(self.library.emu_live(found, room), room)
        return [
            Allocation(it.address, it.nbytes, KINDS[it.kind], it.device)
            for it in found[:count]
            if device is None or it.device == device
        ]

    def live(self, device: int | None = None) -> dict[int, int]:
        """Addresses and sizes of what is allocated, of every kind."""
        return {it.address: it.nbytes for it in self.allocations(device)}

    def live_bytes(self, device: int | None = None) -> int:
        return sum(self.live(device).values())

    def reservations(self) -> dict[int, int]:
        """Addresses and sizes of what cuMemAddressReserve has given."""
        room = self.library.emu_reservations(None, 0)
        found = (_Living * max(room, 1))()
        count = min(self.library.emu_reservations(found, room), room)
        return {it.address: it.nbytes for it in found[:count]}

    def live_handles(self) -> int:
        """How many pieces of memory from cuMemCreate have a handle that is not released."""
        return int(self.library.emu_live_handles())

    def live_events(self) -> int:
        return int(self.library.emu_live_events())

    def live_streams(self) -> int:
        return int(self.library.emu_live_streams())

    def retained(self, device: int) -> int:
        """How often the primary context is retained."""
        return int(self.library.emu_retained(device))

    def device_of(self, address: int) -> int | None:
        """The device whose own memory has that address; no other kind belongs to one."""
        device = self.library.emu_device_of(address)
        return None if device < 0 else device

    @property
    def complaints(self) -> list[str]:
        """What a real driver would have punished, with an error or without."""
        room = self.library.emu_complaints(None, 0) + 4096
        text = ctypes.create_string_buffer(room)
        length = self.library.emu_complaints(text, room)
        return text.raw[:length].decode(errors="replace").split("\0")[:-1]


def _number(stream: object) -> int:
    """The handle in a number, a CUstream, or what says __cuda_stream__."""
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    return int(stream)  # type: ignore[call-overload, no-any-return]
