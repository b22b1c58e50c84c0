"""What needs a process of its own: no driver, an old one, forks, exits, environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from cuda_machine import ON_GPU

from bfc.testing import cuda_emulator as emulator

ROOT = Path(__file__).parents[2]
needs_emulator = pytest.mark.skipif(ON_GPU, reason="needs the emulated driver")
LOADED = "" if ON_GPU else emulator.preamble() + "; driver = cuda_emulator.load()"


def run(script: str, *, preamble: str = LOADED, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", f"{preamble}\n{textwrap.dedent(script)}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def output(script: str, *, preamble: str = LOADED, **environment: str) -> str:
    """What a script prints, which ends well and says nothing else."""
    ran = run(script, preamble=preamble, **environment)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr
    return ran.stdout.strip()


# -- what is there ---------------------------------------------------------------------------------

ASK = """
    import bfc
    usable = bfc.cuda.is_available()
    print(bool(usable), usable, bfc.cuda.device_count(), sep="|")
    try:
        bfc.CUDASubAllocator()
    except bfc.DeviceUnavailableError as error:
        print(error)
"""


@needs_emulator
def test_available() -> None:
    assert output(ASK) == "True|CUDA is available: 2 devices, driver for CUDA 13.1|2"


@needs_emulator
def test_one_device_is_one_device() -> None:
    assert "1 device, driver" in output("driver.reset(devices=1)\n" + textwrap.dedent(ASK))


@pytest.mark.skipif(ON_GPU, reason="there is a driver")
def test_no_driver() -> None:
    first, second = output(ASK, preamble="").split("\n")
    assert first.startswith("False|CUDA is not available: no NVIDIA driver was found")
    assert first.endswith("|0")
    assert "nvidia-smi" in second


@needs_emulator
def test_no_device() -> None:
    text = output("driver.reset(devices=0)\n" + textwrap.dedent(ASK))
    assert text.startswith("False|CUDA is not available: the NVIDIA driver found no device")
    assert "CUDA_VISIBLE_DEVICES" in text


def test_no_cuda_python() -> None:
    hidden = "import sys; sys.modules['cuda.bindings'] = None"
    text = output(ASK, preamble=hidden)
    assert text.startswith("False|CUDA is not available: CUDA needs the package cuda-bindings")
    assert "pip install 'bfc-allocator[cuda]'" in text


def test_a_cuda_python_that_does_not_fit() -> None:
    """Its functions are named by their C signature: one that has changed is not called."""
    other = """
        import sys, types
        package, module = types.ModuleType("cuda.bindings"), types.ModuleType("cydriver")
        module.__pyx_capi__ = {}
        package.cydriver = module
        sys.modules.update({"cuda.bindings": package, "cuda.bindings.cydriver": module})
    """
    text = output(ASK, preamble=textwrap.dedent(other))
    assert "no cuInit as bfc calls it: bfc works with 12.9 and 13" in text


@pytest.mark.sampled(1)
@needs_emulator
@pytest.mark.parametrize(("call", "name"), [("cuCtxGetId", "device"), ("cuMemAllocAsync", "async")])
def test_a_driver_that_is_too_old_for_a_call(call: str, name: str) -> None:
    text = output(f"""
        driver.hide({call!r})
        import bfc
        try:
            source = bfc.CUDASubAllocator(kind={name!r})
            bfc.BFCAllocator(source, memory_limit="2 MiB").allocate(5)
        except bfc.DriverError as error:
            print(error)
    """)
    assert "CUDA_ERROR_NOT_FOUND" in text
    assert "this driver is too old for the call: update it" in text


@needs_emulator
def test_a_driver_that_is_too_old_to_map_gives_blocks_all_the_same() -> None:
    text = output("""
        driver.hide("cuMemGetAllocationGranularity")
        import bfc
        source = bfc.CUDASubAllocator()
        print(bool(source.supports_virtual_memory), source.supports_virtual_memory)
        print(source.mapping_granularity)
        with bfc.BFCAllocator(source, memory_limit="2 MiB") as allocator:
            allocator.allocate(5).free()
        print("served")
    """)
    assert text.splitlines() == [
        "False the driver is too old to map memory: update it",
        "0",
        "served",
    ]


@needs_emulator
def test_a_driver_that_does_not_start() -> None:
    text = output("driver.fail('cuInit', 999, times=None)\n" + textwrap.dedent(ASK))
    assert "the NVIDIA driver does not start: cuInit: CUDA_ERROR_UNKNOWN" in text


@needs_emulator
def test_importing_calls_no_driver() -> None:
    script = "import bfc, bfc.integrations; bfc.CUDASubAllocator; print(driver.count())"
    assert output(script) == "0"


# -- fork ------------------------------------------------------------------------------------------

FORK = """
    import os, bfc
    source = bfc.CUDASubAllocator()
    allocator = bfc.BFCAllocator(source, memory_limit="64 MiB", allow_growth=True)
    buffer, other = allocator.allocate(1000), allocator.allocate(1000, stream=2)
    bfc.copy(buffer, bytes(1000))
    child = os.fork()
    if child == 0:
        print(bool(bfc.cuda.is_available()), "spawn" in str(bfc.cuda.is_available()), flush=True)
        copies = lambda: bfc.copy(other, bytes(1000))
        for action in (lambda: allocator.allocate(8 << 20), bfc.CUDASubAllocator, copies):
            try:
                action()
            except (bfc.DriverError, bfc.DeviceUnavailableError) as error:
                print(type(error).__name__, "spawn" in str(error), flush=True)
        buffer.free()
        del other
        allocator.close()
        print("closed", source.live_bytes, flush=True)
        END
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    buffer.free()
    other.free()
    allocator.allocate(8 << 20).free()
    allocator.close()
"""


def test_a_forked_child_is_told_and_can_end_and_the_parent_goes_on() -> None:
    # On the one GPU that was tried, an ordinary exit of such a child was a segmentation fault.
    script = FORK.replace("END", "os._exit(0)" if ON_GPU else "raise SystemExit")
    assert output(script, PYTHONWARNINGS="").splitlines() == [
        "False True",
        "DriverError True",
        "DeviceUnavailableError True",
        "DriverError True",
        "closed 0",
        "child 0",
    ]


@pytest.mark.long
def test_a_child_can_free_whatever_other_threads_did_at_the_fork() -> None:
    """A lock that another thread held is held by nobody in the child."""
    script = """
        import os, threading, bfc
        source = bfc.CUDASubAllocator()
        kept = source.alloc(256, 4096)
        stop = threading.Event()
        def work():
            while not stop.is_set():
                source.free(*source.alloc(256, 256))
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads: thread.start()
        codes = set()
        for _ in range(100):
            child = os.fork()
            if child == 0:
                source.free(*kept)
                os._exit(0)
            codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        stop.set()
        for thread in threads: thread.join()
        print(codes)
    """
    assert output(script, PYTHONWARNINGS="") == "{0}"


def test_a_child_that_was_forked_before_cuda_was_used_is_free_to() -> None:
    assert (
        output("""
        import os, bfc
        child = os.fork()
        if child == 0:
            with bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="2 MiB") as allocator:
                print(allocator.allocate(5).nbytes, flush=True)
            raise SystemExit
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """)
        == "5\n0"
    )


# -- exit ------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["device", "managed", "pinned", "async"])
@pytest.mark.parametrize(
    "left",
    [
        "buffer = allocator.allocate(5)",
        "buffer = allocator.allocate(5, stream=2)",
        "allocator.allocate(5, stream=2).free()",
        "cycle = [allocator.allocate(5)]; cycle.append(cycle)",
        "import builtins; builtins.kept = allocator.allocate(5, stream=2)",
        "import atexit; atexit.register(allocator.close)",
        "import threading; threading.Thread(target=lambda: allocator.allocate(9)).start()",
    ],
)
def test_an_interpreter_ends_quietly_with_memory_left(kind: str, left: str) -> None:
    script = f"""
        import bfc
        allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(kind={kind!r}), memory_limit="4 MiB")
        {left}
        print("end")
    """
    assert output(script) == "end"


@needs_emulator
def test_an_interpreter_ends_quietly_with_work_under_way() -> None:
    script = """
        import bfc
        allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB")
        buffer = allocator.allocate(5, stream=2)
        driver.hold_all()
        buffer.free()
        print("end")
    """
    assert output(script) == "end"


@needs_emulator
def test_nothing_is_leaked_where_the_allocator_is_closed() -> None:
    script = """
        import bfc
        for kind in ("device", "managed", "pinned", "async"):
            source = bfc.CUDASubAllocator(kind=kind)
            with bfc.BFCAllocator(source, memory_limit="4 MiB") as allocator:
                allocator.allocate(5, stream=2)
        del allocator, source
        print("end")
    """
    assert output(script, BFC_EMULATOR_LEAKS="1") == "end"


# -- the default stream ----------------------------------------------------------------------------


@needs_emulator
def test_stream_0_is_the_default_stream_whatever_cuda_python_takes_it_for() -> None:
    """CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM=1 changes what 0 means to the driver's calls."""
    script = """
        import bfc
        allocator = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB", stream=0)
        allocator.allocate(5).free()
        buffer = allocator.allocate(5, stream=2)
        buffer.free()
        print(sorted({call.stream for call in driver.calls if call.stream is not None}))
    """
    streams = output(script, CUDA_PYTHON_CUDA_PER_THREAD_DEFAULT_STREAM="1")
    assert streams == "[1, 2]", "never 0"
