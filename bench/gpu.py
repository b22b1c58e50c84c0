"""What the benchmarks that need a GPU begin with: a device, or the emulated driver in its place."""

from __future__ import annotations

import bfc
from bench.report import machine, say
from bfc.testing import cuda_emulator


def start(module: str, device: int = 0, *, emulated: bool) -> bfc.CUDASubAllocator:
    """Prints what is measured, and returns the device. Where there is none the program ends, and
    names `--emulated`, which `module` must understand."""
    say(machine())
    if emulated:
        cuda_emulator.load()
        say("on the emulated driver, whose calls cost next to nothing: not a measure of a GPU")
    usable = bfc.cuda.is_available()
    if not usable:
        raise SystemExit(f"{usable}\n  try: python -m {module} --emulated")
    source = bfc.CUDASubAllocator(device)
    say(source.name if emulated else f"{source.name}; {usable}")
    return source
