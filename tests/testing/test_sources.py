"""Sources that misbehave when told to, and an allocator on top of them."""

from __future__ import annotations

import time

import pytest

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20


@pytest.fixture
def source() -> Misbehaving:
    return Misbehaving(bfc.SimulatedSubAllocator("64 MiB"))


def test_it_refuses_the_nth_call_and_no_other(source) -> None:
    source.fail_at(2)
    answers = [source.alloc(256, 100) is None for _ in range(3)]
    assert answers == [False, True, False]
    source.fail_at(1)
    source.fail_at(0)
    assert source.alloc(256, 100) is not None


@pytest.mark.parametrize("lie", [(7, 100), (1 << 40, 5), "memory", (0, 0), (1 << 40, -1)])
def test_a_lie_is_told_by_the_allocator_and_nothing_is_lost(source, lie) -> None:
    source.lie_at(1, lie)
    with bfc.BFCAllocator(source) as allocator:
        with pytest.raises(bfc.SubAllocatorError, match="must"):
            allocator.allocate_raw(1000)
        allocator.check()
        assert source.live == {}
        allocator.allocate_raw(1000)
    assert source.live_bytes == 0


@pytest.mark.parametrize("error", [OSError("unplugged"), KeyboardInterrupt(), SystemExit(3)])
def test_what_is_raised_comes_through_and_nothing_is_lost(source, error) -> None:
    source.raise_at(1, error)
    expected = bfc.SubAllocatorError if isinstance(error, Exception) else type(error)
    with bfc.BFCAllocator(source) as allocator:
        with pytest.raises(expected):
            allocator.allocate_raw(1000)
        allocator.check()
        allocator.deallocate_raw(allocator.allocate_raw(1000))
        source.raise_at(1, OSError("busy"), call="free")
        with pytest.raises(bfc.SubAllocatorError, match="busy"):
            allocator.release_free_regions()
        assert source.live_bytes == 64 * MIB
        assert allocator.release_free_regions() == 64 * MIB
    assert source.live == {}


def test_it_is_as_slow_as_it_is_told(source, monkeypatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    source.slow(0.05)
    source.free(*source.alloc(256, 100))
    assert slept == [0.05, 0.05]


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
    source.raise_at(1, RuntimeError("gone"), call="fence")
    with pytest.raises(RuntimeError, match="gone"):
        source.fence(2)


def test_calls_are_counted_from_one(source) -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="counted from 1"):
            source.lie_at(wrong, None)
    with pytest.raises(ValueError, match="not 'copy'"):
        source.raise_at(1, OSError(), call="copy")


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
    source.raise_at(1, OSError("unplugged"), call)
    with pytest.raises(OSError, match="unplugged"):
        use_mapping(source)
    kinds = {"set_access": "access"}
    assert kinds.get(call, call) not in [kind for kind, _, _ in source.inner.calls]
    fresh = Misbehaving(bfc.SimulatedSubAllocator("64 MiB"))
    fresh.fail_at(1, call)
    with pytest.raises((bfc.SubAllocatorError, AssertionError)):
        use_mapping(fresh)
    fresh = Misbehaving(bfc.SimulatedSubAllocator("64 MiB"))
    fresh.fail_at(1, call)
    fresh.fail_at(0, call)
    use_mapping(fresh)


def test_it_counts_pages_and_says_what_the_source_says(source) -> None:
    assert source.supports_virtual_memory == source.inner.supports_virtual_memory
    page = source.create(PAGE)
    block = source.alloc(256, MIB)
    assert source.live_bytes == source.inner.live_bytes == PAGE + MIB
    source.release(page)
    source.free(*block)
    assert source.live_bytes == 0
    with pytest.raises(ValueError, match="call is one of 'alloc', 'free'"):
        source.fail_at(1, "mmap")


def test_a_wait_lets_a_stream_that_is_held_here_finish(source) -> None:
    source.hold(5)
    fence = source.fence(5)
    source.wait(5)
    assert fence.done()
    assert source.inner.calls == [("wait", 0, 5)]
