"""Libraries that allocate from a pool while a stream of theirs captures a graph.

CuPy's own begin_capture goes through the CUDA runtime, which refuses the emulated driver: the last
tests run it in processes of their own, where the driver's calls take the runtime's place. numba has
no captures: there the driver's calls begin and end them. cuda.core's graph builder is real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import cupy_runtime
import pytest
import raw_cuda
from cuda_machine import ON_GPU
from documents import BLOCK, ROOT

import bfc

from .conftest import Run, library

MIB = 1 << 20

pytestmark = pytest.mark.parametrize(
    "make_cuda", [bfc.CachingAllocator, bfc.BFCAllocator], indirect=True
)


class Handle:
    """A stream that is not CuPy's."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


@contextmanager
def unknown_capture(stream: int) -> Iterator[None]:
    """One that no allocator was told of. It ends in any case: most calls fail until then."""
    begin(stream)
    try:
        yield
    finally:
        raw_cuda.call("cuGraphDestroy", raw_cuda.call("cuStreamEndCapture", stream))


def begin(stream: int) -> None:
    from cuda.bindings import driver

    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    raw_cuda.call("cuStreamBeginCapture", stream, mode)


def launch(graph: object, stream: int) -> None:
    with raw_cuda.current():
        made = raw_cuda.call("cuGraphInstantiate", graph, 0)
        raw_cuda.call("cuGraphLaunch", made, stream)
        raw_cuda.synchronize(stream)
        raw_cuda.call("cuGraphExecDestroy", made)
        raw_cuda.call("cuGraphDestroy", graph)


def test_cupys_arrays_of_a_capture_are_the_graphs(cupy, make_cuda) -> None:
    pool = make_cuda(allow_growth=True)
    with raw_cuda.stream() as stream, bfc.use(pool, "cupy"), cupy.on(Handle(stream)):
        out = cupy.module.ndarray((MIB,), "u1")
        with pool.capture(cupy.current.stream) as graph_pool:
            begin(stream)
            work = cupy.module.ndarray((3 * MIB,), "u1")
            raw_cuda.fill(work.data.ptr, 7, MIB, on=stream)
            raw_cuda.call("cuMemcpyDtoDAsync", out.data.ptr, work.data.ptr, MIB, stream)
            inside = work.data.ptr
            del work
            graph = raw_cuda.call("cuStreamEndCapture", stream)
        other = cupy.module.ndarray((3 * MIB,), "u1")
        assert other.data.ptr != inside
        launch(graph, stream)
        assert raw_cuda.read(out.data.ptr, MIB) == bytes([7]) * MIB
        graph_pool.release()
        del out, other


def test_cupys_arrays_of_an_unknown_capture_are_refused(cupy, make_cuda) -> None:
    """Others would get their memory once they are freed, and the graph would still write there."""
    pool = make_cuda()
    refusal = pytest.raises(RuntimeError, match=r"captures a CUDA graph(?s:.)*allocator\.capture")
    with raw_cuda.stream() as stream, bfc.use(pool, "cupy"), cupy.on(Handle(stream)):
        with unknown_capture(stream), refusal:
            cupy.module.ndarray((MIB,), "u1")
        cupy.module.ndarray((MIB,), "u1")


def test_a_captured_stream_that_the_pool_was_not_told_of_is_refused(core, make_cuda) -> None:
    """Its memory comes from the allocator's own stream, which it may not wait for."""
    pool, stream = make_cuda(), core.Device(0).create_stream()
    pool.allocate(MIB).free()
    refusal = pytest.raises(bfc.DriverError, match=r"allocator\.capture")
    with bfc.use(pool, "cuda_core"), unknown_capture(int(stream.handle)), refusal:
        core.Device(0).allocate(MIB, stream=stream)


def test_rmm_is_refused_on_a_stream_that_captures(rmm, core, make_cuda) -> None:
    resource = bfc.integrations.rmm.resource(make_cuda())
    stream = core.Device(0).create_stream()
    theirs = library("rmm.pylibrmm.stream").Stream(stream)
    refusal = pytest.raises(RuntimeError, match=r"allocator\.capture")  # it comes through C++
    with unknown_capture(int(stream.handle)), refusal:
        resource.allocate(MIB, theirs)


def test_a_branch_of_a_graph_that_is_built_takes_the_graphs_memory(core, make_cuda) -> None:
    pool, device = make_cuda(), core.Device(0)
    with bfc.use(pool, "cuda_core"):
        builder = device.create_graph_builder()
        builder.begin_building()
        with pool.capture(builder) as graph_pool:
            left, right = builder.split(2)
            buffer = device.allocate(3 * MIB, stream=right)
            buffer.fill(7, stream=right)
            buffer.close()
            builder = core.graph.GraphBuilder.join(left, right)
            builder.end_building()
        graph = builder.complete()
        assert [region.pool_id for region in pool.snapshot().regions] == [graph_pool.id]
        graph.close()
        builder.close()
        graph_pool.release()


@pytest.mark.long
def test_numbas_arrays_of_a_capture_are_the_graphs(numba, make_cuda) -> None:
    pool = make_cuda(allow_growth=True)
    with raw_cuda.stream() as stream, bfc.use(pool, "numba"):
        with pool.capture(stream) as graph_pool:
            begin(stream)
            array = numba.cuda.device_array(3 * MIB, "u1")
            inside = array.device_ctypes_pointer.value
            raw_cuda.fill(inside, 7, MIB, on=stream)
            graph = raw_cuda.call("cuStreamEndCapture", stream)
        assert [region.pool_id for region in pool.snapshot().regions] == [graph_pool.id]
        launch(graph, stream)
        assert raw_cuda.read(inside, MIB) == bytes([7]) * MIB
        del array
        graph_pool.release()


def test_cuda_cores_graph_builder_takes_its_memory_from_the_pool(core, make_cuda) -> None:
    pool, device = make_cuda(allow_growth=True), core.Device(0)
    stream = device.create_stream()
    out = pool.allocate(MIB, stream=stream)
    with bfc.use(pool, "cuda_core"):
        builder = stream.create_graph_builder()
        builder.begin_building()
        with pytest.raises(TypeError, match=r"allocator\.capture"):
            device.allocate(100, stream=builder)
        with pool.capture(builder) as graph_pool:
            buffer = device.allocate(3 * MIB, stream=builder)
            buffer.fill(7, stream=builder)
            raw_cuda.call("cuMemcpyDtoDAsync", out.ptr, int(buffer.handle), MIB, int(stream.handle))
            inside = int(buffer.handle)
            buffer.close()
            builder.end_building()
        graph = builder.complete()
        other = device.allocate(3 * MIB, stream=stream)
        assert int(other.handle) != inside
        graph.launch(stream)
        stream.sync()
        assert raw_cuda.read(out.ptr, MIB) == bytes([7]) * MIB
        graph.close()
        builder.close()
        graph_pool.release()
        other.close()
    out.free()


@pytest.fixture(scope="session")
def begin_with_cupy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The beginning of a script that imports CuPy."""
    pytest.importorskip("cupy_backends")
    lines = ["import warnings", "warnings.simplefilter('ignore')"]
    if not ON_GPU:
        made = cupy_runtime.build(tmp_path_factory.mktemp("cupy"))
        helpers = str(Path(cupy_runtime.__file__).parent)
        lines += ["import sys", f"sys.path.insert(0, {helpers!r})"]
        lines += ["import cupy_runtime", f"cupy_runtime.install({str(made)!r})"]
    lines += ["import cupy", "warnings.simplefilter('default')", ""]
    return "\n".join(lines)


REPLAYED = """
pool = {pool}(bfc.CUDASubAllocator(0), memory_limit="64 MiB"{more})
n, stream = 3 << 20, cupy.cuda.Stream(non_blocking=True)
with bfc.use(pool, "cupy"), stream:
    x, y = cupy.empty(n, "u1"), cupy.empty(n, "u1")
    with pool.capture(stream) as graph_pool:
        stream.begin_capture()
        work = cupy.empty(n, "u1")
        work.data.copy_from_device_async(x.data, n)
        y.data.copy_from_device_async(work.data, n)
        inside = work.data.ptr
        del work
        graph = stream.end_capture()
    for turn in range(20):
        others = [cupy.empty(n, "u1") for _ in range(5)]
        assert inside not in [other.data.ptr for other in others]
        for other in others:
            other.data.memset_async(100 + turn, n)
        x.data.memset_async(turn, n)
        graph.launch()
        stream.synchronize()
        assert set(y.get()[::4096].tolist()) == {{turn}}
        assert all(set(other.get()[::4096].tolist()) == {{100 + turn}} for other in others)
        del others, other
        pool.empty_cache()
    del graph
    graph_pool.release()
    stream.begin_capture()
    try:
        cupy.empty(n, "u1")
    except RuntimeError as error:
        print("allocator.capture" in str(error))
    assert stream.is_capturing()
    stream.end_capture()
    del x, y
pool.empty_cache()
print(pool.stats().pool_bytes)
"""


def of(policy: str) -> dict[str, str]:
    more = ", allow_growth=True" if policy == "BFCAllocator" else ""
    return {"pool": f"bfc.{policy}", "more": more}


@pytest.fixture
def policy(request: pytest.FixtureRequest) -> str:
    return request.node.callspec.params["make_cuda"].__name__


@pytest.mark.sampled(1)
def test_a_graph_of_cupys_is_replayed_while_others_allocate(
    run_alone: Run, begin_with_cupy: str, make_cuda, policy: str
) -> None:
    script = begin_with_cupy + REPLAYED.format(**of(policy))
    run_alone(script, says="True\n0\n", CUPY_CACHE_IN_MEMORY="1")


@pytest.mark.sampled(1)
def test_the_program_of_the_how_to_runs(
    run_alone: Run, begin_with_cupy: str, make_cuda, policy: str
) -> None:
    """Its kernels are compiled, loaded, captured and launched; the emulated driver runs none."""
    text = (ROOT / "docs/how-to/graphs.md").read_text()
    [program] = [code for kind, code in BLOCK.findall(text) if kind == "py" and "cupy" in code]
    limit = 'memory_limit="1 GiB"'
    assert f"bfc.CachingAllocator(bfc.CUDASubAllocator(0), {limit})" in program
    program = program.replace("bfc.CachingAllocator", f"bfc.{policy}")
    program = program.replace(limit, limit + of(policy)["more"])
    after = """
print(y.data.ptr in [chunk.ptr for region in pool.snapshot().regions for chunk in region.chunks
                     if region.pool_id == graph_pool.id], graph_pool.released)
"""
    run_alone(begin_with_cupy + program + after, says="True True\n", CUPY_CACHE_IN_MEMORY="1")
