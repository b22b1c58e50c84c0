"""The libraries, each imported after the emulated driver is there, and put back after each test."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from cuda_machine import ON_GPU

import bfc
from bfc.testing import cuda_emulator as emulator


def library(name: str) -> Any:
    """A library, or the test is skipped. What it warns of at import is not our business."""
    if name in sys.modules:
        return sys.modules[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            pytest.skip(f"needs {name}: {error}")
    # Half a million objects that stay: without this each collection takes a tenth of a second.
    gc.collect()
    gc.freeze()
    return module


@pytest.fixture(autouse=True)
def nothing_in_use(account: None) -> Iterator[None]:
    yield
    bfc.use(None)


@pytest.fixture(autouse=True)
def before_the_pools(make_cuda: object, nothing_in_use: None) -> None:
    """The order of the ends: libraries are put back, then `make_cuda` closes its allocators."""


class CuPy(NamedTuple):
    """CuPy, and where it is: its runtime library refuses the emulated driver, so the two look-ups
    that need it are replaced there. On a GPU they are real, and `current` changes nothing."""

    module: Any
    current: SimpleNamespace

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        """Arrays are made on a stream that is not CuPy's."""
        external = self.current.stream = self.module.cuda.Stream.from_external(stream)
        try:
            with external if ON_GPU else nullcontext():
                yield
        finally:
            self.current.stream = None


@pytest.fixture
def cupy(machine: object, monkeypatch: pytest.MonkeyPatch) -> CuPy:
    module = library("cupy")
    current = SimpleNamespace(device=0, stream=module.cuda.Stream.null)
    if not ON_GPU:
        lookups = (lambda: current.device), (lambda: current.stream)
        monkeypatch.setattr(bfc.integrations.cupy, "lookups", lambda cupy: lookups)
    return CuPy(module, current)


class Numba(NamedTuple):
    cuda: Any
    driver: ModuleType


@pytest.fixture(params=["numba.cuda", "numba_cuda_mlir.numba_cuda"])
def numba(request: pytest.FixtureRequest, machine: object) -> Numba:
    """numba-cuda, and then numba-cuda-mlir."""
    return Numba(library(request.param), library(f"{request.param}.cudadrv.driver"))


@pytest.fixture
def core(machine: object) -> Any:
    """cuda.core, with device 0 current in this thread."""
    core = library("cuda.core")
    core.Device(0).set_current()
    return core


@pytest.fixture
def rmm(machine: object, monkeypatch: pytest.MonkeyPatch) -> Any:
    """RMM itself. Its resources work without a GPU. What asks the CUDA runtime does not: neither
    `DeviceBuffer` nor the look-up that is replaced here."""
    if not ON_GPU:
        monkeypatch.setattr(bfc.integrations.rmm, "lookup", lambda mr: lambda: None)
    return library("rmm")


@pytest.fixture
def two_devices() -> None:
    if bfc.cuda.device_count() < 2:
        pytest.skip("needs two devices")


Run = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def run_alone() -> Run:
    """Runs a script in a process of its own; it must end well and say nothing on stderr."""

    def run(script: str, *, says: str, **environment: str) -> None:
        load = "" if ON_GPU else emulator.preamble()
        home = str(Path(bfc.__file__).parents[1])
        paths = os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-c", f"{load}\nimport bfc, gc\n{script}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PYTHONPATH": paths, **environment},
        )
        assert done.stderr == ""
        assert (done.returncode, done.stdout) == (0, says)

    return run


def account_for(allocator: bfc.Allocator, blocks: dict[int, int]) -> None:
    """Every byte in use is one of these blocks, by address and size, and is known as such."""
    allocator.release_free_regions()  # looks after frees that were put off
    allocator.check()
    assert {ptr: allocator.requested_size(ptr) for ptr in blocks} == blocks
    assert sum(map(allocator.allocated_size, blocks)) == allocator.stats().bytes_in_use
