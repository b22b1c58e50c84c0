"""Real host memory, straight from the operating system."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from typing import SupportsIndex

from bfc.devices import Availability, Device
from bfc.errors import SubAllocatorError
from bfc.interpreter._process import ForkSafeLock
from bfc.suballocators import host_pages
from bfc.suballocators.base import SubAllocator
from bfc.units import format_bytes, parse_bytes

HUGE_PAGE = 2 << 20


class HostSubAllocator(SubAllocator):
    """Pageable host memory: anonymous mappings, on huge pages if the system grants them.

    Parameters
    ----------
    capacity : int or str, optional
        How many bytes can be live at once, as a number or a string such as "4 GiB". None is
        the machine's physical memory.

    Raises
    ------
    ValueError
        If `capacity` is malformed, negative or too large.

    Notes
    -----
    Pages become resident when they are first written, and return to the system with `free`.

    On Linux it maps memory, too (`supports_virtual_memory`): pages of a file in memory, which
    `mmap` puts at reserved addresses, so that one page can be read and written at several. A forked
    child sees what its parent writes there, and the other way round, which is not so for blocks.

    Examples
    --------
    >>> host = HostSubAllocator("64 MiB")
    >>> address, received = host.alloc(256, 1 << 20)
    >>> host.free(address, received)
    """

    device = Device("cpu")
    mapping_granularity = host_pages.GRANULARITY

    def __init__(self, capacity: SupportsIndex | str | None = None) -> None:
        self.total_bytes = _physical_memory() if capacity is None else parse_bytes(capacity)
        self._block_bytes = 0
        self._lock = ForkSafeLock()
        self._mappings: dict[int, tuple[mmap.mmap, int]] = {}
        self._own_pages: host_pages.HostPages | None = None

    @property
    def live_bytes(self) -> int:
        """The bytes of all blocks and pages that are live.

        A page is live until it is released and mapped nowhere.
        """
        pages = self._own_pages
        return self._block_bytes + (0 if pages is None else pages.books.page_bytes)

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
        return self._own(mapping, (start + step - 1) // step * step, nbytes)

    def _own(self, mapping: mmap.mmap, address: int, nbytes: int) -> tuple[int, int] | None:
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
        before = self._block_bytes
        if self.live_bytes + nbytes > self.total_bytes:
            return False  # other threads were faster
        try:
            self._mappings[address] = mapping, nbytes
            self._block_bytes += nbytes
            return True
        except BaseException:
            self._mappings.pop(address, None)
            self._block_bytes = before
            raise

    def free(self, address: int, nbytes: int) -> None:
        with self._lock:
            mapping, received = self._mappings.get(address, (None, 0))
            if mapping is None or received != nbytes:
                raise SubAllocatorError(f"free({address:#x}, {nbytes}) is not a live block")
            left = self._block_bytes - nbytes
            del self._mappings[address]
            self._block_bytes = left
        mapping.close()

    # -- memory that is mapped --------------------------------------------------------------------

    @property
    def supports_virtual_memory(self) -> Availability:  # type: ignore[override]
        """True on Linux, if the process may create files in memory. Printed, it says why not."""
        return host_pages.availability()

    @property
    def _pages(self) -> host_pages.HostPages:
        if self._own_pages is None:
            if not self.supports_virtual_memory:
                self._refuse_to_map()
            self._own_pages = host_pages.HostPages()
        return self._own_pages

    def reserve(self, nbytes: int) -> int | None:
        with self._lock:
            return self._pages.reserve(nbytes)

    def unreserve(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._pages.unreserve(address, nbytes)

    def create(self, nbytes: int) -> int | None:
        page = None
        try:
            with self._lock:
                self._pages.books.check_size(nbytes, "create")
                if self.live_bytes + nbytes <= self.total_bytes:
                    page = self._pages.create(nbytes)
            return page
        except BaseException:
            if page is not None:
                self._pages.forget(page)
            raise

    def release(self, page: int) -> None:
        with self._lock:
            self._pages.release(page)

    def map(self, address: int, pages: Sequence[int]) -> None:
        with self._lock:
            self._pages.map(self._pages.books.plan_map(address, pages))

    def set_access(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._pages.set_access(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        with self._lock:
            self._pages.unmap(address, nbytes)


def _map(nbytes: int) -> mmap.mmap | None:
    """An anonymous mapping, or None if the system has no room for it."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=_flags())
    except (OverflowError, ValueError):
        return None
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.EAGAIN):
            return None
        raise SubAllocatorError(f"mmap of {format_bytes(nbytes)} failed: {error}") from error
    ask_for_huge_pages(mapping)
    return mapping


def ask_for_huge_pages(mapping: mmap.mmap) -> None:
    """Asks the system for them; without them it is only slower."""
    if hasattr(mmap, "MADV_HUGEPAGE") and len(mapping) >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # of a kernel that has none
            mapping.madvise(mmap.MADV_HUGEPAGE)


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _flags() -> int:
    return mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
