"""The functions that PyTorch calls, called as it calls them: from C++, with a mutex held for pools.

PyTorch's own side is a small stand-in here. `make test-torch-cuda` runs PyTorch itself on the
emulated driver; with BFC_TEST_GPU=1 the last tests use it on a GPU, if it is installed.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import functools
import gc
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import raw_cuda
from cuda_machine import ON_GPU
from planned_client import learns_and_follows_a_plan, play
from torch_harness import Harness

import bfc
from bfc.integrations import _torch
from bfc.integrations import torch as integration

HELPERS = Path(__file__).parents[1] / "helpers"
MIB = 1 << 20


#: Each test a second time over PyTorch's policy.
both_policies = pytest.mark.parametrize(
    "make_cuda", [bfc.BFCAllocator, bfc.CachingAllocator], indirect=True, ids=["bfc", "caching"]
)


@pytest.fixture
def pool(library: Path, served) -> Harness:
    """What `mem_pool` gives to PyTorch."""
    return Harness(library, _torch.serve_pool(served))


def test_memory_comes_from_the_allocator_and_goes_back(served, whole) -> None:
    ptr = whole.alloc(1000)
    assert served.requested_size(ptr) == 1000
    assert served.stats().bytes_in_use == 1024
    whole.free(ptr)
    assert served.stats().bytes_in_use == 0


@both_policies
def test_a_hit_makes_no_driver_call(served, whole, emulated) -> None:
    whole.free(whole.alloc(1000))
    with emulated.counting() as calls:
        for _ in range(100):
            whole.free(whole.alloc(1000))
    assert calls == {}


@both_policies
def test_what_replace_gives_to_pytorch_follows_a_plan(served, whole) -> None:
    learns_and_follows_a_plan(served, lambda size: functools.partial(whole.free, whole.alloc(size)))


@both_policies
def test_memory_that_has_run_out_is_thrown_and_says_so(served, whole) -> None:
    kept = whole.alloc(40 * MIB)
    figures = r"asked for 41943040 bytes.*in use (41943040|67108864), .*limit of 67108864"
    with pytest.raises(MemoryError, match=figures):
        whole.alloc(40 * MIB)
    whole.free(kept)
    whole.free(whole.alloc(40 * MIB))


@both_policies
@pytest.mark.parametrize("same_stream", [True, False])
def test_native_threads_and_python_share_a_pool(served, whole, emulated, same_stream: bool):
    """Nobody but the allocator's lock keeps them apart. make tsan runs this, too."""
    seed, overwritten = 11, []
    with ExitStack() as stack:
        others = [0 if same_stream else stack.enter_context(raw_cuda.stream()) for _ in range(3)]

        def hammer() -> None:
            overwritten.append(whole.hammer([0, *others], rounds=3000, seed=seed))

        native = threading.Thread(target=hammer)
        native.start()
        while native.is_alive():
            served.allocate(5000).free()
            served.release_free_regions()
            served.snapshot()
            served.check()
        native.join()
        assert overwritten == [0], f"seed {seed}"
        served.release_free_regions()
        assert (served.stats().bytes_in_use, served.stats().pool_bytes) == (0, 0)


@both_policies
def test_far_too_many_bytes_ask_nobody(served, whole, emulated) -> None:
    with emulated.counting() as calls, pytest.raises(MemoryError, match="a size lies between"):
        whole.alloc((1 << 64) - 1)
    assert calls == {}
    whole.free(whole.alloc(1000))


def test_a_pool_answers_with_null(served, pool) -> None:
    kept = pool.alloc(40 * MIB)
    assert pool.alloc(40 * MIB) == 0
    pool.free(kept)
    assert served.stats().bytes_in_use == 0


def test_a_device_that_nobody_serves_says_what_to_do(whole, library) -> None:
    with pytest.raises(MemoryError, match="no allocator serves device 63"):
        whole.alloc(1000, device=63)
    assert Harness(library, 31).alloc(1000) == 0
    whole.free(0, device=63)
    whole.free(1234, device=-1)


def test_nothing_is_asked_for_zero_bytes(served, whole) -> None:
    assert whole.alloc(0) == 0
    whole.free(0)
    assert served.stats().num_allocs == 0


def test_a_closed_allocator_is_an_error_and_no_crash(served, whole, pool) -> None:
    ptr = whole.alloc(1000)
    served.close()
    with pytest.raises(MemoryError, match="closed"):
        whole.alloc(1000)
    assert pool.alloc(1000) == 0
    whole.free(ptr)


def test_each_pool_is_served_by_its_own_allocator(make_cuda, library) -> None:
    first, second = make_cuda(), make_cuda()
    pools = [Harness(library, _torch.serve_pool(allocator)) for allocator in (first, second)]
    ptrs = [pool.alloc(1000) for pool in pools]
    assert [first.requested_size(ptrs[0]), second.requested_size(ptrs[1])] == [1000, 1000]
    second.close()
    assert [pool.alloc(1000) > 0 for pool in pools] == [True, False]
    assert _torch.serve_pool(first) == _torch.serve_pool(first), "a number is never used up twice"


def test_one_allocator_serves_a_device(served, make_cuda) -> None:
    with pytest.raises(RuntimeError, match="another allocator serves device 0"):
        _torch.serve_device(make_cuda(), 0)


def test_only_memory_that_needs_no_gil_is_taken(make_cuda) -> None:
    simulated = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    for allocator in (simulated, make_cuda(kind="pinned")):
        with pytest.raises(ValueError, match="CUDASubAllocator"):
            _torch.serve_device(allocator, 5)
        with pytest.raises(ValueError, match="CUDASubAllocator"):
            _torch.serve_pool(allocator)
    simulated.close()


@both_policies
def test_a_driver_that_fails_is_not_out_of_memory(served, whole, emulated) -> None:
    emulated.fail("cuMemAlloc", "CUDA_ERROR_ILLEGAL_ADDRESS", times=None)
    with pytest.raises(MemoryError, match=r"CUDA_ERROR_ILLEGAL_ADDRESS.*\n.*compute-sanitizer"):
        whole.alloc(1000)
    assert emulated.count("cuMemAlloc") == 1, "no smaller block is asked for"
    emulated.clear()
    whole.free(whole.alloc(1000))


def test_growth_and_backpedal_are_those_of_the_allocator(served, whole, emulated, make_cuda):
    """The same regions as the way through Python asks for."""
    plain = make_cuda(allow_growth=True)
    sizes = [MIB, 3 * MIB, 5 * MIB, 200, 7 * MIB, 30 * MIB]
    for allocate in (whole.alloc, plain.allocate_raw):
        emulated.clear()
        emulated.fail("cuMemAlloc", at=2)
        ptrs = [allocate(size) for size in sizes]
        asked = [call.nbytes for call in emulated.calls if call.name == "cuMemAlloc"]
        if allocate == whole.alloc:
            expected = asked
            for ptr in ptrs:
                whole.free(ptr)
        else:
            plain.deallocate_many(ptrs)
    assert asked == expected
    assert len(asked) > 3
    assert served.stats().pool_bytes == plain.stats().pool_bytes


def test_free_regions_are_given_back_when_memory_runs_out(served, whole, emulated) -> None:
    for size in (2 * MIB, 4 * MIB, 8 * MIB):
        whole.free(whole.alloc(size))
    whole.free(whole.alloc(60 * MIB))
    assert emulated.count("cuMemFree") == 3
    assert served.stats().pool_bytes <= 64 * MIB


def test_a_region_that_the_driver_does_not_take_back_is_kept_for_close(served, whole, emulated):
    whole.free(whole.alloc(8 * MIB))
    emulated.fail("cuMemFree", "CUDA_ERROR_UNKNOWN")
    with pytest.raises(MemoryError):
        whole.alloc(60 * MIB)
    served.close()
    assert served.sub_allocator.live_bytes == 0


def test_a_refusal_and_its_wait_are_counted(make_cuda, library) -> None:
    """By the way that takes the GIL, and by that of pools, which does not."""
    for number in range(2):
        allocator = bfc.CachingAllocator(bfc.CUDASubAllocator(), memory_limit="64 MiB")
        if number == 0:
            _torch.serve_device(allocator, 0)
        caller = Harness(library, None if number == 0 else _torch.serve_pool(allocator))
        kept = caller.alloc(40 * MIB)
        if number == 0:
            with pytest.raises(MemoryError):
                caller.alloc(40 * MIB)
            _torch.serve_device(None, 0)
        else:
            assert caller.alloc(40 * MIB) == 0
        stats = allocator.memory_stats()
        names = ("num_ooms", "num_alloc_retries", "num_sync_all_streams")
        assert [stats[name] for name in names] == [1, 1, 1]
        allocator.deallocate_raw(kept)
        allocator.close()


# -- streams ---------------------------------------------------------------------------------------


def test_another_stream_waits_for_the_memorys_last_use(served, whole, emulated, side) -> None:
    whole.free(whole.alloc(1000))
    emulated.hold(0)
    ptr = whole.alloc(1000, stream=side)
    assert emulated.count("cuStreamWaitEvent") == 1, "the side stream waits for the home stream"
    again = whole.alloc(1000, stream=side)
    assert emulated.count("cuStreamWaitEvent") == 1, "once is enough: nothing was freed since"
    emulated.release(0)
    for one in (ptr, again):
        whole.free(one, stream=side)
    assert emulated.count("cuStreamWaitEvent") == 3, "the home stream waits for the side stream"


def test_each_threads_own_stream_waits(served, whole, emulated) -> None:
    whole.free(whole.alloc(1000))
    for _ in range(3):
        whole.free(whole.alloc(1000, stream=raw_cuda.PER_THREAD), stream=raw_cuda.PER_THREAD)
    assert emulated.count("cuStreamWaitEvent") == 6


def test_memory_freed_on_another_stream_is_safe_on_the_home_stream(
    served, whole, emulated, side
) -> None:
    """What is queued on the home stream for the block's next life runs after the side stream."""
    ptr = whole.alloc(4, stream=side)
    raw_cuda.fill(ptr, 5, 4, side)
    raw_cuda.synchronize(side)
    emulated.hold(side)
    with raw_cuda.queued_read(ptr, 4, side) as seen:
        whole.free(ptr, stream=side)
        assert whole.alloc(4) == ptr, "it is reused at once"
        raw_cuda.fill(ptr, 9, 4)
        assert bytes(seen) == bytes(4), "the copy has not run yet"
        emulated.release(side)
        assert bytes(seen) == bytes([5] * 4), "it came before the memory was written anew"
    whole.free(ptr)


@both_policies
def test_a_pool_waits_for_the_device_before_it_frees(served, pool, emulated) -> None:
    ptr = pool.alloc(2 * MIB)
    pool.free(ptr)
    assert emulated.count("cuCtxSynchronize") == 1


@pytest.mark.parametrize("recorded", [False, True])
def test_memory_is_kept_where_the_device_does_not_become_idle(
    served, pool, emulated, side, recorded
) -> None:
    """As while a graph is being captured: the next call in Python frees it, behind a fence."""
    ptr = pool.alloc(2 * MIB)
    if recorded:
        served.record_stream(ptr, side)
    emulated.fail("cuCtxSynchronize", "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED")
    pool.free(ptr)
    other = pool.alloc(2 * MIB)
    assert other != ptr
    assert served.stats().bytes_in_use == 2 * MIB, "asking is enough"
    pool.free(other)
    assert pool.alloc(2 * MIB) in (ptr, other)


@both_policies
def test_memory_that_record_stream_was_called_for_waits_for_the_device(
    served, whole, emulated, side
) -> None:
    ptr = whole.alloc(1000)
    served.record_stream(ptr, side)
    whole.free(ptr)
    assert emulated.count("cuCtxSynchronize") == 1
    assert served.stats().bytes_in_use == 0


def record_stream(ptr: int, stream: int) -> None:
    """What `Tensor.record_stream` calls."""
    function = ctypes.CDLL(_torch.__file__).bfc_torch_record_stream
    function.restype = None
    function(ctypes.c_void_p(ptr), ctypes.c_void_p(stream))


@both_policies
def test_a_recorded_stream_is_waited_for_before_memory_is_used_again(
    served, whole, emulated, side
) -> None:
    """Its work runs before what the stream of the allocation does next; the host waits for
    nothing, and nobody else does."""
    ptr = whole.alloc(4)
    raw_cuda.fill(ptr, 5, 4)
    raw_cuda.synchronize(0)
    emulated.hold(side)
    with raw_cuda.queued_read(ptr, 4, side) as seen:
        for _ in range(2):
            record_stream(ptr, side)
        record_stream(ptr, 0)  # its own stream
        record_stream(ptr + (1 << 40), side)  # not ours
        whole.free(ptr)
        assert whole.alloc(4) == ptr, "it is reused at once"
        raw_cuda.fill(ptr, 9, 4)
        assert bytes(seen) == bytes(4), "the copy has not run yet"
        emulated.release(side)
        assert bytes(seen) == bytes([5] * 4), "it came before the memory was written anew"
    assert emulated.count("cuCtxSynchronize") == 0
    calls = emulated.count("cuStreamWaitEvent")
    whole.free(ptr)
    assert emulated.count("cuStreamWaitEvent") == calls, "the next owner is not used by it"


# -- the GIL ---------------------------------------------------------------------------------------


# -- owners ----------------------------------------------------------------------------------------


def owner_of(allocator: bfc.Allocator, ptr: int) -> str:
    (found,) = [chunk.owner for chunk in allocator.snapshot().live_chunks() if chunk.ptr == ptr]
    return found


@both_policies
def test_memory_has_the_owner_of_a_scope_that_was_entered_here(served, whole) -> None:
    def owner_of_new() -> str:
        ptr = whole.alloc(1000)
        found = owner_of(served, ptr)
        served.check()
        whole.free(ptr)
        return found

    with bfc.owner("weights"):
        kept = whole.alloc(1000)
        with bfc.owner("inner"):
            assert owner_of_new() == "inner"
        assert owner_of_new() == "weights"
        contextvars.ContextVar("another").set(1)
        assert owner_of_new() == "weights"
        elsewhere = []
        thread = threading.Thread(target=lambda: elsewhere.append(owner_of_new()))
        thread.start()
        thread.join()
        assert elsewhere == [""]
        assert contextvars.copy_context().run(owner_of_new) == ""  # inherited
    assert owner_of_new() == ""
    assert served.stats().by_owner == {"weights": served.allocated_size(kept)}
    whole.free(kept)
    assert served.stats().by_owner == {}


@both_policies
def test_memory_of_one_asyncio_task_never_has_the_owner_of_another(served, whole) -> None:
    async def work(name: str) -> set[str]:
        found = set()
        for _ in range(20):
            with bfc.owner(name):
                await asyncio.sleep(0)
                ptr = whole.alloc(1000)
                found.add(owner_of(served, ptr))
                await asyncio.sleep(0)
                whole.free(ptr)
            ptr = whole.alloc(1000)
            assert owner_of(served, ptr) == ""
            whole.free(ptr)
            await asyncio.sleep(0)
        return found

    async def main() -> list[set[str]]:
        return await asyncio.gather(*(work(f"task {i}") for i in range(3)))

    assert asyncio.run(main()) == [{"task 0"}, {"task 1"}, {"task 2"}]


@both_policies
def test_a_context_that_is_gone_leaves_no_owner(served, whole) -> None:
    for _ in range(50):
        contextvars.Context().run(bfc.owner("abandoned").__enter__)
        ptr = contextvars.Context().run(whole.alloc, 1000)
        assert owner_of(served, ptr) == ""
        whole.free(ptr)
        gc.collect()


def test_no_deadlock_where_the_gil_is_held_and_the_mutex_wanted(library) -> None:
    """One thread asks a `MemPool` with the mutex held, and misses each time; another frees with the
    GIL held, and wants the mutex. Whoever took the GIL in an allocation would wait for ever."""
    script = f"""
        import sys, threading
        sys.path.insert(0, {str(HELPERS)!r})
        from pathlib import Path
        from bfc.testing import cuda_emulator as emulator
        {"" if ON_GPU else "emulator.load()"}
        import bfc, torch_harness
        from bfc.integrations import _torch
        source = bfc.CUDASubAllocator()
        allocator = bfc.BFCAllocator(source, memory_limit="64 MiB", allow_growth=True)
        whole = torch_harness.Harness(Path({str(library)!r}), _torch.serve_pool(allocator))
        def work():
            for n in range(300):
                first = whole.alloc(1 << 20)
                whole.free(first)
                whole.free(whole.alloc(62 << 20))   # a miss each time: what is free is given back
                whole.free(whole.alloc(63 << 20))
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads: thread.start()
        while any(thread.is_alive() for thread in threads):
            whole.free(0, with_gil=True)
        allocator.check()
        assert allocator.stats().bytes_in_use == 0
        print("done")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (run.stdout, run.returncode) == ("done\n", 0), run.stderr


@both_policies
def test_many_threads_and_python_beside_them(served, whole) -> None:
    faults: list[BaseException] = []

    def from_c() -> None:
        try:
            for n in range(500):
                whole.free(whole.alloc(100 + n % 5000))
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=from_c) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(500):
        served.allocate(300 + n % 3000).free()
    for thread in threads:
        thread.join()
    assert faults == []
    served.check()
    assert served.stats().bytes_in_use == 0


def test_python_waits_for_a_region_that_c_gives_back(served, whole, emulated) -> None:
    """Without the GIL: the thread that lets the device go on needs it. The limit then has room for
    one of the two threads, whichever comes first."""
    outcomes: list[bool] = []
    let_go: list[float] = []

    def collect() -> None:
        outcomes.append(is_served(lambda: whole.alloc(60 * MIB)))

    def let_go_on() -> None:
        let_go.append(time.monotonic())
        emulated.release(stream)

    with raw_cuda.stream(flags=0) as stream:
        ptr = whole.alloc(30 * MIB)
        emulated.hold(stream)
        raw_cuda.fill(ptr, 1, 4, stream)
        whole.free(ptr)
        collector = threading.Thread(target=collect)
        collector.start()  # its cuMemFree waits for the device
        while emulated.count("cuMemAlloc") < 1 or served.stats().pool_bytes:
            pass
        release = threading.Timer(0.2, let_go_on)
        release.start()
        begun = time.monotonic()
        outcomes.append(is_served(lambda: served.allocate_raw(40 * MIB)))
        answered = time.monotonic()
        collector.join()
        release.join()
        assert let_go[0] <= answered, "Python did not wait for the region"
        assert answered < begun + 8, "the patience of the emulated driver ended it"
        assert sorted(outcomes) == [False, True]
    assert emulated.complaints == []


def is_served(allocate: Callable[[], int]) -> bool:
    try:
        return allocate() != 0
    except MemoryError:
        return False


def test_threads_that_grow_at_once_keep_to_the_limit(make_cuda, library) -> None:
    """Between a region's arrival and its count another thread must not take its bytes for free."""
    for _ in range(20):
        allocator = make_cuda(memory_limit="4 MiB", allow_growth=True)
        _torch.serve_device(allocator, 0)
        whole = Harness(library)

        def take(whole: Harness = whole) -> None:
            for _ in range(5):
                try:
                    whole.free(whole.alloc(2 * MIB + 256))
                except MemoryError:
                    pass  # another thread has it

        threads = [threading.Thread(target=take) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert allocator.stats().peak_pool_bytes <= 4 * MIB
        _torch.serve_device(None, 0)
        allocator.close()


# -- expandable segments ---------------------------------------------------------------------------


@pytest.fixture
def expandable(make_cuda) -> Iterator[bfc.CachingAllocator]:
    """Memory is mapped with the GIL held, which a request of PyTorch's takes where it must map."""
    maps = bfc.CUDASubAllocator().supports_virtual_memory
    if not maps:
        pytest.skip(str(maps))
    # One of 1 GiB, and so are its reservations: under a sanitizer addresses are scarce.
    allocator = make_cuda(2 if not ON_GPU else 0, settings="expandable_segments:True")
    _torch.serve_device(allocator, 0)
    yield allocator
    _torch.serve_device(None, 0)


@pytest.fixture
def stitching(make_cuda) -> Iterator[bfc.BFCAllocator]:
    maps = bfc.CUDASubAllocator().supports_virtual_memory
    if not maps:
        pytest.skip(str(maps))
    allocator = make_cuda(2 if not ON_GPU else 0, virtual_memory=True)
    _torch.serve_device(allocator, 0)
    yield allocator
    _torch.serve_device(None, 0)


def test_a_pool_that_stitches_maps_for_pytorch(stitching, whole, emulated) -> None:
    small, large = whole.alloc(1000), whole.alloc(5 * MIB)
    assert (emulated.count("cuMemCreate"), emulated.count("cuMemAlloc")) == (4, 0)
    assert stitching.stats().bytes_reserved == 8 * MIB
    again = whole.alloc(100_000)
    assert emulated.count("cuMemCreate") == 4, "the first page has room"
    for ptr in (small, large, again):
        whole.free(ptr)
    stitching.check()
    assert stitching.release_free_regions() == 8 * MIB


def test_a_mem_pool_takes_regions_for_pytorch(stitching, library, emulated) -> None:
    """PyTorch asks it with its mutex held: no GIL is taken, and nothing is mapped."""
    pool = Harness(library, _torch.serve_pool(stitching))
    ptr = pool.alloc(2 * MIB)
    assert (emulated.count("cuMemCreate"), emulated.count("cuMemAlloc")) == (0, 1)
    pool.free(ptr)
    stitching.check()


stitched = pytest.mark.parametrize(
    "options",
    [{"virtual_memory": True}, {"stitch": True}],
    ids=["bfc", "caching"],
)


@pytest.fixture
def make_stitching(make_cuda, options) -> Iterator[bfc.Allocator]:
    """One of each policy, with a limit of 64 MiB, that serves device 0."""
    maps = bfc.CUDASubAllocator().supports_virtual_memory
    if not maps:
        pytest.skip(str(maps))
    policy = bfc.CachingAllocator if "stitch" in options else bfc.BFCAllocator
    allocator = policy(
        bfc.CUDASubAllocator(2 if not ON_GPU else 0), memory_limit="64 MiB", **options
    )
    _torch.serve_device(allocator, 0)
    yield allocator
    _torch.serve_device(None, 0)
    allocator.check()
    allocator.close()


@stitched
def test_holes_are_stitched_for_a_request_of_pytorchs(make_stitching, whole) -> None:
    blocks = [whole.alloc(4 * MIB) for _ in range(15)]
    for ptr in blocks[::2]:
        whole.free(ptr)
    joined = whole.alloc(24 * MIB)  # out of eight holes; 4 MiB are left of the limit
    for ptr in (joined, *blocks[1::2]):
        whole.free(ptr)


@stitched
def test_a_plan_in_pages_is_served_to_pytorch(make_stitching, whole) -> None:
    def allocate(size: int) -> Callable[[], object]:
        return functools.partial(whole.free, whole.alloc(size))

    with make_stitching.record_plan(iterations=2) as recording:
        play(make_stitching, allocate, 4)
    make_stitching.use_plan(recording.plan(), strict=True)
    make_stitching.release_free_regions()
    play(make_stitching, allocate, 3)
    stats = make_stitching.plan_stats()
    assert (stats["hits"], stats["departed_steps"], stats["agreement"]) == (9, 0, 1.0)
    assert make_stitching.stats().pool_bytes == 18 * MIB  # the largest has 17
    make_stitching.use_plan(None)
    make_stitching.release_free_regions()


@stitched
def test_memory_of_a_tag_that_pytorch_asked_for_sleeps(make_stitching, whole) -> None:
    device = 2 if not ON_GPU else 0
    with make_stitching.tag("weights"):
        kept = whole.alloc(8 * MIB)
    raw_cuda.fill(kept, 7, 4096, device=device)
    make_stitching.sleep(keep="host")
    assert make_stitching.sub_allocator.live_bytes == 0
    make_stitching.wake()
    assert raw_cuda.read(kept, 4096, device) == bytes([7]) * 4096
    whole.free(kept)


def test_a_pool_that_stitches_serves_pytorch_what_python_has_mapped(
    stitching, whole, emulated
) -> None:
    """Free pages of the range, a view that is kept, and a page of small chunks."""
    stitching.allocate(1000).free()
    blocks = [stitching.allocate(5 * MIB) for _ in range(12)]
    for block in blocks[::2]:
        block.free()
    view = stitching.allocate(20 * MIB)
    at = view.ptr
    view.free()
    with emulated.counting() as calls:
        joined, small = whole.alloc(20 * MIB), whole.alloc(1000)
    assert calls == {}
    assert joined == at
    with pytest.raises(MemoryError, match="limit of 67108864"):
        whole.alloc(12 * MIB)
    whole.free(joined)
    whole.free(small)
    for block in blocks[1::2]:
        block.free()
    whole.free(whole.alloc(60 * MIB))
    assert stitching.stats().bytes_in_use == 0


expandable_segments = pytest.mark.parametrize("make_cuda", [bfc.CachingAllocator], indirect=True)


@expandable_segments
def test_a_segment_expands_for_pytorch(expandable, whole, emulated) -> None:
    ptr = whole.alloc(3 * MIB)
    assert (emulated.count("cuMemAlloc"), emulated.count("cuMemCreate")) == (0, 1)
    mapped = expandable.allocate(30 * MIB)
    (region,) = expandable.snapshot().regions
    assert (region.reserved is not None, region.size) == (True, 40 * MIB)
    whole.free(ptr)
    mapped.free()
    expandable.check()
    expandable.empty_cache()
    assert expandable.sub_allocator.live_bytes == 0


@expandable_segments
def test_pytorch_gets_memory_that_python_has_mapped(expandable, whole, library, emulated) -> None:
    """What `expandable.allocate(n).free()` maps beforehand serves PyTorch's requests."""
    expandable.allocate(40 * MIB).free()
    pool = Harness(library, _torch.serve_pool(expandable))
    with emulated.counting() as calls:
        ptrs = [whole.alloc(15 * MIB), whole.alloc(15 * MIB), whole.alloc(10 * MIB)]
        whole.free(ptrs.pop())
        ptrs.append(pool.alloc(10 * MIB))
    assert calls == {}
    (region,) = expandable.snapshot().regions
    assert (region.reserved is not None, region.size) == (True, 40 * MIB)
    assert [expandable.requested_size(ptr) for ptr in ptrs] == [15 * MIB, 15 * MIB, 10 * MIB]
    for ptr in ptrs:
        pool.free(ptr)
    assert expandable.stats().bytes_in_use == 0


@expandable_segments
def test_cached_memory_that_is_mapped_goes_back_for_pytorch(expandable, whole, emulated) -> None:
    with raw_cuda.stream(2 if not ON_GPU else 0) as side:
        expandable.deallocate_raw(expandable.allocate_raw(40 * MIB, side))
        kept = whole.alloc(50 * MIB)
        assert emulated.count("cuMemUnmap") >= 1
        expandable.check()
        whole.free(kept)
        expandable.empty_cache()


@expandable_segments
def test_native_threads_allocate_while_python_maps_and_unmaps(expandable, whole, emulated) -> None:
    seed, overwritten, rounds = 12, [], 0
    with raw_cuda.stream(2) as side, raw_cuda.stream(2) as other:

        def hammer() -> None:
            """Again if Python has hardly had a turn meanwhile, as on a busy machine."""
            while rounds <= 10 and len(overwritten) < 50:
                overwritten.append(whole.hammer([0, side, other], rounds=200_000, seed=seed))

        native = threading.Thread(target=hammer)
        native.start()
        while native.is_alive():
            kept = [expandable.allocate(n << 10, rounds % 2 * side) for n in (900, 1500, 30)]
            rounds += 1
            kept.pop(rounds % 3).free()
            expandable.empty_cache()
            expandable.check()
            for buffer in kept:
                buffer.free()
            if rounds % 5 == 0:
                expandable.set_settings(
                    f"expandable_segments:{rounds % 10 == 0},"
                    f"large_segment_size_mb:{20 + rounds % 4},"
                    f"roundup_power2_divisions:{4 if rounds % 3 else 1}"
                )
        native.join()
        assert not any(overwritten), f"seed {seed}"
        assert rounds > 10
        expandable.empty_cache()
        assert expandable.stats().bytes_in_use == 0
        assert expandable.sub_allocator.live_bytes == 0


# -- what PyTorch is handed ------------------------------------------------------------------------


class StandIn(types.ModuleType):
    """The part of torch that the integration touches."""

    def __init__(self, *, available: bool = True) -> None:
        super().__init__("torch")
        self.__version__ = "0"
        self.log: list[object] = []
        log = self.log

        class CUDAPluggableAllocator:
            def __init__(self, path: str, alloc: str, free: str) -> None:
                library = ctypes.CDLL(path)
                self.functions = (getattr(library, alloc), getattr(library, free))
                log.append((alloc, free))

            def allocator(self) -> object:
                return types.SimpleNamespace(
                    set_reset_fn=lambda it: log.append(("empty", it)),
                    set_begin_allocate_to_pool=lambda it: log.append(("begin", it)),
                    set_end_allocate_to_pool_fn=lambda it: log.append(("end", it)),
                    set_release_pool=lambda it: log.append(("release", it)),
                    set_record_stream_fn=lambda it: log.append(("record", it)),
                )

        class MemPool:
            def __init__(self, allocator: object, **options: object) -> None:
                log.append(("pool", options))

        class use_mem_pool:  # noqa: N801
            def __init__(self, pool: object, device: int) -> None:
                self.device = device

            def __enter__(self) -> None:
                log.append(("enter", self.device))

            def __exit__(self, *exc_info: object) -> None:
                log.append(("exit", self.device))

        self.cuda = types.SimpleNamespace(
            is_available=lambda: available,
            MemPool=MemPool,
            use_mem_pool=use_mem_pool,
            memory=types.SimpleNamespace(
                CUDAPluggableAllocator=CUDAPluggableAllocator,
                change_current_allocator=lambda one: log.append(("change", type(one).__name__)),
            ),
        )


def test_a_pool_is_entered_and_left(monkeypatch, make_cuda) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch := StandIn())
    allocator = make_cuda()
    leave = integration.serve({0: allocator})
    leave()
    number = _torch.serve_pool(allocator)
    pair = (f"bfc_torch_pool_alloc_{number}", f"bfc_torch_pool_free_{number}")
    assert torch.log == [pair, ("pool", {}), ("enter", 0), ("exit", 0)]
    integration.serve({0: allocator})()
    assert torch.log[4:] == [("enter", 0), ("exit", 0)], "one pool is enough"


def test_replacing_hands_over_the_pair_that_throws_and_what_serves_graphs(
    monkeypatch, make_cuda
) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch := StandIn())
    integration.replace(make_cuda())
    _torch.serve_device(None, 0)
    functions = ctypes.CDLL(_torch.__file__)
    names = ["empty_cache", "begin_pool", "end_pool", "release_pool", "record_stream"]
    hooks = [
        (name.partition("_")[0], ctypes.cast(functions[f"bfc_torch_{name}"], ctypes.c_void_p).value)
        for name in names
    ]
    assert torch.log == [
        ("bfc_torch_alloc", "bfc_torch_free"),
        *hooks,
        ("change", "CUDAPluggableAllocator"),
    ]


def test_a_replacement_that_pytorch_refuses_leaves_nothing_behind(monkeypatch, make_cuda) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch := StandIn())

    def refuse(one: object) -> None:
        raise RuntimeError("Can't swap an already initialized allocator")

    torch.cuda.memory.change_current_allocator = refuse
    with pytest.raises(RuntimeError, match="initialized"):
        integration.replace(make_cuda())
    _torch.serve_device(make_cuda(), 0)
    _torch.serve_device(None, 0)


def test_a_missing_pytorch_says_what_to_install(monkeypatch, make_cuda) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(bfc.DeviceUnavailableError, match="pip install torch"):
        integration.mem_pool(make_cuda())
    monkeypatch.setitem(sys.modules, "torch", StandIn(available=False))
    with pytest.raises(bfc.DeviceUnavailableError, match="built without CUDA"):
        integration.mem_pool(make_cuda())


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: make test-gpu")
def test_a_tensor_of_the_real_pytorch_lies_in_a_pool(make_cuda) -> None:
    torch = pytest.importorskip("torch")
    allocator = make_cuda(memory_limit="256 MiB", allow_growth=True)
    with torch.cuda.use_mem_pool(integration.mem_pool(allocator)):
        tensor = torch.full((1000,), 3.0, device="cuda")
        assert allocator.stats().bytes_in_use >= 2 * MIB
        assert float(tensor.sum()) == 3000.0
