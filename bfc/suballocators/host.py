"""Real host memory, straight from the operating system."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import SupportsIndex

from bfc.devices import Device
from bfc.errors import SubAllocatorError
from bfc.interpreter._forks import ForkSafeLock
from bfc.suballocators.base import SubAllocator
from bfc.units import format_bytes, parse_bytes

HUGE_PAGE = 2 << 20


class HostSubAllocator(SubAllocator):
    """Pageable host memory: anonymous mappings, on huge pages if the system grants them.

    Parameters
    ----------
    capacity : int or str, optional
        How many bytes can be live at once, as a number or a text such as "4 GiB". None is the
        machine's physical memory.

    Raises
    ------
    ValueError
        If `capacity` is malformed, negative or too large.

    Notes
    -----
    Pages become resident when they are first written, and return to the system with `free`.

    Examples
    --------
    >>> host = HostSubAllocator("64 MiB")
    >>> address, received = host.alloc(256, 1 << 20)
    >>> host.free(address, received)
    """

    device = Device("cpu")

    def __init__(self, capacity: SupportsIndex | str | None = None) -> None:
        self.total_bytes = _physical_memory() if capacity is None else parse_bytes(capacity)
        self.live_bytes = 0
        self._lock = ForkSafeLock()
        self._mappings: dict[int, tuple[mmap.mmap, int]] = {}

    def __repr__(self) -> str:
        total, live = format_bytes(self.total_bytes), format_bytes(self.live_bytes)
        return f"HostSubAllocator({total}, {live} live)"

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        if self.live_bytes + nbytes > self.total_bytes:
            return None
        step = max(alignment, HUGE_PAGE if nbytes >= HUGE_PAGE else mmap.PAGESIZE)
        mapping = _map(nbytes + step)
        if mapping is None:
            return None
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        address = (start + step - 1) // step * step
        block = address, nbytes
        try:
            with self._lock:
                is_kept = self._keep(address, mapping, nbytes)
            return block if is_kept else None
        except BaseException:
            if self._mappings.get(address, (None,))[0] is mapping:
                HostSubAllocator.free(self, *block)
            raise

    def _keep(self, address: int, mapping: mmap.mmap, nbytes: int) -> bool:
        before = self.live_bytes
        if before + nbytes > self.total_bytes:
            return False  # other threads were faster
        try:
            self._mappings[address] = mapping, nbytes
            self.live_bytes += nbytes
            return True
        except BaseException:
            self._mappings.pop(address, None)
            self.live_bytes = before
            raise

    def free(self, address: int, nbytes: int) -> None:
        with self._lock:
            mapping, received = self._mappings.get(address, (None, 0))
            if mapping is None or received != nbytes:
                raise SubAllocatorError(f"free({address:#x}, {nbytes}) is not a live block")
            left = self.live_bytes - nbytes
            del self._mappings[address]
            self.live_bytes = left
        mapping.close()


def _map(nbytes: int) -> mmap.mmap | None:
    """An anonymous mapping, or None where the system has no room for it."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=_flags())
    except (OverflowError, ValueError):
        return None
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.EAGAIN):
            return None
        raise SubAllocatorError(f"mmap of {format_bytes(nbytes)} failed: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= HUGE_PAGE:
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages: only slower
    return mapping


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _flags() -> int:
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
