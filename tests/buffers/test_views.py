"""Views beside frees, closes and replays: none shows memory that is free."""

from __future__ import annotations

import pytest
from own_interpreter import run

import bfc


def test_no_view_outlives_a_close_that_waited_for_a_fence() -> None:
    run("""
        class Fence:
            finished = False
            def done(self):
                return self.finished
            def wait(self):
                self.finished = True
                try:
                    views.append(memoryview(b))   # stands for a thread that takes it meanwhile
                except (bfc.ClosedError, BufferError):
                    pass

        from bfc.testing import Misbehaving

        views = []
        device = Misbehaving(bfc.HostSubAllocator("64 MiB"), asynchronous=True)
        device.on("fence", instead=lambda ask, stream: Fence())
        a = bfc.BFCAllocator(device)
        b = a.allocate(1 << 20)
        used = a.allocate(10)
        a.record_stream(used, 7)
        used.free()
        try:
            a.close()
        except BufferError:
            assert views and not a.closed
        if views:
            assert not a.closed, "closed, and a view is still out"
            views[0][0] = 1
            views.pop().release()
            a.close()
        assert device.live_bytes == 0
        a.check()
    """)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seconds", [0.4, 2])
def test_no_view_outlives_a_free_that_races_with_it(seconds: float) -> None:
    run(f"""
        import numpy as np
        n = 1 << 18
        op = np.tile(np.array([0, 1], np.uint8), n // 2)
        trace = bfc.Trace(op, np.zeros(n, np.uint32), np.where(op == 0, 256, 0).astype(np.uint64))
        a = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"))
        stop = threading.Event()

        def load():     # so that both have to wait for the lock
            while not stop.is_set():
                trace.replay(a)

        def view():
            barrier.wait()
            with contextlib.suppress(bfc.ClosedError):
                got.append(memoryview(b))

        def free():
            barrier.wait()
            with contextlib.suppress(BufferError):
                b.free()

        loader = threading.Thread(target=load)
        loader.start()
        bad = 0
        until = time.monotonic() + {seconds}
        while time.monotonic() < until and not bad:
            b, got, barrier = a.allocate(1000), [], threading.Barrier(2)
            threads = [threading.Thread(target=work) for work in (free, view)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            bad += bool(got) and b.freed
            for view_taken in got:
                view_taken.release()
        stop.set()
        loader.join()
        assert not bad, "a view of freed memory"
        del b
        a.check()
        assert a.stats().bytes_in_use == 0
        a.close()
    """)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seconds", [0.4, 2.5])
def test_buffers_can_be_used_while_a_replay_grows_the_table(seconds: float) -> None:
    run(f"""
        import numpy as np
        n = 1_500_000
        ids = np.arange(n, dtype=np.uint32)
        trace = bfc.Trace(np.zeros(n, np.uint8), ids, np.full(n, 256, np.uint64))
        until = time.monotonic() + {seconds}
        while time.monotonic() < until:
            a = bfc.BFCAllocator(bfc.HostSubAllocator("1 GiB"))
            b = a.allocate(100)
            replay = threading.Thread(target=trace.replay, args=(a,))
            replay.start()
            while replay.is_alive():
                for _ in range(1000):
                    a.record_stream(b, 0)
                for _ in range(100):
                    memoryview(b).release()
            replay.join()
            b.free()
            a.close()
    """)


def test_a_view_cannot_be_set_up_a_second_time(make_allocator) -> None:
    allocator = make_allocator(bfc.HostSubAllocator("4 MiB"))
    buffer, other = allocator.allocate(64), allocator.allocate(8)
    view = buffer.view("u1")
    for arguments in [(buffer, "u1", 4), (other, "u1"), (buffer, "u1", (1 << 40,))]:
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            view.__init__(*arguments)
        assert len(view) == 64
        with memoryview(view) as memory:
            assert (memory.nbytes, memory.shape) == (64, (64,))
    other.free()
    bytes(view)


def test_freeing_many_changes_nothing_where_one_of_them_is_viewed(make_allocator) -> None:
    allocator = make_allocator(bfc.HostSubAllocator("4 MiB"))
    ptr, buffer = allocator.allocate_raw(1000), allocator.allocate(10)
    view = memoryview(buffer)
    for ptrs in ([ptr, buffer.ptr], [buffer.ptr, ptr]):
        with pytest.raises(BufferError):
            allocator.deallocate_many(ptrs)
        assert allocator.requested_size(ptr) == 1000
        assert allocator.stats().bytes_in_use == 1024 + 256
    view.release()
    allocator.deallocate_many([ptr, buffer.ptr])
    assert allocator.stats().bytes_in_use == 0
