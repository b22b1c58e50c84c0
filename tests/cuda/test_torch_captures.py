"""Graphs of PyTorch's under `bfc.integrations.torch.replace`: its hooks, called as it calls them.

The first tests have a small stand-in for PyTorch's side. The last are with PyTorch itself, a build
for CUDA, where it is installed (`make test-torch-cuda`): on the emulated driver, by a runtime
library over that, if they only copy; those with kernels need a GPU, and BFC_TEST_GPU=1.
"""

from __future__ import annotations

import ctypes
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import raw_cuda
import torch_runtime
from cuda_machine import ON_GPU
from documents import BLOCK, ROOT
from torch_harness import Harness
from torch_runtime import Run, with_torch

import bfc
from bfc.integrations import _torch

MIB = 1 << 20
SPOT = 4096  # bytes that are looked at
POOL, OTHER = (3, 0), (0, 5)  # as PyTorch numbers them: its own, and a user's graph_pool_handle()

both = pytest.mark.parametrize("make_cuda", [bfc.CachingAllocator, bfc.BFCAllocator], indirect=True)


def begin_capture(stream: int) -> None:
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    raw_cuda.call("cuStreamBeginCapture", stream, mode)


def capture(whole: Harness, stream: int, work: Callable[[], None], pool: tuple[int, int]) -> Any:
    """What `with torch.cuda.graph(...)` does. Returns the graph."""
    whole.begin_pool(pool, stream)
    begin_capture(stream)
    work()
    graph = raw_cuda.call("cuStreamEndCapture", stream)
    whole.end_pool(pool)
    return graph


def pool_bytes(allocator: bfc.Allocator, private: bool) -> int:
    regions = allocator.snapshot().regions
    return sum(region.size for region in regions if (region.pool_id != (0, 0)) == private)


@both
def test_a_graph_keeps_what_was_freed_in_its_capture(served, whole) -> None:
    """Launched each turn, while others take and fill all that there is."""
    with raw_cuda.stream() as stream:
        out = whole.alloc(SPOT, stream=stream)
        taken: list[int] = []

        def work() -> None:
            for _ in range(2):
                taken.append(whole.alloc(12 * MIB, stream=stream))
                raw_cuda.fill(taken[-1], 5, SPOT, on=stream)
                whole.free(taken[-1], stream=stream)
            with raw_cuda.current():
                raw_cuda.call("cuMemcpyDtoDAsync", out, taken[0], SPOT, stream)

        graph = capture(whole, stream, work, POOL)
        assert taken[0] == taken[1], "the graph's memory serves the graph again"
        inside = range(taken[0], taken[0] + 12 * MIB)
        with raw_cuda.current():
            made = raw_cuda.call("cuGraphInstantiate", graph, 0)
        for turn in range(1, 20):
            others = []
            try:
                while True:
                    others.append(whole.alloc(7 * MIB, stream=stream))
                    raw_cuda.fill(others[-1], turn, SPOT, on=stream)
            except MemoryError:
                pass
            assert others
            assert not any(it in inside or it + 7 * MIB - 1 in inside for it in others)
            raw_cuda.call("cuGraphLaunch", made, stream)
            raw_cuda.synchronize(stream)
            assert raw_cuda.read(out, SPOT) == bytes([5]) * SPOT
            for ptr in others:
                assert raw_cuda.read(ptr, SPOT) == bytes([turn]) * SPOT
                whole.free(ptr, stream=stream)
            served.empty_cache()
        with raw_cuda.current():
            raw_cuda.call("cuGraphExecDestroy", made)
            raw_cuda.call("cuGraphDestroy", graph)
        whole.release_pool(POOL)
        whole.free(out, stream=stream)
        served.empty_cache()
        assert served.stats().pool_bytes == 0


@both
def test_graphs_share_a_pool_until_the_last_is_gone(served, whole) -> None:
    """As those of `make_graphed_callables`, and of a server with a graph for each batch size."""
    places: list[int] = []
    with raw_cuda.stream() as stream:

        def work() -> None:
            places.append(whole.alloc(12 * MIB, stream=stream))
            whole.free(places[-1], stream=stream)

        for _ in range(3):
            raw_cuda.call("cuGraphDestroy", capture(whole, stream, work, OTHER))
        assert len(set(places)) == 1
        for left in (2, 1, 0):
            whole.release_pool(OTHER)
            served.empty_cache()
            assert bool(pool_bytes(served, private=True)) == bool(left)


@both
@pytest.mark.parametrize("joins", [True, False])
def test_what_a_recorded_stream_uses_comes_back_after_the_capture(served, whole, joins) -> None:
    """Whether the stream has joined the capture, or has work outside: no stream may wait for one
    across that border, which would end the capture. PyTorch puts such a free off, too."""
    record = ctypes.CDLL(_torch.__file__).bfc_torch_record_stream
    record.restype = None
    with raw_cuda.stream() as stream, raw_cuda.stream() as side:
        taken: list[int] = []

        def work() -> None:
            taken.append(whole.alloc(12 * MIB, stream=stream))
            with raw_cuda.current():
                event = raw_cuda.call("cuEventCreate", 0)
                if joins:
                    raw_cuda.call("cuEventRecord", event, stream)
                    raw_cuda.call("cuStreamWaitEvent", side, event, 0)
            record(ctypes.c_void_p(taken[0]), ctypes.c_void_p(side))
            whole.free(taken[0], stream=stream)
            taken.append(whole.alloc(12 * MIB, stream=stream))
            assert taken[0] != taken[1]
            with raw_cuda.current():
                if joins:
                    raw_cuda.call("cuEventRecord", event, side)
                    raw_cuda.call("cuStreamWaitEvent", stream, event, 0)
                raw_cuda.call("cuEventDestroy", event)

        raw_cuda.call("cuGraphDestroy", capture(whole, stream, work, POOL))
        live = [chunk.ptr for chunk in served.snapshot().live_chunks()]
        assert live == taken[1:], "the end of the capture has made the free"
        whole.free(taken[1], stream=stream)
        whole.release_pool(POOL)
        served.empty_cache()
        assert served.stats().pool_bytes == 0


@both
def test_only_the_streams_of_the_capture_are_diverted(served, whole) -> None:
    """One that joins it, and none of another thread."""
    with raw_cuda.stream() as stream, raw_cuda.stream() as side, raw_cuda.stream() as outside:
        taken: list[tuple[int, int]] = []

        def elsewhere() -> None:
            taken.append((whole.alloc(3 * MIB, stream=outside), outside))

        def work() -> None:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            assert pool_bytes(served, private=True) == 0
            with raw_cuda.current():
                event = raw_cuda.call("cuEventCreate", 0)
                raw_cuda.call("cuEventRecord", event, stream)
                raw_cuda.call("cuStreamWaitEvent", side, event, 0)
            before = pool_bytes(served, private=False)
            taken.append((whole.alloc(3 * MIB, stream=side), side))
            assert pool_bytes(served, private=True) > 0
            assert pool_bytes(served, private=False) == before
            raw_cuda.fill(taken[-1][0], 1, SPOT, on=side)
            raw_cuda.call("cuEventRecord", event, side)
            raw_cuda.call("cuStreamWaitEvent", stream, event, 0)
            raw_cuda.call("cuEventDestroy", event)

        raw_cuda.call("cuGraphDestroy", capture(whole, stream, work, POOL))
        for ptr, on in taken:
            whole.free(ptr, stream=on)
        whole.release_pool(POOL)


@both
def test_memory_that_runs_out_in_a_capture_does_not_spoil_it(served, whole) -> None:
    with raw_cuda.stream() as stream:

        def work() -> None:
            with pytest.raises(MemoryError, match="asked for 83886080 bytes"):
                whole.alloc(80 * MIB, stream=stream)
            whole.free(whole.alloc(3 * MIB, stream=stream), stream=stream)

        raw_cuda.call("cuGraphDestroy", capture(whole, stream, work, POOL))
        whole.release_pool(POOL)


@both
def test_what_cannot_be_begun_or_ended_is_an_error_in_words(served, whole) -> None:
    with raw_cuda.stream() as stream:
        whole.begin_pool(POOL, stream)
        with pytest.raises(RuntimeError, match="in use already"):
            whole.begin_pool(POOL, stream)
        whole.end_pool(POOL)
        with pytest.raises(RuntimeError, match="is not in use"):
            whole.end_pool(POOL)
        whole.release_pool(POOL)
        served.close()
        with pytest.raises(RuntimeError, match="closed"):
            whole.begin_pool(POOL, stream)


@both
def test_a_release_too_many_is_told_and_not_thrown(served, whole, monkeypatch) -> None:
    """PyTorch releases in a destructor, from which nothing may be thrown."""
    told: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: told.append(str(it.exc_value)))
    whole.release_pool(POOL)
    assert "released already, or never made" in told[0]


def test_pytorch_empties_the_cache(served, whole, emulated) -> None:
    whole.free(whole.alloc(3 * MIB))
    assert served.stats().pool_bytes > 0
    whole.empty_cache()
    assert served.stats().pool_bytes == 0
    whole.free(whole.alloc(3 * MIB))
    emulated.fail("cuMemFree", "CUDA_ERROR_UNKNOWN")
    with pytest.raises(RuntimeError, match="CUDA_ERROR_UNKNOWN"):
        whole.empty_cache()
    whole.empty_cache()
    assert served.stats().pool_bytes == 0


@both
def test_a_tensor_from_before_can_be_freed_in_a_capture(make_cuda, whole, emulated) -> None:
    """The allocator's stream is not drawn into the graph. The memory is used again once the work
    is done that was queued before."""

    def captures(stream: int) -> bool:
        return int(raw_cuda.call("cuStreamIsCapturing", stream)) != 0

    with raw_cuda.stream() as stream, raw_cuda.stream() as home:
        allocator = make_cuda(allow_growth=True, stream=home)
        _torch.serve_device(allocator, 0)
        early = whole.alloc(3 * MIB, stream=stream)
        emulated.hold(stream)
        raw_cuda.fill(early, 1, SPOT, on=stream)

        def work() -> None:
            whole.free(early, stream=stream)
            assert captures(stream)
            assert not captures(home)

        raw_cuda.call("cuGraphDestroy", capture(whole, stream, work, POOL))
        taken = allocator.allocate(3 * MIB)
        assert taken.ptr != early
        taken.free()
        emulated.release_all()
        raw_cuda.synchronize(stream)
        whole.release_pool(POOL)
        allocator.empty_cache()
        assert allocator.stats().pool_bytes == 0
        _torch.serve_device(None, 0)
        allocator.close()


def test_a_segment_for_a_stream_that_captures_is_waited_for_on_the_host(
    make_cuda, library, emulated
) -> None:
    """PyTorch's own allocator keeps what its graphs use, and asks a `MemPool` for segments: no
    scope of ours knows of the capture. BFC's memory may still be in use on the allocator's stream,
    and a stream that captures may wait for no work outside of its graph."""
    with raw_cuda.stream() as stream, raw_cuda.stream() as home:
        allocator = make_cuda(allow_growth=True, stream=home)
        pool = Harness(library, _torch.serve_pool(allocator))
        allocator.allocate(2 * MIB).free()
        begin_capture(stream)
        emulated.clear()
        segment = pool.alloc(2 * MIB, stream=stream)
        assert segment
        assert emulated.count("cuStreamSynchronize") == 1
        assert emulated.count("cuStreamGetId") == 0  # it would spoil the capture
        raw_cuda.call("cuGraphDestroy", raw_cuda.call("cuStreamEndCapture", stream))
        pool.free(segment, stream=stream)
        emulated.fail("cuStreamGetId", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
        pool.free(pool.alloc(4 * MIB, stream=stream), stream=stream)
        assert emulated.count("cuStreamWaitEvent") > 0


# -- PyTorch itself --------------------------------------------------------------------------------


def on_gpu(test: Callable[..., None]) -> Callable[..., None]:
    skip = pytest.mark.skipif(
        not (ON_GPU and torch_runtime.HAS_TORCH), reason="needs a GPU and PyTorch"
    )
    return pytest.mark.gpu(skip(test))


BEGIN = """
import functools, torch, bfc

N = 1 << 18
pool = bfc.CachingAllocator(bfc.CUDASubAllocator(0), memory_limit="256 MiB")

def fill(tensor, value):
    tensor.copy_(torch.full(tensor.shape, float(value)))

def junk(value):
    tensors = [torch.empty(N, device="cuda") for _ in range(20)]
    for tensor in tensors:
        fill(tensor, value)
    return tensors

def are(tensors, value):
    return all(bool((tensor.cpu() == value).all()) for tensor in tensors)
"""

#: A graph that copies x to y by way of memory that is freed in its capture.
REPLAYED = """
x, y = torch.empty(N, device="cuda"), torch.empty(N, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph{pool}):
    work = torch.empty_like(x)
    work.copy_(x)
    y.copy_(work)
    del work
for turn in range(20):
    others = junk(100 + turn)
    fill(x, turn)
    graph.replay()
    torch.cuda.synchronize()
    assert are([y], turn) and are(others, 100 + turn)
    del others
    torch.cuda.empty_cache()
"""

REPLACED = """
bfc.integrations.torch.replace(pool)
{program}
ids = {{region.pool_id != (0, 0) for region in pool.snapshot().regions}}
del graph, x, y
torch.cuda.empty_cache()
print(ids, pool.stats().pool_bytes)
"""

BORROWED = """
mem_pool = bfc.integrations.torch.mem_pool(pool)
{program}
print(pool.stats().bytes_in_use > 0)
"""

SIZES = """
bfc.integrations.torch.replace(pool)
handle, graphs = torch.cuda.graph_pool_handle(), {}
for batch in (16, 8, 4, 2, 1):
    x, y = torch.empty(batch * N, device="cuda"), torch.empty(batch * N, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=handle):
        work = torch.empty_like(x)
        work.copy_(x)
        y.copy_(work)
        del work
    graphs[batch] = graph, x, y
held = sum(region.size for region in pool.snapshot().regions if region.pool_id != (0, 0))
others = junk(99)
for batch, (graph, x, y) in graphs.items():
    fill(x, batch)
    graph.replay()
    torch.cuda.synchronize()
    assert are([y], batch)
assert are(others, 99)
del graph, x, y, others
graphs.clear()
torch.cuda.empty_cache()
print(16 <= held >> 20 <= 32, pool.stats().pool_bytes)  # the largest needs 16 MiB
"""

GRAPHED = """
bfc.integrations.torch.replace(pool)
x = torch.empty(N, device="cuda", requires_grad=True)
fast = torch.cuda.make_graphed_callables(lambda x: x.clone().view(2, -1).clone(), (x,))
print(any(region.pool_id != (0, 0) for region in pool.snapshot().regions))
for turn in range(5):
    given = torch.empty(N, device="cuda")
    fill(given, turn)
    out = fast(given.requires_grad_())
    others = junk(99)
    assert are([out.detach()], turn)
    toward = torch.empty_like(out)
    fill(toward, turn + 1)
    (grad,) = torch.autograd.grad(out, given, toward)
    assert are([grad], turn + 1) and are(others, 99)
"""


@with_torch
@pytest.mark.parametrize(
    "policy",
    ["bfc.CachingAllocator", "functools.partial(bfc.BFCAllocator, allow_growth=True)"],
    ids=["caching", "bfc"],
)
@pytest.mark.parametrize(
    ("script", "says"),
    [
        (REPLACED.format(program=REPLAYED.format(pool="")), "{False, True} 0\n"),
        (BORROWED.format(program=REPLAYED.format(pool=", pool=mem_pool.id")), "True\n"),
        (SIZES, "True 0\n"),
        (GRAPHED, "True\n"),
    ],
    ids=["replace", "mem_pool", "sizes", "make_graphed_callables"],
)
def test_a_graph_of_pytorchs_is_replayed_while_others_allocate(
    run: Run, script: str, says: str, policy: str
) -> None:
    """PyTorch's own classes, from the capture to the end of the graph. Only contents are copied."""
    assert run(BEGIN.replace("bfc.CachingAllocator", policy) + script) == says


@with_torch
def test_pytorchs_errors_name_what_is_wrong(run: Run) -> None:
    script = """
    bfc.integrations.torch.replace(pool)
    torch.cuda.init()
    pool.close()
    graph = torch.cuda.CUDAGraph()  # kept: 2.11 aborts when it destroys one that never began
    try:
        with torch.cuda.graph(graph):
            pass
    except (RuntimeError, MemoryError) as error:  # of 2.15, and of 2.11
        print(error, flush=True)
    os._exit(0)
    """
    assert "is closed" in run("import os\n" + BEGIN + textwrap.dedent(script))


@on_gpu
def test_the_programs_of_the_how_to_run(run: Run) -> None:
    text = (ROOT / "docs/how-to/graphs.md").read_text()
    programs = [code for kind, code in BLOCK.findall(text) if kind == "py" and "torch" in code]
    assert len(programs) == 3
    for program in programs:
        run(program)


@on_gpu
def test_graphed_layers_train_in_a_pool(run: Run) -> None:
    script = """
    bfc.integrations.torch.replace(pool)
    model = torch.nn.Linear(64, 8).cuda()
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    fast = torch.cuda.make_graphed_callables(model, (x,))
    for _ in range(20):
        given = torch.randn(16, 64, device="cuda", requires_grad=True)
        fast(given).sum().backward()
        assert torch.allclose(given.grad, model.weight.sum(0).expand(16, 64), atol=1e-5)
    """
    run(BEGIN + textwrap.dedent(script))
