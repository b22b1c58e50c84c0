"""What every benchmark prints the same way."""

from __future__ import annotations

import mmap
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def machine() -> str:
    """A line about the machine, to print above the figures. The family and the model tell apart
    processors of one name, as virtual machines have."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().partition("\n\n")[0].splitlines()
        said = {name.strip(): text.strip() for name, _, text in (x.partition(":") for x in lines)}
        if "model name" in said:
            model = said["model name"]
        if "cpu family" in said and "model" in said:
            model += f" (family {said['cpu family']}, model {said['model']})"
    return f"{model}, {platform.system()} {platform.machine()}, Python {platform.python_version()}"


def spread(samples: Sequence[float]) -> str:
    """min / median / max."""
    low, middle, high = min(samples), statistics.median(samples), max(samples)
    return f"{low:6.1f} /{middle:6.1f} /{high:6.1f}"


def geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))


def say(text: str = "") -> None:
    print(text)
    sys.stdout.flush()


def resident_bytes() -> int:
    """This process's resident memory, from the kernel."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * mmap.PAGESIZE
