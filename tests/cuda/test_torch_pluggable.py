"""What PyTorch does over a `CUDAPluggableAllocator`, as RMM's is one, and that of `replace`: these
columns of the table in docs/how-to/pytorch.md. `make test-torch-cuda`."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from cpp import built_library
from cuda_machine import ON_GPU
from torch_runtime import Run, with_torch

pytestmark = pytest.mark.skipif(ON_GPU, reason="streams are held back")
SOURCE = Path(__file__).parents[1] / "helpers" / "torch_pluggable.cpp"

#: RMM has a CUDA runtime of its own, which refuses the emulated driver: its pool takes memory from
#: functions in Python, which ask the other runtime.
PUT_IN_PLACE = """
import ctypes, json, os, sys, torch
from bfc.testing import cuda_emulator

MIB, driver, (kind, library) = 1 << 20, cuda_emulator.load(), sys.argv[1:]

def of_rmm():
    import rmm
    from rmm.allocators.torch import rmm_torch_allocator

    functions = ctypes.CDLL(library)
    alloc, free = functions.pluggable_alloc, functions.pluggable_free
    size, device, ptr = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
    alloc.restype, alloc.argtypes = ptr, (size, device, ptr)
    free.restype, free.argtypes = None, (ptr, size, device, ptr)
    source = rmm.mr.CallbackMemoryResource(
        lambda nbytes, stream: alloc(nbytes, 0, 0),
        lambda ptr, nbytes, stream: free(ptr, nbytes, 0, 0),
    )
    pool = rmm.mr.PoolMemoryResource(source, initial_pool_size=64 * MIB, maximum_pool_size=64 * MIB)
    rmm.mr.set_per_device_resource(0, pool)
    return rmm_torch_allocator

if kind == "replace":
    import bfc
    bfc.integrations.torch.replace(bfc.CachingAllocator(bfc.CUDASubAllocator(0)))
else:
    torch.cuda.memory.change_current_allocator(
        of_rmm()
        if kind == "rmm"
        else torch.cuda.memory.CUDAPluggableAllocator(
            library, "pluggable_alloc", "pluggable_free"
        )
    )
"""

#: Prints what became of each feature.
FEATURES = """
def some(mib=3):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

def profiled():
    from torch.autograd.profiler import profile
    with profile(profile_memory=True, use_kineto=False) as seen:
        some()
    return max(abs(event.device_memory_usage) for event in seen.function_events)

def pool_of_its_own():
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        some()

def used_on_a_stream():
    x, target, side = some(), some(), torch.cuda.Stream()
    ones, twos = torch.full((2, 3 * MIB), 1, dtype=torch.uint8)
    twos += 1
    x.copy_(ones)
    torch.cuda.synchronize()
    driver.hold(side.cuda_stream)
    with torch.cuda.stream(side):
        target.copy_(x)
    x.record_stream(side)
    del x
    some().copy_(twos, non_blocking=True)
    driver.release(side.cuda_stream)
    torch.cuda.synchronize()
    return "waits" if target[0].item() == 1 else "given to others"

def captured():
    graph, x = torch.cuda.CUDAGraph(), some()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        work = torch.empty_like(x)
        at = work.data_ptr()
        del work
    return "given to others" if at == some().data_ptr() else "kept"

def limited():
    torch.cuda.set_per_process_memory_fraction(0.001)  # of 8 GiB
    return f"{len(some(32)) // MIB} MiB"

def out_of_memory():
    return f"at {some(100 << 10).data_ptr()}"

def watched():
    torch._C._cuda_attach_out_of_memory_observer(lambda *row: None)

def replaced_late():
    torch.cuda.memory.change_current_allocator(
        torch.cuda.memory.CUDAPluggableAllocator(library, "pluggable_alloc", "pluggable_free")
    )

outcomes = {}
for name, feature in {
    "serves": lambda: len(some()) // MIB,
    "statistics": torch.cuda.memory_stats,
    "summary": torch.cuda.memory_summary,
    "snapshot": torch.cuda.memory_snapshot,
    "history": torch.cuda.memory._record_memory_history,
    "profiler": profiled,
    "record_stream": used_on_a_stream,
    "graph": captured,
    "MemPool": pool_of_its_own,
    "graph trees": lambda: torch._C._cuda_checkPoolLiveAllocations(0, (0, 1), set()),
    "fraction": limited,
    "out of memory": out_of_memory,
    "observer": watched,
    "sharing": lambda: some().untyped_storage()._share_cuda_(),
    "late": replaced_late,
}.items():
    try:
        outcomes[name] = str(feature())
    except Exception as error:
        outcomes[name] = f"{type(error).__name__}: {error}"
print(json.dumps(outcomes), flush=True)
os._exit(0)
"""
NOT_SUPPORTED = (
    "statistics",
    "summary",
    "snapshot",
    "history",
    "MemPool",
    "graph trees",
    "observer",
    "sharing",
)
IS_SET = {"serves": "3", "profiler": "0", "fraction": "32 MiB"}
LOST = {"record_stream": "given to others", "graph": "given to others"}
#: What PyTorch's error says; but where ours returns a null pointer, there is none.
REFUSAL = {"pluggable": "at 0", "rmm": "RuntimeError: std::bad_alloc: out_of_memory: RMM failure"}
REFUSAL["replace"] = "RuntimeError: bfc: out of memory: asked for 107374182400 bytes"


@with_torch
@pytest.mark.parametrize(
    "kind",
    [
        "pluggable",
        "replace",
        pytest.param(
            "rmm",
            marks=pytest.mark.skipif(
                find_spec("rmm") is None, reason="RMM is not installed: make test-torch-cuda"
            ),
        ),
    ],
)
def test_the_table_says_what_other_allocators_lack(run: Run, tmp_path: Path, kind: str) -> None:
    library = str(built_library(SOURCE, tmp_path))
    outcomes = json.loads(run(PUT_IN_PLACE + FEATURES, kind, library))
    for name in NOT_SUPPORTED:
        assert "RuntimeError" in outcomes[name], name
        assert "does not yet support" in outcomes.pop(name), name
    assert outcomes.pop("out of memory").startswith(REFUSAL[kind])
    assert outcomes.pop("late") == "RuntimeError: Can't swap an already initialized allocator"
    lost = {name: "waits" if name == "record_stream" else "kept" for name in LOST}
    assert outcomes == IS_SET | (lost if kind == "replace" else LOST)
