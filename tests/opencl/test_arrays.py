"""pyopencl's arrays in a pool, under real kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from planned_client import learns_and_follows_a_plan

import bfc

MIB = 1 << 20


@pytest.fixture(params=["buffers", "svm"])
def pool(request: pytest.FixtureRequest, context: Any, make, queue) -> bfc.Allocator:
    source = bfc.OpenCLSubAllocator(context, svm=request.param == "svm", capacity=64 * MIB)
    return make(source, stream=queue)


def in_use(pool: bfc.Allocator) -> int:
    gc.collect()
    return pool.stats().bytes_in_use


def test_arrays_and_their_results_live_in_the_pool(pool, queue) -> None:
    import pyopencl.array as clarray

    make = bfc.integrations.pyopencl.allocator(pool)
    values = np.arange(10_000, dtype="f4")
    array = clarray.to_device(queue, values, allocator=make)
    assert in_use(pool) >= values.nbytes
    assert array.allocator is make
    doubled = 2 * array + 1
    assert doubled.allocator is make
    assert (doubled.get() == 2 * values + 1).all()
    part = array[100:200]
    place = array.base_data.block.ptr
    del array, doubled
    assert in_use(pool) > 0, "the part still holds the block"
    assert part.base_data.block.ptr == place
    assert ((part * 2).get() == 2 * values[100:200]).all()
    del part
    assert in_use(pool) == 0


def test_arrays_of_an_unordered_queue_are_right_where_it_is_named(pool, out_of_order) -> None:
    """What an expression needed for a moment is freed while its kernels wait. Without the queue's
    name the next array took that memory at once, and 20 of 20 runs were wrong, as on pyopencl's own
    MemoryPool."""
    import pyopencl.array as clarray

    make = bfc.integrations.pyopencl.allocator(pool, out_of_order)
    values = np.arange(100_000, dtype="f4")
    places = np.arange(0, 100_000, 7, dtype="i4")
    for _ in range(4):
        array = clarray.to_device(out_of_order, values, allocator=make)
        indices = clarray.to_device(out_of_order, places, allocator=make)
        result = 10 - array
        result[:] = 8 * array
        result[indices + 1] = (array * 2)[indices] - 10
        expected = 8 * values
        expected[places + 1] = 2 * values[places] - 10
        assert (result.get() == expected).all()


def test_arrays_follow_a_plan(context, queue) -> None:
    import pyopencl.array as clarray

    source = bfc.OpenCLSubAllocator(context, capacity=128 * MIB)
    with bfc.CachingAllocator(source, stream=queue) as pool:
        make = bfc.integrations.pyopencl.allocator(pool)

        def allocate(size: int) -> Callable[[], object]:
            held = [clarray.empty(queue, size, "u1", allocator=make)]
            return held.clear

        learns_and_follows_a_plan(pool, allocate)


def test_a_kernel_of_the_users_own_reads_and_writes(pool, context, queue, cl) -> None:
    kernel = cl.Program(
        context,
        "kernel void add(global const int *a, global const int *b, global int *c)"
        "{ int i = get_global_id(0); c[i] = a[i] + 10 * b[i]; }",
    ).build()
    numbers = np.arange(1000, dtype="i4")
    a, b, c = (pool.allocate(numbers.nbytes) for _ in range(3))
    a.from_host(numbers)
    b.from_host(numbers[::-1].copy())
    call = cl.Kernel(kernel, "add")
    call(queue, (1000,), None, *(bfc.integrations.pyopencl.mem(buffer) for buffer in (a, b, c)))
    queue.finish()
    assert (c.view("i4").to_host() == numbers + 10 * numbers[::-1]).all()


def test_a_dead_arrays_memory_is_used_again_while_its_kernels_wait(pool, queue, hold) -> None:
    """On one ordered queue: later work runs after it. No call waits."""
    import pyopencl.array as clarray

    make = bfc.integrations.pyopencl.allocator(pool)
    ones = np.ones(1000, "f4")
    array = clarray.to_device(queue, ones, allocator=make)
    clarray.zeros_like(array) + array  # compiles
    queue.finish()
    with hold(queue) as held:
        kept = array * 3
        place = kept.base_data.block.ptr
        result = kept + 1
        del kept
        again = clarray.empty(queue, 1000, np.float32, allocator=make)
        assert again.base_data.block.ptr == place
        again.fill(7)
        held.let_go()
        assert (result.get() == 4).all()
        assert (again.get() == 7).all()


def test_another_queues_arrays_come_back_behind_its_work(make, context, cl, queue, hold) -> None:
    import pyopencl.array as clarray

    pool = make()
    allocate = bfc.integrations.pyopencl.allocator(pool, cl.CommandQueue(context))
    of_queue = bfc.integrations.pyopencl.allocator(pool, queue)
    array = clarray.empty(queue, 1000, np.float32, allocator=of_queue)
    place = array.base_data.block.ptr
    with hold(queue) as held:
        del array
        gc.collect()
        other = allocate(4000)
        assert other.block.ptr != place, "its queue has not finished"
        held.let_go()
    queue.finish()
    del other
    assert in_use(pool) >= 0


def test_release_gives_the_block_back_early(pool) -> None:
    memory = bfc.integrations.pyopencl.allocator(pool)(5000)
    assert in_use(pool) >= 5000
    memory.release()
    assert in_use(pool) == 0
    assert memory.block is None
    del memory
    pool.check()


def test_nothing_is_allocated_for_nothing(pool, queue) -> None:
    import pyopencl.array as clarray

    make = bfc.integrations.pyopencl.allocator(pool)
    assert make(0) is None
    empty = clarray.empty(queue, 0, np.float32, allocator=make)
    assert empty.get().size == 0
    assert in_use(pool) == 0


def test_a_full_pool_is_a_memory_error(pool) -> None:
    make = bfc.integrations.pyopencl.allocator(pool)
    with pytest.raises(MemoryError, match="out of memory"):
        make(65 * MIB)


def test_arrays_in_cycles_are_collected_before_giving_up(pool, queue) -> None:
    import pyopencl.array as clarray

    make = bfc.integrations.pyopencl.allocator(pool)
    for _ in range(20):
        array = clarray.empty(queue, 20 * MIB, np.uint8, allocator=make)
        array.myself = array
        del array
    assert in_use(pool) <= 60 * MIB


def test_the_object_of_a_buffer_keeps_it(pool) -> None:
    buffer = pool.allocate(6000).from_host(bytes(range(250)) * 24)
    memory = bfc.integrations.pyopencl.mem(buffer.view("u1", (60, 100)))
    assert memory.size == 6000
    del buffer
    assert in_use(pool) >= 6000
    del memory
    assert in_use(pool) == 0
    assert bfc.integrations.pyopencl.mem(pool.allocate(0)) is None


def test_odd_arguments_are_errors_in_words(pool, context) -> None:
    freed = pool.allocate(100)
    freed.free()
    with pytest.raises(bfc.ClosedError, match="freed"):
        bfc.integrations.pyopencl.mem(freed)
    with pytest.raises(ValueError, match="OpenCLSubAllocator"):
        bfc.integrations.pyopencl.allocator(bfc.BFCAllocator(bfc.HostSubAllocator("1 MiB")))
    for wrong in (None, "pool", context):
        with pytest.raises(TypeError, match="expected an allocator"):
            bfc.integrations.pyopencl.allocator(wrong)
        with pytest.raises(TypeError, match="expected a buffer"):
            bfc.integrations.pyopencl.mem(wrong)
    closed = bfc.BFCAllocator(bfc.OpenCLSubAllocator(context))
    buffer = closed.allocate(100)
    closed.close()
    with pytest.raises(bfc.ClosedError):
        bfc.integrations.pyopencl.allocator(closed)
    with pytest.raises(bfc.ClosedError):
        bfc.integrations.pyopencl.mem(buffer)


def test_a_buffer_says_why_it_is_no_cuda_array(pool) -> None:
    buffer = pool.allocate(100)
    with pytest.raises(AttributeError, match="cannot be reached by a CUDA device"):
        _ = buffer.__cuda_array_interface__
    with pytest.raises(BufferError, match="opencl"):
        memoryview(buffer)
