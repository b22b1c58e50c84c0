"""Sleep and wake over the CUDA driver: contents, waits, captures, pinned memory, failures."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import raw_cuda
from closing import close_all
from cuda_machine import ON_GPU

import bfc

MIB = 1 << 20


def expandable(source: bfc.SubAllocator) -> bfc.Allocator:
    settings = "expandable_segments:True"
    return bfc.CachingAllocator(source, settings=settings, memory_limit="300 MiB")


def stitched(source: bfc.SubAllocator) -> bfc.Allocator:
    return bfc.BFCAllocator(source, virtual_memory=True, page_size="2 MiB", memory_limit="300 MiB")


@pytest.fixture
def streams() -> Iterator[tuple[int, int]]:
    """They live longer than the pool, which waits for them when it closes."""
    with raw_cuda.stream() as one, raw_cuda.stream() as other:
        yield one, other


@pytest.fixture(params=[expandable, stitched])
def pool(request: pytest.FixtureRequest, streams: tuple[int, int]) -> Iterator[bfc.Allocator]:
    source = bfc.CUDASubAllocator()
    if not source.supports_virtual_memory:
        pytest.skip(str(source.supports_virtual_memory))
    allocator = request.param(source)
    yield allocator
    close_all([allocator])


class Marked:
    """A block with a number at its ends and in its middle."""

    def __init__(self, pool: bfc.Allocator, nbytes: int, mark: int, stream: int = 0) -> None:
        self.buffer = pool.allocate(nbytes, stream)
        self.ptr, self.stream, self.mark = self.buffer.ptr, stream, mark
        self.places = [self.ptr, self.ptr + nbytes // 2, self.ptr + nbytes - 4]
        self.write()

    def write(self) -> None:
        for place in self.places:
            raw_cuda.fill(place, self.mark, 4, self.stream)

    def check(self) -> None:
        assert self.buffer.ptr == self.ptr
        for place in self.places:
            assert raw_cuda.read(place, 4) == bytes([self.mark]) * 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["host", "pinned"])
def test_contents_and_addresses_come_back(pool: bfc.Allocator, way: str) -> None:
    before = pool.sub_allocator.memory_info()[0]
    with pool.tag("weights"):
        weights = [Marked(pool, size, 1 + i) for i, size in enumerate((1000, 5 * MIB, 70 * MIB))]
    with pool.tag("kv"):
        cache = Marked(pool, 30 * MIB, 9)
    pool.sleep(keep={"weights": way}, drop=["kv"])
    assert pool.sub_allocator.live_bytes == 0
    assert ON_GPU or pool.sub_allocator.memory_info()[0] >= before  # others may use a GPU, too
    with pytest.raises(bfc.AsleepError):
        cache.buffer.__cuda_array_interface__  # noqa: B018
    with pytest.raises(bfc.AsleepError):
        weights[0].buffer.to_host()
    pool.wake("weights")
    for block in weights:
        block.check()
    pool.wake(fill=5)
    assert raw_cuda.read(cache.places[1], 4) == bytes([5]) * 4
    del weights, cache, block


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
def test_random_cycles(pool: bfc.Allocator, streams: tuple[int, int], seed: int) -> None:
    rng = random.Random(seed)
    live: list[Marked] = []
    pool.tag("a")
    for cycle in range(40):
        for _ in range(rng.randrange(5)):
            with pool.tag("a"):
                size = rng.choice([rng.randrange(4, 4000), rng.randrange(4, 5 * MIB)])
                live.append(Marked(pool, size, cycle, rng.choice([0, streams[0]])))
        pool.sleep(keep={"a": rng.choice(["host", "pinned"])})
        assert pool.sub_allocator.live_bytes == 0
        while len(live) > 10 or (live and rng.random() < 0.3):
            live.pop(rng.randrange(len(live))).buffer.free()
        pool.wake()
        assert pool.sub_allocator.live_bytes == pool.stats().bytes_reserved
        for block in live:
            block.check()
    pool.check()


def test_it_waits_for_the_work_that_uses_the_memory(
    pool: bfc.Allocator, streams: tuple[int, int], emulated
) -> None:
    """Also for that of a stream that was recorded."""
    with pool.tag("a"):
        buffer = pool.allocate(4 * MIB, streams[0])
    pool.record_stream(buffer, streams[1])
    for stream in streams:
        emulated.hold(stream, 0)
        raw_cuda.fill(buffer.ptr, 7, 4 * MIB, stream)
        sleeping = threading.Thread(target=pool.sleep, kwargs={"keep": "host"})
        unmapped = emulated.count("cuMemUnmap")
        sleeping.start()
        sleeping.join(0.2)
        assert sleeping.is_alive()
        assert emulated.count("cuMemUnmap") == unmapped
        emulated.release(stream, 0)
        sleeping.join()
        assert pool.asleep == {"a"}
        pool.wake()
        assert raw_cuda.read(buffer.ptr, 4) == bytes([7]) * 4


def test_it_is_refused_while_a_graph_is_captured(
    pool: bfc.Allocator, streams: tuple[int, int]
) -> None:
    from cuda.bindings import driver

    with pool.tag("a"):
        block = Marked(pool, 4 * MIB, 3, streams[0])
    raw_cuda.synchronize(streams[0])
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    raw_cuda.call("cuStreamBeginCapture", streams[0], mode)
    before = pool.stats()
    try:
        with pytest.raises(bfc.DriverError, match="graph is being captured"):
            pool.sleep(keep="host")
        assert (pool.asleep, pool.stats()) == (frozenset(), before)
    finally:
        raw_cuda.call("cuStreamEndCapture", streams[0])
    block.check()
    pool.sleep(keep="host")
    pool.wake()
    block.check()


def test_what_was_dropped_is_filled_on_the_device(pool: bfc.Allocator, emulated) -> None:
    """Nothing is copied from the host. If that fails, the tag sleeps on."""
    with pool.tag("a"):
        blocks = [Marked(pool, nbytes, 1) for nbytes in (5 * MIB, 70 * MIB, 512)]
    pool.sleep()
    emulated.fail("cuMemsetD8Async", 999, at=2)
    with pytest.raises(bfc.DriverError, match="filling"):
        pool.wake(fill=7)
    emulated.clear()
    assert (pool.asleep, pool.sub_allocator.live_bytes) == ({"a"}, 0)
    with emulated.counting() as calls:
        pool.wake(fill=7)
    assert (calls["cuMemsetD8Async"], calls["cuMemcpyAsync"]) == (3, 0)
    for block in blocks:
        block.mark = 7
        block.check()


CALLS = {
    "sleep": ["cuMemcpyAsync", "cuMemUnmap", "cuMemRelease"],
    "wake": ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyAsync"],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("op", "call"), [(op, call) for op in CALLS for call in CALLS[op]])
def test_each_driver_call_fails_once(pool: bfc.Allocator, emulated, op: str, call: str) -> None:
    failed = 0
    for number in (1, 2, 3):
        with pool.tag("a"):
            blocks = [Marked(pool, size * MIB, size) for size in (5, 1, 25)]
        if op == "wake":
            pool.sleep(keep="host")
        before = (pool.asleep, pool.stats(), pool.sub_allocator.live_bytes)
        emulated.fail(call, 999, at=number)
        try:
            pool.sleep(keep="host") if op == "sleep" else pool.wake()
        except bfc.DriverError:
            failed += 1
            assert (pool.asleep, pool.stats(), pool.sub_allocator.live_bytes) == before
            pool.check()
        emulated.clear()
        pool.sleep(keep="host")
        assert pool.sub_allocator.live_bytes == 0
        pool.wake()
        for block in blocks:
            block.check()
            block.buffer.free()
    assert failed
