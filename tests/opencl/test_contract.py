"""The contract of sub-allocators, on OpenCL buffers and on SVM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from suballocators.test_contract import *  # noqa: F403
from suballocators.test_contract import CAPACITY

import bfc


@pytest.fixture(params=["buffers", "svm"])
def source(request: pytest.FixtureRequest, context: Any) -> Iterator[bfc.SubAllocator]:
    source = bfc.OpenCLSubAllocator(context, svm=request.param == "svm", capacity=CAPACITY)
    yield source
    assert source.live_bytes == 0, "the test, or the source, lost a block"


def test_it_says_what_it_has_and_where(source) -> None:
    assert isinstance(source, bfc.SubAllocator)
    assert source.total_bytes == source.allocation_limit() == CAPACITY
    assert source.device == bfc.Device("opencl", 0)
    assert source.memory_info() == (CAPACITY, CAPACITY)
    assert source.supports_coalescing is False
    assert "64.00 MiB" in repr(source)
    assert len(repr(source)) < 80


def test_without_work_queued_there_is_no_fence(source) -> None:
    fence = source.fence(0)
    fence.wait()
    assert fence.done()
