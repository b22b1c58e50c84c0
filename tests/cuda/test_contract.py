"""The contract of sub-allocators, on every kind of CUDA memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from suballocators.test_contract import *  # noqa: F403
from suballocators.test_contract import CAPACITY

import bfc

DEVICE = 2  # which nobody else uses: pools of the driver keep memory, and give it up at the end
#: Tests that count on a source of 64 MiB: the emulated host's memory has no such end.
BOUNDED = ("refusal", "full", "capacity")


@pytest.fixture(params=["device", "managed", "pinned", "async"])
def source(request: pytest.FixtureRequest, emulated) -> Iterator[bfc.SubAllocator]:
    """On a device that has just as much free as the contract counts with."""
    of_the_host = request.param in ("pinned", "managed")
    if of_the_host and any(word in request.node.name for word in BOUNDED):
        pytest.skip("the emulated host's memory has no end")
    emulated.set_free(DEVICE, CAPACITY)
    source = bfc.CUDASubAllocator(DEVICE, kind=request.param)
    yield source
    assert source.live_bytes == 0, "the test, or the source, lost a block"
    emulated.set_others(DEVICE, 0)


def test_it_says_what_it_has_and_where(source) -> None:
    assert source.total_bytes >= source.allocation_limit() > 0
    assert source.device.kind in ("cuda", "cuda_managed", "cuda_host")
    assert len(repr(source)) < 80


def test_without_work_queued_there_is_no_fence(source) -> None:
    for stream in (0, 1, 2):
        assert source.fence(stream).done()
