"""Allocators whose memory can sleep, on host memory whose calls can be made to fail."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20
#: Calls of a source by which tags fall asleep and wake.
KINDS = ("wait", "copy", "unmap", "release", "create", "map", "set_access")
Make = Callable[[bfc.SubAllocator], bfc.Allocator]


class Broken(bfc.SubAllocatorError):
    """As ordered."""


def failing_host(capacity: str = "2 GiB") -> Misbehaving:
    """Host memory whose calls can be made to fail. `failed` has their kinds."""
    host = Misbehaving(bfc.HostSubAllocator(capacity))
    host.failed = []
    return host


def fail_at(host: Misbehaving, kind: str, *numbers: int) -> None:
    """The calls with these numbers fail, and none that was told to before."""

    def fail() -> None:
        host.failed.append(kind)
        raise Broken(f"{kind} fails, as ordered")

    host.off(kind)
    host.on(kind, numbers, first=fail)


def recover(host: Misbehaving) -> None:
    host.off()
    host.failed.clear()


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that no other seed has."""
    return random.Random(seed).randbytes(min(nbytes, 4096))


class Block:
    """An allocation with a pattern at its beginning, its end, and where pages and pieces meet."""

    def __init__(self, allocator: bfc.Allocator, nbytes: int, seed: int, stream: int = 0) -> None:
        self.buffer = allocator.allocate(nbytes, stream)
        self.ptr, self.nbytes, self.seed = self.buffer.ptr, nbytes, seed
        self.mark = pattern(seed, nbytes)
        self.write()

    @property
    def places(self) -> Iterable[int]:
        size = len(self.mark)
        yield 0
        for border in range(2 * MIB - self.ptr % (2 * MIB), self.nbytes, 2 * MIB):
            if 2 * size <= border and border + 2 * size <= self.nbytes:
                yield border - size // 2
        if self.nbytes >= 2 * size:
            yield self.nbytes - size

    def write(self) -> None:
        for place in self.places:
            ctypes.memmove(self.ptr + place, self.mark, len(self.mark))

    def check(self) -> None:
        assert self.buffer.ptr == self.ptr
        for place in self.places:
            assert ctypes.string_at(self.ptr + place, len(self.mark)) == self.mark
