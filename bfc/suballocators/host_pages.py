"""Mapped host memory: pages of one sparse file in memory, mapped to reserved addresses.

Only for Linux: memfd_create, and mmap at a fixed address, which Python's `mmap` does not offer.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable
from typing import Any

from bfc.devices import Availability
from bfc.errors import SubAllocatorError
from bfc.suballocators._books import MappingBooks, Page, Run, still_mapped
from bfc.units import format_bytes

GRANULARITY = 2 << 20
PROT_NONE, READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000
KEEP_SIZE, PUNCH_HOLE = 1, 2
FAILED = ctypes.c_void_p(-1).value
#: Errors for "the host has no more memory" or "the process has too many mappings"
#: (vm.max_map_count).
FULL = (errno.ENOMEM, errno.EAGAIN)


@functools.cache
def availability() -> Availability:
    """Whether this system can map memory as it is done here, by trying."""
    if not hasattr(os, "memfd_create"):
        return Availability(False, "mapping host memory needs memfd_create, which is Linux's")
    try:
        os.close(os.memfd_create("bfc"))
        System()
    except (OSError, AttributeError) as error:
        return Availability(False, f"this system does not map memory as bfc does: {error}")
    return Availability(True, "host memory is mapped from a file in memory")


class System:
    """The calls of the operating system. Each raises OSError."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._mmap = library.mmap
        self._mmap.argtypes = [pointer, size, number, number, number, ctypes.c_long]
        self._mmap.restype = pointer
        self._munmap = library.munmap
        self._munmap.argtypes = [pointer, size]
        self._mprotect = library.mprotect
        self._mprotect.argtypes = [pointer, size, number]
        self._fallocate = library.fallocate
        self._fallocate.argtypes = [number, number, ctypes.c_long, ctypes.c_long]

    def reserve(self, nbytes: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        return self._map(None, nbytes, flags, -1, 0)

    def hide(self, address: int, nbytes: int) -> None:
        """Unmap memory from addresses, which stay reserved."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED
        self._map(address, nbytes, flags, -1, 0)

    def map(self, address: int, nbytes: int, file: int, offset: int) -> None:
        self._map(address, nbytes, mmap.MAP_SHARED | MAP_NORESERVE | MAP_FIXED, file, offset)

    def _map(self, address: int | None, nbytes: int, flags: int, file: int, offset: int) -> int:
        place = self._call(self._mmap, address, nbytes, PROT_NONE, flags, file, offset)
        if place is None or place == FAILED:
            raise self._error()
        return int(place)

    def unmap(self, address: int, nbytes: int) -> None:
        if self._call(self._munmap, address, nbytes):
            raise self._error()

    def protect(self, address: int, nbytes: int, access: int) -> None:
        if self._call(self._mprotect, address, nbytes, access):
            raise self._error()

    def punch(self, file: int, offset: int, nbytes: int) -> None:
        """Give back the memory of a part of a file."""
        if self._call(self._fallocate, file, KEEP_SIZE | PUNCH_HOLE, offset, nbytes):
            raise self._error()

    def _call(self, function: Callable[..., Any], *arguments: int | None) -> Any:
        try:
            return function(*arguments)
        except ctypes.ArgumentError as error:  # ctypes turns a MemoryError into this
            raise MemoryError(str(error)) from None

    def _error(self) -> OSError:
        number = ctypes.get_errno()
        return OSError(number, os.strerror(number))


class File:
    """A sparse file in memory. A forked child maps the pages of its parent, but makes its own."""

    number = -1

    def __init__(self) -> None:
        self.number = os.memfd_create("bfc")
        self.process = os.getpid()
        self.end = 0

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.number >= 0:
            close(self.number)  # `os` may be None at the end of Python

    def grow(self, nbytes: int) -> int:
        """Make a file longer. Returns the offset of the new bytes."""
        os.ftruncate(self.number, self.end + nbytes)
        offset, self.end = self.end, self.end + nbytes
        return offset


class HostPages:
    """Reserved addresses and pages of one `HostSubAllocator`, which holds a lock during every call.

    It returns and raises what the contract says. `create` checks no limit.
    """

    def __init__(self) -> None:
        self.books = MappingBooks(GRANULARITY)
        self.system = System()
        self._file: File | None = None
        self._places: dict[int, tuple[File, int, Page]] = {}  # where the memory of each page is
        self._made = 0
        self._has_waste = False  # whether memory of released pages must still be given back

    def __del__(self) -> None:
        for start, nbytes in self.books.reservations.items():
            try:
                self.system.unmap(start, nbytes)
            except OSError:
                pass  # the addresses stay reserved, and nobody is left to report it to

    def reserve(self, nbytes: int) -> int | None:
        self.books.check_size(nbytes, "reserve")
        try:
            start = self.system.reserve(nbytes + GRANULARITY)
        except OSError as error:
            if error.errno in FULL:
                return None
            raise failure(f"reserving {format_bytes(nbytes)} of addresses", error) from error
        address = (start + GRANULARITY - 1) // GRANULARITY * GRANULARITY
        try:
            if address > start:
                self.system.unmap(start, address - start)
            self.system.unmap(address + nbytes, start + GRANULARITY - address)
            self.books.reserved(address, nbytes)
        except BaseException:
            self.system.unmap(start, nbytes + GRANULARITY)
            raise
        return address

    def unreserve(self, address: int, nbytes: int) -> None:
        self.books.check_unreserve(address, nbytes)
        try:
            self.system.unmap(address, nbytes)
        except OSError as error:
            raise failure(f"unreserve({address:#x}, {nbytes})", error) from error
        self.books.unreserved(address)

    def create(self, nbytes: int) -> int:
        try:
            if self._file is None or self._file.process != os.getpid():
                self._file = File()
            file, offset = self._file, self._file.grow(nbytes)
        except OSError as error:
            raise failure(f"a page of {format_bytes(nbytes)}", error) from error
        page = self._made + 1
        try:
            self.books.created(page, nbytes)
            self._places[page] = file, offset, self.books.check_release(page)
            self._made = page
            return page
        except BaseException:
            self.forget(page)
            raise

    def forget(self, number: int) -> None:
        """Undo as much of `create` as was done."""
        page = self.books.page(number)
        if page is not None:
            self.books.released(page)
        self._places.pop(number, None)

    def release(self, number: int) -> None:
        pages = [self.books.check_release(number)]
        self.books.released(pages[0])
        if pages[0].is_gone:
            self._give_back(pages)

    def _give_back(self, pages: list[Page]) -> None:
        """Give the memory of pages to the system: now, or with later pages if it refuses."""
        try:
            if self._has_waste:
                pages = [it for _, _, it in self._places.values() if it.is_gone]
            self._has_waste = True
            for page in pages:
                file, offset, _ = self._places[page.number]
                if file.process == os.getpid():
                    self.system.punch(file.number, offset, page.nbytes)
                del self._places[page.number]
            self._has_waste = False
        except (OSError, MemoryError):
            pass

    def map(self, plan: Run) -> None:
        done, address = 0, plan.start
        try:
            for it in plan.mappings:
                file, offset, _ = self._places[it.page.number]
                self.system.map(it.start, it.page.nbytes, file.number, offset)
                done += 1
            self.books.mapped(plan)
        except OSError as error:
            worse = failure(f"map({address:#x}): page {plan.mappings[done].page.number}", error)
            self._undo_map(plan, done, worse)
            raise worse from error
        except BaseException:
            self.system.hide(address, plan.nbytes)
            raise

    def _undo_map(self, plan: Run, done: int, error: SubAllocatorError) -> None:
        """Also reserve the place of the page that could not be mapped: it may be a hole now."""
        address, failed = plan.start, plan.mappings[done]
        try:
            self.system.hide(address, failed.end - address)
        except OSError as undoing:
            if done:
                self.books.mapped(plan, done)
                still_mapped(error, undoing, [(address, failed.start - address)])

    def set_access(self, address: int, nbytes: int) -> None:
        run = self.books.find_run(address, nbytes, "set_access")
        try:
            self.system.protect(address, nbytes, READ_WRITE)
            self.books.accessible(run)
        except OSError as error:
            self._put_access_back(run)
            raise failure(f"set_access({address:#x}, {nbytes})", error) from error
        except BaseException:
            self._put_access_back(run)
            raise

    def _put_access_back(self, run: Run) -> None:
        self.books.put_access_back(run)
        for it in run.mappings:
            if not it.has_access:
                try:
                    self.system.protect(it.start, it.page.nbytes, PROT_NONE)
                except OSError:
                    pass  # it only stays accessible: nothing is lost

    def unmap(self, address: int, nbytes: int) -> None:
        gone = None
        try:
            run = self.books.find_run(address, nbytes, "unmap")
            gone = self.books.unmapped(run)
            self.system.hide(address, nbytes)
        except OSError as error:
            if gone is not None:
                self.books.restored(run)
            raise failure(f"unmap({address:#x}, {nbytes})", error) from error
        except MemoryError:
            if gone is None:
                raise
            self.system.hide(address, nbytes)  # it may have been done already; twice does no harm
        except BaseException:
            if gone is not None:
                self.system.hide(address, nbytes)
            raise
        if gone:
            self._give_back(gone)


def failure(what: str, error: OSError) -> SubAllocatorError:
    """The error for a failed system call, in words."""
    hint = ""
    if error.errno in FULL:
        hint = "\n  try: larger pages, or a higher vm.max_map_count, which bounds the mappings"
    return SubAllocatorError(f"{what} failed: {error.strerror}{hint}")
