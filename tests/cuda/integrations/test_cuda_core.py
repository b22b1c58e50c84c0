"""Buffers of the real cuda.core in a pool."""

from __future__ import annotations

import gc
import threading

import pytest
from waiting import run_all

import bfc

from .conftest import account_for

MIB = 1 << 20


#: Each test a second time over PyTorch's policy.
both_policies = pytest.mark.parametrize(
    "make_cuda", [bfc.BFCAllocator, bfc.CachingAllocator], indirect=True, ids=["bfc", "caching"]
)


def to_host(core, buffer, stream) -> bytes:
    host = core.LegacyPinnedMemoryResource().allocate(buffer.size, stream=stream)
    buffer.copy_to(host, stream=stream)
    stream.sync()
    return bytes(memoryview(bfc_view(host)))


def bfc_view(host) -> object:
    import ctypes

    return (ctypes.c_char * host.size).from_address(int(host.handle))


@both_policies
def test_buffers_come_from_the_pool_and_hold_their_bytes(core, make_cuda) -> None:
    pool, device = make_cuda(), core.Device(0)
    stream = device.default_stream
    with bfc.use(pool, "cuda_core"):
        buffers = [device.allocate(n, stream=stream) for n in (1, 256, 1000)]
        account_for(pool, {int(buffer.handle): buffer.size for buffer in buffers})
        buffers[2].fill(7, stream=stream)
        other = device.allocate(1000, stream=stream)
        other.copy_from(buffers[2], stream=stream)
        assert to_host(core, other, stream) == b"\7" * 1000
        del buffers
        account_for(pool, {int(other.handle): 1000})
        other.close()
        account_for(pool, {})


def test_a_buffer_says_where_it_is(core, make_cuda) -> None:
    stream = core.Device(0).default_stream
    for kind in ("device", "managed", "async"):
        pool = make_cuda(kind=kind)
        resource = bfc.integrations.cuda_core.MemoryResource(pool)
        buffer = resource.allocate(100, stream=stream)
        assert buffer.memory_resource is resource
        assert (buffer.device_id, buffer.is_device_accessible) == (0, True)
        assert buffer.is_host_accessible == pool.host_accessible == (kind == "managed")
        assert buffer.is_managed == (kind == "managed")
        assert buffer.__dlpack_device__() == ((13, 0) if kind == "managed" else (2, 0))
        buffer.close()


def test_zero_bytes_take_nothing(core, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "cuda_core"):
        empty = core.Device(0).allocate(0, stream=core.Device(0).default_stream)
        assert (int(empty.handle), empty.size) == (0, 0)
        account_for(pool, {})
        empty.close()


def test_use_puts_back_the_very_resource_that_was_there(core, make_cuda) -> None:
    device = core.Device(0)
    before = device.memory_resource
    installed = bfc.use(make_cuda(), "cuda_core")
    assert bfc.integrations.cuda_core.is_ours(device)
    installed.put_back()
    assert device.memory_resource is before
    installed = bfc.use(make_cuda(), "cuda_core")
    own = core.LegacyPinnedMemoryResource()
    device.memory_resource = own
    installed.put_back()
    assert device.memory_resource is own, "what was set meanwhile stays"
    device.memory_resource = before


def test_a_device_without_a_resource_has_none_again(emulated, core, make_cuda) -> None:
    faults: list[object] = []

    def work() -> None:  # in a new thread a device has none yet
        device = core.Device(0)
        put_back = bfc.integrations.cuda_core.install_in_thread(make_cuda())
        put_back()
        faults.append(device._memory_resource)

    with emulated.counting() as calls:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert faults == [None]
    assert not [name for name in calls if "MemPool" in name], "the driver's pool is left alone"


def test_each_thread_installs_it_for_itself(core, make_cuda) -> None:
    pool, seen, faults = make_cuda(), [], []
    ours = bfc.integrations.cuda_core

    def work() -> None:
        try:
            device = core.Device(0)
            device.set_current()
            seen.append(ours.is_ours(device))
            put_back = ours.install_in_thread()
            buffer = device.allocate(100, stream=device.default_stream)
            seen.append(pool.requested_size(int(buffer.handle)))
            buffer.close()
            put_back()
            seen.append(ours.is_ours(device))
        except Exception as error:
            faults.append(error)

    with pytest.raises(ValueError, match=r"bfc.use\(allocator, 'cuda_core'\) first"):
        ours.install_in_thread()
    with bfc.use(pool, "cuda_core"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert (faults, seen) == ([], [False, 100, False])
    account_for(pool, {})


@both_policies
def test_many_threads_share_the_pool(core, make_cuda) -> None:
    pool = make_cuda()

    def work() -> None:
        device = core.Device(0)
        device.set_current()
        bfc.integrations.cuda_core.install_in_thread(pool)
        stream = device.create_stream()
        for n in range(1, 100):
            buffer = device.allocate(n * 50, stream=stream)
            buffer.fill(n, stream=stream)
            assert pool.requested_size(int(buffer.handle)) == n * 50
            buffer.close()
        stream.sync()

    assert run_all([work] * 4) == []
    account_for(pool, {})


def test_each_device_has_its_allocator(core, make_cuda, two_devices) -> None:
    pools = {0: make_cuda(0), 1: make_cuda(1)}
    with bfc.use(pools, "cuda_core"):
        second = core.Device(1)
        second.set_current()
        buffer = second.allocate(100, stream=second.default_stream)
        account_for(pools[0], {})
        account_for(pools[1], {int(buffer.handle): 100})
        assert buffer.device_id == 1
        buffer.close()
        core.Device(0).set_current()


# -- streams ---------------------------------------------------------------------------------------


def test_a_free_is_ordered_on_the_stream_of_the_allocation(emulated, core, make_cuda) -> None:
    pool, device = make_cuda(), core.Device(0)
    stream = device.create_stream()
    with bfc.use(pool, "cuda_core"):
        buffer = device.allocate(100, stream=stream)
        address = int(buffer.handle)
        emulated.hold(stream)
        buffer.fill(1, stream=stream)
        buffer.close()
        other = device.allocate(100, stream=stream)
        assert int(other.handle) != address
        assert pool.stats().bytes_waiting_for_streams == 256
        emulated.release(stream)
        again = device.allocate(100, stream=stream)
        assert int(again.handle) == address
        other.close()
        again.close()
    account_for(pool, {})


@both_policies
@pytest.mark.parametrize("how", ["close", "set_deallocation_stream"])
def test_a_free_is_ordered_on_the_stream_that_it_names_alone(
    emulated, core, make_cuda, how: str
) -> None:
    """The stream of the allocation may be gone by then: it must not be asked any more."""
    pool, device = make_cuda(), core.Device(0)
    first, last = device.create_stream(), device.create_stream()
    with bfc.use(pool, "cuda_core"):
        buffer = device.allocate(100, stream=first)
        address = int(buffer.handle)
        last.wait(first)
        emulated.hold(last)
        buffer.fill(1, stream=last)
        if how == "close":
            buffer.close(last)
            first.close()
        else:
            buffer.set_deallocation_stream(last)
            first.close()
            del buffer
        other = device.allocate(100, stream=device.default_stream)
        assert int(other.handle) != address
        emulated.release(last)
        other.close()
    account_for(pool, {})


def test_memory_for_another_stream_waits_for_what_was_freed_at_home(
    emulated, core, make_cuda
) -> None:
    pool, device = make_cuda(), core.Device(0)
    stream = device.create_stream()
    with bfc.use(pool, "cuda_core"):
        device.allocate(100, stream=device.default_stream).close()
        with emulated.counting() as calls:
            buffer = device.allocate(100, stream=stream)
        assert calls["cuStreamWaitEvent"] == 1
        with emulated.counting() as calls:
            device.allocate(100, stream=device.default_stream).close()
        assert not {"cuStreamWaitEvent", "cuEventRecord", "cuEventQuery"} & set(calls)
        buffer.close()


def test_a_graph_that_is_being_built_is_refused(core, make_cuda) -> None:
    device = core.Device(0)
    with bfc.use(make_cuda(), "cuda_core"):
        graph = device.create_graph_builder()
        graph.begin_building()
        with pytest.raises(TypeError, match="GraphMemoryResource"):
            device.allocate(100, stream=graph)
        graph.end_building()
        graph.close()


def test_what_is_no_stream_takes_nothing(core, make_cuda) -> None:
    pool = make_cuda()
    resource = bfc.integrations.cuda_core.MemoryResource(pool)
    for stream in (0, "s", None):
        with pytest.raises(TypeError):
            resource.allocate(100, stream=stream)
    with pytest.raises(TypeError):
        resource.allocate(100)
    account_for(pool, {})


# -- the bad ends ----------------------------------------------------------------------------------


def test_out_of_memory_is_ours_with_its_screen_of_text(core, make_cuda) -> None:
    device = core.Device(0)
    says = pytest.raises(bfc.OutOfMemoryError, match=r"asked for 8.00 MiB(?s:.*)try:")
    with bfc.use(make_cuda(memory_limit="4 MiB"), "cuda_core"), says:
        device.allocate(8 * MIB, stream=device.default_stream)


def test_a_closed_pool_says_so_and_its_buffers_go_in_peace(core, make_cuda) -> None:
    pool, device = make_cuda(), core.Device(0)
    with bfc.use(pool, "cuda_core"):
        buffer = device.allocate(100, stream=device.default_stream)
        pool.close()
        with pytest.raises(bfc.ClosedError):
            device.allocate(100, stream=device.default_stream)
        buffer.close()


def test_buffers_keep_a_pool_that_nobody_else_holds(core) -> None:
    pool = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB", allow_growth=True)
    source, device = pool.sub_allocator, core.Device(0)
    with bfc.use(pool, "cuda_core"):
        buffer = device.allocate(100, stream=device.default_stream)
    del pool
    gc.collect()
    assert source.live_bytes == 2 * MIB
    del buffer
    gc.collect()
    assert source.live_bytes == 0


def test_an_old_cuda_core_is_refused(core, make_cuda, monkeypatch) -> None:
    monkeypatch.setattr(core, "__version__", "0.9.0")
    bfc.integrations.cuda_core.resource_class.cache_clear()
    with pytest.raises(bfc.DeviceUnavailableError, match=r"0.9.0(?s:.*)cuda-core>=1"):
        bfc.use(make_cuda(), "cuda_core")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("last", ["", "del x", "a.close()"])
def test_the_end_of_the_process_is_quiet(core, run_alone, last: str) -> None:
    run_alone(
        "import cuda.core as core\n"
        "device = core.Device(0); device.set_current()\n"
        "a = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit='4 MiB')\n"
        "bfc.use(a, 'cuda_core')\n"
        "s = device.create_stream()\n"
        "x = device.allocate(100, stream=s); cycle = [device.allocate(100, stream=s)]\n"
        "cycle.append(cycle)\n"
        f"print(a.stats().bytes_in_use)\n{last}\n",
        says="512\n",
    )


@both_policies
def test_a_block_given_by_its_address_is_freed(core, make_cuda) -> None:
    pool, device = make_cuda(), core.Device(0)
    resource = bfc.integrations.cuda_core.MemoryResource(pool)
    for stream in (None, device.create_stream()):
        for closes in (True, False):
            address = pool.allocate_raw(7000)
            buffer = core.Buffer.from_handle(address, 7000, mr=resource, stream=stream)
            account_for(pool, {address: 7000})
            if closes:
                buffer.close()
                buffer.close()
            del buffer
            gc.collect()
            if stream is not None:
                stream.sync()
            account_for(pool, {})


def test_an_address_of_others_is_left_alone(core, make_cuda) -> None:
    pool, other = make_cuda(), make_cuda()
    resource = bfc.integrations.cuda_core.MemoryResource(pool)
    address = other.allocate_raw(7000)
    core.Buffer.from_handle(address, 7000, mr=resource).close()
    account_for(other, {address: 7000})
    freed = pool.allocate_raw(100)
    buffer = core.Buffer.from_handle(freed, 100, mr=resource)
    pool.deallocate_raw(freed)
    buffer.close()
    pool.check()


def test_pinned_memory_comes_from_a_pinned_pool(core, make_cuda) -> None:
    pinned, device = bfc.PinnedAllocator(bfc.HostSubAllocator()), core.Device(0)
    resource = bfc.integrations.cuda_core.MemoryResource(pinned)
    assert resource.is_host_accessible
    assert resource.is_device_accessible == pinned.is_pinned
    assert not resource.is_managed
    with pytest.raises(RuntimeError, match="belongs to no device"):
        _ = resource.device_id
    stream = device.create_stream()
    buffer = resource.allocate(1000, stream=stream)
    assert pinned.requested_size(int(buffer.handle)) == 1000
    assert bytes(memoryview(bfc_view(buffer)))[:0] == b""
    buffer.close(stream)
    given = pinned.allocate_raw(500)
    core.Buffer.from_handle(given, 500, mr=resource).close()
    assert resource.allocate(0, stream=stream).size == 0
    stream.sync()
    assert pinned.host_memory_stats()["active_requests.current"] == 0
