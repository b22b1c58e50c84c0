"""Allocators whose memory can sleep, on host memory whose calls can be made to fail."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable, Sequence

import bfc

MIB = 1 << 20
#: Calls of a source by which tags fall asleep and wake.
KINDS = ("wait", "copy", "unmap", "release", "create", "map", "set_access")
Make = Callable[[bfc.SubAllocator], bfc.Allocator]


class Broken(bfc.SubAllocatorError):
    """As ordered."""


class FailingHost(bfc.HostSubAllocator):
    """Host memory, of which the n-th call of a kind from now on fails, before or after its work."""

    def __init__(self, capacity: str = "2 GiB") -> None:
        super().__init__(capacity)
        self.left: dict[str, list[int]] = {}
        self.failed: list[str] = []

    def fail_at(self, kind: str, *numbers: int) -> None:
        self.left[kind] = list(numbers)

    def recover(self) -> None:
        self.left.clear()
        self.failed.clear()

    def _count(self, kind: str) -> None:
        numbers = [number - 1 for number in self.left.get(kind, ())]
        self.left[kind] = [number for number in numbers if number > 0]
        if 0 in numbers:
            self.failed.append(kind)
            raise Broken(f"{kind} fails, as ordered")

    def wait(self, stream: int) -> None:
        self._count("wait")

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._count("copy")
        super().copy(destination, source, nbytes, stream)

    def unmap(self, address: int, nbytes: int) -> None:
        self._count("unmap")
        super().unmap(address, nbytes)

    def release(self, page: int) -> None:
        self._count("release")
        super().release(page)

    def create(self, nbytes: int) -> int | None:
        self._count("create")
        return super().create(nbytes)

    def map(self, address: int, pages: Sequence[int]) -> None:
        self._count("map")
        super().map(address, pages)

    def set_access(self, address: int, nbytes: int) -> None:
        self._count("set_access")
        super().set_access(address, nbytes)


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
