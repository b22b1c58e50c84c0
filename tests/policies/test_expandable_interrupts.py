"""Expandable segments where signals and forks come in between, and at the interpreter's exit."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import own_interpreter
import pytest
from stopped import STOPPED
from strikes import signal_at, strike_at

import bfc

MIB = 1 << 20
SETTINGS = "expandable_segments:True"
BOTH = pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])


def made(device: bfc.SubAllocator, strict: bool) -> bfc.CachingAllocator:
    return bfc.CachingAllocator(device, settings=SETTINGS, strict=strict)


def grow(allocator: bfc.CachingAllocator) -> None:
    kept = allocator.allocate(25 * MIB)
    allocator.allocate(50 * MIB, 1).free()
    allocator.allocate(45 * MIB).free()
    kept.free()


def release(allocator: bfc.CachingAllocator) -> None:
    allocator.release_free_regions()


def close(allocator: bfc.CachingAllocator) -> None:
    allocator.close()


STEPS = pytest.mark.parametrize("step", [grow, release, close])


def comes_so_far(
    trace: Callable[..., Any], step: Callable[[bfc.CachingAllocator], None], strict: bool
) -> bool:
    """Grows, and gives back; one of both with a trace function. Whether that raised."""
    device = bfc.SimulatedSubAllocator("400 MiB")
    allocator = made(device, strict)
    raised = False
    for one in (grow, close) if step is close else (grow, release):
        before = sys.gettrace()
        sys.settrace(trace if one is step else before)
        try:
            one(allocator)
        except BaseException:
            sys.settrace(before)
            raised = True
        finally:
            sys.settrace(before)
        if not allocator.closed:
            allocator.check()
            stats = allocator.page_stats()
            reserved = allocator.stats().bytes_reserved
            assert device.live_bytes == stats["page_bytes"]
            assert stats["page_bytes"] - stats["lost_bytes"] <= reserved <= stats["page_bytes"]
            assert allocator.stats().bytes_in_use == 0
    allocator.close()
    assert not device.live_bytes
    assert not device.reservations
    assert not device.mappings
    return raised


@BOTH
@STEPS
@pytest.mark.parametrize("trace_at", [signal_at, strike_at], ids=["interrupt", "exception"])
def test_nothing_is_lost_wherever_a_source_is_interrupted(
    trace_at: Callable[[int], Callable[..., Any]], step: Callable[..., None], strict: bool
) -> None:
    """An interrupt reaches the program when the source is done, an exception at once."""
    for line in itertools.count(1):
        try:
            raised = comes_so_far(trace_at(line), step, strict)
        except BaseException as error:
            error.add_note(f"at line {line}")
            raise
        if not raised:
            break
    assert line > 50


# -- forks -----------------------------------------------------------------------------------------

WORK = """
def work(allocator):
    kept = allocator.allocate_raw(25 << 20)
    allocator.deallocate_raw(allocator.allocate_raw(50 << 20, 1))
    allocator.empty_cache()
    allocator.deallocate_raw(kept)
    allocator.empty_cache()

def go_on(device, allocator):
    allocator.check()
    sizes = (60, 30, 1)
    live = [allocator.allocate_raw(size << 20, int(size == 30)) for size in sizes]
    for address, size in zip(live, sizes):
        assert any(at <= address and address + (size << 20) <= at + length
                   for at, length in device.accessible), "not all of it is mapped"
    allocator.check()
    for address in live:
        allocator.deallocate_raw(address)
    for call in (allocator.empty_cache, allocator.release_free_regions, allocator.close):
        with contextlib.suppress(bfc.SubAllocatorError):
            call()
        allocator.check()
    stats = allocator.page_stats()
    assert stats["page_bytes"] == stats["lost_bytes"], stats
"""


@BOTH
def test_a_fork_while_another_thread_maps(strict: bool) -> None:
    """The child, where that thread does not exist, is not given memory that may be unmapped."""
    own_interpreter.run(
        STOPPED
        + WORK
        + f"""
for kind in KINDS:
    for is_after in (False, True):
        device = Stopped("800 MiB")
        allocator = bfc.CachingAllocator(device, settings="{SETTINGS}", strict={strict})
        Stopped.kind, Stopped.is_after = kind, is_after
        Stopped.inside, Stopped.go = threading.Event(), threading.Event()
        thread = threading.Thread(target=work, args=(allocator,))
        thread.start()
        assert device.inside.wait(30)
        def in_the_child():
            try:
                go_on(device, allocator)
            except BaseException as error:
                error.add_note(f"{{kind}} {{is_after}}")
                import traceback
                traceback.print_exc()
                raise
        wait = in_child(in_the_child)
        wait()
        device.go.set()
        thread.join()
        allocator.check()
        allocator.close()
        assert not device.live_bytes and not device.reservations
"""
    )


@BOTH
def test_a_source_that_forks(strict: bool) -> None:
    """The child comes back from the call, and goes on."""
    own_interpreter.run(
        STOPPED
        + WORK
        + f"""
class Forking(Stopped):
    def stop(self):
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(30)

for kind in KINDS:
    for is_after in (False, True):
        device = Forking("800 MiB")
        device.pid = None
        allocator = bfc.CachingAllocator(device, settings="{SETTINGS}", strict={strict})
        Stopped.kind, Stopped.is_after = kind, is_after
        status = 1
        try:
            work(allocator)
            allocator.check()
            go_on(device, allocator)
            assert not device.live_bytes and not device.reservations
            status = 0
        finally:
            if device.pid == 0:
                os._exit(status)
        assert device.pid is not None
        assert os.waitstatus_to_exitcode(os.waitpid(device.pid, 0)[1]) == 0, (kind, is_after)
"""
    )


@pytest.mark.parametrize("source", ["SimulatedSubAllocator", "HostSubAllocator"])
@BOTH
def test_the_interpreter_exits_with_live_ranges(source: str, strict: bool) -> None:
    own_interpreter.run(
        f"""
allocator = bfc.CachingAllocator(bfc.{source}("1 GiB"), settings="{SETTINGS}", strict={strict})
live = [allocator.allocate(size << 20, stream) for size in (1, 25, 50) for stream in (0, 1)]
live[2].free()

def map_for_ever():
    while True:
        allocator.deallocate_raw(allocator.allocate_raw(60 << 20, 2))
        allocator.empty_cache()

threads = [threading.Thread(target=map_for_ever, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
time.sleep(0.2)

class Late:
    def __del__(self):
        allocator.allocate(30 << 20, 3).free()
        allocator.empty_cache()

late = Late()
late.itself = late
"""
    )
