"""Forks while another thread replays, allocates, or lets a view go."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from own_interpreter import run


def test_a_child_forked_during_a_replay_can_use_its_allocator() -> None:
    run("""
        trace = long_trace(10)
        device = bfc.SimulatedSubAllocator("1 GiB")
        a = bfc.BFCAllocator(device)
        faults, stop = [], threading.Event()

        def load():
            try:
                while not stop.is_set():
                    trace.replay(a)
            except BaseException as fault:
                faults.append(fault)

        def use():
            a.stats()
            assert_usable(a)
            a.close()

        def drop():
            b.pop()
            gc.collect()
            a.stats()

        b = [a.allocate(100)]
        loader = threading.Thread(target=load)
        loader.start()
        children = []
        for work in [use, drop] * 4:
            replayed = a.stats().num_allocs + 10_000
            while a.stats().num_allocs < replayed and loader.is_alive():
                time.sleep(0.001)
            children.append(in_child(work))
        try:
            for wait in children:
                wait()
        finally:
            stop.set()
            loader.join()
        assert not faults, faults
        b.pop().free()
        assert a.stats().bytes_in_use == 0
        assert_usable(a)
        a.close()
        assert device.live == {}
    """)


def test_a_child_forked_while_another_thread_allocates_does_not_wait_for_that_thread() -> None:
    run("""
        from bfc.testing import Misbehaving

        def stop():
            inside.set()
            go_on.wait(60)

        inside, go_on = threading.Event(), threading.Event()
        device = Misbehaving("1 GiB")
        a = bfc.BFCAllocator(device, allow_growth=True)
        small = a.allocate_raw(100)
        got = []
        device.on("alloc", 1, first=stop)
        other = threading.Thread(target=lambda: got.append(a.allocate_raw(900 << 20)))
        other.start()
        assert inside.wait(60)

        def use():
            with contextlib.suppress(bfc.OutOfMemoryError):
                a.deallocate_raw(a.allocate_raw(600 << 20))
            a.deallocate_raw(small)
            assert_usable(a)
            a.close()

        def drop():
            a.close()
            assert device.live == {}

        try:
            for work in (use, drop):
                in_child(work)()
        finally:
            go_on.set()
            other.join()
        a.deallocate_many([small, *got])
        assert a.stats().bytes_in_use == 0
        assert_usable(a)
        a.close()
        assert device.live == {}
    """)


def test_a_view_that_goes_while_a_fork_holds_the_locks_does_not_hang() -> None:
    """Hooks of a fork that were registered before ours run after it, with every lock held."""
    script = """
        import gc, os, faulthandler
        armed = []
        os.register_at_fork(before=lambda: armed and gc.collect())
        faulthandler.dump_traceback_later(20, exit=True)
        import bfc
        allocator = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"))
        class Cycle: pass
        cycle = Cycle()
        cycle.me, cycle.view = cycle, memoryview(allocator.allocate(100))
        del cycle
        gc.disable()
        armed.append(1)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        allocator.allocate(10).free()
        print(allocator.stats().bytes_in_use)
    """
    command = [sys.executable, "-W", "ignore:This process", "-c", textwrap.dedent(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.stderr) == ("0\n", "")


def test_a_pool_that_a_fork_drops_is_released_after_it():
    """A hook that runs between bfc's and the fork waited for the lock that its own thread held."""
    script = """
        import gc, os

        held = {}
        os.register_at_fork(before=lambda: (held.clear(), gc.collect()))

        import bfc

        allocator = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        held["pool"] = bfc.MemPool(allocator)
        with bfc.use_mem_pool(held["pool"]):
            allocator.deallocate_raw(allocator.allocate_raw(1000))
        child = os.fork()
        assert allocator.stats().pool_bytes == 0
        if child:
            assert os.waitpid(child, 0)[1] == 0
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], timeout=60, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
