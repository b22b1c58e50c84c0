"""`bfc.use`: several libraries at once, all or none, and everything put back."""

from __future__ import annotations

import gc
import importlib
import sys

import numpy as np
import pytest
from cuda_machine import ON_GPU

import bfc
from bfc import integrations

from .conftest import account_for, library

MIB = 1 << 20


#: Each test a second time over PyTorch's policy.
both_policies = pytest.mark.parametrize(
    "make_cuda", [bfc.BFCAllocator, bfc.CachingAllocator], indirect=True, ids=["bfc", "caching"]
)


class Library:
    """A stand-in for a file of bfc/integrations/: it notes what it is given."""

    def __init__(self, name: str, log: list) -> None:
        self.name, self.log, self.fails = name, log, None

    def serve(self, allocators: dict):
        if self.fails == "install":
            raise OSError(f"no {self.name}")
        numbers = [allocator.memory_limit // MIB for allocator in allocators.values()]
        self.log.append((self.name, *numbers))

        def put_back() -> None:
            if self.fails == "put back":
                raise OSError(f"{self.name} holds on")
            self.log.append((self.name, "back"))

        return put_back


@pytest.fixture
def log(monkeypatch) -> list:
    return []


@pytest.fixture
def fake(monkeypatch, log) -> dict[str, Library]:
    """All five libraries replaced."""
    fakes = {name: Library(name, log) for name in integrations.LIBRARIES}
    real = importlib.import_module

    def instead(name: str, *args: object):
        short = name.rpartition(".")[2]
        return fakes[short] if name == f"bfc.integrations.{short}" else real(name, *args)

    monkeypatch.setattr(integrations.importlib, "import_module", instead)
    return fakes


@pytest.fixture
def pools(make_cuda) -> list[bfc.BFCAllocator]:
    """Told apart by their limits, of 1 MiB and 2 and 3."""
    return [make_cuda(memory_limit=n * MIB, allow_growth=True) for n in (1, 2, 3)]


# -- one after the other ---------------------------------------------------------------------------


def test_libraries_are_installed_in_order_and_put_back_in_reverse(fake, log, pools) -> None:
    bfc.use(pools[0], "rmm", "cupy", "numba", "cupy")
    assert log == [("rmm", 1), ("cupy", 1), ("numba", 1)]
    del log[:]
    bfc.use(None)
    bfc.use(None)
    assert log == [("numba", "back"), ("cupy", "back"), ("rmm", "back")]


def test_a_later_use_replaces_an_earlier_one_and_its_end_brings_that_back(fake, log, pools) -> None:
    with bfc.use(pools[0], "cupy", "rmm"):
        with bfc.use(pools[1], "cupy"):
            assert log == [("cupy", 1), ("rmm", 1), ("cupy", "back"), ("cupy", 2)]
            del log[:]
        assert log == [("cupy", "back"), ("cupy", 1)]
        del log[:]
    assert log == [("rmm", "back"), ("cupy", "back")]


def test_ends_may_come_in_any_order_and_twice(fake, log, pools) -> None:
    first, second, third = (bfc.use(pool, "cupy") for pool in pools)
    del log[:]
    second.put_back()
    first.put_back()
    assert log == []
    assert repr(first) == repr(second) == "<bfc.use: put back>"
    assert repr(third) == "<bfc.use: cuda:0 in cupy>"
    third.put_back()
    third.put_back()
    assert log == [("cupy", "back")]


def test_none_ends_everything_and_a_with_block_over_it_does_no_more(fake, log, pools) -> None:
    with bfc.use(pools[0], "cupy"), bfc.use(pools[1], "numba"):
        bfc.use(None)
        assert log[-2:] == [("numba", "back"), ("cupy", "back")]
        del log[:]
    assert log == []


# -- all or none -----------------------------------------------------------------------------------


def test_where_the_third_fails_the_first_two_are_put_back(fake, log, pools) -> None:
    fake["numba"].fails = "install"
    with pytest.raises(OSError, match="no numba"):
        bfc.use(pools[0], "cupy", "rmm", "numba")
    assert log == [("cupy", 1), ("rmm", 1), ("rmm", "back"), ("cupy", "back")]
    del log[:]
    bfc.use(None)
    assert log == []


def test_where_a_replacement_fails_what_it_replaced_is_there_again(fake, log, pools) -> None:
    bfc.use(pools[0], "cupy", "numba")
    fake["rmm"].fails = "install"
    del log[:]
    with pytest.raises(OSError, match="no rmm"):
        bfc.use(pools[1], "cupy", "rmm")
    assert log == [("cupy", "back"), ("cupy", 2), ("cupy", "back"), ("cupy", 1)]


def test_one_that_cannot_be_put_back_does_not_hold_up_the_others(fake, log, pools) -> None:
    bfc.use(pools[0], "cupy", "numba", "rmm")
    fake["numba"].fails = "put back"
    del log[:]
    with pytest.raises(OSError, match="numba holds on"):
        bfc.use(None)
    assert log == [("rmm", "back"), ("cupy", "back")]
    fake["numba"].fails = None
    bfc.use(None)
    assert log[2:] == [("numba", "back")], "it is tried again"


def test_a_real_library_that_is_missing_leaves_the_others_as_they_were(
    core, make_cuda, monkeypatch
) -> None:
    before = core.Device(0).memory_resource
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(bfc.DeviceUnavailableError, match=r"cupy(?s:.*)pip install cupy-cuda13x"):
        bfc.use(make_cuda(), "cuda_core", "cupy")
    assert core.Device(0).memory_resource is before


@pytest.mark.parametrize(
    ("name", "modules", "install"),
    [
        ("cuda_core", ["cuda.core"], "'cuda-core>=1,<2'"),
        ("rmm", ["rmm"], "rmm-cu13"),
        ("torch", ["torch"], "torch"),
        ("numba", ["numba.cuda.cudadrv.driver", "numba_cuda_mlir.numba_cuda"], "'numba-cuda["),
    ],
)
def test_a_missing_library_says_what_to_install(
    make_cuda, monkeypatch, name: str, modules: list[str], install: str
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    integrations.cuda_core.resource_class.cache_clear()
    with pytest.raises(bfc.DeviceUnavailableError) as caught:
        bfc.use(make_cuda(), name)
    assert f"pip install {install}" in str(caught.value)


# -- what it refuses -------------------------------------------------------------------------------


def test_names_are_checked_before_anything_is_done(fake, log, pools) -> None:
    for names in (("cupy", "jax"), (), ("CuPy",)):
        with pytest.raises(ValueError, match="any of cupy, numba, cuda_core, torch, rmm"):
            bfc.use(pools[0], *names)
    with pytest.raises(ValueError, match="pass it no names"):
        bfc.use(None, "cupy")
    assert log == []


def test_allocators_are_checked_before_anything_is_done(fake, log, pools, make_cuda) -> None:
    host = bfc.BFCAllocator(bfc.HostSubAllocator("1 MiB"))
    simulated = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    closed = make_cuda()
    closed.close()
    refused = [
        (host, ValueError, "is on cpu:0: make it over bfc.CUDASubAllocator"),
        (simulated, ValueError, "is on simulated:0"),
        (make_cuda(kind="pinned"), ValueError, "is on cuda_host:0"),
        (closed, bfc.ClosedError, "for cuda:0 is closed"),
        (pools[:2], ValueError, "two allocators for device 0"),
        ({1: pools[0]}, ValueError, r"\[1\] are not the devices of the allocators: \[0\]"),
        ([], ValueError, "no allocator"),
        ({}, ValueError, "no allocator"),
        (5, TypeError, "an allocator, not int"),
        ("cupy", TypeError, "an allocator, not str"),
        ({0: "a"}, TypeError, "an allocator, not str"),
        (pools[0].sub_allocator, TypeError, "not CUDASubAllocator"),
    ]
    for allocator, error, text in refused:
        with pytest.raises(error, match=text):
            bfc.use(allocator, "cupy")
    assert log == []


def test_one_for_each_device_comes_as_a_list_or_by_ordinal(
    fake, log, make_cuda, two_devices
) -> None:
    first, second = make_cuda(0, memory_limit=MIB), make_cuda(1, memory_limit=2 * MIB)
    for allocators in ([first, second], {0: first, 1: second}, iter([first, second])):
        with bfc.use(allocators, "cupy") as installed:
            assert installed.allocators == {0: first, 1: second}
    assert log[::2] == [("cupy", 1, 2)] * 3


# -- where the CUDA runtime does not run -----------------------------------------------------------


@pytest.mark.skipif(ON_GPU, reason="needs the emulated driver")
@pytest.mark.parametrize("name", ["cupy", "rmm"])
def test_a_library_that_refuses_the_emulated_driver_is_refused_at_once(name, make_cuda) -> None:
    library(name)
    pool = make_cuda()
    with pytest.raises(bfc.DeviceUnavailableError, match="refuses the driver") as caught:
        bfc.use(pool, name)
    assert caught.value.args[0].endswith(
        'try: a GPU; or "numba" or "cuda_core", whose arrays work on the emulated driver'
    )
    assert repr(bfc.use(None)) == "<bfc.use: put back>"


# -- the real ones together ------------------------------------------------------------------------


def test_one_pool_under_four_libraries_accounts_for_each_byte(
    cupy, numba, core, rmm, make_cuda
) -> None:
    pool, device = make_cuda(), core.Device(0)
    with bfc.use(pool, "cupy", "numba", "cuda_core", "rmm"):
        a = cupy.module.ndarray((1000,), "f4")
        b = numba.cuda.to_device(np.arange(300, dtype="i8"))
        c = device.allocate(777, stream=device.default_stream)
        resource = rmm.mr.get_per_device_resource(0)
        d = resource.allocate(50)
        blocks = {a.data.ptr: 4000, b.device_ctypes_pointer.value: 2400, int(c.handle): 777, d: 50}
        account_for(pool, blocks)
        assert pool.stats().bytes_in_use == 4096 + 2560 + 1024 + 256
        assert (b.copy_to_host() == np.arange(300)).all()
        bfc.use(None)
        account_for(pool, blocks)
        del a, b
        c.close()
        resource.deallocate(d, 50)
        gc.collect()
    account_for(pool, {})
    assert pool.stats().pool_bytes == 0


@both_policies
def test_numba_reads_what_cupys_memory_holds(cupy, numba, make_cuda) -> None:
    class Exported:  # CuPy's own export asks the CUDA runtime
        def __init__(self, array) -> None:
            self.array = array
            data = {"data": (array.data.ptr, False), "stream": None, "version": 3}
            self.__cuda_array_interface__ = {"shape": (100,), "typestr": "<f4", **data}

    pool, host = make_cuda(), np.arange(100, dtype="f4")
    with bfc.use(pool, "cupy", "numba"):
        view = numba.cuda.as_cuda_array(Exported(cupy.module.ndarray((100,), "f4")))
        view.copy_to_device(host)
        account_for(pool, {view.device_ctypes_pointer.value: 400})
        assert (view.copy_to_host() == host).all()
        del view
        gc.collect()
    account_for(pool, {})


def test_importing_the_integrations_imports_no_library(run_alone) -> None:
    run_alone(
        "import sys, pkgutil, importlib\n"
        "names = [m.name for m in pkgutil.iter_modules(bfc.integrations.__path__)]\n"
        "names.remove('dask')  # the part of Dask that it extends imports RMM\n"
        "for name in names: getattr(bfc.integrations, name, None)\n"
        "found = {'cupy', 'numba', 'numba_cuda_mlir', 'cuda', 'rmm', 'torch', 'numpy'}\n"
        "print(sorted(found & set(sys.modules)), bfc.integrations.cupy.__name__)\n"
        "try: bfc.integrations.jax\n"
        "except AttributeError as error: print(error)\n",
        says="[] bfc.integrations.cupy\nmodule 'bfc.integrations' has no attribute 'jax'\n",
    )
    assert integrations.numba is importlib.import_module("bfc.integrations.numba")


def test_a_failure_in_the_body_is_not_hidden_by_a_pool_that_was_closed(make_cuda) -> None:
    pytest.importorskip("cuda.core")
    outer, inner = make_cuda(), make_cuda()
    layers = bfc.use(outer, "cuda_core"), bfc.use(inner, "cuda_core")
    outer.close()
    with pytest.raises(KeyError), layers[0], layers[1]:
        raise KeyError
    bfc.use(None)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_cuda_core_gets_its_own_back_in_any_order(make_cuda, order) -> None:
    cuda = pytest.importorskip("numba.cuda")
    cuda.device_array(1)  # a context to be swapped
    device = pytest.importorskip("cuda.core").Device(0)
    device.set_current()
    before = device._memory_resource
    one, two = make_cuda(), make_cuda()
    layers = [bfc.use(one, "numba"), bfc.use(one, "cuda_core"), bfc.use(two, "numba")]
    for number in order:
        layers[number].put_back()
    assert device._memory_resource is before
    bfc.use(None)
