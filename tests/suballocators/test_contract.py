"""The contract of `bfc.suballocators.base`, run on every source of regions that needs no device."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bfc

KIB, MIB = 1 << 10, 1 << 20
CAPACITY = 64 * MIB
ALIGNMENT = 256
ODD_SIZES = [1, 255, 256, 4095, 4096, 4097, MIB, 2 * MIB, 2 * MIB + 1, 5 * MIB + 77]

FACTORIES: dict[str, Callable[[], bfc.SubAllocator]] = {
    "simulated": lambda: bfc.SimulatedSubAllocator(CAPACITY),
    "simulated, text": lambda: bfc.SimulatedSubAllocator("64 MiB"),
    "simulated, gaps": lambda: bfc.SimulatedSubAllocator(CAPACITY, gap=300, alignment=1),
    "simulated, odd base": lambda: bfc.SimulatedSubAllocator(CAPACITY, base=12345, alignment=64),
    "simulated, joining": lambda: bfc.SimulatedSubAllocator(
        CAPACITY, supports_coalescing=True, alignment=256
    ),
    "simulated, small blocks": lambda: bfc.SimulatedSubAllocator(CAPACITY, max_bytes="6 MiB"),
    "host": lambda: bfc.HostSubAllocator(CAPACITY),
    "host, text": lambda: bfc.HostSubAllocator("64 MiB"),
}


@pytest.fixture(params=FACTORIES)
def source(request: pytest.FixtureRequest) -> Iterator[bfc.SubAllocator]:
    source = FACTORIES[request.param]()
    yield source
    assert source.live_bytes == 0, "the test, or the source, lost a block"


Block = tuple[int, int]


def take(source: bfc.SubAllocator, nbytes: int, alignment: int = ALIGNMENT) -> Block:
    block = source.alloc(alignment, nbytes)
    assert block is not None
    return block


def give(source: bfc.SubAllocator, blocks: list[Block]) -> None:
    for block in blocks:
        source.free(*block)


# -- alloc -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", ODD_SIZES)
def test_a_block_is_aligned_and_at_least_as_large_as_asked(source, nbytes: int) -> None:
    address, received = take(source, nbytes)
    assert (type(address), type(received)) == (int, int)
    assert address > 0
    assert address % ALIGNMENT == 0
    assert received >= nbytes
    source.free(address, received)


@pytest.mark.parametrize("alignment", [256, 512, 4096, 65536, 2 * MIB, 4 * MIB])
def test_a_larger_alignment_is_kept_too(source, alignment: int) -> None:
    blocks = [take(source, 1000, alignment) for _ in range(3)]
    assert all(address % alignment == 0 for address, _ in blocks)
    give(source, blocks)


def test_an_idle_block_may_go_back_without_waiting(source) -> None:
    blocks = [take(source, nbytes) for nbytes in ODD_SIZES]
    for address, received in blocks:
        source.free_idle(address, received)
    assert source.live_bytes == 0
    with pytest.raises(bfc.SubAllocatorError):
        source.free_idle(*blocks[0])


def test_blocks_do_not_overlap(source) -> None:
    blocks = sorted(take(source, nbytes) for nbytes in ODD_SIZES)
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(blocks))
    give(source, blocks)


def test_a_refusal_is_none_and_can_be_repeated(source) -> None:
    for _ in range(3):
        assert source.alloc(ALIGNMENT, CAPACITY + 1) is None
        assert source.alloc(ALIGNMENT, 2**62) is None
        assert source.alloc(ALIGNMENT, 2**63 - 1) is None
    assert source.live_bytes == 0
    source.free(*take(source, MIB))


def test_a_full_source_refuses_until_something_comes_back(source) -> None:
    blocks = [take(source, 4 * MIB) for _ in range(CAPACITY // (4 * MIB))]
    assert source.alloc(ALIGNMENT, 1) is None
    assert source.alloc(ALIGNMENT, 4 * MIB) is None
    source.free(*blocks.pop())
    assert source.alloc(ALIGNMENT, 4 * MIB + 1) is None
    blocks.append(take(source, 4 * MIB))
    give(source, blocks)


# -- free ------------------------------------------------------------------------------------------


def test_blocks_come_back_in_any_order(source) -> None:
    blocks = [take(source, nbytes) for nbytes in ODD_SIZES]
    total = sum(received for _, received in blocks)
    for address, received in blocks[::2] + blocks[1::2]:
        assert source.live_bytes == total
        source.free(address, received)
        total -= received


def test_what_is_no_block_is_refused_and_changes_nothing(source) -> None:
    address, received = take(source, 1 * MIB)
    wrong = [
        (address + 256, received),
        (address, received - 1),
        (address, received + 1),
        (address, 0),
        (address, -received),
        (address - 256, received),
        (0, received),
        (0, 0),
        (2**63, 1),
        (address + received, received),
    ]
    for block in wrong:
        with pytest.raises(bfc.SubAllocatorError):
            source.free(*block)
        assert source.live_bytes == received
    source.free(address, received)


def test_a_block_comes_back_once(source) -> None:
    block = take(source, MIB)
    source.free(*block)
    with pytest.raises(bfc.SubAllocatorError):
        source.free(*block)
    assert source.live_bytes == 0


def test_a_free_of_two_neighbours_at_once_needs_coalescing(source) -> None:
    first, second = sorted(take(source, 2 * MIB) for _ in range(2))
    joined = (first[0], first[1] + second[1])
    if source.supports_coalescing and first[0] + first[1] == second[0]:
        source.free(*joined)
        return
    with pytest.raises(bfc.SubAllocatorError):
        source.free(*joined)
    give(source, [first, second])


# -- what it says about itself ---------------------------------------------------------------------


def test_it_says_what_it_has_and_where(source) -> None:
    assert isinstance(source, bfc.SubAllocator)
    assert source.total_bytes == source.allocation_limit() == CAPACITY
    assert isinstance(source.device, bfc.Device)
    assert isinstance(source.supports_coalescing, bool)
    assert "64.00 MiB" in repr(source)
    assert len(repr(source)) < 80


def test_without_work_queued_there_is_no_fence(source) -> None:
    assert not source.asynchronous
    for stream in (0, 1, 2**64 - 1):
        fence = source.fence(stream)
        assert fence is None or fence.done()


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads take turns far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def take_from_threads(source: bfc.SubAllocator, nbytes: int) -> list[Block]:
    """Fills a source from eight threads at once. Returns its blocks in address order."""
    blocks: list[Block] = []

    def work() -> None:
        while block := source.alloc(ALIGNMENT, nbytes):
            blocks.append(block)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(blocks)


@pytest.mark.usefixtures("restless")
def test_threads_at_once_never_pass_the_capacity_or_overlap(source) -> None:
    for _ in range(10):
        blocks = take_from_threads(source, MIB // 2)
        held, live = sum(received for _, received in blocks), source.live_bytes
        give(source, blocks)
        assert live == held
        assert held <= CAPACITY
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(blocks))


@pytest.mark.parametrize("options", [{}, {"allow_growth": True}])
def test_an_allocator_lives_on_it_and_gives_everything_back(source, options: dict, dice) -> None:
    with bfc.BFCAllocator(source, **options) as allocator:
        live: list[int] = []
        for _ in range(300):
            if live and dice.random() < 0.5:
                allocator.deallocate_raw(live.pop(dice.randrange(len(live))))
            else:
                live.append(allocator.allocate_raw(dice.randrange(1, 60_000)))
        allocator.check()
        assert source.live_bytes == allocator.stats().pool_bytes > 0
    assert source.live_bytes == 0


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
