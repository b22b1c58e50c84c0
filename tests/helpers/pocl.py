"""OpenCL for the tests: PoCL, on the processor."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: What a processor can be called that is newer than PoCL's compiler.
UNKNOWN = b"generic\0"
#: The flags of "haswell" in /proc/cpuinfo.
FLAGS = {"avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
CACHE = Path(__file__).resolve().parents[2] / "build" / "pocl"
#: The words of PoCL's record of a device that are looked through.
WORDS = 200


@functools.cache
def devices() -> tuple[Any, ...]:
    """The devices there are, fit to build kernels. Empty without pyopencl or a driver."""
    try:
        import pyopencl as cl

        platforms = cl.get_platforms()
    except Exception:
        return ()
    found = [device for platform in platforms for device in platform.get_devices()]
    for device in found:
        if device.platform.name == "Portable Computing Language":
            name_processor(device)
    return tuple(found)


def is_of_nvidia(device: Any) -> bool:
    """Whether the driver checks little of what it is given: NVIDIA's takes other objects for a
    queue, and ends the process, and makes sub-buffers that are not aligned."""
    return bool(device.platform.vendor.startswith("NVIDIA"))


def name_processor(device: Any) -> None:
    """PoCL 3.0 (LLVM 14) calls a processor that it does not know "generic", and its own compiler
    then refuses that name ("unknown target CPU 'generic'"). Here such a device gets a name that the
    compiler knows. Other devices stay as they are."""
    start = device.int_ptr
    ranges = list(readable())
    record = (ctypes.c_uint64 * WORDS).from_address(start)
    for i in range(WORDS):
        if not is_readable(ranges, start + 8 * i):
            return
        text = record[i]
        if is_readable(ranges, text) and ctypes.string_at(text, len(UNKNOWN)) == UNKNOWN:
            record[i] = ctypes.addressof(known_name())


@functools.cache
def known_name() -> Any:
    """For a plain "x86-64", kernels with vectors crash the compiler."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return ctypes.create_string_buffer(b"haswell" if flags >= FLAGS else b"x86-64")


def readable() -> Iterator[tuple[int, int]]:
    if os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps") as maps:
            for line in maps:
                span, rights = line.split()[:2]
                if rights.startswith("r"):
                    first, last = (int(end, 16) for end in span.split("-"))
                    yield first, last


def is_readable(ranges: list[tuple[int, int]], address: int) -> bool:
    return any(first <= address and address + 8 <= last for first, last in ranges)


def start() -> None:
    """To be called before OpenCL is used otherwise. Compiled kernels are kept for the next run."""
    os.environ.setdefault("POCL_CACHE_DIR", str(CACHE))
    devices()
