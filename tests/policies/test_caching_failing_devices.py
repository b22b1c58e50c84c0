"""Devices that fail under PyTorch's policy: the caller hears of it, and the figures stay right."""

from __future__ import annotations

import sys

import pytest

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20


class Interrupted:
    """A fence whose wait is interrupted."""

    is_done = False

    def done(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        raise KeyboardInterrupt


def current(allocator: bfc.CachingAllocator, name: str) -> int:
    return allocator.memory_stats()[f"{name}.current"]


def test_a_free_that_fails_leaves_the_count_of_oversize_blocks():
    """Each failed free took one away, and the last success another: -3 of 0."""
    device = Misbehaving(1 << 30)
    allocator = bfc.CachingAllocator(device, settings="max_split_size_mb:20")
    address = allocator.allocate_raw(30 * MIB)
    device.hold(7)
    allocator.record_stream(address, 7)
    device.on("fence", raises=bfc.SubAllocatorError("the device fails"))
    for _ in range(3):
        with pytest.raises(bfc.SubAllocatorError):
            allocator.deallocate_raw(address)
        assert current(allocator, "oversize_allocations") == 1
    device.off()
    allocator.deallocate_raw(address)
    assert current(allocator, "oversize_allocations") == 0
    device.finish(7)


def test_the_release_of_a_pool_says_what_the_device_said():
    """It was taken for strict's refusal to empty a pool now, and nobody heard of it."""
    device = Misbehaving(1 << 30)
    allocator = bfc.CachingAllocator(device)
    pool = bfc.MemPool(allocator)
    with bfc.use_mem_pool(pool):
        allocator.deallocate_raw(allocator.allocate_raw(1000))
    device.on("free", raises=RuntimeError("an illegal address"))
    with pytest.raises(bfc.SubAllocatorError, match="illegal address"):
        pool.release()
    device.off()
    assert allocator.empty_cache() == 2 * MIB


def test_a_refusal_is_one_also_where_the_device_cannot_say_what_is_free():
    device = Misbehaving(1 << 30)
    allocator = bfc.CachingAllocator(device, memory_limit=2 * MIB)
    device.on("memory_info", raises=RuntimeError("the driver is gone"))
    reported = []
    hook, sys.unraisablehook = sys.unraisablehook, reported.append
    try:
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate_raw(30 * MIB)
    finally:
        sys.unraisablehook = hook
    assert [str(report.exc_value) for report in reported] == ["the driver is gone"]
    assert allocator.memory_stats()["num_ooms"] == 1


def test_an_interrupt_while_it_waits_for_a_stream_reaches_the_caller():
    """It was reported as a fault of the device, and the caller saw OutOfMemoryError."""
    device = Misbehaving(1 << 30, asynchronous=True)
    allocator = bfc.CachingAllocator(device, memory_limit=20 * MIB)
    fence = Interrupted()
    device.on("fence", returns=fence)
    address = allocator.allocate_raw(15 * MIB)
    allocator.record_stream(address, 7)
    allocator.deallocate_raw(address)
    with pytest.raises(KeyboardInterrupt):
        allocator.allocate_raw(18 * MIB)
    fence.is_done = True
    assert allocator.allocate_raw(18 * MIB)
    allocator.check()


@pytest.mark.parametrize("answer", [(-1, 1 << 30), (2, 1), (0, 2**64), (0.5, 1), None, (1,)])
def test_figures_of_a_device_that_make_no_sense_are_refused_in_words(answer):
    """A negative one was an OverflowError, which named nobody."""

    device = Misbehaving(64 * MIB)
    device.on("memory_info", returns=answer)
    allocator = bfc.CachingAllocator(device)
    with pytest.raises(bfc.SubAllocatorError, match=r"memory_info\(\) must return"):
        allocator.allocate_raw(65 * MIB)
    assert allocator.allocate_raw(MIB)
    allocator.check()
