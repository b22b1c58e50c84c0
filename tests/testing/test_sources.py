"""Sources that misbehave when told to, and an allocator on top of them."""

from __future__ import annotations

import pytest

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20


@pytest.fixture
def source() -> Misbehaving:
    return Misbehaving("64 MiB")


def test_it_refuses_the_nth_call_and_no_other(source) -> None:
    source.on("alloc", 2, returns=None)
    answers = [source.alloc(256, 100) is None for _ in range(3)]
    assert answers == [False, True, False]
    source.on("alloc", 1, returns=None)
    source.off("alloc")
    assert source.alloc(256, 100) is not None


@pytest.mark.parametrize("lie", [(7, 100), (1 << 40, 5), "memory", (0, 0), (1 << 40, -1)])
def test_a_lie_is_told_by_the_allocator_and_nothing_is_lost(source, lie) -> None:
    source.on("alloc", 1, returns=lie)
    with bfc.BFCAllocator(source) as allocator:
        with pytest.raises(bfc.SubAllocatorError, match="must"):
            allocator.allocate_raw(1000)
        allocator.check()
        assert source.live == {}
        allocator.allocate_raw(1000)
    assert source.live_bytes == 0


@pytest.mark.parametrize("error", [OSError("unplugged"), KeyboardInterrupt(), SystemExit(3)])
def test_what_is_raised_comes_through_and_nothing_is_lost(source, error) -> None:
    source.on("alloc", 1, raises=error)
    expected = bfc.SubAllocatorError if isinstance(error, Exception) else type(error)
    with bfc.BFCAllocator(source) as allocator:
        with pytest.raises(expected):
            allocator.allocate_raw(1000)
        allocator.check()
        allocator.deallocate_raw(allocator.allocate_raw(1000))
        source.on("free", 1, raises=OSError("busy"))
        with pytest.raises(bfc.SubAllocatorError, match="busy"):
            allocator.release_free_regions()
        assert source.live_bytes == 64 * MIB
        assert allocator.release_free_regions() == 64 * MIB
    assert source.live == {}


def test_what_is_told_happens_around_the_call(source) -> None:
    told: list[object] = []
    source.on("alloc", first=lambda: told.append(0), then=lambda: told.append(dict(source.live)))
    address, nbytes = source.alloc(256, 100)
    assert told == [0, {address: nbytes}]
    source.on("alloc", instead=lambda ask, alignment, nbytes: ask(alignment, 2 * nbytes))
    assert source.alloc(256, 100)[1] == 200
    source.on("alloc", [1, 3], returns=None)
    assert [source.alloc(256, 100) is None for _ in range(4)] == [True, False, True, False]
    assert source.counts["alloc"] == 6
    assert source.live_bytes == source.inner.live_bytes == 700
    source.on("alloc", returns=None)
    source.off()
    assert source.alloc(256, 100)[1] == 100


def test_it_says_what_it_is_told_to_say_and_else_what_the_source_says() -> None:
    inner = bfc.SimulatedSubAllocator("64 MiB")
    source = Misbehaving(inner, asynchronous=True, granularity=4096, host_accessible=True)
    assert source.asynchronous
    assert source.granularity == 4096
    assert source.host_accessible
    assert source.calls is inner.calls
    with pytest.raises(AttributeError, match="no attribute 'capacitance'"):
        source.capacitance  # noqa: B018
    with pytest.raises(TypeError, match="no sub-allocator has the attribute 'asynchron'"):
        Misbehaving(inner, asynchron=True)


def test_any_source_can_hold_a_stream() -> None:
    source = Misbehaving(bfc.HostSubAllocator("64 MiB"))
    assert not source.asynchronous
    source.hold(2)
    with bfc.CachingAllocator(source) as allocator:
        ptr = allocator.allocate_raw(1000)
        allocator.record_stream(ptr, 2)
        allocator.deallocate_raw(ptr)
        assert allocator.allocate_raw(1000) != ptr
        source.finish(2)
        assert allocator.allocate_raw(1000) == ptr


def test_a_fence_below_is_asked_too() -> None:
    inner = bfc.SimulatedSubAllocator("64 MiB")
    source = Misbehaving(inner)
    for one in (inner, source):
        one.hold(2)
    fence = source.fence(2)
    source.finish(2)
    assert not fence.done()
    fence.wait()
    assert fence.done()
    source.on("fence", 1, raises=RuntimeError("gone"))
    with pytest.raises(RuntimeError, match="gone"):
        source.fence(2)


def test_calls_are_counted_from_one(source) -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="counted from 1"):
            source.on("alloc", [1, wrong], returns=None)
    assert source.alloc(256, 100) is not None
    for order in (source.on, source.off):
        with pytest.raises(ValueError, match="not 'mmap'"):
            order("mmap")


# -- memory that is mapped -------------------------------------------------------------------------

PAGE = 2 * MIB


def use_mapping(source: Misbehaving) -> None:
    address, page = source.reserve(2 * PAGE), source.create(PAGE)
    assert address is not None
    assert page is not None
    source.map(address, [page])
    source.set_access(address, PAGE)
    source.wait(0)
    source.unmap(address, PAGE)
    source.release(page)
    source.unreserve(address, 2 * PAGE)


MAPPING = ["reserve", "create", "map", "set_access", "wait", "unmap", "release", "unreserve"]


@pytest.mark.parametrize("call", MAPPING)
def test_each_verb_of_mapping_fails_when_told_to_and_does_nothing(source, call: str) -> None:
    source.on(call, 1, raises=OSError("unplugged"))
    with pytest.raises(OSError, match="unplugged"):
        use_mapping(source)
    kinds = {"set_access": "access"}
    assert kinds.get(call, call) not in [kind for kind, _, _ in source.inner.calls]
    fresh = Misbehaving("64 MiB")
    fresh.on(call, 1, raises=OSError)
    fresh.off()
    use_mapping(fresh)
    assert fresh.counts[call] == 1


def test_it_counts_pages_and_says_what_the_source_says(source) -> None:
    assert source.supports_virtual_memory == source.inner.supports_virtual_memory
    page = source.create(PAGE)
    block = source.alloc(256, MIB)
    assert source.live_bytes == source.inner.live_bytes == PAGE + MIB
    source.release(page)
    source.free(*block)
    assert source.live_bytes == 0


def test_a_wait_lets_a_stream_that_is_held_here_finish(source) -> None:
    source.hold(5)
    fence = source.fence(5)
    source.wait(5)
    assert fence.done()
    assert source.inner.calls == [("wait", 0, 5)]
