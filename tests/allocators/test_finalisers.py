"""Frees that nobody asked for: garbage, errors in flight, re-entry, the interpreter's end."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

import bfc
from bfc.testing import Misbehaving

MIB = 1 << 20


class Cycle:
    """Refers to itself, so that only the garbage collector can end it."""

    def __init__(self, buffer: object) -> None:
        self.buffer = buffer
        self.myself = self


@pytest.fixture(autouse=True)
def no_unraisable(monkeypatch: pytest.MonkeyPatch):
    """Fails where a finaliser raised: Python prints such errors and goes on."""
    faults: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda fault: faults.append(fault.exc_value))
    yield
    gc.collect()
    assert faults == []


def within_a_minute(work: Callable[[], object]) -> object:
    """What the work returns. It runs in a thread, so that a deadlock fails and does not hang."""
    outcome: list[object] = []
    thread = threading.Thread(target=lambda: outcome.append(work()), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "deadlock"
    assert outcome, "it raised"
    return outcome[0]


# -- garbage collection ----------------------------------------------------------------------------


def test_buffers_in_cycles_are_freed_by_the_collector(make_allocator) -> None:
    allocator = make_allocator()
    cycles = [Cycle(allocator.allocate(1000)) for _ in range(50)]
    cycles.clear()
    gc.collect()
    assert allocator.stats().bytes_in_use == 0


def test_running_out_of_memory_collects_garbage_first(make_allocator) -> None:
    allocator = make_allocator("1 MiB")
    gc.disable()
    try:
        Cycle(allocator.allocate(MIB))
        assert allocator.allocate(MIB).nbytes == MIB
    finally:
        gc.enable()


def test_strict_collects_no_garbage(make_allocator) -> None:
    allocator = make_allocator("1 MiB", strict=True)
    gc.disable()
    try:
        Cycle(allocator.allocate(MIB))
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate(MIB)
    finally:
        gc.enable()


def test_views_and_exports_in_cycles_are_freed_too(make_allocator) -> None:
    allocator = make_allocator(bfc.HostSubAllocator("4 MiB"))
    for take in (
        memoryview,
        lambda b: b.view("u1"),
        lambda b: memoryview(b.view("f4")),
        lambda b: b.__dlpack__(),
    ):
        cycle = Cycle(take(allocator.allocate(1024)))
        del cycle
        gc.collect()
        assert allocator.stats().bytes_in_use == 0


def test_an_allocator_and_its_buffers_in_one_cycle_go_together(simulated) -> None:
    device = simulated()
    allocator = bfc.BFCAllocator(device)
    cycle = Cycle([allocator, allocator.allocate(1000), allocator.allocate(1000).view("u1")])
    gone = weakref.ref(allocator)
    del allocator, cycle
    gc.collect()
    assert gone() is None
    assert device.live == {}


def test_an_allocator_and_an_export_of_its_memory_in_one_cycle_leak_no_region() -> None:
    host = bfc.HostSubAllocator("4 MiB")
    allocator = bfc.BFCAllocator(host)
    cycle = Cycle(
        [allocator, memoryview(allocator.allocate(1000)), allocator.allocate(9).__dlpack__()]
    )
    del allocator, cycle
    gc.collect()
    assert host.live_bytes == 0


def test_an_allocator_that_holds_its_own_buffers_can_be_collected(simulated) -> None:
    class Hoarder(bfc.BFCAllocator):
        pass

    device = simulated()
    allocator = Hoarder(device)
    allocator.kept = [allocator.allocate(1000)]
    del allocator
    gc.collect()
    assert device.live == {}


def test_a_source_may_refer_to_its_allocator(simulated) -> None:
    source = Misbehaving("1 MiB")
    source.allocator = bfc.BFCAllocator(source)
    source.allocator.allocate_raw(1)
    calls = source.calls
    del source
    gc.collect()
    assert [kind for kind, *_ in calls] == ["alloc", "free"]


# -- re-entry --------------------------------------------------------------------------------------


def test_a_source_may_free_and_allocate_in_the_middle_of_alloc(make_allocator) -> None:
    source = Misbehaving("64 MiB")
    allocator = make_allocator(source, allow_growth=True)
    held = [allocator.allocate(MIB), allocator.allocate(MIB)]
    inner: list[int] = []

    def inside() -> None:
        held.pop().free()
        inner.append(allocator.allocate_raw(MIB))
        held.clear()
        gc.collect()
        allocator.check()
        assert allocator.snapshot().regions

    source.on("alloc", 1, first=inside)
    assert within_a_minute(lambda: allocator.allocate_raw(3 * MIB)) > 0
    assert inner
    allocator.check()
    assert allocator.stats().bytes_in_use == allocator.allocated_size(inner[0]) + 4 * MIB


def test_a_source_may_extend_again_in_the_middle_of_alloc(make_allocator) -> None:
    source = Misbehaving("64 MiB")
    allocator = make_allocator(source, allow_growth=True)
    depth: list[int] = []

    def inside() -> None:
        if len(depth) < 5:
            depth.append(0)
            allocator.allocate_raw(256)

    source.on("alloc", first=inside)
    within_a_minute(lambda: allocator.allocate_raw(256))
    allocator.check()
    assert allocator.stats().num_allocs == 6
    assert allocator.stats().pool_bytes <= 64 * MIB


@pytest.mark.parametrize("limit", ["2 MiB", "4 MiB"])
def test_re_entry_under_a_tight_limit_ends(make_allocator, limit: str) -> None:
    source = Misbehaving("64 MiB")
    allocator = make_allocator(source, memory_limit=limit, allow_growth=True)

    def inside() -> None:
        with contextlib.suppress(bfc.OutOfMemoryError):
            allocator.deallocate_raw(allocator.allocate_raw(256))

    source.on("alloc", 1, first=inside)
    assert within_a_minute(lambda: allocator.allocate_raw(2 * MIB)) > 0
    allocator.check()
    assert source.live_bytes <= allocator.memory_limit


def test_a_source_may_allocate_in_the_middle_of_free(make_allocator) -> None:
    source = Misbehaving("64 MiB")
    allocator = make_allocator(source, allow_growth=True)
    allocator.deallocate_raw(allocator.allocate_raw(MIB))

    def inside() -> None:
        allocator.allocate_raw(256)

    source.on("free", 1, first=inside)
    assert within_a_minute(allocator.release_free_regions) == 2 * MIB
    allocator.check()
    assert allocator.stats().bytes_in_use == 256


def test_a_buffer_that_dies_in_the_middle_of_alloc_is_freed(make_allocator) -> None:
    source = Misbehaving("8 MiB")
    allocator = make_allocator(source, allow_growth=True)
    Cycle(allocator.allocate(2 * MIB))
    source.on("alloc", first=gc.collect)
    allocator.allocate_raw(2 * MIB)
    source.off()
    allocator.allocate_raw(256)
    allocator.check()
    assert allocator.stats().bytes_in_use == 2 * MIB + 256


def test_finalisers_may_use_the_allocator(make_allocator) -> None:
    allocator = make_allocator("64 MiB")
    made: list[int] = []

    class Busy:
        def __init__(self, buffer: bfc.Buffer) -> None:
            self.buffer = buffer
            self.myself = self

        def __del__(self) -> None:
            made.append(allocator.allocate_raw(256))
            self.buffer.free()
            allocator.deallocate_raw(made.pop())

    for _ in range(200):
        Busy(allocator.allocate(1000))
    gc.collect()
    assert allocator.stats().bytes_in_use == 0
    allocator.check()


def test_weak_reference_callbacks_may_use_the_allocator(make_allocator) -> None:
    allocator = make_allocator("64 MiB")
    called: list[int] = []

    def callback(_gone: object) -> None:
        ptr = allocator.allocate_raw(256)
        allocator.deallocate_raw(ptr)
        called.append(ptr)

    cycles = [Cycle(allocator.allocate(1000)) for _ in range(20)]
    watchers = [weakref.ref(cycle, callback) for cycle in cycles]
    cycles.clear()
    gc.collect()
    assert len(called) == len(watchers) == 20
    assert allocator.stats().bytes_in_use == 0


def test_collections_at_every_turn_change_nothing(make_allocator) -> None:
    allocator = make_allocator("64 MiB", allow_growth=True)
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for number in range(300):
            Cycle(allocator.allocate(number * 100 + 1))
            allocator.allocate("1 KiB")
    finally:
        gc.set_threshold(*before)
    gc.collect()
    allocator.check()
    assert allocator.stats().bytes_in_use == 0


# -- errors in flight ------------------------------------------------------------------------------


def test_a_buffer_dropped_by_an_error_is_freed_and_the_error_goes_on(make_allocator) -> None:
    allocator = make_allocator()

    def fail() -> None:
        _buffer = allocator.allocate(1000)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    gc.collect()
    assert allocator.stats().bytes_in_use == 0


def test_a_failed_allocation_leaves_nothing_behind(make_allocator) -> None:
    allocator = make_allocator("1 MiB")
    for _ in range(100):
        with pytest.raises(bfc.OutOfMemoryError):
            allocator.allocate("2 MiB")
    assert allocator.stats().bytes_in_use == 0


def test_an_interrupted_generator_frees_its_buffers(make_allocator) -> None:
    allocator = make_allocator()

    def produce():
        with allocator.allocate(1000) as buffer:
            yield buffer.ptr

    generator = produce()
    next(generator)
    assert allocator.stats().bytes_in_use == 1024
    generator.close()
    assert allocator.stats().bytes_in_use == 0


def test_a_buffer_dies_after_its_closed_allocator_without_a_word(
    make_allocator, monkeypatch
) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    allocator = make_allocator()
    buffer, cycle = allocator.allocate(1000), Cycle(allocator.allocate(1000))
    allocator.close()
    del buffer, cycle
    gc.collect()
    allocator.check()
    assert reported == []


def test_a_dropped_allocator_whose_source_fails_is_reported_once(monkeypatch) -> None:
    reported: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    allocator = bfc.BFCAllocator(source := Misbehaving("1 MiB"))
    source.on("free", raises=RuntimeError("gone"))
    allocator.allocate_raw(1)
    del allocator
    gc.collect()
    assert len(reported) == 1
    assert isinstance(reported[0].exc_value, bfc.SubAllocatorError)


# -- crashes: each in an interpreter of its own ----------------------------------------------------


def run_python(code: str) -> tuple[int, str]:
    """(exit status, all that was printed) of a script."""
    run = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(bfc.__file__).parent.parent,
    )
    return run.returncode, run.stdout + run.stderr


SETUP = """
import atexit, gc, sys, threading, time
import bfc
device = bfc.SimulatedSubAllocator("64 MiB")
host = bfc.BFCAllocator(bfc.HostSubAllocator("8 MiB"))
a = bfc.BFCAllocator(device, allow_growth=True)
"""

ENDINGS = {
    "live buffers": """
        b = [a.allocate(1000) for _ in range(100)]
        c = host.allocate(5)
    """,
    "a buffer in a cycle": """
        class C: pass
        c = C()
        c.me, c.buffer, c.allocator = c, a.allocate(9), a
    """,
    "an export": """
        m = memoryview(host.allocate(9))
        v = host.allocate(8).view("f4")
        w = memoryview(v)
    """,
    "a capsule": """
        c = host.allocate(9).__dlpack__()
        d = host.allocate(9).__dlpack__(max_version=(1, 0))
    """,
    "an array": """
        import numpy as np
        x, y = np.asarray(host.allocate(9)), np.from_dlpack(host.allocate(9))
    """,
    "a buffer in sys": """
        sys.kept = [a.allocate(9), host.allocate(9), memoryview(host.allocate(3))]
    """,
    "a buffer in builtins": """
        import builtins
        builtins.kept, builtins.host = [a, a.allocate(9)], host
    """,
    "a free at exit": """
        b = a.allocate(9)
        atexit.register(b.free)
        atexit.register(a.close)
    """,
    "an allocation at exit": """
        atexit.register(lambda: a.allocate(9))
        atexit.register(lambda: host.allocate(9))
    """,
    "a finaliser at exit": """
        class D:
            def __del__(self):
                a.deallocate_raw(self.ptr)
                self.buffer.free()
        d = D()
        d.me, d.ptr, d.buffer = d, a.allocate_raw(9), a.allocate(9)
    """,
    "a waiting block": """
        p, b = a.allocate_raw(9, stream=3), a.allocate(9, stream=3)
        device.hold(3)
        a.deallocate_raw(p)
    """,
    "daemon threads": """
        begun = threading.Barrier(5)
        def work():
            x, y = a.allocate(1000), host.allocate(1000)
            begun.wait()
            while True:
                x, y = a.allocate(1000), host.allocate(1000)
        for _ in range(4): threading.Thread(target=work, daemon=True).start()
        begun.wait()
    """,
    "threads": """
        def work():
            for _ in range(2000):
                x = a.allocate(1000)
                a.deallocate_raw(a.allocate_raw(5))
        for _ in range(4): threading.Thread(target=work).start()
    """,
    "a closed allocator": """
        b = a.allocate(9)
        a.close()
    """,
    "a dropped allocator": """
        b = a.allocate(9)
        del a, device
    """,
    "no module left": """
        b = a.allocate(9)
        sys.modules.clear()
    """,
    "an exit in the middle": """
        b = a.allocate(9)
        sys.exit(0)
    """,
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ENDINGS)
def test_the_interpreter_ends_in_silence_with(name: str) -> None:
    status, printed = run_python(SETUP + textwrap.dedent(ENDINGS[name]))
    assert (status, printed) == (0, "")


def test_the_interpreter_ends_while_a_thread_is_inside_the_source() -> None:
    status, printed = run_python("""
        import bfc, threading
        from bfc.testing import Misbehaving
        started = threading.Event()
        source = Misbehaving("1 MiB")
        source.on("alloc", first=lambda: (started.set(), threading.Event().wait()))
        a = bfc.BFCAllocator(source)
        threading.Thread(target=a.allocate_raw, args=(5,), daemon=True).start()
        started.wait()
    """)
    assert (status, printed) == (0, "")


UNFINISHED = {
    "an allocator never set up": "a = bfc.BFCAllocator.__new__(bfc.BFCAllocator)",
    "a subclass that forgot": "class A(bfc.BFCAllocator):\n  def __init__(self): pass\na = A()",
    "the common base": "a = bfc.Allocator()",
    "a buffer by the back door": "a = bfc.Buffer.__new__(bfc.Buffer)",
    "a view by the back door": "a = bfc.BufferView.__new__(bfc.BufferView)",
}
USES = """
for use in (
    lambda: a.allocate_raw(1), lambda: a.allocate(1), lambda: a.stats(), lambda: a.snapshot(),
    lambda: a.check(), lambda: a.release_free_regions(), lambda: a.next_region_size,
    lambda: repr(a), lambda: a.deallocate_raw(1), lambda: a.record_stream(1, 1),
    lambda: a.memory_limit, lambda: a.close(), lambda: a.device, lambda: a.stream, lambda: a.ptr,
    lambda: len(a), lambda: a.freed, lambda: memoryview(a), lambda: a.__dlpack__(),
    lambda: a.__dlpack_device__(), lambda: a.view("u1"), lambda: a.free(), lambda: a.base,
    lambda: bytes(a.view("u1")), lambda: a.__enter__(), lambda: a.set_safe_frontier(3),
):
    try:
        use()
    except Exception:
        pass
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", UNFINISHED)
def test_nothing_crashes_on(name: str) -> None:
    status, printed = run_python(f"import bfc\n{UNFINISHED[name]}\n{USES}")
    assert status == 0, printed


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "code",
    [
        "bfc.BufferView(None, 'u1')",
        "bfc.BufferView(b'abc', 'u1')",
        "simulated.set_timing_counter(None)",
        "simulated.record_stream(None, 1)",
        "host.allocate(9).__dlpack__(max_version=())",
        "host.allocate(9).__dlpack__(max_version=[])",
        "host.allocate(9).__dlpack__(dl_device=())",
    ],
)
def test_what_makes_no_sense_raises_and_does_not_crash(code: str) -> None:
    status, printed = run_python(
        "import bfc\n"
        "simulated = bfc.BFCAllocator(bfc.SimulatedSubAllocator('1 MiB'))\n"
        "host = bfc.BFCAllocator(bfc.HostSubAllocator('4 MiB'))\n"
        f"try: {code}\nexcept Exception: print('raised')"
    )
    assert (status, printed) == (0, "raised\n")


def test_the_timing_counter_that_is_replaced_may_ask_the_allocator_as_it_goes() -> None:
    """It went with the lock held, and its finaliser waited for that lock."""
    code, said = run_python(
        "import faulthandler, bfc\n"
        "faulthandler.dump_traceback_later(30, exit=True)\n"
        "allocator = bfc.BFCAllocator(bfc.SimulatedSubAllocator('1 MiB'))\n"
        "class Counter(bfc.SharedCounter):\n"
        "    def __del__(self):\n"
        "        print(allocator.stats().bytes_in_use)\n"
        "allocator.set_timing_counter(Counter())\n"
        "allocator.set_timing_counter(bfc.SharedCounter())\n"
        "print('replaced')\n"
    )
    assert (code, said) == (0, "0\nreplaced\n")
