"""Stitching where signals and forks come in between, and at the interpreter's exit."""

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


def comes_so_far(policy: str, trace: Callable[..., Any], step: Callable[[Any], None]) -> bool:
    """Stitches, and gives back; one of both with a trace function. Whether that raised."""
    device = bfc.SimulatedSubAllocator("20 MiB")
    allocator = eval(policy)(device)
    raised = False
    for one in (stitch, release if step is stitch else step):
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
            assert device.live_bytes == stats["pages"] * stats["page_size"]
            assert device.live_bytes == allocator.stats().bytes_reserved
            assert allocator.stats().bytes_in_use == 0
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
    for line in itertools.count(1):
        try:
            raised = comes_so_far(policy, strike(line), step)
        except BaseException as error:
            error.add_note(f"at line {line}")
            raise
        if not raised:
            break
    assert line > 50


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

def go_on(device, allocator):
    allocator.check()
    sizes = (12, 8, 1)
    live = [allocator.allocate_raw(size << 20, int(size == 8)) for size in sizes]
    for address, size in zip(live, sizes):
        assert any(at <= address and address + (size << 20) <= at + length
                   for at, length in device.accessible), "not all of it is mapped"
    allocator.check()
    for address in live:
        allocator.deallocate_raw(address)
    for call in (allocator.release_free_regions, allocator.close):
        with contextlib.suppress(bfc.SubAllocatorError):
            call()
        allocator.check()
"""


@ON_BOTH
def test_a_fork_while_another_thread_maps(policy: str) -> None:
    """The child, where that thread does not exist, is not given memory that may be unmapped."""
    own_interpreter.run(
        STOPPED
        + f"made = {policy}"
        + WORK
        + """
for kind in KINDS:
    for is_after in (False, True):
        device = Stopped("800 MiB")
        allocator = made(device)
        Stopped.kind, Stopped.is_after = kind, is_after
        Stopped.inside, Stopped.go = threading.Event(), threading.Event()
        thread = threading.Thread(target=work, args=(allocator,))
        thread.start()
        while thread.is_alive() and not device.inside.wait(0.01):
            pass  # some kinds of calls may not come
        def in_the_child():
            try:
                go_on(device, allocator)
            except BaseException as error:
                error.add_note(f"{kind} {is_after}")
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


@ON_BOTH
def test_a_source_that_forks(policy: str) -> None:
    """The child comes back from the call, and goes on."""
    own_interpreter.run(
        STOPPED
        + f"made = {policy}"
        + WORK
        + """
class Forking(Stopped):
    def stop(self):
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(30)

forked = set()
for kind in KINDS:
    for is_after in (False, True):
        device = Forking("800 MiB")
        device.pid = None
        allocator = made(device)
        Stopped.kind, Stopped.is_after = kind, is_after
        status = 1
        try:
            work(allocator)
            allocator.check()
            go_on(device, allocator)
            assert not device.live_bytes and not device.reservations
            status = 0
        except BaseException as error:
            error.add_note(f"{kind} {is_after}")
            import traceback
            traceback.print_exc()
            raise
        finally:
            if device.pid == 0:
                os._exit(status)
        if device.pid is not None:
            forked.add(kind)
            assert os.waitstatus_to_exitcode(os.waitpid(device.pid, 0)[1]) == 0, (kind, is_after)
assert {"reserve", "create", "map", "set_access", "unmap", "release"} <= forked, forked
"""
    )


@ON_BOTH
@pytest.mark.parametrize("source", ["SimulatedSubAllocator", "HostSubAllocator"])
def test_the_interpreter_exits_with_live_ranges(policy: str, source: str) -> None:
    own_interpreter.run(
        f"""
allocator = ({policy})(bfc.{source}("1 GiB"))
live = [allocator.allocate(size << 20, stream) for size in (1, 5, 9) for stream in (0, 1)]
live[2].free()

def map_for_ever():
    while True:
        allocator.deallocate_raw(allocator.allocate_raw(30 << 20, 2))
        allocator.release_free_regions()

threads = [threading.Thread(target=map_for_ever, daemon=True) for _ in range(3)]
for thread in threads:
    thread.start()
time.sleep(0.2)

class Late:
    def __del__(self):
        allocator.allocate(30 << 20, 3).free()
        allocator.trim()

late = Late()
late.itself = late
"""
    )
