"""What PyTorch's allocator of CUDA memory does for a program, feature by feature.

A script for a process of its own: `python torch_features.py KIND FOLDER` prints what became of each
as JSON, {name: "ok" or an error}. KIND is "own" (PyTorch's own allocator), "caching" or "stitch".
Only contents that are copied are looked at: no kernel runs on the emulated driver.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
N = 1 << 18
FEATURES: dict[str, Callable[[Any, Path], None]] = {}


def feature(function: Callable[[Any, Path], None]) -> Callable[[Any, Path], None]:
    FEATURES[function.__name__] = function
    return function


def some(torch: Any, mib: int = 3) -> Any:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


@feature
def freed_memory_is_used_again(torch: Any, folder: Path) -> None:
    x = some(torch)
    at = x.data_ptr()
    del x
    assert some(torch).data_ptr() == at


@feature
def figures_follow_allocations(torch: Any, folder: Path) -> None:
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = some(torch, 8)
    assert torch.cuda.memory_allocated() - before == 8 * MIB
    del x
    assert torch.cuda.max_memory_allocated() - before == 8 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before
    torch.cuda.reset_accumulated_memory_stats()
    stats = torch.cuda.memory_stats()
    assert stats["allocation.all.allocated"] == 0
    assert stats["reserved_bytes.all.current"] == torch.cuda.memory_reserved() > 0


@feature
def a_summary_is_printed(torch: Any, folder: Path) -> None:
    assert "Allocated memory" in torch.cuda.memory_summary()


@feature
def the_accelerator_answers(torch: Any, folder: Path) -> None:
    x = some(torch)
    stats = torch.accelerator.memory_stats()
    assert stats["allocated_bytes.all.current"] >= x.numel()
    torch.accelerator.empty_cache()


@feature
def a_snapshot_shows_what_is_live(torch: Any, folder: Path) -> None:
    x = some(torch)
    segments = torch.cuda.memory_snapshot()
    live = [
        (block["address"], block["requested_size"])
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]
    assert (x.data_ptr(), 3 * MIB) in live
    assert segments == sorted(segments, key=lambda it: it["address"])
    total = sum(segment["total_size"] for segment in segments)
    assert total == torch.cuda.memory_reserved()


@feature
def an_emptied_cache_goes_back(torch: Any, folder: Path) -> None:
    some(torch, 30)
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before


@feature
def out_of_memory_is_pytorchs_error_and_observed(torch: Any, folder: Path) -> None:
    seen: list[tuple[int, ...]] = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *row: seen.append(row))
    before = torch.cuda.memory_stats()["num_ooms"]
    words = "^CUDA out of memory. Tried to allocate 100.00 GiB. GPU 0 has"
    with pytest.raises(torch.cuda.OutOfMemoryError, match=words):
        some(torch, 100 << 10)
    assert [row[:2] for row in seen] == [(0, 100 << 30)]
    assert torch.cuda.memory_stats()["num_ooms"] == before + 1


@feature
def a_fraction_limits(torch: Any, folder: Path) -> None:
    torch.cuda.set_per_process_memory_fraction(0.01)
    assert abs(torch.cuda.get_per_process_memory_fraction() - 0.01) < 1e-6
    with pytest.raises(torch.cuda.OutOfMemoryError):
        some(torch, 400)
    torch.cuda.set_per_process_memory_fraction(1.0)


@feature
def streams_keep_their_memory_apart(torch: Any, folder: Path) -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x = some(torch, 4)
    at = x.data_ptr()
    del x
    assert some(torch, 4).data_ptr() != at
    raw = torch.cuda.caching_allocator_alloc(4096)
    torch.cuda.caching_allocator_delete(raw)


@feature
def a_graph_is_replayed(torch: Any, folder: Path) -> None:
    handle = torch.cuda.graph_pool_handle()
    for batch in (4, 2, 1):
        x, y = (torch.empty(batch * N, device="cuda") for _ in range(2))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=handle):
            work = torch.empty_like(x)
            work.copy_(x)
            y.copy_(work)
            del work
        for turn in range(3):
            others = [torch.empty(N, device="cuda") for _ in range(10)]
            for other in others:
                other.copy_(torch.full((N,), 99.0))
            x.copy_(torch.full((batch * N,), float(turn)))
            graph.replay()
            torch.cuda.synchronize()
            assert bool((y.cpu() == turn).all())
            assert all(bool((other.cpu() == 99).all()) for other in others)
    del graph
    torch.cuda.empty_cache()


@feature
def a_pool_of_its_own(torch: Any, folder: Path) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = some(torch)
    assert pool.use_count() == 1
    (segment,) = pool.snapshot()
    assert tuple(segment["segment_pool_id"]) == pool.id
    assert segment["address"] <= x.data_ptr() < segment["address"] + segment["total_size"]
    assert x.data_ptr() != some(torch).data_ptr()
    del x, pool


def named_frame(torch: Any) -> Any:
    return some(torch, 21)


def emptied_here(torch: Any) -> None:
    torch.cuda.empty_cache()


@feature
def a_history_has_frames(torch: Any, folder: Path) -> None:
    torch.cuda.empty_cache()
    torch.cuda.memory._record_memory_history(max_entries=10000)
    x = named_frame(torch)
    del x
    x = named_frame(torch)
    found = torch.cuda.memory._snapshot()
    torch.cuda.memory._dump_snapshot(str(folder / "snapshot.pickle"))
    trace = found["device_traces"][0]
    actions = [entry["action"] for entry in trace if entry["size"] == 21 * MIB]
    requested = ["alloc", "free_requested", "free_completed", "alloc"]
    assert [it for it in actions if "segment" not in it] == requested, actions
    assert any("segment" in entry["action"] for entry in trace)
    for entry in trace:
        if entry["action"] in requested and entry["size"] == 21 * MIB:
            assert any(frame["name"] == "named_frame" for frame in entry["frames"]) or (
                entry["action"].startswith("free")
            )
    of_segments = [frame for it in found["segments"] for frame in it.get("frames", ())]
    assert any(frame["name"] == "named_frame" for frame in of_segments)
    blocks = [block for segment in found["segments"] for block in segment["blocks"]]
    assert any(
        frame["name"] == "named_frame"
        for block in blocks
        if block.get("address") == x.data_ptr()
        for frame in block["frames"]
    )
    assert all(entry["time_us"] > 1 << 50 for entry in trace)
    del x
    emptied_here(torch)
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    assert [entry["action"] for entry in trace].count("snapshot") == 2, "this one is not there yet"
    freed = [it for it in trace if it["action"] in ("segment_free", "segment_unmap")]
    assert any(frame["name"] == "emptied_here" for frame in freed[-1]["frames"])
    torch.cuda.memory._record_memory_history(enabled=None)
    import bfc

    assert len(bfc.Trace.from_torch(folder / "snapshot.pickle")) > 0


@feature
def a_model_is_trained_with_matrix_products(torch: Any, folder: Path) -> None:
    from torch.nn import Linear, ReLU, Sequential

    model = Sequential(Linear(64, 128), ReLU(), Linear(128, 3)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.cuda.reset_peak_memory_stats()
    before, live = torch.cuda.memory_allocated(), []
    for _ in range(4):
        model(torch.empty(16, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        live.append(torch.cuda.memory_allocated())
    assert live[1:] == live[1:2] * 3, "a step leaves nothing behind"
    assert torch.cuda.max_memory_allocated() - before > 4 * MIB, "cuBLAS had a workspace"


@feature
def a_profiler_sees_memory(torch: Any, folder: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        x = some(torch)
        del x
    used = [abs(getattr(event, "device_memory_usage", 0)) for event in seen.events()]
    assert max(used) >= 3 * MIB


@feature
def callbacks_of_a_tracer_are_called(torch: Any, folder: Path) -> None:
    """As CUDA's sanitizer of PyTorch registers them."""
    from torch.cuda import _gpu_trace

    seen: list[tuple[str, int]] = []
    torch._C._activate_gpu_trace()
    _gpu_trace.register_callback_for_memory_allocation(lambda at: seen.append(("comes", at)))
    _gpu_trace.register_callback_for_memory_deallocation(lambda at: seen.append(("goes", at)))
    x = some(torch)
    at = x.data_ptr()
    del x
    assert seen == [("comes", at), ("goes", at)]


@feature
def checkpoints_of_a_pool_come_back(torch: Any, folder: Path) -> None:
    handle = torch.cuda.graph_pool_handle()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch._C._cuda_beginAllocateCurrentThreadToPool(0, handle)
        kept, other = some(torch), some(torch, 5)
        torch._C._cuda_endAllocateToPool(0, handle)
    expected = {it.untyped_storage().data_ptr() for it in (kept, other)}
    assert torch._C._cuda_checkPoolLiveAllocations(0, handle, expected)
    assert not torch._C._cuda_checkPoolLiveAllocations(0, handle, {kept.data_ptr()})
    state = torch._C._cuda_getCheckpointState(0, handle)
    del other
    assert torch._C._cuda_checkPoolLiveAllocations(0, handle, {kept.data_ptr()})
    torch._C._cuda_setCheckpointPoolState(0, state, [], [])
    torch._C._cuda_releasePool(0, handle)


@feature
def graph_trees_of_torch_compile(torch: Any, folder: Path) -> None:
    from torch._inductor import cudagraph_trees

    compiled = torch.compile(lambda x: x.clone().view(2, -1).clone(), backend="cudagraphs")
    x = torch.empty(N, device="cuda")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(x)
        assert y.shape == (2, N // 2)
        del y
    manager = cudagraph_trees.get_manager(0, create_if_none_exists=False)
    assert manager is not None
    assert manager.new_graph_id().id == 1


def main(kind: str, folder: Path) -> None:
    from bfc.testing import cuda_emulator

    if not os.environ.get("BFC_TEST_GPU"):
        cuda_emulator.load().reset(devices=1)
    import torch

    import bfc

    if kind != "own":

        def make(device: int) -> bfc.CachingAllocator:
            return bfc.CachingAllocator(bfc.CUDASubAllocator(device), stitch=kind == "stitch")

        bfc.integrations.torch.install(make)
    outcomes = {}
    for name, function in FEATURES.items():
        try:
            function(torch, folder)
            outcomes[name] = "ok"
        except BaseException as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
        gc.collect()
    print(json.dumps(outcomes), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
