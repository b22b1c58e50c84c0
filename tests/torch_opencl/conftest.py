"""Tests with PyTorch on OpenCL. `make test-torch` runs them, in an environment of their own: they
need torch, which the other tests do without."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pocl
import pytest

if TYPE_CHECKING:
    import torch

if os.environ.get("BFC_TEST_TORCH") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def opencl() -> torch.device:
    """PyTorch's device "opencl" on PoCL, with a pool of 1 GiB. A process enables it once: tests of
    other arguments run in processes of their own."""
    from bfc.integrations import torch_opencl

    pocl.start()
    return torch_opencl.enable("1 GiB")


@pytest.fixture
def nothing_left(opencl: torch.device) -> Iterator[None]:
    """After the test no more memory may be allocated than before it."""
    import torch

    gc.collect()
    before = torch.accelerator.memory_allocated()
    yield
    gc.collect()
    assert torch.accelerator.memory_allocated() == before
