"""The contract of sources, `bfc.testing.SubAllocatorContract`, where no device is needed."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from plain_contract import PlainContract

import bfc
from bfc.testing import IntegerSource, Misbehaving, SubAllocatorContract
from bfc.testing.contract import give, take

MIB = 1 << 20
CAPACITY = 64 * MIB
#: The first address of a simulated device.
BLOCKS = 1 << 40
ODD_SIZES = [1, 255, 256, 4095, 4096, 4097, MIB, 2 * MIB, 2 * MIB + 1, 5 * MIB + 77]


class Mapped(bfc.SubAllocator):
    """As little as a correct source can be: what the contract asks for, over mmap."""

    total_bytes = CAPACITY
    device = bfc.Device("cpu")

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[mmap.mmap, int]] = {}
        self._lock = threading.Lock()

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        with self._lock:
            if nbytes + sum(size for _, size in self._blocks.values()) > self.total_bytes:
                return None
            mapped = mmap.mmap(-1, nbytes + alignment)
            start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
            address = -(-start // alignment) * alignment
            self._blocks[address] = mapped, nbytes
            return address, nbytes

    def free(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self._blocks.get(address, (None, None))[1] != nbytes:
                raise bfc.SubAllocatorError("no such block")
            self._blocks.pop(address)[0].close()


class Counted(bfc.SubAllocator):
    """The same of integers alone."""

    total_bytes = CAPACITY

    def __init__(self) -> None:
        self._next = 1 << 20
        self._blocks: dict[int, int] = {}
        self._lock = threading.Lock()

    def alloc(self, alignment: int, nbytes: int) -> tuple[int, int] | None:
        with self._lock:
            if sum(self._blocks.values()) + nbytes > self.total_bytes:
                return None
            address = -(-self._next // alignment) * alignment
            self._next = address + nbytes
            self._blocks[address] = nbytes
            return address, nbytes

    def free(self, address: int, nbytes: int) -> None:
        with self._lock:
            if self._blocks.get(address) != nbytes:
                raise bfc.SubAllocatorError("no such block")
            del self._blocks[address]


class TestMinimalOfPages(PlainContract):
    def make(self) -> bfc.SubAllocator:
        return Mapped()


class TestMinimalOfIntegers(PlainContract):
    def make(self) -> bfc.SubAllocator:
        return Counted()


FACTORIES: dict[str, Callable[[], bfc.SubAllocator]] = {
    "simulated": lambda: bfc.SimulatedSubAllocator(CAPACITY),
    "simulated, text": lambda: bfc.SimulatedSubAllocator("64 MiB"),
    "simulated, gaps": lambda: bfc.SimulatedSubAllocator(CAPACITY, gap=300, alignment=1),
    "simulated, odd base": lambda: bfc.SimulatedSubAllocator(CAPACITY, base=12345, alignment=64),
    "simulated, joining": lambda: bfc.SimulatedSubAllocator(
        CAPACITY, supports_coalescing=True, alignment=256
    ),
    "simulated, small blocks": lambda: bfc.SimulatedSubAllocator(CAPACITY, max_bytes="6 MiB"),
    "simulated, reusing": lambda: bfc.SimulatedSubAllocator(CAPACITY, gap=300, reuse=True),
    "simulated, falling": lambda: bfc.SimulatedSubAllocator(CAPACITY, chunk="32 MiB"),
    "host": lambda: bfc.HostSubAllocator(CAPACITY),
    "host, text": lambda: bfc.HostSubAllocator("64 MiB"),
    "behaving": lambda: Misbehaving(bfc.SimulatedSubAllocator(CAPACITY)),
}


class TestSources(SubAllocatorContract):
    @pytest.fixture(autouse=True, params=FACTORIES)
    def _chosen(self, request: pytest.FixtureRequest) -> None:
        self.factory = FACTORIES[request.param]

    def make(self) -> bfc.SubAllocator:
        return self.factory()


class TestIntegers(PlainContract):
    threads = False

    @pytest.fixture(autouse=True, params=["rising", "reusing", "generous", "joining"])
    def _chosen(self, request: pytest.FixtureRequest) -> None:
        self.options = {
            "rising": {"gap": 300},
            "reusing": {"reuses": True, "gap": 4096},
            "generous": {"granule": 4096},
            "joining": {"supports_coalescing": True, "reuses": True},
        }[request.param]

    def make(self) -> bfc.SubAllocator:
        return IntegerSource(CAPACITY, **self.options)


@pytest.mark.parametrize("kind", [bfc.SimulatedSubAllocator, bfc.HostSubAllocator])
def test_our_sources_say_their_size(kind) -> None:
    source = kind("64 MiB")
    assert source.total_bytes == source.allocation_limit() == CAPACITY
    assert "64.00 MiB" in repr(source)
    assert len(repr(source)) < 80


def scripted(call: str, **order: object) -> Misbehaving:
    """A device that is right but for one call."""
    source = Misbehaving(CAPACITY)
    source.on(call, **order)
    return source


def overlapping() -> Misbehaving:
    """Hands the second block out where the first lies."""
    return scripted("alloc", instead=lambda ask, alignment, nbytes: (BLOCKS, nbytes))


def lossy() -> Misbehaving:
    """Takes back what was never given."""
    return scripted("free", returns=None)


def reserves_in_blocks(capacity: int) -> Misbehaving:
    """Reserves addresses where its blocks are."""
    return scripted("reserve", returns=BLOCKS)


def maps_until_it_fails(capacity: int) -> Misbehaving:
    """Maps page by page, and leaves what it has mapped where one cannot be."""
    source = Misbehaving(capacity)

    def one_by_one(ask: Callable[..., None], address: int, pages: Sequence[int]) -> None:
        for page in pages:
            ask(address, [page])
            address += source.inner.pages[page]

    source.on("map", instead=one_by_one)
    return source


class ForgetsMappings(bfc.SimulatedSubAllocator):
    """Takes a released page for free memory, though it is mapped."""

    forgotten = 0

    def release(self, page: int) -> None:
        nbytes = self.pages[page]
        super().release(page)
        self.forgotten += nbytes

    @property
    def live_bytes(self) -> int:
        return super().live_bytes - self.forgotten


def maps_over(capacity: int) -> Misbehaving:
    """Unmaps whatever is in the way."""
    source = Misbehaving(capacity)

    def make_room(ask: Callable[..., None], address: int, pages: Sequence[int]) -> None:
        device = source.inner
        end = address + sum(device.pages.get(page, 0) for page in pages)
        for at, page in device.mappings.items():
            if address <= at < end:
                source.unmap(at, device.pages[page])
        ask(address, pages)

    source.on("map", instead=make_room)
    return source


def copies_pages(capacity: int) -> Misbehaving:
    """Puts a page of its own behind each address."""
    source = Misbehaving(bfc.HostSubAllocator(capacity))
    sizes: dict[int, int] = {}

    def create(ask: Callable[..., int | None], nbytes: int) -> int | None:
        page = ask(nbytes)
        if page is not None:
            sizes[page] = nbytes
        return page

    def copy(ask: Callable[..., None], address: int, pages: Sequence[int]) -> None:
        for page in pages:
            own = source.inner.create(sizes[page])
            ask(address, [own])
            source.inner.release(own)
            address += sizes[page]

    source.on("create", instead=create)
    source.on("map", instead=copy)
    return source


@pytest.mark.parametrize(
    ("source", "test", "argument"),
    [
        (maps_until_it_fails, "a_map_that_is_refused_midway_has_mapped_nothing", 2),
        (ForgetsMappings, "memory_goes_back_when_a_page_is_released_and_mapped_nowhere", None),
        (maps_over, "wrong_use_of_mapping_is_refused_and_changes_nothing", "map over a page"),
        (reserves_in_blocks, "reserved_addresses_cost_no_memory_and_overlap_nothing", None),
        (copies_pages, "a_page_at_two_addresses_is_the_same_memory", None),
        (copies_pages, "pages_take_turns_at_one_address", None),
    ],
)
def test_the_contract_finds_what_is_wrong_with_mapping(source, test: str, argument) -> None:
    contract = type("Contract", (SubAllocatorContract,), {"make": lambda self: source(CAPACITY)})()
    arguments = () if argument is None else (argument,)
    with pytest.raises((AssertionError, bfc.SubAllocatorError, pytest.fail.Exception)):
        getattr(contract, f"test_{test}")(contract.make(), *arguments)


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (overlapping, "test_blocks_do_not_overlap"),
        (lossy, "test_what_is_no_block_is_refused_and_changes_nothing"),
        (lossy, "test_a_block_comes_back_once"),
    ],
)
def test_the_contract_finds_what_is_wrong(source, test: str) -> None:
    contract = type("Contract", (SubAllocatorContract,), {"make": lambda self: source()})()
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(contract, test)(contract.make())


# -- simulated only --------------------------------------------------------------------------------


def test_the_log_holds_every_call_in_order() -> None:
    device = bfc.SimulatedSubAllocator("1 MiB", max_bytes=MIB // 2)
    first = take(device, 1000)
    assert device.alloc(256, MIB) is None
    device.free(*first)
    with pytest.raises(bfc.SubAllocatorError):
        device.free(*first)
    assert device.calls == [("alloc", 1000, 1 << 40), ("alloc", MIB, None), ("free", 1000, 1 << 40)]


def test_addresses_rise_aligned_and_apart() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB", base=1000, alignment=4096, gap=5000)
    addresses = [take(device, 100)[0] for _ in range(3)]
    assert addresses == [4096, 12288, 20480]
    device.free(4096, 100)
    assert take(device, 100)[0] == 28672, "no address is used twice"


def test_freed_addresses_come_again_the_lowest_first() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB", base=1000, alignment=4096, gap=100, reuse=True)
    blocks = [take(device, size) for size in (3996, 3997, 8000, 100)]
    assert [start for start, _ in blocks] == [4096, 8192, 16384, 24576]
    for block in blocks[1:3]:
        device.free(*block)
    assert take(device, 16_285)[0] == 28672, "one byte more than the gap of two blocks"
    assert take(device, 16_284)[0] == 8192, "the gap of two blocks"
    device.free(4096, 3996)
    assert take(device, 1)[0] == 4096
    assert take(device, 1)[0] == 49152


def test_addresses_fall_in_chunks_as_the_drivers_do() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB", base=2048 * MIB, chunk=32 * MIB)
    sizes = (148, 20, 2, 24, 12, 12)  # of the first segments of a GPT-2 on an H200, about
    blocks = [take(device, size * MIB) for size in sizes]
    # 2 goes behind 20, and 12 behind 148; another 12 fits nowhere
    found = [(2048 * MIB - start) // MIB for start, _ in blocks]
    assert found == [160, 192, 172, 224, 12, 256]
    device.free(*blocks[3])
    assert take(device, 10 * MIB)[0] == 2048 * MIB - 244 * MIB, "the lowest that is free"


def test_chunks_keep_clear_of_reserved_addresses() -> None:
    device = bfc.SimulatedSubAllocator(
        "64 MiB", base=128 * MIB, reserve_base=64 * MIB, chunk=32 * MIB
    )
    assert device.reserve(32 * MIB) == 64 * MIB
    first, second = take(device, 20 * MIB), take(device, 20 * MIB)
    assert (first[0], second[0]) == (96 * MIB, 32 * MIB)
    with pytest.raises(ValueError, match="twice"):
        bfc.SimulatedSubAllocator("64 MiB", base=64 * MIB, chunk=32 * MIB)
    with pytest.raises(ValueError, match="multiple of alignment"):
        bfc.SimulatedSubAllocator("64 MiB", chunk=3)


def test_chunks_lie_in_several_places_as_a_seed_says() -> None:
    base = 2048 * MIB

    def addresses(seed: int) -> list[int]:
        device = bfc.SimulatedSubAllocator("1 GiB", base=base, chunk=32 * MIB, seed=seed)
        return [take(device, 20 * MIB)[0] for _ in range(12)] + [take(device, 12 * MIB)[0]]

    found = addresses(0)
    assert {start // base for start in found} == {0, 1, 2}, "each place has chunks"
    for place in range(3):
        here = [start for start in found[:-1] if start // base == place]
        assert here == [base * (place + 1) - 32 * MIB * n for n in range(1, len(here) + 1)]
    assert found[-1] - 20 * MIB in found[:-1], "what is left of a chunk goes first"
    assert found == addresses(0)
    assert found != addresses(1)
    with pytest.raises(ValueError, match="needs chunk"):
        bfc.SimulatedSubAllocator("64 MiB", seed=0)


def test_reserved_addresses_come_again_and_overlap_no_block() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB", base=0, reserve_base=4 * MIB, reuse=True)
    block = take(device, 5 * MIB)
    first, second = device.reserve(2 * MIB), device.reserve(4 * MIB)
    assert (block[0], first, second) == (0, 6 * MIB, 8 * MIB)
    device.unreserve(6 * MIB, 2 * MIB)
    device.free(*block)
    assert device.reserve(4 * MIB) == 4 * MIB
    assert take(device, 5 * MIB)[0] == 12 * MIB
    assert take(device, 4 * MIB)[0] == 0


def test_it_fails_when_told_to() -> None:
    device = bfc.SimulatedSubAllocator("1 GiB")
    device.fail_at(2)
    assert device.alloc(256, 1) is not None
    assert device.alloc(256, 1) is None
    assert device.alloc(256, 1) is not None
    device.fail_at(1)
    device.fail_at(0)
    assert device.alloc(256, 1) is not None
    with pytest.raises(ValueError, match="from 1"):
        device.fail_at(-1)


@pytest.mark.parametrize(
    "options",
    [
        {"base": -1},
        {"gap": -1},
        {"alignment": 0},
        {"alignment": 3},
        {"alignment": -256},
        {"capacity": -1},
        {"capacity": "lots"},
        {"max_bytes": -1},
    ],
)
def test_odd_simulations_are_value_errors(options: dict) -> None:
    with pytest.raises(ValueError, match=r"size|at least 0"):
        bfc.SimulatedSubAllocator(**{"capacity": "1 MiB", **options})


def test_a_fence_is_done_once_its_stream_has_finished() -> None:
    device = bfc.SimulatedSubAllocator("1 MiB")
    device.hold(5)
    assert device.asynchronous
    assert device.fence(6) is None
    fence, other = device.fence(5), device.fence(5)
    assert not fence.done()
    device.finish(6)
    assert not fence.done()
    device.finish(5)
    device.hold(5)
    assert fence.done(), "what came later does not count"
    late = device.fence(5)
    late.wait()
    assert late.done()
    assert other.done()
    assert not device.asynchronous


# -- host only -------------------------------------------------------------------------------------


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_host_memory_is_zero_when_new_and_can_be_written_to_the_last_byte() -> None:
    host = bfc.HostSubAllocator("64 MiB")
    for nbytes in ODD_SIZES:
        address, received = take(host, nbytes)
        memory = (ctypes.c_char * received).from_address(address)
        assert memory.raw.count(0) == received
        memory[:] = b"\xff" * received
        host.free(address, received)


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="reads /proc/self/statm, which is Linux's"
)
def test_host_memory_is_resident_when_written_and_goes_back_to_the_system() -> None:
    host = bfc.HostSubAllocator("512 MiB")
    before = resident_bytes()
    address, received = take(host, 256 * MIB)
    assert resident_bytes() - before < 32 * MIB
    ctypes.memset(address, 1, 128 * MIB)
    assert resident_bytes() - before > 100 * MIB
    host.free(address, received)
    assert resident_bytes() - before < 32 * MIB


def test_many_small_host_blocks_leave_no_mapping_behind() -> None:
    host = bfc.HostSubAllocator("64 MiB")
    for _ in range(3000):
        host.free(*take(host, 1000))
    blocks = [take(host, 1000) for _ in range(1000)]
    give(host, blocks)
    assert host.live_bytes == 0


def test_host_capacity_is_the_machines_memory_unless_told() -> None:
    host = bfc.HostSubAllocator()
    assert host.total_bytes > 64 * MIB
    assert host.device == bfc.Device("cpu", 0)
    for wrong in (-1, "plenty"):
        with pytest.raises(ValueError, match="size"):
            bfc.HostSubAllocator(wrong)


def test_dropping_a_host_source_gives_its_memory_back() -> None:
    for _ in range(50):
        host = bfc.HostSubAllocator("1 GiB")
        address, received = take(host, 64 * MIB)
        ctypes.memset(address, 1, 4096)
    assert received == 64 * MIB
