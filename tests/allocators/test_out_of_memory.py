"""What an allocator says when it is out of memory, and Python that runs meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from own_interpreter import run

import bfc
from bfc.testing import Misbehaving


def test_a_collection_during_an_out_of_memory_may_free_views() -> None:
    run("""
        a = bfc.BFCAllocator(bfc.HostSubAllocator("4 MiB"), allow_growth=True)
        keep = a.allocate_raw(100)
        allocate = a.allocate_raw

        class Box: pass

        for later in range(1, 60):
            gc.disable()
            gc.collect()
            box = Box()
            box.me, box.view = box, memoryview(a.allocate(100))
            del box
            gc.set_threshold(gc.get_count()[0] + later)
            gc.enable()
            try:
                allocate(1 << 30)
            except bfc.OutOfMemoryError:
                pass
        gc.collect()
        a.deallocate_raw(keep)
        assert_usable(a)
        a.close()
    """)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("signals", [200, 3000])
def test_a_signal_handler_may_ask_for_the_stats_during_an_out_of_memory(signals: int) -> None:
    run(f"""
        a = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
        full = a.allocate_raw(1 << 20)
        handled = 0

        def handler(*_):
            global handled
            handled += 1
            a.stats()

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.0003)
        import time; until = time.monotonic() + 60
        while handled < {signals} and time.monotonic() < until:
            try:
                a.allocate_raw(1 << 20)
            except bfc.OutOfMemoryError:
                pass
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert handled >= {signals}
        a.deallocate_raw(full)
        assert_usable(a)
        a.close()
    """)


def test_the_repr_of_a_sub_allocator_may_ask_its_allocator() -> None:
    run("""
        class Device(bfc.SimulatedSubAllocator):
            def __repr__(self):
                return f"<a device with {a.stats().pool_bytes} bytes in the pool>"

        a = bfc.BFCAllocator(Device("1 MiB", max_bytes=256))
        try:
            a.allocate_raw(1 << 20)
        except bfc.OutOfMemoryError:
            pass
        else:
            raise AssertionError("no OutOfMemoryError")
        a.check()
        a.close()
    """)


def test_the_advice_names_expandable_segments_where_they_would_help() -> None:
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("60 MiB"))
    blocks = [allocator.allocate_raw(4 << 20) for _ in range(15)]
    for address in blocks[::5] + blocks[1::5] + blocks[2::5] + blocks[3::5]:
        allocator.deallocate_raw(address)
    with pytest.raises(bfc.OutOfMemoryError, match="expandable_segments:True', which joins"):
        allocator.allocate_raw(40 << 20)
    allocator.set_settings("expandable_segments:True")
    with pytest.raises(bfc.OutOfMemoryError) as raised:
        allocator.allocate_raw(59 << 20)
    assert "expandable_segments" not in str(raised.value)


def refuse(source: Misbehaving, meanwhile: Callable[[], object]) -> None:
    """Whatever is asked for is refused, and a function runs at first, as another thread may."""

    def run() -> None:
        thread = threading.Thread(target=meanwhile)
        thread.start()
        thread.join()

    source.on("alloc", returns=None)
    source.on("alloc", 1, first=run, returns=None)


def test_what_is_freed_while_the_device_is_asked_is_found() -> None:
    """Nothing waits by then that the request could wait for."""
    source = Misbehaving("1 GiB")
    with bfc.BFCAllocator(source, allow_growth=True) as pool:
        pool.deallocate_raw(pool.allocate_raw(64 << 20))
        one, other = (pool.allocate_raw(32 << 20) for _ in range(2))  # in one region, which stays
        refuse(source, lambda: pool.deallocate_raw(one))
        assert pool.allocate_raw(32 << 20) == one
        refuse(source, lambda: pool.deallocate_raw(other))
        with pytest.raises(MemoryError):
            pool.allocate_raw(600 << 20)
