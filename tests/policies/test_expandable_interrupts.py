"""Expandable segments where signals and forks come in between, and at the interpreter's exit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from stopped import exit_while_mapping, fork_inside, fork_meanwhile
from strikes import at_each_line, run_steps, signal_at, strike_at

import bfc

MIB = 1 << 20
#: As a program in its own interpreter writes it.
MADE = "lambda it: bfc.CachingAllocator(it, settings='expandable_segments:True', strict={})"
BOTH = pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
KINDS = ("reserve", "create", "map", "set_access", "unmap", "release", "unreserve", "wait")
Step = Callable[[bfc.CachingAllocator], None]


def grow(allocator: bfc.CachingAllocator) -> None:
    kept = allocator.allocate(25 * MIB)
    allocator.allocate(50 * MIB, 1).free()
    allocator.allocate(45 * MIB).free()
    kept.free()


def release(allocator: bfc.CachingAllocator) -> None:
    allocator.release_free_regions()


def close(allocator: bfc.CachingAllocator) -> None:
    allocator.close()


def is_struck(trace: Callable[..., Any], step: Step, strict: bool) -> bool:
    """Grows, and gives back; one of both with a trace function. Whether that raised."""
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = eval(MADE.format(strict))(device)

    def check() -> None:
        if allocator.closed:
            return
        allocator.check()
        stats = allocator.page_stats()
        reserved = allocator.stats().bytes_reserved
        assert device.live_bytes == stats["page_bytes"]
        assert stats["page_bytes"] - stats["lost_bytes"] <= reserved <= stats["page_bytes"]
        assert allocator.stats().bytes_in_use == 0

    steps = {one: partial(one, allocator) for one in (grow, close if step is close else release)}
    raised = run_steps(steps.values(), steps[step], trace, check)
    allocator.close()
    assert not device.live_bytes
    assert not device.reservations
    assert not device.mappings
    return raised


@BOTH
@pytest.mark.parametrize("step", [grow, release, close])
@pytest.mark.parametrize("trace_at", [signal_at, strike_at], ids=["interrupt", "exception"])
def test_nothing_is_lost_wherever_a_source_is_interrupted(
    trace_at: Callable[[int], Callable[..., Any]], step: Step, strict: bool
) -> None:
    """An interrupt reaches the program when the source is done, an exception at once."""
    at_each_line(lambda line: is_struck(trace_at(line), step, strict))


# -- forks -----------------------------------------------------------------------------------------

WORK = """
def work(allocator):
    kept = allocator.allocate_raw(25 << 20)
    allocator.deallocate_raw(allocator.allocate_raw(50 << 20, 1))
    allocator.empty_cache()
    allocator.deallocate_raw(kept)
    allocator.empty_cache()
"""
SIZES = (60, 30, 1)


@BOTH
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fork_while_another_thread_maps(strict: bool, every: bool) -> None:
    """The child, where that thread does not exist, knows what is mapped: it is not given memory
    that may be unmapped, and gives all of it back."""
    fork_meanwhile(MADE.format(strict), WORK, SIZES, KINDS, every)


@BOTH
def test_a_source_that_forks(strict: bool) -> None:
    """The child comes back from the call, and goes on."""
    fork_inside(MADE.format(strict), WORK, SIZES, KINDS)


@pytest.mark.parametrize("source", ["SimulatedSubAllocator", "HostSubAllocator"])
@BOTH
def test_the_interpreter_exits_with_live_ranges(source: str, strict: bool) -> None:
    exit_while_mapping(MADE.format(strict), source, 60)
