"""PyTorch's policy over the CUDA driver: streams, fences that fail, and memory that runs out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import raw_cuda
from closing import close_all

import bfc

MIB = 1 << 20
LEGACY, PER_THREAD = 1, 2
KINDS = ["device", "managed", "pinned", "async"]
ALLOC_CALLS = {
    "device": "cuMemAlloc",
    "managed": "cuMemAllocManaged",
    "pinned": "cuMemHostAlloc",
    "async": "cuMemAllocAsync",
}
Make = Callable[..., "bfc.CachingAllocator"]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes allocators over a device. After the test each is checked and closed."""
    allocators: list[bfc.CachingAllocator] = []

    def start(kind: str = "device", **options: object) -> bfc.CachingAllocator:
        options.setdefault("memory_limit", "128 MiB")
        allocators.append(bfc.CachingAllocator(bfc.CUDASubAllocator(kind=kind), **options))
        return allocators[-1]

    yield start
    close_all(allocators)


def test_a_hit_on_any_stream_calls_no_driver(make, emulated, side) -> None:
    allocator = make()
    for stream in (0, LEGACY, PER_THREAD, side):
        allocator.allocate(1000, stream).free()
    with emulated.counting() as calls:
        for stream in (0, LEGACY, PER_THREAD, side) * 25:
            allocator.allocate(1000, stream).free()
    assert calls == {}
    assert len(allocator.snapshot().regions) == 3, "0 and 1 are one stream"


@pytest.mark.parametrize("kind", KINDS)
def test_the_driver_is_asked_for_what_pytorch_would_ask_and_no_more(make, emulated, kind) -> None:
    """A GPU's driver gives whole pages of 2 MiB: one byte more than those costs another one."""
    allocator = make(kind)
    before = emulated.live()
    for nbytes in (1000, 3 * MIB, 30 * MIB):
        allocator.allocate(nbytes)
    taken = [nbytes for address, nbytes in emulated.live().items() if address not in before]
    assert sorted(taken) == [2 * MIB, 20 * MIB, 30 * MIB]


@pytest.mark.parametrize("kind", KINDS)
def test_an_address_that_is_not_aligned_enough_is_taken_again(emulated, kind) -> None:
    source = bfc.CUDASubAllocator(kind=kind)
    first = source.alloc(1 << 21, 512)
    with emulated.counting() as calls:
        second = source.alloc(1 << 21, 512)
    assert {first[0] % (1 << 21), second[0] % (1 << 21)} == {0}
    assert calls[ALLOC_CALLS[kind]] == 2, "the driver's first address was as good"
    for address, nbytes in (first, second):
        source.free(address, nbytes)
    assert source.live_bytes == 0


def test_memory_waits_for_the_stream_that_was_recorded_and_then_goes_back_to_its_own(
    make, emulated, side
) -> None:
    allocator = make()
    buffer = allocator.allocate(4, side)
    ptr = buffer.ptr
    raw_cuda.fill(ptr, 5, 4, side)
    raw_cuda.synchronize(side)
    with raw_cuda.stream() as reader:
        allocator.record_stream(buffer, reader)
        emulated.hold(reader)
        with raw_cuda.queued_read(ptr, 4, reader) as seen:
            buffer.free()
            for _ in range(3):
                other = allocator.allocate(4, side)
                assert other.ptr != ptr
                raw_cuda.fill(other.ptr, 9, 4, side)
                raw_cuda.synchronize(side)
                other.free()
            emulated.release(reader)
            assert bytes(seen) == bytes([5] * 4)
        assert allocator.allocate(4, 0).ptr != ptr, "it belongs to the other stream"
        assert allocator.allocate(4, side).ptr == ptr
    assert allocator.stats().bytes_waiting_for_streams == 0


def test_emptying_waits_for_what_streams_still_use(make, emulated, side) -> None:
    """It blocks without the GIL: another thread lets the stream go on."""
    allocator = make()
    for nbytes in (1000, 30 * MIB):
        buffer = allocator.allocate(nbytes)
        allocator.record_stream(buffer, side)
        emulated.hold(side)
        raw_cuda.fill(buffer.ptr, 1, 4, side)
        buffer.free()
    release = emulated.release_once_waited_for(side)
    assert allocator.empty_cache() == 32 * MIB
    release.join()
    assert emulated.count("cuEventSynchronize") >= 1


def test_the_default_stream_of_each_thread_has_memory_of_its_own(make) -> None:
    allocator = make()
    first = allocator.allocate_raw(1000, PER_THREAD)
    allocator.deallocate_raw(first)
    seen: list[int] = []

    def other() -> None:
        seen.append(allocator.allocate_raw(1000, PER_THREAD))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen != [first]
    assert allocator.allocate_raw(1000, PER_THREAD) == first
    allocator.deallocate_raw(seen[0])  # it goes back to the other thread's
    assert allocator.allocate_raw(1000, PER_THREAD) != seen[0]
    assert len(allocator.snapshot().regions) == 2


def test_what_a_thread_cached_for_its_own_stream_is_given_up_when_memory_lacks(make) -> None:
    allocator = make(memory_limit=40 * MIB)
    thread = threading.Thread(target=lambda: allocator.allocate(30 * MIB, PER_THREAD).free())
    thread.start()
    thread.join()
    assert allocator.allocate(30 * MIB, PER_THREAD).ptr
    assert allocator.memory_stats()["num_alloc_retries"] == 1


def test_a_stream_that_is_destroyed_after_its_buffers_were_dropped(make, emulated) -> None:
    """A dropped buffer marks the streams at once."""
    allocator = make()
    with raw_cuda.stream() as stream:
        buffer = allocator.allocate(1000)
        allocator.record_stream(buffer, stream)
        del buffer
    assert allocator.allocate(1000).ptr
    assert allocator.stats().bytes_waiting_for_streams == 0


def test_a_free_after_its_stream_was_destroyed_says_so_and_can_be_left_to_closing(
    make, emulated, monkeypatch
) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda entry: None)
    allocator = make()
    ptr = allocator.allocate_raw(1000)
    with raw_cuda.stream() as stream:
        allocator.record_stream(ptr, stream)
    with pytest.raises(bfc.DriverError, match=f"{stream:#x}"):
        allocator.deallocate_raw(ptr)
    allocator.check()
    assert allocator.requested_size(ptr) == 1000
    emulated.clear()  # the driver's complaint about the dead handle


def test_pinned_memory_waits_for_the_stream_that_it_was_allocated_for(make, emulated, side) -> None:
    """The host uses it too, so it comes back by an event only, and to one cache for all streams."""
    allocator = make("pinned")
    buffer = allocator.allocate(4, side)
    ptr = buffer.ptr
    emulated.hold(side)
    raw_cuda.fill(ptr, 7, 4, side)
    buffer.free()
    other = allocator.allocate(4, side)
    assert other.ptr != ptr
    emulated.release(side)
    again = allocator.allocate(4)
    assert again.ptr == ptr
    assert bytes(memoryview(again)) == bytes([7] * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_driver_without_memory_gets_back_what_is_cached(make, emulated, kind) -> None:
    allocator = make(kind, memory_limit="1 GiB")
    for nbytes in (30 * MIB, 40 * MIB):
        allocator.allocate(nbytes).free()
    emulated.fail(ALLOC_CALLS[kind], "CUDA_ERROR_OUT_OF_MEMORY", times=1)
    assert allocator.allocate(60 * MIB).ptr
    stats = allocator.memory_stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 0)
    emulated.fail(ALLOC_CALLS[kind], "CUDA_ERROR_OUT_OF_MEMORY", times=None)
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate(70 * MIB)
    assert allocator.memory_stats()["num_ooms"] == 1
    emulated.clear()
    assert allocator.allocate(70 * MIB).ptr


# -- every call fails at each place ---------------------------------------------------------------


def a_life(allocator: bfc.CachingAllocator) -> None:
    """Everything that calls the driver, once."""
    first = allocator.allocate(1 * MIB)
    second = allocator.allocate(3 * MIB, stream=PER_THREAD)
    allocator.record_stream(first, PER_THREAD)
    allocator.record_stream(second, LEGACY)
    pool = bfc.MemPool(allocator)
    try:
        with bfc.use_mem_pool(pool):
            third = allocator.allocate_raw(24 * MIB)
            allocator.record_stream(third, PER_THREAD)
            try:
                allocator.deallocate_raw(third)
            except bfc.SubAllocatorError:
                allocator.deallocate_raw(third)
                raise
        first.free()
        second.free()
        allocator.allocate(100).free()
        allocator.allocate(50 * MIB).free()
        allocator.allocate(60 * MIB).free()  # which needs what is cached
    finally:
        pool.release()
    dropped = allocator.allocate(100, stream=PER_THREAD)
    allocator.record_stream(dropped, LEGACY)
    del dropped
    allocator.empty_cache()


CALLS = [
    "cuCtxGetId",
    "cuCtxPushCurrent",
    "cuMemAlloc",
    "cuMemFree",
    "cuMemAllocAsync",
    "cuMemFreeAsync",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuStreamGetId",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuStreamWaitEvent",
    "cuMemGetInfo",
]


@pytest.mark.parametrize(
    ("kind", "error", "strict"),
    [
        ("device", "CUDA_ERROR_OUT_OF_MEMORY", False),
        ("device", "CUDA_ERROR_UNKNOWN", True),
        ("pinned", "CUDA_ERROR_UNKNOWN", False),
        ("async", "CUDA_ERROR_OUT_OF_MEMORY", True),
    ],
)
def test_each_call_fails_at_each_place(emulated, kind, error, strict, monkeypatch) -> None:
    """A clear error or none, nothing lost, and the allocator usable after."""
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)
    before = emulated.live()
    reached = set()
    for name in CALLS:
        place = 0
        while place == 0 or (name in reached and place < 80):
            place += 1
            source = bfc.CUDASubAllocator(kind=kind)
            allocator = bfc.CachingAllocator(source, memory_limit="100 MiB", strict=strict)
            emulated.clear()
            emulated.fail(name, error, at=place)
            try:
                a_life(allocator)
            except (bfc.SubAllocatorError, bfc.OutOfMemoryError):
                pass
            was_reached = emulated.count(name) >= place
            emulated.clear()
            allocator.check()
            if strict:
                allocator.empty_cache()  # in a scope it would not try again what has failed
            a_life(allocator)
            allocator.check()
            where = f"{name} at its call {place}"
            assert allocator.stats().bytes_in_use == 0, where
            assert allocator.snapshot().regions == (), where
            allocator.close()
            assert source.live_bytes == 0, where
            if not was_reached:
                break
            reached.add(name)
        assert place < 80, name
    assert {"cuCtxPushCurrent", "cuEventRecord", ALLOC_CALLS[kind]} <= reached
    assert emulated.live() == before
