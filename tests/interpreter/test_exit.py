"""The end of the interpreter, whatever daemon threads do then.

Python up to 3.13 ends a thread that asks for the GIL meanwhile by unwinding its stack, later ones
stop it for good.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
import torch_table
from cpp import built_library

ALLOCATORS = {
    "bfc": "bfc.BFCAllocator(bfc.SimulatedSubAllocator('1 GiB'), allow_growth=True)",
    "caching": "bfc.CachingAllocator(bfc.HostSubAllocator('1 GiB'))",
    "pinned": "bfc.PinnedAllocator(bfc.HostSubAllocator('1 GiB'))",
}


def run(script: str, says: str = "", times: int = 1, preload: Path | None = None) -> None:
    """As a process, which is to end as usual, and to say this."""
    preloaded = {} if preload is None else {"LD_PRELOAD": str(preload)}
    for _ in range(times):
        ran = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env=os.environ | preloaded,
        )
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, says, "")


@pytest.mark.long
@pytest.mark.parametrize("policy", ALLOCATORS)
def test_daemon_threads_may_use_an_allocator_as_the_interpreter_ends(policy: str) -> None:
    """One that asked for the GIL where nothing may be unwound aborted the process."""
    run(
        f"""
        import threading, time
        import bfc
        allocator = {ALLOCATORS[policy]}
        trace = bfc.Trace([0, 1] * 100_000, [0, 0] * 100_000, [512, 0] * 100_000)

        def replay():
            trace.replay(allocator)

        def raw():
            allocator.deallocate_raw(allocator.allocate_raw(512))

        def many():
            allocator.deallocate_many(allocator.allocate_many([512] * 1000))

        def release():
            allocator.allocate(3 << 20).free()
            allocator.empty_cache()

        def for_ever(work, number):
            while True:
                work()
                rounds[number] += 1

        works = [raw, raw, raw, raw, release, release]
        if "{policy}" != "pinned":
            works += [replay, replay, many, many]
        rounds = [0] * len(works)
        for number, work in enumerate(works):
            threading.Thread(target=for_ever, args=[work, number], daemon=True).start()
        while min(rounds) == 0:
            time.sleep(0.001)
        """,
        times=5,
    )


def test_what_outlives_the_names_of_its_module_ends_in_silence() -> None:
    """Python sets these to None in turn, while something in C still has the modules. `threading`
    was imported earlier, so it comes later."""
    run(
        """
        import ctypes, sys, threading
        import bfc

        stitched = bfc.CachingAllocator(bfc.HostSubAllocator("1 GiB"), stitch=True)
        stitched.allocate("3 MiB").free()
        caching = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
        with caching.capture(5) as graph:
            caching.allocate(1000, stream=5)
        threading.kept = stitched, graph, bfc.MemPool(caching)
        del stitched, caching, graph
        for name, module in list(sys.modules.items()):
            if name.startswith("bfc") or name == "threading":
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
        """
    )


@pytest.mark.parametrize("policy", ALLOCATORS)
def test_what_is_freed_as_the_interpreter_ends_can_be_allocated_again(policy: str) -> None:
    """`Buffer.free` did nothing from then on, and a daemon thread soon ran out of memory."""
    run(
        f"""
        import atexit

        @atexit.register     # it runs after all that bfc registers
        def allocate_and_free():
            for _ in range(1000):    # 3 GiB in all
                allocator.allocate(3 << 20).free()

        import bfc
        allocator = {ALLOCATORS[policy]}
        """
    )


@pytest.mark.parametrize("use", ["record_history()", "record_stream(last.buffer.ptr, 7)"])
def test_a_free_in_the_last_finaliser_is_quiet(use: str) -> None:
    """By then the names in bfc's modules are None, and what writes down a stack finds no `sys`."""
    run(
        f"""
        import ctypes, sys, types
        oldest = sys.modules["oldest"] = types.ModuleType("oldest")
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(oldest))    # its names are cleared last
        import bfc
        exec('''
        class Last:
            def __del__(self):
                assert self.is_finalizing()
                self.buffer.free()
        ''', vars(oldest))
        oldest.last = last = oldest.Last()
        last.is_finalizing = sys.is_finalizing
        allocator = {ALLOCATORS["caching"]}
        last.buffer = allocator.allocate(1000)
        allocator.{use}
        """
    )


def test_an_allocator_serves_the_last_finaliser_after_a_daemon_thread_was_cut_off() -> None:
    """It waited for the lock of the source, and for the bytes that the thread had asked it for."""
    run(
        """
        import sys, threading, types
        import bfc

        class Slow(bfc.SimulatedSubAllocator):
            def _refuses(self, kind, nbytes):     # with the lock of the source held
                if nbytes == 256 << 20:
                    inside.set()
                    never.wait()
                return super()._refuses(kind, nbytes)

        class Last:
            def __del__(self):
                assert sys.is_finalizing()
                allocator.deallocate_raw(allocator.allocate_raw(900 << 20))
                allocator.close()
                print("served", flush=True)

        inside, never = threading.Event(), threading.Event()
        allocator = bfc.CachingAllocator(Slow("1 GiB"), memory_limit="1 GiB")
        threading.Thread(target=allocator.allocate_raw, args=[256 << 20], daemon=True).start()
        inside.wait()
        # The names of a module that lives on are cleared, the youngest module's first.
        bfc.youngest = sys.modules["youngest"] = types.ModuleType("youngest")
        bfc.youngest.last = Last()
        """,
        says="served\n",
    )


HARNESS = """
#include <unistd.h>
#include <atomic>
#include <thread>

struct Managed { char tensor[48]; void* context; void (*deleter)(Managed*); };

static std::atomic<bool> begun{false};

// As a destructor does.
static void let_go(Managed* managed) noexcept { managed->deleter(managed); }

extern "C" void let_go_in_a_thread(Managed* managed) {   // holds the GIL: the thread waits for it
    std::thread([=] { begun = true; let_go(managed); }).detach();
    while (!begun) usleep(1000);
    usleep(20000);
}
"""


@pytest.fixture(scope="module")
def consumer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exit")
    (folder / "consumer.cpp").write_text(HARNESS)
    return built_library(folder / "consumer.cpp", folder)


TAKEN_OVER = """
import ctypes, sys, time, types
import bfc
allocator = bfc.BFCAllocator(bfc.HostSubAllocator("64 MiB"))
capsule = allocator.allocate(100).__dlpack__()
python = ctypes.pythonapi
python.PyCapsule_GetPointer.restype = ctypes.c_void_p
python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
python.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
managed = ctypes.c_void_p(python.PyCapsule_GetPointer(capsule, b"dltensor"))
name = b"used_dltensor"
python.PyCapsule_SetName(capsule, name)
"""


def test_a_consumer_in_c_may_let_go_of_memory_as_the_interpreter_ends(consumer: Path) -> None:
    """Its destructor may not be unwound."""
    run(
        TAKEN_OVER
        + textwrap.dedent(f"""
        class Last:
            def __del__(self):
                assert sys.is_finalizing()
                time.sleep(0.2)     # without the GIL
                print("slept", flush=True)

        bfc.youngest = sys.modules["youngest"] = types.ModuleType("youngest")
        bfc.youngest.last = Last()
        bfc.youngest.names = globals()
        sys.setswitchinterval(100)
        ctypes.PyDLL({str(consumer)!r}).let_go_in_a_thread(managed)
        """),
        says="slept\n",
    )


LATE = pytest.mark.skipif(
    not sysconfig.get_config_var("Py_ENABLE_SHARED"), reason="this Python is linked statically"
)
#: Functions of the table that take the GIL, in the order of late_threads.cpp.
OF_THE_TABLE = ("allocate", "record_stream", "copy", "empty", "stats", "reset_accumulated_stats")
OF_THE_TABLE += ("reset_peak_stats", "memory_info", "retain", "release")


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = Path(__file__).with_name("late_threads.cpp")
    return built_library(source, tmp_path_factory.mktemp("late"), ["-ldl"])


@LATE
def test_the_exit_waits_for_a_consumer_that_is_about_to_take_the_gil(late: Path) -> None:
    """It had seen that the interpreter runs, and asked for the GIL when that was gone: a crash."""
    run(TAKEN_OVER + f"ctypes.CDLL({str(late)!r}).let_go(managed)", says="let go\n", preload=late)


@LATE
@pytest.mark.parametrize(
    "function",
    [
        name if name == "allocate" else pytest.param(name, marks=pytest.mark.long)
        for name in OF_THE_TABLE
    ],
)
def test_the_exit_waits_for_a_back_end_that_is_about_to_take_the_gil(
    late: Path, function: str
) -> None:
    """The same. It may be stopped later: a source lets others have the GIL while it is asked."""
    run(
        f"""
        import ctypes, sys
        import bfc
        sys.path.insert(0, {str(Path(torch_table.__file__).parent)!r})
        import torch_table
        table = torch_table.Table(bfc.CachingAllocator(bfc.HostSubAllocator("64 MiB")))
        table.call("retain")
        ctypes.CDLL({str(late)!r}).call(table.address, {OF_THE_TABLE.index(function)})
        """,
        preload=late,
    )


def test_an_exit_hook_may_use_the_table() -> None:
    """Also one that runs after ours: it holds the GIL."""
    run(
        f"""
        import atexit

        def last():
            call = table.functions["copy"]
            held = ctypes.PYFUNCTYPE(ctypes.c_int, *call.argtypes)(table.structure.copy)
            why = ctypes.create_string_buffer(100)
            print(held(table.structure.self, ptr, ptr, 8, 0, why, 100), flush=True)

        atexit.register(last)
        import ctypes, sys
        import bfc
        sys.path.insert(0, {str(Path(torch_table.__file__).parent)!r})
        import torch_table
        table = torch_table.Table(bfc.CachingAllocator(bfc.HostSubAllocator("64 MiB")))
        ptr = table.allocate(1000)
        """,
        says="0\n",
    )
