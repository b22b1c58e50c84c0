"""Reserved addresses and pages, for the tests of `SubAllocatorContract` that map memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bfc.errors import SubAllocatorError
from bfc.suballocators.base import SubAllocator

ALIGNMENT = 256  # which any sub-allocator can give
SLOTS = 8

Wrong = Callable[["Ground"], object]


class Ground:
    """Some reserved addresses of a sub-allocator, in SLOTS of its granularity, and pages. All of it
    is given back at the end."""

    def __init__(self, source: SubAllocator) -> None:
        self.source = source
        self.size = source.mapping_granularity
        self.nbytes = SLOTS * self.size
        address = source.reserve(self.nbytes)
        assert address is not None, f"{source!r} has no {self.nbytes} bytes of addresses"
        self.address = address
        self._pages: set[int] = set()
        self._mapped: dict[int, int] = {}

    def at(self, slot: int) -> int:
        """The address of a slot."""
        return self.address + slot * self.size

    def create(self, slots: int = 1) -> int:
        """Creates a page, and fails the test if there is no room for it."""
        page = self.source.create(slots * self.size)
        assert page is not None, f"{self.source!r} has no room for a page of {slots * self.size}"
        assert isinstance(page, int)
        self._pages.add(page)
        return page

    def map(self, slot: int, *pages: int) -> None:
        """Map pages of one slot each."""
        self.source.map(self.at(slot), pages)
        self._mapped.update((self.at(slot + n), self.size) for n in range(len(pages)))

    def allow(self, slot: int, slots: int = 1) -> None:
        """Set access."""
        self.source.set_access(self.at(slot), slots * self.size)

    def unmap(self, slot: int, slots: int = 1) -> None:
        """Unmap pages of one slot each."""
        self.source.unmap(self.at(slot), slots * self.size)
        for n in range(slots):
            del self._mapped[self.at(slot + n)]

    def release(self, page: int) -> None:
        """Release a page."""
        self.source.release(page)
        self._pages.remove(page)

    def leave(self) -> None:
        """Give everything back."""
        for address, nbytes in self._mapped.items():
            self.source.unmap(address, nbytes)
        for page in self._pages:
            self.source.release(page)
        self.source.unreserve(self.address, self.nbytes)


@contextmanager
def ground(source: SubAllocator) -> Iterator[Ground]:
    """A `Ground` that is left at the end of the block, also after an error."""
    own = Ground(source)
    try:
        yield own
    finally:
        own.leave()


def write(source: SubAllocator, address: int, data: bytes) -> bool:
    """Write to memory of a sub-allocator, if it can copy."""
    held = ctypes.create_string_buffer(data, len(data))
    try:
        source.copy(address, ctypes.addressof(held), len(data), 0)
    except SubAllocatorError:
        if source.device.kind == "simulated":
            return False
        raise
    return True


def read(source: SubAllocator, address: int, nbytes: int) -> bytes:
    """Read from memory of a sub-allocator."""
    held = ctypes.create_string_buffer(nbytes)
    source.copy(ctypes.addressof(held), address, nbytes, 0)
    return held.raw


#: What must be refused where slots 3 and 4 are mapped with a page each, and slots 5 and 6 with one
#: of two slots.
WRONG_MAPPING: dict[str, Wrong] = {
    "reserve nothing": lambda g: g.source.reserve(0),
    "reserve an odd size": lambda g: g.source.reserve(g.size + g.size // 2),
    "create nothing": lambda g: g.source.create(0),
    "create an odd size": lambda g: g.source.create(g.size // 2),
    "release no page": lambda g: g.source.release(0x7FFF_FFFF_0001),
    "map nothing": lambda g: g.source.map(g.at(0), []),
    "map an unknown page": lambda g: g.source.map(g.at(0), [0x7FFF_FFFF_0001]),
    "map over a page": lambda g: g.source.map(g.at(3), [g.create()]),
    "map into a page": lambda g: g.source.map(g.at(6), [g.create()]),
    "map at an odd address": lambda g: g.source.map(g.at(0) + g.size // 2, [g.create()]),
    "map past the end": lambda g: g.source.map(g.at(7), [g.create(2)]),
    "set access to nothing": lambda g: g.source.set_access(g.at(0), g.size),
    "set access past a page": lambda g: g.source.set_access(g.at(6), 2 * g.size),
    "unmap what is not mapped": lambda g: g.source.unmap(g.at(0), g.size),
    "unmap no bytes": lambda g: g.source.unmap(g.at(3), 0),
    "unmap a part of a page": lambda g: g.source.unmap(g.at(5), g.size),
    "unmap the end of a page": lambda g: g.source.unmap(g.at(6), g.size),
    "unmap more than is mapped": lambda g: g.source.unmap(g.at(3), 5 * g.size),
    "unreserve with pages in it": lambda g: g.source.unreserve(g.address, g.nbytes),
    "unreserve a part": lambda g: g.source.unreserve(g.address, g.size),
}

#: The verbs that a source without virtual memory must refuse.
VERBS: dict[str, Callable[[SubAllocator], object]] = {
    "reserve": lambda source: source.reserve(2 << 20),
    "unreserve": lambda source: source.unreserve(1 << 40, 2 << 20),
    "create": lambda source: source.create(2 << 20),
    "release": lambda source: source.release(1),
    "map": lambda source: source.map(1 << 40, [1]),
    "set_access": lambda source: source.set_access(1 << 40, 2 << 20),
    "unmap": lambda source: source.unmap(1 << 40, 2 << 20),
}
