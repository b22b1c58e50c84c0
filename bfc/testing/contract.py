"""The contract of `bfc.SubAllocator`, as a class of tests to derive from."""

from __future__ import annotations

import ctypes
import itertools
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from bfc.allocators._allocator import Allocator
from bfc.devices import Device
from bfc.errors import SubAllocatorError
from bfc.policies._bfc import BFCAllocator
from bfc.policies._caching import CachingAllocator
from bfc.suballocators.base import SubAllocator
from bfc.testing.ground import ALIGNMENT, VERBS, WRONG_MAPPING, ground, read, write

KIB, MIB = 1 << 10, 1 << 20
SIZES = (1, 255, 256, 4095, 4096, 4097)

Block = tuple[int, int]


def take(source: SubAllocator, nbytes: int, alignment: int = ALIGNMENT) -> Block:
    """Takes a block. The test fails if there is none."""
    block = source.alloc(alignment, nbytes)
    assert block is not None, f"{source!r} has no room for {nbytes} bytes"
    return block


def give(source: SubAllocator, blocks: list[Block]) -> None:
    """Gives blocks back."""
    for block in blocks:
        source.free(*block)


def are_apart(blocks: list[Block]) -> bool:
    """Whether no two blocks overlap."""
    return all(a + size <= b for (a, size), (b, _) in itertools.pairwise(sorted(blocks)))


class SubAllocatorContract:
    """The contract of `bfc.SubAllocator`, as a class of tests to derive from.

    A sub-allocator passes with `alloc`, `free` and `total_bytes` alone. The attributes declare what
    it cannot do; the tests of that are skipped. If its `supports_virtual_memory` is true, that is
    tested, too: what is mapped, what is shared between two addresses, what must be refused. Give it
    a small `total_bytes`, between 8 and 64 MiB or so: the tests fill it, or as much of it as
    `allocation_limit` says.

    Attributes
    ----------
    bounded : bool
        False if `alloc` does not refuse when all is live, as for memory that can move from a GPU to
        the host.
    knows_its_blocks : bool
        False if `free` cannot tell whether a block is live, as C's `free`.
    threads : bool
        False if only one thread can use it.

    Notes
    -----
    If the sub-allocator has an attribute `live_bytes`, it is compared with what is handed out. The
    class needs pytest.

    Examples
    --------
    >>> import bfc
    >>> class TestMine(SubAllocatorContract):
    ...     def make(self):
    ...         return bfc.SimulatedSubAllocator("64 MiB")
    """

    bounded: bool = True
    knows_its_blocks: bool = True
    threads: bool = True

    def make(self) -> SubAllocator:
        """Make the sub-allocator that is tested: a subclass defines this.

        Returns
        -------
        SubAllocator
            A fresh one each time.

        Raises
        ------
        NotImplementedError
            If the subclass does not define it.
        """
        raise NotImplementedError("define make(self), which returns a fresh bfc.SubAllocator")

    @pytest.fixture
    def source(self) -> Iterator[SubAllocator]:
        """A pytest fixture: the sub-allocator of one test. Afterwards nothing may be live there.

        Yields
        ------
        SubAllocator
            From `make`.
        """
        source = self.make()
        yield source
        self.account(source, [])

    def account(self, source: SubAllocator, blocks: list[Block]) -> None:
        """Check that these blocks are what is live, if the sub-allocator counts it.

        Parameters
        ----------
        source : SubAllocator
            The sub-allocator that is tested.
        blocks : list of (int, int)
            Addresses and sizes in bytes.
        """
        live_bytes = getattr(source, "live_bytes", None)
        if live_bytes is not None:
            held = sum(received for _, received in blocks)
            assert live_bytes == held, f"{live_bytes} bytes are live, of which {held} are held"

    def odd_sizes(self, source: SubAllocator) -> list[int]:
        """Sizes at and around common boundaries.

        Parameters
        ----------
        source : SubAllocator
            The sub-allocator that is tested.

        Returns
        -------
        list of int
            In bytes; the largest is an eighth of what there is.
        """
        share = min(source.allocation_limit() // 8, 5 * MIB)
        return [*SIZES, share // 5, share // 2, share - 77]

    def needs_a_bound(self) -> None:
        """Skip the test if the sub-allocator has no bound."""
        if not self.bounded:
            pytest.skip("the source declares that it is not bounded")

    # -- alloc ------------------------------------------------------------------------------------

    def test_a_block_is_aligned_and_at_least_as_large_as_asked(self, source: SubAllocator) -> None:
        for nbytes in self.odd_sizes(source):
            address, received = take(source, nbytes)
            assert isinstance(address, int)
            assert isinstance(received, int)
            assert address > 0
            assert address % ALIGNMENT == 0
            assert address + received < 2**64
            assert received >= nbytes
            source.free(address, received)

    @pytest.mark.parametrize("alignment", [256, 512, 4096, 65536, 2 * MIB, 4 * MIB])
    def test_a_larger_alignment_is_kept_too(self, source: SubAllocator, alignment: int) -> None:
        blocks = [take(source, 1000, alignment) for _ in range(2)]
        assert all(address % alignment == 0 for address, _ in blocks)
        give(source, blocks)

    def test_blocks_do_not_overlap(self, source: SubAllocator) -> None:
        blocks = [take(source, nbytes) for nbytes in self.odd_sizes(source)]
        assert are_apart(blocks)
        give(source, blocks)

    def test_a_block_of_the_host_can_be_written_to_the_last_byte(
        self, source: SubAllocator
    ) -> None:
        if not source.host_accessible:
            pytest.skip("the source declares memory that the host cannot reach")
        for nbytes in self.odd_sizes(source):
            address, received = take(source, nbytes)
            ctypes.memset(address, 0xA5, received)
            assert ctypes.string_at(address + received - 1, 1) == b"\xa5"
            source.free(address, received)

    def test_a_refusal_is_none_and_can_be_repeated(self, source: SubAllocator) -> None:
        self.needs_a_bound()
        for nbytes in (source.total_bytes + 1, 2**62, 2**63 - 1) * 3:
            assert source.alloc(ALIGNMENT, nbytes) is None
        self.account(source, [])
        source.free(*take(source, MIB))

    def test_a_full_source_refuses_until_something_comes_back(self, source: SubAllocator) -> None:
        self.needs_a_bound()
        capacity = source.allocation_limit()
        nbytes = capacity // 16
        blocks = []
        while block := source.alloc(ALIGNMENT, nbytes):
            blocks.append(block)
            assert sum(received for _, received in blocks) <= capacity
        assert blocks
        assert source.alloc(ALIGNMENT, nbytes) is None
        source.free(*blocks.pop())
        blocks.append(take(source, nbytes))
        give(source, blocks)

    # -- free -------------------------------------------------------------------------------------

    def test_blocks_come_back_in_any_order(self, source: SubAllocator) -> None:
        blocks = [take(source, nbytes) for nbytes in self.odd_sizes(source)]
        for block in blocks[::2] + blocks[1::2]:
            self.account(source, blocks)
            source.free(*block)
            blocks.remove(block)

    def test_an_idle_block_may_go_back_without_waiting(self, source: SubAllocator) -> None:
        blocks = [take(source, nbytes) for nbytes in self.odd_sizes(source)]
        for address, received in blocks:
            source.free_idle(address, received)
        self.account(source, [])
        if self.knows_its_blocks:
            with pytest.raises(SubAllocatorError):
                source.free_idle(*blocks[0])

    def test_what_is_no_block_is_refused_and_changes_nothing(self, source: SubAllocator) -> None:
        self.needs_to_know()
        address, received = take(source, MIB)
        wrong = [
            (address + ALIGNMENT, received),
            (address, received - 1),
            (address, received + 1),
            (address, 0),
            (address, -received),
            (address - ALIGNMENT, received),
            (0, received),
            (0, 0),
            (2**63, 1),
            (address + received, received),
        ]
        for block in wrong:
            with pytest.raises(SubAllocatorError):
                source.free(*block)
            self.account(source, [(address, received)])
        source.free(address, received)

    def test_a_block_comes_back_once(self, source: SubAllocator) -> None:
        self.needs_to_know()
        block = take(source, MIB)
        source.free(*block)
        with pytest.raises(SubAllocatorError):
            source.free(*block)
        self.account(source, [])

    def test_a_free_of_two_neighbours_at_once_needs_coalescing(self, source: SubAllocator) -> None:
        first, second = sorted(take(source, MIB) for _ in range(2))
        joined = (first[0], first[1] + second[1])
        if source.supports_coalescing and first[0] + first[1] == second[0]:
            source.free(*joined)
            return
        if self.knows_its_blocks:
            with pytest.raises(SubAllocatorError):
                source.free(*joined)
        give(source, [first, second])

    def needs_to_know(self) -> None:
        """Skips the test where the source does not know its blocks."""
        if not self.knows_its_blocks:
            pytest.skip("the source declares that it does not know its blocks")

    # -- what it says about itself ----------------------------------------------------------------

    def test_it_says_what_it_has_and_where(self, source: SubAllocator) -> None:
        assert isinstance(source, SubAllocator)
        assert isinstance(source.total_bytes, int)
        assert 0 < source.allocation_limit() <= source.total_bytes
        free, total = source.memory_info()
        assert 0 <= free <= total
        assert isinstance(source.device, Device)
        assert isinstance(source.supports_coalescing, bool)
        assert repr(source)

    def test_without_work_queued_no_fence_is_pending(self, source: SubAllocator) -> None:
        for stream in (0,) if source.streams_are_handles else (0, 1, 2):
            fence = source.fence(stream)
            if fence is not None:
                fence.wait()
                assert fence.done()

    # -- in use -----------------------------------------------------------------------------------

    def test_threads_at_once_never_pass_the_total_or_overlap(self, source: SubAllocator) -> None:
        if not self.threads:
            pytest.skip("the source declares that it is for one thread")
        capacity = source.allocation_limit()
        for _ in range(10):
            blocks = take_from_threads(source, capacity // 128, most=32)
            self.account(source, blocks)
            give(source, blocks)
            assert are_apart(blocks)
            if self.bounded:
                assert sum(received for _, received in blocks) <= capacity

    @pytest.mark.parametrize(
        ("policy", "options"),
        [(BFCAllocator, {}), (BFCAllocator, {"allow_growth": True}), (CachingAllocator, {})],
        ids=["bfc", "bfc growing", "caching"],
    )
    def test_an_allocator_lives_on_it_and_gives_everything_back(
        self, source: SubAllocator, policy: type[Allocator], options: dict[str, Any]
    ) -> None:
        rng = random.Random(0)
        most = source.allocation_limit() // 1000
        with policy(source, **options) as allocator:  # type: ignore[call-arg]
            live: list[int] = []
            for _ in range(300):
                if live and rng.random() < 0.5:
                    allocator.deallocate_raw(live.pop(rng.randrange(len(live))))
                else:
                    live.append(allocator.allocate_raw(rng.randrange(1, most)))
            allocator.check()
            regions = allocator.snapshot().regions
            self.account(source, [(region.ptr, region.size) for region in regions])
        self.account(source, [])

    # -- memory that is mapped ---------------------------------------------------------------------

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


def take_from_threads(source: SubAllocator, nbytes: int, most: int) -> list[Block]:
    """The blocks that eight threads get at once, each at most `most`. Python switches between them
    far more often than usual."""
    blocks: list[Block] = []

    def work() -> None:
        for _ in range(most):
            block = source.alloc(ALIGNMENT, nbytes)
            if block is None:
                return
            blocks.append(block)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    return blocks
