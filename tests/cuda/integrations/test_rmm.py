"""RMM and a pool, either under the other. RMM is the real one; without a GPU its `DeviceBuffer` and
its own device resources, which ask the CUDA runtime, are left out."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from cuda_machine import ON_GPU
from plain_contract import PlainContract

import bfc

from .conftest import account_for, library

MIB = 1 << 20


# -- ours under RMM --------------------------------------------------------------------------------


#: Each test a second time over PyTorch's policy.
both_policies = pytest.mark.parametrize(
    "make_cuda", [bfc.BFCAllocator, bfc.CachingAllocator], indirect=True, ids=["bfc", "caching"]
)


@both_policies
def test_rmm_takes_its_memory_from_the_pool(rmm, make_cuda) -> None:
    pool = make_cuda()
    resource = bfc.integrations.rmm.resource(pool)
    blocks = {resource.allocate(n): n for n in (1, 256, 1000)}
    account_for(pool, blocks)
    for ptr, nbytes in blocks.items():
        resource.deallocate(ptr, nbytes)
    account_for(pool, {})
    assert resource.allocate(0) == 0
    resource.deallocate(0, 0)
    account_for(pool, {})


def test_use_sets_the_resource_of_each_device_and_puts_it_back(rmm, make_cuda, two_devices) -> None:
    pools = [make_cuda(0), make_cuda(1)]
    before = [rmm.mr.get_per_device_resource(device) for device in (0, 1)]
    with bfc.use(pools, "rmm"):
        for device, pool in enumerate(pools):
            resource = rmm.mr.get_per_device_resource(device)
            ptr = resource.allocate(100)
            account_for(pool, {ptr: 100})
            resource.deallocate(ptr, 100)
    assert [rmm.mr.get_per_device_resource(device) for device in (0, 1)] == before
    installed = bfc.use(pools, "rmm")
    rmm.mr.set_per_device_resource(0, before[0])
    rmm.mr.set_per_device_resource(1, own := rmm.mr.CudaMemoryResource())
    installed.put_back()
    assert rmm.mr.get_per_device_resource(1) is own, "what was set meanwhile stays"
    rmm.mr.set_per_device_resource(1, before[1])


@both_policies
def test_a_free_is_ordered_on_its_stream_alone(emulated, rmm, core, make_cuda) -> None:
    pool, device = make_cuda(), core.Device(0)
    resource = bfc.integrations.rmm.resource(pool)
    first, last = device.create_stream(), device.create_stream()
    stream = library("rmm.pylibrmm.stream").Stream
    ptr = resource.allocate(100, stream(first))
    last.wait(first)
    first.close()
    emulated.hold(last)
    core.Buffer.from_handle(ptr, 100).fill(1, stream=last)
    resource.deallocate(ptr, 100, stream(last))
    other = resource.allocate(100)
    assert other != ptr
    emulated.release(last)
    assert resource.allocate(100) == ptr
    resource.deallocate(other, 100)
    resource.deallocate(ptr, 100)
    account_for(pool, {})


def test_out_of_memory_is_a_memory_error_with_our_text(rmm, make_cuda) -> None:
    resource = bfc.integrations.rmm.resource(make_cuda(memory_limit="4 MiB"))
    with pytest.raises(MemoryError, match=r"asked for 8.00 MiB(?s:.*)in use(?s:.*)try:"):
        resource.allocate(8 * MIB)


def test_a_closed_pool_says_so_and_frees_do_nothing(rmm, make_cuda) -> None:
    pool = make_cuda()
    resource = bfc.integrations.rmm.resource(pool)
    ptr = resource.allocate(100)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        resource.allocate(100)
    resource.deallocate(ptr, 100)


def test_a_device_that_fails_at_a_free_does_not_fail_the_caller(
    emulated, rmm, core, make_cuda, monkeypatch
) -> None:
    pool, said = make_cuda(), []
    resource = bfc.integrations.rmm.resource(pool)
    stream = library("rmm.pylibrmm.stream").Stream(core.Device(0).create_stream())
    ptr = resource.allocate(100, stream)
    monkeypatch.setattr("sys.unraisablehook", said.append)
    emulated.fail("cuEventRecord", "CUDA_ERROR_ILLEGAL_ADDRESS")
    resource.deallocate(ptr, 100, stream)
    account_for(pool, {})  # release_free_regions tries again
    assert [type(it.exc_value) for it in said] == [bfc.DriverError]
    said.clear()


def test_the_resource_keeps_the_pool(rmm) -> None:
    pool = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB", allow_growth=True)
    source = pool.sub_allocator
    resource = bfc.integrations.rmm.resource(pool)
    del pool
    gc.collect()
    ptr = resource.allocate(100)
    assert source.live_bytes == 2 * MIB
    resource.deallocate(ptr, 100)
    del resource
    gc.collect()
    assert source.live_bytes == 0


def test_the_end_of_the_process_is_quiet(rmm, run_alone) -> None:
    replace = "bfc.integrations.rmm.lookup = lambda mr: lambda: None"
    run_alone(
        f"import rmm\n{'' if ON_GPU else replace}\n"
        "a = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit='4 MiB')\n"
        "bfc.use(a, 'rmm')\n"
        "x = rmm.mr.get_per_device_resource(0).allocate(100)\n"
        "print(a.stats().bytes_in_use)\n",
        says="256\n",
    )


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: make test-gpu")
def test_on_a_gpu_device_buffers_lie_in_the_pool(rmm, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "rmm"):
        buffer = rmm.DeviceBuffer.to_device(bytes(range(256)))
        account_for(pool, {buffer.ptr: 256})
        assert buffer.copy_to_host().tobytes() == bytes(range(256))
        del buffer
    account_for(pool, {})


# -- RMM under ours --------------------------------------------------------------------------------


def plain_resource(rmm, capacity: int):
    """A resource of RMM's over the driver's memory: RMM's own asks the CUDA runtime for it."""
    if ON_GPU:
        return rmm.mr.LimitingResourceAdaptor(rmm.mr.CudaMemoryResource(), capacity)
    cuda, live, lock = library("cuda.bindings.driver"), {}, threading.Lock()

    def allocate(nbytes: int, stream: object) -> int:
        with lock:
            if sum(live.values()) + nbytes > capacity:
                raise MemoryError("full")
            error, ptr = cuda.cuMemAlloc(nbytes)
            if error:
                raise MemoryError(error.name)
            live[int(ptr)] = nbytes
            return int(ptr)

    def deallocate(ptr: int, nbytes: int, stream: object) -> None:
        with lock:
            assert live.pop(ptr) == nbytes
            cuda.cuMemFree(ptr)

    return rmm.mr.CallbackMemoryResource(allocate, deallocate)


def source_over(rmm) -> bfc.SubAllocator:
    made = bfc.integrations.rmm.RMMSubAllocator(plain_resource(rmm, 64 * MIB))
    made.allocation_limit = lambda: 64 * MIB  # the contract's capacity
    return made


@pytest.fixture
def source(rmm) -> Iterator[bfc.SubAllocator]:
    made = source_over(rmm)
    yield made
    assert made.live_bytes == 0


class TestContract(PlainContract):
    @pytest.fixture(autouse=True)
    def _library(self, rmm) -> None:
        self.rmm = rmm

    def make(self) -> bfc.SubAllocator:
        return source_over(self.rmm)


def test_it_says_what_it_is(source) -> None:
    assert isinstance(source, bfc.SubAllocator)
    assert source.device == bfc.Device("cuda", 0)
    assert source.asynchronous
    assert source.native is None
    assert repr(source).startswith("RMM ")
    assert source.fence(0).done()


def test_a_region_is_taken_and_given_back_with_nothing_queued_on_it(emulated, source) -> None:
    with emulated.counting() as calls:
        block = source.alloc(256, 1000)
    assert calls["cuEventSynchronize"] == 1
    with emulated.counting() as calls:
        source.free(*block)
    assert list(calls).index("cuCtxSynchronize") < list(calls).index("cuMemFree")


def test_a_region_that_cannot_be_waited_for_goes_back(emulated, source) -> None:
    emulated.fail("cuEventRecord", "CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(bfc.DriverError, match="ILLEGAL_ADDRESS"):
        source.alloc(256, 1000)
    assert source.live_bytes == 0
    emulated.fail("cuCtxPushCurrent", "CUDA_ERROR_CONTEXT_IS_DESTROYED")
    with pytest.raises(bfc.SubAllocatorError, match="CONTEXT_IS_DESTROYED"):
        source.alloc(256, 1000)


def test_a_pool_on_rmm_serves_a_library(source, core) -> None:
    with bfc.BFCAllocator(source, memory_limit="8 MiB", allow_growth=True) as pool:
        device = core.Device(0)
        with bfc.use(pool, "cuda_core"):
            buffer = device.allocate(1000, stream=device.default_stream)
            account_for(pool, {int(buffer.handle): 1000})
            assert source.live_bytes == 2 * MIB
            buffer.close()


def test_another_error_of_rmm_is_a_suballocator_error(rmm, machine) -> None:
    def refuse(nbytes: int, stream: object) -> int:
        raise ValueError("out of order")

    mr = rmm.mr.CallbackMemoryResource(refuse, lambda ptr, nbytes, stream: None)
    source = bfc.integrations.rmm.RMMSubAllocator(mr)
    says = pytest.raises(bfc.SubAllocatorError, match=r"CallbackMemoryResource.*out of order")
    with bfc.BFCAllocator(source, memory_limit="1 MiB") as pool, says:
        pool.allocate(1000)
    assert source.live_bytes == 0
