"""Libraries that allocate from a pool while a stream of theirs captures a graph.

CuPy's own begin_capture goes through the CUDA runtime, which refuses the emulated driver, and numba
has none: there the driver's calls begin and end the capture. cuda.core's graph builder is real.
"""

from __future__ import annotations

import pytest
import raw_cuda

import bfc

MIB = 1 << 20

pytestmark = pytest.mark.parametrize("make_cuda", [bfc.CachingAllocator], indirect=True)


class Handle:
    """A stream that is not CuPy's."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._stream


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
    pool = make_cuda()
    with raw_cuda.stream() as stream, bfc.use(pool, "cupy"):
        cupy.current.stream = cupy.module.cuda.Stream.from_external(Handle(stream))
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
        cupy.current.stream = None


def test_cupys_arrays_of_an_unknown_capture_are_refused(cupy, make_cuda) -> None:
    """Others would get their memory once they are freed, and the graph would still write there."""
    pool = make_cuda()
    with raw_cuda.stream() as stream, bfc.use(pool, "cupy"):
        cupy.current.stream = cupy.module.cuda.Stream.from_external(Handle(stream))
        begin(stream)
        with pytest.raises(RuntimeError, match=r"captures a CUDA graph(?s:.)*allocator\.capture"):
            cupy.module.ndarray((MIB,), "u1")
        raw_cuda.call("cuGraphDestroy", raw_cuda.call("cuStreamEndCapture", stream))
        cupy.module.ndarray((MIB,), "u1")
        cupy.current.stream = None


def test_a_captured_stream_that_the_pool_was_not_told_of_is_refused(core, make_cuda) -> None:
    """Its memory comes from the allocator's own stream, which it may not wait for."""
    pool, stream = make_cuda(), core.Device(0).create_stream()
    pool.allocate(MIB).free()
    with bfc.use(pool, "cuda_core"):
        begin(int(stream.handle))
        with pytest.raises(bfc.DriverError, match=r"allocator\.capture"):
            core.Device(0).allocate(MIB, stream=stream)
        graph = raw_cuda.call("cuStreamEndCapture", int(stream.handle))
        raw_cuda.call("cuGraphDestroy", graph)


def test_numbas_arrays_of_a_capture_are_the_graphs(numba, make_cuda) -> None:
    pool = make_cuda()
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
    pool, device = make_cuda(), core.Device(0)
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
