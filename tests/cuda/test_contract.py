"""The contract of sources, on every kind of CUDA memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from plain_contract import PlainContract

import bfc
from bfc.testing import SubAllocatorContract

CAPACITY = 64 << 20
DEVICE = 2  # which nobody else uses: pools of the driver keep memory, and give it up at the end


@pytest.fixture
def room(emulated) -> Iterator[None]:
    """A device has just as much free as the contract counts with."""
    emulated.set_free(DEVICE, CAPACITY)
    yield
    emulated.set_others(DEVICE, 0)


class OnCUDA:
    """What both kinds of memory have: that which is mapped, and others."""

    kind = "device"

    def make(self) -> bfc.SubAllocator:
        return bfc.CUDASubAllocator(DEVICE, kind=self.kind)

    def test_it_says_where_its_memory_lies(self, source) -> None:
        assert source.device.kind in ("cuda", "cuda_managed", "cuda_host")
        assert len(repr(source)) < 80

    def test_without_work_queued_a_fence_is_done(self, source) -> None:
        for stream in (0, 1, 2):
            assert source.fence(stream).done()


@pytest.mark.usefixtures("room")
class TestMappedCUDA(OnCUDA, SubAllocatorContract):
    """Memory of the kind "device"."""


@pytest.mark.usefixtures("room")
class TestCUDA(OnCUDA, PlainContract):
    @pytest.fixture(autouse=True, params=["managed", "pinned", "async"])
    def _chosen(self, request: pytest.FixtureRequest) -> None:
        self.kind = request.param
        self.bounded = self.kind == "async"  # the emulated host's memory has no end
