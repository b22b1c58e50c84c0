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
    """A line about the machine, to print above the figures."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
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
