"""The suite of `bfc.copy`: on the host, on PoCL, and on the emulated CUDA driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import cuda_machine
import pocl
import pytest

from bfc.copying import cuda_stream
from bfc.testing import cuda_emulator as emulator


@pytest.fixture(scope="session", autouse=True)
def machine() -> emulator.Driver | None:
    """The emulated driver; None on a real GPU."""
    return cuda_machine.load()


@pytest.fixture
def emulated(machine: emulator.Driver | None) -> Iterator[emulator.Driver]:
    """Three devices that reach each other, as no copy has seen them. Afterwards nothing is held,
    and the driver had nothing to complain of."""
    if machine is None:
        pytest.skip("needs the emulated driver")
    gc.collect()
    cuda_machine.reset(machine)
    cuda_stream.forget()
    yield machine
    machine.release_all()
    gc.collect()
    assert machine.complaints == []
    assert {it.kind for it in machine.allocations()} <= {"device", "host"}, "temporaries are left"


@pytest.fixture(scope="session")
def opencl() -> Any:
    """A context of PoCL's, and a queue."""
    pytest.importorskip("pyopencl")
    pocl.start()
    import pyopencl as cl

    devices = [
        device
        for platform in cl.get_platforms()
        if "Portable" in platform.name
        for device in platform.get_devices()
    ]
    if not devices:
        pytest.skip("PoCL is not installed")
    return cl.CommandQueue(cl.Context(devices[:1]))
