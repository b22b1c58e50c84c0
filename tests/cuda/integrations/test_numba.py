"""The real numba-cuda and numba-cuda-mlir on a pool, through their External Memory Manager."""

from __future__ import annotations

import gc
import warnings
from functools import partial

import numpy as np
import pytest
from cuda_machine import ON_GPU
from waiting import run_all

import bfc
from bfc.integrations import _numba_default

from .conftest import account_for

MIB = 1 << 20


#: Each test a second time over PyTorch's policy.
both_policies = pytest.mark.parametrize(
    "make_cuda", [bfc.BFCAllocator, bfc.CachingAllocator], indirect=True, ids=["bfc", "caching"]
)


def address(array) -> int:
    return array.device_ctypes_pointer.value


def manager_of(numba):
    return numba.cuda.current_context().memory_manager


# -- arrays ----------------------------------------------------------------------------------------


@both_policies
def test_arrays_are_copied_both_ways(numba, make_cuda) -> None:
    pool = make_cuda()
    host = np.arange(1000, dtype="f4").reshape(10, 100)
    with bfc.use(pool, "numba"):
        array = numba.cuda.to_device(host)
        twin = numba.cuda.device_array((10, 100), "f4")
        twin.copy_to_device(array)
        account_for(pool, {address(array): 4000, address(twin): 4000})
        assert (twin.copy_to_host() == host).all()
        part = twin[2:5, 10:20]
        address_of_twin = address(twin)
        del array, twin
        account_for(pool, {address_of_twin: 4000})
        assert (part.copy_to_host() == host[2:5, 10:20]).all()
        del part
    account_for(pool, {})


@both_policies
def test_an_array_over_our_buffer_reads_and_writes_it(numba, make_cuda) -> None:
    pool, host = make_cuda(), np.arange(100, dtype="f4")
    array = numba.cuda.as_cuda_array(pool.allocate(400).view("f4"))
    array.copy_to_device(host)
    assert (array[::3].copy_to_host() == host[::3]).all()
    account_for(pool, {address(array): 400})
    del array
    gc.collect()
    account_for(pool, {})


def test_empty_arrays_take_nothing(numba, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "numba"):
        empty = numba.cuda.device_array(0)
        assert empty.copy_to_host().shape == (0,)
        account_for(pool, {})


def test_pinned_and_mapped_arrays_stay_numbas(numba, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "numba"):
        pinned, mapped = numba.cuda.pinned_array(10, "f4"), numba.cuda.mapped_array(10, "f4")
        pinned[:] = mapped[:] = np.arange(10)
        with numba.cuda.pinned(np.zeros(100)):
            pass
        with numba.cuda.mapped(np.zeros(100)):
            pass
        array = numba.cuda.to_device(pinned)
        account_for(pool, {address(array): 40})
        del array, pinned, mapped
        gc.collect()
        manager_of(numba).deallocations.clear()


def test_managed_arrays_ask_the_driver_unless_there_is_a_pool_for_them(numba, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "numba"):
        array = numba.cuda.managed_array(10, "f4")
        array[:] = 3
        account_for(pool, {})
        del array
        gc.collect()
    managed = make_cuda(kind="managed")
    with use_manager(numba, pool, managed=managed):
        array = numba.cuda.managed_array(10, "f4")
        array[:] = np.arange(10)
        assert array.sum() == 45
        account_for(managed, {address(array): 40})
        account_for(pool, {})
        of_host = numba.cuda.managed_array(10, "f4", attach_global=False)
        account_for(managed, {address(array): 40})
        del array, of_host
        for _ in range(3):  # at the same address again
            array = numba.cuda.managed_array(10, "f4")
            del array
        gc.collect()
    account_for(managed, {})


def use_manager(numba, *args: object, **options: object):
    """A manager with options, in the contexts that there are, until the `with` ends."""
    from contextlib import ExitStack

    from bfc.integrations._numba_contexts import install_in

    ours = bfc.integrations.numba.manager(*args, numba.driver, **options)
    stack = ExitStack()
    stack.callback(install_in(numba.driver, ours))
    return stack


def test_a_managed_pool_serves_both_kinds_of_array(numba, make_cuda) -> None:
    pool = make_cuda(kind="managed")
    with bfc.use(pool, "numba"):
        array, managed = numba.cuda.device_array(10, "f4"), numba.cuda.managed_array(10, "f4")
        account_for(pool, {address(array): 40, address(managed): 40})
        del array, managed
        gc.collect()
    with pytest.raises(ValueError, match="kind='managed'"):
        bfc.integrations.numba.manager(pool, numba.driver, managed=make_cuda())
    account_for(pool, {})


def test_host_arrays_given_to_a_kernel_are_staged_in_the_pool(numba, core, make_cuda) -> None:
    pool = make_cuda()
    numba.cuda.current_context()
    with bfc.use(pool, "numba"):
        before = pool.stats().num_allocs
        # What numba does for such an argument; dates because NumPy exports no others on a stream.
        stage = numba.cuda.cudadrv.devicearray._to_strided_memory_view
        stream = numba.driver._to_core_stream(numba.cuda.stream())
        with warnings.catch_warnings(action="ignore"):  # that it is a copy
            staged, is_copy = stage(np.zeros(5, "M8[s]"), stream)
        assert is_copy
        assert pool.stats().num_allocs == before + 1
        account_for(pool, {staged.ptr: 40})
        del staged
        gc.collect()
        account_for(pool, {})
    assert not bfc.integrations.cuda_core.is_ours(core.Device(0))


# -- what else a manager does ----------------------------------------------------------------------


def test_memory_info_counts_what_the_pool_has_and_may_take(numba, make_cuda) -> None:
    pool = make_cuda(memory_limit="8 MiB", allow_growth=True)
    with bfc.use(pool, "numba"):
        context = numba.cuda.current_context()
        assert context.get_memory_info() == (8 * MIB, 8 * MIB)
        array = numba.cuda.device_array(MIB, "u1")
        assert context.get_memory_info() == (7 * MIB, 8 * MIB)
        del array


def test_memory_info_heeds_what_others_took(emulated, numba, make_cuda) -> None:
    pool = make_cuda(memory_limit="8 MiB", allow_growth=True)
    with bfc.use(pool, "numba"):
        emulated.set_free(0, 3 * MIB)
        try:
            assert numba.cuda.current_context().get_memory_info() == (3 * MIB, 8 * MIB)
        finally:
            emulated.set_others(0, 0)


def test_out_of_memory_is_ours_with_its_screen_of_text(numba, make_cuda) -> None:
    with (
        bfc.use(make_cuda(memory_limit="4 MiB"), "numba"),
        pytest.raises(bfc.OutOfMemoryError, match=r"asked for 8.00 MiB(?s:.*)try:"),
    ):
        numba.cuda.device_array(8 * MIB, "u1")


def test_an_ipc_handle_is_of_the_region_with_an_offset(numba, make_cuda, monkeypatch) -> None:
    pool, asked = make_cuda(), []
    with bfc.use(pool, "numba"):
        one, two = numba.cuda.device_array(256, "u1"), numba.cuda.device_array(256, "u1")
        real = numba.driver.driver  # the emulator shares nothing, so the call stops here
        monkeypatch.setattr(real, "cuIpcGetMemHandle", lambda base: asked.append(int(base)))
        handle = two.get_ipc_handle()._ipc_handle
        assert asked == [pool.snapshot().regions[0].ptr]
        assert asked[0] + handle.offset == address(two)
        assert handle.size == 256
        del one, two, handle
        gc.collect()


@pytest.mark.parametrize("kind", ["async", "managed"])
def test_memory_that_cannot_be_shared_refuses_an_ipc_handle(numba, make_cuda, kind: str) -> None:
    with bfc.use(make_cuda(kind=kind), "numba"):
        array = numba.cuda.device_array(256, "u1")
        with pytest.raises(NotImplementedError, match=rf"'{kind}'.*kind='device'"):
            array.get_ipc_handle()
        del array


def test_defer_cleanup_and_explicit_frees_work(numba, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "numba"):
        with numba.cuda.defer_cleanup():
            array = numba.cuda.device_array(100, "u1")
            del array
        array = numba.cuda.device_array(100, "u1")
        array.gpu_data.free()
        account_for(pool, {})
        with pytest.raises(RuntimeError, match="dead"):
            array.gpu_data.free()


def test_a_finaliser_without_its_entry_does_nothing(numba, make_cuda) -> None:
    pool = make_cuda(kind="managed")
    with bfc.use(pool, "numba"):
        array = numba.cuda.managed_array(10, "f4")
        manager_of(numba).reset()  # clears the table of pointers, as a reset of the context does
        del array
        gc.collect()
    account_for(pool, {})


# -- streams ---------------------------------------------------------------------------------------


@both_policies
def test_memory_is_not_used_again_while_a_stream_of_numbas_may_use_it(
    emulated, numba, make_cuda
) -> None:
    pool = make_cuda()
    with bfc.use(pool, "numba"):
        stream = numba.cuda.stream()
        array = numba.cuda.device_array(100, "u1")
        first = address(array)
        emulated.hold(int(stream))
        array.gpu_data.memset(7, stream=stream)
        del array
        array = numba.cuda.device_array(100, "u1")
        assert address(array) != first
        del array
        assert pool.stats().bytes_waiting_for_streams > 0
        emulated.release(int(stream))
        array = numba.cuda.device_array(100, "u1")
        assert address(array) == first
        del array
    account_for(pool, {})


def test_unfenced_memory_is_used_again_at_once_and_costs_no_driver_call(
    emulated, numba, make_cuda
) -> None:
    pool = make_cuda()
    with use_manager(numba, pool, fenced=False):
        context = numba.cuda.current_context()
        first = int(context.memalloc(100).handle)
        with emulated.counting() as calls:
            for _ in range(5):
                assert int(context.memalloc(100).handle) == first
        assert not calls
    account_for(pool, {})


def test_memory_that_another_library_has_in_its_queue_is_waited_for(
    emulated, numba, make_cuda
) -> None:
    """A pool that belongs to another stream: numba's default one waits for what was freed there."""
    stream = numba.cuda.stream()
    pool = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB", stream=int(stream))
    with bfc.use(pool, "numba"):
        pool.deallocate_raw(pool.allocate_raw(100, int(stream)))
        with emulated.counting() as calls:
            array = numba.cuda.device_array(100, "u1")
        assert calls["cuStreamWaitEvent"] == 1
        del array
        gc.collect()
    account_for(pool, {})
    pool.close()


# -- installing ------------------------------------------------------------------------------------


def test_contexts_that_there_are_change_their_manager_and_get_it_back(
    machine, numba, make_cuda
) -> None:
    pool, driver = make_cuda(), numba.driver
    own = numba.cuda.to_device(np.arange(10))
    before, kept = driver._memory_manager, manager_of(numba)
    pending = address(numba.cuda.device_array(10))
    assert machine is None or pending in machine.live()
    installed = bfc.use(pool, "numba")
    assert machine is None or pending not in machine.live(), "nobody would flush it any more"
    ours = numba.cuda.to_device(np.arange(20))
    account_for(pool, {address(ours): 160})
    assert (own.copy_to_host() == np.arange(10)).all()
    address_of_own = address(own)
    del own  # goes to the driver, where it came from, and at once
    assert machine is None or address_of_own not in machine.live()
    bfc.use(None)
    assert (driver._memory_manager, manager_of(numba)) == (before, kept)
    assert (ours.copy_to_host() == np.arange(20)).all()
    own = numba.cuda.device_array(10)
    account_for(pool, {address(ours): 160})
    del ours, own
    gc.collect()
    account_for(pool, {})
    kept.deallocations.clear()
    assert repr(installed) == "<bfc.use: put back>"


def test_a_manager_that_was_set_meanwhile_stays(numba, make_cuda) -> None:
    driver = numba.driver
    numba.cuda.current_context()
    before = driver._memory_manager
    bfc.use(make_cuda(), "numba")
    own = type("Own", (driver.NumbaCUDAMemoryManager,), {})
    driver.set_memory_manager(own)
    bfc.use(None)
    assert driver._memory_manager is own
    driver._memory_manager = before
    assert type(manager_of(numba)) is driver.NumbaCUDAMemoryManager


def test_the_class_is_what_set_memory_manager_takes(numba, make_cuda) -> None:
    manager = bfc.integrations.numba.manager(make_cuda(), numba.driver)
    assert issubclass(manager, numba.driver.BaseCUDAMemoryManager)
    assert manager(context=None).interface_version == 1


def test_each_device_has_its_allocator(numba, make_cuda, two_devices) -> None:
    pools = [make_cuda(0), make_cuda(1)]
    with bfc.use(pools, "numba"), numba.cuda.gpus[1]:
        array = numba.cuda.to_device(np.arange(10))
        account_for(pools[0], {})
        account_for(pools[1], {address(array): 80})
        del array


def test_a_device_without_an_allocator_is_named(numba, make_cuda, two_devices) -> None:
    says = pytest.raises(bfc.DeviceUnavailableError, match=r"device 1.*cuda:0(?s:.*)try")
    with bfc.use(make_cuda(0), "numba"), numba.cuda.gpus[1], says:
        numba.cuda.device_array(10)


def test_a_closed_pool_says_so_and_its_arrays_go_in_peace(numba, make_cuda) -> None:
    pool = make_cuda()
    with bfc.use(pool, "numba"):
        array = numba.cuda.device_array(10)
        pool.close()
        with pytest.raises(bfc.ClosedError):
            numba.cuda.device_array(10)
        del array
        gc.collect()


def test_arrays_keep_a_pool_that_nobody_else_holds(numba, machine) -> None:
    pool = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit="4 MiB", allow_growth=True)
    source = pool.sub_allocator
    with bfc.use(pool, "numba"):
        array = numba.cuda.to_device(np.arange(10))
    del pool
    gc.collect()
    assert source.live_bytes == 2 * MIB
    assert (array.copy_to_host() == np.arange(10)).all()
    del array
    gc.collect()
    assert source.live_bytes == 0


def test_threads_share_the_pool(numba, make_cuda) -> None:
    pool = make_cuda()

    def work(start: int) -> None:
        for n in range(start, start + 30):
            host = np.full(n, n, "i4")
            assert (numba.cuda.to_device(host).copy_to_host() == host).all()

    with bfc.use(pool, "numba"):
        assert run_all([partial(work, 50 * n) for n in range(1, 5)]) == []
    gc.collect()
    account_for(pool, {})


# -- processes of their own ------------------------------------------------------------------------


@pytest.mark.sampled(1)
def test_the_environment_variable_makes_a_pool(numba, run_alone) -> None:
    run_alone(
        "import numpy, importlib\n"
        f"cuda = importlib.import_module({numba.cuda.__name__!r})\n"
        "x = cuda.to_device(numpy.arange(10))\n"
        "a = bfc.integrations.numba.allocator()\n"
        "print(a.stats().bytes_in_use, a.requested_size(x.device_ctypes_pointer.value))\n"
        "print(type(cuda.current_context().memory_manager).__name__, a.memory_limit)\n",
        says=f"256 80\nBFCMemoryManager {3 * MIB}\n",
        NUMBA_CUDA_MEMORY_MANAGER="bfc.integrations.numba",
        BFC_LIMIT="3 MiB",
    )


def test_a_limit_in_the_environment_may_be_a_fraction(machine, monkeypatch) -> None:
    read = _numba_default.limit
    for text, limit in {"0.5": 0.5, ".25": 0.25, "1.0": 1.0, "1": "1", " 2 GiB ": "2 GiB"}.items():
        monkeypatch.setenv("BFC_LIMIT", text)
        assert read() == limit
    monkeypatch.delenv("BFC_LIMIT")
    assert read() is None
    for text in ("much", "50%", "1.5", "0.0"):
        monkeypatch.setenv("BFC_LIMIT", text)
        with pytest.raises(ValueError, match=f"BFC_LIMIT: '{text}' is not .*such as '0.5'"):
            bfc.integrations.numba.allocator()
    monkeypatch.setattr(_numba_default, "pools", {})
    monkeypatch.setenv("BFC_LIMIT", "3 MiB")
    with bfc.integrations.numba.allocator() as pool:
        assert pool.memory_limit == 3 * MIB
        assert bfc.integrations.numba.allocator() is pool
    with bfc.integrations.numba.allocator() as another:
        assert another is not pool, "a closed one is made anew"


@pytest.mark.long
def test_after_a_reset_of_the_device_a_pool_says_that_it_is_lost(numba, run_alone) -> None:
    """numba itself does not come back from `cuda.close()`: cuda.core keeps the old context."""
    run_alone(
        "import numpy, importlib, types\n"
        f"cuda = importlib.import_module({numba.cuda.__name__!r})\n"
        "def make(): return bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit='4 MiB')\n"
        "a = make()\n"
        "bfc.use(a, 'numba')\n"
        "x = cuda.to_device(numpy.arange(10))\n"
        "kept = bfc.integrations.numba.allocator()\n"
        "cuda.close()\n"
        "class context: device = types.SimpleNamespace(id=0)\n"
        f"driver = importlib.import_module({numba.driver.__name__!r})\n"
        "manager = bfc.integrations.numba.manager(a, driver)(context=context)\n"
        "try: manager.memalloc(10)\n"
        "except bfc.DeviceUnavailableError as error: print('cuda:0 was reset' in str(error))\n"
        "print(bfc.integrations.numba.allocator() is kept)\n"
        "bfc.integrations.numba.manager(make(), driver)(context=context).memalloc(10)\n"
        "del x; gc.collect(); bfc.use(None); a.close()\n",
        says="True\nFalse\n",
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("last", ["", "bfc.use(None); a.close()"])
def test_the_end_of_the_process_is_quiet(numba, run_alone, last: str) -> None:
    run_alone(
        "import numpy, importlib\n"
        f"cuda = importlib.import_module({numba.cuda.__name__!r})\n"
        "a = bfc.BFCAllocator(bfc.CUDASubAllocator(), memory_limit='4 MiB')\n"
        "bfc.use(a, 'numba')\n"
        "x = cuda.to_device(numpy.arange(10)); cycle = [x, cuda.pinned_array(3)]\n"
        "cycle.append(cycle)\n"
        f"print(a.stats().bytes_in_use)\n{last}\n",
        says="256\n",
    )


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU: make test-gpu")
def test_on_a_gpu_a_kernel_writes_to_the_pool(numba, make_cuda) -> None:
    @numba.cuda.jit
    def double(array) -> None:
        i = numba.cuda.grid(1)
        if i < array.size:
            array[i] *= 2

    with bfc.use(make_cuda(), "numba"):
        array = numba.cuda.to_device(np.arange(100_000, dtype="f4"))
        double[400, 256](array)
        assert (array.copy_to_host() == np.arange(100_000, dtype="f4") * 2).all()
        del array
