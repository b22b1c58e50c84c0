"""The libraries on a pool with expandable segments, whose memory is mapped page by page."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import bfc

from .conftest import account_for

MIB = 1 << 20
PAGE = 20 * MIB  # of PyTorch's large segments

#: PyTorch's policy alone has them.
pytestmark = pytest.mark.parametrize(
    "make_cuda", [bfc.CachingAllocator], indirect=True, ids=["caching"]
)


@pytest.fixture
def pool(make_cuda) -> bfc.Allocator:
    maps = bfc.CUDASubAllocator().supports_virtual_memory
    if not maps:
        pytest.skip(str(maps))
    return make_cuda(settings="expandable_segments:True", memory_limit="200 MiB")


def sizes(pool: bfc.Allocator) -> list[int]:
    """Of the runs of mapped memory. There is no other memory."""
    regions = pool.snapshot().regions
    assert all(region.reserved is not None for region in regions)
    return [region.size // MIB for region in regions]


def is_empty(pool: bfc.Allocator) -> bool:
    """After what is cached has gone back: no page and no address is kept."""
    account_for(pool, {})
    pool.empty_cache()
    return (pool.snapshot().regions, pool.sub_allocator.live_bytes) == ((), 0)


def test_numba_copies_across_pages(numba, pool) -> None:
    host = np.arange(30 * MIB // 4, dtype="u4")
    with bfc.use(pool, "numba"):
        first = numba.cuda.to_device(host)
        second = numba.cuda.device_array_like(first)
        assert sizes(pool) == [60], "the second array begins in the last page of the first"
        second.copy_to_device(first)
        part = second[PAGE // 4 - 5 : PAGE // 4 + 5]
        assert (part.copy_to_host() == host[PAGE // 4 - 5 : PAGE // 4 + 5]).all()
        assert (second.copy_to_host() == host).all()
        del first, second, part
        gc.collect()
        assert is_empty(pool)


def test_numba_grows_the_same_run(numba, pool, emulated) -> None:
    with bfc.use(pool, "numba"):
        kept = [numba.cuda.device_array(n * MIB, "u1") for n in (15, 25, 45)]
        assert sizes(pool) == [100]
        assert emulated.count("cuMemAddressReserve") == 1
        assert emulated.count("cuMemCreate") == 5
        assert emulated.count("cuMemAlloc") == 0
        del kept
        gc.collect()


def test_numba_is_refused_an_ipc_handle_of_mapped_memory(numba, pool) -> None:
    with bfc.use(pool, "numba"):
        array = numba.cuda.device_array(256, "u1")
        with pytest.raises(NotImplementedError, match=r"mapped(?s:.*)expandable_segments:False"):
            array.get_ipc_handle()
        pool.set_settings("expandable_segments:False")
        plain = numba.cuda.device_array(256, "u1")
        assert plain.get_ipc_handle() is not None, "an ordinary segment of the same pool"
        del array, plain
        gc.collect()


def test_cupy_arrays_live_in_mapped_memory(cupy, pool) -> None:
    with bfc.use(pool, "cupy"):
        arrays = [cupy.module.ndarray((n * MIB,), "u1") for n in (15, 25)]
        account_for(pool, {array.data.ptr: array.nbytes for array in arrays})
        assert arrays[0].data.ptr + 15 * MIB == arrays[1].data.ptr
        assert sizes(pool) == [40]
        part = arrays[1][5:]
        kept = arrays[1].data.ptr
        del arrays
        account_for(pool, {kept: 25 * MIB})
        pool.empty_cache()
        assert sizes(pool) == [40], "15 MiB before it are less than a page"
        del part
    assert is_empty(pool)


def test_cuda_core_fills_and_copies_across_pages(core, pool) -> None:
    device = core.Device(0)
    stream = device.default_stream
    with bfc.use(pool, "cuda_core"):
        first, second = (device.allocate(30 * MIB, stream=stream) for _ in range(2))
        first.fill(7, stream=stream)
        second.copy_from(first, stream=stream)
        host = core.LegacyPinnedMemoryResource().allocate(30 * MIB, stream=stream)
        second.copy_to(host, stream=stream)
        stream.sync()
        assert (np.from_dlpack(host) == 7).all()
        host.close()
        first.close()
        second.close()
        assert is_empty(pool)


def test_cuda_core_is_refused_a_buffer_for_another_process(core, pool) -> None:
    """Of this memory, and of any other of ours."""
    device = core.Device(0)
    with bfc.use(pool, "cuda_core"):
        buffer = device.allocate(256, stream=device.default_stream)
        with pytest.raises(RuntimeError, match="not IPC-enabled"):
            _ = buffer.ipc_descriptor
        buffer.close()


def test_rmm_takes_and_gives_mapped_memory(rmm, pool) -> None:
    resource = bfc.integrations.rmm.resource(pool)
    ptrs = [resource.allocate(n * MIB) for n in (15, 25)]
    assert sizes(pool) == [40]
    for ptr, n in zip(ptrs, (15, 25), strict=True):
        resource.deallocate(ptr, n * MIB)
    assert is_empty(pool)


def test_our_buffers_are_read_by_all(numba, core, pool) -> None:
    """Through `__cuda_array_interface__` and DLPack, over the border of two pages."""
    first = pool.allocate(19 * MIB)
    buffer = pool.allocate(4 * MIB).view("u1")
    buffer.from_host(np.full(4 * MIB, 9, "u1"))
    array = numba.cuda.as_cuda_array(buffer)
    assert (array.copy_to_host() == 9).all()
    other = core.utils.StridedMemoryView.from_dlpack(buffer, stream_ptr=-1)
    assert (other.ptr, other.shape) == (buffer.ptr, (4 * MIB,))
    del array, other, buffer, first
    gc.collect()
    assert is_empty(pool)
