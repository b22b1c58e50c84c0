"""A source of memory of your own: mapped files, for arrays larger than the machine's memory.

`fuzz_a_source.py` tests it against the contract of sources. Needs no GPU.

    $ python examples/mapped_file.py
    a row adds up to 2096128.0
    MappedFile(32.00 MiB live)
    MappedFile(0 B live)
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading

import numpy as np

import bfc
from bfc.units import format_bytes, parse_bytes


class MappedFile(bfc.SubAllocator):
    """Makes a temporary file for each region, and maps it."""

    device = bfc.Device("cpu")  # the host can read and write it

    def __init__(self, capacity: int | str) -> None:
        self.total_bytes = parse_bytes(capacity)
        self._live: dict[int, tuple[mmap.mmap, int]] = {}
        self._lock = threading.RLock()  # any thread may call, and so may a finaliser, inside a call

    def __repr__(self) -> str:
        return f"MappedFile({format_bytes(self.live_bytes)} live)"

    @property
    def live_bytes(self) -> int:
        return sum(nbytes for _, nbytes in list(self._live.values()))

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        with self._lock:
            if self.live_bytes + nbytes > self.total_bytes:
                return None  # no room: the allocator asks for less, or gives up
            try:
                mapped = self._map(nbytes + alignment)
            except OSError:
                return None  # the disk is full
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            address = -(-start // alignment) * alignment
            self._live[address] = mapped, nbytes
            return address, nbytes

    def _map(self, nbytes: int) -> mmap.mmap:
        with tempfile.TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)  # or a write would find the disk full
            return mmap.mmap(file.fileno(), nbytes)  # the mapping keeps the file

    def free(self, address: int, nbytes: int) -> None:
        with self._lock:
            mapped, received = self._live.get(address, (None, 0))
            if mapped is None or received != nbytes:
                raise bfc.SubAllocatorError(f"free({address:#x}, {nbytes}) is no block of {self!r}")
            del self._live[address]
            mapped.close()


if __name__ == "__main__":
    source = MappedFile("256 MiB")
    with bfc.BFCAllocator(source, allow_growth=True) as allocator:
        matrix = np.from_dlpack(allocator.allocate("32 MiB").view("float64", (2048, 2048)))
        matrix[:] = np.arange(2048)
        print("a row adds up to", matrix[0].sum())
        print(source)
        del matrix  # the allocator cannot close while a view is in use
    print(source)
