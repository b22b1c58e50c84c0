"""Forks: whatever other threads, hooks and finalisers do meanwhile, parent and child go on.

Each script is a process of its own, so that a hook can be registered before bfc is imported. A hang
is a failure: the script is ended.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

#: Since 3.12 Python warns of each fork of a process with threads, where it finds its threads.
QUIET = ("-W", "ignore:This process:DeprecationWarning")
PROLOGUE = """
    import faulthandler, gc, os, signal, sys, threading, time
    faulthandler.dump_traceback_later(60, exit=True)

    def Thread(**given):
        return threading.Thread(**given, daemon=True)   # where the script fails it ends

    def in_use(allocator):
        if hasattr(allocator, "stats"):
            allocator.check()
            return allocator.stats().bytes_in_use
        return allocator.host_memory_stats()["active_bytes.current"]

    def in_child(work):
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            signal.alarm(40)
            work()
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            os._exit(code)

    def ended(child):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    def fork(work=lambda: None):
        ended(in_child(work))
"""

ALLOCATORS = [
    "bfc.BFCAllocator(bfc.SimulatedSubAllocator('1 GiB'), allow_growth=True)",
    "bfc.BFCAllocator(bfc.HostSubAllocator('1 GiB'), allow_growth=True)",
    "bfc.CachingAllocator(bfc.SimulatedSubAllocator('1 GiB'))",
    "bfc.CachingAllocator(bfc.HostSubAllocator('1 GiB'))",
    "bfc.PinnedAllocator(bfc.SimulatedSubAllocator('1 GiB'))",
    "bfc.PinnedAllocator(bfc.HostSubAllocator('1 GiB'))",
]


def run(script: str) -> None:
    code = textwrap.dedent(PROLOGUE) + textwrap.dedent(script)
    command = [sys.executable, *QUIET, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


# -- several at once -------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("forkers", [2, 5])
def test_threads_that_fork_while_allocators_come_and_go_do_not_wait_for_each_other(
    forkers: int,
) -> None:
    """Each took the locks of all allocators, in the order of a set that the makers changed."""
    run(f"""
        import bfc
        trace = bfc.Trace([0, 1] * 3000, [0, 0] * 3000, [512, 0] * 3000)
        allocators = [bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) for _ in range(3)]
        over = threading.Event()

        def use():
            for allocator in allocators:
                allocator.deallocate_raw(allocator.allocate_raw(3 << 20))
                allocator.check()

        def forks():
            for _ in range(120 // {forkers}):
                fork(use)

        def replays(allocator):
            while not over.is_set():
                trace.replay(allocator)

        def makes():
            while not over.is_set():
                some = [bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB")) for _ in range(20)]

        others = [Thread(target=replays, args=[allocator]) for allocator in allocators]
        others.append(Thread(target=makes))
        forkers = [Thread(target=forks) for _ in range({forkers})]
        for thread in forkers + others:
            thread.start()
        for thread in forkers:
            thread.join()
        over.set()
        for thread in others:
            thread.join()
        use()
    """)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_child_gets_memory_whatever_other_threads_asked_the_source_for(allocator: str) -> None:
    """The child waited for the source's lock, which a thread of the parent had held."""
    run(f"""
        import bfc
        sys.setswitchinterval(1e-5)
        allocator = {allocator}
        over = threading.Event()

        def work():
            while not over.is_set():
                for ptr in [allocator.allocate_raw(3 << 20) for _ in range(3)]:
                    allocator.deallocate_raw(ptr)
                allocator.empty_cache()

        def use():
            allocator.deallocate_raw(allocator.allocate_raw(40 << 20))
            allocator.empty_cache()
            in_use(allocator)

        threads = [Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(40):
            fork(use)
        over.set()
        for thread in threads:
            thread.join()
        source = allocator.sub_allocator
        allocator.close()
        assert source.live_bytes == 0
    """)


def test_a_lock_of_python_that_a_thread_holds_at_the_fork_is_free_in_the_child() -> None:
    run("""
        from bfc.interpreter._process import ForkSafeLock
        lock, entered, left = ForkSafeLock(), threading.Event(), threading.Event()

        def hold():
            with lock:
                entered.set()
                left.wait()

        def take():
            with lock, lock:
                pass

        thread = Thread(target=hold)
        thread.start()
        entered.wait()
        fork(take)
        taker = Thread(target=take)   # in the parent it is held as before
        taker.start()
        taker.join(0.1)
        assert taker.is_alive()
        left.set()
        thread.join()
        taker.join()
        with lock:
            fork(take)                          # by the thread that forks
            fork(lambda: lock.__exit__(None, None, None))
    """)


# -- hooks and finalisers --------------------------------------------------------------------------

USE = """
    def use():
        for allocator in allocators:
            ptr = allocator.allocate_raw(5 << 20)
            allocator.deallocate_raw(ptr)
            with allocator.allocate(100) as buffer:
                if allocator.host_accessible:
                    memoryview(buffer).release()
            allocator.empty_cache()
            in_use(allocator)
        with bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB")) as another:
            pool = bfc.MemPool(another)
            with bfc.use_mem_pool(pool):
                another.allocate_raw(100)
            del pool
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("when", ["before", "after_in_parent", "after_in_child"])
@pytest.mark.parametrize("earlier", [True, False])
def test_hooks_of_a_fork_may_use_allocators(when: str, earlier: bool) -> None:
    """A hook that was registered before bfc's ran while its own thread held every lock."""
    register = f"os.register_at_fork({when}=lambda: armed and use())"
    run(f"""
        armed = []
        {register if earlier else ""}
        import bfc
        {register if not earlier else ""}
        allocators = [{", ".join(ALLOCATORS[1::2])}]
        {textwrap.indent(textwrap.dedent(USE), " " * 8).strip()}
        use()
        armed.append(True)
        fork(use)
        use()
    """)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("allocator", ALLOCATORS)
def test_a_finaliser_that_a_hook_of_a_fork_calls_may_allocate_and_free(allocator: str) -> None:
    run(f"""
        armed = []
        os.register_at_fork(before=lambda: armed and gc.collect())
        import bfc
        allocator = {allocator}

        class Node:
            def __init__(self):
                self.ptr, self.me = allocator.allocate_raw(1000), self

            def __del__(self):
                allocator.deallocate_raw(self.ptr)
                allocator.deallocate_raw(allocator.allocate_raw(3 << 20))

        gc.collect()
        gc.disable()
        Node()
        armed.append(True)
        fork()
        assert in_use(allocator) == 0
    """)


def test_a_fork_may_wait_for_a_thread_that_frees() -> None:
    """Python takes the lock of its imports behind the hooks. Who holds it may free in a finaliser,
    and waited for the allocator's lock, which the fork had taken."""
    run("""
        import _imp
        held, forking = threading.Event(), threading.Event()
        os.register_at_fork(before=forking.set)
        import bfc
        allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB"))

        def import_something():
            _imp.acquire_lock()
            held.set()
            forking.wait()
            time.sleep(0.05)
            allocator.deallocate_raw(allocator.allocate_raw(1000))
            _imp.release_lock()

        thread = Thread(target=import_something)
        thread.start()
        held.wait()
        fork(lambda: allocator.deallocate_raw(allocator.allocate_raw(1000)))
        thread.join()
    """)


# -- calls under way -------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["BFCAllocator", "CachingAllocator"])
def test_a_hook_in_the_child_waits_for_no_call_of_a_thread_that_it_has_not(policy: str) -> None:
    """Bytes that another thread asked for were set aside until bfc's own hook: an earlier one
    waited for them."""
    run(f"""
        armed = []
        os.register_at_fork(after_in_child=lambda: armed and use())
        import bfc
        from bfc.testing import Misbehaving

        def slow(ask, alignment, nbytes):
            if nbytes == 512 << 20:
                inside.set()
                go_on.wait()
            return ask(alignment, nbytes)

        inside, go_on = threading.Event(), threading.Event()
        source = Misbehaving("1 GiB")
        source.on("alloc", instead=slow)
        allocator = bfc.{policy}(source)
        if "{policy}" == "BFCAllocator":
            allocator = bfc.BFCAllocator(source, allow_growth=True)

        def use():
            allocator.deallocate_raw(allocator.allocate_raw(600 << 20))

        thread = Thread(target=allocator.allocate_raw, args=[512 << 20])
        thread.start()
        inside.wait()
        armed.append(True)
        fork(use)
        go_on.set()
        thread.join()
        assert in_use(allocator) == 512 << 20
        allocator.close()
        assert source.live_bytes == 0
    """)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["BFCAllocator", "CachingAllocator"])
@pytest.mark.parametrize("call", ["alloc", "free"])
def test_a_source_may_fork_inside_its_calls(policy: str, call: str) -> None:
    """The child forgot the bytes that its own thread had set aside, and gave no memory after they
    had come."""
    run(f"""
        import bfc

        from bfc.testing import Misbehaving

        child = []
        source = Misbehaving("1 GiB")
        allocator = bfc.{policy}(source, memory_limit="96 MiB")
        first = allocator.allocate_raw(20 << 20)
        allocator.deallocate_raw(first)
        if "{call}" == "alloc":
            allocator.empty_cache()
        source.on("{call}", 1, first=lambda: child.append(os.fork()))
        allocator.empty_cache()
        live = [allocator.allocate_raw(30 << 20) for _ in range(3)]
        try:
            allocator.allocate_raw(30 << 20)
        except bfc.OutOfMemoryError:
            pass
        else:
            raise AssertionError("the limit is forgotten")
        for ptr in live:
            allocator.deallocate_raw(ptr)
        allocator.check()
        allocator.close()
        assert source.live_bytes == 0
        if child == [0]:
            os._exit(0)
        ended(*child)
    """)


@pytest.mark.parametrize("allocator", [ALLOCATORS[2], ALLOCATORS[4]])
def test_a_hook_in_the_child_waits_for_no_fence_that_another_thread_asks(allocator: str) -> None:
    run(f"""
        armed = []
        os.register_at_fork(after_in_child=lambda: armed and use())
        import bfc

        class Fence:
            def done(self):
                asked.set()
                if not armed or os.getpid() == parent:
                    opened.wait()
                return True

            wait = done

        parent = os.getpid()
        asked, opened = threading.Event(), threading.Event()
        allocator = {allocator}
        source = allocator.sub_allocator
        source.hold(7)
        source.fence = lambda stream: Fence()
        ptr = allocator.allocate_raw(3 << 20)
        allocator.record_stream(ptr, 7)
        allocator.deallocate_raw(ptr)

        def use():
            allocator.empty_cache()
            assert allocator.allocate_raw(3 << 20)

        thread = Thread(target=lambda: allocator.deallocate_raw(allocator.allocate_raw(100)))
        thread.start()
        asked.wait()
        armed.append(True)
        fork()
        opened.set()
        thread.join()
    """)


@pytest.mark.long
@pytest.mark.slow
def test_many_forkers_amid_everything() -> None:
    """Forkers, makers, replays, finalisers, hooks that use allocators, threads on every source."""
    run(f"""
        armed = []
        os.register_at_fork(before=lambda: armed and (gc.collect(), use()))
        os.register_at_fork(after_in_parent=lambda: armed and use())
        os.register_at_fork(after_in_child=lambda: armed and use())
        import bfc
        sys.setswitchinterval(1e-5)
        allocators = [{", ".join(ALLOCATORS)}]
        trace = bfc.Trace([0, 1] * 3000, [0, 0] * 3000, [512, 0] * 3000)
        {textwrap.indent(textwrap.dedent(USE), " " * 8).strip()}

        class Node:
            def __init__(self, allocator):
                self.allocator, self.ptr, self.me = allocator, allocator.allocate_raw(1000), self

            def __del__(self):
                self.allocator.deallocate_raw(self.ptr)

        def forks():
            for _ in range(25):
                fork(use)

        def until_over(work):
            def loop():
                while not over.is_set():
                    work()
            return loop

        def nodes():
            for allocator in allocators:
                Node(allocator)

        over = threading.Event()
        replays = [lambda a=a: trace.replay(a) for a in allocators[:4]]
        makes = lambda: [bfc.BFCAllocator(bfc.HostSubAllocator("1 MiB")) for _ in range(20)]
        others = [Thread(target=until_over(work)) for work in [nodes, makes, use, *replays]]
        forkers = [Thread(target=forks) for _ in range(4)]
        armed.append(True)
        for thread in forkers + others:
            thread.start()
        for thread in forkers:
            thread.join()
        over.set()
        for thread in others:
            thread.join()
        armed.clear()
        gc.collect()
        for allocator in allocators:
            assert in_use(allocator) == 0
            allocator.close()
            assert allocator.sub_allocator.live_bytes == 0
    """)
