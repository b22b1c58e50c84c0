"""Arrays of the real CuPy in a pool."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import numpy as np
import pytest
from cuda_machine import ON_GPU
from waiting import run_all

import bfc

from .conftest import account_for

MIB = 1 << 20


#: Each test a second time over PyTorch's policy.
both_policies = pytest.mark.parametrize(
    "make_cuda", [bfc.BFCAllocator, bfc.CachingAllocator], indirect=True, ids=["bfc", "caching"]
)


def block(array) -> tuple[int, int]:
    return array.data.mem.ptr, array.data.mem.size


@both_policies
def test_arrays_live_in_the_pool_until_their_last_view_goes(cupy, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "cupy"):
        arrays = [cupy.module.ndarray((n,), "f4") for n in (1, 64, 65, 1000, MIB)]
        account_for(pool, dict(map(block, arrays)))
        part = arrays[3][10:20]
        first = arrays[3].data.ptr
        assert part.data.ptr == first + 40
        del arrays
        account_for(pool, {first: 4000})
        del part
    account_for(pool, {})


def test_an_empty_array_takes_nothing(cupy, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "cupy"):
        empty = cupy.module.ndarray((0, 3), "f4")
        assert (empty.data.ptr, empty.data.device_id) == (0, 0)
        account_for(pool, {})


def test_it_serves_a_thread_alone_through_using_allocator(cupy, make_cuda) -> None:
    pool, cuda = make_cuda(), cupy.module.cuda
    before = cuda.get_allocator()
    with cuda.using_allocator(bfc.integrations.cupy.allocator(pool)):
        array = cupy.module.ndarray((100,), "u1")
        account_for(pool, {array.data.ptr: 100})
    assert cuda.get_allocator() == before
    del array
    account_for(pool, {})


def test_use_puts_back_the_very_allocator_that_was_there(cupy, make_cuda) -> None:
    cuda = cupy.module.cuda
    before = cuda.get_allocator()

    def own(nbytes: int) -> None:
        raise NotImplementedError

    cuda.set_allocator(own)
    try:
        with bfc.use(make_cuda(), "cupy"):
            assert cuda.get_allocator() is not own
        assert cuda.get_allocator() is own
        installed = bfc.use(make_cuda(), "cupy")
        cuda.set_allocator(before)
        installed.put_back()
        assert cuda.get_allocator() == before, "what was set meanwhile stays"
    finally:
        cuda.set_allocator(before)


def test_the_current_device_chooses_the_allocator(cupy, make_cuda, two_devices) -> None:
    pools = [make_cuda(0), make_cuda(1)]
    with bfc.use(pools, "cupy"):
        cupy.current.device = 1
        with cupy.module.cuda.Device(1) if ON_GPU else nullcontext():
            array = cupy.module.ndarray((100,), "u1")
        assert array.data.device_id == 1
        account_for(pools[0], {})
        account_for(pools[1], {array.data.ptr: 100})
        del array


def test_a_device_without_an_allocator_is_named(emulated, cupy, make_cuda) -> None:
    with bfc.use(make_cuda(0), "cupy"):
        cupy.current.device = 1
        with pytest.raises(bfc.DeviceUnavailableError, match=r"device 1.*one for cuda:0(?s:.)*try"):
            cupy.module.ndarray((100,), "u1")


@both_policies
def test_out_of_memory_is_ours_with_its_screen_of_text(cupy, make_cuda) -> None:
    with (
        bfc.use(make_cuda(memory_limit="4 MiB"), "cupy"),
        pytest.raises(MemoryError, match=r"asked for 8.00 MiB") as caught,
    ):
        cupy.module.ndarray((8 * MIB,), "u1")
    assert type(caught.value) is bfc.OutOfMemoryError
    assert (caught.value.requested, caught.value.limit) == (8 * MIB, 4 * MIB)
    assert "try:" in str(caught.value)


def test_a_closed_pool_says_so_and_its_arrays_go_in_peace(cupy, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "cupy"):
        array = cupy.module.ndarray((100,), "u1")
        pool.close()
        with pytest.raises(bfc.ClosedError):
            cupy.module.ndarray((100,), "u1")
        del array


def test_arrays_keep_a_pool_that_nobody_else_holds(machine, cupy) -> None:
    pool = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB", allow_growth=True)
    source = pool.sub_allocator
    with bfc.use(pool, "cupy"):
        array = cupy.module.ndarray((100,), "u1")
    del pool
    gc.collect()
    assert source.live_bytes == 2 * MIB
    del array
    gc.collect()
    assert source.live_bytes == 0


def test_memory_for_another_stream_comes_back_when_that_is_done(
    emulated, cupy, core, make_cuda
) -> None:
    pool, stream = make_cuda(), core.Device(0).create_stream()
    other = cupy.module.cuda.Stream.from_external(stream)
    with bfc.use(pool, "cupy"):
        cupy.current.stream = other
        first = cupy.module.ndarray((100,), "u1")
        address = first.data.ptr
        emulated.hold(stream)
        core.Buffer.from_handle(address, 100).fill(7, stream=stream)
        del first
        second = cupy.module.ndarray((100,), "u1")
        assert second.data.ptr != address
        assert pool.stats().bytes_waiting_for_streams == 256
        emulated.release(stream)
        third = cupy.module.ndarray((100,), "u1")
        assert third.data.ptr == address
        del second, third
        cupy.current.stream = None
    account_for(pool, {})


def test_the_stream_object_lives_until_its_memory_is_free(emulated, cupy, make_cuda) -> None:
    class Stream:
        ptr = 0

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.ptr

        def __del__(self) -> None:
            gone.append(self.ptr)

    gone: list[int] = []
    pool, stream = make_cuda(), Stream()
    Stream.ptr = 2  # the stream of this thread, which needs no making
    with bfc.use(pool, "cupy"):
        cupy.current.stream = stream
        array = cupy.module.ndarray((100,), "u1")
        cupy.current.stream = cupy.module.cuda.Stream.null
        del stream
        assert gone == []
        del array
        account_for(pool, {})
        assert gone == [2]


def test_the_default_stream_costs_no_driver_call(emulated, cupy, make_cuda) -> None:
    with bfc.use(make_cuda(), "cupy"):
        kept = cupy.module.ndarray((100,), "u1")
        with emulated.counting() as calls:
            for _ in range(10):
                cupy.module.ndarray((100,), "u1")
        assert not calls
        del kept


@both_policies
def test_threads_share_the_pool(cupy, make_cuda) -> None:
    pool = make_cuda()

    def work() -> None:
        for n in range(1, 200):
            array = cupy.module.ndarray((n * 50,), "u1")
            assert pool.requested_size(array.data.ptr) == n * 50

    with bfc.use(pool, "cupy"):
        assert run_all([work] * 4) == []
    account_for(pool, {})


def test_the_end_of_the_process_is_quiet(cupy, run_alone) -> None:
    replace = "bfc.integrations.cupy.lookups = lambda c: (lambda: 0, lambda: c.cuda.Stream.null)"
    run_alone(
        f"import cupy\n{'' if ON_GPU else replace}\n"
        "a = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit='4 MiB')\n"
        "bfc.use(a, 'cupy')\n"
        "x = cupy.ndarray((100,), 'u1'); cycle = [x]; cycle.append(cycle)\n"
        "print(a.stats().bytes_in_use)\n",
        says="256\n",
    )


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: make test-gpu")
def test_on_a_gpu_what_cupy_computes_in_the_pool_is_right(cupy, make_cuda) -> None:
    pool = make_cuda(allow_growth=True)
    with bfc.use(pool, "cupy"):
        x = cupy.module.arange(10_000, dtype="f4")
        y = (x * 2 + 1).sum()
        assert float(y) == float((np.arange(10_000, dtype="f4") * 2 + 1).sum())
        assert pool.stats().peak_bytes_in_use >= 40_000
        with cupy.module.cuda.Stream(non_blocking=True):
            z = cupy.module.sort(cupy.module.random.random(10_000))
        cupy.module.cuda.Device().synchronize()
        assert bool((z[1:] >= z[:-1]).all())
        del x, y, z


def test_it_is_put_back_inside_of_using_allocator_too(cupy, make_cuda) -> None:
    """There CuPy names the thread's own allocator when it is asked for the current one."""
    cuda = cupy.module.cuda
    before = cuda.get_allocator()
    layer = bfc.use(make_cuda(), "cupy")
    with cuda.using_allocator(cuda.MemoryPool().malloc):
        layer.put_back()
    assert cuda.get_allocator() == before


# Pools by CuPy's names -------------------------------------------------------------------------


def caching(limit: str = "64 MiB") -> bfc.CachingAllocator:
    return bfc.CachingAllocator(bfc.SimulatedSubAllocator(limit))


def test_the_pools_have_every_method_of_cupys_own(cupy):
    for ours, theirs in (
        (bfc.integrations.cupy.MemoryPool, cupy.module.cuda.MemoryPool),
        (bfc.integrations.cupy.PinnedMemoryPool, cupy.module.cuda.PinnedMemoryPool),
    ):
        public = {name for name in dir(theirs) if not name.startswith("_")}
        assert public <= set(dir(ours))


@both_policies
def test_cupy_takes_its_memory_through_malloc(cupy, make_cuda):
    allocator = make_cuda()
    pool = bfc.integrations.cupy.MemoryPool(allocator)
    with cupy.module.cuda.using_allocator(pool.malloc):
        array = cupy.module.ndarray((1000,), "f4")
    account_for(allocator, {array.data.ptr: 4000})
    assert pool.used_bytes() == allocator.stats().bytes_in_use == 4096
    assert (
        pool.total_bytes() == pool.used_bytes() + pool.free_bytes() == allocator.stats().pool_bytes
    )
    before = pool.n_free_blocks()
    assert before == 1
    del array
    assert (pool.used_bytes(), pool.n_free_blocks()) == (0, 1)
    pool.free_all_blocks(stream=cupy.module.cuda.Stream.null)
    assert pool.n_free_blocks() == len(list(allocator.snapshot().free_chunks()))
    if isinstance(allocator, bfc.CachingAllocator):
        assert (pool.total_bytes(), pool.free_bytes(), pool.n_free_blocks()) == (0, 0, 0)


def test_a_limit_is_exact_to_the_byte():
    allocator = caching("80 GiB")
    pool = bfc.integrations.cupy.MemoryPool(allocator)
    assert pool.get_limit() == 0
    for size in (1, 12345677, (1 << 30) - 1, (80 << 30) - 1):
        pool.set_limit(size=size)
        assert pool.get_limit() == allocator.memory_limit == size
    pool.set_limit(size=0)
    assert pool.get_limit() == 0
    pool.set_limit(fraction=0.5)
    assert pool.get_limit() == 40 << 30
    pool.set_limit()
    assert pool.get_limit() == 0
    pool.set_limit("100 GiB")  # more than there is
    assert pool.get_limit() == 0


def test_a_limit_holds_and_what_was_taken_stays():
    allocator = caching("1 GiB")
    pool = bfc.integrations.cupy.MemoryPool(allocator)
    held = allocator.allocate("40 MiB")
    pool.set_limit(size=30 << 20)
    assert pool.total_bytes() == 40 << 20
    with pytest.raises(bfc.OutOfMemoryError):
        allocator.allocate("20 MiB")
    pool.set_limit()
    allocator.allocate("20 MiB").free()
    held.free()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"size": 1, "fraction": 0.5}, ValueError),
        ({"size": -1}, ValueError),
        ({"fraction": 1.5}, ValueError),
        ({"fraction": -0.5}, ValueError),
        ({"size": "much"}, ValueError),
    ],
)
def test_a_limit_that_is_none_changes_nothing(arguments, error):
    pool = bfc.integrations.cupy.MemoryPool(caching())
    pool.set_limit(size=10 << 20)
    with pytest.raises(error):
        pool.set_limit(**arguments)
    assert pool.get_limit() == 10 << 20


def test_tensorflows_policy_has_its_limit_for_good():
    pool = bfc.integrations.cupy.MemoryPool(bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 GiB")))
    assert pool.get_limit() == 1 << 30
    with pytest.raises(NotImplementedError, match=r"memory_limit='1\.00 GiB'"):
        pool.set_limit(size=1 << 20)


def test_malloc_needs_memory_of_a_cuda_device(cupy):
    with pytest.raises(ValueError, match="memory of a CUDA device"):
        bfc.integrations.cupy.MemoryPool(caching()).malloc(100)


def test_with_several_devices_the_current_one_counts(cupy, make_cuda, two_devices):
    if ON_GPU:
        pytest.skip("the current device is changed on the emulated machine")
    pools = [make_cuda(0), make_cuda(1, memory_limit="32 MiB")]
    pool = bfc.integrations.cupy.MemoryPool(pools)
    kept = pools[1].allocate(1000)
    assert (pool.used_bytes(), pool.get_limit()) == (0, 64 << 20)
    cupy.current.device = 1
    assert (pool.used_bytes(), pool.get_limit()) == (1024, 32 << 20)
    kept.free()


def test_pinned_memory_by_cupys_names(cupy):
    pinned = bfc.PinnedAllocator(bfc.HostSubAllocator())
    pool = bfc.integrations.cupy.PinnedMemoryPool(pinned)
    pointer = pool.malloc(1000)
    assert isinstance(pointer, cupy.module.cuda.PinnedMemoryPointer)
    assert (pinned.requested_size(pointer.ptr), pointer.size()) == (1000, 1000)
    array = np.frombuffer(pointer, "u1", count=1000)
    array[:] = 7
    del pointer
    assert pool.n_free_blocks() == 0, "the array still uses it"
    del array
    gc.collect()
    assert pool.n_free_blocks() == 1
    pool.free_all_blocks()
    assert pool.n_free_blocks() == 0
    assert pinned.host_memory_stats()["allocations.current"] == 0


@pytest.mark.parametrize("wrong", [caching, lambda: 3])
def test_a_pinned_pool_is_made_of_a_pinned_allocator(wrong):
    with pytest.raises(TypeError, match="expected a PinnedAllocator"):
        bfc.integrations.cupy.PinnedMemoryPool(wrong())


def test_memory_can_be_freed_by_hand_and_twice(cupy, make_cuda):
    allocator = make_cuda()
    pool = bfc.integrations.cupy.MemoryPool(allocator)
    with cupy.module.cuda.using_allocator(pool.malloc):
        array = cupy.module.ndarray((1000,), "f4")
    memory = array.data.mem
    memory.free()
    account_for(allocator, {})
    other = allocator.allocate(4000)
    memory.free()
    assert memory.ptr == 0
    account_for(allocator, {other.ptr: 4000})
    del array, memory
    gc.collect()
    account_for(allocator, {other.ptr: 4000})


def test_pinned_memory_can_be_freed_by_hand_and_twice(cupy):
    pinned = bfc.PinnedAllocator(bfc.HostSubAllocator())
    pointer = bfc.integrations.cupy.PinnedMemoryPool(pinned).malloc(1000)
    pointer.mem.free()
    other = pinned.allocate(1000)
    pointer.mem.free()
    del pointer
    gc.collect()
    assert pinned.requested_size(other.ptr) == 1000


def test_the_old_name_of_free_all_blocks_works():
    allocator = caching()
    pool = bfc.integrations.cupy.MemoryPool(allocator)
    allocator.allocate("3 MiB").free()
    with pytest.warns(DeprecationWarning, match="use free_all_blocks"):
        pool.free_all_free()
    assert pool.total_bytes() == 0
