"""What goes wrong under PyTorch when its memory is ours: `make test-torch-cuda`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_machine import ON_GPU
from documents import ROOT
from torch_runtime import Run, environment, with_torch

pytestmark = pytest.mark.skipif(ON_GPU, reason="calls of the emulated driver fail")

#: At each place where a call of the driver is made, it fails once. Prints how many failures there
#: were of each call, and how many of them PyTorch was told of.
FAILING = """
import gc, json, os, sys, torch, bfc
from bfc.testing import cuda_emulator

MIB, driver, kind = 1 << 20, cuda_emulator.load(), sys.argv[1]
sys.unraisablehook = lambda it: None
settings = "expandable_segments:True" if kind == "expandable" else ""
bfc.integrations.torch.install(
    lambda device: bfc.CachingAllocator(
        bfc.CUDASubAllocator(device),
        settings=settings,
        stitch=kind == "stitch",
        memory_limit="64 MiB" if kind == "stitch" else "128 MiB",
    )
)

def some(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

side = torch.cuda.Stream()
some(1)
pool = bfc.integrations.torch.pool()

def program():
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):  # whose destructor gives back
        some(4)
    live = [some(4) for _ in range(14)]
    live[1].record_stream(side)
    del live[::2]
    live.append(some(24))
    driver.hold(side.cuda_stream)
    live[0].record_stream(side)
    del live[:3]
    some(3)
    driver.release(side.cuda_stream)
    live.append(some(20))
    torch.cuda.empty_cache()

NAMES = "cuMemAlloc cuMemFree cuMemAddressReserve cuMemAddressFree cuMemCreate cuMemRelease "
NAMES += "cuMemMap cuMemUnmap cuMemSetAccess cuEventCreate cuEventRecord cuEventQuery"
NAMES += " cuEventSynchronize cuCtxSynchronize cuStreamSynchronize cuStreamIsCapturing cuMemGetInfo"
seen = {}
for name in NAMES.split():
    for place in range(1, int(sys.argv[2])):
        driver.clear()
        driver.fail(name, sys.argv[3], at=place)
        told = 0
        try:
            program()
        except RuntimeError:
            told = 1
        driver.release_all()
        was_reached = driver.count(name) >= place
        driver.clear()
        gc.collect()
        program()
        gc.collect()
        torch.cuda.empty_cache()
        pool.check()
        left = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        assert left == (0, 0), f"{name} at its call {place}: {left}"
        if not was_reached:
            break
        failed = seen.setdefault(name, [0, 0])
        failed[0] += 1
        failed[1] += told
print(json.dumps(seen), flush=True)
os._exit(0)
"""


@with_torch
@pytest.mark.parametrize("places", [4, pytest.param(8, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", ["caching", "stitch", "expandable"])
def test_a_call_that_fails_once_loses_nothing(run: Run, kind: str, places: int) -> None:
    """The program runs again afterwards, and all memory goes back."""
    seen = json.loads(run(FAILING, kind, str(places + 1), "CUDA_ERROR_UNKNOWN"))
    mapped = "cuMemAlloc" if kind == "caching" else "cuMemMap"
    assert seen[mapped][0] > 3
    assert seen[mapped][1] > 0, "PyTorch was told of none"


#: 60 MiB are split from a segment, and then lie above the new limit of what may be split.
SPLIT = """
import os, torch, bfc
from bfc.integrations._torch_cuda import rules_for

MIB = 1 << 20
bfc.integrations.torch.install(
    lambda device: bfc.CachingAllocator(
        bfc.CUDASubAllocator(device), strict=True, torch=rules_for(torch)
    )
)

def some(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

some(100)
kept = some(40)
torch._C._accelerator_setAllocatorSettings("max_split_size_mb:21")
torch.cuda.set_per_process_memory_fraction(130 * MIB / torch.cuda.mem_get_info()[1])
try:
    some(80)
except torch.OutOfMemoryError:
    print("refused")
del kept
torch.cuda.empty_cache()
print(torch.cuda.memory_reserved(), flush=True)
os._exit(0)
"""


@with_torch
def test_a_lower_limit_of_what_is_split_gives_no_part_of_a_segment_back(run: Run) -> None:
    """PyTorch's own passes the 60 MiB to cudaFree, which fails, and damages its heap: so random
    programs with such settings may end there."""
    assert run(SPLIT) == "refused\n0\n"


GOES = """
import os, torch, bfc

bfc.integrations.torch.install()
pool = torch.cuda.MemPool()
with torch.cuda.use_mem_pool(pool):
    x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
del x
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    del pool
reserved = torch.cuda.memory_reserved()
torch.cuda.empty_cache()
print(reserved > 0, torch.cuda.memory_reserved(), flush=True)
os._exit(0)
"""


@with_torch
def test_a_pool_goes_while_a_graph_is_captured(run: Run) -> None:
    """Its memory goes later. With PyTorch's own the process ends, since a destructor raises."""
    assert run(GOES) == "True 0\n"


PROCESSES = """
import os, sys, torch, bfc

bfc.integrations.torch.install()
x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
child = os.fork()
if child == 0:
    try:
        torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    except RuntimeError as error:
        print("fork" in str(error), flush=True)
    del x
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
y = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory_allocated() >> 20, flush=True)
"""


@with_torch
def test_a_process_forks_and_ends_with_live_tensors(run: Run) -> None:
    """A child may not use CUDA, as with PyTorch's own; it ends, as does the parent, without an
    error."""
    printed = run(PROCESSES).split()
    assert printed[:2] == ["True", "0"]
    assert int(printed[2]) >= 6


#: Children free what they have inherited, while a history begins anew in the parent's threads.
RECORDING = """
import os, signal, threading, torch, bfc

bfc.integrations.torch.install()
over = threading.Event()

def some():
    return torch.empty(600, dtype=torch.uint8, device="cuda")

def record():
    while not over.is_set():
        torch.cuda.memory._record_memory_history(max_entries=100000)
        kept = [some() for _ in range(300)]
        del kept

threads = [threading.Thread(target=record) for _ in range(2)]
for thread in threads:
    thread.start()
ended = set()
for _ in range(10):
    live = [some() for _ in range(3)]
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        live.clear()
        os._exit(0)
    ended.add(os.waitpid(child, 0)[1])
    if ended != {0}:
        break
over.set()
for thread in threads:
    thread.join()
print(ended, flush=True)
os._exit(0)
"""


@with_torch
def test_a_child_frees_while_the_parent_recorded(run: Run) -> None:
    """No thread of the child lets go of a lock that one had at the fork."""
    assert run(RECORDING) == "{0}\n"


REFUSED = """
import os, torch, bfc
from bfc.integrations import _torch

try:
    bfc.integrations.torch.install(
        lambda device: bfc.CachingAllocator(bfc.CUDASubAllocator(device), stitch=True)
    )
    theirs = torch.cuda.memory.CUDAPluggableAllocator(
        _torch.__file__, "bfc_torch_alloc", "bfc_torch_free"
    )
    torch.cuda.MemPool(theirs.allocator())
except Exception as error:
    print(error, flush=True)
x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
try:
    x.untyped_storage()._share_cuda_()
except Exception as error:
    print(error, flush=True)
os._exit(0)
"""


@with_torch
def test_what_is_not_served_is_refused_in_words(run: Run) -> None:
    """A MemPool over another allocator, and pages for another process that were made for none."""
    printed = run(REFUSED)
    assert "a MemPool over another allocator (NCCL's, symmetric memory) is not served" in printed
    assert "pools over bfc.CUDASubAllocator(device, handle_type='posix')" in printed


@with_torch
def test_without_a_compiler_one_sentence_says_what_to_install(run: Run, tmp_path: Path) -> None:
    script = """
    import os, sys, torch, bfc
    os.environ.update(CXX="/nowhere/c++", BFC_CACHE_HOME=sys.argv[1])
    try:
        bfc.integrations.torch.install()
    except Exception as error:
        print(error, flush=True)
    print("backend:", torch.cuda.get_allocator_backend(), flush=True)
    os._exit(0)
    """
    printed = run(script, str(tmp_path))
    assert "install gcc or clang, or name one in CXX" in printed.splitlines()[0]
    assert "backend: native" in printed


@with_torch
@pytest.mark.parametrize(
    ("kind", "tries"),
    [
        ("stitch", 30),
        *(pytest.param(kind, 300, marks=pytest.mark.long) for kind in ("caching", "expandable")),
        pytest.param("stitch", 300, marks=pytest.mark.long),
    ],
)
def test_threads_never_wait_for_each_other_for_ever(
    runtime: Path | None, kind: str, tries: int
) -> None:
    """With all that they can ask for at once: a watchdog ends what hangs."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "tests/helpers/torch_tangle.py", kind, str(tries)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(runtime),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tries} tries")
