"""What tests share of simulated devices that do not do as they should."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import waiting

import bfc

MIB = 1 << 20
KINDS = ("reserve", "create", "map", "set_access", "unmap", "release", "unreserve", "wait")


def assert_empty(device: bfc.SimulatedSubAllocator) -> None:
    assert not device.live_bytes
    assert not device.reservations
    assert not device.pages
    assert not device.mappings


NO_ADDRESSES = [
    0,
    -1,
    -(2 << 20),
    1,
    (2 << 20) + 512,
    1 << 63,
    1 << 64,
    1 << 200,
    "here",
    0.5,
    b"",
    [1],
    (),
]


INSIDE = [
    pytest.param(kind, n, after, id=f"{kind} {n} {'after' if after else 'before'}")
    for kind in KINDS
    for n in (1, 2)
    for after in (False, True)
]


def on_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Runs the work in threads. What one of them raises is raised here."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        errors = waiting.run_all([partial(work, number) for number in range(count)])
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]


def fill(address: int, nbytes: int, value: int) -> None:
    ctypes.memset(address, value, nbytes)


def holds(address: int, nbytes: int, value: int) -> bool:
    array = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
    return bool((array == value).all())
