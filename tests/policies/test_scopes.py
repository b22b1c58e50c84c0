"""The scopes of streams and private pools: each thread has its own."""

from __future__ import annotations

import gc
import threading

from waiting import DEADLINE, run_all

import bfc


def test_a_scope_that_two_threads_share_ends_in_each():
    """The first to leave took the other's token: both raised, and one stayed diverted."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    pool = bfc.MemPool(allocator)
    on_stream, in_pool = bfc.use_stream(7), bfc.use_mem_pool(pool)
    both_in, first_out = threading.Barrier(2, timeout=DEADLINE), threading.Event()

    def run(is_first: bool) -> None:
        try:
            on_stream.__enter__()
            in_pool.__enter__()
            both_in.wait()
            if not is_first:
                first_out.wait(DEADLINE)
            on_stream.__exit__(None, None, None)
            in_pool.__exit__(None, None, None)
            buffer = allocator.allocate(100)
            assert buffer.stream == 0
            assert allocator.snapshot().regions[0].pool_id == (0, 0)
        finally:
            first_out.set()

    assert run_all([lambda: run(True), lambda: run(False)]) == []
    assert pool.use_count() == 1


def test_a_scope_cannot_be_left_by_a_thread_that_did_not_enter_it():
    scope = bfc.use_stream(7)
    seen: list[str] = []

    def leave() -> None:
        try:
            scope.__exit__(None, None, None)
        except RuntimeError as error:
            seen.append(str(error))

    with scope:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
    assert len(seen) == 1
    assert "was not entered here" in seen[0]


def test_garbage_that_is_collected_by_a_free_in_a_scope_hides_nothing_that_waits() -> None:
    """The free makes a note of itself. That may run the collector, and so code that reads them."""
    allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))

    class Garbage:
        def __del__(self) -> None:
            allocator.release_free_regions()

    address, _kept = allocator.allocate_raw(3000), allocator.allocate_raw(3000)
    allocator.record_stream(address, 7)
    threshold = gc.get_threshold()
    gc.collect()
    garbage = Garbage()
    garbage.me = garbage  # type: ignore[attr-defined]
    del garbage
    with bfc.use_mem_pool(bfc.MemPool(allocator)):
        gc.set_threshold(1)
        try:
            allocator.deallocate_raw(address)
        finally:
            gc.set_threshold(*threshold)
    again = [allocator.allocate_raw(3000) for _ in range(3)]
    assert (allocator.stats().bytes_waiting_for_streams, address in again) == (0, True)
