"""Loads and controls the emulated CUDA driver."""

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

from bfc_cuda_emulator.library import (
    build,
    loaded_driver,
    path,
    refuse_beside,
    refuse_elsewhere,
)

HERE = Path(__file__).resolve().parent
NOTHING = 2**64 - 1
KINDS = ("device", "managed", "host", "registered", "pooled", "mapped", "imported")
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
    """One call of the driver. Calls are logged in the order in which they end.

    Attributes
    ----------
    name : str
        The function, without a suffix such as _v2.
    thread : int
        The thread, as by `threading.get_native_id()`.
    result : int
        The CUresult.
    nbytes : int or None
        The bytes that it was about, if any.
    address : int or None
        The address that it was about, if any.
    stream : int or None
        The stream, as the caller named it, if any.
    """

    name: str  # without a suffix such as _v2
    thread: int  # as threading.get_native_id() says
    result: int
    nbytes: int | None
    address: int | None
    stream: int | None  # as the caller named it


@dataclass(frozen=True)
class Allocation:
    """A live allocation.

    Attributes
    ----------
    address : int
        Its first byte.
    nbytes : int
        Its size in bytes.
    kind : str
        One of KINDS.
    device : int
        The device.
    """

    address: int
    nbytes: int
    kind: str  # one of KINDS
    device: int


_driver: Driver | None = None
_loading = threading.Lock()


def load() -> Driver:
    """The emulated driver of this process. Call it before anything calls CUDA.

    Returns
    -------
    Driver
        The same one each time.

    Raises
    ------
    DeviceUnavailableError
        If another libcuda is loaded already, there is no C compiler, or this is not Linux.

    Examples
    --------
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
    """A line that loads the emulator, for the top of a script that ``python -c`` runs.

    Returns
    -------
    str
        Python code.
    """
    find = f"import sys; sys.path.insert(0, {str(HERE.parent)!r})"
    return f"{find}; from bfc.testing import cuda_emulator; cuda_emulator.load()"


def script(text: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program under the emulator, in a process of its own.

    Parameters
    ----------
    text : str
        The program. It finds the modules that this process finds.
    **environment : str
        Variables of its environment, on top of those of this process.

    Returns
    -------
    subprocess.CompletedProcess of str
        Its status and its output.
    """
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
    """The controls of the emulated driver, from `load`. There is one machine in a process.

    Parameters
    ----------
    library : ctypes.CDLL
        The emulator.

    Attributes
    ----------
    library : ctypes.CDLL
        As given.
    totals : list of int
        The bytes of each device, as of the last `reset`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.totals: list[int] = []  # the bytes of each device, as of the last reset
        size, wide, number = ctypes.c_size_t, ctypes.c_uint64, ctypes.c_int
        signatures = {
            "emu_reset": (None, [number, ctypes.POINTER(wide), number, wide]),
            "emu_clear": (None, []),
            "emu_set_patience": (None, [ctypes.c_double]),
            "emu_set_peers": (None, [number]),
            "emu_set_reuse": (None, [number]),
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
        reuse: bool = True,
        host: int = 1 << 40,
        patience: float = 10.0,
    ) -> None:
        """Make a new machine, on which nothing is allocated, logged, held or to fail.

        Handles of primary contexts and default pools stay valid, since libraries keep them.

        Parameters
        ----------
        devices : int, optional
            How many devices.
        total : int or sequence of int, optional
            The bytes of each device.
        driver_version : int, optional
            What cuDriverGetVersion says.
        capability : tuple of (int, int), optional
            The compute capability.
        concurrent_managed : bool, optional
            Let the host use managed memory while the device does.
        peers : bool, optional
            Let devices access each other's memory.
        reuse : bool, optional
            Hand freed addresses out again, the lowest first, as GPU drivers do. Otherwise addresses
            rise, and a use after a free is one of addresses that nobody has.
        host : int, optional
            The bytes of the host that can be pinned.
        patience : float, optional
            As in `set_patience`.
        """
        totals = [total] * devices if isinstance(total, int) else list(total)
        self.totals = totals
        numbers = (ctypes.c_uint64 * max(devices, 1))(*totals)
        self.library.emu_reset(devices, numbers, driver_version, host)
        self.set_patience(patience)
        self.library.emu_set_peers(peers)
        self.library.emu_set_reuse(reuse)
        for device in range(devices):
            self.set_attribute(device, 75, capability[0])
            self.set_attribute(device, 76, capability[1])
            self.set_attribute(device, 89, int(concurrent_managed))

    def clear(self) -> None:
        """Forget calls, complaints and faults, and release what is held."""
        self.library.emu_clear()

    def set_patience(self, seconds: float) -> None:
        """Limit how long a call may block before it complains and fails.

        Parameters
        ----------
        seconds : float
            The limit.
        """
        self.library.emu_set_patience(seconds)

    def set_attribute(self, device: int, attribute: int, value: int) -> None:
        """Set a CU_DEVICE_ATTRIBUTE.

        Parameters
        ----------
        device : int
            The device.
        attribute : int
            The number of the attribute.
        value : int
            Its value.
        """
        self.library.emu_set_attribute(device, int(attribute), value)

    def set_others(self, device: int, nbytes: int) -> None:
        """Say how much of a device's memory other processes use.

        Parameters
        ----------
        device : int
            The device.
        nbytes : int
            In bytes.
        """
        self.library.emu_set_others(device, nbytes)

    def set_free(self, device: int, nbytes: int) -> None:
        """Let other processes use so much that this many bytes are free now.

        Parameters
        ----------
        device : int
            The device.
        nbytes : int
            In bytes.
        """
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
        """Every call since the last `reset` or `clear`, oldest first."""
        return self._log()

    def count(self, name: str | None = None) -> int:
        """How many calls there were.

        Parameters
        ----------
        name : str, optional
            The function; None counts all.

        Returns
        -------
        int
            Since the last `reset` or `clear`.
        """
        if name is None:
            return int(self.library.emu_log_length())
        return sum(call.name == name for call in self._log())

    @contextmanager
    def counting(self) -> Iterator[Counter[str]]:
        """Count the calls within a `with` block.

        Yields
        ------
        collections.Counter of str
            By name; read it after the block.
        """
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
        """Let calls of a function fail.

        Parameters
        ----------
        name : str
            The function.
        error : str or int, optional
            What it returns.
        at : int, optional
            The first call that fails: 1 is the next.
        times : int, optional
            How many fail; None is all from there on. By default one, or with `above` all.
        above : int, optional
            Count only the calls that ask for more bytes than this.

        Raises
        ------
        RuntimeError
            If there are too many faults at once.
        """
        code = ERRORS[error] if isinstance(error, str) else int(error)
        if times == 0:
            times = 1 if above is None else None
        left = -1 if times is None else times
        limit = NOTHING if above is None else above
        if not self.library.emu_fail(name.encode(), code, at, left, limit):
            raise RuntimeError("too many faults")

    def hide(self, name: str) -> None:
        """Let cuGetProcAddress not find a function, as with an old driver.

        cuda-python looks everything up at its first call and never again. So call this at the start
        of a fresh process; no `reset` cancels it.

        Parameters
        ----------
        name : str
            The function.

        Raises
        ------
        RuntimeError
            If too many are hidden.
        """
        if not self.library.emu_hide(name.encode()):
            raise RuntimeError("too many hidden functions")

    def hide_newer(self, version: int) -> None:
        """Hide every function that a driver of some version does not have. See `hide`.

        `reset(driver_version=...)` only changes what cuDriverGetVersion says.

        Parameters
        ----------
        version : int
            Such as 11040.
        """
        self.library.emu_hide_newer(version)

    def _hold(self, stream: object, device: int, held: bool) -> None:
        if not self.library.emu_hold(_number(stream), device, held):
            raise ValueError(f"{stream!r} is not a stream of device {device}")

    def hold(self, stream: object, device: int = 0) -> None:
        """Let nothing run on a stream.

        Parameters
        ----------
        stream : int or stream object
            0 and 1 are the legacy stream of the device.
        device : int, optional
            The device.
        """
        self._hold(stream, device, True)

    def release(self, stream: object, device: int = 0) -> None:
        """Let a stream go on: all that is ready runs at once.

        Parameters
        ----------
        stream : int or stream object
            As in `hold`.
        device : int, optional
            The device.
        """
        self._hold(stream, device, False)

    def release_once_waited_for(self, stream: object) -> threading.Thread:
        """Let a stream go on as soon as a thread is blocked in a call.

        Parameters
        ----------
        stream : int or stream object
            As in `hold`.

        Returns
        -------
        threading.Thread
            The one that watches; join it.
        """

        def watch() -> None:
            end = time.monotonic() + 60
            while not self.library.emu_blocked() and time.monotonic() < end:
                time.sleep(0.001)
            self.release(stream)

        thread = threading.Thread(target=watch)
        thread.start()
        return thread

    def hold_all(self) -> None:
        """Hold every stream that there is now."""
        self.library.emu_hold_all(True)

    def release_all(self) -> None:
        """Let every stream go on."""
        self.library.emu_hold_all(False)

    @property
    def pending(self) -> int:
        """How many pieces of work wait."""
        return int(self.library.emu_pending())

    def allocations(self, device: int | None = None) -> list[Allocation]:
        """What is allocated.

        Parameters
        ----------
        device : int, optional
            The device; None is all.

        Returns
        -------
        list of Allocation
            Of every kind.
        """
        room = self.library.emu_live(None, 0)
        found = (_Living * max(room, 1))()
        count = min(self.library.emu_live(found, room), room)
        return [
            Allocation(it.address, it.nbytes, KINDS[it.kind], it.device)
            for it in found[:count]
            if device is None or it.device == device
        ]

    def live(self, device: int | None = None) -> dict[int, int]:
        """What is allocated, as addresses and sizes.

        Parameters
        ----------
        device : int, optional
            The device; None is all.

        Returns
        -------
        dict of int to int
            The bytes, by address, of every kind.
        """
        return {it.address: it.nbytes for it in self.allocations(device)}

    def live_bytes(self, device: int | None = None) -> int:
        """How much is allocated.

        Parameters
        ----------
        device : int, optional
            The device; None is all.

        Returns
        -------
        int
            In bytes, of every kind.
        """
        return sum(self.live(device).values())

    def reservations(self) -> dict[int, int]:
        """What cuMemAddressReserve has given.

        Returns
        -------
        dict of int to int
            The bytes, by address.
        """
        room = self.library.emu_reservations(None, 0)
        found = (_Living * max(room, 1))()
        count = min(self.library.emu_reservations(found, room), room)
        return {it.address: it.nbytes for it in found[:count]}

    def live_handles(self) -> int:
        """How many pieces of memory from cuMemCreate have a handle that is not released.

        Returns
        -------
        int
            The number.
        """
        return int(self.library.emu_live_handles())

    def live_events(self) -> int:
        """How many events were created and not destroyed.

        Returns
        -------
        int
            The number.
        """
        return int(self.library.emu_live_events())

    def live_streams(self) -> int:
        """How many streams were created and not destroyed.

        Returns
        -------
        int
            The number.
        """
        return int(self.library.emu_live_streams())

    def retained(self, device: int) -> int:
        """How often the primary context of a device is retained.

        Parameters
        ----------
        device : int
            The device.

        Returns
        -------
        int
            The number.
        """
        return int(self.library.emu_retained(device))

    def device_of(self, address: int) -> int | None:
        """The device that an address of device memory belongs to.

        Parameters
        ----------
        address : int
            Any address.

        Returns
        -------
        int or None
            None for memory of another kind, or none at all.
        """
        device = self.library.emu_device_of(address)
        return None if device < 0 else device

    @property
    def complaints(self) -> list[str]:
        """What a real driver would have punished, with an error or without, as a list of texts."""
        room = self.library.emu_complaints(None, 0) + 4096
        text = ctypes.create_string_buffer(room)
        length = self.library.emu_complaints(text, room)
        return text.raw[:length].decode(errors="replace").split("\0")[:-1]


def _number(stream: object) -> int:
    """The handle in a number, a CUstream, or an object with __cuda_stream__."""
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    return int(stream)  # type: ignore[call-overload, no-any-return]
