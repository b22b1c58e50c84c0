"""The CUDA suite: on the emulated driver of `bfc.testing`, or with BFC_TEST_GPU=1 on a real GPU.

A test that needs what only the emulator can do (a call that fails, a log, work held back) takes the
fixture `emulated`, and is skipped on a real GPU. All others run unchanged on both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import cuda_machine
import pytest
import raw_cuda
import torch_harness
import torch_runtime
from closing import close_all
from cuda_machine import ON_GPU

import bfc
from bfc.integrations import _torch
from bfc.testing import cuda_emulator as emulator

MakeCUDA = Callable[..., bfc.Allocator]


@pytest.fixture(scope="session", autouse=True)
def machine() -> emulator.Driver | None:
    """The emulated driver; None on a real GPU."""
    return cuda_machine.load()


@pytest.fixture(autouse=True)
def account(machine: emulator.Driver | None) -> Iterator[None]:
    """After each test nothing is held back, the driver had nothing to complain of, and all memory
    that the test took is back."""
    if machine is None:
        yield
        return
    if machine.totals != cuda_machine.TOTALS:  # tests of the emulator itself ran before
        cuda_machine.reset(machine)
    machine.clear()
    gc.collect()
    before = machine.live(), machine.reservations(), machine.live_handles()
    yield
    machine.release_all()
    gc.collect()
    assert machine.complaints == []
    after = machine.live(), machine.reservations(), machine.live_handles()
    assert after == before, "device memory or addresses were leaked"


@pytest.fixture
def emulated(machine: emulator.Driver | None) -> emulator.Driver:
    if machine is None:
        pytest.skip("needs the emulated driver")
    return machine


@pytest.fixture
def fabric(emulated: emulator.Driver) -> Iterator[None]:
    """Device 0 gives fabric handles."""
    emulated.set_attribute(0, raw_cuda.HAS_FABRIC_HANDLES, 1)
    yield
    emulated.set_attribute(0, raw_cuda.HAS_FABRIC_HANDLES, 0)


@pytest.fixture
def make_cuda(request: pytest.FixtureRequest) -> Iterator[MakeCUDA]:
    """Makes allocators over a CUDA device: `make_cuda(device, kind=..., **options)`, 64 MiB unless
    a limit is given. After the test each one is checked and closed.

    They are BFCAllocators, or with `@both_policies` CachingAllocators the second time."""
    policy: type[bfc.Allocator] = getattr(request, "param", bfc.BFCAllocator)
    allocators: list[bfc.Allocator] = []

    def make(device: int = 0, *, kind: str = "device", **options: object) -> bfc.Allocator:
        options.setdefault("memory_limit", "64 MiB")
        if policy is bfc.CachingAllocator:
            options.pop("allow_growth", None)  # it always grows
        allocators.append(policy(bfc.CUDASubAllocator(device, kind=kind), **options))
        return allocators[-1]

    yield make
    close_all(allocators)


@pytest.fixture
def side() -> Iterator[int]:
    """A stream that no other stream waits for."""
    with raw_cuda.stream() as stream:
        yield stream


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return torch_harness.build(tmp_path_factory.mktemp("torch"))


@pytest.fixture(scope="session")
def runtime() -> Path | None:
    """The folder of the libraries that are to be loaded first; None on a GPU."""
    return None if ON_GPU else torch_runtime.build()


@pytest.fixture(scope="session")
def run(runtime: Path | None) -> Iterator[torch_runtime.Run]:
    """Runs a script with PyTorch in a process of its own."""
    with torch_runtime.runner(runtime) as run:
        yield run


@pytest.fixture
def whole(library: Path) -> torch_harness.Harness:
    """What `replace` gives to PyTorch."""
    return torch_harness.Harness(library)


@pytest.fixture
def served(make_cuda: MakeCUDA) -> Iterator[bfc.Allocator]:
    """An allocator whose memory `replace` gives to PyTorch."""
    allocator = make_cuda(allow_growth=True)
    _torch.serve_device(allocator, 0)
    yield allocator
    _torch.serve_device(None, 0)
