"""Replays of seconds: others need not wait for their end, and Ctrl-C ends them."""

from __future__ import annotations

import pytest
from own_interpreter import run

HELD = {
    "an address": ("a.allocate_raw(100)", "a.deallocate_raw(held.pop())", 8),
    "a buffer": ("a.allocate(100)", "held.pop()", 20),
    "a view": ("memoryview(a.allocate(100))", "held.pop()", 20),
}


@pytest.mark.long
@pytest.mark.parametrize("what", HELD)
def test_a_free_does_not_wait_for_the_end_of_a_replay(what: str) -> None:
    take, drop, count = HELD[what]
    run(f"""
        trace = long_trace(80)
        a = bfc.BFCAllocator(bfc.HostSubAllocator("1 GiB"))
        held = [{take} for _ in range({count})]
        order, begun = [], threading.Event()

        def load():
            trace.replay(a, progress=lambda done: begun.set())
            order.append("replay")

        loader = threading.Thread(target=load)
        loader.start()
        begun.wait()
        assert not order, "the replay was too short to test anything"
        while held:
            {drop}
            order.append("free")
        loader.join()
        assert order == ["free"] * {count} + ["replay"], order
        assert_usable(a)
        assert a.stats().bytes_in_use == 0
        a.close()
    """)


def test_an_interrupt_stops_a_long_replay_and_frees_what_it_had() -> None:
    run("""
        import numpy as np
        largest = 600 << 20     # what the last event asks for
        trace = long_trace(80, leave=100)
        trace = bfc.Trace(np.r_[trace.op, 0].astype(np.uint8), np.r_[trace.id, 10**6],
                          np.r_[trace.size, largest].astype(np.uint64))
        device = bfc.HostSubAllocator("2 GiB")
        a = bfc.BFCAllocator(device)
        before = a.allocate_raw(1000)

        def interrupt():
            while a.stats().num_allocs < 100_000:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=interrupt)
        try:
            thread.start()
            trace.replay(a)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("no KeyboardInterrupt")
        thread.join()
        assert a.stats().largest_alloc_size < largest, "it was played to its end"
        assert a.stats().bytes_in_use == 1024, a.stats()
        a.deallocate_raw(before)
        assert_usable(a)
        a.close()
        assert device.live_bytes == 0
    """)
