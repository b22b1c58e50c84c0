"""Mapped memory where signals and forks come in between, and at the interpreter's exit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from interrupts import at_each_line, run_steps, signal_at, strike_at
from mapping_users import EACH_USER, USERS, User
from stopped_thread import exit_while_mapping, fork_inside, fork_meanwhile

import bfc

MIB = 1 << 20


def grow(user: User, allocator: Any) -> None:
    user.grow(allocator)


def release(user: User, allocator: Any) -> None:
    allocator.release_free_regions()


def trim(user: User, allocator: Any) -> None:
    allocator.trim(4 * MIB)


def close(user: User, allocator: Any) -> None:
    allocator.close()


def is_struck(user: User, trace: Callable[..., Any], step: Callable[[User, Any], None]) -> bool:
    """Grows, and gives back; one of both with a trace function. Whether that raised."""
    device = bfc.SimulatedSubAllocator(user.capacity)
    allocator = user.made(device)

    def check() -> None:
        if allocator.closed:
            return
        allocator.check()
        stats = allocator.page_stats()
        reserved = allocator.stats().bytes_reserved
        assert device.live_bytes == user.page_bytes(allocator)
        assert device.live_bytes - stats.get("lost_bytes", 0) <= reserved <= device.live_bytes
        assert allocator.stats().bytes_in_use == 0

    steps = {
        one: partial(one, user, allocator) for one in (grow, release if step is grow else step)
    }
    raised = run_steps(steps.values(), steps[step], trace, check)
    allocator.close()
    assert not device.live_bytes
    assert not device.reservations
    assert not device.mappings
    return raised


STEPS = [
    pytest.param(user, step, id=f"{user.name} {step.__name__}")
    for user in USERS
    for step in (grow, release, trim, close)
    if user.stitches or step is not trim
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("user", "step"), STEPS)
@pytest.mark.parametrize("trace_at", [signal_at, strike_at], ids=["interrupt", "exception"])
def test_nothing_is_lost_wherever_a_source_is_interrupted(
    user: User, trace_at: Callable[[int], Callable[..., Any]], step: Callable[[User, Any], None]
) -> None:
    """An interrupt reaches the program when the source is done, an exception at once."""
    at_each_line(lambda line: is_struck(user, trace_at(line), step))


# -- forks -----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@EACH_USER
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_fork_while_another_thread_maps(user: User, every: bool) -> None:
    """The child, where that thread does not exist, knows what is mapped: it is not given memory
    that may be unmapped, and gives all of it back."""
    fork_meanwhile(user.source, user.forked, user.sizes, user.kinds, every)


@pytest.mark.sampled(1)
@EACH_USER
def test_a_source_that_forks(user: User) -> None:
    """The child comes back from the call, and goes on."""
    fork_inside(user.source, user.forked, user.sizes, user.kinds)


@pytest.mark.sampled(1)
@EACH_USER
@pytest.mark.parametrize("source", ["SimulatedSubAllocator", "HostSubAllocator"])
def test_the_interpreter_exits_with_live_ranges(user: User, source: str) -> None:
    exit_while_mapping(user.source, source, 30 if user.stitches else 60)
