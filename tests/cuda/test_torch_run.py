"""`bfc run` with PyTorch itself: `make test-torch-cuda`. The scripts know nothing of bfc; the
emulated driver is loaded by another sitecustomize, as a user's own may stand on the path."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import cupy_runtime
import pytest
from cuda_machine import ON_GPU
from documents import ROOT
from torch_runtime import VERSION, Run, environment, with_torch

import bfc

Ran = subprocess.CompletedProcess[str]
Bfc = Callable[..., Ran]
pytestmark = pytest.mark.skipif(ON_GPU, reason="it counts on the emulated driver")

EMULATED = """
import os
from bfc.testing import cuda_emulator
cuda_emulator.load().reset(devices=2)
"""
HOLES = """
import torch

def some(mib):
    return torch.empty(mib << 20, dtype=torch.uint8, device="cuda")

blocks = [some(4) for _ in range(15)]
del blocks[::2]
joined = some(24)
print(torch.cuda.memory_reserved() >> 20)
"""


@pytest.fixture
def bfc_run(runtime: Path | None, tmp_path: Path) -> Bfc:
    """Runs `bfc run` with a script, which begins to be a file, in a folder of its own."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(EMULATED)
    given = environment(runtime)
    given["PYTHONPATH"] = f"{tmp_path / 'site'}:{ROOT}"

    def call(*words: str, script: str = "", code: int = 0, **variables: str) -> Ran:
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        ran = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "bfc", "run", *words],
            cwd=tmp_path,
            env=given | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert ran.returncode == code, ran.stderr
        return ran

    return call


@with_torch
def test_holes_are_stitched_for_an_unchanged_script(bfc_run: Bfc) -> None:
    """Which PyTorch's own table shows; and it would have refused one of the requests."""
    script = HOLES + "print(torch.cuda.memory_summary())\ntorch.cuda.reset_peak_memory_stats()"
    ran = bfc_run("--memory-limit", "64MiB", "--summary", "script.py", script=script)
    assert ran.stdout.startswith("60\n|====")
    assert "| GPU reserved memory   |  61440 KiB |" in ran.stdout
    peaks, would, calls = ran.stderr.splitlines()[-3:]
    assert peaks == "bfc: cuda:0: 60.00 MiB live at most, 60.00 MiB reserved at most"
    assert would.startswith("bfc: cuda:0: PyTorch's own allocator would have reserved 60.00 MiB")
    assert would.endswith(", and refused 1 of them")
    assert "calls of the driver for memory; PyTorch's own would have made" in calls


@with_torch
def test_what_runs_out_of_memory_has_its_page_and_says_why(bfc_run: Bfc, tmp_path: Path) -> None:
    """And settings of the environment are followed."""
    words = ("--policy", "caching", "--memory-limit", "64MiB", "--report", "page.html", "script.py")
    settings = "max_split_size_mb:64,garbage_collection_threshold:0.5"
    ran = bfc_run(*words, script=HOLES, code=1, PYTORCH_CUDA_ALLOC_CONF=settings)
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 24.00 MiB" in ran.stderr
    sentence, page = ran.stderr.splitlines()[-2:]
    assert "It ran out of memory: 24.00 MiB were refused at script.py:5 in some" in sentence
    assert page == f"bfc: cuda:0: {tmp_path / 'page.html'}"
    assert "script.py:5 in some" in (tmp_path / "page.html").read_text()


#: A process of torchrun's, the parent of which uses no GPU.
RANK = """
import os, torch
import torch.distributed as dist
import torch.multiprocessing as mp

def child(rank):
    torch.empty(8 << 20, dtype=torch.uint8, device=f"cuda:{rank}")
    print("child", torch.cuda.get_allocator_backend(), torch.cuda.memory_reserved(rank) >> 20)

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    x = torch.empty((rank + 1) << 21, dtype=torch.uint8, device="cuda")
    told = [None] * 2
    dist.all_gather_object(told, (torch.cuda.get_allocator_backend(), torch.cuda.memory_reserved()))
    if rank == 0:
        print(told)
        mp.start_processes(child, args=(), nprocs=1, start_method="spawn")
    dist.destroy_process_group()
"""


@with_torch
def test_processes_of_torchrun_and_their_children_are_served(bfc_run: Bfc) -> None:
    module = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py")
    ran = bfc_run("--summary", *module, script=RANK)
    assert ran.stdout.splitlines() == [f"[('bfc', {2 << 20}), ('bfc', {4 << 20})]", "child bfc 8"]
    told = [line for line in ran.stderr.splitlines() if "reserved at most" in line]
    assert sorted(told) == [
        "bfc: rank0 cuda:0: 2.00 MiB live at most, 2.00 MiB reserved at most",
        "bfc: rank0 cuda:0: 8.00 MiB live at most, 8.00 MiB reserved at most",
        "bfc: rank1 cuda:1: 4.00 MiB live at most, 4.00 MiB reserved at most",
    ]


#: Who forks before CUDA is used may use it in the child.
FORKED = """
import os, torch

if os.fork() == 0:
    x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    print("child", torch.cuda.memory_reserved() >> 20, flush=True)
    os._exit(0)
os.wait()
x = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
print("parent", torch.cuda.memory_reserved() >> 20, flush=True)
torch.cuda.memory._dump_snapshot("snapshot.pickle")
import bfc
from cuda.core import Device
pool = bfc.integrations.torch.pool()
with bfc.use(pool, "cuda_core", "torch"):
    device = Device(0)
    device.set_current()
    buffer = device.allocate(3 << 20, stream=device.default_stream)
    y = torch.empty(2 << 20, dtype=torch.uint8, device="cuda")
    print("together", torch.cuda.memory_allocated() >> 20, pool.stats().bytes_in_use >> 20)
    buffer.close()
try:
    bfc.integrations.torch.mem_pool(pool)
except RuntimeError as error:
    print(error)
try:
    bfc.integrations.torch.install()
except RuntimeError as error:
    print(error)
try:
    torch.empty(1, device="cuda:7")
except torch.AcceleratorError as error:
    print("no such device")
"""


@with_torch
def test_the_pool_is_that_of_other_libraries_too(bfc_run: Bfc, tmp_path: Path) -> None:
    """In a process that has forked; a second installation is refused in words."""
    ran = bfc_run("--history", "script.py", script=FORKED)
    assert ran.stdout.splitlines()[:3] == ["child 4", "parent 6", "together 10 10"]
    assert "which serves no MemPool" in ran.stdout
    assert "in this process already" in ran.stdout
    assert ran.stdout.endswith("no such device\n")
    snapshot = (tmp_path / "snapshot.pickle").read_bytes()
    assert b"script.py" in snapshot, "no frames"


#: CuPy has its calls of the CUDA runtime replaced: its own refuses the emulated driver.
TOGETHER = """
import sys
sys.path.insert(0, sys.argv[1])
import cupy_runtime
cupy_runtime.install(sys.argv[2])
import cupy, torch, bfc
from numba import cuda

def account():
    print(torch.cuda.memory_allocated() >> 20, pool.stats().bytes_in_use >> 20)

x = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
pool = bfc.integrations.torch.pool()
with bfc.use(pool, "cupy", "numba"):
    y = cupy.empty(3 << 20, "u1")
    account()
    z = cuda.device_array(2 << 20, dtype="u1")
    account()
    try:
        cupy.empty(24 << 20, "u1")
    except bfc.OutOfMemoryError:
        print("refused")
    del y, z  # what numba frees waits for its stream, and is in use until then
    print(torch.cuda.memory_allocated() >> 20)
"""


@with_torch
@pytest.mark.skipif(
    find_spec("cupy") is None or find_spec("numba") is None,
    reason="CuPy or numba is not installed: make test-torch-cuda",
)
def test_arrays_of_cupy_and_numba_are_on_the_same_account(bfc_run: Bfc, tmp_path: Path) -> None:
    """And below the same limit."""
    made = str(cupy_runtime.build(tmp_path))
    helpers = str(Path(cupy_runtime.__file__).parent)
    words = ("--memory-limit", "32MiB", "script.py", helpers, made)
    ran = bfc_run(*words, script=TOGETHER)
    assert ran.stdout.splitlines() == ["8 8", "10 10", "refused", "5"]


#: RMM's memory resources ask no CUDA runtime. What does, here as in `DeviceBuffer`, is a copy of
#: NVIDIA's in RMM's own library, and refuses the emulated driver.
BESIDE_RMM = """
import bfc, rmm, torch
from bfc.integrations import rmm as integration

integration.lookup = lambda mr: lambda: None

def account():
    print(torch.cuda.memory_allocated() >> 20, pool.stats().bytes_in_use >> 20)

x = torch.empty(5 << 20, dtype=torch.uint8, device="cuda")
pool = bfc.integrations.torch.pool()
with bfc.use(pool, "rmm"):
    resource = rmm.mr.get_per_device_resource(0)
    held = resource.allocate(3 << 20)
    account()
    try:
        resource.allocate(25 << 20)
    except MemoryError as error:
        print("asked for 25.00 MiB" in str(error))
    try:
        torch.empty(25 << 20, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        print("refused")
    resource.deallocate(held, 3 << 20)
    account()
"""


@with_torch
@pytest.mark.skipif(find_spec("rmm") is None, reason="RMM is not installed: make test-torch-cuda")
def test_memory_of_rmm_is_on_the_same_account(bfc_run: Bfc) -> None:
    """And below the same limit, whoever asks."""
    ran = bfc_run("--memory-limit", "32MiB", "script.py", script=BESIDE_RMM)
    assert ran.stdout.splitlines() == ["8 8", "True", "refused", "5 5"]


@with_torch
@pytest.mark.skipif(
    VERSION.startswith("2.11."), reason="this module of PyTorch 2.11 is no program yet"
)
def test_a_strangers_program_runs_unchanged(bfc_run: Bfc) -> None:
    """PyTorch's own check of how operators are sharded, on tensors of the GPU. It finds all wrong,
    since no kernel runs here; each of its requests was served."""
    module = "torch.distributed.tensor._ops.strategy_validation"
    words = ("--op", "neg", "--max-samples", "1", "--incorrect-only", "--device", "cuda")
    ran = bfc_run("--summary", "-m", module, *words)
    assert "aten.neg " in ran.stdout
    (line,) = (it for it in ran.stderr.splitlines() if "would have reserved 2.00 MiB for the" in it)
    assert int(line.partition("same ")[2].split()[0]) > 200


OTHER = """
import sys, torch, warnings
from bfc.integrations import _torch, torch as integration

sys.stderr = sys.stdout
warnings.simplefilter("always")

change = torch._C._cuda_changeCurrentAllocator  # as code in C++ would call it
integration.install()
names = _torch.__file__, "bfc_torch_alloc", "bfc_torch_free"
theirs = torch.cuda.memory.CUDAPluggableAllocator(*names)
for refused in (torch.cuda.memory.change_current_allocator, torch._C._cuda_changeCurrentAllocator):
    try:
        refused(theirs.allocator())
    except RuntimeError as error:
        print(error)
change(theirs.allocator())
torch.cuda.init()
"""


@with_torch
def test_another_allocator_in_our_place_is_noticed(run: Run) -> None:
    told = run(OTHER)
    assert told.count("bfc has taken the place of PyTorch's allocator") == 2
    assert "another library has put its allocator in PyTorch's place after bfc" in told


@with_torch
def test_a_plan_is_served_or_said_to_be_declined(bfc_run: Bfc, tmp_path: Path) -> None:
    """That of another program is refused in words, or switched off; the program runs."""
    trace = bfc.Trace(
        [0, 0, 1, 0, 1, 1] * 4, [0, 1, 0, 2, 1, 2] * 4, [20 << 20, 20 << 20, 0, 30 << 20, 0, 0] * 4
    )
    bfc.Plan.from_trace(trace, marks=range(0, 24, 6)).save(tmp_path / "plan.npz")
    script = """
    import torch
    w = torch.nn.Parameter(torch.empty(1 << 20, device="cuda"))
    optimizer = torch.optim.SGD([w], lr=0.1)
    for _ in range(3):
        a = torch.empty(20 << 20, dtype=torch.uint8, device="cuda")
        b = torch.empty_like(a)
        del a
        c = torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        del b, c
        w.grad = torch.empty_like(w)
        optimizer.step()
        w.grad = None
    """
    ran = bfc_run("--plan", "plan.npz", "--summary", "script.py", script=script)
    assert "of the requests came as planned" in ran.stderr
    ran = bfc_run(
        "--plan",
        "plan.npz",
        "--memory-limit",
        "40MiB",
        "script.py",
        script="import torch\ntorch.empty(3, device='cuda')",
    )
    assert "plan.npz is not served, the policy alone is: the plan needs" in ran.stderr
