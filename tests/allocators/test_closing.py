"""Closing while a replay runs, a region is on its way, or references go in a circle."""

from __future__ import annotations

import gc

import pytest
from own_interpreter import run

import bfc
from bfc.testing import Misbehaving

CLOSERS = {
    "in the progress callback": """
        progress = lambda done: a.close()
    """,
    "in another thread between two batches": """
        def progress(done):
            closer = threading.Thread(target=a.close)
            closer.start()
            closer.join()
    """,
    "inside the sub-allocator": """
        progress = None
        device.on("alloc", 4, first=lambda: a.close())
    """,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain", "asynchronous"])
@pytest.mark.parametrize("closer", CLOSERS)
def test_closing_during_a_replay_ends_it_with_closed_error(closer: str, asynchronous: bool) -> None:
    run(
        """
        from bfc.testing import Misbehaving

        device = Misbehaving("1 GiB")
        a = bfc.BFCAllocator(device, allow_growth=True)
        """
        + ("\n        device.hold(9)\n" if asynchronous else "")
        + CLOSERS[closer]
        + """
        try:
            long_trace(4).replay(a, progress=progress)
        except bfc.ClosedError:
            pass
        else:
            raise AssertionError("no ClosedError")
        assert a.closed
        a.check()
        assert device.live == {}, device.live
        assert a.stats().bytes_in_use == a.stats().pool_bytes == 0
        """
    )


def test_a_block_that_came_after_the_close_and_is_not_taken_back_is_offered_again() -> None:
    device = Misbehaving("64 MiB")
    allocator = bfc.BFCAllocator(device)
    device.on("alloc", then=allocator.close)
    device.on("free", 1, raises=bfc.SubAllocatorError("busy"))
    with pytest.raises(bfc.SubAllocatorError, match="busy"):
        allocator.allocate(10)
    allocator.close()
    assert device.live_bytes == 0


class Box:
    """Something that a reference cycle can go through."""


@pytest.mark.parametrize("allow_growth", [False, True])
@pytest.mark.parametrize("order", ["allocator first", "view first", "cycle first"])
def test_an_allocator_in_a_cycle_with_a_view_gives_its_regions_back(
    order: str, allow_growth: bool
) -> None:
    host = bfc.HostSubAllocator("4 MiB")

    def make() -> None:
        box = Box()
        box.me = box
        allocator = bfc.BFCAllocator(host, allow_growth=allow_growth)
        if order == "cycle first":
            box.allocator = allocator
            box.view = memoryview(allocator.allocate(1000))
            return
        view = memoryview(allocator.allocate(1000))
        both = [allocator, view] if order == "allocator first" else [view, allocator]
        late = Box()
        late.me, late.both = late, both

    make()
    gc.collect()
    gc.collect()
    assert host.live_bytes == 0
