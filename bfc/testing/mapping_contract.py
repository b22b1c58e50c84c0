"""The contract of sub-allocators that map memory, a part of `SubAllocatorContract`."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from bfc.errors import SubAllocatorError
from bfc.suballocators.base import SubAllocator

ALIGNMENT = 256  # which any sub-allocator can give

Wrong = Callable[["Ground"], object]


class Ground:
    """Some reserved addresses of a sub-allocator, and pages. All of it is given back at the end.

    Parameters
    ----------
    source : SubAllocator
        The sub-allocator that is tested.
    slots : int, optional
        How many multiples of its granularity are reserved.

    Attributes
    ----------
    source : SubAllocator
        As given.
    address : int
        The first that is reserved.
    nbytes : int
        How many bytes are.
    """

    def __init__(self, source: SubAllocator, slots: int = 8) -> None:
        self.source = source
        self.size = source.mapping_granularity
        self.nbytes = slots * self.size
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
def ground(source: SubAllocator, slots: int = 8) -> Iterator[Ground]:
    """A `Ground` that is left at the end of the block, also after an error."""
    own = Ground(source, slots)
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


class MappingContract:
    """The tests of a sub-allocator that maps memory. One that does not must refuse to.

    `SubAllocatorContract` is one of these. The sub-allocator needs room for 8 times its
    `mapping_granularity`.
    """

    bounded: bool = True

    @pytest.fixture
    def mapping(self, source: SubAllocator) -> SubAllocator:
        """A pytest fixture: a sub-allocator that maps memory. If it does not, the test is skipped.

        Parameters
        ----------
        source : SubAllocator
            From the fixture of that name.

        Returns
        -------
        SubAllocator
            The same.
        """
        if not source.supports_virtual_memory:
            pytest.skip(f"the source maps no memory: {source.supports_virtual_memory}")
        return source

    def test_it_says_whether_it_maps_memory(self, source: SubAllocator) -> None:
        answer = source.supports_virtual_memory
        assert isinstance(bool(answer), bool)
        assert str(answer)
        size = source.mapping_granularity
        assert isinstance(size, int)
        if answer:
            assert size > 0
            assert size & (size - 1) == 0
        else:
            for call in VERBS.values():
                with pytest.raises(SubAllocatorError):
                    call(source)

    def test_pages_are_mapped_and_come_back(self, mapping: SubAllocator) -> None:
        with ground(mapping) as here:
            assert here.address > 0
            assert here.address % here.size == 0
            pages = [here.create() for _ in range(3)]
            here.map(1, *pages)
            here.allow(1, 3)
            if write(mapping, here.at(1), b"first"):
                write(mapping, here.at(4) - 4, b"last")
                assert read(mapping, here.at(1), 5) == b"first"
                assert read(mapping, here.at(4) - 4, 4) == b"last"
            mapping.wait(0)
            here.unmap(1, 3)
            for page in pages:
                here.release(page)

    def test_a_page_at_two_addresses_is_the_same_memory(self, mapping: SubAllocator) -> None:
        with ground(mapping) as here:
            first, second = here.create(), here.create()
            here.map(0, first, second)
            here.map(4, second, first)
            here.allow(0, 2)
            here.allow(4, 2)
            if not write(mapping, here.at(0), b"written"):
                return
            write(mapping, here.at(4), b"through")
            assert read(mapping, here.at(5), 7) == b"written"
            assert read(mapping, here.at(1), 7) == b"through"
            here.unmap(0, 2)
            assert read(mapping, here.at(5), 7) == b"written"

    def test_what_is_mapped_by_several_calls_is_unmapped_by_one(
        self, mapping: SubAllocator
    ) -> None:
        with ground(mapping) as here:
            pages = [here.create() for _ in range(3)]
            here.map(2, pages[2])
            here.map(0, pages[0], pages[1])
            here.allow(0, 3)
            here.unmap(0, 3)
            here.map(0, *reversed(pages))
            here.unmap(1)
            here.map(1, pages[0])

    def test_memory_goes_back_when_a_page_is_released_and_mapped_nowhere(
        self, mapping: SubAllocator
    ) -> None:
        before = getattr(mapping, "live_bytes", 0)

        def taken() -> int | None:
            live: int | None = getattr(mapping, "live_bytes", None)
            return None if live is None else live - before

        with ground(mapping) as here:
            page = here.create()
            here.map(0, page)
            here.map(2, page)
            here.release(page)
            here.unmap(0)
            assert taken() in (here.size, None)
            with pytest.raises(SubAllocatorError):
                mapping.release(page)
            here.unmap(2)
            assert taken() in (0, None)

    def test_pages_fill_the_source_until_one_comes_back(self, mapping: SubAllocator) -> None:
        if not self.bounded:
            pytest.skip("the source declares that it is not bounded")
        size = mapping.mapping_granularity
        pages = []
        while (page := mapping.create(size)) is not None:
            pages.append(page)
            assert len(pages) * size <= mapping.total_bytes
        assert len(set(pages)) == len(pages) > 0
        assert mapping.create(size) is None
        assert mapping.alloc(ALIGNMENT, mapping.total_bytes) is None
        mapping.release(pages.pop())
        again = mapping.create(size)
        assert again is not None
        for page in [*pages, again]:
            mapping.release(page)

    def test_reserved_addresses_cost_no_memory_and_overlap_nothing(
        self, mapping: SubAllocator
    ) -> None:
        nbytes = mapping.total_bytes // mapping.mapping_granularity * mapping.mapping_granularity
        places = [(mapping.reserve(nbytes), nbytes) for _ in range(3)]
        block = mapping.alloc(ALIGNMENT, 1000)
        assert block is not None
        taken = sorted((start, size) for start, size in [*places, block] if start is not None)
        assert len(taken) == 4
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(taken))
        mapping.free(*block)
        for start, size in places:
            assert start is not None
            mapping.unreserve(start, size)

    @pytest.mark.parametrize("wrong", WRONG_MAPPING)
    def test_wrong_use_of_mapping_is_refused_and_changes_nothing(
        self, mapping: SubAllocator, wrong: str
    ) -> None:
        with ground(mapping) as here:
            pages = [here.create() for _ in range(2)]
            large = here.create(2)
            here.map(3, *pages)
            mapping.map(here.at(5), [large])
            try:
                with pytest.raises(SubAllocatorError):
                    WRONG_MAPPING[wrong](here)
                mapping.set_access(here.at(3), 4 * here.size)
            finally:
                mapping.unmap(here.at(5), 2 * here.size)

    @pytest.mark.parametrize("after", [0, 1, 2])
    def test_a_map_that_is_refused_midway_has_mapped_nothing(
        self, mapping: SubAllocator, after: int
    ) -> None:
        with ground(mapping) as here:
            pages = [here.create() for _ in range(3)]
            unknown = [*pages[:after], 0x7FFF_FFFF_0001]
            with pytest.raises(SubAllocatorError):
                mapping.map(here.at(0), unknown)
            here.map(after, pages[0])
            with pytest.raises(SubAllocatorError):
                mapping.map(here.at(0), pages)
            here.unmap(after)
            here.map(0, *pages)
            here.allow(0, 3)

    def test_pages_take_turns_at_one_address(self, mapping: SubAllocator) -> None:
        with ground(mapping) as here:
            pages = [here.create() for _ in range(3)]
            for number, page in enumerate(pages):
                here.map(7, page)
                here.allow(7)
                can_see = write(mapping, here.at(7), b"page %d" % number)
                here.unmap(7)
            here.map(0, *pages)
            here.allow(0, 3)
            for number in range(3 if can_see else 0):
                assert read(mapping, here.at(number), 6) == b"page %d" % number
