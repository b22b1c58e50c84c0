"""Frees that carry a time: merging them later, and a counter that two allocators share."""

from __future__ import annotations

import pickle
import threading

import numpy as np
import pytest
from own_interpreter import SECONDS, run

import bfc


def test_merging_many_sizes_at_once_has_room_for_every_new_size() -> None:
    run("""
        a = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        a.set_timing_counter(bfc.SharedCounter())
        ptrs = []
        for k in range(17, 64):
            for _ in range(2):
                ptrs += [a.allocate_raw(k * 256), a.allocate_raw(k * 256)]
                a.allocate_raw(256)
        for ptr in ptrs:
            a.deallocate_raw(ptr)
        a.set_safe_frontier(10**9)
        assert_usable(a)
        a.close()
    """)


def test_a_counter_shared_by_two_threads_loses_no_count(make_allocator) -> None:
    frees = 1 << 19
    op = np.tile(np.array([0, 1], np.uint8), frees)
    ids = np.zeros(2 * frees, np.uint32)
    trace = bfc.Trace(op, ids, np.where(op == 0, 256, 0).astype(np.uint64))
    counter = bfc.SharedCounter()
    start = threading.Barrier(2)

    def work(allocator: bfc.BFCAllocator) -> None:
        start.wait(SECONDS)
        trace.replay(allocator)

    allocators = [make_allocator("64 MiB") for _ in range(2)]
    for allocator in allocators:
        allocator.set_timing_counter(counter)
        allocator.set_safe_frontier(1 << 40)
    threads = [threading.Thread(target=work, args=(allocator,)) for allocator in allocators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.next() == 2 * frees + 1


def test_a_counter_can_be_pickled_and_an_allocator_cannot() -> None:
    counter = bfc.SharedCounter()
    counter.next()
    assert pickle.loads(pickle.dumps(counter)).next() == 2
    with pytest.raises(TypeError, match=r"cannot pickle .*BFCAllocator"):
        pickle.dumps(bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB")))
