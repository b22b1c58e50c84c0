"""Stitching where signals and forks come in between, and at the interpreter's exit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from stopped import exit_while_mapping, fork_inside, fork_meanwhile
from strikes import at_each_line, run_steps, signal_at, strike_at

import bfc

MIB = 1 << 20
KINDS = ("reserve", "create", "map", "set_access", "unmap", "release")


#: What makes an allocator that stitches, as a program in its own interpreter writes it.
ON_BOTH = pytest.mark.parametrize(
    "policy",
    [
        'lambda it: bfc.BFCAllocator(it, virtual_memory=True, page_size="2 MiB")',
        "lambda it: bfc.CachingAllocator(it, stitch=True)",
    ],
    ids=["bfc", "caching"],
)


def stitch(allocator: Any) -> None:
    """Grows, stitches, and takes pages of another stream."""
    live: list[int] = []
    try:
        for size in (4, 2, 4, 2, 4, 2):
            live.append(allocator.allocate_raw(size * MIB))
        for ptr in live[::2]:
            allocator.deallocate_raw(ptr)
        live = live[1::2]
        live.append(allocator.allocate_raw(12 * MIB))
        allocator.deallocate_raw(live.pop())
        live.append(allocator.allocate_raw(11 * MIB, 1))
        live.append(allocator.allocate_raw(1000, 1))
    finally:
        for ptr in live:
            try:
                allocator.deallocate_raw(ptr)
            except bfc.InvalidPointerError:
                pass  # it was freed before the interrupt


def release(allocator: Any) -> None:
    allocator.release_free_regions()


def trim(allocator: Any) -> None:
    allocator.trim(4 * MIB)


def close(allocator: Any) -> None:
    allocator.close()


def is_struck(policy: str, trace: Callable[..., Any], step: Callable[[Any], None]) -> bool:
    """Stitches, and gives back; one of both with a trace function. Whether that raised."""
    device = bfc.SimulatedSubAllocator("20 MiB")
    allocator = eval(policy)(device)

    def check() -> None:
        if allocator.closed:
            return
        allocator.check()
        stats = allocator.page_stats()
        assert device.live_bytes == stats["pages"] * stats["page_size"]
        assert device.live_bytes == allocator.stats().bytes_reserved
        assert allocator.stats().bytes_in_use == 0

    steps = {one: partial(one, allocator) for one in (stitch, release if step is stitch else step)}
    raised = run_steps(steps.values(), steps[step], trace, check)
    allocator.close()
    assert not device.live_bytes
    assert not device.reservations
    assert not device.mappings
    return raised


@ON_BOTH
@pytest.mark.parametrize("strike", [signal_at, strike_at])
@pytest.mark.parametrize("step", [stitch, release, trim, close])
def test_an_interrupt_at_each_line_of_a_source(
    policy: str, step: Callable[..., None], strike: Callable[..., Any]
) -> None:
    """It reaches the program when the source is done, and nothing is lost."""
    at_each_line(lambda line: is_struck(policy, strike(line), step))


# -- forks -----------------------------------------------------------------------------------------

WORK = """
def work(allocator):
    live = [allocator.allocate_raw(size << 20) for size in (4, 2, 4, 2, 4, 2)]
    for ptr in live[::2]:
        allocator.deallocate_raw(ptr)
    for ptr in (allocator.allocate_raw(12 << 20), allocator.allocate_raw(11 << 20, 1)):
        allocator.deallocate_raw(ptr)
    allocator.release_free_regions()
    for ptr in live[1::2]:
        allocator.deallocate_raw(ptr)
    allocator.release_free_regions()
"""
SIZES = (12, 8, 1)


@ON_BOTH
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fork_while_another_thread_maps(policy: str, every: bool) -> None:
    """The child, where that thread does not exist, knows what is mapped: it is not given memory
    that may be unmapped, and gives all of it back."""
    fork_meanwhile(policy, WORK, SIZES, KINDS, every)


@ON_BOTH
def test_a_source_that_forks(policy: str) -> None:
    """The child comes back from the call, and goes on."""
    fork_inside(policy, WORK, SIZES, KINDS)


@ON_BOTH
@pytest.mark.parametrize("source", ["SimulatedSubAllocator", "HostSubAllocator"])
def test_the_interpreter_exits_with_live_ranges(policy: str, source: str) -> None:
    exit_while_mapping(policy, source, 30)
