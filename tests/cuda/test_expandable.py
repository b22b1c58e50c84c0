"""Expandable segments over the CUDA driver: contents, waits, handle types, peers, failures.

Here are the numbered cases (docs/behaviour/pytorch.md, 11) that need a driver: EX-31 to 33, 38 and
44. Left out are EX-39 to 41 and 45: bfc neither shares ranges with other processes nor gives a
private pool an allocator of its own.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import raw_cuda
from closing import close_all
from raw_cuda import MAPPING

import bfc

MIB = 1 << 20
PAGE = 20 * MIB
ON = "expandable_segments:True"
Make = Callable[..., "bfc.CachingAllocator"]


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes allocators over a device. After the test each is checked and closed."""
    allocators: list[bfc.CachingAllocator] = []

    def start(device: int = 0, *, strict: bool = True, **options: object) -> bfc.CachingAllocator:
        source = bfc.CUDASubAllocator(device, **options)
        if not source.supports_virtual_memory:
            pytest.skip(str(source.supports_virtual_memory))
        limit = "300 MiB"
        allocators.append(
            bfc.CachingAllocator(source, settings=ON, memory_limit=limit, strict=strict)
        )
        return allocators[-1]

    yield start
    close_all(allocators)


def calls(emulated) -> list[tuple[str, int | None]]:
    return [(call.name, call.nbytes) for call in emulated.calls if call.name in MAPPING[1:-1]]


# -- contents --------------------------------------------------------------------------------------


class Marked:
    """A block with a number at its ends and at each border of pages within it."""

    def __init__(self, allocator: bfc.CachingAllocator, nbytes: int, stream: int, mark: int):
        self.buffer = allocator.allocate(nbytes, stream)
        self.stream, self.mark = stream, mark
        first, last = self.buffer.ptr, self.buffer.ptr + nbytes
        step = 2 * MIB
        borders = range(first // step * step + step, last - 4, step)
        self.places = [first, last - 4, *(border - 2 for border in borders if border - 2 > first)]
        for place in self.places:
            raw_cuda.fill(place, mark, 4, stream)

    def check_and_free(self) -> None:
        for place in self.places:
            assert raw_cuda.read(place, 4) == bytes([self.mark]) * 4
        self.buffer.free()


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_random_histories_keep_every_byte(make, strict: bool, seed: int) -> None:
    rng = random.Random(seed)
    allocator = make(strict=strict)
    private = bfc.MemPool(allocator)
    live: list[Marked] = []
    refused = 0
    with raw_cuda.stream() as side:
        for step in range(250):
            if live and rng.random() < 0.45:
                live.pop(rng.randrange(len(live))).check_and_free()
                continue
            if rng.random() < 0.08:
                allocator.empty_cache()
            if rng.random() < 0.05:
                allocator.set_settings(f"expandable_segments:{rng.random() < 0.7}")
            nbytes = rng.choice([rng.randrange(4, MIB), rng.randrange(MIB, 45 * MIB)])
            stream = rng.choice([0, side])
            try:
                if rng.random() < 0.2:
                    with bfc.use_mem_pool(private):
                        live.append(Marked(allocator, nbytes, stream, step % 251))
                else:
                    live.append(Marked(allocator, nbytes, stream, step % 251))
            except bfc.OutOfMemoryError:
                refused += 1
                while len(live) > 3:
                    live.pop().check_and_free()
            if step % 25 == 0:
                allocator.check()
        while live:
            live.pop().check_and_free()
        assert refused, "the limit was never reached"
        del private
        gc.collect()
        allocator.empty_cache()
        assert allocator.sub_allocator.live_bytes == 0


# -- waiting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_side", [False, True])
def test_memory_is_unmapped_after_the_work_on_its_own_device(make, emulated, on_side) -> None:
    """EX-44, with another device current: upstream waits for that device's stream."""
    allocator = make(1)
    with raw_cuda.stream(1) as side, raw_cuda.current(0):
        stream = side if on_side else 0
        buffer = allocator.allocate(PAGE, stream)
        emulated.hold(stream, 1)
        raw_cuda.fill(buffer.ptr, 7, PAGE, stream, 1)
        buffer.free()
        emptying = threading.Thread(target=allocator.empty_cache)
        emptying.start()
        emptying.join(0.2)
        assert emptying.is_alive()
        assert emulated.count("cuMemUnmap") == 0
        emulated.release(stream, 1)
        emptying.join()
        assert emulated.count("cuMemUnmap") == 1
    assert allocator.stats().pool_bytes == 0


# -- handle types ----------------------------------------------------------------------------------


def test_pages_without_handles_serve_as_well(make, emulated) -> None:
    """EX-31."""
    allocator = make(handle_type="none")
    allocator.allocate(4 * MIB).free()
    assert allocator.sub_allocator.handle_type == "none"
    assert calls(emulated)[:3] == [
        ("cuMemCreate", PAGE),
        ("cuMemMap", PAGE),
        ("cuMemSetAccess", PAGE),
    ]


def test_the_first_page_decides_the_handle_type(make, emulated, fabric) -> None:
    """EX-32: its refusal makes pages with descriptors. A later refusal is an error, not a lack of
    memory, and changes nothing."""
    allocator = make(handle_type="fabric")
    emulated.fail("cuMemCreate", "CUDA_ERROR_NOT_SUPPORTED")
    kept = allocator.allocate(4 * MIB)
    assert allocator.sub_allocator.handle_type == "posix"
    emulated.fail("cuMemCreate", "CUDA_ERROR_NOT_SUPPORTED")
    before = allocator.memory_stats()
    with pytest.raises(bfc.DriverError, match="NOT_SUPPORTED"):
        allocator.allocate(30 * MIB)
    after = allocator.memory_stats()
    assert (after["num_alloc_retries"], after["num_ooms"]) == (0, 0)
    assert after["reserved_bytes.all.current"] == before["reserved_bytes.all.current"] == PAGE
    kept.free()


def test_a_later_page_without_a_fabric_handle_is_an_error(make, emulated, fabric) -> None:
    """EX-33, where upstream takes it for a lack of memory, and retries."""
    allocator = make(handle_type="fabric")
    kept = allocator.allocate(4 * MIB)
    emulated.fail("cuMemCreate", "CUDA_ERROR_NOT_SUPPORTED")
    with pytest.raises(bfc.DriverError, match="NOT_SUPPORTED"):
        allocator.allocate(30 * MIB)
    assert allocator.sub_allocator.handle_type == "fabric"
    assert allocator.memory_stats()["num_alloc_retries"] == 0
    kept.free()


# -- peers -----------------------------------------------------------------------------------------


def test_a_peer_gets_what_is_mapped_and_what_will_be(make, emulated) -> None:
    """EX-38. Upstream makes a call for each device, ours one for all."""
    allocator = make()
    source = allocator.sub_allocator
    first = allocator.allocate(25 * MIB)
    emulated.clear()
    source.enable_peer(1)
    assert calls(emulated) == [("cuMemSetAccess", 2 * PAGE)]
    second, third = allocator.allocate(40 * MIB), allocator.allocate(512)
    for buffer in (first, second, third):
        raw_cuda.fill(buffer.ptr, 3, 100, device=1)
        assert raw_cuda.read(buffer.ptr, 100, device=1) == b"\3" * 100
    emulated.clear()
    source.enable_peer(1)
    assert calls(emulated) == []
    second.free()
    third.free()
    allocator.empty_cache()
    assert [name for name, _ in calls(emulated)] == ["cuMemUnmap", "cuMemRelease"] * 3
    first.free()


# -- failures --------------------------------------------------------------------------------------


def a_life(allocator: bfc.CachingAllocator) -> None:
    """Every kind of call, several times."""
    buffers = [allocator.allocate(n) for n in (30 * MIB, 50 * MIB, 1000, 20 * MIB)]
    buffers.pop(1).free()
    allocator.empty_cache()
    buffers.append(allocator.allocate(45 * MIB))
    for buffer in buffers:
        buffer.free()
    allocator.empty_cache()


@pytest.mark.parametrize("name", MAPPING)
@pytest.mark.parametrize("strict", [True, False])
def test_whichever_call_fails_nothing_is_lost(make, emulated, name: str, strict: bool) -> None:
    places = 0
    while True:
        allocator = make(strict=strict)
        emulated.clear()
        emulated.fail(name, "CUDA_ERROR_UNKNOWN", at=places + 1)
        said = None
        try:
            a_life(allocator)
        except bfc.SubAllocatorError as error:  # out of memory would be another
            said = str(error)  # the error itself keeps the buffers of a_life
        if said is None:
            break
        assert "CUDA_ERROR_UNKNOWN" in said
        places += 1
        gc.collect()
        allocator.check()
        a_life(allocator)
        allocator.empty_cache()
        assert (allocator.stats().bytes_in_use, allocator.stats().pool_bytes) == (0, 0)
        assert allocator.sub_allocator.live_bytes == 0
    assert places >= (2 if name in MAPPING[::6] else 3)
