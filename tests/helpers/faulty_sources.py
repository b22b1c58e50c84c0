"""Simulated devices that do not do as they should: they lie, or call their own allocator; and what
tests of them share."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

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


class Liar(bfc.SimulatedSubAllocator):
    """Answers one call with anything, without making it."""

    def __init__(self, capacity: str) -> None:
        super().__init__(capacity)
        self.answers: dict[str, Any] = {}

    def reserve(self, nbytes: int) -> int | None:
        return self.answers.pop("reserve") if "reserve" in self.answers else super().reserve(nbytes)

    def create(self, nbytes: int) -> int | None:
        return self.answers.pop("create") if "create" in self.answers else super().create(nbytes)


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


class Inside(bfc.SimulatedSubAllocator):
    """Does something inside one call of one kind."""

    kind = ""
    n = 0
    do: Callable[[], None] | None = None

    def __init__(self, capacity: str, after: bool) -> None:
        super().__init__(capacity)
        self.after = after

    def order(self, kind: str, n: int, do: Callable[[], None]) -> None:  # type: ignore[override]
        self.kind, self.n, self.do = kind, n, do

    def around(self, kind: str, call: Callable[..., Any], *arguments: Any) -> Any:
        self.n -= kind == self.kind
        do, now = self.do, kind == self.kind and self.n == 0
        if now and not self.after and do is not None:
            do()
        answer = call(*arguments)
        if now and self.after and do is not None:
            do()
        return answer


def add_calls() -> None:
    for kind in KINDS:

        def method(self: Inside, *arguments: Any, kind: str = kind) -> Any:
            base = getattr(bfc.SimulatedSubAllocator, kind)
            return self.around(kind, base, self, *arguments)

        setattr(Inside, kind, method)


add_calls()

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
